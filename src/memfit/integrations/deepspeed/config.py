"""A DeepSpeed configuration, read, checked and frozen: what it says, what follows from it, and what memfit.plan is to be told. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import batch, keys, mapping, source
from memfit.integrations.deepspeed.batch import BatchSizes
from memfit.integrations.deepspeed.sections.checkpointing import ActivationCheckpointing, read_checkpointing
from memfit.integrations.deepspeed.sections.optimizer import Optimizer, Scheduler, read_optimizer, read_scheduler
from memfit.integrations.deepspeed.sections.precision import (
    Bf16,
    Fp16,
    TorchAutocast,
    read_precisions,
    tell_of_no_stage,
)
from memfit.integrations.deepspeed.sections.refused_or_harmless import check_harmless, check_switches
from memfit.integrations.deepspeed.sections.zero import ZeroOptimization, read_zero
from memfit.integrations.deepspeed.values import AUTO, Auto, ConfigReader, check_range, convert

GRADIENT_CLIPPING: Final = 1.0  # DeepSpeed's default

_HONOURED: Final = (
    *(batch.TRAIN, batch.MICRO, batch.ACCUMULATION, "managed_gradient_accumulation", "sequence_parallel_size"),
    *("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
    *("zero_optimization", "activation_checkpointing", "gradient_checkpointing"),
)
_TOP_LEVEL: Final = (*_HONOURED, *keys.HARMLESS, *keys.REFUSED, *keys.REMOVED)


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What one configuration says.

    Attributes:
        batch: samples per step, per micro-batch, and micro-batches per step.
        world_size: ranks that share the batch.
        optimizer, scheduler: None where the file has none.
        gradient_clipping: largest global norm of the gradient; 0 for no clipping.
        fp16, bf16, torch_autocast: precision; at most one of them is enabled.
        zero_optimization: the stage, and what is moved off the device.
        activation_checkpointing: None where the file has none; see there what it does not do.
        gradient_checkpointing: None where the file has none. DeepSpeed has no such key and ignores it; to memfit true says what people mean by it:
            layers are recomputed, and which ones is chosen.
        notices: what is taken otherwise than the file may suggest, in whole clauses that start with the key.
    """

    batch: BatchSizes
    world_size: int = 1
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    gradient_clipping: float | Auto = GRADIENT_CLIPPING
    fp16: Fp16 = field(default_factory=Fp16)
    bf16: Bf16 = field(default_factory=Bf16)
    torch_autocast: TorchAutocast = field(default_factory=TorchAutocast)
    zero_optimization: ZeroOptimization = field(default_factory=ZeroOptimization)
    activation_checkpointing: ActivationCheckpointing | None = None
    gradient_checkpointing: bool | None = None
    notices: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """What is enabled: "fp16", "bf16" or "full"; "auto" where nothing is and the file leaves fp16 or bf16 open."""
        return str(mapping.asked(self._said).fixed.get("precision", "auto"))

    def _said(self, key: str) -> object:
        """The value of a key by its path; None where nothing is said."""
        value: object = self
        for name in key.split("."):
            value = getattr(value, name, None)
        return value

    def arguments(self, *, streamed: str = "", samples: int | None = None, device: str | None = None) -> dict[str, Any]:
        """Keyword arguments for `memfit.plan` that follow from the configuration alone: clip_norm, allow, fixed.

        What is "auto" is not fixed, and so is the planner's. A gradient_clipping of "auto" is DeepSpeed's default: a plan may not choose results.
        The optimizer, the sample and the budgets are the caller's, and how fp16 scales its gradients (`scaling`) the engine's. Where the file moves
        something off a CPU, so is a `host_budget`; a GPU may offload to host memory without one.

        Args:
            streamed: path of the repeated blocks whose parameters are offloaded, where zero_optimization.offload_param asks for that.
            samples: in the batch that is planned for, that of one rank; None where that is not known yet.
            device: type of the device that trains. On "cpu", host memory is the device's own, so nothing is offloaded to it.

        Raises:
            ConfigError: the configuration is for a batch of another size, or asks for what a plan cannot hold.
        """
        if self.world_size > 1 and self.zero_optimization.moves_parameters:
            raise ConfigError(
                "zero_optimization.offload_param: cannot be honoured on several ranks, which share parameters out instead of streaming layers: leave it out, "
                "and let stage 3 and offload_optimizer make the room"
            )
        asked = mapping.asked(self._said)
        fixed: dict[str, Any] = dict(asked.fixed)
        number = batch.micro_batches(self.batch, samples, self.world_size)
        if number is not None:
            fixed["micro_batches"] = number
        if self.world_size > 1 and self.way is not None:
            fixed["sharding"] = self.way
        places: dict[str, str] = {name: fixed.pop(name) for name in ("state_place", "streamed") if name in fixed}
        fixed.update(self._placed(places, streamed, device))
        clipping = GRADIENT_CLIPPING if isinstance(self.gradient_clipping, Auto) else self.gradient_clipping
        return {"clip_norm": clipping or None, "allow": asked.allow, "fixed": fixed}

    @property
    def way(self) -> str | None:
        """How several ranks share the step out, as `techniques.sharding` names it; None where the stage is left open."""
        stage = self.zero_optimization.stage
        return None if isinstance(stage, Auto) else ("data", "zero1", "zero2", "zero3")[stage]

    @property
    def scaling(self) -> dict[str, Any] | None:
        """How the scale of the gradients moves in fp16, as `step.precision.ScaleRule` takes it; None where that is torch's own way (or nothing scales).

        Without a ZeRO stage DeepSpeed's fp16 optimizers know no hysteresis.
        """
        if self.fp16.enabled is not True:
            return None
        said = {f.name: getattr(self.fp16, f.name) for f in fields(Fp16)}
        said = {name: getattr(Fp16(), name) if value is AUTO else value for name, value in said.items()}
        if said["loss_scale"] > 0:
            return {"initial": said["loss_scale"], "constant": True}
        staged = self.zero_optimization.stage not in (0, AUTO)
        return {
            "initial": 2.0 ** said["initial_scale_power"],
            "window": said["loss_scale_window"],
            "least": float(said["min_loss_scale"]),
            "hysteresis": said["hysteresis"] if staged else 1,
            "refilled": said["consecutive_hysteresis"],
        }

    def _placed(self, places: Mapping[str, str], streamed: str, device: str | None) -> dict[str, Any]:
        """Where optimizer state is offloaded, or which layers are streamed; the state of streamed layers is offloaded with them.

        Args:
            places: of `state_place` and `streamed`, where the file asks for one.
            streamed, device: as for `arguments`.
        """
        # On a CPU everything is in host memory already.
        places = {name: "device" if (device, place) == ("cpu", "host") else place for name, place in places.items()}
        zero = self.zero_optimization
        if not zero.moves_parameters and streamed:
            raise ConfigError(
                f"streamed={streamed!r}: the configuration leaves parameters where they are; ask with zero_optimization.offload_param"
            )
        if places.get("streamed", "device") == "device":
            return {name: place for name, place in places.items() if name == "state_place"}
        if places["streamed"] == "disk" and device != "cpu":
            raise ConfigError(
                "zero_optimization.offload_param.device: nvme cannot be honoured: parameters are streamed from the host's memory; say cpu"
            )
        if not streamed:
            raise ConfigError(
                "zero_optimization.offload_param: which blocks are streamed? Give their path, streamed='encoder.layer'"
            )
        if not zero.state_goes_with_parameters:
            raise ConfigError(
                "zero_optimization.offload_optimizer: the state of streamed layers goes where they go: say the same device and nvme_path as in "
                "offload_param"
            )
        return {"streamed": streamed}


def read(
    path_or_dict: str | PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    world_size: int = 1,
    auto: Mapping[str, Any] | None = None,
) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration.

    Args:
        path_or_dict: path of a JSON or hjson file, or its content.
        strict: an unknown key is an error. False does as DeepSpeed does: where DeepSpeed ignores unknown keys they become notices.
        world_size: ranks that share a batch.
        auto: values for keys that say "auto", by their paths: {"optimizer.params.lr": 1e-4}.

    Raises:
        ConfigError: what DeepSpeed refuses, what memfit cannot honour, or a value for a key that does not say "auto"; the message starts with the file,
            where there is one, and the key.
        InputError: the file needs the hjson package, which is not installed.
    """
    if world_size < 1:
        raise ConfigError(f"world_size: {world_size} is less than 1")
    data = source.load(path_or_dict)
    reader = ConfigReader(keys.VERSION, strict, [])
    try:
        source.fill(data, auto or {})
        return _config(data, world_size, reader)
    except ConfigError as error:
        if isinstance(path_or_dict, Mapping):
            raise
        raise ConfigError(f"{path_or_dict}: {error}") from None


def _config(data: dict[str, Any], world_size: int, reader: ConfigReader) -> DeepSpeedConfig:
    given = reader.known(data, "", _TOP_LEVEL)
    for key in given:
        if key in keys.REMOVED:
            raise ConfigError(f"{key}: DeepSpeed {keys.VERSION} has it no longer, and refuses it: {keys.REMOVED[key]}")
    for key, names in (*keys.CLOSED.items(), *keys.OPEN.items()):
        if key in given and (key, given[key]) != ("aio", None):
            reader.known(given[key], key, names, closed=key in keys.CLOSED)
    check_switches(given)
    check_harmless(given, reader, world_size)
    read = DeepSpeedConfig(
        batch=batch.read_batch(given, reader, world_size),
        world_size=world_size,
        optimizer=read_optimizer(given, reader),
        scheduler=read_scheduler(given, reader),
        gradient_clipping=_clipping(given, reader.notices),
        **read_precisions(given, reader),
        zero_optimization=read_zero(given, reader, world_size),
        **read_checkpointing(given, reader),
    )
    tell_of_no_stage(read.zero_optimization.stage, read.fp16, read.bf16, reader.notices)
    return replace(read, notices=tuple(reader.notices))  # last: all above add to them


def _clipping(given: Mapping[str, Any], notices: list[str]) -> float | Auto:
    if "gradient_clipping" not in given:
        notices.append(
            f"gradient_clipping is {GRADIENT_CLIPPING}, the default of DeepSpeed {keys.VERSION} (in 0.16 it was 0, no clipping)"
        )
        return GRADIENT_CLIPPING
    norm: float | Auto = convert(float | Auto, given["gradient_clipping"], "gradient_clipping", quoted=False)
    check_range(norm, "gradient_clipping", 0, None)
    if norm is AUTO:
        notices.append(
            f"gradient_clipping auto is {GRADIENT_CLIPPING}, the default of DeepSpeed {keys.VERSION}: a plan may not choose results"
        )
    return norm
