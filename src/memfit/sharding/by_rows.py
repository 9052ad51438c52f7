"""Whether an optimizer may step rows of a parameter by themselves, as ZeRO 2 and 3 have it do: Muon makes each matrix as a whole orthogonal, and may not."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from memfit.errors import InputError
from memfit.optimizers.chunked import kind_and_groups
from memfit.optimizers.elementwise import MOMENTS
from memfit.sharding.state_sharding import only_with

_ROWS: Final = 4  # of the small matrix that is looked at
_STEPS: Final = 3  # some rules begin with plain steps


def check_by_rows(made: torch.optim.Optimizer) -> None:
    """Check that an optimizer gives rows what it gives the whole parameter.

    Raises:
        InputError: it does not.
    """
    kind, groups = kind_and_groups(made)
    if kind in MOMENTS:
        return
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ROWS, _ROWS, generator=generator)
    whole = [nn.Parameter(start.clone()) for _ in groups]
    halves = [[nn.Parameter(half.clone()) for half in start.chunk(2)] for _ in groups]
    try:
        on_whole, on_halves = only_with(made, [[one] for one in whole]), only_with(made, halves)
        for _ in range(_STEPS):
            gradient = torch.randn(_ROWS, _ROWS, generator=generator)
            for one, two in zip(whole, halves, strict=True):
                one.grad = gradient.clone()
                for half, part in zip(two, gradient.chunk(2), strict=True):
                    half.grad = part.clone()
            on_whole.step()
            on_halves.step()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return  # it takes no such matrix, so it cannot be told
    if not all(torch.allclose(one, torch.cat(tuple(two))) for one, two in zip(whole, halves, strict=True)):
        raise InputError(
            f"{kind.__name__} gives a part of a parameter's rows other numbers than the whole parameter, and ZeRO 2 and 3 deal out rows: train data parallel, "
            "with ZeRO 1, or in a pipeline"
        )
