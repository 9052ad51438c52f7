"""`memfit.lightning`: the name under which users import what `memfit.integrations.lightning` has."""

from memfit.integrations.lightning import FitToMemory

__all__ = ["FitToMemory"]
