"""What a rank does in the tests of random numbers in pipelines: it tells what its dropout has kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
import small
from sharding import steps

LAYERS: Final = 4
DROPPED: Final = 0.5
MICRO_BATCHES: Final = 4
STEPS: Final = 3
SEED: Final = 7


def dropping() -> steps.Built:
    """A chain with dropout in every block."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(small.WIDTH, small.WIDTH), nn.Tanh(), nn.Dropout(DROPPED)) for _ in range(LAYERS))
    )
    return model, small.rows(64), small.squared_error


class Drew(NamedTuple):
    """What one rank has shown.

    Attributes:
        masks: of each call of a dropout, what it kept.
        losses: of some steps.
        again: of as many steps from the same beginning.
        state_before, state: of the process's generator before and after them.
        peak_bytes: of a metered step.
    """

    masks: list[Tensor]
    losses: list[float]
    again: list[float]
    state_before: Tensor
    state: Tensor
    peak_bytes: int


def masks(rank: int, plans: Sequence[dict[str, Any]]) -> list[Drew]:
    """For each plan, all ranks seeded alike."""
    found = []
    for data in plans:
        outputs: list[Tensor] = []  # looked at after the steps: an operation more in a forward would not be as planned
        model, engine, own = _begun(rank, data)
        hooks = [
            module.register_forward_hook(partial(_note, outputs))
            for module in model.modules()
            if isinstance(module, nn.Dropout)
        ]
        before = torch.get_rng_state()
        losses = [engine.step(own).loss for _ in range(STEPS)]
        state = torch.get_rng_state()
        for hook in hooks:
            hook.remove()
        kept = [output.detach() != 0 for output in outputs]
        outputs.clear()
        peak = min(engine.step(own, meter=True).peak_bytes or 0 for _ in range(4))
        assert not any(record.divergences for record in engine.records)
        _, other, own = _begun(rank, data)
        again = [other.step(own).loss for _ in range(STEPS)]
        found.append(Drew(kept, losses, again, before, state, peak))
    return found


def _note(outputs: list[Tensor], _: nn.Module, __: Any, output: Tensor) -> None:
    if not isinstance(output, FakeTensor):  # the look before the first step has no values
        outputs.append(output)


def _begun(rank: int, data: dict[str, Any]) -> tuple[nn.Module, memfit.Engine, Any]:
    model, sample, loss_fn = dropping()
    engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, steps.sgd)
    assert engine.sharded is not None
    own = tuple(part.clone() for part in steps.part_of(sample, rank, engine.sharded.ranks))
    torch.manual_seed(SEED)
    return model, engine, own
