"""What training a model would take, from its configuration and the name of a GPU alone: no data, no weights, no GPU."""
