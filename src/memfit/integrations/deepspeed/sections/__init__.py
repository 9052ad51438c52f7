"""The sections of a DeepSpeed configuration that memfit reads value by value, with DeepSpeed's defaults; one file for each, with what is refused in it.

Frozen values, torch-free. `refused_or_harmless` has the keys that nothing here acts on.
"""

from memfit.integrations.deepspeed.sections.checkpointing import ActivationCheckpointing
from memfit.integrations.deepspeed.sections.optimizer import Optimizer, Scheduler
from memfit.integrations.deepspeed.sections.precision import Bf16, Fp16, TorchAutocast
from memfit.integrations.deepspeed.sections.zero import OffloadOptimizer, OffloadParam, ZeroOptimization

__all__ = [
    "ActivationCheckpointing",
    "Bf16",
    "Fp16",
    "OffloadOptimizer",
    "OffloadParam",
    "Optimizer",
    "Scheduler",
    "TorchAutocast",
    "ZeroOptimization",
]
