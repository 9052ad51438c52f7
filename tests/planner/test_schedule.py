"""Recomputations come in time, run in the order of forward, and rebuild nothing twice within a window."""

from __future__ import annotations

import random

import pytest

from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.timeline import Timeline
from planner.traces import Writer, drawn, layers
from sweeps import each_seed


@pytest.mark.parametrize("windows", [False, True])
@each_seed(60)
def test_whatever_is_dropped_is_there_when_it_is_asked_for(seed: int, windows: bool) -> None:  # noqa: FBT001
    chance = random.Random(seed)
    trace = drawn(seed, forward=14)
    recipes = Recipes(trace)
    dropped = {s for s in sorted(recipes.saved & recipes.rebuildable) if chance.random() < 0.7}
    transients = {s for s in sorted(recipes.rebuildable - recipes.saved) if chance.random() < 0.3}
    window_of = {e: (e + 1) // 4 for e in range(-1, trace.forward_events + 1)} if windows else None
    recomputations = recomputations_for(recipes, dropped, window_of, transients)
    held = set(recipes.managed) - (recipes.rebuildable - recipes.saved - transients) - dropped
    there, window = set(held), None
    asked = [e for e in range(trace.forward_events, trace.pass_events) if trace.events[e] < 0]
    assert set(recomputations) <= set(asked)
    for event in asked:
        save = trace.saves[~trace.events[event]]
        if window_of is not None and save.storage in dropped and window_of[save.by] != window:
            there, window = set(held), window_of[save.by]
        runs = recomputations.get(event, [])
        assert [recipes.recipes[r].operations[-1] for r in runs] == sorted(
            recipes.recipes[r].operations[-1] for r in runs
        )
        in_this_event = {m for r in runs for m in recipes.recipes[r].makes}
        for r in runs:
            assert recipes.recipes[r].runnable
            assert set(recipes.recipes[r].inputs) <= there | in_this_event
            assert not set(recipes.recipes[r].makes) <= there, "all of it was there"
            there |= set(recipes.recipes[r].makes)
        if save.storage in recipes.recipe_of and save.unpacks[0][0] >= trace.forward_events:
            assert save.storage in there


def test_what_is_added_in_place_is_rebuilt_first() -> None:
    """`out = mul(h); shortcut = sin(d); out += shortcut`: the shortcut is made after `out`, and needed to make it again."""
    w = Writer()
    h, d = w.before(1), w.before(1)
    out = w.one((h,), 100)
    shortcut = w.one((d,), 100)
    w.run((shortcut,), writes=(out,))
    save = w.save(out)
    w.backward()
    w.run()
    w.unpack(save)
    w.one((out,), 1)
    recipes = Recipes(w.trace())
    (runs,) = recomputations_for(recipes, {out}).values()
    assert runs == [recipes.recipe_of[shortcut], recipes.recipe_of[out]]
    # Otherwise the shortcut made in forward is held for the rerun, and the other one is made for nothing.
    timeline = Timeline(recipes.trace, recipes)
    assert timeline.evaluate(recomputations_for(recipes, {out})).levels[3] == 2


def test_nothing_dropped_needs_nothing() -> None:
    assert recomputations_for(Recipes(layers(3)), ()) == {}


def test_what_is_rebuilt_stays_for_the_rest_of_its_window() -> None:
    """Layer by layer, the small tensors at the ends of layers are kept; in one window the first unpack rebuilds everything."""
    recipes = Recipes(layers(4))
    trace = recipes.trace
    everything = recipes.saved & recipes.rebuildable
    at_once = recomputations_for(recipes, everything)
    assert len(at_once) == 1
    assert len(next(iter(at_once.values()))) == 7  # all but the last small tensor, which is not saved
    inner = {s for s in everything if trace.storages[s].bytes == 300}
    layer = {e: e // 2 for e in range(-1, trace.forward_events + 1)}
    one_by_one = recomputations_for(recipes, inner, layer)
    assert [len(runs) for runs in one_by_one.values()] == [1, 1, 1, 1]


def test_a_chain_of_dropped_storages_is_rebuilt_from_the_last_kept_one() -> None:
    w = Writer()
    x = w.before(1)
    made = []
    for _ in range(5):
        x = w.one((x,), 10)
        made.append(x)
    save = w.save(made[4])
    w.backward()
    w.unpack(save)
    w.one((made[4],), 1)
    recipes = Recipes(w.trace())
    event = recipes.trace.forward_events
    assert recomputations_for(recipes, {made[4]}) == {event: [0, 1, 2, 3, 4]}
    assert recomputations_for(recipes, {made[4]}, None, {made[2]}) == {event: [3, 4]}


def test_what_cannot_be_rebuilt_is_held_for_the_recomputations() -> None:
    w = Writer()
    a = w.one((), 10, rerunnable=False)
    b = w.one((a,), 10)
    save = w.save(b)
    w.backward()
    w.unpack(save)
    w.one((b,), 1)
    recipes = Recipes(w.trace())
    assert recomputations_for(recipes, {b}) == {2: [recipes.recipe_of[b]]}


def test_remembered_storages_survive_into_the_next_window() -> None:
    recipes = Recipes(layers(3))
    trace = recipes.trace
    everything = recipes.saved & recipes.rebuildable
    window = {e: e // 2 for e in range(-1, trace.forward_events + 1)}
    forgetful = recomputations_for(recipes, everything, window)
    faithful = recomputations_for(recipes, everything, window, remember=lambda _: everything)
    assert sum(map(len, faithful.values())) < sum(map(len, forgetful.values()))
