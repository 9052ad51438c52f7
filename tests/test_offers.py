"""One search over all techniques, on real models: bounds that hold, layers streamed where nothing else fits, and what each technique saves and costs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.capture.trace_source import TraceSource
from memfit.lower_tiers import requested
from memfit.offers import planning_for
from memfit.planner.optimistic import step_facts
from memfit.planning import Planning, planning_of
from memfit.techniques.choices import Choices
from memfit.techniques.registry import BY_NAME
from models import build_gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def wide() -> Any:
    """Most bytes are those of four equal blocks."""
    return build_gpt(layers=4, hidden=128, heads=4, batch=2, tokens=16, vocab=500)


def small_chain() -> Any:
    return small.chain(), small.rows(64), small.squared_error


def source_of(build: Any, device: str | None) -> TraceSource:
    model, sample, loss_fn = build()
    return TraceSource(model, sample, loss_fn, small.adamw, None, device)


shared_source = functools.cache(source_of)
"""What one test has captured is there for the next."""


def searched(build: Any = wide, source: Any = shared_source, **named: Any) -> tuple[Planning, Any]:
    found = source(build, named.get("device"))
    return planning_for(found, requested(found.model, **named)), found.model


GPU: Any = {"device": "rtx4090"}
BOTH: Any = {"host_budget": "1GiB", "disk_budget": "1GiB"}


@pytest.mark.slow  # `test_numbers_told` and `planner/` have the bounds in the quick run
@pytest.mark.parametrize("device", [{}, GPU], ids=["cpu", "gpu"])
def test_no_technique_does_better_than_its_bound(device: dict[str, Any]) -> None:
    search, _ = searched(host_budget="1GiB", allow=["8bit", "in_backward"], fixed={"micro_batches": 1}, **device)
    plain = search.solver(1)
    seen = set()
    for way in search.bundle.candidates[1:]:
        told = list(way.techniques)
        if len(told) > 1:
            continue
        ((name, _),) = told
        bound = BY_NAME[name].bound(step_facts(plain.timeline, search.bundle.lower_tier, search.bundle.layers))
        assert bound is not None
        alone = search.solver(1, way)
        assert alone.trace.plain_step_seconds >= plain.trace.plain_step_seconds + bound.seconds - 1e-9, name
        if bound.saved_bytes is not None:
            assert alone.plain.peak >= plain.plain.peak - bound.saved_bytes - 4096, name
        seen.add(name)
    assert seen == {"state_format", "state_place", "update", "streamed"}


def test_the_smallest_budget_has_a_plan_where_an_update_makes_more_than_its_state() -> None:
    """On a GPU AdamW takes the square roots of all second moments at once; in chunks, as where state is on the host, it does not."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))  # each a chunk of a GPU, so that one is few
    sample = torch.randn(2, 2048), torch.randn(2, 2048)
    named: Any = {"host_budget": "1GiB", "fixed": {"micro_batches": 1, "streamed": ""}, **GPU}
    roomy = memfit.plan(model, sample, small.squared_error, 1 << 40, torch.optim.AdamW, **named)
    smallest = memfit.smallest_budget(roomy)
    assert smallest < roomy.prediction.plain_peak_bytes / 2
    plan = memfit.replan(roomy, smallest)
    assert plan.choices.state_place == "host"
    assert plan.prediction.peak_bytes <= smallest


@pytest.mark.parametrize(
    ("named", "tiers", "places"),
    [
        ({}, [], []),
        ({"host_budget": "1GiB"}, ["disk"], ["disk"]),
        ({"host_budget": 0}, [], []),
        (GPU, ["host"], ["host"]),
        ({**GPU, "host_budget": "1GiB"}, ["host"], ["host"]),
        ({**GPU, "host_budget": 0}, [], []),
        ({**GPU, **BOTH}, ["host", "disk"], ["disk", "host"]),
    ],
    ids=str,
)
def test_tiers_take_what_the_pages_say(named: dict[str, Any], tiers: list[str], places: list[str]) -> None:
    """The table of docs/techniques/README.md: which tiers are open, where all of the state may be, and that layers go to the nearest alone."""
    search, _ = searched(fixed={"micro_batches": 1}, **named)
    below = search.bundle.lower_tier
    assert [link.tier for link in (below.chain if below is not None else ())] == tiers
    used = {c.state_place for c in search.bundle.candidates} - {"device"}
    assert sorted(used) == places
    assert any(c.streamed for c in search.bundle.candidates) is bool(tiers)
    if tiers:
        assert search.bundle.topology.down[0][0].tier == tiers[0]


def test_layers_are_streamed_where_nothing_else_fits() -> None:
    alone, _ = searched(fixed={"micro_batches": 1})
    model, sample, loss_fn = wide()
    budget = alone.smallest()[0] * 9 // 20  # parameters and gradients alone take more
    with pytest.raises(memfit.InfeasibleError):
        alone.plan(budget)

    engine = memfit.fit(model, sample, loss_fn, budget, small.adamw, host_budget="1GiB", fixed={"micro_batches": 1})

    assert engine.plan.choices.streamed == "blocks"
    assert engine.rehearsal is not None
    assert engine.rehearsal.measured_peak_bytes <= budget
    assert engine.rehearsal.measured_peak_bytes == pytest.approx(engine.plan.prediction.peak_bytes, rel=0.005)
    text = engine.plan.explain()
    assert "layers of blocks streamed: takes " in text
    assert "Copying to and from disk: " in text
    p = engine.plan.prediction
    assert 0 < p.exposed_seconds <= p.copy_seconds
    other, _, _ = wide()
    optimizer = small.adamw(other.parameters())
    for _ in range(3):
        loss = loss_fn(other, sample)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert engine.step(sample).loss == loss.item()


def test_nothing_is_streamed_where_the_room_below_is_too_small() -> None:
    search, model = searched(host_budget="64KiB")
    assert not any(way.streamed or way.state_place != "device" for way in search.bundle.candidates)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 64 * 1024
    with pytest.raises(
        memfit.InputError, match=r"host_budget='64KiB' is less than the layers and optimizer state to be offloaded"
    ):
        searched(host_budget="64KiB", fixed={"streamed": "blocks"})


def test_a_way_that_cannot_be_captured_is_rejected_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = TraceSource.trace_of

    def trace_of(self: TraceSource, choices: Choices, ahead: str = "") -> Any:
        if choices.precision == "bf16":
            raise memfit.CaptureError("no kernel for it")
        return captured(self, choices, ahead)

    monkeypatch.setattr(TraceSource, "trace_of", trace_of)
    search, _ = searched(source=source_of, allow=["bf16"], fixed={"micro_batches": 1})
    made = search.plan((search.plain_peak() + search.smallest()[0]) // 2)
    assert "bf16 autocast: no kernel for it" in made.rejected
    with pytest.raises(memfit.CaptureError, match="no kernel for it"):
        searched(source=source_of, fixed={"micro_batches": 1, "precision": "bf16"})[0].plan(1 << 40)


def test_each_technique_of_a_plan_is_told_with_what_it_saves_and_costs() -> None:
    model, sample, loss_fn = wide()
    fixed = {"state_format": "8bit", "update": "in_backward"}
    made = memfit.plan(model, sample, loss_fn, 1 << 40, small.adamw, fixed={**fixed, "micro_batches": 1})
    search = planning_of(made)
    both = search.solver(1)
    told = {saving.technique: saving for saving in made.savings}
    assert set(told) == {"8-bit optimizer state", "update inside backward"}
    for saving, name in zip(made.savings, fixed, strict=True):
        without = search.solver(1, replace(search.bundle.candidates[0], **{name: getattr(Choices(), name)}))
        assert saving.predicted_bytes == without.plain.peak - both.plain.peak
        assert saving.seconds == both.trace.plain_step_seconds - without.trace.plain_step_seconds
        assert saving.claimed_bytes > 0
    assert told["8-bit optimizer state"].predicted_bytes > 0
    assert memfit.Plan.from_json(made.to_json()) == made


def test_micro_batches_are_told_too() -> None:
    search, _ = searched(small_chain)
    size, found = search.smallest()
    assert found.number > 1
    made = search.plan(size)
    saving = made.savings[-1]
    assert saving.technique == f"{made.choices.micro_batches} micro-batches"
    assert saving.predicted_bytes == search.solver(1).plain.peak - search.solver(found.number).plain.peak
    fixed = small.plan_at(1.0, small.chain(), small.rows(64))
    assert fixed.savings == ()


def test_gradients_are_let_go_only_where_that_is_allowed() -> None:
    silent, _ = searched(fixed={"micro_batches": 1})
    assert {way.update for way in silent.bundle.candidates} == {"after"}
    asked, model = searched(fixed={"micro_batches": 1}, allow=["in_backward"])
    found = asked.plan(asked.plain_peak() - 600_000)
    assert found.choices.update == "in_backward"
    assert all(p.grad is None for p in model.parameters())


class WritesWhatItSaves(nn.Module):
    """The output of a layer is written in place after autograd has saved it: allowed only where no gradient is wanted of it, or under no autocast."""

    def __init__(self, *, in_16_bits: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(small.WIDTH, small.WIDTH), nn.Linear(small.WIDTH, small.WIDTH)
        self.in_16_bits = in_16_bits

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).exp()
        if not self.in_16_bits or torch.is_autocast_enabled("cpu"):
            h.add_(1)
        return self.head(h)


def test_what_a_technique_saves_is_not_told_where_torch_refuses_the_step_without_it() -> None:
    made = memfit.plan(WritesWhatItSaves(), small.rows(8), small.squared_error, "1GiB", small.adamw, freeze=["first"])
    assert "freeze" not in [saving.technique for saving in made.savings]
    assert made.choices.frozen == ("first",)


def test_a_way_that_torch_refuses_is_rejected() -> None:
    model = WritesWhatItSaves(in_16_bits=True)
    made = memfit.plan(model, small.rows(8), small.squared_error, "1GiB", small.adamw, allow=["bf16"])
    assert made.choices.precision == "full"
    assert any("bf16" in reason and "modified by an inplace operation" in reason for reason in made.rejected)
