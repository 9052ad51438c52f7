"""Optimizer state shared out: an optimizer that is made alone for a rank has the parameters that torch's ZeroRedundancyOptimizer deals out to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.process_group import fake_group
from memfit.sharding.state_sharding import dealt_out, only_with, sharded_state, something, stepped

RANKS = 3


def made() -> torch.optim.Optimizer:
    """Two groups; in the second one some are of equal size."""
    torch.manual_seed(0)
    first = [nn.Parameter(torch.zeros(size)) for size in (5, 40, 7, 40)]
    second = [nn.Parameter(torch.zeros(size)) for size in (9, 9, 9, 1, 30)]
    groups: list[dict[str, Any]] = [{"params": first, "lr": 0.5}, {"params": second}]
    return torch.optim.AdamW(groups, weight_decay=0.25)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_alone_has_what_torch_deals_out_to_it(rank: int) -> None:
    whole = made()
    with fake_group(RANKS, rank) as group:
        torchs = stepped(sharded_state(whole, group, lambda one: one))
    dealt = dealt_out([[p.numel() for p in group["params"]] for group in whole.param_groups], RANKS)
    shares = [positions[rank] for positions in dealt]
    own = only_with(
        whole,
        [[g["params"][position] for position in mine] for g, mine in zip(whole.param_groups, shares, strict=True)],
    )
    assert len(own.param_groups) == len(torchs.param_groups) == 2
    for mine, theirs in zip(own.param_groups, torchs.param_groups, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in theirs["params"]]
        assert (mine["lr"], mine["weight_decay"]) == (theirs["lr"], theirs["weight_decay"])


def test_an_optimizer_of_nothing_steps() -> None:
    optimizer = torch.optim.AdamW(something([]), fused=True)
    optimizer.step()
    assert not optimizer.state


def test_a_schedule_that_moves_momentum_finds_it() -> None:
    with fake_group(RANKS, 0) as group:
        shared = sharded_state(made(), group, lambda one: one)
        schedule = torch.optim.lr_scheduler.OneCycleLR(shared, max_lr=0.5, total_steps=10)
        of_one = torch.optim.lr_scheduler.OneCycleLR(made(), max_lr=0.5, total_steps=10)
    assert schedule.get_last_lr() == of_one.get_last_lr()
    assert [g["betas"] for g in shared.param_groups] == [g["betas"] for g in of_one.optimizer.param_groups]
