"""Write a plan as a DeepSpeed configuration, and list what of the plan DeepSpeed has no keys for.

Every key that is written is one that DeepSpeed acts on, and is read by DeepSpeed as by `read`. 16 bits become torch_autocast, which is the same on
both sides; DeepSpeed's own fp16 and bf16 sections cast the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import batch, mapping
from memfit.integrations.deepspeed.sections import Optimizer, Scheduler
from memfit.values.plan import Plan, calls_again


@dataclass(frozen=True, slots=True)
class Written:
    """A plan in DeepSpeed's words.

    Attributes:
        content: the configuration.
        left_out: what the plan does that DeepSpeed cannot be told, in whole clauses.
    """

    content: Mapping[str, Any]
    left_out: tuple[str, ...] = field(default=())

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON."""
        Path(path).write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")


def write(
    plan: Plan,
    *,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    nvme_path: str | None = None,
) -> Written:
    """A plan as a DeepSpeed configuration for one rank.

    Args:
        plan: any.
        optimizer, scheduler: go into the configuration as they are; a plan knows neither.
        nvme_path: folder for what is offloaded to disk.

    Raises:
        ConfigError: the plan offloads to disk, and no folder is named.
    """
    choices = plan.choices
    accumulation = choices.micro_batches
    micro = max(1, choices.micro_batch_size)
    content: dict[str, Any] = {
        batch.TRAIN: micro * accumulation,
        batch.MICRO: micro,
        batch.ACCUMULATION: accumulation,
        "gradient_clipping": plan.clip_norm or 0.0,  # without the key DeepSpeed clips
    }
    for name, part in (("optimizer", optimizer), ("scheduler", scheduler)):
        if part is not None:
            content[name] = {"type": part.type, "params": dict(part.params)}
    if choices.precision != "full":
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[choices.precision]
        content["torch_autocast"] = {"enabled": True, "dtype": dtype}
    zero = _zero(plan, nvme_path)
    if zero:
        content["zero_optimization"] = zero
    if plan.script.swaps and plan.device_kind != "cpu":
        content["activation_checkpointing"] = {"cpu_checkpointing": True}
    return Written(content, tuple(_left_out(plan, optimizer)))


def _zero(plan: Plan, nvme_path: str | None) -> dict[str, Any]:
    choices = plan.choices
    on_disk = choices.state_place == "disk" or (choices.streamed and plan.device_kind == "cpu")
    if on_disk and nvme_path is None:
        raise ConfigError("the plan offloads to disk: name the folder, nvme_path=...")
    below: dict[str, Any] = {"device": "nvme", "nvme_path": nvme_path} if on_disk else {"device": "cpu"}
    if choices.streamed:
        return {"stage": 3, "offload_param": below, "offload_optimizer": below}
    if choices.state_place == "device":
        return {}
    # DeepSpeed brings state to the disk at stage 3 alone.
    return {"stage": 3 if on_disk else 2, "offload_optimizer": below}


def _left_out(plan: Plan, optimizer: Optimizer | None) -> Iterator[str]:
    choices, script = plan.choices, plan.script
    yield f"the budget of {plan.budget_bytes} bytes: DeepSpeed has no key for a budget"
    if optimizer is None:
        yield "the optimizer: a plan holds no functions; give it to deepspeed.initialize, or to write()"
    if script.repeated_calls:
        yield (
            f"recomputation, {script.recomputations} operations of each micro-batch in {script.whole_calls} whole calls of modules: DeepSpeed does it where "
            f"the model makes these calls through deepspeed.checkpointing.checkpoint ({calls_again(script)}), and nothing in a configuration switches it on"
        )
    elif script.recomputations:
        yield (
            f"recomputation, {script.recomputations} operations of each micro-batch: DeepSpeed recomputes where the model calls "
            "deepspeed.checkpointing.checkpoint, and nothing in a configuration switches it on"
        )
    if script.swaps:
        number = len(script.swaps)
        yield (
            f"activation offloading, {number} storage{'s' if number > 1 else ''} of each micro-batch: activation_checkpointing.cpu_checkpointing moves what "
            "the model's own checkpoints keep, and nothing else"
        )
    if choices.micro_batches > 1:
        yield (
            f"the weights of micro-batches ({choices.weights}): DeepSpeed counts each alike, and takes all of {choices.micro_batch_size} samples; "
            "the same step where they divide the batch evenly and hold as much"
        )
    yield from mapping.left_out(choices)
