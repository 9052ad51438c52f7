"""What the hardware offers: devices, the tiers below them, and the links between. Values: frozen, torch-free."""
