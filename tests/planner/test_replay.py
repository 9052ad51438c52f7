"""Plans changed a little at a time come to what replaying them from the start says."""

from __future__ import annotations

import random

from memfit.hardware.machine import Link
from memfit.planner.local_search import trim
from memfit.planner.recipes import Recipes
from memfit.planner.replay import Replay
from memfit.planner.timeline import Timeline
from planner.test_timeline import offloading_plan, some_plan
from planner.traces import drawn, network
from sweeps import each_seed


def one_gone(replay: Replay, chance: random.Random) -> tuple[set[int], list[tuple[int, int, int]]]:
    """A recomputation to remove, with those that are needless then, and the changes."""
    (slot,) = chance.sample(sorted(replay.recipe_at), 1)
    gone = replay.with_needless([slot])
    changes = replay.changes(gone)
    assert slot == max(gone)
    if replay.frees_nothing_later([slot]):
        assert not any(size < 0 and slot < end - 1 for _, end, size in changes)
    return gone, changes


@each_seed(60)
def test_recomputations_taken_out_one_by_one_leave_what_a_fresh_replay_finds(seed: int) -> None:
    chance = random.Random(seed)
    traces = [
        drawn(
            seed,
            forward=chance.randint(3, 14),
            rng_bytes=chance.choice((0, 11)),
            dispatch=chance.choice((0.0, 0.1)),
            constants=seed % 2 == 1,
        ),
        network(seed, blocks=4, dispatch=chance.choice((0.0, 0.1))),
    ]
    for trace in traces:
        timeline = Timeline(trace)
        recomputations = some_plan(timeline.recipes, chance)
        # Some needless ones too: any list of recomputations is a plan.
        for event in [e for e in timeline.saves_at if chance.random() < 0.3 and recomputations]:
            again = chance.choice(sorted({r for runs in recomputations.values() for r in runs}))
            if again not in recomputations.get(event, []):
                recomputations[event] = [*recomputations.get(event, []), again]
        replay = Replay(timeline, recomputations)
        assert replay.peak_bytes == timeline.evaluate(recomputations).peak_bytes
        while replay.recipe_at:
            gone, changes = one_gone(replay, chance)
            before = replay.peak_bytes
            budget = chance.choice((before, before + 50, before + 500))
            fits = replay.fits(changes, gone, budget)
            replay.remove(gone, changes)
            assert replay.peak_bytes == timeline.evaluate(replay.recomputations()).peak_bytes
            assert fits == (replay.peak_bytes <= budget)


@each_seed(60)
def test_reloads_taken_out_leave_what_a_fresh_replay_finds(seed: int) -> None:
    chance = random.Random(seed)
    link = Link("disk", chance.choice((10.0, 1e3)), chance.choice((10.0, 1e3)), least_bytes=1)
    removed = 0
    for trace in (drawn(seed, forward=chance.randint(4, 14), rng_bytes=chance.choice((0, 11))), network(seed)):
        recipes = Recipes(trace, link)
        timeline = Timeline(trace, recipes)
        replay = Replay(timeline, offloading_plan(recipes, chance))
        while replay.recipe_at:
            gone, changes = one_gone(replay, chance)
            removed += sum(replay.recipe_at[slot] in recipes.reloads for slot in gone)
            replay.remove(gone, changes)
            assert replay.peak_bytes == timeline.peak(replay.recomputations())
    assert removed or seed % 10


@each_seed(40)
def test_a_move_that_is_remembered_is_what_it_would_be_now(seed: int) -> None:
    chance = random.Random(seed)
    remembered = 0
    for trace in (
        drawn(seed, forward=14, rng_bytes=chance.choice((0, 11)), constants=seed % 2 == 1),
        network(seed, blocks=5),
    ):
        timeline = Timeline(trace)
        replay = Replay(timeline, some_plan(timeline.recipes, chance))
        groups = [(slot,) for slot in replay.recipe_at]
        while replay.recipe_at:
            groups = [group for group in groups if group[0] in replay.recipe_at]
            for group in groups:
                known = replay._moves.get(group)
                move = replay.move(group)
                remembered += move is known
                assert move.removed == replay.with_needless(group)
                assert move.changes == replay.changes(move.removed)
            move = replay.move(chance.choice(groups))
            replay.remove(move.removed, move.changes)
    assert remembered or len(groups) < 2


@each_seed(30)
def test_trimming_saves_seconds_and_stays_within_the_budget(seed: int) -> None:
    timeline = Timeline(network(seed, blocks=4, dispatch=0.01))
    chance = random.Random(seed)
    for _ in range(4):
        recomputations = some_plan(timeline.recipes, chance)
        before = timeline.evaluate(recomputations)
        for room in (0, 40, 300):
            after = timeline.evaluate(trim(timeline, recomputations, before.peak_bytes + room, 1000))
            assert after.peak_bytes <= before.peak_bytes + room
            assert after.extra_seconds <= before.extra_seconds
        assert not trim(timeline, recomputations, max(before.peak_bytes, timeline.plain().peak_bytes), 1000)
