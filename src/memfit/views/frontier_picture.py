"""Bytes against time: what each plan of the frontier takes, how fast one in its bytes could be, which was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan
from memfit.values.report import FrontierPoint
from memfit.views import colours
from memfit.views.axes import Scale, byte_ticks, frame, number_ticks, widened
from memfit.views.drawing import INK, QUIET, TIMES, Dot, Drawing, Line, Point, Shape, Text, counted, wrapped
from memfit.views.labels import Area, area_of_dot, place_label
from memfit.views.layout import WIDE, Layout

_TITLE: Final = "Bytes against time"
_TOP: Final = 70.0
_PLOT_HEIGHT: Final = 260.0
_LEAST_RANGE: Final = 0.3  # of the axis of time, so that two percent look like two percent


@dataclass(frozen=True, slots=True)
class Ratio:
    """One plan as it is drawn: bytes, and time as a multiple of the plain step's."""

    peak_bytes: int
    ratio: float
    bound_bytes: int
    bound_ratio: float
    micro_batches: int
    title: str


def ratios(plan: Plan, points: Sequence[FrontierPoint]) -> tuple[list[Ratio], Ratio]:
    """The frontier from the smallest peak up, and the chosen plan."""
    p = plan.prediction
    plain_seconds = p.plain_step_seconds

    def ratio(point: FrontierPoint) -> Ratio:
        relative = point.step_seconds / plain_seconds
        parts = f", {counted(point.micro_batches, 'micro-batch')}" if point.micro_batches > 1 else ""
        title = (
            f"{format_bytes(point.peak_bytes)} at the peak, {format_seconds(point.step_seconds)} a step, "
            f"{relative:.2f}{TIMES} plain{parts}"
        )
        bound = point.bound_seconds / plain_seconds
        return Ratio(point.peak_bytes, relative, point.budget_bytes, bound, point.micro_batches, title)

    chosen = FrontierPoint(plan.budget_bytes, p.peak_bytes, p.step_seconds, p.bound_seconds, plan.choices.micro_batches)
    return sorted(map(ratio, points), key=lambda r: (r.peak_bytes, -r.ratio)), ratio(chosen)


def frontier_picture(plan: Plan, points: Sequence[FrontierPoint] = (), layout: Layout = WIDE) -> Drawing:
    """Draw the frontier; without one, the chosen plan beside the plain step. With nothing to compare, say so."""
    p = plan.prediction
    if p.plain_step_seconds <= 0:
        return _nothing("this plan carries no times, so there is nothing to compare.", layout)
    if not points and plan.script.plain and p.peak_bytes == p.plain_peak_bytes:
        return _nothing(
            "this plan is the plain step, and no others were asked for: there is nothing to compare.", layout
        )
    frontier, chosen = ratios(plan, points)
    plain_bytes = p.plain_peak_bytes
    bounds = bounds_of(frontier, chosen)
    about = "Time of a step as a multiple of the plain step's, by the bytes it may take."
    if bounds:
        about += f" The lower bound is for {counted(chosen.micro_batches, 'micro-batch')}."
    shapes, lowered = _heading(about, layout)
    x, y = _scales(frontier, chosen, bounds, plain_bytes, plan.budget_bytes, layout, lowered)
    y_ticks = number_ticks(y.low, y.high, most=6, suffix=TIMES)
    shapes += frame(x, y, byte_ticks(x.low, x.high, most=4 if layout.narrow else 8), y_ticks, "bytes at the peak")
    lines: list[Line] = []
    budget_inside = plan.budget_bytes <= x.high
    if budget_inside:
        at = x(plan.budget_bytes)
        lines.append(Line(((at, y.end - 4), (at, y.start)), colours.BUDGET, 1.5, (7, 4)))
        shapes.append(Text(at, y.end - 9, "budget", anchor="middle", colour=colours.BUDGET))
    lines += _bound(bounds, x, y)
    best = efficient(frontier)
    if len(best) > 1:
        lines.append(Line(tuple((x(r.peak_bytes), y(r.ratio)) for r in best), colours.FRONTIER, 1.6))
    dots = [*_points(frontier, x, y), *_marked(chosen, plain_bytes, x, y)]
    corner = (0.0, y.start + 66) if layout.narrow else (layout.right + 24, _TOP + 14)
    key, bottom = _key(plan, chosen, frontier, corner, budget_inside=budget_inside)
    texts = [s for s in (*shapes, *key) if isinstance(s, Text)]
    names = _names(frontier, chosen, plain_bytes, (x, y), texts, [line.points for line in lines], dots)
    height = bottom - 16 if layout.narrow else y.start + 46
    return Drawing(layout.width, height, (*shapes, *lines, *dots, *names, *key), _label(plan, chosen, frontier))


def _heading(about: str, layout: Layout) -> tuple[list[Shape], float]:
    """The title with what is below it, and by how much that lowers the plot."""
    left = 0.0 if layout.narrow else layout.left
    lines = wrapped(about, layout.width - left)
    shapes: list[Shape] = [Text(left, 18, _TITLE, size=16, bold=True)]
    shapes += [Text(left, 38 + 17 * i, line, colour=QUIET) for i, line in enumerate(lines)]
    return shapes, 17.0 * (len(lines) - 1)


def bounds_of(frontier: Sequence[Ratio], chosen: Ratio) -> list[Ratio]:
    """The plans whose lower bounds may stand in one line, by budget.

    A bound holds for plans with as many micro-batches as its own; with others there may be faster ones. So only the
    bounds for the chosen plan's number are drawn.
    """
    comparable = [r for r in (*frontier, chosen) if r.bound_ratio > 0 and r.micro_batches == chosen.micro_batches]
    return sorted(comparable, key=lambda r: r.bound_bytes)


def efficient(frontier: Sequence[Ratio]) -> list[Ratio]:
    """The plans that no smaller one beats, from the smallest up; a line through the others would zigzag."""
    best: list[Ratio] = []
    for r in frontier:
        if not best or r.ratio < best[-1].ratio:
            best.append(r)
    return best


def _nothing(reason: str, layout: Layout) -> Drawing:
    sentence = f"Not drawn: {reason}"
    shapes, lowered = _heading(sentence, layout)
    return Drawing(layout.width, 52 + lowered, tuple(shapes), f"{_TITLE}. {sentence}")


def _label(plan: Plan, chosen: Ratio, frontier: list[Ratio]) -> str:
    return (
        f"Bytes at the peak against time of a step, {counted(len(frontier), 'plan')}: the chosen one takes "
        f"{format_bytes(chosen.peak_bytes)} and {chosen.ratio:.2f} times the plain step's time; the plain step takes "
        f"{format_bytes(plan.prediction.plain_peak_bytes)}; the budget is {format_bytes(plan.budget_bytes)}."
    )


def _scales(
    frontier: list[Ratio],
    chosen: Ratio,
    bounds: list[Ratio],
    plain_bytes: int,
    budget: int,
    layout: Layout,
    lowered: float,
) -> tuple[Scale, Scale]:
    sizes = [chosen.peak_bytes, plain_bytes, *(r.peak_bytes for r in frontier)]
    if budget <= 1.25 * max(sizes):
        sizes.append(budget)
    # Half of the axis for bytes that no plan can do without would hide the shape of the curve.
    low, high = widened(min(sizes), max(sizes))
    if min(sizes) < 0.5 * max(sizes):
        low, high = 0, 1.05 * max(sizes)
    ratio_range = [1.0, chosen.ratio, *(r.ratio for r in frontier), *(r.bound_ratio for r in bounds)]
    bottom, top = widened(min(ratio_range), max(ratio_range), least=_LEAST_RANGE)
    upper = _TOP + lowered
    return Scale(low, high, layout.left, layout.right), Scale(bottom, top, upper + _PLOT_HEIGHT, upper)


def _bound(bounds: list[Ratio], x: Scale, y: Scale) -> list[Line]:
    """Steps, not a slope: a bound holds for its own budget and all smaller ones, and says nothing about larger ones."""
    if not bounds:
        return []
    points: list[tuple[float, float]] = []
    left = x.start
    for r in bounds:
        points += [(left, y(r.bound_ratio)), (x(r.bound_bytes), y(r.bound_ratio))]
        left = x(r.bound_bytes)
    return [Line(tuple(points), colours.BOUND, 1.2)]


def _points(frontier: Sequence[Ratio], x: Scale, y: Scale) -> list[Dot]:
    return [
        Dot(x(r.peak_bytes), y(r.ratio), 4, colours.FRONTIER, square=r.micro_batches > 1, title=r.title)
        for r in reversed(frontier)
    ]


def _is_plain(chosen: Ratio, plain_bytes: int, x: Scale, y: Scale) -> bool:
    """Whether the chosen plan lies where the plain step lies."""
    return abs(x(chosen.peak_bytes) - x(plain_bytes)) < 6 and abs(y(chosen.ratio) - y(1.0)) < 6


def _marked(chosen: Ratio, plain_bytes: int, x: Scale, y: Scale) -> list[Dot]:
    """The plain step and the chosen plan."""
    this = Dot(x(chosen.peak_bytes), y(chosen.ratio), 8, colours.PREDICTED, title=f"this plan: {chosen.title}")
    if _is_plain(chosen, plain_bytes, x, y):
        return [this]
    title = f"plain: {format_bytes(plain_bytes)}"
    return [Dot(x(plain_bytes), y(1.0), 6, "#ffffff", colours.PLAIN, title=title), this]


def _names(
    frontier: Sequence[Ratio],
    chosen: Ratio,
    plain_bytes: int,
    scales: tuple[Scale, Scale],
    taken: Sequence[Text],
    lines: Sequence[Sequence[Point]],
    dots: Sequence[Dot],
) -> list[Text]:
    """Names of the chosen plan and of the plain step, and the number of micro-batches where it changes.

    The first two come first, so that they always find a place; a number without one is left out, the dot tells it.
    """
    x, y = scales
    same = _is_plain(chosen, plain_bytes, x, y)
    this = Text(0, 0, "this plan, which is plain" if same else "this plan", 13, "start", colours.PREDICTED, True, True)
    wanted = [(this, chosen.peak_bytes, chosen.ratio)]
    if not same:
        wanted.append((Text(0, 0, "plain", 13, "start", colours.PLAIN, True, True), plain_bytes, 1.0))
    before = 1
    for r in reversed(frontier):  # from plain down
        if r.micro_batches != before:
            wanted.append((Text(0, 0, f"{TIMES}{r.micro_batches}", 11, colour=QUIET, halo=True), r.peak_bytes, r.ratio))
            before = r.micro_batches
    inside = Area(x.start + 3, y.end - 4, x.end + 14, y.start - 3)
    areas = [area_of_dot(dot.x, dot.y, dot.radius) for dot in dots]
    names: list[Text] = []
    for name, size, ratio in wanted:
        placed = place_label(name, [(x(size), y(ratio))], inside, [*taken, *names], lines=lines, areas=areas)
        if placed is not None:
            names.append(placed)
    return names


def _key(
    plan: Plan, chosen: Ratio, frontier: list[Ratio], at: Point, *, budget_inside: bool
) -> tuple[list[Shape], float]:
    """What the marks mean and their numbers, from a place downwards; returns the shapes and where they end."""
    left, top = at
    p = plan.prediction
    shapes: list[Shape] = []

    def entry(name: str, text: str, colour: str) -> None:
        nonlocal top
        shapes.append(Text(left + 26, top, name, colour=colour, bold=True))
        shapes.append(Text(left + 26, top + 15, text, colour=INK))
        top += 42

    shapes.append(Dot(left + 10, top - 4, 7, colours.PREDICTED))
    entry("this plan", f"{format_bytes(chosen.peak_bytes)}, {chosen.ratio:.2f}{TIMES}", colours.PREDICTED)
    shapes.append(Dot(left + 10, top - 4, 6, "#ffffff", colours.PLAIN))
    entry("plain", f"{format_bytes(p.plain_peak_bytes)}, 1.00{TIMES}", colours.PLAIN)
    shapes.append(Line(((left, top - 4), (left + 20, top - 4)), colours.BUDGET, 1.5, (7, 4)))
    entry("budget", format_bytes(plan.budget_bytes) + ("" if budget_inside else " →"), colours.BUDGET)
    split = any(r.micro_batches > 1 for r in (*frontier, chosen))
    if chosen.bound_ratio > 0:
        shapes.append(Line(((left, top - 4), (left + 20, top - 4)), colours.BOUND, 1.2))
        entry(
            "lower bound", f"at most {100 * plan.gap:.1f} % faster" if plan.gap > 0 else "none is faster", colours.BOUND
        )
    if frontier:
        shapes.append(Line(((left, top - 4), (left + 20, top - 4)), colours.FRONTIER, 1.6))
        shapes.append(Dot(left + 10, top - 4, 4, colours.FRONTIER))
        entry(
            "other plans", f"{TIMES}n: n micro-batches" if split else counted(len(frontier), "budget"), colours.FRONTIER
        )
    return shapes, top
