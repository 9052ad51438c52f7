"""Paths that come in training first, on one rank alone or on several: a step is begun anew by those that take one while the others wait for its gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import memfit
import small
from memfit.capture.capture import capture
from memfit.capture.source import StepSource
from memfit.techniques.choices import Choices
from models.paths import LeftOutByTorch, loss_of, sample
from sharding import new_paths, steps
from sharding.new_paths import NEVER
from sharding.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(way: str, micro_batches: int, share: float = 0.85) -> memfit.Plan:
    """At this share of the plain peak that planning knows, for two ranks."""
    return planned_for(new_paths.built(), new_paths.penalised, way, micro_batches, share)


def planned_for(model: nn.Module, loss_fn: Any, way: str, micro_batches: int, share: float) -> memfit.Plan:
    fixed = {"sharding": way, "micro_batches": micro_batches}
    most = memfit.plan(model, steps.part_of(sample(), 0, 2), loss_fn, 1 << 40, small.adamw, devices=2, fixed=fixed)
    return memfit.replan(most, round(share * most.prediction.plain_peak_bytes))


def test_ranks_learn_their_paths_while_the_others_wait() -> None:
    """Kept plain, they exceed the budget."""
    never = (NEVER, NEVER)
    cases = [
        ("data", 1, (NEVER, 2), never, ([], [2])),
        ("zero1", 1, (2, 3), never, ([2], [3])),
        ("data", 2, (3, NEVER), (NEVER, 5), ([2], [3])),
    ]
    plans = [planned(way, parts) for way, parts, *_ in cases]
    told = [(plan.to_json(), longer, loss) for plan, (_, _, longer, loss, _) in zip(plans, cases, strict=True)]
    for rank, of_one in enumerate(on_ranks(2, new_paths.trained, told)):
        for plan, (_, parts, longer, loss, anew), (records, parameters, said) in zip(plans, cases, of_one, strict=True):
            losses, alone = new_paths.undivided(longer, loss, parts)
            assert [record.step for record in records if record.begun_anew] == anew[rank], said
            assert not any(record.divergences for record in records)
            assert max(record.peak_bytes or 0 for record in records) <= plan.budget_bytes
            assert [record.loss for record in records] == pytest.approx(losses, abs=1e-6)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, alone, strict=True))
            assert (f"on rank {rank}, a forward differed from the plan and was ended" in said) == bool(anew[rank])


@pytest.mark.slow
def test_a_step_that_is_left_after_its_last_forward_sends_nothing_of_its_first_backward() -> None:
    """Gradients were expected by then: those of the first micro-batch were sent when the step began anew. A step on two paths is kept plain."""
    longer, loss = (NEVER, NEVER), (NEVER, 4)
    losses, alone = new_paths.undivided(longer, loss, 2)
    told = [(planned("data", 2).to_json(), longer, loss)]
    for rank, ((records, parameters, _),) in enumerate(on_ranks(2, new_paths.trained, told)):
        assert bool(records[1].begun_anew) == bool(records[1].divergences) == (rank == 1)
        assert [record.loss for record in records] == pytest.approx(losses, abs=1e-6)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, alone, strict=True))


@pytest.mark.slow
def test_under_zero_3_a_new_path_is_kept_plain_and_told() -> None:
    """The others wait inside forward, where parameters are gathered."""
    longer, never = (2, 2), (NEVER, NEVER)
    losses, alone = new_paths.undivided(longer, never, 1)
    told = [(planned("zero3", 1).to_json(), longer, never)]
    for rank, ((records, parameters, said),) in enumerate(on_ranks(2, new_paths.trained, told)):
        assert [record.step for record in records if record.divergences] == [2, 3, 4]
        assert not any(record.begun_anew for record in records)
        assert [record.loss for record in records] == pytest.approx(losses, abs=1e-6)
        assert all(torch.allclose(m, t, rtol=0, atol=1e-6) for m, t in zip(parameters, alone, strict=True))
        assert f"on rank {rank}, a forward differed from the plan and was kept plain" in said
        assert "so is every step on this path, as none is learnt in training under ZeRO 2, ZeRO 3 or pipelines" in said


def test_a_parameter_without_a_gradient_is_told() -> None:
    """The rank went on to messages of its own, in which others did not meet it, or torch spoke of it in the next step."""
    for rank, (said, raised) in enumerate(on_ranks(2, new_paths.left_out, planned("data", 1).to_json())):
        assert f"on rank {rank}, the path that a step took cannot be learnt: a parameter gets no gradient" in said
        assert raised.startswith("on rank 0 a parameter gets no gradient in this step (blocks.3.norm.weight), which")


@pytest.mark.slow
def test_paths_that_chance_decides_are_planned_for_on_ranks() -> None:
    """One of them was, that of the numbers which planning happened to draw; a rank kept everything on the others, and exceeded the budget."""
    plan = planned_for(LeftOutByTorch(), loss_of, "zero2+whole", 1, 0.85)
    assert "random numbers, drawn anew in each step, decide which operations run" in "\n".join(plan.notes)
    for records in on_ranks(2, new_paths.drawn, plan.to_json()):
        assert not any(record.divergences for record in records)
        assert max(record.peak_bytes or 0 for record in records) <= plan.budget_bytes


def drawing(model: nn.Module, batch: Any) -> torch.Tensor:
    print(random.random())  # noqa: T201 - what is put into lists is taken out again
    return loss_of(model, batch)


def test_a_capture_on_ranks_leaves_pythons_numbers_to_forward(capsys: pytest.CaptureFixture[str]) -> None:
    """Collectives on fake tensors draw from the same generator: forwards met other numbers than the ends of the range, and a path was missing."""
    source = StepSource(new_paths.built(), sample(), drawing)
    for way in ("data/2", "zero3/2"):
        random.seed(5)
        capture(source, Choices(sharding=way))
    random.seed(5)
    numbers = [random.random(), random.random()]
    assert [float(line) for line in capsys.readouterr().out.split()] == numbers * 2
