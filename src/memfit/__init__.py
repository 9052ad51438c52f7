"""Train PyTorch models that do not fit: give a number of bytes, be told before it runs, keep the same numbers.

The names below are the public face; everything else may change. They are loaded when first used: `import memfit`,
reading a plan and asking the command line for help take no torch, which alone takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from memfit import lightning as lightning
    from memfit import transformers as transformers
    from memfit.api import fit, frontier, measure, plan, recompute, record
    from memfit.applying import apply
    from memfit.engine import Engine
    from memfit.errors import (
        BatchError,
        BudgetError,
        CaptureError,
        ConfigError,
        EngineError,
        InfeasibleError,
        InputError,
        MemfitError,
        NonFiniteLossError,
        PlanFileError,
        Remedy,
        SnapshotError,
        SplitError,
    )
    from memfit.hardware.machine import Machine
    from memfit.integrations.deepspeed.training import from_deepspeed
    from memfit.largest import Largest, largest_batch, largest_length
    from memfit.optimizers.eight_bit import AdamW8bit, Lion8bit, SGD8bit, eight_bit
    from memfit.optimizers.lion import Lion
    from memfit.placing import Placement, place
    from memfit.planning import replan, smallest_budget
    from memfit.trackers.base import Tracker, tracker
    from memfit.values.bundle import TraceBundle
    from memfit.values.plan import Plan
    from memfit.values.trace import Trace

__version__: Final = "0.1.0"

__all__ = [
    "AdamW8bit",
    "BatchError",
    "BudgetError",
    "CaptureError",
    "ConfigError",
    "Engine",
    "EngineError",
    "InfeasibleError",
    "InputError",
    "Largest",
    "Lion",
    "Lion8bit",
    "Machine",
    "MemfitError",
    "NonFiniteLossError",
    "Placement",
    "Plan",
    "PlanFileError",
    "Remedy",
    "SGD8bit",
    "SnapshotError",
    "SplitError",
    "Trace",
    "TraceBundle",
    "Tracker",
    "apply",
    "eight_bit",
    "fit",
    "from_deepspeed",
    "frontier",
    "largest_batch",
    "largest_length",
    "measure",
    "place",
    "plan",
    "recompute",
    "record",
    "replan",
    "smallest_budget",
    "tracker",
]

_HOME: Final = {
    **dict.fromkeys(("fit", "frontier", "measure", "plan", "recompute", "record"), "memfit.api"),
    **dict.fromkeys(("Largest", "largest_batch", "largest_length"), "memfit.largest"),
    **dict.fromkeys(("replan", "smallest_budget"), "memfit.planning"),
    **dict.fromkeys(("AdamW8bit", "Lion8bit", "SGD8bit", "eight_bit"), "memfit.optimizers.eight_bit"),
    **dict.fromkeys(("Tracker", "tracker"), "memfit.trackers"),
    **dict.fromkeys(("Placement", "place"), "memfit.placing"),
    "Engine": "memfit.engine",
    "apply": "memfit.applying",
    "Lion": "memfit.optimizers.lion",
    "Machine": "memfit.hardware.machine",
    "Plan": "memfit.values.plan",
    "Trace": "memfit.values.trace",
    "TraceBundle": "memfit.values.bundle",
    "from_deepspeed": "memfit.integrations.deepspeed.training",
}

# Integrations with other libraries, each with an extra of its own: modules, loaded when first asked for.
_INTEGRATIONS: Final = ("lightning", "transformers")

if not TYPE_CHECKING:  # To a type checker this would make every misspelt name an Any.

    def __getattr__(name: str) -> object:
        """Load a public name when it is first asked for."""
        if name in _INTEGRATIONS:
            return import_module(f"memfit.{name}")
        if name not in __all__:
            message = f"module 'memfit' has no attribute {name!r}"
            raise AttributeError(message)
        value = getattr(import_module(_HOME.get(name, "memfit.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_INTEGRATIONS, "__version__"])
