"""`fp16`, `bf16` (once `bfloat16`) and `torch_autocast`: at most one of them is enabled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import keys
from memfit.integrations.deepspeed.values import AUTO, Auto, ConfigReader, check_range, nearest, shown, within

_DTYPES: Final = {
    **dict.fromkeys(("torch.float16", "fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("torch.bfloat16", "bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("torch.float32", "fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("torch.int8", "int8"), "int8"),
}


@dataclass(frozen=True, slots=True)
class Fp16:
    """Training in fp16.

    Attributes:
        enabled: whether.
        auto_cast: cast the inputs too; under autocast, operations cast theirs.
        loss_scale: fixed factor of the loss; 0 for one that adapts itself, which the next five describe.
        initial_scale_power: it starts at two to this power.
        loss_scale_window: steps without overflow until it doubles.
        hysteresis, consecutive_hysteresis: overflows that are let pass before it halves, and whether a step without one starts counting anew.
        min_loss_scale: below which it does not fall.
        fp16_master_weights_and_grads: no copies in fp32; refused.
    """

    enabled: bool | Auto = False
    auto_cast: bool | Auto = False
    loss_scale: float | Auto = field(default=0.0, metadata=within(least=0))
    initial_scale_power: int | Auto = 16
    loss_scale_window: int | Auto = 1000
    hysteresis: int | Auto = 2
    consecutive_hysteresis: bool | Auto = False
    min_loss_scale: int | Auto = 1
    fp16_master_weights_and_grads: bool | Auto = False


@dataclass(frozen=True, slots=True)
class Bf16:
    """Training in bf16.

    Attributes:
        enabled: whether.
        immediate_grad_update: when DeepSpeed adds gradients up; the sums are the same.
        check_grad_overflow: skip a step whose gradients are not finite.
        bf16_master_weights_and_grads, bf16_optimizer_states: no copies in fp32, no state in fp32; refused.
    """

    enabled: bool | Auto = False
    immediate_grad_update: bool | Auto = False
    check_grad_overflow: bool | Auto = True
    bf16_master_weights_and_grads: bool | Auto = False
    bf16_optimizer_states: bool | Auto = False


@dataclass(frozen=True, slots=True)
class TorchAutocast:
    """torch's own autocast.

    Attributes:
        enabled: whether; no "auto", which DeepSpeed would take for true.
        dtype: "bf16" or "fp16"; None where nothing is said.
        lower_precision_safe_modules: classes whose parameters DeepSpeed sends in that dtype; refused.
    """

    enabled: bool = False
    dtype: str | None = None
    lower_precision_safe_modules: tuple[str, ...] | None = None


def read_precisions(given: Mapping[str, Any], reader: ConfigReader) -> dict[str, Any]:
    """The three sections, as attributes of `DeepSpeedConfig`.

    Args:
        given: the keys of the whole file.
        reader: takes the notices.

    Raises:
        ConfigError: two are enabled, or one asks for what memfit does not keep.
    """
    fp16 = reader.section(Fp16, given.get("fp16", {}), "fp16", closed=True)
    # DeepSpeed looks at the old name where the new one is not there, or says nothing.
    name = "bfloat16" if given.get("bf16") is None and "bfloat16" in given else "bf16"
    bf16 = reader.section(
        Bf16, given.get(name) if given.get(name) is not None or name == "bfloat16" else {}, name, closed=True
    )
    if name == "bf16" and "bfloat16" in given:
        reader.notices.append("bfloat16 is ignored: it is the old name of bf16, which is there too")
    autocast = reader.section(TorchAutocast, given.get("torch_autocast", {}), "torch_autocast")
    enabled = [
        key for key, part in (("fp16", fp16), ("bf16", bf16), ("torch_autocast", autocast)) if part.enabled is True
    ]
    if len(enabled) > 1:
        raise ConfigError(f"{' and '.join(enabled)} are enabled together: take one of them")
    if fp16.enabled is True and fp16.loss_scale == 0:
        check_range(fp16.loss_scale_window, "fp16.loss_scale_window", 1, None)
        check_range(fp16.min_loss_scale, "fp16.min_loss_scale", 1, None)
    for section, part, key in (
        ("fp16", fp16, "fp16_master_weights_and_grads"),
        (name, bf16, "bf16_master_weights_and_grads"),
        (name, bf16, "bf16_optimizer_states"),
    ):
        if getattr(part, key) is True:
            raise ConfigError(
                f"{section}.{key}: cannot be honoured: memfit keeps parameters and gradients in the model's own precision"
            )
    for key in enabled:
        if key != "torch_autocast":  # which is the same on both sides
            reader.notices.append(
                f"{key}: parameters stay as the model has them and operations run in {key} under autocast, where DeepSpeed casts the model and keeps "
                f"fp32 copies; roundings differ"
            )
    return {"fp16": fp16, "bf16": bf16, "torch_autocast": _autocast(autocast, given)}


def _autocast(autocast: TorchAutocast, given: Mapping[str, Any]) -> TorchAutocast:
    if autocast.dtype is not None:
        if autocast.dtype not in _DTYPES:
            guess = nearest(autocast.dtype, _DTYPES)
            raise ConfigError(
                f"torch_autocast.dtype: DeepSpeed {keys.VERSION} knows no {shown(autocast.dtype)}; {guess}"
            )
        autocast = replace(autocast, dtype=_DTYPES[autocast.dtype])
    if autocast.enabled is True:
        if autocast.dtype is None:
            raise ConfigError(
                "torch_autocast.dtype is missing: bfloat16 or float16; what torch takes without depends on the device"
            )
        if autocast.dtype not in {"fp16", "bf16"}:
            raise ConfigError(
                f"torch_autocast.dtype: {given['torch_autocast']['dtype']} cannot be honoured: autocast computes in bfloat16 or float16"
            )
        if autocast.lower_precision_safe_modules:
            raise ConfigError(
                "torch_autocast.lower_precision_safe_modules: cannot be honoured: memfit's autocast goes by operation, as torch's does"
            )
    return autocast


def tell_of_no_stage(stage: int | Auto, fp16: Fp16, bf16: Bf16, notices: list[str]) -> None:
    """What DeepSpeed's optimizers for 16 bits do where no ZeRO stage brings its own; tests/integrations/deepspeed/test_training.py shows both."""
    if stage not in (0, AUTO):
        return
    for key, part in (("fp16", fp16), ("bf16", bf16)):
        if part.enabled is True:
            notices.append(
                f"{key}: without a ZeRO stage DeepSpeed {keys.VERSION} begins with a step of zero gradients, which Adam counts and in which weights decay; "
                "memfit takes none, as DeepSpeed from stage 1 on"
            )
    if fp16.enabled is True:
        notices.append(
            f"fp16: without a ZeRO stage DeepSpeed {keys.VERSION} divides gradients by the scale and does not multiply the loss by it; memfit does both, as "
            "DeepSpeed from stage 1 on"
        )
