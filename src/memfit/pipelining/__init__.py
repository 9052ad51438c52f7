"""Pipelines: where a model is cut for several devices, what each stage runs again, what each rank will hold and a step take; and the model as a rank has it."""
