"""Devices, lower memory tiers, and the links between them. Values: frozen, torch-free."""
