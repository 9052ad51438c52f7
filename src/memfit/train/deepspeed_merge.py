"""A DeepSpeed configuration merged with a run's own: what it says goes into the run's sections, what it leaves "auto" is taken from them.

Either may say a thing, and both may say the same; where they differ the error names both keys, and neither wins. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.hardware.machine import Machine
from memfit.hardware.network import devices_of
from memfit.integrations.deepspeed import AUTO, DeepSpeedConfig, Optimizer, read, source

TOTAL: Final = (
    "scheduler.params.total_num_steps"  # "auto" is the run's number of steps, which is known when its data is
)


def merged(data: Mapping[str, Any], folder: Path, ranks: int | None = None) -> dict[str, Any]:
    """The data of a run, with the DeepSpeed configuration that `deepspeed` names or holds worked into it.

    Args:
        data: as YAML or JSON gave it; sections that are no mappings are left for the reader to refuse.
        folder: from which a relative path is read.
        ranks: that will train; None for as many as the run names devices, or as torchrun has started.

    Returns:
        The same where there is no such key. Else with the configuration itself under `deepspeed`, complete but for `TOTAL`, so that the run can be
        taken up when the file is gone.

    Raises:
        ConfigError: it cannot be read, contradicts the run's own keys, or leaves "auto" what these do not say either.
    """
    said = data.get("deepspeed")
    if not said:
        return dict(data)
    if not isinstance(said, (str, Mapping)):
        raise ConfigError(f"deepspeed: expected a file, or its content, found {said!r}")
    content = source.load(Path(folder, said).expanduser() if isinstance(said, str) else said)
    sections = {
        name: dict(data.get(name) or {}) for name in ("fit", "optim", "schedule") if _is_section(data.get(name))
    }
    fit = sections.setdefault("fit", {})
    source.fill(content, dict(_filled(content, sections)))
    ranks = ranks_of(fit.get("devices"), ranks)
    config = read(content, strict=data.get("deepspeed_strict", True) is not False, world_size=ranks)
    _check_settled(config, sections)
    if isinstance(config.batch.train, int):
        _same(fit, "global_batch", config.batch.train, "fit", "train_batch_size")
    elif "global_batch" not in fit:
        raise ConfigError('train_batch_size is "auto" in the DeepSpeed configuration: give fit.global_batch')
    _same(fit, "clip_norm", config.gradient_clipping or None, "fit", "gradient_clipping")
    fixed = fit["fixed"] = dict(fit.get("fixed") or {})
    samples = fit["global_batch"] if isinstance(fit["global_batch"], int) and ranks == 1 else None
    arguments = config.arguments(streamed=fixed.get("streamed", ""), samples=samples)
    for name, key in (("micro_batches", "gradient_accumulation_steps"), ("precision", "fp16, bf16 and torch_autocast")):
        if name in arguments["fixed"]:
            # How many micro-batches a rank has depends on how many ranks there are, which may change when the run is resumed (`train.plans`).
            lasting = ranks == 1 or name == "precision"
            _same(fixed if lasting else dict(fixed), name, arguments["fixed"][name], "fit.fixed", key)
    allowed = tuple(fit.get("allow") or ())
    for name in {"bf16", "fp16"} & set(allowed):
        if fixed.get("precision", name) != name:
            raise ConfigError(
                f"fit.allow: {name} contradicts the DeepSpeed configuration, whose fp16, bf16 and torch_autocast ask for {fixed['precision']}: "
                "change one of them"
            )
    fit["allow"] = [*dict.fromkeys((*allowed, *arguments["allow"]))]
    rest = {name: value for name, value in data.items() if name not in sections}
    kept = {
        name: section
        for name, section in sections.items()
        if name == "fit" or (name != "optim" and config.scheduler is None)
    }
    if config.optimizer is None and "optim" in sections:
        kept["optim"] = sections["optim"]
    return {**rest, **kept, "deepspeed": content}


def ranks_of(devices: Any, ranks: int | None = None) -> int:
    """That share a batch; arguments as for `merged`."""
    if isinstance(devices, (str, int)):
        return len(devices_of(devices, Machine("", "cpu", 1, 1.0, 1.0, 1.0)).devices)  # what they are does not matter
    from memfit.ranks import place  # needs torch, which whoever reads a configuration may do without

    there = place()
    return ranks or (1 if there is None else there[1])


def _is_section(part: Any) -> bool:
    return part is None or isinstance(part, Mapping)


_PARAMS: Final = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov")  # of `optim`, by the same names


def _filled(content: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Paths that say "auto", with what the run's own sections say."""
    pairs = [("train_batch_size", "fit", "global_batch"), ("gradient_clipping", "fit", "clip_norm")]
    pairs += [(f"optimizer.params.{name}", "optim", name) for name in _PARAMS]
    pairs += [("scheduler.params.warmup_num_steps", "schedule", "warmup_steps")]
    for path, section, name in pairs:
        value = sections.get(section, {}).get(name)
        if value is not None and _at(content, path) == "auto":
            yield path, value


def _at(content: Mapping[str, Any], path: str) -> Any:
    place: Any = content
    for name in path.split("."):
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _same(values: dict[str, Any], name: str, value: Any, section: str, key: str) -> None:
    """Put a value into a section, which may say the same already and nothing else."""
    value = None if value is AUTO else value
    if name in values and values[name] is not None and values[name] != value:
        raise ConfigError(
            f"{section}.{name}: {values[name]!r} contradicts {key} of the DeepSpeed configuration, which comes to {value!r}: change one of them"
        )
    values[name] = value


def _check_settled(config: DeepSpeedConfig, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """See that the run's optimizer and schedule say nothing else than the configuration's."""
    if config.optimizer is not None:
        params = config.optimizer.params
        for name, value in sections.get("optim", {}).items():
            there = _kind(config.optimizer) if name == "name" else params.get(name)
            if value is not None and _as_tuple(value) != _as_tuple(there):
                key = "type" if name == "name" else f"params.{name}"
                raise ConfigError(
                    f"optim.{name}: {value!r} contradicts optimizer.{key} of the DeepSpeed configuration, which "
                    f"{'is not there' if there is None else f'is {there!r}'}: change one of them"
                )
        for name, value in params.items():
            if value == "auto":
                raise ConfigError(
                    f'optimizer.params.{name} is "auto" in the DeepSpeed configuration: give optim.{name}'
                )
    if config.scheduler is not None:
        steps = config.scheduler.params.get("warmup_num_steps")
        for name, value in sections.get("schedule", {}).items():
            if name != "warmup_steps" or value != steps:
                raise ConfigError(
                    f"schedule.{name}: {value!r} contradicts the scheduler of the DeepSpeed configuration, {config.scheduler.type}: change one of them"
                )
        for name, value in config.scheduler.params.items():
            if value == "auto" and name != TOTAL.rpartition(".")[2]:
                way = "give schedule.warmup_steps" if name == "warmup_num_steps" else "give a value there"
                raise ConfigError(f'scheduler.params.{name} is "auto" in the DeepSpeed configuration: {way}')


def _kind(said: Optimizer) -> str:
    """By our names; DeepSpeed's "Adam" is AdamW unless it says otherwise."""
    name = said.type.lower()
    return "adamw" if name == "adam" and said.params.get("adam_w_mode", True) is True else name


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
