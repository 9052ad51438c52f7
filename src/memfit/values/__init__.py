"""The values that rooms hand each other: frozen, torch-free, JSON both ways."""
