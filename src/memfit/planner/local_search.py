"""Local search over recomputations: take some out, put some in, keep what is faster and fits.

Where plans come from (cuts at prices, windows, chains) they follow a rule of scheduling; here nothing is left of the rule. Any set of recomputations is a plan,
so the moves are the simplest there are: one less, and one more, which lets the copy it renews go earlier. Reloads count as recomputations: one put in where
a recipe ran, which is then taken out, turns recomputing into offloading, and the other way round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf
from typing import Final

from memfit.planner.recipes import PREFETCH_DISTANCES
from memfit.planner.replay import Replay
from memfit.planner.timeline import Recomputations, Timeline

SHAKEN: Final = 0.1  # part of backward that is shaken at once


def trim(timeline: Timeline, recomputations: Recomputations, budget: int, tries: int) -> dict[int, list[int]]:
    """Take recomputations out of a plan that fits as long as it fits: one at a time, all of a recipe, all of an event.

    The most seconds for each byte that is held instead come first; among equals those that hold it for the shortest time.
    """
    replay = Replay(timeline, recomputations)
    groups: list[tuple[int, ...]] = [(slot,) for slot in replay.recipe_at]
    groups += [tuple(slots) for slots in replay.slots_by_recipe() if len(slots) > 1]
    groups += [tuple(slots) for slots in replay.slots_by_event() if len(slots) > 1]
    while tries > 0:
        scored = []
        for number, group in enumerate(groups[: max(tries, 1)]):
            move = replay.move(group)
            size = max((size for _, _, size in move.changes), default=0)
            held = sum((b - a) * size for a, b, size in move.changes)
            scored.append((-move.seconds / size if size > 0 else -inf, held, number, move))
        tries -= len(scored)
        scored.sort(key=lambda score: score[:3])
        taken = False
        for _, _, number, move in scored:
            now = move
            if taken:
                still_there = tuple(slot for slot in groups[number] if slot in replay.recipe_at)
                if not still_there:
                    continue
                now = replay.move(still_there)
            if replay.fits(now.changes, now.removed, budget):
                replay.remove(now.removed, now.changes)
                taken = True
        if not taken:
            break
        tries -= len(scored)
        left = [tuple(slot for slot in group if slot in replay.recipe_at) for group in groups]
        groups = [group for group in dict.fromkeys(left) if group]
    return replay.recomputations()


def with_recomputation(
    timeline: Timeline, recomputations: Recomputations, event: int, recipe: int
) -> dict[int, list[int]]:
    """The plan in which a recipe is also run before this event; recipes run in the order of forward."""
    more = {e: list(rs) for e, rs in recomputations.items()}
    more[event] = sorted([*recomputations.get(event, ()), recipe], key=timeline.recipes.last_operation.__getitem__)
    return dict(sorted(more.items()))


def one_more(timeline: Timeline, recomputations: Recomputations) -> Iterator[dict[int, list[int]]]:
    """The plan with one more recomputation or reload, before any use of a copy that an earlier one, or forward, made."""
    recipes = timeline.recipes
    wanted: dict[tuple[int, int], None] = {}

    def want(s: int, event: int) -> None:
        if s in recipes.rebuildable:
            wanted[event, recipes.recipe_of[s]] = None
        if event >= timeline.trace.forward_events:
            for recipe in recipes.reloads_of.get(s, ()):
                wanted[recipes.begin(recipe, event), recipe] = None

    for s, uses in timeline.unpack_uses.items():
        for event, _ in uses:
            want(s, event)
    for event in sorted(recomputations):
        for recipe in recomputations[event]:
            for s in recipes.recipes[recipe].inputs:
                want(s, event)
    for event, recipe in wanted:
        if recipe in recomputations.get(event, ()) or not timeline.recipes.may_run(recipe, event):
            continue
        yield with_recomputation(timeline, recomputations, event, recipe)


def exchange(timeline: Timeline, recomputations: Recomputations, budget: int, tries: int) -> dict[int, list[int]]:
    """Add one recomputation and remove others for which that frees memory, until the plan gets no faster."""
    current = {e: list(rs) for e, rs in recomputations.items()}
    seconds = timeline.seconds(current)
    better = True
    while better and tries > 0:
        better = False
        for more in one_more(timeline, current):
            tries -= 1
            if tries <= 0:
                break
            if timeline.peak(more) > budget or not timeline.fits_lower_tiers(more):
                continue
            trimmed = trim(timeline, more, budget, 400)
            took = timeline.seconds(trimmed)
            if took < seconds - 1e-12:
                current, seconds, better = trimmed, took, True
                break
    return current


def shake(timeline: Timeline, recomputations: Recomputations, budget: int, rounds: int) -> dict[int, list[int]]:
    """Rebuild all that a stretch of backward reads, and trim: other recomputations may go then than went before. The stretches are drawn, always alike."""
    chance = random.Random(rounds)
    recipe_of, rebuildable = timeline.recipes.recipe_of, timeline.recipes.rebuildable
    first_uses = [(uses[0][0], recipe_of[s]) for s, uses in sorted(timeline.unpack_uses.items()) if s in rebuildable]
    additions = [first_uses]
    for tier in range(len(timeline.recipes.tiers)):
        middle = tier * len(PREFETCH_DISTANCES) + 1
        reloads = [
            (timeline.recipes.begin(reloads_of_s[middle], uses[0][0]), reloads_of_s[middle])
            for s, uses in sorted(timeline.unpack_uses.items())
            if uses[0][0] >= timeline.trace.forward_events
            and len(reloads_of_s := timeline.recipes.reloads_of.get(s, ())) > middle
        ]
        additions += [reloads] if reloads else []
    begin, end = timeline.trace.forward_events, timeline.trace.pass_events
    length = SHAKEN * (end - begin)
    current = {e: list(rs) for e, rs in recomputations.items()}
    seconds = timeline.seconds(current)
    for number in range(rounds):
        start = begin + chance.random() * (end - begin - length)
        more = {e: set(rs) for e, rs in current.items()}
        for event, recipe in additions[number % len(additions)]:
            if start <= event < start + length and timeline.recipes.may_run(recipe, event):
                more.setdefault(event, set()).add(recipe)
        plan = {e: sorted(rs, key=timeline.recipes.last_operation.__getitem__) for e, rs in sorted(more.items())}
        if timeline.peak(plan) > budget or not timeline.fits_lower_tiers(plan):
            continue
        trimmed = trim(timeline, plan, budget, 6000)
        took = timeline.seconds(trimmed)
        if took < seconds - 1e-12:
            current, seconds = trimmed, took
    return current


def shrink(
    timeline: Timeline, recomputations: Recomputations, tries: int, enough_bytes: int = 0
) -> dict[int, list[int]]:
    """Lower the peak, moment by moment: remove a recomputation that holds bytes there, or add one that frees a copy over it.

    Args:
        timeline: of the trace.
        recomputations: to begin with.
        tries: changes that are looked at, at most.
        enough_bytes: a peak that no plan goes below; then it is done.
    """
    current = {e: list(rs) for e, rs in recomputations.items()}
    while tries > 0:
        replay = Replay(timeline, current)
        while tries > 0:
            peak = replay.peak_bytes
            if peak <= enough_bytes:
                return replay.recomputations()
            top = int(replay.totals.argmax())
            lower = None
            groups = [(slot,) for slot in sorted(replay.recipe_at)]
            for group in [*groups, *map(tuple, replay.slots_by_event())]:
                tries -= 1
                if max(group) < top and replay.frees_nothing_later(group):
                    continue
                move = replay.move(group)
                there = sum(size for a, b, size in move.changes if a <= top < b)
                if (there < 0 or top in move.removed) and replay.fits(move.changes, move.removed, peak - 1):
                    lower = move
                    break
            if lower is None:
                break
            replay.remove(lower.removed, lower.changes)
        current = replay.recomputations()
        for event, recipe in replay.additions_that_free(top):
            tries -= 1
            more = with_recomputation(timeline, current, event, recipe)
            if timeline.peak(more) < peak and timeline.fits_lower_tiers(more):
                current = more
                break
        else:
            break
    return current
