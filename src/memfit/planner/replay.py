"""One plan being changed: what taking recomputations out does to the bytes, without replaying the whole step.

Any set of recomputations is a valid plan: without one the copy made before it is simply held longer. So they can be taken out one at a time, and only
the few storages that one makes or reads change their lives. This is what local search needs: thousands of tries, each a few intervals long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from memfit.planner.recipes import PREFETCH_DISTANCES
from memfit.planner.timeline import Recomputations, Timeline

_AWAY: Final = 1 << 60  # taken off the total of a slot whose rerun is gone, so that it is never the peak


@dataclass(frozen=True, slots=True)
class Move:
    """Recomputations to take out, and what that does.

    Attributes:
        gone: slots of these recomputations, and of those that nothing needs without them.
        changes: (first slot, last slot + 1, bytes more or less), in order.
        seconds: that the recomputations took.
        depends_on: storages whose lives this was worked out from.
        removals: how many moves had been made by then.
    """

    gone: set[int]
    changes: list[tuple[int, int, int]]
    seconds: float
    depends_on: set[int]
    removals: int


class Replay:
    """The replay of one plan, open to change.

    Attributes:
        totals: bytes at each slot (an event, or a rerun just before one).
        recipe_at, event_at: of the rerun in each slot that has one.
    """

    def __init__(self, timeline: Timeline, recomputations: Recomputations) -> None:
        self.timeline = timeline
        self._recipes = timeline.recipes.recipes
        self._bytes = [st.bytes for st in timeline.trace.storages]
        expanded = timeline.expand(recomputations)
        self.totals = expanded.totals
        self._slot_of_event: list[int] = expanded.slot_of_event.tolist()
        self.recipe_at: dict[int, int] = dict(zip(expanded.slots.tolist(), expanded.recipes.tolist(), strict=True))
        self.event_at: dict[int, int] = dict(zip(expanded.slots.tolist(), expanded.events.tolist(), strict=True))
        self._births: dict[int, list[int]] = defaultdict(list)
        for s, birth in zip(expanded.storages.tolist(), expanded.births.tolist(), strict=True):
            self._births[s].append(birth)
        storages, slots, ends = (column.tolist() for column in expanded.uses)
        self._uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for s, slot, end in zip(storages, slots, ends, strict=True):
            self._uses[s].append((slot, end))
        for uses in self._uses.values():
            uses.sort()
        self._runs_at: dict[int, int] = defaultdict(int)
        for event in self.event_at.values():
            self._runs_at[event] += 1
        self._runs_of: dict[int, list[int]] = defaultdict(list)
        for slot, recipe in self.recipe_at.items():
            self._runs_of[recipe].append(slot)
        # What a reload costs depends on all others; here each is charged the share of its copies that this plan does not hide.
        copying = timeline.copying(recomputations)
        exposed = copying.exposed_seconds / copying.copy_seconds if copying.copy_seconds else 0.0
        self._seconds_of = [
            timeline.run_seconds(r) + exposed * timeline.link_seconds(r) for r in range(len(self._recipes))
        ]
        # A move stays what it was until the life of a storage it depends on changes.
        self._moves: dict[tuple[int, ...], Move] = {}
        self._removals = 0
        self._changed: dict[int, int] = {}  # storage -> the last removal that changed its life
        self._lives: dict[int, list[tuple[int, int]]] = {}
        self._touched: dict[int, set[int]] = {}

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes held at once."""
        return int(self.totals.max())

    def recomputations(self) -> dict[int, list[int]]:
        """What is left of the plan."""
        out: dict[int, list[int]] = defaultdict(list)
        for slot in sorted(self.recipe_at):
            out[self.event_at[slot]].append(self.recipe_at[slot])
        return dict(out)

    def runs_by_recipe(self) -> list[list[int]]:
        """Slots in which each recipe runs again."""
        return list(self._runs_of.values())

    def runs_by_event(self) -> list[list[int]]:
        """Slots of the recomputations before each event."""
        out: dict[int, list[int]] = defaultdict(list)
        for slot, event in self.event_at.items():
            out[event].append(slot)
        return list(out.values())

    def held_over(self, slot: int) -> list[tuple[int, int]]:
        """(event, recipe) of the recomputations that would let a copy alive at this slot go before it; the largest copies first."""
        timeline = self.timeline
        recipe_of = timeline.recipes.recipe_of
        event_of_slot = {where: event for event, where in enumerate(self._slot_of_event)} | self.event_at
        out: dict[tuple[int, int], int] = {}
        for s in timeline.recipes.rebuildable | timeline.recipes.reloads_of.keys():
            if s in self._births:
                uses = [use for use, _ in self._uses[s]]
                born = self._births[s][0]
            else:
                uses = [self._slot_of_event[event] for event, _ in timeline.unpack_uses.get(s, ())]
                born = self._slot_of_event[timeline.trace.storages[s].birth] - 1
            later = [use for use in uses if use > slot]
            if later and born < slot:
                event = event_of_slot[later[0]]
                if event >= timeline.trace.forward_events:
                    # Copied down and up at once it is away for longest.
                    recompute = [recipe_of[s]] if s in timeline.recipes.rebuildable else []
                    for recipe in (*recompute, *timeline.recipes.reloads_of.get(s, ())[:: len(PREFETCH_DISTANCES)]):
                        out[event, recipe] = out.get((event, recipe), 0) + self._bytes[s]
        wanted = sorted(out, key=lambda pair: (-out[pair], pair))
        present = {(self.event_at[at], self.recipe_at[at]) for at in self.recipe_at}
        return [pair for pair in wanted if pair not in present]

    def move(self, slots: tuple[int, ...]) -> Move:
        """What taking these recomputations out does, with those that nothing needs then."""
        known = self._moves.get(slots)
        if known is not None:
            since, changed = known.removals, self._changed
            if all(changed.get(s, 0) <= since for s in known.depends_on):
                return known
        gone = self.with_needless(slots)
        depends_on: set[int] = set()
        for slot in gone:
            depends_on |= self._touches(self.recipe_at[slot])
            depends_on.add(self.timeline.saves_at[self.event_at[slot]])
        seconds = sum(self._seconds_of[self.recipe_at[slot]] for slot in gone)
        found = self._moves[slots] = Move(gone, self.changes(gone), seconds, depends_on, self._removals)
        return found

    def _touches(self, recipe: int) -> set[int]:
        """Storages whose lives tell whether a rerun of this recipe is needed, and what else is not without it."""
        if recipe not in self._touched:
            recipe_of = self.timeline.recipes.recipe_of
            out = {*self._recipes[recipe].makes, *self._recipes[recipe].inputs}
            for s in self._recipes[recipe].inputs:
                out.update(self._recipes[recipe_of[s]].makes)
            self._touched[recipe] = out
        return self._touched[recipe]

    def with_needless(self, slots: Iterable[int]) -> set[int]:
        """These recomputations, and those that nothing needs once they are gone."""
        gone = set(slots)
        stack = list(gone)
        while stack:
            slot = stack.pop()
            for s in self._recipes[self.recipe_at[slot]].inputs:
                births = self._births[s]
                i = bisect_left(births, slot) - 1
                while i > 0 and births[i] in gone:
                    i -= 1
                if i > 0 and not self._needed(births[i], gone):
                    gone.add(births[i])
                    stack.append(births[i])
        return gone

    def _needed(self, slot: int, gone: set[int]) -> bool:
        for s in self._recipes[self.recipe_at[slot]].makes:
            births, uses = self._births[s], self._uses[s]
            i = bisect_left(births, slot) + 1
            while i < len(births) and births[i] in gone:
                i += 1
            until = births[i] if i < len(births) else _AWAY
            for j in range(bisect_left(uses, (slot + 1, -1)), len(uses)):
                use = uses[j][0]
                if use > until:
                    break
                if use not in gone:
                    return True
        return False

    def changes(self, gone: set[int]) -> list[tuple[int, int, int]]:
        """(first slot, last slot + 1, bytes more or less) without these recomputations, in order."""
        timeline = self.timeline
        births = self._births
        affected: set[int] = set()
        fewer: dict[int, int] = {}
        for slot in gone:
            affected.update(self._recipes[self.recipe_at[slot]].makes)
        for slot in gone:
            event = self.event_at[slot]
            fewer[event] = fewer.get(event, 0) + 1
            for s in self._recipes[self.recipe_at[slot]].inputs:
                if s not in affected and s in births and not self._used_later(s, slot, gone):
                    affected.add(s)
            # With nothing run again before its unpack, autograd may hold it itself, as long as no copy is made again.
            s = timeline.saves_at[event]
            if s in births and len(births[s]) == 1:
                affected.add(s)
        steps: dict[int, int] = {}

        def add(position: int, size: int) -> None:
            steps[position] = steps.get(position, 0) + size

        for s in affected:
            size = self._bytes[s]
            before = self._lives.get(s)
            if before is None:
                before = self._lives[s] = self.lives(s, set(), {})
            after = self.lives(s, gone, fewer)
            if before != after:
                for birth, end in before:
                    add(birth + 1, -size)
                    add(end + 1, size)
                for birth, end in after:
                    add(birth + 1, size)
                    add(end + 1, -size)
        if timeline.random_events:
            for recipe in {self.recipe_at[slot] for slot in gone}:
                for event in timeline.random_events.get(recipe, ()):
                    last = self._runs_of[recipe][-1]
                    left = [slot for slot in self._runs_of[recipe] if slot not in gone]
                    add((left[-1] if left else self._slot_of_event[event] - 1) + 1, -timeline.trace.rng_state_bytes)
                    add(last + 1, timeline.trace.rng_state_bytes)
        out = []
        level = previous = 0
        for position in sorted(steps):
            if level and position > previous:
                out.append((previous, position, level))
            level += steps[position]
            previous = position
        return out

    def _used_later(self, s: int, slot: int, gone: set[int]) -> bool:
        """Whether the use that comes next after one by a rerun is of the same copy: then the copy lives as long without that rerun."""
        births, uses = self._births[s], self._uses[s]
        j = bisect_left(uses, (slot + 1, -1))
        if j == len(uses) or uses[j][0] in gone:
            return False
        i = bisect_left(births, slot)
        return i == len(births) or uses[j][0] <= births[i]

    def lives(self, s: int, gone: set[int], fewer: dict[int, int]) -> list[tuple[int, int]]:
        """(birth slot, last slot) of each copy of a storage when these recomputations are gone."""
        timeline, where = self.timeline, self._slot_of_event
        births = [b for b in self._births[s] if b not in gone] if gone else self._births[s]
        answered = len(births) > 1
        if not answered:
            for event, _ in timeline.unpack_uses.get(s, ()):
                if self._runs_at.get(event, 0) > fewer.get(event, 0):
                    answered = True
                    break
        end = where[timeline.transient_end[s] if answered else timeline.last_end[s]]
        reloads = timeline.recipes.reloads
        if reloads:
            for birth in births[1:]:
                reload = reloads.get(self.recipe_at[birth])
                if reload is not None:
                    end = max(end, where[reload.gone_by])
        out = []
        copy = 0
        until = births[1] if len(births) > 1 else _AWAY
        for slot, held in self._uses[s]:
            if slot in gone:
                continue
            while slot > until:
                out.append((births[copy], end))
                copy += 1
                end = births[copy]
                until = births[copy + 1] if copy + 1 < len(births) else _AWAY
            end = max(end, held)
        out.append((births[copy], end))
        out.extend((b, b) for b in births[copy + 1 :])
        return out

    def fits(self, changes: Iterable[tuple[int, int, int]], gone: Iterable[int], budget: int) -> bool:
        """Whether the peak stays within the budget, in which it is now."""
        totals = self.totals
        for slot in gone:
            totals[slot] -= _AWAY
        fits = all(size <= 0 or int(totals[a:b].max()) + size <= budget for a, b, size in changes)
        for slot in gone:
            totals[slot] += _AWAY
        return fits

    def remove(self, gone: set[int], changes: Iterable[tuple[int, int, int]]) -> None:
        """Take recomputations out; `changes` is what that does."""
        # What the engine no longer answers for, autograd keeps itself: longer than any unpack asks, so its uses may stay.
        for a, b, size in changes:
            self.totals[a:b] += size
        self._removals += 1
        for slot in gone:
            self.totals[slot] -= _AWAY
            recipe, event = self.recipe_at.pop(slot), self.event_at.pop(slot)
            self._runs_at[event] -= 1
            self._runs_of[recipe].remove(slot)
            for s in self._recipes[recipe].makes:
                self._births[s].remove(slot)
            for s in self._recipes[recipe].inputs:
                self._uses[s].remove((slot, slot))
            for s in (*self._recipes[recipe].makes, *self._recipes[recipe].inputs, self.timeline.saves_at[event]):
                self._changed[s] = self._removals
                self._lives.pop(s, None)
