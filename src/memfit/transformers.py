"""`memfit.transformers`: the name under which users import what `memfit.integrations.transformers` has."""

from memfit.integrations.transformers import FitToMemory, fit

__all__ = ["FitToMemory", "fit"]
