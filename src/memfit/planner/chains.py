"""Forward as a chain of cells, and the chain optimum as reruns: nested recomputation for budgets that one level of windows cannot reach.

Cuts at prices rebuild each window once. On deep narrow chains less memory is possible by dropping boundaries too and sweeping over cells several times,
which the dynamic programs of `baselines` plan optimally. Their schedules become ordinary reruns here, so the same timeline judges them and the
same engine runs them, and no plan of ours is worse than theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memfit.errors import InfeasibleError
from memfit.planner.baselines import Chain, ChainSchedule, OperationKind, Stage, rotor_schedule
from memfit.planner.recipes import Recipes
from memfit.planner.segments import Boundary, windows
from memfit.planner.timeline import Timeline

MOST_STAGES: Final = 64
SLOTS: Final = 240
SHORT: Final = 24  # chains this short take milliseconds, so the memory is searched finely
# The chain's memory is coarser than the timeline: schedules for more than the room may fit, and for as much may not.
SHRINK: Final = (1.35, 1.25, 1.15, 1.07, 1.0, 0.96, 0.92, 0.87, 0.8, 0.7, 0.55, 0.4)


class CellChain:
    """The trace as a chain of at most MOST_STAGES cells.

    Args:
        timeline: of the trace.
        cuts: its boundaries; merged evenly where there are too many.
    """

    def __init__(self, timeline: Timeline, cuts: list[Boundary]) -> None:
        self.timeline = timeline
        self.recipes: Recipes = timeline.recipes
        trace = timeline.trace
        merge = -(-(len(cuts) + 1) // MOST_STAGES)
        self.cuts = cuts[merge - 1 :: merge] if merge > 1 else list(cuts)
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
        trace = self.timeline.trace
        size = [st.bytes for st in trace.storages]
        forward = [0.0] * self.length
        for event in range(trace.forward_events):
            op = trace.events[event]
            if op >= 0:
                forward[self.window[event]] += trace.operations[op].seconds
        stages = []
        for cell in range(self.length):
            output = sum(size[s] for s in self.entry[cell + 1]) if cell + 1 < self.length else 0
            # A cell that saves its own output (relu, tanh) has it among its inner storages too.
            after = self.entry[cell + 1] if cell + 1 < self.length else set()
            saved = sum(size[s] for s in self.inner[cell] | after)
            stages.append(Stage(forward[cell], 0.0, output, saved, output, 0, 0))
        return Chain(tuple(stages), 0)

    def schedules(self, room_bytes: int) -> Iterator[dict[int, list[int]]]:
        """Reruns of optimal schedules for ever less memory, starting from `room_bytes` for what can be dropped."""
        seen: set[tuple[int, ...]] = set()
        shares = [1.36 - 0.02 * i for i in range(49)] if self.length <= SHORT else list(SHRINK)
        for share in shares:
            try:
                schedule = rotor_schedule(self.chain, int(room_bytes * share), SLOTS)
            except (InfeasibleError, ValueError):
                return
            reruns = self.reruns(schedule)
            key = tuple(x for e in sorted(reruns) for x in (e, *reruns[e]))
            if key not in seen:
                seen.add(key)
                yield reruns

    def reruns(self, schedule: ChainSchedule) -> dict[int, list[int]]:
        """A chain schedule as reruns before the unpacks of each cell's backward."""
        table, recipe_of = self.recipes.recipes, self.recipes.recipe_of
        position = 0
        first_sweep = -1
        everything: set[int] = set()  # cells whose storages are all there
        dropped_entries: set[int] = set()
        pending: list[int] = []
        out: dict[int, list[int]] = {}
        unsaved_or_dropped: set[int] = set()
        operations = schedule.operations
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

        def rebuild(wanted: set[int], cell: int) -> list[int]:
            needed: set[int] = set()
            stack = [s for s in wanted if s not in fixed]
            while stack:
                recipe = recipe_of[stack.pop()]
                if recipe in needed:
                    continue
                needed.add(recipe)
                stack.extend(
                    i
                    for i in table[recipe].inputs
                    if i not in fixed and i not in available and i not in self.entry[cell]
                )
                # An entry that is nowhere is rebuilt with the cell.
                stack.extend(
                    i for i in table[recipe].inputs if i in self.entry[cell] and i not in fixed and i not in available
                )
            runs = sorted(needed, key=lambda r: table[r].operations[-1])
            for recipe in runs:
                available.update(table[recipe].makes)
            available.difference_update(fixed)
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
                    runs = rebuild(self.inner[cell], cell)
                    # Its output is made again only for a cell that runs next; backward of this cell reads its inner storages alone.
                    following = operations[index + 1] if index + 1 < len(operations) else operation
                    if following.kind is not OperationKind.BACKWARD and following.stage == cell + 1:
                        missing = {s for s in self.entry[cell + 1] if s not in available}
                        runs += [r for r in rebuild(missing & unsaved_or_dropped, cell) if r not in runs]
                    pending.extend(runs)
                case OperationKind.FORWARD_CHECKPOINT | OperationKind.FORWARD_NONE:
                    if cell + 1 < self.length:
                        before = set(available)
                        pending.extend(rebuild(self.entry[cell + 1] - available, cell))
                        # Only the boundary is remembered; what was made on the way is not.
                        kept_now = before | self.entry[cell + 1]
                        if operation.kind is OperationKind.FORWARD_NONE:
                            kept_now -= self.entry[cell] - fixed
                        available &= kept_now
        return {event: runs for event, runs in out.items() if runs}
