"""Recomputations -> Script: all actions that follow from a plan by liveness, written out so that the engine decides nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memfit.planner.recipes import Recipes
from memfit.planner.timeline import Recomputations
from memfit.values.script import KEPT, OffloadedStorage, Script, Step


def compile_script(recipes: Recipes, recomputations: Recomputations) -> Script:
    """The script that holds, runs and releases exactly as the timeline says.

    Args:
        recipes: of the trace the plan is for.
        recomputations: the plan.
    """
    recomputations = {event: tuple(runs) for event, runs in recomputations.items() if runs}
    if not recomputations:
        return Script()
    trace = recipes.trace
    forward = [e for e in trace.events[: trace.forward_events] if e >= 0]
    number = {
        op: i for i, op in enumerate(forward)
    }  # operations are counted in forward, which has no unpacks unless models nest backward
    managed = set(recipes.managed)
    made: dict[int, list[tuple[int, int]]] = defaultdict(list)
    used: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in sorted(recomputations):
        for position, recipe in enumerate(recomputations[event]):
            for s in recipes.recipes[recipe].makes:
                made[s].append((event, position))
            for s in recipes.recipes[recipe].inputs:
                used[s].append((event, position))
    # The engine answers for what it makes again, and for what is asked for where recomputations start; autograd keeps the rest itself.
    answered = set(made) | {trace.saves[~trace.events[event]].storage for event in recomputations}
    unpacks: list[tuple[int, int]] = []  # (event, save) of storages the engine answers for
    for index, save in enumerate(trace.saves):
        if save.storage in answered:
            for event, _ in save.unpacks:
                unpacks.append((event, index))
                used[save.storage].append((event, len(recomputations.get(event, ()))))
    assert answered <= managed, "recomputations start only where a managed storage is unpacked"
    step_events = sorted(unpacks)
    releases: dict[tuple[int, int], list[int]] = defaultdict(list)
    held: set[int] = set()
    for s in {*made, *used}:
        uses = sorted(used.get(s, ()))
        births = made.get(s, [])
        cursor = 0
        for copy in range(len(births) + 1):
            until = births[copy] if copy < len(births) else (len(trace.events) + 1, 0)
            first = cursor
            while cursor < len(uses) and uses[cursor] <= until:
                cursor += 1
            if cursor > first:
                releases[uses[cursor - 1]].append(s)
                if copy == 0:
                    held.add(s)
            elif copy > 0:
                releases[births[copy - 1]].append(s)
    recorded: dict[int, tuple[int, ...]] = {}
    random: dict[int, int] = {}
    steps = []
    for position, (event, save_number) in enumerate(step_events):
        runs = recomputations.get(event, ())
        for recipe in runs:
            for op in recipes.recipes[recipe].operations:
                operation = trace.operations[op]
                recorded[number[op]] = tuple(s if s in managed else -1 for s in operation.reads)
                if operation.random:
                    random[number[op]] = position
        steps.append(
            Step(
                save_number,
                tuple(
                    (~recipes.reloads[r].storage,)
                    if r in recipes.reloads
                    else tuple(number[op] for op in recipes.recipes[r].operations)
                    for r in runs
                ),
                tuple(tuple(sorted(releases.get((event, p), ()))) for p in range(len(runs))),
                tuple(sorted(releases.get((event, len(runs)), ()))),
            )
        )
    wanted = held | answered
    largest = [-1] * len(trace.storages) if trace.sized_by_values else [s.bytes for s in trace.storages]
    makes: dict[int, tuple[tuple[int, int, int], ...]] = {}
    for op in forward:
        operation = trace.operations[op]
        entries = tuple(
            (output, operation.makes[place], largest[operation.makes[place]])
            for output, place in enumerate(operation.outputs)
            if place >= 0 and operation.makes[place] in wanted and operation.outputs.index(place) == output
        )
        if entries:
            makes[number[op]] = entries
    # Recomputations of one tensor may read what forward writes into another: each write is checked, those that nothing runs again too.
    writes = {
        number[op]: tuple(dict.fromkeys(s if s in wanted else -1 for s in trace.operations[op].writes))
        for op in forward
        if trace.operations[op].writes
    }
    return Script(
        tuple(trace.operations[op].name for op in forward),
        makes,
        frozenset(held),
        recorded,
        random,
        tuple(save.storage if save.storage in answered else KEPT for save in trace.saves),
        tuple(steps),
        tuple(trace.operations[op].wanted for op in forward),
        _offloads(recipes, recomputations, number),
        writes,
    )


def _offloads(
    recipes: Recipes, recomputations: Recomputations, number: Mapping[int, int]
) -> dict[int, OffloadedStorage]:
    """The offloaded storages, in the order of their copies; each has its own place, as all of them are on the tier when forward ends."""
    chosen = recipes.copied_down(recomputations)
    events = recipes.trace.events
    out: dict[int, OffloadedStorage] = {}
    offsets = [0 for _ in recipes.tiers]
    for s, reload in sorted(chosen.items(), key=lambda item: (item[1].ready, item[0])):
        begin, gone_by = number[events[reload.ready]], number[events[reload.gone_by]]
        tier = recipes.tiers[reload.tier].tier
        out[s] = OffloadedStorage(offsets[reload.tier], recipes.trace.storages[s].bytes, begin, gone_by, tier)
        offsets[reload.tier] += recipes.place_bytes(s)
    return out
