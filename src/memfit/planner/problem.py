"""What every search for a plan of one trace starts from: it depends on the trace alone, is computed once and never changed by a search."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from memfit.garbage import uncollected
from memfit.planner.bound import LowerBound
from memfit.planner.chains import CellChain
from memfit.planner.enumeration import is_small, try_every_plan
from memfit.planner.front import Front
from memfit.planner.priced_cuts import PricedCuts
from memfit.planner.recompute_graph import RecomputeGraph
from memfit.planner.solution import Solution
from memfit.planner.timeline import Timeline
from memfit.planner.window_layouts import WindowLayout, WindowLayouts

# Nested sweeps save the last percent of the bytes by running everything hundreds of times: no plan costs more than so many passes.
SLOWEST: Final = 10.0


class Problem:
    """One trace, to be planned at any budget.

    Attributes:
        baseline: the plan in which nothing is dropped, as PyTorch runs the step.
        graph: the storages to decide about.
        cuts: plans at prices.
        bound: lower bound on extra seconds.
        floor_bytes: lower bound on the peak.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.recipes = timeline.recipes
        self.trace = timeline.trace
        self.baseline = Solution({}, timeline.plain())
        self.graph = RecomputeGraph(timeline)
        self.cuts = PricedCuts(self.graph)
        self.windows = WindowLayouts(self.recipes)
        self.bound = LowerBound(self.graph, self.baseline.evaluation)
        self.floor_bytes = int(timeline.floor().max())

    def front(self) -> Front:
        """A front with the baseline alone."""
        overhead = sum(self.timeline.following.seconds)
        return Front(SLOWEST * (self.trace.pass_seconds + overhead), [self.baseline])

    @cached_property
    def layouts(self) -> list[WindowLayout]:
        """All layouts worth trying."""
        return self.windows.all()

    @cached_property
    def is_small(self) -> bool:
        """Whether all plans that follow the rule of scheduling are in `first_front`."""
        return is_small(self.cuts, self.layouts)

    @cached_property
    def first_front(self) -> Front:
        """What every search knows before it begins: the baseline, and on small graphs every plan."""
        front = self.front()
        if self.is_small:
            with uncollected():
                try_every_plan(self.cuts, self.layouts, front)
        return front

    @cached_property
    def tightest(self) -> list[tuple[Solution, WindowLayout]]:
        """For each layout the plan that drops everything but its boundaries."""
        return [(self.tightest_in(layout), layout) for layout in self.layouts]

    def tightest_in(self, layout: WindowLayout) -> Solution:
        """Everything that can be dropped is, but the boundaries of the windows."""
        return self.cuts.solution(layout, self.graph.droppable - layout.boundary_storages, ())

    @cached_property
    def chain(self) -> CellChain:
        """The trace as a chain of cells, for nested recomputation."""
        return CellChain(self.timeline, self.windows.cuts)
