"""A DeepSpeed configuration, read, checked and frozen: what it says, what follows from it, and what memfit.plan is to be told. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.integrations.deepspeed import batch, keys, source
from memfit.integrations.deepspeed.batch import BatchSizes
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
from memfit.integrations.deepspeed.values import AUTO, Auto, Reading, check_range, convert, nearest, shown

GRADIENT_CLIPPING: Final = 1.0  # DeepSpeed's default

_HONOURED: Final = (
    *(batch.TRAIN, batch.MICRO, batch.ACCUMULATION, "managed_gradient_accumulation", "sequence_parallel_size"),
    *("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
    *("zero_optimization", "activation_checkpointing", "gradient_checkpointing"),
)
_TOP_LEVEL: Final = (*_HONOURED, *keys.HARMLESS, *keys.REFUSED, *keys.REMOVED)

_DTYPES: Final = {
    **dict.fromkeys(("torch.float16", "fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("torch.bfloat16", "bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("torch.float32", "fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("torch.int8", "int8"), "int8"),
}


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
        if self.torch_autocast.enabled is True:
            assert self.torch_autocast.dtype is not None
            return self.torch_autocast.dtype
        for name, section in (("fp16", self.fp16), ("bf16", self.bf16)):
            if section.enabled is True:
                return name
        return "auto" if AUTO in (self.fp16.enabled, self.bf16.enabled) else "full"

    def arguments(self, *, streamed: str = "", samples: int | None = None, device: str | None = None) -> dict[str, Any]:
        """Keyword arguments for `memfit.plan` that follow from the configuration alone: clip_norm, allow, fixed.

        What is "auto" is not fixed, and so is the planner's. A gradient_clipping of "auto" is DeepSpeed's default: a plan may not choose results.
        The optimizer, the sample and the budgets are the caller's, and how fp16 scales its gradients (`scaling`) the engine's. Where the file moves
        something off a CPU, so is a `host_budget`; off a GPU there is room without.

        Args:
            streamed: path of the repeated blocks whose parameters lie on the lower tier, where zero_optimization.offload_param asks for that.
            samples: in the batch that is planned for; None where that is not known yet.
            device: type of the device that trains. On "cpu" what is to lie in the host's memory lies there already.

        Raises:
            ConfigError: the configuration is for several ranks, for a batch of another size, or asks for what a plan cannot hold.
        """
        if self.world_size != 1:
            raise ConfigError(
                f"world_size {self.world_size}: memfit trains on one device for now; read the configuration with world_size=1"
            )
        fixed: dict[str, Any] = {}
        micro_batches = self._micro_batches(samples)
        if micro_batches is not None:
            fixed["micro_batches"] = micro_batches
        allow = tuple(name for name, each in (("bf16", self.bf16), ("fp16", self.fp16)) if each.enabled is AUTO)
        if self.precision != "auto":
            fixed["precision"] = self.precision
            allow = () if self.precision == "full" else (self.precision,)
        fixed.update(self._places(streamed, device))
        clipping = GRADIENT_CLIPPING if isinstance(self.gradient_clipping, Auto) else self.gradient_clipping
        return {"clip_norm": clipping or None, "allow": allow, "fixed": fixed}

    def _micro_batches(self, samples: int | None) -> int | None:
        sizes = self.batch
        if samples is not None and isinstance(sizes.train, int) and samples != sizes.train:
            raise ConfigError(
                f"{batch.TRAIN}: the configuration takes {sizes.train} samples a step and the sample holds {samples}: "
                "give a sample of a whole step, or change the configuration"
            )
        if isinstance(sizes.accumulation, int):
            return sizes.accumulation
        if samples is None or not isinstance(sizes.micro, int):
            return None
        if samples % sizes.micro:
            raise ConfigError(
                f"{batch.MICRO}: a batch of {samples} samples cannot be taken {sizes.micro} at a time: change one of them"
            )
        return samples // sizes.micro

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

    def _places(self, streamed: str, device: str | None) -> dict[str, Any]:
        zero = self.zero_optimization
        below = {"cpu": "device" if device == "cpu" else "host", "nvme": "disk", "none": "device"}
        if zero.moves_parameters:
            assert zero.offload_param is not None
            place = below[str(zero.offload_param.device)]
            if place == "disk" and device != "cpu":
                raise ConfigError(
                    "zero_optimization.offload_param.device: nvme cannot be honoured: parameters are streamed from the host's memory; say cpu"
                )
            if place != "device":
                if not streamed:
                    raise ConfigError(
                        "zero_optimization.offload_param: which blocks are streamed? Give their path, streamed='encoder.layer'"
                    )
                state = zero.offload_optimizer
                if zero.moves_state in {"cpu", "nvme"} and (
                    zero.moves_state != zero.offload_param.device or state.nvme_path != zero.offload_param.nvme_path  # type: ignore[union-attr]
                ):
                    raise ConfigError(
                        "zero_optimization.offload_optimizer: the state of streamed layers goes where they go: say the same device and nvme_path as in "
                        "offload_param"
                    )
                return {"streamed": streamed}
        elif streamed:
            raise ConfigError(
                f"streamed={streamed!r}: the configuration leaves parameters where they are; ask with zero_optimization.offload_param"
            )
        return {"state_place": below[zero.moves_state]} if isinstance(zero.moves_state, str) else {}


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
        world_size: ranks that share a batch. More than one are read and checked, and refused by `DeepSpeedConfig.arguments`.
        auto: values for keys that say "auto", by their paths: {"optimizer.params.lr": 1e-4}.

    Raises:
        ConfigError: what DeepSpeed refuses, what memfit cannot honour, or a value for a key that does not say "auto"; the message starts with the file,
            where there is one, and the key.
        InputError: the file needs the hjson package, which is not installed.
    """
    if world_size < 1:
        raise ConfigError(f"world_size: {world_size} is less than 1")
    data = source.load(path_or_dict)
    reading = Reading(keys.VERSION, strict, [])
    try:
        source.fill(data, auto or {})
        return _config(data, world_size, reading)
    except ConfigError as error:
        if isinstance(path_or_dict, Mapping):
            raise
        raise ConfigError(f"{path_or_dict}: {error}") from None


def _config(data: dict[str, Any], world_size: int, reading: Reading) -> DeepSpeedConfig:
    given = reading.known(data, "", _TOP_LEVEL)
    for key in given:
        if key in keys.REMOVED:
            raise ConfigError(f"{key}: DeepSpeed {keys.VERSION} has it no longer, and refuses it: {keys.REMOVED[key]}")
    for key, names in (*keys.CLOSED.items(), *keys.OPEN.items()):
        if key in given and (key, given[key]) != ("aio", None):
            reading.known(given[key], key, names, closed=key in keys.CLOSED)
    _check_switches(given)
    _check_harmless(given, reading, world_size)
    read = DeepSpeedConfig(
        batch=_batch(given, reading, world_size),
        world_size=world_size,
        optimizer=_optimizer(given, reading),
        scheduler=_scheduler(given, reading),
        gradient_clipping=_clipping(given, reading.notices),
        **_precisions(given, reading),
        zero_optimization=_zero(given, reading, world_size),
        **_checkpointing(given, reading),
    )
    _tell_of_no_stage(read, reading.notices)
    return replace(read, notices=tuple(reading.notices))  # last: all above add to them


def _batch(given: Mapping[str, Any], reading: Reading, world_size: int) -> BatchSizes:
    if given.get("managed_gradient_accumulation", True) is not True:
        raise ConfigError(
            "managed_gradient_accumulation: memfit's step takes the whole batch, so where a step ends cannot be left to the loop"
        )
    ranks = convert(int | None, given.get("sequence_parallel_size"), "sequence_parallel_size", quoted=False)
    if ranks not in (None, 1):
        raise ConfigError("sequence_parallel_size: memfit trains on one device, which has sequences whole")
    train, micro, accumulation = (
        convert(int | Auto | None, given.get(name), name, quoted=False)
        for name in (batch.TRAIN, batch.MICRO, batch.ACCUMULATION)
    )
    sizes = batch.infer(train, micro, accumulation, world_size)
    if sizes.accumulation != 1:
        reading.notices.append(
            "gradient_accumulation_steps: micro-batches count for what the loss averages over (samples, or tokens that are not masked), where DeepSpeed "
            "counts each alike; the same where each holds as much"
        )
    return sizes


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


def _optimizer(given: Mapping[str, Any], reading: Reading) -> Optimizer | None:
    if given.get("optimizer", 0) == {} or "optimizer" not in given:
        return None
    found = reading.section(Optimizer, given["optimizer"], "optimizer")
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
        reading.notices.append(
            'optimizer.type "Adam" is AdamW, in DeepSpeed as here; for Adam say adam_w_mode: false in its params'
        )
    return replace(found, type=name)


def _scheduler(given: Mapping[str, Any], reading: Reading) -> Scheduler | None:
    if given.get("scheduler", 0) == {} or "scheduler" not in given:
        return None
    found = reading.section(Scheduler, given["scheduler"], "scheduler")
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


def _precisions(given: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    fp16 = reading.section(Fp16, given.get("fp16", {}), "fp16", closed=True)
    # DeepSpeed looks at the old name where the new one is not there, or says nothing.
    name = "bfloat16" if given.get("bf16") is None and "bfloat16" in given else "bf16"
    bf16 = reading.section(
        Bf16, given.get(name) if given.get(name) is not None or name == "bfloat16" else {}, name, closed=True
    )
    if name == "bf16" and "bfloat16" in given:
        reading.notices.append("bfloat16 is ignored: it is the old name of bf16, which is there too")
    autocast = reading.section(TorchAutocast, given.get("torch_autocast", {}), "torch_autocast")
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
            reading.notices.append(
                f"{key}: parameters stay as the model has them and operations run in {key} under autocast, where DeepSpeed casts the model and keeps "
                f"fp32 copies; roundings differ"
            )
    return {"fp16": fp16, "bf16": bf16, "torch_autocast": _autocast(autocast, given)}


def _tell_of_no_stage(read: DeepSpeedConfig, notices: list[str]) -> None:
    """What DeepSpeed's optimizers for 16 bits do where no ZeRO stage brings its own; tests/integrations/deepspeed/test_training.py shows both."""
    if read.zero_optimization.stage not in (0, AUTO):
        return
    for key, part in (("fp16", read.fp16), ("bf16", read.bf16)):
        if part.enabled is True:
            notices.append(
                f"{key}: without a ZeRO stage DeepSpeed {keys.VERSION} begins with a step of zero gradients, which Adam counts and in which weights decay; "
                "memfit takes none, as DeepSpeed from stage 1 on"
            )
    if read.fp16.enabled is True:
        notices.append(
            f"fp16: without a ZeRO stage DeepSpeed {keys.VERSION} divides gradients by the scale and does not multiply the loss by it; memfit does both, as "
            "DeepSpeed from stage 1 on"
        )


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


def _zero(given: Mapping[str, Any], reading: Reading, world_size: int) -> ZeroOptimization:
    data = given.get("zero_optimization", {})
    if isinstance(data, bool):
        reading.notices.append(f"zero_optimization: {shown(data)} is the old form of stage {int(data)}")
        data = {"stage": int(data)}
    for key in data if isinstance(data, Mapping) else ():
        if key in keys.REMOVED_ZERO:
            raise ConfigError(
                f"zero_optimization.{key}: DeepSpeed {keys.VERSION} has it no longer, and refuses it: {keys.REMOVED_ZERO[key]}"
            )
    if isinstance(data, Mapping) and "leaf_module" in data:
        reading.known(data["leaf_module"], "zero_optimization.leaf_module", keys.LEAF_MODULE, closed=True)
    zero = _without_old_names(
        reading.section(ZeroOptimization, data, "zero_optimization", closed=True), reading.notices
    )
    _check_stage(zero)
    for key in ("zenflow", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, key) not in (None, False, AUTO):
            raise ConfigError(
                f"zero_optimization.{key}: cannot be honoured: it changes results, and memfit's plans do not"
            )
    if isinstance(zero.stage, int) and zero.stage > 0 and world_size == 1:
        reading.notices.append(
            f"zero_optimization.stage {zero.stage} holds as it is on one rank: what is shared out among one stays there"
        )
    return zero


def _without_old_names(zero: ZeroOptimization, notices: list[str]) -> ZeroOptimization:
    for old, new, section in (
        ("cpu_offload", "offload_optimizer", OffloadOptimizer),
        ("cpu_offload_param", "offload_param", OffloadParam),
    ):
        value = getattr(zero, old)
        if value in (None, AUTO):
            continue
        if getattr(zero, new) is not None:
            raise ConfigError(f"zero_optimization: {old} is the old name of {new}: give one of them")
        notices.append(f'zero_optimization.{old} is the old form of {new}: {{"device": "cpu"}}')
        if value is True:
            moved: dict[str, Any] = {new: section(device="cpu")}
            zero = replace(zero, **moved)
    return zero


def _check_stage(zero: ZeroOptimization) -> None:
    path = "zero_optimization"
    if zero.compute_grad_norm is False and zero.stage not in (1, 2, AUTO):
        raise ConfigError(f"{path}.compute_grad_norm: false goes with stage 1 or 2, not with stage {zero.stage}")
    state, parameters = zero.offload_optimizer, zero.offload_param
    if state is not None and state.device in {"cpu", "nvme"} and zero.stage == 0:
        raise ConfigError(
            f"{path}.offload_optimizer: goes with stage 1, 2 or 3, and DeepSpeed drops it at stage 0: give a stage"
        )
    if state is not None and not isinstance(state.ratio, Auto) and state.ratio < 1:
        raise ConfigError(
            f"{path}.offload_optimizer.ratio: {state.ratio} cannot be honoured: memfit moves all state or none"
        )
    if parameters is not None and parameters.device in {"cpu", "nvme"} and zero.stage not in (3, AUTO):
        raise ConfigError(
            f"{path}.offload_param: goes with stage 3, and DeepSpeed drops it at stage {zero.stage}: give stage 3"
        )
    for name, part in (("offload_optimizer", state), ("offload_param", parameters)):
        if part is not None and part.device == "nvme" and part.nvme_path is None:
            raise ConfigError(f"{path}.{name}.nvme_path is missing: the folder to write to")


def _checkpointing(given: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "activation_checkpointing" in given:
        section = reading.section(
            ActivationCheckpointing, given["activation_checkpointing"], "activation_checkpointing"
        )
        found["activation_checkpointing"] = section
        reading.notices.append(
            "activation_checkpointing switches nothing on, in DeepSpeed either: it is about how deepspeed.checkpointing keeps what it is called on; "
            "memfit chooses what to recompute, and what to keep in the host's memory"
        )
    if "gradient_checkpointing" in given:
        wanted = convert(bool, given["gradient_checkpointing"], "gradient_checkpointing", quoted=False)
        found["gradient_checkpointing"] = wanted
        reading.notices.append(
            "gradient_checkpointing is no key of DeepSpeed, which ignores it; memfit chooses which layers to recompute"
            + (
                ""
                if wanted
                else ", and recomputes none where the budget has room for all: results are the same either way"
            )
        )
    return found


def _check_switches(given: Mapping[str, Any]) -> None:
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


def _check_harmless(given: Mapping[str, Any], reading: Reading, world_size: int) -> None:
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
    for key in given:
        if key in keys.HARMLESS and (world_size == 1 or keys.HARMLESS[key] != keys.ONE_RANK):
            reading.notices.append(f"{key} has no effect: {keys.HARMLESS[key]}")
