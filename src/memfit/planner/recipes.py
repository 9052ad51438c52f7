"""What it takes to make a storage again: recipes, and which storages have one.

A *recipe* is the operation that made a storage together with every operation that later wrote into it, in order (CPU dropout is `empty_like`, then
`bernoulli_` in place). Several outputs of one operation share its recipe. Running a recipe needs its inputs in their final state, so an operation
that reads a storage before its last write has none.

A *reload* is the other way to restore a storage: it is copied to a lower tier in forward, freed, and copied back. It is a recipe too, without
operations and inputs, so that plans, liveness and nesting (reload a boundary, recompute the interior from it) are the same for both. Where there are several
tiers, a storage has reloads of its own from each. A call of a module that is made again as a whole (`repeatable_calls`) is a recipe as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from memfit.hardware.machine import Link
from memfit.planner.repeatable_calls import (
    RepeatableCalls,
    is_batch_norm,
    repeatable_calls,
    seconds_of,
    statistics_written,
)
from memfit.planner.steady_calls import SteadyCalls
from memfit.values.trace import Category, Phase, Trace

# Storages that no recorded operation makes and that go before the step ends (constants from Python) are held for recomputations when they are this small;
# larger ones rule recomputing out.
SMALL_CONSTANT_BYTES: Final = 4096
# Prefetch distance: how much computing a copy may overlap with, in multiples of what it takes alone: none (smallest peak, every copy is waited for),
# some (a saturated link stays busy, little is in flight), plenty (copies that come in bursts are done when they are waited for).
PREFETCH_DISTANCES: Final = (0.0, 4.0, 16.0)
# What they make has no values: where no operation writes any and forward reads some, a kernel that shows in no operation has.
_WITHOUT_VALUES: Final = ("aten.empty", "aten.new_empty")
ALIGNMENT_BYTES: Final = 4096  # of the places on a lower tier


@dataclass(frozen=True, slots=True)
class Recipe:
    """Operations to run again, and what for.

    Attributes:
        operations: indices of forward operations, ascending; none for a reload.
        inputs: managed storages that must be there.
        makes: storages that come out.
        seconds: time of all its operations.
        random_operations: how many of them draw random numbers.
        peak_bytes: largest number of bytes above what was live before it started.
        runnable: whether it may be run again at all.
    """

    operations: tuple[int, ...]
    inputs: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    random_operations: int
    peak_bytes: int
    runnable: bool


@dataclass(frozen=True, slots=True)
class Reload:
    """How one storage is offloaded to a lower tier and copied back.

    Attributes:
        storage: which.
        ready: operation (event) of forward after which nothing writes it; its copy down begins there.
        gone_by: operation (event) of forward after which that copy is waited for and the first copy freed: never earlier, never later, so that bytes
            do not depend on the present speed of the link.
        out_seconds, in_seconds: of the copies, alone on the link.
        lead_seconds: of computing between the beginning of the copy back, when its memory is allocated, and the operation that reads it.
        tier: number of the tier in `Recipes.tiers`.
    """

    storage: int
    ready: int
    gone_by: int
    out_seconds: float
    in_seconds: float
    lead_seconds: float
    tier: int = 0


class Recipes:
    """All recipes of a trace's forward.

    *Managed* storages are those made by forward operations; all others are there anyway.

    Args:
        trace: the step.
        lower_tier: the nearest tier that storages may be offloaded to, with those below it; None for nowhere.

    Attributes:
        tiers: all of these, the nearest first.
        calls: of each recipe that makes calls of modules again, which.
        reloads: of each recipe that is a reload, how.
        reloads_of: of each storage that may be offloaded, its reloads: one for each of `PREFETCH_DISTANCES` from the nearest tier, then from the next.
        passing: of each recipe that reads some, the storages that no recorded operation makes and that go before the pass ends, but for the recipe: the engine
            holds them from forward on.
        steady: where forward takes several paths, the calls within which recipes stay; None where it takes one.
        clock: seconds of the plain step before each event, the engine's own included.
    """

    def __init__(self, trace: Trace, lower_tier: Link | None = None) -> None:
        self.trace = trace
        self.lower_tier = lower_tier
        self.tiers: tuple[Link, ...] = lower_tier.chain if lower_tier is not None else ()
        operations = trace.operations
        forward = [trace.events[event] for event in trace.events_in_forward]
        self.managed: list[int] = sorted(s for op in forward for s in operations[op].makes)
        managed = set(self.managed)
        event_of = {trace.events[event]: event for event in trace.events_in_forward}
        self.event_of_operation = event_of
        maker: dict[int, int] = {}
        last_write: dict[int, int] = {}
        lasting_write: dict[int, int] = {}
        for op in forward:
            for s in operations[op].makes:
                maker[s] = op
        writers: dict[int, list[int]] = defaultdict(list)
        updated: dict[int, int] = {}  # parameter -> event of its update inside backward
        for event, op in enumerate(trace.events[: trace.pass_events]):
            if op < 0:
                continue
            if operations[op].phase is Phase.OPTIMIZER:
                for s in operations[op].writes:
                    updated.setdefault(s, event)
                continue
            for s in operations[op].writes:
                (last_write if s in managed else lasting_write)[s] = event
                if s in managed and event < trace.forward_events:
                    writers[s].append(op)
        # Operations that write into a storage belong to the recipe of the operation that made it.
        parent = {op: op for op in forward}

        def find(op: int) -> int:
            while parent[op] != op:
                parent[op] = parent[parent[op]]
                op = parent[op]
            return op

        for s, ops in writers.items():
            for op in ops:
                parent[find(op)] = find(maker[s])
        self._filled_unseen = {
            s for s in managed if s not in writers and operations[maker[s]].name.startswith(_WITHOUT_VALUES)
        }
        groups: dict[int, list[int]] = defaultdict(list)
        for op in forward:
            if operations[op].makes or any(s in managed for s in operations[op].writes):
                groups[find(op)].append(op)
        self._statistics_written = statistics_written(trace)
        self.recipes: list[Recipe] = []
        self.recipe_of: dict[int, int] = {}
        self.passing: dict[int, tuple[int, ...]] = {}
        for ops in groups.values():
            self._add(sorted(ops), managed, maker, last_write, lasting_write)
        if updated:
            self._stop_at_updates(updated)
        self.steady = SteadyCalls(trace, (trace, *trace.paths)) if trace.paths else None
        if self.steady is not None:
            self._stay_in_calls(self.steady.home)
        shared = frozenset(forward[: trace.shared_operations])
        if shared:
            self._keep_what_is_shared(shared)
        self.calls: dict[int, RepeatableCalls] = {}
        for call in repeatable_calls(trace, frozenset(managed)):
            first = call.begins_with
            self.calls[len(self.recipes)] = call
            self.recipes.append(
                Recipe(
                    tuple(range(first, first + call.operations)),
                    call.inputs,
                    call.makes,
                    seconds_of(call, trace),
                    int(call.random),
                    call.peak_bytes,
                    runnable=True,
                )
            )
        self.reloads: dict[int, Reload] = {}
        self.reloads_of: dict[int, tuple[int, ...]] = {}
        self.clock: list[float] = [0.0]
        for event, op in enumerate(trace.events):
            seconds = operations[op].seconds if op >= 0 else 0.0
            followed = op >= 0 and event < trace.forward_events
            seconds += trace.dispatch_seconds * operations[op].host_factor if followed else 0.0
            self.clock.append(self.clock[-1] + seconds)
        # The recipes of nearer tiers have the same numbers whatever tiers follow.
        for tier in range(len(self.tiers)):
            self._add_reloads(tier, maker, last_write)

    @cached_property
    def _whole_at(self) -> list[list[tuple[tuple[int, int], ...]]]:
        """Of each recipe, the events between which each of the gathered parameters that it reads is whole."""
        gathered, operations = dict(self.trace.gathered), self.trace.operations
        if not gathered:
            return []
        return [
            [gathered[s] for s in {s for op in recipe.operations for s in operations[op].reads} if s in gathered]
            for recipe in self.recipes
        ]

    def may_run(self, recipe: int, event: int) -> bool:
        """Whether the parameters that a recipe reads are whole at an event: `fully_shard` frees them in between (ZeRO 3), and no plan gathers them."""
        if not self._whole_at:
            return True
        return all(any(a <= event <= b for a, b in spans) for spans in self._whole_at[recipe])

    def read_what_is_there(self, recomputations: Mapping[int, Sequence[int]]) -> bool:
        """Whether all recipes of a plan may run at the events at which it has them."""
        if not self.trace.gathered:
            return True
        return all(self.may_run(recipe, event) for event, runs in recomputations.items() for recipe in runs)

    def _stay_in_calls(self, home: Mapping[int, int]) -> None:
        """Rule out recipes that are not of one call alone, where forward takes several paths: what they read or are asked for may not be there on another."""
        for index, recipe in enumerate(self.recipes):
            if not recipe.makes or any(s not in home for s in recipe.makes) or len({home[s] for s in recipe.makes}) > 1:
                self.recipes[index] = replace(recipe, runnable=False)

    def _keep_what_is_shared(self, shared: Container[int]) -> None:
        """Rule out recipes of operations that run before it is known which path forward takes."""
        for index, recipe in enumerate(self.recipes):
            if any(op in shared for op in recipe.operations):
                self.recipes[index] = replace(recipe, runnable=False)

    def _stop_at_updates(self, updated: dict[int, int]) -> None:
        """Rule out recipes that read a parameter and may be asked for after its update: what they made would not be what forward made."""
        asked: dict[int, int] = defaultdict(lambda: -1)  # storage -> last event that may ask for it
        for event, storage, _ in self.unpacks:
            asked[storage] = max(asked[storage], event)
        # What a recipe reads is asked for with what it makes; later recipes read what earlier ones make.
        for index in sorted(range(len(self.recipes)), key=lambda i: -self.recipes[i].operations[-1]):
            recipe = self.recipes[index]
            last = max((asked[s] for s in recipe.makes), default=-1)
            for s in recipe.inputs:
                asked[s] = max(asked[s], last)
            reads = {s for op in recipe.operations for s in self.trace.operations[op].reads}
            if any(updated.get(s, last) < last for s in reads):
                self.recipes[index] = replace(recipe, runnable=False)

    def _add(
        self,
        ops: list[int],
        managed: set[int],
        maker: dict[int, int],
        last_write: dict[int, int],
        lasting_write: dict[int, int],
    ) -> None:
        trace = self.trace
        inside = set(ops)
        runnable = True
        inputs: dict[int, None] = {}
        makes: list[int] = []
        passing: dict[int, None] = {}
        held = peak = 0
        for op in ops:
            operation = trace.operations[op]
            event = self.event_of_operation[op]
            runnable = runnable and operation.rerunnable
            runnable = runnable and all(s in managed for s in operation.writes)
            made = sum(trace.storages[s].bytes for s in operation.makes)
            held += made
            # While a random operation draws, the generator's present state is put aside.
            aside = trace.rng_state_bytes if operation.random else 0
            peak = max(peak, held + operation.workspace_bytes + aside)
            makes.extend(operation.makes)
            for s in operation.reads:
                if s in managed:
                    if maker[s] in inside:
                        continue
                    inputs[s] = None
                    runnable = runnable and last_write.get(s, -1) < event
                else:
                    runnable = runnable and lasting_write.get(s, -1) < event
                    runnable = runnable and (is_batch_norm(operation) or self._statistics_written.get(s, -1) < event)
                    storage = trace.storages[s]
                    if storage.category is Category.OTHER and storage.death < len(trace.events):
                        runnable = runnable and storage.bytes <= SMALL_CONSTANT_BYTES
                    if storage.death < trace.pass_events:
                        passing[s] = None
        # A storage written after something outside read it would come back in its last state, as autograd saw it; written in backward, it would not.
        runnable = runnable and all(last_write.get(s, -1) < trace.forward_events for s in makes)
        runnable = runnable and self._filled_unseen.isdisjoint(makes)
        index = len(self.recipes)
        for s in makes:
            self.recipe_of[s] = index
        if passing:
            self.passing[index] = tuple(passing)
        self.recipes.append(
            Recipe(
                tuple(ops),
                tuple(inputs),
                tuple(makes),
                sum(trace.operations[op].seconds for op in ops),
                sum(1 for op in ops if trace.operations[op].random),
                peak,
                runnable,
            )
        )

    def _add_reloads(self, tier: int, maker: dict[int, int], last_write: dict[int, int]) -> None:
        """Reloads of whatever forward made and backward, or a recipe, reads: whether it can run again or draws random numbers does not matter here."""
        trace, link = self.trace, self.tiers[tier]
        if trace.sized_by_values or trace.paths:
            return  # the places on a lower tier are of fixed sizes, and copies are waited for at fixed operations
        events = trace.events_in_forward
        begin = events[trace.shared_operations] if trace.shared_operations else 0
        ends = [self.clock[e + 1] for e in events]
        wanted = self.saved | {s for r in self.recipes if r.runnable for s in r.inputs}
        for s in sorted((wanted & self.returned) - self._filled_unseen):  # when those are whole is not known
            size = trace.storages[s].bytes
            ready = max(self.event_of_operation[maker[s]], last_write.get(s, -1))
            nearer = self.reloads_of.get(s, ())
            if size < link.least_bytes or ready >= trace.forward_events or len(nearer) < tier * len(PREFETCH_DISTANCES):
                continue
            if self.event_of_operation[maker[s]] < begin:
                continue
            death = bisect_left(events, min(trace.storages[s].death, events[-1]))
            out_seconds, in_seconds = link.out_seconds(size), link.in_seconds(size)
            found = []
            for distance in PREFETCH_DISTANCES:
                done = bisect_left(ends, self.clock[ready + 1] + distance * out_seconds)
                gone_by = events[min(max(death, done, bisect_left(events, ready)), len(events) - 1)]
                found.append(len(self.recipes))
                self.reloads[len(self.recipes)] = Reload(
                    s, ready, gone_by, out_seconds, in_seconds, distance * in_seconds, tier
                )
                self.recipes.append(Recipe((), (), (s,), 0.0, 0, size, runnable=True))
            self.reloads_of[s] = (*nearer, *found)

    def copied_down(self, recomputations: Mapping[int, Sequence[int]]) -> dict[int, Reload]:
        """For each storage that a plan offloads, the reload that decides its one copy to a tier: the one gone last, and of these that of the farthest tier."""
        out: dict[int, Reload] = {}
        for runs in recomputations.values():
            for recipe in runs:
                reload = self.reloads.get(recipe)
                if reload is not None:
                    known = out.get(reload.storage)
                    if known is None or (known.gone_by, known.tier) < (reload.gone_by, reload.tier):
                        out[reload.storage] = reload
        return out

    def place_bytes(self, storage: int) -> int:
        """What a storage takes on a lower tier."""
        return -(-self.trace.storages[storage].bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def begin(self, reload: int, event: int) -> int:
        """The unpack at which a reload has to begin to be done, on an idle link, when an event needs it; the first one there is where that is too late."""
        events, clocks = self._asked
        lead = self.reloads[reload].lead_seconds
        if lead <= 0.0 or not events or events[0] >= event:
            return event
        place = bisect_right(clocks, self.clock[event] - lead) - 1
        return min(events[max(place, 0)], event)

    @cached_property
    def _asked(self) -> tuple[list[int], list[float]]:
        """Unpacks in backward at which the engine can act, and the clock there."""
        events = [event for event, s, _ in self.unpacks if s in self.returned]
        return events, [self.clock[event] for event in events]

    @cached_property
    def returned(self) -> frozenset[int]:
        """Managed storages that the operation that makes them returns, so that the engine sees them."""
        operations = (self.trace.operations[op] for op in self.event_of_operation)
        return frozenset(op.makes[place] for op in operations for place in op.outputs if place >= 0)

    @cached_property
    def rebuildable(self) -> frozenset[int]:
        """Managed storages that have a recipe that may run again (its own inputs rebuilt, or held where they are not rebuildable)."""
        return frozenset(s for s in self.managed if self.recipes[self.recipe_of[s]].runnable)

    @cached_property
    def saved(self) -> frozenset[int]:
        """Managed storages that backward reads."""
        managed = set(self.managed)
        return frozenset(save.storage for save in self.trace.saves if save.unpacks and save.storage in managed)

    @cached_property
    def held_always(self) -> frozenset[int]:
        """Managed storages that no recipe can make again."""
        return frozenset(self.managed) - self.rebuildable

    @cached_property
    def unpacks(self) -> list[tuple[int, int, int]]:
        """(event, storage, operation whose backward asks) of the unpacks of managed storages in backward, in order."""
        trace = self.trace
        out = []
        for event in range(trace.forward_events, trace.pass_events):
            code = trace.events[event]
            if code < 0 and trace.saves[~code].storage in self.recipe_of:
                out.append((event, trace.saves[~code].storage, trace.saves[~code].by))
        return out

    @cached_property
    def last_operation(self) -> list[int]:
        """Of each recipe: recipes run again in this order, reloads before them so that the link is busy meanwhile."""
        return [recipe.operations[-1] if recipe.operations else -1 for recipe in self.recipes]

    @cached_property
    def last_reads(self) -> dict[int, int]:
        """The last event of forward that reads each storage."""
        trace = self.trace
        return {s: event for event in trace.events_in_forward for s in trace.operations[trace.events[event]].reads}
