"""The two panels and the loss: what is drawn where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.techniques.choices import Choices
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.report import FrontierPoint, Rehearsal, Report, StepRecord
from memfit.values.trace import Category
from memfit.views import colours
from memfit.views.drawing import (
    GRID,
    Dot,
    Drawing,
    Hover,
    Line,
    Polygon,
    Text,
    counted,
    shortened,
    stacked,
    text_width,
    wrapped,
)
from memfit.views.frontier_picture import bounds_of, efficient, frontier_picture, ratios
from memfit.views.labels import Area, area_of, place_label
from memfit.views.layout import NARROW, WIDE, Layout
from memfit.views.loss_picture import loss_picture
from memfit.views.svg import svg
from memfit.views.timeline_picture import timeline_picture
from memfit.views.trials_picture import TrialPoint, trials_picture
from views import reports
from views.paper import crossing, inside

Make = Callable[[], Report]


def texts(drawing: Drawing) -> list[str]:
    return [s.text for s in drawing.shapes if isinstance(s, Text)]


@pytest.mark.parametrize("make", [reports.report, reports.plain_report, reports.bare_report, reports.split_report])
def test_pictures_stay_on_their_paper_and_texts_apart(make: Make) -> None:
    report = make()
    for layout in (WIDE, NARROW):
        for drawing in (
            timeline_picture(report.plan, report.rehearsal, layout),
            frontier_picture(report.plan, report.frontier, layout),
            loss_picture(report.records, layout),
        ):
            if drawing is not None:
                assert inside(drawing)
                assert crossing(drawing) == []


@pytest.mark.parametrize("layout", [WIDE, NARROW])
def test_trials_stay_on_their_paper_and_texts_apart(layout: Layout) -> None:
    points = [TrialPoint(i, (40 + 7 * i) * 2**20, 2.5 - 0.1 * i, f"optim.lr {i}") for i in range(12)]

    drawing = trials_picture(points, "validation_accuracy", [11], layout)

    assert drawing is not None
    assert inside(drawing)
    assert crossing(drawing) == []


def test_two_percent_look_like_two_percent() -> None:
    plan = reports.plan()
    seconds = plan.prediction.plain_step_seconds
    slower = replace(plan, prediction=replace(plan.prediction, step_seconds=1.02 * seconds, bound_seconds=seconds))
    dots = [s for s in frontier_picture(slower).shapes if isinstance(s, Dot) and s.title]

    heights = sorted(dot.y for dot in dots)
    assert len(heights) == 2
    assert 0 < heights[1] - heights[0] < 0.08 * 260  # of the height of the plot


def test_bands_are_stacked_and_named_in_one_order() -> None:
    report = reports.report()
    drawing = timeline_picture(report.plan, report.rehearsal)

    order = [colour for _, colour in colours.BANDS.values()]
    drawn = [s.fill for s in drawing.shapes if isinstance(s, Polygon) and s.fill in order and len(s.points) > 4]
    keys = [s.fill for s in drawing.shapes if isinstance(s, Polygon) and s.fill in order and len(s.points) == 4]
    assert drawn == keys == [colour for colour in order if colour != colours.BANDS[Category.OTHER][1]]


def test_the_peaks_and_the_budget_are_named_with_their_bytes() -> None:
    report = reports.report()
    drawn = texts(timeline_picture(report.plan, report.rehearsal))

    assert {"plain peak 20.7 GiB", "budget 8.00 GiB", "predicted peak 7.68 GiB", "measured peak 7.69 GiB"} <= set(drawn)
    assert "prediction: 9,437,184 bytes (0.11 %) too low" in " ".join(drawn)
    assert {"forward", "backward", "clip", "optimizer"} <= set(drawn)


def test_the_top_of_the_stack_is_the_predicted_peak() -> None:
    report = reports.report()
    drawing = timeline_picture(report.plan, report.rehearsal)

    top = min(y for s in drawing.shapes if isinstance(s, Polygon) and len(s.points) > 4 for _, y in s.points)
    across = [
        s.points[0][1]
        for s in drawing.shapes
        if isinstance(s, Line) and s.colour == colours.PREDICTED and len(s.points) == 2
    ]
    assert across == [pytest.approx(top, abs=0.01)]


def test_a_line_far_beyond_is_named_and_not_drawn() -> None:
    report = reports.split_report()
    drawing = timeline_picture(report.plan, report.rehearsal)

    assert "plain peak 90.0 GiB ↑" in texts(drawing)
    long = [s for s in drawing.shapes if isinstance(s, Line) and s.points[-1][0] - s.points[0][0] > 600]
    assert {s.colour for s in long} >= {colours.BUDGET, colours.PREDICTED, colours.MEASURED}
    assert colours.PLAIN not in {s.colour for s in long}


def test_a_category_of_a_later_version_is_drawn_all_the_same() -> None:
    base = reports.plan()
    p = base.prediction
    curve = {**p.curve, "host_cache": (2**20,) * len(p.moments)}
    drawing = timeline_picture(replace(base, prediction=replace(p, curve=curve, categories_at_peak={})))

    assert "host cache 1.00 MiB" in texts(drawing)


def test_the_measured_curve_has_a_strip_of_its_own() -> None:
    report = reports.report()
    assert "Measured in the rehearsal" in texts(timeline_picture(report.plan, report.rehearsal))
    assert "Measured in the rehearsal" not in texts(timeline_picture(report.plan, None))


def test_without_a_curve_the_bytes_at_the_peak_are_drawn() -> None:
    base = reports.plan()
    drawing = timeline_picture(
        replace(base, prediction=replace(base.prediction, moments=(), curve={}, phases=(), plain_curve=()))
    )

    assert "this plan carries no curve: drawn are the bytes at its peak" in texts(drawing)
    assert "activations 4.91 GiB" in texts(drawing)


def placed_plan(share: float, ratio: float, budget: float, micro_batches: int = 1) -> Plan:
    """A plan at a share of the plain peak, with a time and a budget as parts of the plain step's."""
    base = reports.plan()
    p = base.prediction
    prediction = replace(
        p,
        peak_bytes=round(share * p.plain_peak_bytes),
        step_seconds=ratio * p.plain_step_seconds,
        bound_seconds=(0.3 + 0.7 * ratio) * p.plain_step_seconds,
    )
    choices = Choices(micro_batches, 4 if micro_batches > 1 else 0)
    return replace(base, budget_bytes=round(budget * p.plain_peak_bytes), choices=choices, prediction=prediction)


def points_of(count: int, base: Plan) -> list[FrontierPoint]:
    """So many plans down a falling curve, more micro-batches in the smaller ones; the chosen plan is the last."""
    p = base.prediction
    others = []
    for i in range(count - 1):
        share, slower = 1 - 0.9 * i / count, 0.4 * (i / count) ** 2
        seconds = p.plain_step_seconds * (1 + slower)
        parts = 1 if i < count // 2 else 2 ** (1 + 3 * i // count)
        size = round(share * p.plain_peak_bytes)
        others.append(FrontierPoint(size, size, seconds, 0.97 * seconds, parts))
    chosen = FrontierPoint(base.budget_bytes, p.peak_bytes, p.step_seconds, p.bound_seconds, base.choices.micro_batches)
    return [*others, chosen] if count else []


@pytest.mark.alternate(0)
@pytest.mark.parametrize("count", [0, 1, 2, 6, 40])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4, 0.7, 0.93, 0.99, 1.0])
def test_no_text_covers_another_wherever_the_chosen_plan_lies(share: float, count: int) -> None:
    for ratio in (0.95, 1.0, 1.02, 1.38, 2.6):
        for room in (1.0, 1.05, 1.6):  # the budget, in peaks of the plan
            for parts in (1, 4):
                plan = placed_plan(share, ratio, share * room, parts)
                drawing = frontier_picture(plan, points_of(count, plan))

                assert crossing(drawing) == [], (ratio, room, parts)
                assert inside(drawing)
                assert any(t.startswith(("this plan", "Not drawn")) for t in texts(drawing))
                assert len([t for t in texts(drawing) if t.startswith("this plan")]) in {0, 2}  # by the dot, in the key


@pytest.mark.alternate(1)
@pytest.mark.parametrize("share", [0.02, 0.4, 0.93, 1.0])
def test_no_text_of_the_timeline_covers_another_wherever_the_peaks_lie(share: float) -> None:
    for room in (1.0, 1.05, 1.6):
        for parts in (1, 4):
            plan = placed_plan(share, 1.2, share * room, parts)
            peak = plan.prediction.peak_bytes
            for measured in (peak, peak + 1, round(1.3 * peak)):
                drawing = timeline_picture(plan, Rehearsal(peak, measured, 1.0))

                assert crossing(drawing) == [], (room, parts, measured)
                assert inside(drawing)


def test_a_name_goes_where_no_text_is_and_lines_are_few() -> None:
    room, name = Area(0, 0, 200, 100), Text(0, 0, "name")
    first = place_label(name, [(100, 50)], room, [])
    assert first is not None
    assert room.contains(area_of(first))
    other = place_label(name, [(100, 50)], room, [first])
    assert other is not None
    assert not area_of(other).overlaps(area_of(first))
    across = [(0.0, first.y), (200.0, first.y)]
    away = place_label(name, [(100, 50)], room, [], lines=[across])
    assert away is not None
    assert not area_of(away).intersects(across[0], across[1])
    assert place_label(name, [(100, 50)], Area(0, 0, 10, 10), []) is None


def test_a_line_crosses_an_area_or_passes_it() -> None:
    area = Area(10, 10, 20, 20)

    assert area.intersects((0, 15), (30, 15))
    assert area.intersects((12, 12), (14, 14))
    assert area.intersects((15, 0), (15, 30))
    assert not area.intersects((0, 25), (30, 25))
    assert not area.intersects((0, 0), (9, 30))
    assert not area.intersects((15, 0), (15, 9))


def test_the_plain_curve_is_named_and_so_is_that_of_a_part() -> None:
    report = reports.report()
    split = replace(report.plan, choices=Choices(4, 4, "samples"))

    assert "plain step" in texts(timeline_picture(report.plan))
    assert "this part with nothing dropped" in texts(timeline_picture(split))
    assert "plain step" not in texts(timeline_picture(reports.plain_report().plan))


def test_lines_that_coincide_are_dashed_over_one_drawn_through() -> None:
    base = reports.plan()
    peak = base.prediction.peak_bytes
    drawing = timeline_picture(replace(base, budget_bytes=peak), Rehearsal(peak, peak, 1.0))

    across = [s for s in drawing.shapes if isinstance(s, Line) and len(s.points) == 2 and s.colour != GRID]
    order = [s.colour for s in across if s.colour in {colours.BUDGET, colours.PREDICTED, colours.MEASURED}]
    assert order[0] == colours.MEASURED
    assert set(order[1:]) == {colours.BUDGET, colours.PREDICTED}


def test_a_long_remark_is_wrapped_and_not_cut() -> None:
    base = reports.plan()
    drawn = texts(timeline_picture(base, Rehearsal(10**9, 10**9 + 1, 1.0)))

    assert "(less than 0.01 %) too low" in " ".join(drawn)


def test_the_line_of_the_frontier_leaves_out_plans_that_a_smaller_one_beats() -> None:
    base = placed_plan(0.4, 0.97, 0.41, 4)
    p = base.prediction
    plain, beaten, small = (
        FrontierPoint(n, n, s * p.plain_step_seconds, 0, parts)
        for n, s, parts in ((p.plain_peak_bytes, 1.0, 1), (p.peak_bytes * 2, 1.2, 1), (p.peak_bytes // 2, 1.5, 4))
    )
    frontier, chosen = ratios(base, [plain, beaten, small])

    assert [r.ratio for r in efficient([*frontier])] == [1.5, 1.2, 1.0]
    assert [r.ratio for r in efficient(sorted([*frontier, chosen], key=lambda r: r.peak_bytes))] == [1.5, 0.97]


def test_only_bounds_for_as_many_micro_batches_stand_in_one_line() -> None:
    base = placed_plan(0.4, 0.97, 0.41, 4)
    frontier, chosen = ratios(base, points_of(6, base))

    assert {r.micro_batches for r in bounds_of(frontier, chosen)} == {4}
    drawn = texts(frontier_picture(base, points_of(6, base)))
    assert any(t.endswith("The lower bound is for 4 micro-batches.") for t in drawn)


def test_things_are_counted_in_words() -> None:
    assert [counted(n, "micro-batch") for n in (0, 1, 2)] == ["0 micro-batches", "1 micro-batch", "2 micro-batches"]
    assert counted(1200, "step") == "1,200 steps"
    one = [FrontierPoint(2**33, 2**33, 1.0, 1.0)]
    assert "1 budget" in texts(frontier_picture(reports.plan(), one))


numbers = st.integers(0, 2**45)


@st.composite
def predictions(draw: st.DrawFn) -> Prediction:
    """Whatever a plan file may hold, lengths that do not agree included."""
    moments = sorted(draw(st.lists(st.integers(-1, 10_000), max_size=8, unique=True)))
    series = st.lists(numbers, max_size=10).map(tuple)
    return Prediction(
        peak_bytes=draw(st.integers(1, 2**45)),
        plain_peak_bytes=draw(st.integers(1, 2**45)),
        step_seconds=draw(st.floats(0, 1e3)),
        plain_step_seconds=draw(st.sampled_from([0.0, 0.5, 1e3])),
        bound_seconds=draw(st.floats(0, 1e3)),
        seconds_are="measured",
        categories_at_peak=draw(st.dictionaries(st.sampled_from(list(map(str, Category))), numbers)),
        moments=tuple(moments),
        phases=tuple(draw(st.lists(st.sampled_from(["forward", "backward", "loss", ""]), max_size=10))),
        curve=draw(st.dictionaries(st.sampled_from([*map(str, Category), "later"]), series)),
        plain_curve=draw(series),
    )


@settings(max_examples=60)
@given(
    predictions(),
    st.integers(1, 2**50),
    st.lists(st.tuples(numbers, st.floats(1e-9, 1e3)), max_size=4),
    st.lists(numbers),
)
def test_anything_a_plan_may_hold_is_drawn_on_the_paper(
    prediction: Prediction, budget: int, pairs: list[tuple[int, float]], curve: list[int]
) -> None:
    plan: Plan = replace(reports.plain_report().plan, prediction=prediction, budget_bytes=budget)
    points = [FrontierPoint(n, n, s, s / 2, 1 + n % 3) for n, s in pairs]
    rehearsal = Rehearsal(prediction.peak_bytes, max(curve, default=1), 1.0, curve=tuple(curve))

    for drawing in (timeline_picture(plan, rehearsal), frontier_picture(plan, points)):
        assert inside(drawing)
        assert "nan" not in svg(drawing)


def test_the_frontier_is_drawn_against_the_plain_step() -> None:
    report = reports.report()
    points, chosen = ratios(report.plan, report.frontier)
    drawing = frontier_picture(report.plan, report.frontier)

    assert [p.peak_bytes for p in points] == sorted(p.peak_bytes for p in report.frontier)
    assert points[-1].ratio == 1.0
    assert chosen.ratio == report.plan.prediction.slowdown
    assert "7.68 GiB, 1.24\N{MULTIPLICATION SIGN}" in texts(drawing)
    assert len([s for s in drawing.shapes if isinstance(s, Dot) and s.title]) == len(points) + 2


def test_a_bound_is_a_staircase_that_never_claims_more_than_it_says() -> None:
    drawing = frontier_picture(reports.plan(), reports.frontier(reports.plan()))

    line = max(
        (s for s in drawing.shapes if isinstance(s, Line) and s.colour == "#8A5A00"), key=lambda s: len(s.points)
    )
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in zip(line.points, line.points[1:], strict=False))


def test_without_other_plans_the_chosen_one_stands_beside_the_plain_one() -> None:
    drawn = texts(frontier_picture(reports.plan()))

    assert {"this plan", "plain", "budget"} <= set(drawn)
    assert "other plans" not in drawn


def test_nothing_to_compare_is_said_in_a_sentence() -> None:
    assert any("nothing to compare" in t for t in texts(frontier_picture(reports.plain_report().plan)))
    assert any("carries no times" in t for t in texts(frontier_picture(reports.bare_report().plan)))


def test_losses_that_are_not_numbers_are_left_out_of_the_curve() -> None:
    records = [StepRecord(i, loss, 0.1) for i, loss in enumerate([3.0, float("nan"), 2.0, float("inf")], start=1)]
    drawing = loss_picture(records)

    assert drawing is not None
    assert "nan" not in svg(drawing)
    assert loss_picture(records[:2]) is None
    assert loss_picture([]) is None


def test_a_long_training_is_thinned_without_losing_its_spikes() -> None:
    records = [StepRecord(i, 9.0 if i == 12_345 else 1.0 + 1e-5 * i, 0.1) for i in range(1, 50_001)]
    drawing = loss_picture(records)

    assert drawing is not None
    curve = max((s for s in drawing.shapes if isinstance(s, Line)), key=lambda s: len(s.points))
    assert len(curve.points) <= 610
    assert min(y for _, y in curve.points) < 60


def test_a_constant_loss_is_drawn() -> None:
    drawing = loss_picture([StepRecord(i, 1.0, 0.1) for i in range(1, 5)])

    assert drawing is not None
    assert inside(drawing)


def test_long_texts_are_shortened_or_wrapped() -> None:
    text = "a long sentence about " + "bytes " * 40

    assert text_width(shortened(text, 200)) <= 200
    assert shortened("short", 200) == "short"
    assert all(text_width(line) <= 200 for line in wrapped(text, 200))
    assert " ".join(wrapped(text, 200)) == text.strip()
    assert wrapped("", 200) == []


def test_stacked_drawings_lie_below_each_other() -> None:
    one = Drawing(10, 20, (Dot(5, 5, 1, "#000000"), Hover(0, 0, 1, 1, "x")), "one.")
    both = stacked([one, one], gap=4)

    assert both.height == 44
    assert [s.y for s in both.shapes if isinstance(s, Dot)] == [5, 29]
    assert both.label == "one. one."
