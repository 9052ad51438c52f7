"""Schedules of DeepSpeed with small numbers, and what any object with a `step` sets in an optimizer under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

STEPS = 16
BETWEEN = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}
COURSES: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup, log": ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 6}),
    "warmup, linear": ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.03, "warmup_num_steps": 7, "warmup_type": "linear"}),
    "warmup to the optimizer's rate": ("WarmupLR", {"warmup_num_steps": 4}),
    "warmup of one step": ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 1}),
    "warmup, two groups": ("WarmupLR", {"warmup_min_lr": [0.0, 1e-3], "warmup_max_lr": [0.01, 0.02], "warmup_num_steps": 5}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 12, "warmup_max_lr": 0.02, "warmup_num_steps": 4}),
    "decay, linear": ("WarmupDecayLR", {"total_num_steps": 13, "warmup_num_steps": 3, "warmup_type": "linear"}),
    "decay shorter than its warmup": ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
    "cosine, ratios": (
        "WarmupCosineLR",
        {"total_num_steps": 11, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_type": "linear"},
    ),
    "cosine shorter than its warmup": ("WarmupCosineLR", {"total_num_steps": 3, "warmup_num_steps": 5}),
    "range": ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.5}),
    "range, stairs": ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    "cycle": ("OneCycle", {**BETWEEN, "cycle_first_step_size": 5}),
    "cycle, decay": (
        "OneCycle",
        {**BETWEEN, "cycle_first_step_size": 3, "cycle_second_step_size": 4, "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01},
    ),
    "cycle, stairs": (
        "OneCycle",
        {**BETWEEN, "cycle_first_step_size": 6, "cycle_second_step_size": 5, "cycle_first_stair_count": 3, "cycle_second_stair_count": 2},
    ),
    "cycle without momentum": ("OneCycle", {**BETWEEN, "cycle_first_step_size": 4, "cycle_momentum": False}),
    "gone on from the third step": ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 6, "last_batch_iteration": 2}),
}  # fmt: skip


def optimizer(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.05, 0.07)]
    return kind(groups, lr=0.05)  # type: ignore[call-arg]


def walked(make: Callable[[torch.optim.Optimizer], Any], kind: type[torch.optim.Optimizer]) -> list[list[Any]]:
    """Rate and betas of both groups in each step."""
    chosen = optimizer(kind)
    schedule = make(chosen)
    found: list[list[Any]] = []
    for _ in range(STEPS):
        found.append([[float(group["lr"]), *map(float, group.get("betas", ()))] for group in chosen.param_groups])
        schedule.step()
    return found
