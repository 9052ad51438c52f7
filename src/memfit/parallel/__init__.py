"""Several devices: stages of a model, pipelines over them."""
