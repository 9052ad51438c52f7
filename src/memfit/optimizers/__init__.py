"""Optimizers whose state takes fewer bytes of the device, and what is known of torch's own."""
