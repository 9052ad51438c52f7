"""Forward as a chain of cells, and the chain optimum as recomputations: nested recomputation for budgets that one level of windows cannot reach.

Cuts at prices rebuild each window once. On deep narrow chains less memory is possible by dropping boundaries too and sweeping over cells several times,
which the dynamic program of `baselines.rotor` plans optimally. Their schedules become ordinary recomputations here, so the same timeline judges them and the
same engine runs them, and no plan of ours is worse than theirs.
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

MOST_STAGES: Final = 64
SLOTS: Final = 320
SHORT: Final = 24  # chains this short take milliseconds, so the memory is searched finely
# The chain's memory is coarser than the timeline: schedules for more than there is may fit, and for as much may not.
MOST: Final = 1.36
LEAST: Final = 0.4
FITTING: Final = 3  # this many schedules that fit are looked at: the memory is coarse, and the first need not be the fastest in the end


class _Table:
    """Schedules of a chain whose stages may be chains themselves, in any amount of memory."""

    def __init__(self, outer: RotorTable, groups: list[range], inner: list[RotorTable]) -> None:
        self._outer, self._groups, self._inner = outer, groups, inner
        self.slots = outer.slots

    def amounts(self) -> list[int]:
        """Slots that make a difference, the fastest schedule first."""
        seconds = self._outer.seconds
        faster = np.concatenate([[True], seconds[1:] < seconds[:-1]]) & np.isfinite(seconds)
        return [int(m) for m in np.flatnonzero(faster)[::-1]]

    def operations(self, amount: int) -> list[ChainOperation]:
        """The schedule in so many slots, cell by cell."""
        out: list[ChainOperation] = []
        for (kind, stage), slots in self._outer.operations(amount):
            cells = self._groups[stage]
            if slots:
                if kind is not OperationKind.BACKWARD:  # the inner schedule has its backward in it
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
    """The trace as a chain of cells; where they are many, as a chain of groups of them, each a chain of its own.

    Args:
        timeline: of the trace.
        cuts: its boundaries.
    """

    def __init__(self, timeline: Timeline, cuts: list[Boundary]) -> None:
        self.timeline = timeline
        self.recipes: Recipes = timeline.recipes
        trace = timeline.trace
        self.cuts = cuts
        self.window = windows(self.cuts, trace.forward_events)
        self.length = len(self.cuts) + 1
        droppable = self.recipes.saved & self.recipes.rebuildable
        self.inner: list[set[int]] = [set() for _ in range(self.length)]
        self.trigger: dict[int, int] = {}
        for save in trace.saves:
            if save.storage not in droppable or not save.unpacks:
                continue
            cell = self.window[save.by]
            self.inner[cell].add(save.storage)
            event = save.unpacks[0][0]
            self.trigger[cell] = min(self.trigger.get(cell, event), event)
        # What crosses into a cell and can be made again; the rest is there anyway.
        self.entry: list[set[int]] = [set()] + [
            {s for s in cut.storages if s in self.recipes.rebuildable} for cut in self.cuts
        ]
        for cell in range(1, self.length):
            self.inner[cell] -= self.entry[cell]
        self.chain = self._chain()

    def _chain(self) -> Chain:
        """Cells as stages; what else lives while a cell runs, and while it goes backward, is its overhead."""
        trace = self.timeline.trace
        size = [st.bytes for st in trace.storages]
        forward = [0.0] * self.length
        highest = [0] * self.length
        floor = self.timeline.floor()
        self.base_bytes = int(floor[: trace.pass_events].min())
        for event in range(trace.forward_events):
            op = trace.events[event]
            cell = self.window[event]
            highest[cell] = max(highest[cell], int(floor[event]) - self.base_bytes)
            if op >= 0:
                operation = trace.operations[op]
                forward[cell] += operation.seconds + trace.dispatch_seconds
        gradient, backward = self._backward(floor)
        self.besides_saved: list[tuple[int, int]] = []
        stages = []
        before = 0
        for cell in range(self.length):
            # A cell that saves its own output (relu, tanh) has it among its inner storages too.
            after = self.entry[cell + 1] if cell + 1 < self.length else set()
            output = sum(size[s] for s in after)
            saved = sum(size[s] for s in self.inner[cell] | after)
            stages.append(
                ChainStage(
                    forward[cell],
                    0.0,
                    output,
                    saved,
                    gradient[cell],
                    max(0, highest[cell] - output - before),
                )
            )
            # Much of what a cell makes on the way is what it saves.
            self.besides_saved.append((max(0, highest[cell] - before - saved), backward[cell]))
            before = output
        return Chain(tuple(stages), 0)

    def _backward(self, floor: Any) -> tuple[list[int], list[int]]:
        """Bytes that are there anyway when backward comes to each cell, and the most while it is in it."""
        trace = self.timeline.trace
        there, most = [0] * self.length, [0] * self.length
        end = trace.pass_events
        for cell in range(self.length):
            start = self.trigger.get(cell, end)
            # From the top of a cell that nothing triggers, what is there is what the one after it left.
            there[cell] = int(floor[min(start, end - 1)]) - self.base_bytes
            if start < end:
                most[cell] = int(floor[start:end].max()) - self.base_bytes
                end = start
        if trace.forward_events < end:
            most[-1] = max(most[-1], int(floor[trace.forward_events : end].max()) - self.base_bytes)
        return there, most

    def _groups(self) -> list[range]:
        """Cells of each stage of the chain that the dynamic program sees."""
        size = -(-self.length // MOST_STAGES)
        return [range(a, min(a + size, self.length)) for a in range(0, self.length, size)]

    def table(self, capacity_bytes: int) -> _Table:
        """Optimal schedules in any part of so many bytes."""
        groups = self._groups()
        stages = self.chain.stages
        if len(groups) == self.length:
            slots = 2 * SLOTS if self.length <= SHORT else SLOTS
            return _Table(RotorTable(self.chain, capacity_bytes, slots, besides_saved=self.besides_saved), groups, [])
        merged = []
        inner: dict[tuple[object, ...], RotorTable] = {}
        tables = []
        for cells in groups:
            inside = stages[cells.start : cells.stop]
            before = stages[cells.start - 1].output_bytes if cells.start else 0
            besides = self.besides_saved[cells.start : cells.stop]
            key = (before, *inside, *besides)
            if key not in inner:
                inner[key] = RotorTable(Chain(inside, before), capacity_bytes, SLOTS, besides_saved=besides)
            tables.append(inner[key])
            values = [before, *(p.output_bytes for p in inside)]
            sweep = max(v + p.output_bytes + p.forward_overhead_bytes for v, p in zip(values, inside, strict=False))
            merged.append(
                ChainStage(
                    sum(p.forward_seconds for p in inside),
                    0.0,
                    inside[-1].output_bytes,
                    sum(p.saved_bytes for p in inside),
                    inside[-1].gradient_bytes,
                    max(0, sweep - inside[-1].output_bytes - before),
                )
            )
        most = [
            (max(f for f, _ in besides), max(b for _, b in besides))
            for besides in (self.besides_saved[cells.start : cells.stop] for cells in groups)
        ]
        outer = RotorTable(Chain(tuple(merged), 0), capacity_bytes, SLOTS, [t.seconds for t in tables], most)
        return _Table(outer, groups, tables)

    def schedules(
        self, budget_bytes: int, fits: Callable[[dict[int, list[int]]], bool]
    ) -> Iterator[dict[int, list[int]]]:
        """Recomputations of the fastest schedules that fit a budget."""
        capacity_bytes = budget_bytes - self.base_bytes
        if capacity_bytes <= 0:
            return
        table = self.table(int(capacity_bytes * MOST))
        amounts = [m for m in table.amounts() if m * MOST >= LEAST * table.slots]
        if self.length > SHORT:
            # More memory fits less well, nearly always: look for where it starts to.
            low, high = 0, len(amounts)
            while low < high:
                middle = (low + high) // 2
                if fits(self.recomputations(table.operations(amounts[middle]))):
                    high = middle
                else:
                    low = middle + 1
            amounts = amounts[max(0, low - FITTING) : low + 1]
        found = 0
        for amount in amounts:
            recomputations = self.recomputations(table.operations(amount))
            if fits(recomputations):
                found += 1
                yield recomputations
            if found == FITTING:
                break

    def smallest_schedules(self, known_bytes: int) -> Iterator[dict[int, list[int]]]:
        """Recomputations of schedules in the least memory, when so much is known to do."""
        capacity_bytes = known_bytes - self.base_bytes
        if capacity_bytes <= 0:
            return
        table = self.table(int(capacity_bytes * MOST))
        for amount in table.amounts()[-2 if self.length > SHORT else -2 * FITTING :]:
            yield self.recomputations(table.operations(amount))

    def recomputations(self, operations: Sequence[ChainOperation]) -> dict[int, list[int]]:
        """A chain schedule as recomputations before the unpacks of each cell's backward."""
        table, recipe_of = self.recipes.recipes, self.recipes.recipe_of
        position = 0
        first_sweep = -1
        everything: set[int] = set()  # cells whose storages are all there
        dropped_entries: set[int] = set()
        pending: list[int] = []
        out: dict[int, list[int]] = {}
        unsaved_or_dropped: set[int] = set()
        # The first sweep is the forward itself.
        while position < len(operations) and operations[position].kind is not OperationKind.BACKWARD:
            operation = operations[position]
            if operation.stage <= first_sweep:
                break
            first_sweep = operation.stage
            if operation.kind is OperationKind.FORWARD_ALL:
                everything.add(operation.stage)
            elif operation.kind is OperationKind.FORWARD_NONE:
                dropped_entries.add(operation.stage)
            position += 1
        for cell in range(self.length):
            if cell not in everything:
                unsaved_or_dropped |= self.inner[cell] - (self.entry[cell + 1] if cell + 1 < self.length else set())
            if cell in dropped_entries:
                unsaved_or_dropped |= self.entry[cell]
        kept = self.recipes.saved - unsaved_or_dropped
        fixed = kept | (set(self.recipes.managed) - self.recipes.rebuildable)
        available: set[int] = set()

        def rebuild(wanted: set[int]) -> list[int]:
            needed: set[int] = set()
            stack = [s for s in wanted if s not in fixed]
            while stack:
                recipe = recipe_of[stack.pop()]
                if recipe in needed:
                    continue
                needed.add(recipe)
                # An entry that is nowhere is rebuilt with the cell.
                stack += [i for i in table[recipe].inputs if i not in fixed and i not in available]
            runs = sorted(needed, key=self.recipes.last_operation.__getitem__)
            for recipe in runs:
                available.update(s for s in table[recipe].makes if s not in fixed)
            return runs

        for index, operation in enumerate(operations[position:], position):
            cell = operation.stage
            match operation.kind:
                case OperationKind.BACKWARD:
                    if pending and cell in self.trigger:
                        out[self.trigger[cell]] = pending
                        pending = []
                    available -= self.inner[cell]
                    if cell + 1 < self.length:
                        available -= self.entry[cell + 1]
                case OperationKind.FORWARD_ALL:
                    runs = rebuild(self.inner[cell])
                    # Its output is made again only for a cell that runs next; backward of this cell reads its inner storages alone.
                    following = operations[index + 1] if index + 1 < len(operations) else operation
                    if following.kind is not OperationKind.BACKWARD and following.stage == cell + 1:
                        missing = {s for s in self.entry[cell + 1] if s not in available}
                        runs += [r for r in rebuild(missing & unsaved_or_dropped) if r not in runs]
                    pending.extend(runs)
                case OperationKind.FORWARD_CHECKPOINT | OperationKind.FORWARD_NONE:
                    if cell + 1 < self.length:
                        missing = self.entry[cell + 1] - available
                        runs = rebuild(missing)
                        pending.extend(runs)
                        # Only the boundary is remembered; what was made on the way is not.
                        available -= {s for r in runs for s in table[r].makes} - self.entry[cell + 1] - self.entry[cell]
                        if operation.kind is OperationKind.FORWARD_NONE:
                            available -= self.entry[cell]
        return {event: runs for event, runs in out.items() if runs}
