"""A script, followed by a clerk who knows nothing else, finds everything in time, keeps nothing, and holds what the timeline says."""

from __future__ import annotations

import json
import random

from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planner.timeline import Timeline
from memfit.values.script import KEPT, Script
from memfit.values.trace import Trace
from planner.test_timeline import some_plan
from planner.traces import Writer, drawn, layers, network
from sweeps import each_seed


def follow(trace: Trace, script: Script) -> list[dict[int, int]]:
    """Live storages, each with a count of how often it was made, after each step."""
    live: dict[int, int] = {}
    for operation in range(len(script.operations)):
        for _, storage, _ in script.makes.get(operation, ()):
            if storage in script.held:
                live[storage] = 0
    after = []
    for number, step in enumerate(script.steps):
        for run, releases in zip(step.runs, step.releases, strict=True):
            made_here = {s for o in run for _, s, _ in script.makes.get(o, ())}
            for operation in run:
                for place in script.recorded[operation]:
                    assert place < 0 or place in live, f"step {number}: operation {operation} reads {place}"
                for _, storage, _ in script.makes.get(operation, ()):
                    live[storage] = live.get(storage, 0) + 1
            assert made_here, "a rerun for nothing"
            for storage in releases:
                del live[storage]
        assert script.saves[step.save] in live, f"step {number}: {step.save} is not there"
        for storage in step.after:
            del live[storage]
        after.append(dict(live))
    assert not live
    return after


@each_seed(120)
def test_everything_is_there_in_time_and_nothing_stays(seed: int) -> None:
    chance = random.Random(seed)
    trace = drawn(seed, forward=12, rng_bytes=3) if seed % 3 else network(seed, blocks=4)
    recipes = Recipes(trace)
    for _ in range(4):
        follow(trace, compile_script(recipes, some_plan(recipes, chance)))


@each_seed(40)
def test_a_script_survives_its_file(seed: int) -> None:
    trace = drawn(seed, forward=12, rng_bytes=3)
    script = compile_script(Recipes(trace), some_plan(Recipes(trace), random.Random(seed)))
    assert Script.from_json(json.loads(json.dumps(script.to_json()))) == script


@each_seed(40)
def test_steps_are_the_unpacks_in_their_order(seed: int) -> None:
    trace = drawn(seed, forward=12)
    recipes = Recipes(trace)
    recomputations = some_plan(recipes, random.Random(seed))
    script = compile_script(recipes, recomputations)
    if not recomputations:
        assert script == Script()
        return
    answered = {s for s in script.saves if s != KEPT}
    asked = [~code for code in trace.events if code < 0 and trace.saves[~code].storage in answered]
    assert [step.save for step in script.steps] == asked
    assert sum(len(step.runs) for step in script.steps) == sum(map(len, recomputations.values()))
    assert len(script.operations) == trace.forward_operations
    # Random operations that run again keep their generator state until the last time.
    runs = [(n, o) for n, step in enumerate(script.steps) for run in step.runs for o in run]
    for operation, last in script.random.items():
        assert last == max(n for n, o in runs if o == operation)


def test_an_empty_plan_is_a_plain_script() -> None:
    trace = layers(3)
    assert compile_script(Recipes(trace), {}).plain
    assert compile_script(Recipes(trace), {trace.forward_events + 1: []}).plain


def test_what_only_autograd_needs_is_not_held_by_the_engine() -> None:
    recipes = Recipes(layers(3))
    trace = recipes.trace
    large = [s for s in recipes.saved if trace.storages[s].bytes == 300]
    small = [s for s in recipes.saved if trace.storages[s].bytes == 100]
    script = compile_script(recipes, recomputations_for(recipes, large[1:2]))
    layer = trace.storages[large[1]].birth
    (input_,) = (s for s in trace.operations[layer].reads if s in small)
    assert script.held == {input_}
    assert {s for s in script.saves if s != KEPT} == {large[1]}
    assert list(script.recorded) == [layer]
    follow(trace, script)


def test_what_the_engine_holds_is_what_the_timeline_counts() -> None:
    trace = layers(5)
    timeline = Timeline(trace)
    recipes = timeline.recipes
    recomputations = recomputations_for(
        recipes, recipes.saved & recipes.rebuildable, {e: e // 4 for e in range(-1, trace.forward_events + 1)}
    )
    script = compile_script(recipes, recomputations)
    held = follow(trace, script)
    levels = timeline.evaluate(recomputations).levels
    answered = {s for s in script.saves if s != KEPT}
    unpacks = [e for e, code in enumerate(trace.events) if code < 0 and trace.saves[~code].storage in answered]
    for event, live in zip(unpacks, held, strict=True):
        save = trace.saves[~trace.events[event]].storage
        engine = sum(trace.storages[s].bytes for s in {*live, save})
        # Beside the engine's: weight, batch and the running gradient.
        assert levels[event + 1] == engine + 10 + 100 + 2 * 100


def test_sizes_are_not_checked_where_values_decide_them() -> None:
    w = Writer()
    x = w.before(1)
    index = w.one((x,), 100, by_values=True)
    h = w.one((index,), 50)
    save = w.save(h)
    w.backward()
    w.unpack(save)
    w.one((h,), 1)
    recipes = Recipes(w.trace())
    script = compile_script(recipes, recomputations_for(recipes, {h}))
    assert {size for made in script.makes.values() for _, _, size in made} == {-1}
