"""A Lightning Trainer on several ranks: what its loop, its validation and its checkpoints need of a module that memfit has shared out.

Lightning's strategy "ddp" launches the ranks, makes their group and deals out the data; its wrapper around the module is taken off, since no plan could choose
beside it. The optimizer, with schedules over it, exists by then. So it stays the same object where it steps shards (its groups get them), and its groups stay
the same where torch's ZeroRedundancyOptimizer steps them: schedules set rates where they did.

Checkpoints hold whole tensors, as Lightning's of one process do, and go on in any number of ranks, shared out in any way, or without memfit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memfit.engine.engine import Engine
from memfit.errors import InputError
from memfit.integrations.optimizer_parts import gathers_itself, set_state, whole_state
from memfit.sharding.sharded import ShardedModel

COPIES_PARAMETERS: Final = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def refuse_shared_out(module: nn.Module) -> None:
    """Refuse a module of which this rank has a part only.

    Raises:
        InputError: it is one.
    """
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise InputError(
            "the module's parameters are shared out among ranks, by an earlier trainer.fit or by its own configure_model: save it with "
            "trainer.save_checkpoint, called on all ranks, load that into a new module, and go on with that one"
        )


def refuse_beside_shards(trainer: Any, engine: Engine) -> None:
    """Refuse callbacks that read parameters as whole tensors where a rank has a part of each.

    Raises:
        InputError: there is one; all ranks raise it.
    """
    assert engine.sharded is not None
    found = [type(each).__name__ for each in trainer.callbacks if type(each).__name__ in COPIES_PARAMETERS]
    if engine.sharded.shards_parameters and found:
        way = engine.plan.choices.sharding.partition("/")[0]
        raise InputError(
            f'{found[0]} averages whole parameters, of which a rank has a part under {way}: leave it out, or take fixed={{"sharding": "zero1"}}'
        )


def as_call(module: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """A step of the strategy, called as the module, in whose hooks parameters are gathered and gradients made ready to be sent."""

    def called(*args: Any, **named: Any) -> Any:
        def forward(*inside: Any, **more: Any) -> Any:
            vars(module).pop("forward")  # what the step calls is the module's own
            return own(*inside, **more)

        module.forward = forward
        try:
            return module(*args, **named)
        finally:
            vars(module).pop("forward", None)

    return called


class LightningOnRanks:
    """Sets attributes of one strategy for a module that is shared out; no class is changed.

    Args:
        trainer: whose strategy.
        engine: of the plan, on this rank; it gets the optimizer that Lightning steps.
    """

    def __init__(self, trainer: Any, engine: Engine) -> None:
        assert engine.sharded is not None
        self._trainer = trainer
        self._sharded: ShardedModel = engine.sharded
        self._evaluation = ExitStack()
        engine.optimizer = self._stepped(engine.optimizer)
        if not self._sharded.shards_parameters:
            return
        strategy, plugin = trainer.strategy, trainer.precision_plugin
        plugin.clip_grad_by_norm = lambda _, clip_val: self._sharded.clip(clip_val)
        strategy.validation_step = as_call(trainer.lightning_module, strategy.validation_step)
        strategy.lightning_module_state_dict = self._sharded.whole
        strategy.optimizer_state = self._whole_state

    def _stepped(self, made: Any) -> torch.optim.Optimizer:
        """The optimizer that steps what this rank has, with the state and the settings of the trainer's own.

        Args:
            made: like the trainer's own, over what this rank has.
        """
        own: torch.optim.Optimizer = self._trainer.optimizers[0]
        if gathers_itself(made):
            if own.state:
                made.load_state_dict(own.state_dict())  # torch's takes what it has of a whole state
                own.state = defaultdict(dict)
            made.param_groups = own.param_groups
            own._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's schedules ask whether it has stepped
            self._trainer.strategy.optimizers = [made]
            return made  # type: ignore[no-any-return]
        if not self._sharded.shards_parameters:
            return own
        held, own.state = own.state, defaultdict(dict)
        states: list[dict[str, Any] | None] = []
        for group, parts in zip(own.param_groups, made.param_groups, strict=True):
            states += [held.get(p) for p in group["params"] if p.requires_grad]
            group["params"] = parts["params"]
        if held:
            saved = own.state_dict()
            saved["state"] = {number: state for number, state in enumerate(states) if state is not None}
            set_state(own, self._sharded, saved)
        return own

    def _whole_state(self, optimizer: Any) -> dict[str, Any]:
        """In place of the strategy's; all ranks come here, and rank 0 writes."""
        return whole_state(getattr(optimizer, "optimizer", optimizer), self._sharded) or {}

    def begin_evaluation(self) -> None:
        """Validation begins."""
        self._evaluation.enter_context(self._sharded.evaluating())

    def end_evaluation(self) -> None:
        """Validation is over: parameters are shared out again."""
        self._evaluation.close()

    def release(self) -> None:
        """Training is over: nothing of this is left, but for how a module that stays shared out is saved."""
        self._evaluation.close()
        vars(self._trainer.precision_plugin).pop("clip_grad_by_norm", None)
        vars(self._trainer.strategy).pop("validation_step", None)
        if not self._sharded.shards_parameters:
            self._sharded.close()
