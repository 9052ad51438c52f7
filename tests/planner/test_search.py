"""The choice of micro-batches around the plans, what is rejected and why, and what is said when nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest

from memfit.errors import InfeasibleError
from memfit.hardware.machine import known_machine
from memfit.hardware.topology import Topology
from memfit.planner.infeasible import NothingFitsError
from memfit.planner.solvers import SLACK_BYTES
from memfit.planning import Planning
from memfit.techniques.choices import Choices
from memfit.values.bundle import TraceBundle, Weighting
from memfit.values.request import Request
from memfit.values.script import KEPT
from memfit.values.trace import BEFORE_STEP, Category, Storage, Trace
from planner.traces import Writer, drawn, network
from sweeps import each_seed

SAMPLES = 16


def sized(parts: int, *, layers: int = 6, overhead: float = 0.05) -> Trace:
    """A chain whose activations shrink with the parts, with a fixed cost for each part."""
    size, seconds = 960 // parts, 1.0 / parts + overhead
    w = Writer()
    weight = w.before(500)
    x = w.before(size, Category.BATCH)
    saves = []
    for number in range(layers):
        saves.append(w.save(x))
        h = w.one((x, weight), 3 * size, seconds=seconds, module=f"layer.{number}")
        saves.append(w.save(h))
        x = w.one((h,), size, seconds=seconds / 4, module=f"layer.{number}")
    w.backward()
    gradient = w.one((x,), size, seconds=0.0)
    for save in reversed(saves):
        gradient = w.one((gradient, w.unpack(save)), size, seconds=seconds)
    w.update()
    w.run((gradient,), writes=(weight,), seconds=0.1)
    return replace(w.trace(), choices=Choices(parts, -(-SAMPLES // parts)))


class Captured:
    """Stands in for what captures traces of a model."""

    loss_fn = optimizer = None

    def __init__(self, trace_of: Callable[[Choices], Trace], weighting: Weighting) -> None:
        self._trace_of = trace_of
        self._weighting = weighting
        self.told: list[str] = []  # what was said to be ahead, at each capture

    def trace_of(self, choices: Choices, ahead: str = "") -> Trace:
        self.told.append(ahead)
        return self._trace_of(choices)

    def weighting(self, freeze: Sequence[str]) -> Weighting:
        return self._weighting


def planning(
    trace_of: Callable[[Choices], Trace], weighting: Weighting, *, fixed: int | None, candidates: tuple[Choices, ...]
) -> Planning:
    request = Request(fixed={} if fixed is None else {"micro_batches": fixed})
    bundle = TraceBundle(request, Topology.single(known_machine("t4")), SAMPLES, candidates)
    return Planning(bundle, Captured(trace_of, weighting))


def search(
    *,
    fixed: int | None = None,
    splits: bool = True,
    extra: int = 0,
    overhead: float = 0.05,
    fresh: Callable[[int], float] = lambda _: 0.0,
) -> tuple[Planning, list[int]]:
    """A search over `sized` chains, and the list of what it captured.

    Args:
        fixed, splits, extra, overhead: of the model and the request.
        fresh: of so many micro-batches, the share of the seconds of each that large blocks take.
    """
    asked: list[int] = []

    def trace_of(choices: Choices) -> Trace:
        parts = choices.micro_batches
        assert parts not in asked, "captured twice"
        asked.append(parts)
        trace = replace(sized(parts, overhead=overhead), changed_buffer_bytes=extra)
        return replace(trace, fresh_memory_seconds=fresh(parts) * trace.pass_seconds)

    how = Weighting("samples") if splits else Weighting(None, "batch norm sees the whole batch")
    return planning(trace_of, how, fixed=fixed, candidates=(Choices(),)), asked


def test_a_plain_budget_gets_the_plain_plan_and_nothing_else_is_looked_at() -> None:
    made, asked = search()
    plan = made.plan(made.plain_peak())
    assert plan.script.plain
    assert plan.choices.micro_batches == 1
    assert plan.choices.weights == "whole"
    assert plan.prediction.peak_bytes == plan.prediction.plain_peak_bytes == made.plain_peak() - SLACK_BYTES
    assert plan.prediction.step_seconds == plan.prediction.plain_step_seconds == plan.prediction.bound_seconds
    assert plan.gap == 0
    assert asked == [1]


def test_one_byte_less_than_plain_takes_a_plan() -> None:
    made, _ = search(fixed=1)
    plan = made.plan(made.plain_peak() - SLACK_BYTES - 1)
    assert not plan.script.plain
    assert plan.prediction.peak_bytes < made.plain_peak()
    assert plan.prediction.step_seconds > plan.prediction.plain_step_seconds
    assert plan.prediction.bound_seconds <= plan.prediction.step_seconds


@pytest.mark.parametrize("fixed", [None, 1, 4])
def test_the_smallest_budget_named_works_and_a_byte_less_does_not(fixed: int | None) -> None:
    made, _ = search(fixed=fixed)
    with pytest.raises(InfeasibleError) as caught:
        made.plan(100)
    error = caught.value
    assert error.budget_bytes == 100
    assert error.minimum_bytes is not None
    assert str(error.minimum_bytes) in str(error)
    assert error.module.startswith("layer.") or error.module == ""
    assert ("outside any module" in str(error)) == (error.module == "")
    plan = made.plan(error.minimum_bytes)
    assert plan.prediction.peak_bytes == error.minimum_bytes - SLACK_BYTES
    with pytest.raises(InfeasibleError) as again:
        made.plan(error.minimum_bytes - 1)
    assert again.value.minimum_bytes == error.minimum_bytes


def test_where_not_even_the_most_micro_batches_fit_the_others_are_not_captured() -> None:
    made, asked = search()
    least, _ = made.smallest()
    assert asked == [1, 16, 8]
    made, asked = search()
    with pytest.raises(InfeasibleError, match="16 micro-batches: nothing fits") as caught:
        made.plan(least - 1)
    assert caught.value.minimum_bytes == least
    assert asked == [1, 2, 16, 8]
    made, asked = search()
    with pytest.raises(NothingFitsError) as unexplained:
        made.plan(least - 1, explained=False)
    assert unexplained.value.least_bytes == least - SLACK_BYTES
    assert asked == [1, 2, 16]


@pytest.mark.parametrize("enough", [1, 2, 4, 8, 16])
def test_of_the_numbers_that_need_as_little_the_fewest_micro_batches_are_told(enough: int) -> None:
    """Beyond some number a batch cannot be made smaller: a model that pads it to a multiple, say."""

    def trace_of(choices: Choices) -> Trace:
        return replace(sized(min(choices.micro_batches, enough)), choices=choices)

    made = planning(trace_of, Weighting("samples"), fixed=None, candidates=(Choices(),))
    _, found = made.smallest()
    assert found.number == enough


def test_what_the_engine_keeps_beside_the_trace_counts() -> None:
    bare, _ = search(fixed=1)
    laden, _ = search(fixed=1, extra=1000)
    assert laden.plain_peak() == bare.plain_peak() + 1000
    budget = bare.plain_peak() - 300
    one, other = bare.plan(budget), laden.plan(budget + 1000)
    assert one.script == other.script
    assert other.prediction.peak_bytes == one.prediction.peak_bytes + 1000
    assert laden.smallest()[0] == bare.smallest()[0] + 1000
    assert laden.plan(laden.plain_peak()).script.plain
    assert not laden.plan(laden.plain_peak() - SLACK_BYTES - 1).script.plain


def test_parts_are_taken_where_they_are_faster_than_rerunning() -> None:
    cheap, _ = search(overhead=0.0001)
    plan = cheap.plan(cheap.plain_peak() * 6 // 10)
    assert plan.choices.micro_batches > 1
    assert plan.choices.weights == "samples"
    assert plan.choices.micro_batch_size == SAMPLES // plan.choices.micro_batches
    assert any(text.startswith("1 micro-batch:") for text in plan.rejected)
    dear, _ = search(overhead=5.0)
    plan = dear.plan(dear.plain_peak() * 8 // 10)
    assert plan.choices.micro_batches == 1
    assert any(text.startswith("2 micro-batches:") for text in plan.rejected)


def test_a_batch_that_fits_is_divided_where_large_blocks_take_longer_than_dividing() -> None:
    """Else more bytes would make it slower. From two micro-batches on blocks are small, so no further ones are looked at."""
    made, asked = search(overhead=-0.2, fresh=lambda parts: 0.3 if parts == 1 else 0.0)
    for budget in (made.plain_peak(), 1 << 40):
        plan = made.plan(budget)
        assert (plan.choices.micro_batches, plan.script.plain) == (2, True)
        (note,) = (note for note in plan.notes if "undivided" in note)
        assert 'fixed={"micro_batches": 1}' in note
    assert asked == [1, 2]
    below = made.plan(made.plain_peak() - SLACK_BYTES - 1)
    assert below.choices.micro_batches == 2
    assert not any("undivided" in note for note in below.notes)  # it does not fit


@pytest.mark.parametrize(
    ("overhead", "share", "looked_at"), [(-0.2, 0.02, [1]), (0.05, 0.3, [1, 2])], ids=["few blocks", "slower"]
)
def test_a_batch_that_fits_is_left_whole_where_that_is_as_fast(
    overhead: float, share: float, looked_at: list[int]
) -> None:
    made, asked = search(overhead=overhead, fresh=lambda parts: share if parts == 1 else 0.0)
    plan = made.plan(made.plain_peak())
    assert plan.choices.micro_batches == 1
    assert not any("undivided" in note for note in plan.notes)
    assert asked == looked_at


def test_parts_that_change_the_result_are_rejected_with_the_reason() -> None:
    made, asked = search(splits=False, overhead=0.0001)
    plan = made.plan(made.plain_peak() * 8 // 10)
    assert plan.choices.micro_batches == 1
    assert "micro-batches: batch norm sees the whole batch" in plan.rejected
    assert asked == [1]


def test_a_choice_of_the_user_is_kept() -> None:
    made, asked = search(fixed=4)
    for budget in (made.plain_peak(), made.smallest()[0]):
        assert made.plan(budget).choices.micro_batches == 4
    assert asked == [4]


def test_a_choice_that_stands_in_the_way_is_among_the_ways_out_where_another_leads_to_a_plan() -> None:
    free, _ = search(overhead=0.0001)
    least = free.smallest()[0]
    made, _ = search(fixed=1, overhead=0.0001)
    with pytest.raises(InfeasibleError) as caught:
        made.plan(least)
    (way,) = (r for r in caught.value.remedies if r.kind == "micro_batches")
    assert caught.value.minimum_bytes is not None
    assert way.saved_bytes == caught.value.minimum_bytes - least
    assert way.arguments is not None
    number = way.arguments["fixed"]["micro_batches"]
    assert way.text == f'fixed={{"micro_batches": {number}}}'
    assert search(fixed=number, overhead=0.0001)[0].plan(least).choices.micro_batches == number
    with pytest.raises(InfeasibleError) as hopeless:
        made.plan(least - 1)
    assert [remedy.kind for remedy in hopeless.value.remedies] == ["budget"]


def test_traces_are_captured_once() -> None:
    made, asked = search()
    for budget in (made.plain_peak(), made.plain_peak() // 2, made.smallest()[0]):
        made.plan(budget)
    assert len(asked) == len(set(asked))


def test_more_bytes_never_take_more_seconds() -> None:
    made, _ = search()
    smallest, plain = made.smallest()[0], made.plain_peak()
    seconds = [made.plan(smallest + (plain - smallest) * i // 12).prediction.step_seconds for i in range(13)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == min(seconds)


@each_seed(12)
def test_a_plan_tells_of_its_peak_what_the_trace_says(seed: int) -> None:
    trace = network(seed, blocks=4) if seed % 2 else drawn(seed, forward=12, rng_bytes=7)
    made = Planning(TraceBundle.of(trace))
    smallest, plain = made.smallest()[0], made.plain_peak()
    for budget in {smallest, (smallest + plain) // 2, plain}:
        plan = made.plan(budget)
        p = plan.prediction
        assert p.peak_bytes <= budget
        assert sum(p.categories_at_peak.values()) == p.peak_bytes
        totals = [sum(band[i] for band in p.curve.values()) for i in range(len(p.moments))]
        assert max(totals) == p.peak_bytes
        assert max(p.plain_curve) <= p.plain_peak_bytes
        assert len(p.phases) == len(p.moments) == len(p.plain_curve)
        assert p.bound_seconds <= p.step_seconds + 1e-9
        saved = sum(m.kept_bytes + m.dropped_bytes for m in plan.by_module)
        recipes = made.solver(1).recipes
        assert saved == sum(trace.storages[s].bytes for s in recipes.saved)
        answered = {s for s in plan.script.saves if s != KEPT}
        assert bool(answered) is not plan.script.plain


def test_a_trace_of_micro_batches_says_that_nothing_fits_in_no_bytes() -> None:
    """The way out of another number of micro-batches was looked for, which nobody has captured."""
    trace = network(0, blocks=4)
    made = Planning(TraceBundle.of(replace(trace, choices=trace.choices.but(micro_batches=2, micro_batch_size=4))))
    with pytest.raises(InfeasibleError, match="is too little: the smallest plan found needs"):
        made.plan(1)


WAYS = (
    Choices(),
    Choices(state_format="8bit"),
    Choices(update="in_backward"),
    Choices(state_format="8bit", update="in_backward"),
)


def in_ways(ways: tuple[Choices, ...], *, slower: float = 0.05) -> tuple[Planning, list[Choices]]:
    """A search over a chain with optimizer state and gradients, of which 8 bits leave a quarter at some cost and an early update little at none."""
    asked: list[Choices] = []

    def trace_of(choices: Choices) -> Trace:
        assert choices not in asked, "captured twice"
        asked.append(choices)
        base = sized(choices.micro_batches)
        packed, early = choices.state_format == "8bit", choices.update == "in_backward"
        state = Storage(1000 if packed else 4000, Category.OPTIMIZER_STATE, "", BEFORE_STEP, len(base.events))
        gradient = Storage(100 if early else 2000, Category.GRADIENT, "", base.forward_events, len(base.events))
        update = base.operations[-1]
        return replace(
            base,
            storages=(*base.storages, state, gradient),
            operations=(*base.operations[:-1], replace(update, seconds=update.seconds + slower * packed)),
            choices=replace(choices, micro_batch_size=base.choices.micro_batch_size),
        )

    return planning(trace_of, Weighting("samples"), fixed=None, candidates=ways), asked


def test_what_is_allowed_is_not_tried_where_it_cannot_win() -> None:
    made, asked = in_ways(WAYS, slower=50.0)
    plain = made.plain_peak()
    plan = made.plan(plain * 9 // 10)
    assert plan.choices.state_format == "32bit"
    assert not any(c.state_format == "8bit" and c.micro_batches > 1 for c in asked)
    assert any("8-bit optimizer state" in text and "and a plan that fits takes" in text for text in plan.rejected)


def test_a_bound_rules_a_way_out_before_it_is_captured() -> None:
    made, asked = in_ways(
        (Choices(), Choices(update="in_backward"), Choices(update="in_backward", state_format="8bit")), slower=0.0
    )
    plan = made.plan(made.plain_peak() - 1500)
    assert plan.choices.update == "in_backward"
    assert plan.script.plain
    assert Choices(update="in_backward", state_format="8bit") not in asked


def test_each_capture_tells_how_many_others_may_follow_and_how_long_they_take() -> None:
    made, asked = in_ways(WAYS)
    assert made.source is not None
    told = made.source.told  # type: ignore[attr-defined]
    made.plan(made.plain_peak() * 9 // 10)
    further = [
        0 if not text else int(re.fullmatch(r"; at most (\d+) other ways? after this one, about .+ or less", text)[1])
        for text in told
    ]
    assert told[0] == "", "how long one takes is not known yet"
    tried = [choices.used for choices in asked]
    assert any(further)
    for number, count in enumerate(further):
        if count:  # as many as were said, or fewer, came after it
            others = {str(used) for used in tried[number + 1 :]} - {str(tried[number])}
            assert len(others) <= count < len(WAYS)


def test_more_allowed_or_more_bytes_never_give_a_slower_plan() -> None:
    everything, _ = in_ways(WAYS)
    smallest, plain = everything.smallest()[0], everything.plain_peak()
    budgets = [smallest + (plain - smallest) * i // 10 for i in range(11)]
    before: list[float] = []
    for count in range(1, len(WAYS) + 1):
        made, _ = in_ways(WAYS[:count])
        seconds = [
            made.plan(budget).prediction.step_seconds if budget >= made.smallest()[0] else inf for budget in budgets
        ]
        assert seconds == sorted(seconds, reverse=True)
        assert all(now <= was for now, was in zip(seconds, before or seconds, strict=True))
        before = seconds
    assert before[0] < inf


def test_the_smallest_plan_is_looked_for_in_every_way() -> None:
    alone, _ = in_ways(WAYS[:1])
    everything, _ = in_ways(WAYS)
    size, found = everything.smallest()
    assert size <= alone.smallest()[0] - 3000
    assert found.candidate == WAYS[3]
    with pytest.raises(InfeasibleError, match=r"\(8-bit optimizer state, update inside backward, "):
        everything.plan(100)
    assert everything.plan(size).choices.state_format == "8bit"


def test_the_smallest_plan_is_looked_for_first_where_least_is_held_in_the_update() -> None:
    made, asked = in_ways((Choices(), Choices(state_format="8bit"), Choices(precision="bf16")))
    _, found = made.smallest()
    assert found.candidate == Choices(state_format="8bit")
    assert not any(
        choices.precision == "bf16" for choices in asked
    )  # autocast leaves the state as it is, which is more
