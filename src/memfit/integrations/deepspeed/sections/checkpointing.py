"""`activation_checkpointing`, and `gradient_checkpointing`, which is no key of DeepSpeed: neither decides what memfit recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.integrations.deepspeed.values import Auto, ConfigReader, convert, within


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """How DeepSpeed's own checkpoint function keeps what it is called on. It switches nothing on, in DeepSpeed either.

    Attributes:
        partition_activations: share what is kept out among model-parallel ranks.
        cpu_checkpointing: keep it in the host's memory.
        contiguous_memory_optimization, number_checkpoints: in one buffer, for so many.
        synchronize_checkpoint_boundary, profile: wait for the device at each; time them.
    """

    partition_activations: bool | Auto = False
    cpu_checkpointing: bool | Auto = False
    contiguous_memory_optimization: bool | Auto = False
    number_checkpoints: int | Auto | None = field(default=None, metadata=within(least=1))
    synchronize_checkpoint_boundary: bool | Auto = False
    profile: bool | Auto = False


def read_checkpointing(given: Mapping[str, Any], reader: ConfigReader) -> dict[str, Any]:
    """Both keys, as attributes of `DeepSpeedConfig`.

    Args:
        given: the keys of the whole file.
        reader: takes the notices.

    Raises:
        ConfigError: a value of a wrong type.
    """
    found: dict[str, Any] = {}
    if "activation_checkpointing" in given:
        section = reader.section(ActivationCheckpointing, given["activation_checkpointing"], "activation_checkpointing")
        found["activation_checkpointing"] = section
        reader.notices.append(
            "activation_checkpointing switches nothing on, in DeepSpeed either: it is about how deepspeed.checkpointing keeps what it is called on; "
            "memfit chooses what to recompute, and what to keep in the host's memory"
        )
    if "gradient_checkpointing" in given:
        wanted = convert(bool, given["gradient_checkpointing"], "gradient_checkpointing", quoted=False)
        found["gradient_checkpointing"] = wanted
        reader.notices.append(
            "gradient_checkpointing is no key of DeepSpeed, which ignores it; memfit chooses which layers to recompute"
            + (
                ""
                if wanted
                else ", and recomputes none where the budget has room for all: results are the same either way"
            )
        )
    return found
