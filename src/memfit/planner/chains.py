"""Nested recomputation: forward as a chain of cells, scheduled by rotor's dynamic program, for budgets that minimum cuts cannot reach.

Minimum cuts rebuild each window once. On deep, narrow chains less memory is possible: boundaries are dropped too, and cells are recomputed several times.
The dynamic program of `baselines.rotor` finds the fastest such schedules. Here they become ordinary recomputations, so the same timeline evaluates them and
the same engine runs them, and no plan of memfit is worse than rotor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from memfit.planner.baselines.chain import Chain, ChainOperation, ChainStage, OperationKind
from memfit.planner.baselines.rotor import RotorTable
from memfit.planner.recipes import Recipes
from memfit.planner.segments import Boundary, windows
from memfit.planner.timeline import Timeline

MOST_STAGES: Final = 64  # the cells of longer chains are grouped into this many stages
MEMORY_SLOTS: Final = 320  # the dynamic program divides memory into this many
# The table of a chain this short takes milliseconds: memory gets twice the slots, and every amount of it is tried.
SHORT_CHAIN: Final = 24
# The chain's model of memory is coarser than the timeline: a schedule for more than the capacity may fit into it, and one for less may not.
# So schedules are tried for capacities between these multiples.
MOST_CAPACITY: Final = 1.36
LEAST_CAPACITY: Final = 0.4
MOST_FITTING: Final = 3  # so many schedules that fit are returned, as the fastest by that model need not be the fastest


class _ScheduleTable:
    """Schedules of a chain, whose stages may be groups of cells with chains of their own, for any amount of memory."""

    def __init__(self, outer: RotorTable, groups: list[range], inner: list[RotorTable]) -> None:
        self._outer, self._groups, self._inner = outer, groups, inner
        self.slots = outer.slots

    def amounts(self) -> list[int]:
        """Amounts of memory, in slots, at which the schedule gets faster; the fastest schedule's first."""
        seconds = self._outer.seconds
        faster = np.concatenate([[True], seconds[1:] < seconds[:-1]]) & np.isfinite(seconds)
        return [int(m) for m in np.flatnonzero(faster)[::-1]]

    def operations(self, amount: int) -> list[ChainOperation]:
        """The schedule for so many slots of memory, cell by cell."""
        out: list[ChainOperation] = []
        for (kind, stage), slots in self._outer.operations(amount):
            cells = self._groups[stage]
            if slots:
                if kind is not OperationKind.BACKWARD:  # the inner schedule includes its backward
                    inner = self._inner[stage].operations(slots)
                    out += [ChainOperation(op.kind, op.stage + cells.start) for op, _ in inner]
            elif kind is OperationKind.BACKWARD:
                out += [ChainOperation(kind, cell) for cell in reversed(cells)]
            elif kind is OperationKind.FORWARD_CHECKPOINT:
                out.append(ChainOperation(kind, cells.start))
                out += [ChainOperation(OperationKind.FORWARD_NONE, cell) for cell in cells[1:]]
            else:
                out += [ChainOperation(kind, cell) for cell in cells]
        return out


class CellChain:
    """The forward of a trace as a chain of cells; a long one as a chain of groups, each a chain of its own.

    Args:
        timeline: of the trace.
        boundaries: between the cells.

    Attributes:
        length: number of cells.
        base_bytes: in memory throughout the step, whatever is dropped. The capacity of the chain is what the budget leaves beyond that.
    """

    def __init__(self, timeline: Timeline, boundaries: list[Boundary]) -> None:
        self.timeline = timeline
        self.recipes: Recipes = timeline.recipes
        trace = timeline.trace
        self._boundaries = boundaries
        self._cell_of_event = windows(self._boundaries, trace.forward_events)
        self.length = len(self._boundaries) + 1
        droppable = self.recipes.saved & self.recipes.rebuildable
        # Per cell: what its backward reads and can be dropped, and the event of its first unpack.
        self._saved_in: list[set[int]] = [set() for _ in range(self.length)]
        self._first_unpack: dict[int, int] = {}
        for save in trace.saves:
            if save.storage not in droppable or not save.unpacks:
                continue
            cell = self._cell_of_event[save.by]
            self._saved_in[cell].add(save.storage)
            # A gradient that forward takes itself asks for what is there still: later cells are not made by then, and nothing is run again for it.
            asked = next((event for event, _ in save.unpacks if event >= trace.forward_events), None)
            if asked is not None:
                self._first_unpack[cell] = min(self._first_unpack.get(cell, asked), asked)
        # Per cell: what crosses the boundary before it and can be rebuilt. All else that crosses is held in any case.
        self._inputs: list[set[int]] = [set()] + [
            {s for s in boundary.storages if s in self.recipes.rebuildable} for boundary in self._boundaries
        ]
        for cell in range(1, self.length):
            self._saved_in[cell] -= self._inputs[cell]
        self.chain = self._chain()

    def _chain(self) -> Chain:
        """Cells as stages. What else is live during the forward or backward of a cell is its overhead."""
        trace = self.timeline.trace
        size = [st.bytes for st in trace.storages]
        forward = [0.0] * self.length
        forward_peak = [0] * self.length
        floor = self.timeline.floor()
        self.base_bytes = int(floor[: trace.pass_events].min())
        for event in range(trace.forward_events):
            op = trace.events[event]
            cell = self._cell_of_event[event]
            forward_peak[cell] = max(forward_peak[cell], int(floor[event]) - self.base_bytes)
            if op >= 0:
                operation = trace.operations[op]
                forward[cell] += operation.seconds + trace.recomputed_seconds * operation.host_factor
        gradient, backward_peak = self._backward_bytes(floor)
        self._besides_saved: list[tuple[int, int]] = []
        stages = []
        input_bytes = 0
        for cell in range(self.length):
            # A cell whose backward reads its own output (relu, tanh) has it among what it saves too.
            outputs = self._inputs[cell + 1] if cell + 1 < self.length else set()
            output_bytes = sum(size[s] for s in outputs)
            saved_bytes = sum(size[s] for s in self._saved_in[cell] | outputs)
            stages.append(
                ChainStage(
                    forward[cell],
                    0.0,
                    output_bytes,
                    saved_bytes,
                    gradient[cell],
                    max(0, forward_peak[cell] - output_bytes - input_bytes),
                )
            )
            # What the cell saves is live in its forward in any case, so it is part of that peak.
            self._besides_saved.append((max(0, forward_peak[cell] - input_bytes - saved_bytes), backward_peak[cell]))
            input_bytes = output_bytes
        return Chain(tuple(stages), 0)

    def _backward_bytes(self, floor: Any) -> tuple[list[int], list[int]]:
        """Bytes above the base when backward reaches each cell, and the peak of its backward, with everything dropped."""
        trace = self.timeline.trace
        at_start, peak = [0] * self.length, [0] * self.length
        end = trace.pass_events
        for cell in range(self.length):
            start = self._first_unpack.get(cell, end)
            # Where a cell unpacks nothing, backward is at the cell before it at once.
            at_start[cell] = int(floor[min(start, end - 1)]) - self.base_bytes
            if start < end:
                peak[cell] = int(floor[start:end].max()) - self.base_bytes
                end = start
        if trace.forward_events < end:
            peak[-1] = max(peak[-1], int(floor[trace.forward_events : end].max()) - self.base_bytes)
        return at_start, peak

    def _groups(self) -> list[range]:
        """The cells of each stage that the dynamic program sees."""
        size = -(-self.length // MOST_STAGES)
        return [range(a, min(a + size, self.length)) for a in range(0, self.length, size)]

    def table(self, capacity_bytes: int) -> _ScheduleTable:
        """Optimal schedules for any amount of memory up to the capacity."""
        groups = self._groups()
        stages = self.chain.stages
        if len(groups) == self.length:
            slots = 2 * MEMORY_SLOTS if self.length <= SHORT_CHAIN else MEMORY_SLOTS
            outer = RotorTable(self.chain, capacity_bytes, slots, besides_saved=self._besides_saved)
            return _ScheduleTable(outer, groups, [])
        outer_stages = []
        known: dict[tuple[object, ...], RotorTable] = {}  # groups that are alike share one
        inner_tables = []
        for cells in groups:
            inside = stages[cells.start : cells.stop]
            input_bytes = stages[cells.start - 1].output_bytes if cells.start else 0
            besides = self._besides_saved[cells.start : cells.stop]
            key = (input_bytes, *inside, *besides)
            if key not in known:
                known[key] = RotorTable(Chain(inside, input_bytes), capacity_bytes, MEMORY_SLOTS, besides_saved=besides)
            inner_tables.append(known[key])
            values = [input_bytes, *(p.output_bytes for p in inside)]
            sweep = max(v + p.output_bytes + p.forward_overhead_bytes for v, p in zip(values, inside, strict=False))
            outer_stages.append(
                ChainStage(
                    sum(p.forward_seconds for p in inside),
                    0.0,
                    inside[-1].output_bytes,
                    sum(p.saved_bytes for p in inside),
                    inside[-1].gradient_bytes,
                    max(0, sweep - inside[-1].output_bytes - input_bytes),
                )
            )
        outer_besides = [
            (max(f for f, _ in besides), max(b for _, b in besides))
            for besides in (self._besides_saved[cells.start : cells.stop] for cells in groups)
        ]
        outer = RotorTable(
            Chain(tuple(outer_stages), 0),
            capacity_bytes,
            MEMORY_SLOTS,
            [t.seconds for t in inner_tables],
            outer_besides,
        )
        return _ScheduleTable(outer, groups, inner_tables)

    def schedules(
        self, budget_bytes: int, fits: Callable[[dict[int, list[int]]], bool]
    ) -> Iterator[dict[int, list[int]]]:
        """Recomputations of the fastest schedules that fit a budget; `fits` replays them."""
        capacity_bytes = budget_bytes - self.base_bytes
        if capacity_bytes <= 0:
            return
        table = self.table(int(capacity_bytes * MOST_CAPACITY))
        amounts = [m for m in table.amounts() if m * MOST_CAPACITY >= LEAST_CAPACITY * table.slots]
        if self.length > SHORT_CHAIN:
            # Schedules for less memory nearly always have lower peaks: bisect for the first that fits.
            low, high = 0, len(amounts)
            while low < high:
                middle = (low + high) // 2
                if fits(self.recomputations(table.operations(amounts[middle]))):
                    high = middle
                else:
                    low = middle + 1
            amounts = amounts[max(0, low - MOST_FITTING) : low + 1]
        found = 0
        for amount in amounts:
            recomputations = self.recomputations(table.operations(amount))
            if fits(recomputations) and self.timeline.recipes.read_what_is_there(recomputations):
                found += 1
                yield recomputations
            if found == MOST_FITTING:
                break

    def smallest_schedules(self, known_bytes: int) -> Iterator[dict[int, list[int]]]:
        """Recomputations of the schedules for the least memory; `known_bytes` is a peak that some plan reaches."""
        capacity_bytes = known_bytes - self.base_bytes
        if capacity_bytes <= 0:
            return
        table = self.table(int(capacity_bytes * MOST_CAPACITY))
        for amount in table.amounts()[-2 if self.length > SHORT_CHAIN else -2 * MOST_FITTING :]:
            recomputations = self.recomputations(table.operations(amount))
            if self.timeline.recipes.read_what_is_there(recomputations):
                yield recomputations

    def recomputations(self, operations: Sequence[ChainOperation]) -> dict[int, list[int]]:
        """A chain schedule as recomputations, each before the first unpack of the cell's backward that follows it."""
        recipes, recipe_of = self.recipes.recipes, self.recipes.recipe_of
        position = 0
        last_cell = -1
        fully_saved: set[int] = set()  # cells that keep all their backward reads
        input_dropped: set[int] = set()
        pending: list[int] = []
        out: dict[int, list[int]] = {}
        dropped: set[int] = set()
        # The first sweep over the cells is the step's own forward: it tells what is kept.
        while position < len(operations) and operations[position].kind is not OperationKind.BACKWARD:
            operation = operations[position]
            if operation.stage <= last_cell:
                break
            last_cell = operation.stage
            if operation.kind is OperationKind.FORWARD_ALL:
                fully_saved.add(operation.stage)
            elif operation.kind is OperationKind.FORWARD_NONE:
                input_dropped.add(operation.stage)
            position += 1
        for cell in range(self.length):
            if cell not in fully_saved:
                dropped |= self._saved_in[cell] - (self._inputs[cell + 1] if cell + 1 < self.length else set())
            if cell in input_dropped:
                dropped |= self._inputs[cell]
        kept = self.recipes.saved - dropped
        held = kept | (set(self.recipes.managed) - self.recipes.rebuildable)
        rebuilt: set[int] = set()  # what is in memory again at this point of the schedule

        def rebuild(wanted: set[int]) -> list[int]:
            needed: set[int] = set()
            stack = [s for s in wanted if s not in held]
            while stack:
                recipe = recipe_of[stack.pop()]
                if recipe in needed:
                    continue
                needed.add(recipe)
                # An input that is not in memory is rebuilt as well.
                stack += [i for i in recipes[recipe].inputs if i not in held and i not in rebuilt]
            runs = sorted(needed, key=self.recipes.last_operation.__getitem__)
            for recipe in runs:
                rebuilt.update(s for s in recipes[recipe].makes if s not in held)
            return runs

        for index, operation in enumerate(operations[position:], position):
            cell = operation.stage
            match operation.kind:
                case OperationKind.BACKWARD:
                    if pending and cell in self._first_unpack:
                        out[self._first_unpack[cell]] = pending
                        pending = []
                    rebuilt -= self._saved_in[cell]
                    if cell + 1 < self.length:
                        rebuilt -= self._inputs[cell + 1]
                case OperationKind.FORWARD_ALL:
                    runs = rebuild(self._saved_in[cell])
                    # Its output is rebuilt only where the next cell's forward follows: its own backward does not read it.
                    following = operations[index + 1] if index + 1 < len(operations) else operation
                    if following.kind is not OperationKind.BACKWARD and following.stage == cell + 1:
                        missing = {s for s in self._inputs[cell + 1] if s not in rebuilt}
                        runs += [r for r in rebuild(missing & dropped) if r not in runs]
                    pending.extend(runs)
                case OperationKind.FORWARD_CHECKPOINT | OperationKind.FORWARD_NONE:
                    if cell + 1 < self.length:
                        missing = self._inputs[cell + 1] - rebuilt
                        runs = rebuild(missing)
                        pending.extend(runs)
                        # Of what these recipes make, only the boundaries stay.
                        rebuilt -= (
                            {s for r in runs for s in recipes[r].makes} - self._inputs[cell + 1] - self._inputs[cell]
                        )
                        if operation.kind is OperationKind.FORWARD_NONE:
                            rebuilt -= self._inputs[cell]
        return {event: runs for event, runs in out.items() if runs}
