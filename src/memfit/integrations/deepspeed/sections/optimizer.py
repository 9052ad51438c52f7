"""`optimizer` and `scheduler`: which ones, and whether their settings are among those they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import keys
from memfit.integrations.deepspeed.values import Auto, ConfigReader, check_range, convert, nearest, shown


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Which optimizer.

    Attributes:
        type: one of DeepSpeed's, in lower case, or a name in torch.optim. "adam" means AdamW unless `params` say adam_w_mode: false.
        params: its settings as they stand in the file; single ones may be "auto".
        legacy_fusion: of DeepSpeed's kernels; without effect.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)
    legacy_fusion: bool = False


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How the learning rate changes.

    Attributes:
        type: one of DeepSpeed's schedules, or a name in torch.optim.lr_scheduler.
        params: its settings as they stand in the file; single ones may be "auto".
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


def read_optimizer(given: Mapping[str, Any], reader: ConfigReader) -> Optimizer | None:
    """The optimizer; None where the file has none.

    Args:
        given: the keys of the whole file.
        reader: takes the notices.

    Raises:
        ConfigError: there is no such optimizer, it takes no such parameter, or memfit has no counterpart.
    """
    if given.get("optimizer", 0) == {} or "optimizer" not in given:
        return None
    found = reader.section(Optimizer, given["optimizer"], "optimizer")
    name = found.type.lower() if found.type.lower() in keys.OWN_OPTIMIZERS else found.type
    if name in keys.REFUSED_OPTIMIZERS:
        raise ConfigError(f"optimizer.type: {found.type} cannot be honoured: {keys.REFUSED_OPTIMIZERS[name]}")
    if name not in keys.OPTIMIZER_PARAMS:
        guess = nearest(name, keys.OPTIMIZER_PARAMS)
        raise ConfigError(f"optimizer.type: {found.type} is neither DeepSpeed's nor in torch.optim; {guess}")
    if "max_grad_norm" in found.params:
        raise ConfigError(
            "optimizer.params.max_grad_norm: DeepSpeed takes it only as gradient_clipping, at the top level"
        )
    _check_params(found.params, keys.OPTIMIZER_PARAMS[name], "optimizer", found.type)
    for key in ("lr", "eps", "weight_decay"):
        if key in found.params and not isinstance(found.params[key], (list, tuple)):  # Adafactor has two eps
            check_range(
                convert(float | Auto | None, found.params[key], f"optimizer.params.{key}"),
                f"optimizer.params.{key}",
                0,
                None,
            )
    if name == "adam" and found.params.get("adam_w_mode", True) is True:
        reader.notices.append(
            'optimizer.type "Adam" is AdamW, in DeepSpeed as here; for Adam say adam_w_mode: false in its params'
        )
    return replace(found, type=name)


def read_scheduler(given: Mapping[str, Any], reader: ConfigReader) -> Scheduler | None:
    """The schedule of the learning rate; None where the file has none.

    Args:
        given: the keys of the whole file.
        reader: takes the notices.

    Raises:
        ConfigError: there is no such schedule, or its parameters are not those it takes.
    """
    if given.get("scheduler", 0) == {} or "scheduler" not in given:
        return None
    found = reader.section(Scheduler, given["scheduler"], "scheduler")
    if found.type in keys.TORCH_SCHEDULES:
        return found
    if found.type not in keys.SCHEDULES:
        guess = nearest(found.type, (*keys.SCHEDULES, *keys.TORCH_SCHEDULES))
        raise ConfigError(
            f"scheduler.type: {found.type} is neither DeepSpeed's nor one of torch's that a file can describe; {guess}"
        )
    _check_params(found.params, keys.SCHEDULES[found.type], "scheduler", found.type)
    for key in keys.NEEDED.get(found.type, ()):
        if key not in found.params:
            raise ConfigError(f"scheduler.params.{key} is missing: {found.type} needs it")
    for key in ("warmup_num_steps", "total_num_steps"):
        if key in found.params:
            steps = convert(int | Auto, found.params[key], f"scheduler.params.{key}", quoted=False)
            check_range(steps, f"scheduler.params.{key}", 1, None)
    if found.params.get("warmup_type", "log") not in {"log", "linear", "auto"}:
        raise ConfigError(
            f"scheduler.params.warmup_type: expected one of log, linear, found {shown(found.params['warmup_type'])}"
        )
    return found


def _check_params(params: Mapping[str, Any], known: tuple[str, ...], section: str, kind: str) -> None:
    for key in params:
        if key not in known:
            raise ConfigError(f"{section}.params.{key}: {kind} takes no such parameter; {nearest(key, known)}")
