"""What random numbers decide: what a plan takes under every draw that the capture saw, not only under the one for which it was found.

*Sizes.* A model that routes by noisy scores, for one, gives its experts other tokens in each step. Plans are searched with the sizes of one draw, and a plan
found so has its peak where that draw happens to be small; so it is replayed under the others as well before it is believed, and gets as many bytes to spare as
the peaks lie apart. With six draws of a size that is about normal, that is nearly four standard deviations above the mean.

*Paths.* A model that leaves blocks out by chance runs other operations in each step. A plan for the longest path decides within steady calls only
(`steady_calls`), so its decisions are known on every other path, which is replayed with them; of all peaks the largest counts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Final

from memfit.planner.known_sizes import KnownSizes
from memfit.planner.problem import Problem
from memfit.planner.recipes import Recipes
from memfit.planner.smallest import SmallestSearch
from memfit.planner.steady_calls import Decision, Form, Key
from memfit.planner.timeline import Recomputations, Timeline

NEVER: Final = 1 << 62  # bytes of a plan that cannot be carried over to other paths


class Draws:
    """One trace under all draws that its capture saw."""

    def __init__(self, timeline: Timeline) -> None:
        self._first = timeline

    @property
    def several(self) -> bool:
        """Whether random numbers decide anything."""
        trace = self._first.trace
        return bool(trace.drawn_bytes or trace.paths)

    @cached_property
    def _timelines(self) -> tuple[Timeline, ...]:
        """The same operations in other sizes, the first draw's first."""
        return in_all_sizes(self._first)

    @cached_property
    def paths(self) -> tuple[ForwardPath, ...]:
        """The path that is planned for, and all others."""
        trace = self._first.trace
        everything = (trace, *trace.paths)
        others = (
            replace(path, paths=tuple(p for p in everything if p is not path), calls=path.calls) for path in trace.paths
        )
        return ForwardPath(self._first), *(ForwardPath(Timeline(path)) for path in others)

    @cached_property
    def elsewhere(self) -> dict[Form, tuple[Decision, ...]]:
        """What is done in calls that other paths make and this one has none like: as much is dropped as the smallest plan of such a path does."""
        first, *others = self.paths
        known = set(first.calls.forms.values())
        out: dict[Form, tuple[Decision, ...]] = {}
        for path in others:
            new = {form for form in path.calls.forms.values() if form not in known and form not in out}
            if new:
                smallest = SmallestSearch(Problem(path.timeline)).run().front.smallest()
                decisions = path.decisions(smallest.recomputations)
                if decisions is not None:
                    out.update((form, decisions.by_form[form]) for form in new)
        return out

    def decisions(self, recomputations: Recomputations) -> Decisions | None:
        """What a plan does in each call, on whatever path; None where it decides across calls."""
        found = self.paths[0].decisions(recomputations)
        if found is not None and any(recomputations.values()):
            found.by_form = {**self.elsewhere, **found.by_form}
        return found

    def holds_on_all_paths(self, recomputations: Recomputations) -> bool:
        """Whether it is known what a plan does on every path: it decides within single calls, where forward takes several."""
        return not self._first.trace.paths or self.decisions(recomputations) is not None

    def peaks(self, recomputations: Recomputations) -> list[int]:
        """Peak bytes of a plan under each draw that runs the same operations, the first draw's first."""
        return [timeline.peak(recomputations) for timeline in self._timelines]

    def on_paths(self, recomputations: Recomputations) -> list[int]:
        """Peak bytes of a plan on every path, that which is planned for first; `NEVER` where it decides across calls."""
        first, *others = self.paths
        decisions = self.decisions(recomputations)
        if decisions is None:
            return [NEVER]
        return [
            first.timeline.peak(recomputations),
            *(path.largest_peak(path.recomputations(decisions)) for path in others),
        ]

    def with_the_peak(self, recomputations: Recomputations) -> tuple[Timeline, Recomputations]:
        """The path, and the sizes on it, in which a plan takes most, and what the plan is there."""
        decisions = self.decisions(recomputations)
        assert decisions is not None, "plans that decide across calls are not taken"
        plans = [recomputations, *(path.recomputations(decisions) for path in self.paths[1:])]
        every = [(timeline, plan) for path, plan in zip(self.paths, plans, strict=True) for timeline in path.timelines]
        return max(every, key=lambda each: each[0].peak(each[1]))

    def known_sizes(self, recomputations: Recomputations, capacity_bytes: int) -> tuple[KnownSizes, ...]:
        """Of each path on which values decide sizes, what a plan takes in others; empty where one of them cannot be told.

        Args:
            recomputations: the plan for the first of them.
            capacity_bytes: that its steps have.
        """
        if not self._first.trace.paths:
            return (KnownSizes(self._timelines, recomputations, capacity_bytes),)
        decisions = self.decisions(recomputations)
        assert decisions is not None, "plans that decide across calls are not taken"
        return tuple(KnownSizes(path.timelines, path.recomputations(decisions), capacity_bytes) for path in self.paths)

    def varies(self, recomputations: Recomputations) -> int:
        """How far apart the peaks of a plan lie where sizes are drawn; 0 where none are."""
        if not self._first.trace.drawn_bytes:
            return 0
        peaks = self.peaks(recomputations)
        return max(peaks) - min(peaks)

    def largest(self, recomputations: Recomputations) -> Timeline:
        """The draw of sizes under which a plan takes most."""
        return max(self._timelines, key=lambda timeline: timeline.peak(recomputations))

    def needed(self, recomputations: Recomputations) -> int:
        """Bytes that a plan is to be given: its largest peak, and where sizes are drawn as much more as the peaks lie apart."""
        peaks = self.peaks(recomputations)
        drawn = 2 * max(peaks) - min(peaks)
        return max(drawn, *self.on_paths(recomputations)) if self._first.trace.paths else drawn


def in_all_sizes(timeline: Timeline) -> tuple[Timeline, ...]:
    """The same operations in the sizes of each draw, the first draw's first."""
    trace = timeline.trace
    tables = (
        tuple(replace(s, bytes=size) for s, size in zip(trace.storages, sizes, strict=True))
        for sizes in trace.drawn_bytes
    )
    return timeline, *(Timeline(replace(trace, storages=storages)) for storages in tables)


class Decisions:
    """What a plan does in each call: by the call, and for calls that it has not met by what they run."""

    def __init__(self) -> None:
        self.by_call: dict[Key, tuple[Decision, ...]] = {}
        self.by_form: dict[Form, tuple[Decision, ...]] = {}

    def of(self, key: Key, form: Form) -> tuple[Decision, ...]:
        """For one call; empty where nothing runs again in it."""
        return self.by_call[key] if key in self.by_call else self.by_form.get(form, ())


class ForwardPath:
    """One of several paths, with its steady calls."""

    def __init__(self, timeline: Timeline) -> None:
        assert timeline.recipes.steady is not None, "a path has others beside it"
        self.timeline = timeline
        self.trace = timeline.trace
        self.calls = timeline.recipes.steady

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """Of the path, in the sizes of each draw."""
        return in_all_sizes(self.timeline)

    def largest_peak(self, recomputations: Recomputations) -> int:
        """Of a plan on this path, over all draws."""
        return max(timeline.peak(recomputations) for timeline in self.timelines)

    @cached_property
    def _recipe_at(self) -> dict[int, int]:
        """Of each forward operation that can run again, its recipe."""
        recipes: Recipes = self.timeline.recipes
        return {op: index for index, recipe in enumerate(recipes.recipes) for op in recipe.operations}

    @cached_property
    def _unpack_at(self) -> dict[int, tuple[int, int]]:
        """Of each unpack event, the save and which of its unpacks."""
        return {event: (n, k) for n, save in enumerate(self.trace.saves) for k, (event, _) in enumerate(save.unpacks)}

    def decisions(self, recomputations: Recomputations) -> Decisions | None:
        """What a plan for this path does in each call; None where it does something that no single call decides."""
        found: dict[int, list[Decision]] = {n: [] for n in range(len(self.calls.calls))}
        recipes = self.timeline.recipes.recipes
        for event in sorted(recomputations):
            if not recomputations[event]:
                continue
            save, unpack = self._unpack_at[event]
            here = self.calls.of_save(save)
            if here < 0:
                return None
            call = self.calls.calls[here]
            runs = []
            for recipe in recomputations[event]:
                operations = recipes[recipe].operations
                if not operations or any(self.calls.of_operation(op) != here for op in operations):
                    return None
                runs.append(tuple(op - call.operations[0] for op in operations))
            found[here].append((save - call.saves[0], unpack, tuple(runs)))
        out = Decisions()
        for number, decided in found.items():
            key = self.calls.calls[number].module, self.calls.calls[number].number
            out.by_call[key] = tuple(decided)
            out.by_form.setdefault(self.calls.forms[key], tuple(decided))
        return out

    def recomputations(self, decisions: Decisions) -> dict[int, list[int]]:
        """The plan that these decisions come to on this path."""
        out: dict[int, list[int]] = {}
        for call in self.calls.calls:
            key = call.module, call.number
            for save, unpack, runs in decisions.of(key, self.calls.forms[key]):
                event = self.trace.saves[call.saves[0] + save].unpacks[unpack][0]
                out[event] = [self._recipe_at[call.operations[0] + run[0]] for run in runs]
        return out
