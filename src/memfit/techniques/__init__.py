"""Techniques: ways to make a training step hold less, one file each; the list of them is `registry`."""
