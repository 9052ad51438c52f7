"""Train what a DeepSpeed configuration describes: `memfit.from_deepspeed("ds_config.json").fit(model, sample, budget="8GiB")` gives an engine.

The engine is memfit's own: one call is one optimizer step over the whole batch, after which the schedule has moved. It does not pose as DeepSpeed's
(`engine(batch)`, `engine.backward(loss)`, `engine.step()`): between the first two the loss is computed outside, where a plan can neither drop nor
recompute anything, and the loss head often holds the most memory of a step. See docs/design/core.md, "Integrations".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final, Protocol

import torch
from torch import nn

from memfit import api, batches
from memfit.batches import Batch, LossFunction
from memfit.engine.engine import Engine
from memfit.errors import ConfigError, InputError
from memfit.hardware.machine import known_machine
from memfit.integrations.deepspeed import DeepSpeedConfig, read
from memfit.integrations.deepspeed import schedules as own_schedules
from memfit.integrations.deepspeed.keys import SCHEDULES, VERSION
from memfit.integrations.deepspeed.sections import Optimizer, Scheduler
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.optimizers.lion import Lion
from memfit.planning import changed, planning_of
from memfit.progress import Progress
from memfit.ranks import place
from memfit.step.device import device_of
from memfit.step.program import OptimizerFactory
from memfit.techniques.autocast.precision import ScaleRule
from memfit.values.plan import Plan
from memfit.values.request import Budget


class RateSchedule(Protocol):
    """A learning-rate schedule, one of DeepSpeed's or of torch's."""

    def set(self) -> None:
        """Write the rates of the next step into the optimizer."""

    def step(self) -> None:
        """A step was taken."""

    def get_last_lr(self) -> list[float]:
        """Rates of the next step, one for each parameter group."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


def from_deepspeed(
    path_or_dict: str | PathLike[str] | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    strict: bool = True,
    world_size: int | None = None,
    streamed: str = "",
) -> FromDeepSpeed:
    """What a DeepSpeed configuration describes, ready to be planned for and trained.

    Args:
        path_or_dict: path of a JSON or hjson file, or its content.
        auto: values for keys that say "auto" and are not the planner's, by their paths: {"optimizer.params.lr": 1e-4}. What is left "auto" of batch
            sizes, precision and placement the planner decides.
        strict: an unknown key is an error; False ignores it with a notice, where DeepSpeed ignores it.
        world_size: ranks the configuration is for; None for as many as torchrun has started, 1 where this process is alone. With more than one the ZeRO stage
            says how the step is shared out, samples are those of one rank, and `fit` is called on every rank, as `memfit.fit` with `devices`.
        streamed: path of the repeated blocks whose parameters are offloaded, where zero_optimization.offload_param asks for that.

    Raises:
        ConfigError: what DeepSpeed refuses, what memfit cannot honour, or an "auto" for which there is no value; the message starts with the key.
        InputError: the file needs the hjson package, which is not installed.
    """
    if world_size is None:
        there = place()
        world_size = 1 if there is None else there[1]
    return FromDeepSpeed(read(path_or_dict, strict=strict, world_size=world_size, auto=auto), streamed)


@dataclass(frozen=True)
class FromDeepSpeed:
    """A DeepSpeed configuration, ready to plan, apply and train.

    Attributes:
        config: as it was read; DeepSpeed's defaults are those of `memfit.integrations.deepspeed.VERSION`.
        streamed: path of the blocks that are streamed where the configuration moves parameters; "" for none.
    """

    config: DeepSpeedConfig
    streamed: str = ""

    @property
    def notices(self) -> tuple[str, ...]:
        """Where memfit interprets the file differently from what it may suggest. Plans made here have these among their notes."""
        return self.config.notices

    @property
    def lower_tier(self) -> str | None:
        """Folder for parameters, or otherwise optimizer state, that are offloaded to disk; None where none is named."""
        return self._folder("offload_param") or self._folder("offload_optimizer")

    def plan(
        self,
        model: nn.Module,
        sample: Batch,
        loss_fn: LossFunction | None = None,
        budget: Budget = "80%",
        optimizer: OptimizerFactory | None = None,
        *,
        host_budget: Budget | None = None,
        disk_budget: Budget | None = None,
        allow: Sequence[str] = (),
        freeze: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
        device: str | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """As `memfit.plan`, with what the configuration says.

        Args:
            optimizer: makes the optimizer, where the configuration has none.
            allow, fixed: besides what the configuration says; may not contradict it.
            model, sample, loss_fn, budget, host_budget, disk_budget, freeze, device, progress: as for `memfit.plan`. What the configuration moves to the disk
                counts where the disk is: below a GPU's host `disk_budget`, right below a CPU `host_budget`.

        Raises:
            ConfigError: the configuration is for another batch than the sample, contradicts an argument, or leaves a required value open.
            InfeasibleError, BudgetError, InputError, CaptureError: as for `memfit.plan`.
        """
        factory = self._factory(model, optimizer)
        said = self._arguments(model, sample, allow, fixed, device)
        made = api.plan(
            model, sample, loss_fn, budget, factory,
            host_budget=host_budget, disk_budget=disk_budget, freeze=freeze, device=device, progress=progress,
            lower_tier=self.lower_tier, devices=self._devices, **said,
        )  # fmt: skip
        return changed(made, notes=(*made.notes, *self._told()))

    def apply(self, plan: Plan, model: nn.Module, loss_fn: LossFunction | None = None) -> Engine:
        """As `memfit.apply`: an engine for a plan of this configuration, with its schedule and the scale that fp16 begins with."""
        factory = None if self.config.optimizer is None or planning_of(plan) is not None else self.optimizer
        return self.equip(api.apply(plan, model, loss_fn, factory, lower_tier=self.lower_tier))

    def fit(
        self,
        model: nn.Module,
        sample: Batch,
        loss_fn: LossFunction | None = None,
        budget: Budget = "80%",
        optimizer: OptimizerFactory | None = None,
        *,
        host_budget: Budget | None = None,
        disk_budget: Budget | None = None,
        allow: Sequence[str] = (),
        freeze: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """As `memfit.fit`, with what the configuration says: an engine whose `step` takes a whole batch and moves the schedule. Arguments as for `plan`."""
        factory = self._factory(model, optimizer)
        said = self._arguments(model, sample, allow, fixed)
        engine = api.fit(
            model, sample, loss_fn, budget, factory,
            host_budget=host_budget, disk_budget=disk_budget, freeze=freeze, progress=progress, lower_tier=self.lower_tier,
            devices=self._devices, **said,
        )  # fmt: skip
        told = changed(engine.plan, notes=(*engine.plan.notes, *self._told()))
        engine.plan = told
        engine.add(told)
        return self.equip(engine)

    def equip(self, engine: Engine) -> Engine:
        """Give an engine the schedule of the configuration, and the scale that fp16 begins with and moves by."""
        if engine.optimizer is not None:
            engine.schedule = self.schedule(engine.optimizer)
        self.scale(engine)
        return engine

    def scale(self, engine: Engine) -> None:
        """Give an engine in fp16 the scale that the configuration begins with and moves by."""
        if engine.scaling is not None and self.config.scaling is not None:
            engine.scaling.follow(ScaleRule(**self.config.scaling))

    def optimizer(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of the configuration over these parameters, or groups of them.

        Raises:
            ConfigError: the configuration has none, leaves a value "auto", or asks for what torch and memfit do not have.
        """
        said = self.config.optimizer
        if said is None:
            raise ConfigError(
                "the DeepSpeed configuration has no optimizer: give the function that makes it, optimizer=..."
            )
        own_schedules.settled(said.params, "optimizer")
        kind, settings = _settings(said)
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        try:
            made: torch.optim.Optimizer = kind(parameters, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer.params: torch refuses what they say of {said.type}: {error}") from error
        # The plan decides where the state is; here only the folder is set. The state of streamed layers is offloaded with them.
        folder = None if self.streamed else self._folder("offload_optimizer")
        return made if folder is None else ChunkedOptimizer(made, folder=folder)

    def schedule(self, optimizer: torch.optim.Optimizer) -> RateSchedule | None:
        """The schedule of the configuration on an optimizer, whose rates it sets from here on; None where the configuration has none.

        Raises:
            ConfigError: a value is "auto", or none that the schedule takes.
        """
        said = self.config.scheduler
        if said is None:
            return None
        if said.type in SCHEDULES:
            return own_schedules.DeepSpeedSchedule(said, optimizer)
        own_schedules.settled(said.params)
        return TorchSchedule(said, optimizer)

    def arguments(self, model: nn.Module, sample: Batch, device: str | None = None) -> dict[str, Any]:
        """Keyword arguments for `memfit.plan` and `memfit.fit`: clip_norm, allow, fixed; for this model and batch.

        Args:
            model, sample: that are planned for; of several ranks the sample is one's.
            device: name of the device that is planned for; None for the model's.
        """
        kind = device_of(model).type if device is None else known_machine(device).kind
        return self.config.arguments(streamed=self.streamed, samples=batches.size(sample), device=kind)

    def _arguments(
        self,
        model: nn.Module,
        sample: Batch,
        allow: Sequence[str],
        fixed: Mapping[str, Any] | None,
        device: str | None = None,
    ) -> dict[str, Any]:
        said = self.arguments(model, sample, device)
        for name, value in (fixed or {}).items():
            if said["fixed"].get(name, value) != value:
                raise ConfigError(
                    f"fixed {name}={value!r} contradicts the DeepSpeed configuration, which says {said['fixed'][name]!r}: change one of them"
                )
        return {
            "clip_norm": said["clip_norm"],
            "allow": tuple(dict.fromkeys((*said["allow"], *allow))),
            "fixed": {**(fixed or {}), **said["fixed"]},
        }

    def _factory(self, model: nn.Module, optimizer: OptimizerFactory | None) -> OptimizerFactory:
        """What makes the optimizer; whatever is wrong with it or with the schedule is said before anything is captured."""
        if optimizer is not None and self.config.optimizer is not None:
            raise InputError(
                "the DeepSpeed configuration has an optimizer, and one was given besides: leave one of them out"
            )
        factory = optimizer or self.optimizer
        trained = [nn.Parameter(torch.empty_like(p, device="meta")) for p in model.parameters() if p.requires_grad]
        if trained:
            self.schedule(factory(trained))
        return factory

    @property
    def _devices(self) -> int | None:
        return None if self.config.world_size == 1 else self.config.world_size

    def _told(self) -> tuple[str, ...]:
        return tuple(f"DeepSpeed configuration: {notice}" for notice in self.notices)

    def _folder(self, section: str) -> str | None:
        """The folder on the disk that a section names."""
        said = getattr(self.config.zero_optimization, section)
        return (
            said.nvme_path if said is not None and said.device == "nvme" and isinstance(said.nvme_path, str) else None
        )


# ------------------------------------------------------------------------------------------------------------ optimizers

# Of DeepSpeed's Adam, which are about its kernels or say which Adam it is.
_WHICH: Final = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "set_grad_none", "bias_correction")
_FUSED_ADAM: Final[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_FUSED_LION: Final[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}


def _settings(said: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and its keyword arguments, with DeepSpeed's defaults where they are not torch's."""
    params = dict(said.params)
    match said.type:
        case "adam" | "adamw":
            return _adam(said.type, params)
        case "adagrad":
            return torch.optim.Adagrad, params
        case "lion":
            params.pop("set_grad_none", None)
            return Lion, {**_FUSED_LION, **params}
    return getattr(torch.optim, said.type), params


def _adam(name: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    decoupled = name == "adamw" or params.get("adam_w_mode", True) is True
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    given = {key: value for key, value in params.items() if key not in _WHICH}
    if params.get("torch_adam", False):
        for key in ("bias_correction", "set_grad_none"):
            if key in params:
                raise ConfigError(
                    f"optimizer.params.{key}: torch's Adam, which torch_adam asks for, has no such parameter"
                )
        return kind, given  # with torch's own defaults: AdamW decays by 0.01
    if params.get("bias_correction", True) is not True:
        raise ConfigError(
            "optimizer.params.bias_correction: false cannot be honoured: torch's Adam, which memfit uses, corrects"
        )
    if given.pop("amsgrad", False):
        raise ConfigError(
            f"optimizer.params.amsgrad: DeepSpeed {VERSION} has it with torch_adam: true alone, and so it is here"
        )
    if given.pop("foreach", None) is not None:
        raise ConfigError("optimizer.params.foreach: goes with torch_adam: true")
    return kind, {**_FUSED_ADAM, **given, "fused": True}


# ------------------------------------------------------------------------------------------------------ torch's schedules


class _Shadow(torch.optim.Optimizer):
    """The settings of an optimizer's groups without its parameters, which nothing updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        super().__init__([{**g, "params": [torch.empty(0)]} for g in groups], dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's signature is overloaded
        """Nothing; torch's schedulers want to see it called."""


class TorchSchedule:
    """One of torch's schedulers, on a shadow of the optimizer from which the rates are copied.

    A scheduler replaces the `step` of what it is given by one that counts, which then has to be the one that is called; an engine may update
    by other ways (inside backward, layer by layer).

    Args:
        scheduler: what the configuration says.
        optimizer: whose rates it sets, from here on.
    """

    def __init__(self, scheduler: Scheduler, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._shadow = optimizer, _Shadow(optimizer)
        kind: Any = getattr(torch.optim.lr_scheduler, scheduler.type)
        try:
            self._inner = kind(self._shadow, **scheduler.params)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"scheduler.params: torch refuses what they say of {scheduler.type}: {error}") from error
        self.set()

    def set(self) -> None:
        """See `RateSchedule`."""
        for group, shadow in zip(self.optimizer.param_groups, self._shadow.param_groups, strict=True):
            group.update({name: shadow[name] for name in ("lr", "betas", "momentum") if name in group})

    def step(self) -> None:
        """See `RateSchedule`."""
        self._shadow.step()
        self._inner.step()
        self.set()

    def get_last_lr(self) -> list[float]:
        """See `RateSchedule`."""
        return [float(group["lr"]) for group in self._shadow.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """See `RateSchedule`."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._shadow.param_groups]
        return {"scheduler": self._inner.state_dict(), "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RateSchedule`."""
        for group, known in zip(self._shadow.param_groups, state["groups"], strict=True):
            group.update(known)
        self._inner.load_state_dict(state["scheduler"])


__all__ = ["FromDeepSpeed", "RateSchedule", "TorchSchedule", "from_deepspeed"]
