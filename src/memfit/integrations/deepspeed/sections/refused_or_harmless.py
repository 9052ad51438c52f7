"""The keys that memfit does not act on: features that it refuses where they are switched on, and keys that have no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import keys
from memfit.integrations.deepspeed.values import ConfigReader, shown


def check_switches(given: Mapping[str, Any]) -> None:
    """See that nothing is switched on that memfit has no counterpart for.

    Raises:
        ConfigError: something is; says why it cannot be honoured.
    """
    for key, (switches, reason) in keys.REFUSED.items():
        if key not in given:
            continue
        section = given[key]
        if not isinstance(section, Mapping):
            raise ConfigError(f"{key}: expected keys and values, found {shown(section)}")
        on = [
            name
            for name, off in switches.items()
            if section.get(name, off) not in (off, False, None, "auto", *keys.IDLE.get(name, ()))
        ]
        if on or not switches:
            raise ConfigError(f"{'.'.join((key, *on[:1]))}: cannot be honoured: {reason}")
    for name, value in given.get("data_types", {}).items():
        if value not in (None, "auto", *(("fp32", "float32") if name != "keep_in_fp32_modules" else ())):
            raise ConfigError(
                f"data_types.{name}: {shown(value)} cannot be honoured: memfit leaves the model's types as they are, and adds gradients up in them"
            )


def check_harmless(given: Mapping[str, Any], reader: ConfigReader, world_size: int) -> None:
    """Tell of keys without effect here, checked as far as DeepSpeed checks them.

    Args:
        given: the keys of the whole file.
        reader: takes the notices.
        world_size: ranks that share the batch.

    Raises:
        ConfigError: a value that DeepSpeed refuses.
    """
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        if given.get(key) is not None and str(given[key]).lower() not in {"fp32", "fp16", "bf16"}:
            raise ConfigError(f"{key}: expected one of fp32, fp16, bf16, found {shown(given[key])}")
    summed = str(given.get("gradient_allreduce_op", "mean")).lower()
    if summed not in {"mean", "sum"}:
        raise ConfigError(
            f"gradient_allreduce_op: expected one of mean, sum, found {shown(given['gradient_allreduce_op'])}"
        )
    zero = given.get("zero_optimization")
    if summed == "sum" and isinstance(zero, Mapping) and zero.get("stage") == 3:
        raise ConfigError("gradient_allreduce_op: sum does not go with ZeRO stage 3")
    if world_size > 1:
        _check_messages(given, summed)
    for key in given:
        reason = keys.HARMLESS.get(key)
        if world_size > 1 and reason == keys.ONE_RANK:
            reason = keys.MESSAGES.get(key)
        if reason is not None:
            reader.notices.append(f"{key} has no effect: {reason}")


def _check_messages(given: Mapping[str, Any], summed: str) -> None:
    """Refuse what would make the ranks' gradients others than their mean in the parameters' own type."""
    if summed == "sum":
        raise ConfigError(
            "gradient_allreduce_op: sum cannot be honoured: the gradients of all ranks are averaged; multiply the learning rate by the number of ranks"
        )
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        if str(given.get(key) or "fp32").lower() != "fp32":
            raise ConfigError(
                f"{key}: {shown(given[key])} cannot be honoured: gradients are sent in the type that they have, as rounding them would change results"
            )
    if given.get("use_data_before_expert_parallelism"):
        raise ConfigError("use_data_before_expert_parallelism: memfit has no expert parallelism: leave it out")
