"""Incremental replay: what removing recomputations from a plan changes in bytes, without replaying the whole step.

Any set of recomputations is a valid plan: without one, the copy made before it stays allocated longer. So recomputations can be removed one at a time, and
only the few storages that one makes or reads get other live intervals. Local search needs this: thousands of tries, each of a few intervals.

Positions are *slots*, as in `Timeline.expand`: one for each event, and one for each recomputation, just before the event it serves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from memfit.planner.recipes import PREFETCH_DISTANCES
from memfit.planner.timeline import Recomputations, Timeline

# Subtracted from the total of a slot whose recomputation is removed, so that it is never the peak.
_MASK: Final = 1 << 60
_NEVER: Final = 1 << 60  # a slot after all others


@dataclass(frozen=True, slots=True)
class Move:
    """Recomputations to remove, and the effect.

    Attributes:
        removed: slots of these recomputations, and of those whose results nothing uses without them.
        changes: (first slot, last slot + 1, change in bytes), in order.
        seconds: that the removed recomputations took.
    """

    removed: set[int]
    changes: list[tuple[int, int, int]]
    seconds: float


class Replay:
    """The replay of one plan, from which recomputations can be removed.

    Attributes:
        totals: bytes at each slot.
        recipe_at, event_at: of the recomputation at each slot that has one.
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
        self._count_at: dict[int, int] = defaultdict(int)
        for event in self.event_at.values():
            self._count_at[event] += 1
        self._slots_of: dict[int, list[int]] = defaultdict(list)
        for slot, recipe in self.recipe_at.items():
            self._slots_of[recipe].append(slot)
        # How much of a copy is exposed depends on all others; here each reload is charged the share that is exposed in this plan as a whole.
        copying = timeline.copying(recomputations)
        exposed = copying.exposed_seconds / copying.copy_seconds if copying.copy_seconds else 0.0
        self._seconds_of = [
            timeline.run_seconds(r) + exposed * timeline.link_seconds(r) for r in range(len(self._recipes))
        ]
        # A move stays valid until the live intervals of a storage it depends on change.
        self._moves: dict[tuple[int, ...], Move] = {}
        self._moves_of: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # storage -> moves that depend on it
        self._intervals: dict[int, list[tuple[int, int]]] = {}
        self._related_to: dict[int, set[int]] = {}

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at once."""
        return int(self.totals.max())

    def recomputations(self) -> dict[int, list[int]]:
        """The plan as it is now."""
        out: dict[int, list[int]] = defaultdict(list)
        for slot in sorted(self.recipe_at):
            out[self.event_at[slot]].append(self.recipe_at[slot])
        return dict(out)

    def slots_by_recipe(self) -> list[list[int]]:
        """Slots of the recomputations by each recipe."""
        return list(self._slots_of.values())

    def slots_by_event(self) -> list[list[int]]:
        """Slots of the recomputations before each event."""
        out: dict[int, list[int]] = defaultdict(list)
        for slot, event in self.event_at.items():
            out[event].append(slot)
        return list(out.values())

    def additions_that_free(self, slot: int) -> list[tuple[int, int]]:
        """(event, recipe) of recomputations that, if added, free a copy that is live at this slot; the largest copies first."""
        timeline = self.timeline
        recipe_of = timeline.recipes.recipe_of
        event_of_slot = {at: event for event, at in enumerate(self._slot_of_event)} | self.event_at
        freed: dict[tuple[int, int], int] = {}
        for s in timeline.recipes.rebuildable | timeline.recipes.reloads_of.keys():
            if s in self._births:
                uses = [use for use, _ in self._uses[s]]
                birth = self._births[s][0]
            else:
                uses = [self._slot_of_event[event] for event, _ in timeline.unpack_uses.get(s, ())]
                birth = self._slot_of_event[timeline.trace.storages[s].birth] - 1
            later = [use for use in uses if use > slot]
            if later and birth < slot:
                event = event_of_slot[later[0]]
                if event >= timeline.trace.forward_events:
                    # With no prefetch distance it is off the device for longest.
                    recompute = [recipe_of[s]] if s in timeline.recipes.rebuildable else []
                    for recipe in (*recompute, *timeline.recipes.reloads_of.get(s, ())[:: len(PREFETCH_DISTANCES)]):
                        freed[event, recipe] = freed.get((event, recipe), 0) + self._bytes[s]
        largest_first = sorted(freed, key=lambda pair: (-freed[pair], pair))
        present = {(self.event_at[at], self.recipe_at[at]) for at in self.recipe_at}
        return [
            (event, recipe)
            for event, recipe in largest_first
            if (event, recipe) not in present and timeline.recipes.may_run(recipe, event)
        ]

    def move(self, slots: tuple[int, ...]) -> Move:
        """The effect of removing these recomputations, and those that nothing needs then."""
        known = self._moves.get(slots)
        if known is not None:
            return known
        removed = self.with_needless(slots)
        depends_on: set[int] = set()
        for slot in removed:
            depends_on |= self._related(self.recipe_at[slot])
            depends_on.add(self.timeline.saves_at[self.event_at[slot]])
        for s in depends_on:
            self._moves_of[s].append(slots)
        seconds = sum(self._seconds_of[self.recipe_at[slot]] for slot in removed)
        found = self._moves[slots] = Move(removed, self.changes(removed), seconds)
        return found

    def _related(self, recipe: int) -> set[int]:
        """Storages whose live intervals decide whether a recomputation by this recipe is needed, and which others are needless without it."""
        if recipe not in self._related_to:
            recipe_of = self.timeline.recipes.recipe_of
            out = {*self._recipes[recipe].makes, *self._recipes[recipe].inputs}
            for s in self._recipes[recipe].inputs:
                out.update(self._recipes[recipe_of[s]].makes)
            out.update(self.timeline.recipes.passing.get(recipe, ()))
            self._related_to[recipe] = out
        return self._related_to[recipe]

    def with_needless(self, slots: Iterable[int]) -> set[int]:
        """These recomputations, and those whose results nothing uses once they are removed."""
        removed = set(slots)
        stack = list(removed)
        while stack:
            slot = stack.pop()
            for s in self._recipes[self.recipe_at[slot]].inputs:
                births = self._births[s]
                i = bisect_left(births, slot) - 1
                while i > 0 and births[i] in removed:
                    i -= 1
                if i > 0 and not self._is_needed(births[i], removed):
                    removed.add(births[i])
                    stack.append(births[i])
        return removed

    def _is_needed(self, slot: int, removed: set[int]) -> bool:
        for s in self._recipes[self.recipe_at[slot]].makes:
            births, uses = self._births[s], self._uses[s]
            i = bisect_left(births, slot) + 1
            while i < len(births) and births[i] in removed:
                i += 1
            next_birth = births[i] if i < len(births) else _NEVER
            for j in range(bisect_left(uses, (slot + 1, -1)), len(uses)):
                use = uses[j][0]
                if use > next_birth:
                    break
                if use not in removed:
                    return True
        return False

    def frees_nothing_later(self, slots: Iterable[int]) -> bool:
        """Whether it is certain that no byte after the last of these recomputations goes with them.

        What reads their results reads the copy before then, which is there longer; if that one is still there when they run, as something holds it, two become
        one. What they read is there for a shorter time before them, and so is what is needless without them. What no operation makes is held for them beyond.
        """
        if self.timeline.recipes.passing and self._no_longer_held(self.with_needless(slots)):
            return False
        return all(
            end <= slot
            for slot in slots
            for s in self._recipes[self.recipe_at[slot]].makes
            for birth, end in self._present(s)
            if birth < slot
        )

    def _present(self, s: int) -> list[tuple[int, int]]:
        """The live intervals of a storage in the plan as it is now."""
        known = self._intervals.get(s)
        if known is None:
            known = self._intervals[s] = self.live_intervals(s, set(), {})
        return known

    def changes(self, removed: set[int]) -> list[tuple[int, int, int]]:
        """(first slot, last slot + 1, change in bytes) without these recomputations, in order."""
        timeline = self.timeline
        births, recipes, recipe_at, event_at = self._births, self._recipes, self.recipe_at, self.event_at
        affected: set[int] = set()
        removed_at: dict[int, int] = {}
        for slot in removed:
            affected.update(recipes[recipe_at[slot]].makes)
        for slot in removed:
            event = event_at[slot]
            removed_at[event] = removed_at.get(event, 0) + 1
            for s in recipes[recipe_at[slot]].inputs:
                if s not in affected and s in births and not self._used_again(s, slot, removed):
                    affected.add(s)
            # A storage that is never rebuilt is held by autograd again once no recomputation is left before its unpacks.
            s = timeline.saves_at[event]
            if s in births and len(births[s]) == 1:
                affected.add(s)
        deltas: dict[int, int] = defaultdict(int)
        for s in affected:
            before = self._present(s)
            after = self.live_intervals(s, removed, removed_at)
            if before != after:
                size = self._bytes[s]
                for birth, end in before:
                    deltas[birth + 1] -= size
                    deltas[end + 1] += size
                for birth, end in after:
                    deltas[birth + 1] += size
                    deltas[end + 1] -= size
        if timeline.random_events:
            for recipe in {self.recipe_at[slot] for slot in removed}:
                for event in timeline.random_events.get(recipe, ()):
                    last = self._slots_of[recipe][-1]
                    left = [slot for slot in self._slots_of[recipe] if slot not in removed]
                    deltas[(left[-1] if left else self._slot_of_event[event] - 1) + 1] -= timeline.trace.rng_state_bytes
                    deltas[last + 1] += timeline.trace.rng_state_bytes
        if timeline.recipes.passing:
            for s in self._no_longer_held(removed):
                deltas[self._slot_of_event[min(timeline.last_end[s], timeline.held_until)] + 1] -= self._bytes[s]
                deltas[self._slot_of_event[timeline.held_until] + 1] += self._bytes[s]
        out = []
        level = previous = 0
        for position in sorted(deltas):
            if level and position > previous:
                out.append((previous, position, level))
            level += deltas[position]
            previous = position
        return out

    def _no_longer_held(self, removed: set[int]) -> set[int]:
        """What no operation makes and the engine holds for these recomputations alone."""
        passing = self.timeline.recipes.passing
        recipes = {self.recipe_at[slot] for slot in removed} & passing.keys()
        gone = {recipe for recipe in recipes if removed.issuperset(self._slots_of[recipe])}
        held = {s for recipe in gone for s in passing[recipe]}
        if not held:
            return held
        others = (recipe for recipe in passing.keys() - gone if not removed.issuperset(self._slots_of.get(recipe, ())))
        return held.difference(*(passing[recipe] for recipe in others))

    def _used_again(self, s: int, slot: int, removed: set[int]) -> bool:
        """Whether the copy that a recomputation reads here is used once more: then it stays live as long without that recomputation."""
        births, uses = self._births[s], self._uses[s]
        j = bisect_left(uses, (slot + 1, -1))
        if j == len(uses) or uses[j][0] in removed:
            return False
        i = bisect_left(births, slot)
        return i == len(births) or uses[j][0] <= births[i]

    def live_intervals(self, s: int, removed: set[int], removed_at: dict[int, int]) -> list[tuple[int, int]]:
        """(birth slot, last slot) of each copy of a storage without these recomputations; `removed_at` counts them by event."""
        timeline, slot_of_event, uses = self.timeline, self._slot_of_event, self._uses[s]
        births = self._births[s]
        if removed:
            births = [b for b in births if b not in removed]
            uses = [use for use in uses if use[0] not in removed]
        copies = len(births)
        held_by_engine = copies > 1
        if not held_by_engine:
            count_at = self._count_at
            for event, _ in timeline.unpack_uses.get(s, ()):
                if event in count_at and count_at[event] > removed_at.get(event, 0):
                    held_by_engine = True
                    break
        end = slot_of_event[timeline.transient_end[s] if held_by_engine else timeline.last_end[s]]
        if copies == 1:
            return [(births[0], max((end, *[held_until for _, held_until in uses])))]
        reloads = timeline.recipes.reloads
        if reloads:
            for birth in births[1:]:
                reload = reloads.get(self.recipe_at[birth])
                if reload is not None:
                    end = max(end, slot_of_event[reload.gone_by])
        out = []
        copy = 0
        next_birth = births[1]
        for slot, held_until in uses:
            while slot > next_birth:
                out.append((births[copy], end))
                copy += 1
                end = births[copy]
                next_birth = births[copy + 1] if copy + 1 < copies else _NEVER
            end = max(end, held_until)
        out.append((births[copy], end))
        out.extend((b, b) for b in births[copy + 1 :])
        return out

    def fits(self, changes: Iterable[tuple[int, int, int]], removed: Iterable[int], budget: int) -> bool:
        """Whether the plan, which is within the budget, stays so with these changes."""
        totals = self.totals
        for slot in removed:
            totals[slot] -= _MASK
        fits = all(size <= 0 or int(totals[a:b].max()) + size <= budget for a, b, size in changes)
        for slot in removed:
            totals[slot] += _MASK
        return fits

    def remove(self, removed: set[int], changes: Iterable[tuple[int, int, int]]) -> None:
        """Remove recomputations; `changes` is their effect."""
        # A storage that autograd holds again lives beyond its last unpack, so the uses listed for it may stay.
        for a, b, size in changes:
            self.totals[a:b] += size
        for slot in removed:
            self.totals[slot] -= _MASK
            recipe, event = self.recipe_at.pop(slot), self.event_at.pop(slot)
            self._count_at[event] -= 1
            self._slots_of[recipe].remove(slot)
            for s in self._recipes[recipe].makes:
                self._births[s].remove(slot)
            for s in self._recipes[recipe].inputs:
                self._uses[s].remove((slot, slot))
            passing = self.timeline.recipes.passing.get(recipe, ())
            own = (*self._recipes[recipe].makes, *self._recipes[recipe].inputs, *passing)
            for s in (*own, self.timeline.saves_at[event]):
                self._intervals.pop(s, None)
                for slots in self._moves_of.pop(s, ()):
                    self._moves.pop(slots, None)
