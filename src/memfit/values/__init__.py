"""The values that the folders of memfit exchange: frozen, torch-free, JSON both ways."""
