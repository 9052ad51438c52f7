"""Replay a trace under a plan: bytes over time, to the byte. The only memory model there is.

A plan is `Reruns`: for an unpack event, the recipes to run before the saved tensor is handed over. All else follows by liveness: a copy of a storage
is alive from when it is made until its last use before it is made again. Uses are unpacks (held until the backward node lets go) and inputs of
reruns. The engine does the same, operation by operation; `tests/engine` compares the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.planner.recipes import Recipes
from memfit.trace import BEFORE_STEP, Category, Trace

Reruns = Mapping[int, Sequence[int]]  # unpack event -> recipe indices, in the order in which they run


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan comes to.

    Attributes:
        peak_bytes: largest number of bytes held at once during the step.
        peak_event: the event at which.
        extra_seconds: time of the reruns of one micro-batch, and of following the plan.
        levels: bytes at each event, reruns before it included.
    """

    peak_bytes: int
    peak_event: int
    extra_seconds: float
    levels: Any


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
        self._plain = np.zeros(self.events + 2, dtype=np.int64)
        for s, storage in enumerate(trace.storages):
            self._span(self._plain, max(storage.birth, 0), self.plain_end[s], storage.bytes)

    def _span(self, changes: Any, first: int, last: int, size: int) -> None:
        changes[first] += size
        changes[min(last, self.events) + 1] -= size

    def plain(self) -> Evaluation:
        """The step as PyTorch runs it."""
        return self.evaluate({})

    def evaluate(self, reruns: Reruns) -> Evaluation:
        """Bytes and seconds under a plan. Storages that reruns read are held for them."""
        reruns = {event: runs for event, runs in reruns.items() if runs}
        changes = self._plain.copy()
        storages, recipes = self.trace.storages, self.recipes.recipes
        # [1] When is each storage made again, and used? Moments are (event, position among the reruns before it).
        made: dict[int, list[tuple[int, int]]] = defaultdict(list)
        used: dict[int, list[tuple[int, int]]] = defaultdict(list)
        order = sorted(reruns)
        last_run: dict[int, tuple[int, int]] = {}
        runs = 0
        for event in order:
            for position, recipe in enumerate(reruns[event]):
                runs += len(recipes[recipe].operations)
                last_run[recipe] = (event, position)
                for s in recipes[recipe].makes:
                    made[s].append((event, position))
                for s in recipes[recipe].inputs:
                    used[s].append((event, position))
        # [2] Copies: which uses does each serve, and when does it go?
        starting: dict[int, int] = defaultdict(int)  # event -> bytes of copies made there and alive after it
        ending: dict[int, int] = defaultdict(int)  # event -> bytes of earlier copies that go inside it
        inside: dict[tuple[int, int], int] = defaultdict(
            int
        )  # (event, position) -> bytes kept from there on, less bytes let go there
        answered = {*made, *(self.saves_at[event] for event in order)}  # the others autograd keeps itself
        for s in {*answered, *used}:
            size = storages[s].bytes
            uses = [(e, p, -1) for e, p in used.get(s, ())]
            if s in answered:
                uses += [(e, len(reruns.get(e, ())), r) for e, r in self.unpack_uses.get(s, ())]
            uses.sort()
            births = [(storages[s].birth, 0), *made.get(s, ())]
            self._span(changes, births[0][0], self.plain_end[s], -size)
            cursor = 0
            for copy, birth in enumerate(births):
                until = births[copy + 1] if copy + 1 < len(births) else (self.events + 1, 0)
                first = cursor
                while cursor < len(uses) and uses[cursor][:2] <= until:
                    cursor += 1
                mine = uses[first:cursor]
                if copy and not mine:
                    continue  # a by-product, let go as soon as its recipe has run
                end = max([r for _, _, r in mine], default=-1)
                if not copy:
                    end = max(end, storages[s].death, storages[s].birth)
                    if s not in answered:
                        end = max(end, self.plain_end[s])
                else:
                    inside[birth] += size
                if mine and mine[-1][0] > end:
                    # Its last use is the input of a rerun: it goes inside that event.
                    event, position, _ = mine[-1]
                    inside[event, position] -= size
                    end = event - 1
                    if birth[0] < event:
                        ending[event] += size
                if birth[0] <= end:
                    self._span(changes, birth[0], end, size)
                    if copy:
                        starting[birth[0]] += size
        # [3] Generator states, from the first run of a random operation to its last rerun.
        if self.trace.rng_state_bytes:
            for recipe, (event, position) in last_run.items():
                for op in recipes[recipe].operations:
                    if self.trace.operations[op].random:
                        self._span(changes, self.recipes.event_of_operation[op], event - 1, self.trace.rng_state_bytes)
                        ending[event] += self.trace.rng_state_bytes
                        inside[event, position] -= self.trace.rng_state_bytes
        levels = np.cumsum(changes[: self.events + 1])
        totals = levels + self._workspace
        # [4] Inside an unpack event: one rerun after the other.
        for event in order:
            now = int(levels[event]) - starting[event] + ending[event]
            highest = 0
            for position, recipe in enumerate(reruns[event]):
                highest = max(highest, now + recipes[recipe].peak_bytes)
                now += inside.get((event, position), 0)
            totals[event] = max(int(totals[event]), highest)
        peak_event = int(np.argmax(totals))
        extra = sum(recipes[r].seconds for event in order for r in reruns[event])
        if runs:
            extra += self.trace.dispatch_seconds * (self.trace.forward_operations + runs)
        return Evaluation(int(totals[peak_event]), peak_event, extra, totals)

    def by_category(self, levels_of: Reruns) -> dict[Category, Any]:
        """Bytes at each event by category, for pictures; workspace counts as temporary."""
        out = {c: np.zeros(self.events + 2, dtype=np.int64) for c in Category}
        for s, storage in enumerate(self.trace.storages):
            if storage.birth == BEFORE_STEP or s not in self.recipes.recipe_of:
                self._span(out[storage.category], max(storage.birth, 0), self.plain_end[s], storage.bytes)
        total = self.evaluate(levels_of)
        bands = {c: np.cumsum(changes[: self.events + 1]) for c, changes in out.items()}
        bands[Category.TEMPORARY] = bands[Category.TEMPORARY] + self._workspace
        rest = total.levels - sum(bands.values())
        bands[Category.ACTIVATION] = bands[Category.ACTIVATION] + rest
        return bands
