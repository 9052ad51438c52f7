"""Sentences of `explain()` are made from the numbers that they tell, and are true of every plan that they are written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
import small
from memfit.units import format_bytes
from memfit.values.prediction import Saving
from models import case

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(budget: int = 1 << 40, **named: Any) -> memfit.Plan:
    torch.manual_seed(0)
    model, sample, loss_fn = case("gpt").build()
    fixed = {"micro_batches": 1, **named.pop("fixed", {})}
    return memfit.plan(model, sample, loss_fn, budget, small.adamw, fixed=fixed, **named)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_streamed_layers_are_told_with_the_bytes_they_take_on_their_tier(clip_norm: float | None) -> None:
    plan = planned(fixed={"streamed": "blocks"}, clip_norm=clip_norm)
    model, _, _ = case("gpt").build()
    weights = sum(p.nbytes for p in model.get_submodule("blocks").parameters())
    state = 2 * sum(p.nbytes for p in model.parameters())
    (use,) = plan.prediction.tiers
    assert use.layer_bytes == weights * (1 if clip_norm is None else 2)
    assert use.state_bytes == pytest.approx(state, rel=0.01)  # AdamW's two moments, and its step counts
    told = plan.explain()
    assert f"Needs {format_bytes(use.all_bytes)} of disk besides: {format_bytes(use.layer_bytes)} of layers, " in told
    assert "the step runs as PyTorch runs it" not in told
    assert "with layers of blocks streamed and nothing dropped" in told
    assert memfit.Plan.from_json(plan.to_json()) == plan


def test_offloaded_state_is_told_with_its_bytes() -> None:
    plan = planned(fixed={"state_place": "disk"})
    (use,) = plan.prediction.tiers
    assert (use.bytes, use.layer_bytes) == (0, 0)
    state = format_bytes(use.state_bytes)
    assert f"Needs {state} of disk besides: {state} of optimizer state." in plan.explain()
    assert use.copy_seconds == plan.prediction.copy_seconds > 0


def test_only_the_plain_step_runs_as_pytorch_runs_it() -> None:
    assert "the step runs as PyTorch runs it" in planned().explain()
    split = planned(fixed={"micro_batches": 2}).explain()
    assert "the step runs as PyTorch runs it" not in split
    assert "Nothing that backward needs is dropped and recomputed, and no activations are offloaded." in split
    assert "that the step takes with 2 micro-batches and nothing dropped" in split
    assert "that plain PyTorch would take" in planned().explain()


def test_what_adds_to_the_peak_is_not_said_to_take_off_it() -> None:
    plan = planned()
    saving = Saving("a technique", 1 << 20, -(970 << 20), "", 0.5)
    told = replace(plan, savings=(saving,)).explain()
    assert "a technique: adds 970 MiB to the peak before anything is dropped" in told
    assert "takes -" not in told
