"""DeepSpeed's configuration, read and trained: `read(path_or_dict)` gives a `DeepSpeedConfig`, checked and with the defaults of one named version.

    config = read("ds_config.json")
    config.batch                # samples per step, per micro-batch, and micro-batches per step: given or inferred as DeepSpeed does
    config.notices              # what DeepSpeed or memfit takes otherwise than the file may suggest
    config.arguments()          # keyword arguments for memfit.plan
    write(plan).save("ds.json") # the other way; what DeepSpeed cannot be told is in write(plan).left_out

`memfit.integrations.deepspeed.training` makes optimizers, schedules and engines of what is read.

Each key is honoured, or harmless and told in a notice, or refused with the reason: a key that is silently dropped trains for days on something
else. What DeepSpeed's own reader refuses is refused. This reader refuses more, where DeepSpeed's own takes what it then drops, or fails later:

* keys that do not exist, and `strict=False` takes them as DeepSpeed does: ignored, with a notice, where it ignores them (top level, optimizer,
  scheduler, activation_checkpointing, torch_autocast and more), refused where it refuses them (zero_optimization, fp16, bf16, offload_*);
* values of a wrong type where DeepSpeed does not look: batch sizes that are no whole numbers, truth values for numbers, null, a clipping below 0;
* offload_optimizer without a ZeRO stage and offload_param without stage 3, which do nothing, and nvme without nvme_path, which fails later;
* an optimizer without a type, parameters that its type does not have, types and schedules that do not exist: DeepSpeed fails later, or ignores them;
* torch_autocast without a dtype (what is taken then depends on the device), and beside fp16 or bf16;
* a configuration in base64, which only DeepSpeed's launcher writes;
* features that memfit has no counterpart for (`keys.REFUSED` and what `config` checks section by section).

It is more lenient in one thing: "auto" for batch sizes, which DeepSpeed leaves to Transformers and Accelerate, is kept as `AUTO`. `read(auto=...)`
takes the place of those two for the others.

Source: DeepSpeed's reader, deepspeed/runtime/config.py (https://github.com/deepspeedai/DeepSpeed), in the version `VERSION`.
"""

from memfit.integrations.deepspeed.batch import BatchSizes
from memfit.integrations.deepspeed.config import DeepSpeedConfig, read
from memfit.integrations.deepspeed.keys import VERSION
from memfit.integrations.deepspeed.sections import (
    ActivationCheckpointing,
    Bf16,
    Fp16,
    OffloadOptimizer,
    OffloadParam,
    Optimizer,
    Scheduler,
    TorchAutocast,
    ZeroOptimization,
)
from memfit.integrations.deepspeed.values import AUTO, Auto
from memfit.integrations.deepspeed.writing import Written, write

__all__ = [
    "AUTO",
    "VERSION",
    "ActivationCheckpointing",
    "Auto",
    "BatchSizes",
    "Bf16",
    "DeepSpeedConfig",
    "Fp16",
    "OffloadOptimizer",
    "OffloadParam",
    "Optimizer",
    "Scheduler",
    "TorchAutocast",
    "Written",
    "ZeroOptimization",
    "read",
    "write",
]
