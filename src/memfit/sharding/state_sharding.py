"""The optimizer's state shared out among ranks that have the same parameters (ZeRO 1): torch's ZeroRedundancyOptimizer around the user's optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.optimizers.chunked import ChunkedOptimizer

Arrange = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


def sharded_state(made: torch.optim.Optimizer, group: dist.ProcessGroup, arrange: Arrange) -> torch.optim.Optimizer:
    """An optimizer whose step updates this rank's parameters and sends them to the others.

    Args:
        made: the user's own, over all parameters.
        group: ranks that have the same parameters.
        arrange: what the choices make of an optimizer, for the one that steps this rank's own state.
    """
    with warnings.catch_warnings():
        # torch's own advice about its optimizers in TorchScript, which are imported along
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        groups = [{**group, "params": list(group["params"])} for group in made.param_groups]
        sharded = ZeroRedundancyOptimizer(groups, optimizer_class=_like(made, arrange), process_group=group)  # type: ignore[arg-type]
    # torch leaves out what it was not given by name, and a schedule looks there for what it is to move (OneCycleLR for momentum or betas).
    sharded.defaults.update(made.defaults)
    return sharded


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has this rank's state: of torch's the one inside."""
    inside: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inside


def only_with(made: torch.optim.Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer like this one with fewer parameters: what a rank steps of those that ZeroRedundancyOptimizer deals out (`dealt_out`).

    Args:
        made: the user's own.
        parameters: of each of its groups.
    """
    groups = [{**group, "params": list(own)} for group, own in zip(made.param_groups, parameters, strict=True)]
    return _like(made, lambda one: one)(groups)


def dealt_out(groups: Sequence[Sequence[int]], ranks: int) -> list[list[list[int]]]:
    """Which parameters each rank gets: in each group the largest first, each to the rank that has the least so far, as ZeroRedundancyOptimizer does it.

    Args:
        groups: numbers of elements of the parameters of each group.
        ranks: how many share them out.

    Returns:
        For each group and each rank, positions in the group.
    """
    sizes = [0] * ranks
    found = []
    for group in groups:
        shares: list[list[int]] = [[] for _ in range(ranks)]
        for position in sorted(range(len(group)), key=lambda one: group[one], reverse=True):
            rank = sizes.index(min(sizes))
            shares[rank].append(position)
            sizes[rank] += group[position]
        found.append(shares)
    return found


def something(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters for an optimizer; one of no elements where there are none, as torch makes no optimizer of nothing and schedules of the rate need one."""
    return list(parameters) or [nn.Parameter(torch.empty(0))]


def _like(made: torch.optim.Optimizer, arrange: Arrange) -> Callable[..., torch.optim.Optimizer]:
    """Makes an optimizer like this one for other groups of parameters."""
    chunked = made if isinstance(made, ChunkedOptimizer) else None
    kind, defaults = type(made) if chunked is None else chunked.kind, made.defaults

    def like(groups: Any, **_: Any) -> torch.optim.Optimizer:
        own = [{k: v for k, v in group.items() if k != "params"} | {"params": group["params"]} for group in groups]
        plain = kind(own, **_accepted(kind, defaults))
        return arrange(plain if chunked is None else chunked.around(plain))

    return like


def _accepted(kind: type, defaults: dict[str, Any]) -> dict[str, Any]:
    """Of an optimizer's defaults, what its constructor takes: some note more than they are given (AdamW's `decoupled_weight_decay`)."""
    names = inspect.signature(kind).parameters
    return {name: value for name, value in defaults.items() if name in names}
