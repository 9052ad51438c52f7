"""A model and a sample batch -> Trace; this computer -> Machine."""
