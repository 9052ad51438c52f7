"""Replay a trace under a plan: bytes over time, to the byte. The only memory model there is.

A plan is `Recomputations`: for an unpack event, the recipes to run before the saved tensor is handed over. All else follows by liveness: a copy of a storage
is alive from when it is made until its last use before it is made again. Uses are unpacks (held until the backward node lets go) and inputs of
recomputations. The engine does the same, operation by operation; `tests/engine` compares the two.

A storage that is reloaded is *offloaded*: its first copy lives at least until the moment at which its copy down is waited for (`Reload.gone_by`), and the
next from where its copy up begins. Both moments are the plan's, so bytes are as exact as without; what the links add is seconds, which a walk over the
two queues of each tells (`copying`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Final

import numpy as np

from memfit.planner.columns import RaggedRows, add_span
from memfit.planner.copying import CopyClock, Copying
from memfit.planner.earlier_micro_batches import held_more
from memfit.planner.following import Following
from memfit.planner.recipes import Recipe, Recipes
from memfit.values.trace import BEFORE_STEP, Category, Phase, Trace

Recomputations = Mapping[int, Sequence[int]]  # unpack event -> recipe indices, in the order in which they run

# What the engine takes besides, in multiples of running one operation again, from seven models by hand (docs/design/log.md): once in a pass to note the
# arguments of an operation that runs again, and to hand autograd a tensor of its; when autograd asks for what must run first, to leave autograd and come back,
# which is much code and takes far longer in the midst of long kernels. A copy down and a copy up are an estimate that no model was clocked for.
NOTED: Final = 0.55
HANDED: Final = 0.5
ASKED: Final = 1.4
ASKED_COLD: Final = 6.6  # for each time that the engine takes longer than with warm caches
COPIED: Final = 5.0
NUMBER_BYTES: Final = 8  # of a tensor that torch makes of a Python number
_TAKE_A_NUMBER_AS_TENSOR: Final = frozenset(
    [f"aten.{name}{written}.Tensor" for name in ("add", "sub", "mul", "div") for written in ("", "_")]
    + ["aten.div.Tensor_mode", "aten.div_.Tensor_mode", "aten.floor_divide.default", "aten.floor_divide_.default"]
)
_WITH_A_NUMBER: Final = re.compile(r"\S+ [^@]*@\d+ (f|-?\d+)( |$)")  # the key of a call whose second argument is one


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Bytes and seconds of a step under a plan.

    Attributes:
        peak_bytes: largest number of bytes held at once during the step.
        peak_event: the event at which.
        extra_seconds: time of the recomputations of one micro-batch, of following the plan, and of waiting for copies.
        levels: bytes at each event, recomputations before it included.
        copying: of one micro-batch.
    """

    peak_bytes: int
    peak_event: int
    extra_seconds: float
    levels: Any
    copying: Copying


@dataclass(slots=True)
class _Expanded:
    """The events with one more *slot* for each recomputation, just before the event it serves: on slots every copy is one interval.

    Attributes:
        events, recipes: of each recomputation, in order.
        slots: of each recomputation.
        slot_of_event: of each event, and of the end.
        storages, births, ends: of each copy; it is alive after its birth slot, up to its end.
        uses: (storage, slot, last slot held) of every use.
        totals: bytes at each slot, workspace and what a recipe holds meanwhile included.
    """

    events: Any
    recipes: Any
    slots: Any
    slot_of_event: Any
    storages: Any
    births: Any
    ends: Any
    uses: tuple[Any, Any, Any]
    totals: Any


@dataclass(frozen=True, slots=True)
class Intervals:
    """A plan's copies of all storages, as intervals of slots, for sizes of any kind.

    Attributes:
        storages, births, ends: of each copy; it counts from the birth up to, not including, the end.
        fixed: bytes at each slot that are of no storage: workspaces, and what recipes hold while they run.
        runs: slots at which recipes run.
    """

    storages: Any
    births: Any
    ends: Any
    fixed: Any
    runs: Any

    def totals(self, sizes: Any, fixed: Any = None) -> Any:
        """Bytes at each slot.

        Args:
            sizes: of every storage.
            fixed: in place of its own.
        """
        count = len(self.fixed)
        changes = np.bincount(self.births, weights=sizes[self.storages], minlength=count + 2)
        changes -= np.bincount(self.ends, weights=sizes[self.storages], minlength=count + 2)
        return np.cumsum(changes)[:count].astype(np.int64) + (self.fixed if fixed is None else fixed)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of one trace.

    Attributes:
        before: those that a pass adds to, by storage: of each parameter that is trained, in the model's order.
        bytes: of these.
        added: of these, each with the event of backward that is the first to add to it.
        made: those that the pass makes.
    """

    before: tuple[int, ...]
    bytes: int
    added: tuple[tuple[int, int], ...]
    made: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace) -> Gradients:
        """Those of a trace."""
        every = [s for s, storage in enumerate(trace.storages) if storage.category is Category.GRADIENT]
        before = tuple(s for s in every if trace.storages[s].birth == BEFORE_STEP)
        added: dict[int, int] = {}
        there = set(before)
        for event, code in enumerate(trace.events[: trace.pass_events]):
            if code >= 0 and trace.operations[code].phase is Phase.BACKWARD:
                for s in there.intersection(trace.operations[code].writes):
                    added.setdefault(s, event)
        made = tuple(s for s in every if s not in there)
        return cls(before, sum(trace.storages[s].bytes for s in before), tuple(added.items()), made)


class Timeline:
    """Replays one trace under any number of plans."""

    def __init__(self, trace: Trace, recipes: Recipes | None = None) -> None:
        self.trace = trace
        self.recipes = recipes or Recipes(trace)
        self.events = len(trace.events)
        managed = set(self.recipes.managed)
        self.unpack_uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        releases: dict[int, int] = defaultdict(lambda: -1)
        for save in trace.saves:
            releases[save.storage] = max(releases[save.storage], save.freed)
            for event, release in save.unpacks:
                releases[save.storage] = max(releases[save.storage], release)
                if save.storage in managed:
                    self.unpack_uses[save.storage].append((event, release))
        for uses in self.unpack_uses.values():
            uses.sort()
        self.plain_end = {
            s: max(trace.storages[s].death, releases[s], trace.storages[s].birth) for s in range(len(trace.storages))
        }
        self.saves_at: dict[int, int] = {}
        for save in trace.saves:
            for event, _ in save.unpacks:
                self.saves_at[event] = save.storage
        self._workspace = np.zeros(self.events + 1, dtype=np.int64)
        for event, op in enumerate(trace.events):
            if op >= 0:
                self._workspace[event] = trace.operations[op].workspace_bytes
        self._numbers = np.array([*map(self._number_bytes, range(self.events)), 0], dtype=np.int64)
        self._plain = np.zeros(self.events + 2, dtype=np.int64)
        for s, storage in enumerate(trace.storages):
            add_span(self._plain, max(storage.birth, 0), self.plain_end[s], storage.bytes)
        self._earlier = held_more(trace, self.plain_end, self._workspace)
        self._plain[: self.events + 1] += np.diff(self._earlier, prepend=0)
        # The same in columns.
        table = self.recipes.recipes
        count = range(len(trace.storages))
        self._bytes = np.array([st.bytes for st in trace.storages], dtype=np.int64)
        self._birth = np.array([max(st.birth, 0) for st in trace.storages], dtype=np.int64)
        # The last event of the copy made in forward where autograd keeps it itself, and where the engine answers for it.
        self.last_end = [min(self.plain_end[s], self.events) for s in count]
        self.transient_end = [min(max(st.death, st.birth), self.events) for st in trace.storages]
        self._end = np.array(self.last_end, dtype=np.int64)
        self._transient_end = np.array(self.transient_end, dtype=np.int64)
        self._unpack_event = RaggedRows([[e for e, _ in self.unpack_uses.get(s, ())] for s in count])
        self._unpack_release = RaggedRows(
            [[min(r, self.events) for _, r in self.unpack_uses.get(s, ())] for s in count]
        )
        self._makes = RaggedRows([r.makes for r in table])
        self._inputs = RaggedRows([r.inputs for r in table])
        self._recipe_peak = np.array([r.peak_bytes for r in table], dtype=np.int64)
        calls = self.recipes.calls
        self._run_seconds = [r.seconds for r in table]
        self._once_seconds = [0.0] * len(table)
        self._asked_seconds = [0.0] * len(table)
        for number, r in enumerate(table):
            if number not in calls:  # calls that are made again have all of it in their seconds
                self._add_engine_seconds(number, r)
        self._gone_by = np.array(
            [self.recipes.reloads[r].gone_by if r in self.recipes.reloads else -1 for r in range(len(table))],
            dtype=np.int64,
        )
        self._saved_at = np.full(self.events + 1, -1, dtype=np.int64)
        for event, s in self.saves_at.items():
            self._saved_at[event] = s
        self._every_event = np.arange(self.events + 1)
        # Events of the random operations of each recipe, where there is a generator's state to keep for them.
        self.random_events = {
            index: [calls[index].begin]
            if index in calls
            else [self.recipes.event_of_operation[op] for op in r.operations if trace.operations[op].random]
            for index, r in enumerate(table)
            if trace.rng_state_bytes and r.random_operations
        }
        self._random_rows = RaggedRows([self.random_events.get(index, []) for index in range(len(table))])
        self._passing = RaggedRows([self.recipes.passing.get(index, ()) for index in range(len(table))])
        self._copy_clock = CopyClock(self.recipes, self.unpack_uses, self.saves_at, self.run_seconds)
        self.following = Following(self.recipes)

    @cached_property
    def gradients(self) -> Gradients:
        """Those of the trace."""
        return Gradients.of(self.trace)

    @property
    def held_until(self) -> int:
        """The event after which the engine lets go of what it holds for recipes and no operation makes (`Recipes.passing`)."""
        return self.trace.pass_events - 1

    @property
    def storage_bytes(self) -> Any:
        """Of every storage, in a column."""
        return self._bytes

    @cached_property
    def kept_by_forward(self) -> Any:
        """Which storages forward makes and something keeps until backward, where nothing is dropped."""
        end = self.trace.forward_events
        return np.array(
            [0 <= s.birth < end <= self.plain_end[i] for i, s in enumerate(self.trace.storages)], dtype=bool
        )

    def _add_engine_seconds(self, number: int, recipe: Recipe) -> None:
        """What the engine takes beside the operations of a recipe: for each run, once in a pass, and when autograd asks."""
        again = self.trace.recomputed_seconds
        if not recipe.operations:
            self._run_seconds[number] += again * COPIED
            return
        factor = fmean(self.trace.operations[op].host_factor for op in recipe.operations)
        handed = sum(len(self.unpack_uses.get(s, ())) for s in recipe.makes)
        self._run_seconds[number] += again * factor * len(recipe.operations)
        self._once_seconds[number] = again * factor * (NOTED * len(recipe.operations) + HANDED * handed)
        self._asked_seconds[number] = again * (ASKED + ASKED_COLD * (factor - 1.0))

    def _number_bytes(self, event: int) -> int:
        """Of the Python number of an operation of forward, where the engine follows it: `x + 0.5`.

        torch makes a tensor of the number above every dispatch mode, and the mode below is handed the number again, of which its kernel makes another
        (counted in its workspace). Kernels of a GPU take such numbers from host memory.
        """
        code = self.trace.events[event]
        if code < 0 or event >= self.trace.forward_events:
            return 0
        operation = self.trace.operations[code]
        takes = operation.workspace_bytes >= NUMBER_BYTES and operation.name in _TAKE_A_NUMBER_AS_TENSOR
        return NUMBER_BYTES if takes and _WITH_A_NUMBER.match(operation.key) else 0

    def plain(self) -> Evaluation:
        """The step as PyTorch runs it."""
        return self.evaluate({})

    def seconds(self, recomputations: Recomputations) -> float:
        """Extra seconds of a plan: cheap, as nothing is replayed."""
        return self._computing(recomputations) + self.copying(recomputations).exposed_seconds

    def _computing(self, recomputations: Recomputations) -> float:
        used = {recipe for runs in recomputations.values() for recipe in runs}
        seconds = sum(self._once_seconds[recipe] for recipe in sorted(used)) + self.following.seconds_of(used)
        for event in sorted(recomputations):
            runs = recomputations[event]
            seconds += max((self._asked_seconds[recipe] for recipe in runs), default=0.0)
            seconds += sum(self._run_seconds[recipe] for recipe in runs)
        return seconds

    def run_seconds(self, recipe: int) -> float:
        """Seconds of one run of a recipe among others, the engine's own included and waiting for copies not."""
        return self._run_seconds[recipe]

    def least_seconds(self, recipe: int) -> float:
        """Seconds that any plan takes in which a recipe runs: of running it once, and of noting what it reads."""
        return self._run_seconds[recipe] + self._once_seconds[recipe]

    def copying(self, recomputations: Recomputations) -> Copying:
        """Seconds of the copies of a plan, and how many of them do not overlap with computing."""
        return self._copy_clock.walk(recomputations)

    def link_seconds(self, recipe: int) -> float:
        """What a reload keeps its link busy, down and up; 0 for what computes."""
        reload = self.recipes.reloads.get(recipe)
        return reload.out_seconds + reload.in_seconds if reload is not None else 0.0

    def fits_lower_tiers(self, recomputations: Recomputations) -> bool:
        """Whether what a plan offloads fits on the tiers it goes to."""
        capacities = [link.free_bytes for link in self.recipes.tiers]
        if all(capacity is None for capacity in capacities):
            return True
        taken = [0 for _ in capacities]
        for s, reload in self.recipes.copied_down(recomputations).items():
            taken[reload.tier] += self.recipes.place_bytes(s)
        return all(capacity is None or size <= capacity for size, capacity in zip(taken, capacities, strict=True))

    def floor(self) -> Any:
        """Bytes at each event when every storage that forward saved and can rebuild goes as early as it can, and none is rebuilt."""
        return self._floor(self.recipes.saved & self.recipes.rebuildable)

    def floor_with_offloading(self) -> Any:
        """The same when what can be offloaded goes as well."""
        return self._floor(self.recipes.saved & (self.recipes.rebuildable | self.recipes.reloads_of.keys()))

    def least_peak(self, made_again: Iterable[int]) -> int:
        """Bytes that every plan takes in which these storages are made again, and nothing runs again but before an unpack of one of them."""
        return int(self._floor(made_again).max())

    def _floor(self, dropped: Iterable[int]) -> Any:
        changes = self._plain.copy()
        for s in dropped:
            size = self.trace.storages[s].bytes
            changes[self.transient_end[s] + 1] -= size
            changes[self.last_end[s] + 1] += size
        return np.cumsum(changes[: self.events + 1]) + self._workspace

    def peak(self, recomputations: Recomputations) -> int:
        """Peak bytes under a plan."""
        return int(self.expand(recomputations).totals.max())

    def evaluate(self, recomputations: Recomputations) -> Evaluation:
        """Bytes and seconds under a plan. Storages that recomputations read are held for them."""
        expanded = self.expand(recomputations)
        # The slots of an event are its recomputations' and its own, next to each other.
        first = np.concatenate([[0], expanded.slot_of_event[:-1] + 1])
        totals = np.maximum.reduceat(expanded.totals, first)
        peak_event = int(np.argmax(totals))
        copying = self.copying(recomputations)
        seconds = self._computing(recomputations) + copying.exposed_seconds
        return Evaluation(int(totals[peak_event]), peak_event, seconds, totals, copying)

    def expand(self, recomputations: Recomputations) -> _Expanded:
        """The replay itself: every copy as an interval of slots."""
        order = sorted(event for event, runs in recomputations.items() if runs)
        recipes = np.array([r for event in order for r in recomputations[event]], dtype=np.int64)
        events = np.array([event for event in order for _ in recomputations[event]], dtype=np.int64)
        slots = events + np.arange(len(events))
        before = np.bincount(events, minlength=self.events + 1)
        slot_of_event = self._every_event + before.cumsum()
        count = self.events + 1 + len(slots)
        # [1] When is each storage made again, and used by recomputations?
        made, made_by = self._makes.gather(recipes)
        made_at = slots[made_by]
        used, owner = self._inputs.gather(recipes)
        used_at = slots[owner]
        # The engine answers for what it makes again, and for what is asked for where recomputations start; autograd keeps the rest itself.
        answered = np.zeros(len(self._bytes), dtype=bool)
        answered[made] = True
        answered[self._saved_at[order]] = True
        touched = answered.copy()
        touched[used] = True
        # [2] Copies: the one of forward, and one for each making.
        first = touched.nonzero()[0]
        storages = np.concatenate([first, made])
        births = np.concatenate([slot_of_event[self._birth[first]] - 1, made_at])
        gone_by = np.full(len(self._bytes), -1, dtype=np.int64)
        np.maximum.at(gone_by, made, self._gone_by[recipes[made_by]])
        lasting = np.where(answered[first], np.maximum(self._transient_end, gone_by)[first], self._end[first])
        ends = np.concatenate([slot_of_event[lasting], made_at])
        # [3] Uses: inputs of recomputations, and unpacks, held until the backward node lets go.
        asked = answered.nonzero()[0]
        event, owner = self._unpack_event.gather(asked)
        release, _ = self._unpack_release.gather(asked)
        use_storages = np.concatenate([used, asked[owner]])
        use_slots = np.concatenate([used_at, slot_of_event[event]])
        use_ends = np.concatenate([used_at, slot_of_event[release]])
        # Each is served by the newest copy made before it, which is there until the last of its uses.
        keys = storages * (count + 1) + births + 1
        sorting = keys.argsort()
        storages, births, ends, keys = storages[sorting], births[sorting], ends[sorting], keys[sorting]
        serving = keys.searchsorted(use_storages * (count + 1) + use_slots + 1) - 1
        np.maximum.at(ends, serving, use_ends)
        # [4] Bytes: what no copy stands for lives as in the plain step.
        plain = self._plain.copy()
        np.subtract.at(plain, self._birth[first], self._bytes[first])
        np.add.at(plain, self._end[first] + 1, self._bytes[first])
        changes = np.zeros(count + 1, dtype=np.int64)
        np.add.at(changes, births + 1, self._bytes[storages])
        np.subtract.at(changes, ends + 1, self._bytes[storages])
        if self.random_events:
            # Generator states, from the first run of a random operation to the last recomputation of its recipe.
            last = np.full(len(self._run_seconds), -1)
            last[recipes] = slots
            again = (last >= 0).nonzero()[0]
            event, owner = self._random_rows.gather(again)
            np.add.at(changes, slot_of_event[event], self.trace.rng_state_bytes)
            np.subtract.at(changes, last[again][owner] + 1, self.trace.rng_state_bytes)
        if self.recipes.passing:
            held, _ = self._passing.gather(np.unique(recipes))
            held = np.unique(held)
            np.add.at(changes, slot_of_event[np.minimum(self._end[held], self.held_until)] + 1, self._bytes[held])
            changes[slot_of_event[self.held_until] + 1] -= self._bytes[held].sum()
        totals = changes.cumsum()[:count]
        own = plain.cumsum()[: self.events + 1]
        totals[slot_of_event] += own + self._workspace + (self._numbers if order else 0)
        totals[slots] += own[events] + self._recipe_peak[recipes]
        return _Expanded(
            events,
            recipes,
            slots,
            slot_of_event,
            storages,
            births,
            ends,
            (use_storages, use_slots, use_ends),
            totals,
        )

    def intervals(self, recomputations: Recomputations) -> Intervals:
        """The moments at which each storage counts under a plan, for a replay in other sizes."""
        expanded = self.expand(recomputations)
        storages, births, ends = expanded.storages, expanded.births + 1, expanded.ends + 1
        of_event = expanded.slot_of_event
        alone = np.setdiff1d(np.arange(len(self._bytes)), storages)
        # Slots of recomputations come before their event's own.
        first = np.concatenate([[0], of_event[:-1] + 1])
        everything = Intervals(
            np.concatenate([storages, alone]),
            np.concatenate([births, first[self._birth[alone]]]),
            np.concatenate([ends, of_event[self._end[alone]] + 1]),
            np.zeros(len(expanded.totals), dtype=np.int64),
            expanded.slots,
        )
        return replace(everything, fixed=expanded.totals - everything.totals(self._bytes))

    def by_category(self, levels_of: Recomputations) -> dict[Category, Any]:
        """Bytes at each event by category, for pictures; workspace counts as temporary."""
        out = {c: np.zeros(self.events + 2, dtype=np.int64) for c in Category}
        for s, storage in enumerate(self.trace.storages):
            if storage.birth == BEFORE_STEP or s not in self.recipes.recipe_of:
                add_span(out[storage.category], max(storage.birth, 0), self.plain_end[s], storage.bytes)
        total = self.evaluate(levels_of)
        bands = {c: np.cumsum(changes[: self.events + 1]) for c, changes in out.items()}
        bands[Category.TEMPORARY] = bands[Category.TEMPORARY] + self._workspace
        bands[Category.GRADIENT] = bands[Category.GRADIENT] + self._earlier
        rest = total.levels - sum(bands.values())
        bands[Category.ACTIVATION] = bands[Category.ACTIVATION] + rest
        return bands
