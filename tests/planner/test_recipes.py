"""What it takes to make a storage again: the operations, their inputs, and when it cannot be done."""

from __future__ import annotations

import pytest

from memfit.planner.recipes import SMALL_CONSTANT_BYTES, Recipe, Recipes
from memfit.values.trace import Category
from planner.traces import Writer, drawn
from sweeps import each_seed


def recipe_for(recipes: Recipes, storage: int) -> Recipe:
    return recipes.recipes[recipes.recipe_of[storage]]


def test_one_operation_is_its_own_recipe() -> None:
    w = Writer()
    weight, x = w.before(10), w.before(20, Category.BATCH)
    a = w.one((x, weight), 100, seconds=2.0, workspace=30)
    b = w.one((a, weight), 50, seconds=3.0)
    recipes = Recipes(w.trace())
    assert recipes.managed == [a, b]
    assert recipe_for(recipes, a) == Recipe((0,), (), (a,), 2.0, 0, 130, runnable=True)
    assert recipe_for(recipes, b) == Recipe((1,), (a,), (b,), 3.0, 0, 50, runnable=True)


def test_outputs_of_one_operation_share_its_recipe() -> None:
    w = Writer()
    x = w.before(20)
    a, b = w.run((x,), (100, 10))
    recipes = Recipes(w.trace())
    assert recipes.recipe_of[a] == recipes.recipe_of[b]
    assert recipe_for(recipes, a).makes == (a, b)
    assert recipe_for(recipes, a).peak_bytes == 110


def test_writes_belong_to_the_recipe_of_what_they_write_into() -> None:
    """CPU dropout: an empty mask, drawn in place, divided in place."""
    w = Writer()
    x = w.before(20)
    mask = w.one((), 80, seconds=0.5)
    other = w.one((x,), 10)
    w.run((), writes=(mask,), seconds=1.0, random=True, workspace=7)
    w.run((other,), writes=(mask,), seconds=2.0)
    recipes = Recipes(w.trace(rng_state_bytes=1000))
    recipe = recipe_for(recipes, mask)
    assert recipe.operations == (0, 2, 3)
    assert recipe.inputs == (other,)
    assert recipe.seconds == 3.5
    assert recipe.random_operations == 1
    assert recipe.peak_bytes == 80 + 7 + 1000
    assert recipe.runnable
    assert recipes.recipe_of[other] != recipes.recipe_of[mask]


def test_the_generators_state_is_put_aside_while_a_random_operation_runs_and_no_longer() -> None:
    w = Writer()
    w.before(20)
    mask = w.one((), 80)
    w.run((), writes=(mask,), random=True, workspace=7)
    w.run((), writes=(mask,), workspace=500)
    assert recipe_for(Recipes(w.trace(rng_state_bytes=100)), mask).peak_bytes == 80 + 500
    assert recipe_for(Recipes(w.trace(rng_state_bytes=1000)), mask).peak_bytes == 80 + 7 + 1000


def test_a_write_into_two_storages_joins_their_recipes() -> None:
    w = Writer()
    a, b = w.one((), 10), w.one((), 20)
    w.run((), writes=(a, b))
    recipes = Recipes(w.trace())
    assert recipes.recipe_of[a] == recipes.recipe_of[b]
    assert recipe_for(recipes, a).operations == (0, 1, 2)


def test_what_reads_a_storage_before_its_last_write_cannot_run_again() -> None:
    w = Writer()
    a = w.one((), 10)
    early = w.one((a,), 10)
    w.run((), writes=(a,))
    late = w.one((a,), 10)
    recipes = Recipes(w.trace())
    assert recipes.rebuildable == {a, late}
    assert early not in recipes.rebuildable


def test_what_reads_a_parameter_or_buffer_before_it_is_changed_cannot_run_again() -> None:
    w = Writer()
    buffer = w.before(10, Category.BUFFER)
    early = w.one((buffer,), 10)
    w.run((), writes=(buffer,))
    late = w.one((buffer,), 10)
    recipes = Recipes(w.trace())
    assert recipes.rebuildable == {late}
    assert early in recipes.managed


def test_a_write_by_the_optimizer_comes_after_all_recomputations() -> None:
    w = Writer()
    weight = w.before(10)
    a = w.one((weight,), 10)
    w.backward()
    w.update()
    w.run((), writes=(weight,))
    assert Recipes(w.trace()).rebuildable == {a}


def test_a_storage_written_in_backward_has_no_recipe() -> None:
    w = Writer()
    a = w.one((), 10)
    b = w.one((a,), 10)
    w.backward()
    w.run((), writes=(a,))
    assert Recipes(w.trace()).rebuildable == set()
    assert b not in Recipes(w.trace()).rebuildable  # reads it before its last write


@pytest.mark.parametrize("position", [0, 1])
def test_one_operation_that_must_not_run_again_spoils_its_recipe(position: int) -> None:
    w = Writer()
    a = w.one((), 10, rerunnable=position != 0)
    w.run((), writes=(a,), rerunnable=position != 1)
    b = w.one((a,), 10)
    assert Recipes(w.trace()).rebuildable == {b}


def test_an_operation_that_writes_outside_must_not_run_again() -> None:
    w = Writer()
    buffer = w.before(10, Category.BUFFER)
    made = w.run((buffer,), (10,), writes=(buffer,))
    assert made[0] not in Recipes(w.trace()).rebuildable


@pytest.mark.parametrize(
    ("size", "death", "again"),
    [(SMALL_CONSTANT_BYTES, 0, True), (SMALL_CONSTANT_BYTES + 1, 0, False), (SMALL_CONSTANT_BYTES + 1, None, True)],
    ids=["small", "large", "large but lasting"],
)
def test_constants_made_out_of_sight_are_held_only_when_small(size: int, death: int | None, again: bool) -> None:  # noqa: FBT001
    w = Writer()
    constant = w.before(size, Category.OTHER, death=death)
    a = w.one((constant,), 10)
    assert (a in Recipes(w.trace()).rebuildable) is again


@pytest.mark.parametrize(("size", "again"), [(SMALL_CONSTANT_BYTES, True), (SMALL_CONSTANT_BYTES + 1, False)])
def test_constants_made_for_one_operation_are_held_only_when_small(size: int, *, again: bool) -> None:
    w = Writer()
    w.one((w.before(10),), 10)
    constant = w.before(size, Category.OTHER, death=1)
    w.births[constant] = 1
    a = w.one((constant,), 10)
    assert (a in Recipes(w.trace()).rebuildable) is again


def test_saved_is_what_backward_reads_of_forward() -> None:
    w = Writer()
    weight = w.before(10)
    a, b = w.one((weight,), 10), w.one((weight,), 10)
    saves = [w.save(weight), w.save(a), w.save(b)]
    w.backward()
    for save in saves[:2]:
        w.unpack(save)
    w.one((a,), 10)
    assert Recipes(w.trace()).saved == {a}  # b is never asked for, the weight is there anyway


@each_seed(60)
def test_recipes_of_any_trace_hold_together(seed: int) -> None:
    trace = drawn(seed, forward=14, rng_bytes=8)
    recipes = Recipes(trace)
    made = [s for r in recipes.recipes for s in r.makes]
    assert sorted(made) == recipes.managed  # each is made by one recipe
    for recipe in recipes.recipes:
        assert list(recipe.operations) == sorted(set(recipe.operations))
        assert not set(recipe.inputs) & set(recipe.makes)
        assert recipe.peak_bytes >= sum(trace.storages[s].bytes for s in recipe.makes)
        assert recipe.seconds == pytest.approx(sum(trace.operations[o].seconds for o in recipe.operations))
        if not recipe.runnable:
            continue
        # In a run of the recipe, nothing is read that was written since the forward read it.
        for o in recipe.operations:
            for s in trace.operations[o].reads:
                later = [
                    e
                    for e, code in enumerate(trace.events[: trace.pass_events])
                    if code >= 0 and s in trace.operations[code].writes and e > recipes.event_of_operation[o]
                ]
                assert s in recipe.makes or not later
