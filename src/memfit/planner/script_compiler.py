"""Recomputations -> Script: all actions that follow from a plan by liveness, written out so that the engine decides nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, TypeAlias

from memfit.planner.draws import Draws
from memfit.planner.recipes import Recipes
from memfit.planner.repeatable_calls import RepeatableCalls
from memfit.planner.steady_calls import Form, Key, sizes
from memfit.planner.timeline import Recomputations
from memfit.values.script import (
    KEPT,
    CallScript,
    KeptStretch,
    OffloadedStorage,
    RepeatedCalls,
    Script,
    Step,
    shared_beginning,
)
from memfit.values.trace import ModuleCall, Trace

# Calls of modules that are counted in the time that following one operation takes: where the follower is off in some stretches, all of forward's are looked at.
CALLS_AN_OPERATION: Final = 4
LEAST_KEPT: Final = 6  # operations of a stretch that is not followed: taking the follower off and putting it on again takes as long as following about four

Compiler: TypeAlias = Callable[[Recipes, Recomputations, frozenset[int] | None], Script]


def compile_calls(draws: Draws, recomputations: Recomputations) -> Script:
    """A script for each call of a module in which something runs again, where forward takes several paths.

    Args:
        draws: all paths.
        recomputations: the plan for the first of them; what it decides, it decides within calls.
    """
    decisions = draws.decisions(recomputations)
    assert decisions is not None, "plans that decide across calls are not taken"
    seen: dict[Form, set[tuple[int, ...]]] = defaultdict(set)
    for path in draws.paths:
        for call in path.calls.calls:
            seen[path.calls.forms[call.module, call.number]].add(sizes(path.trace, call))
    scripts: dict[Key, Script] = {}
    for path in draws.paths:
        own: dict[int, dict[int, Sequence[int]]] = defaultdict(dict)
        for event, runs in path.recomputations(decisions).items():
            own[path.calls.of_save(~path.trace.events[event])][event] = runs
        for number, call in enumerate(path.calls.calls):
            key = call.module, call.number
            if own[number] and key not in scripts:
                any_size = len(seen[path.calls.forms[key]]) > 1
                scripts[key] = compile_script(path.timeline.recipes, own[number], call, any_size=any_size)
    script = Script(
        calls=tuple(CallScript(*key, script) for key, script in scripts.items() if not script.plain),
        most_operations=max(path.trace.forward_operations for path in draws.paths),
    )
    return knowing_calls(script, [path.trace for path in draws.paths])


def knowing_calls(script: Script, paths: Sequence[Trace]) -> Script:
    """The script with what is known of the calls of modules on these paths: by it alone a longer path is told where single operations are not compared.

    Two short paths may be known, and a third have the calls of both. So what calls keep is added up, too.
    """
    calls = [Counter(call.module for call in path.calls) for path in paths]
    most: Counter[str] = Counter()
    for own in calls:
        most |= own
    if not script.plain:
        return replace(script, most_calls=dict(most))
    each: dict[str, int] = {}
    for path, own in zip(paths, calls, strict=True):
        kept: Counter[str] = Counter()
        for number in {save.storage for save in path.saves}:
            storage = path.storages[number]
            if 0 <= storage.birth < path.forward_events:
                kept[storage.module] += storage.bytes
        for module, size in kept.items():
            if own[module]:
                each[module] = max(each.get(module, 0), -(-size // own[module]))
    largest = max(sum(each.get(module, 0) * count for module, count in own.items()) for own in calls)
    return replace(script, most_calls=dict(most), call_bytes=each, most_call_bytes=largest)


def compile_branches(plans: Sequence[tuple[Recipes, Recomputations]], compiled: Compiler | None = None) -> Script:
    """The script of the first of several paths, each with a plan of its own, with those of the others in it.

    The engine may follow any of them until it knows which one forward takes: what one wants of what was made by then, all hold.

    Args:
        plans: of the paths, with the recipes of each.
        compiled: makes the script of one; `compile_script` where it is None.
    """
    if not any(runs for _, recomputations in plans for runs in recomputations.values()):
        return Script()
    compiled = compiled or (lambda recipes, plan, asked_of: compile_script(recipes, plan, asked_of=asked_of))
    alone = [compiled(recipes, recomputations, frozenset()) for recipes, recomputations in plans]
    scripts = []
    for number, (recipes, recomputations) in enumerate(plans):
        wanted: set[int] = set()
        for other, script in enumerate(alone):
            own = alone[number]
            alike = own.decided if other == number else shared_beginning(own.operations, script.operations)
            wanted.update(s for op, made in script.makes.items() if op < alike for _, s, _ in made)
        scripts.append(compiled(recipes, recomputations, frozenset(wanted)))
    first, *others = scripts
    return replace(first, branches=tuple(others))


def compile_script(
    recipes: Recipes,
    recomputations: Recomputations,
    within: ModuleCall | None = None,
    *,
    any_size: bool = False,
    asked_of: frozenset[int] | None = None,
) -> Script:
    """The script that holds, runs and releases exactly as the timeline says.

    Args:
        recipes: of the trace the plan is for.
        recomputations: the plan.
        within: the call of a module that the plan is for; None for the whole forward.
        any_size: what is made may be larger than in this trace.
        asked_of: of one of several paths, the storages made before it is known which one forward takes that the engine answers for, as the plan for one of
            them wants them; None for a forward that takes one.
    """
    calls = [recipes.calls[r] for runs in recomputations.values() for r in runs if r in recipes.calls]
    recomputations = {
        event: own
        for event, runs in recomputations.items()
        if (own := tuple(r for r in runs if r not in recipes.calls))
    }
    if not recomputations and not calls and asked_of is None:
        return Script()
    trace = recipes.trace
    forward = [trace.events[event] for event in trace.events_in_forward]
    saves = range(len(trace.saves))
    if within is not None:
        forward, saves = forward[slice(*within.operations)], saves[slice(*within.saves)]
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
    answered = set(made) | {trace.saves[~trace.events[event]].storage for event in recomputations} | (asked_of or set())
    unpacks: list[tuple[int, int]] = []  # (event, save) of storages the engine answers for
    for index in saves:
        save = trace.saves[index]
        if save.storage in answered:
            for event, _ in save.unpacks:
                unpacks.append((event, index))
                used[save.storage].append((event, len(recomputations.get(event, ()))))
    assert answered <= managed, "recomputations start only where a managed storage is unpacked"
    assert recipes.read_what_is_there(recomputations), "what reads a parameter is run again only where that is whole"
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
                save_number - saves.start,
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
    released = tuple(sorted(asked_of - held)) if asked_of else ()
    held.update(released)
    wanted = held | answered
    largest = [-1] * len(trace.storages) if any_size or trace.sized_by_values else [s.bytes for s in trace.storages]
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
        if trace.operations[op].writes and steps
    }
    script = Script(
        tuple(trace.operations[op].name for op in forward),
        makes,
        frozenset(held),
        recorded,
        random,
        tuple(save.storage if save.storage in answered else KEPT for save in trace.saves[saves.start : saves.stop]),
        tuple(steps),
        tuple(trace.operations[op].wanted for op in forward),
        _offloads(recipes, recomputations, number),
        writes,
        frozenset(s for s in held if s not in {made for op in forward for made in trace.operations[op].makes}),
        repeated_calls=tuple(_repeated(each) for each in sorted(calls, key=lambda each: each.begin)),
        decided=-1 if asked_of is None else trace.shared_operations,
        released=released,
    )
    return script if within is not None else replace(script, kept_stretches=_kept_stretches(script, trace.calls))


def compile_stage(plans: Sequence[tuple[Recipes, Recomputations]]) -> Script:
    """The script of a stage of a model, whose trace is of a module around the model: for the model itself, as the ranks run it.

    Args:
        plans: of the paths that forward takes, each with a plan of its own, with the recipes of the trace of the stage.
    """
    if len(plans) == 1:
        return _of_stage(*plans[0], None)
    return compile_branches(plans, _of_stage)


def _of_stage(recipes: Recipes, recomputations: Recomputations, asked_of: frozenset[int] | None) -> Script:
    around, *inside = recipes.trace.calls
    script = compile_script(recipes, recomputations, around, asked_of=asked_of)
    operation, save = around.operations[0], around.saves[0]
    if asked_of is not None:
        script = replace(script, decided=script.decided - operation)
    elif script.plain:
        return script
    calls = [
        replace(
            call,
            module=_in_the_model(call.module),
            operations=(call.operations[0] - operation, call.operations[1] - operation),
            saves=(call.saves[0] - save, call.saves[1] - save),
        )
        for call in inside
    ]
    repeated = [
        replace(
            each,
            modules=tuple((_in_the_model(module), number) for module, number in each.modules),
            buffers=tuple(map(_in_the_model, each.buffers)),
        )
        for each in script.repeated_calls
    ]
    return replace(script, repeated_calls=tuple(repeated), kept_stretches=_kept_stretches(script, calls))


def compile_stage_calls(draws: Draws, recomputations: Recomputations) -> Script:
    """The script of a stage where one plan is for all paths that forward takes: one for each call of a module in which something runs again.

    Args:
        draws: all paths of the stage, whose traces have the calls of the model and of what is in it.
        recomputations: the plan for the first of them.
    """
    script = compile_calls(draws, recomputations)
    if script.plain:
        return Script()
    calls = tuple(replace(call, module=_in_the_model(call.module)) for call in script.calls)
    most_calls = {_in_the_model(module): count for module, count in script.most_calls.items()}
    return replace(script, calls=calls, most_calls=most_calls)


def _in_the_model(path: str) -> str:
    """A path in a stage, which has the model as its one part, as a path in the model."""
    return path.removeprefix("model").removeprefix(".")


def _repeated(again: RepeatableCalls) -> RepeatedCalls:
    """Calls that are made again, their saves counted from the first."""
    begin, end = again.saves_between
    return RepeatedCalls(
        tuple((call.module, call.number) for call in again.calls),
        end - begin,
        tuple(number - begin for number in again.saves),
        again.operations,
        again.random,
        again.buffers,
    )


def _kept_stretches(script: Script, calls: Sequence[ModuleCall]) -> tuple[KeptStretch, ...]:
    """The longest stretches in which the engine has nothing to do, none where counting calls would take longer than they save.

    Calls come in the order in which they begin, outer ones first. Until it is known which of several paths forward takes, it is followed.
    """
    acts = script.acts_at()
    acted = list(accumulate((i in acts for i in range(len(script.operations))), initial=0))
    answered = list(accumulate((storage != KEPT for storage in script.saves), initial=0))

    def done(operation: int, save: int) -> tuple[int, int]:
        """What the engine has done up to here."""
        return acted[operation], answered[save]

    # A stretch may end where the last call ends before the engine acts again; of calls that end at once, the outermost.
    last: dict[tuple[int, int], int] = {}
    for number, call in enumerate(calls):
        at = call.operations[1], call.saves[1]
        known = last.get(done(*at))
        if not _within_itself(calls, number) and (
            known is None or at > (calls[known].operations[1], calls[known].saves[1])
        ):
            last[done(*at)] = number
    found: list[KeptStretch] = []
    for number, call in enumerate(calls):
        begin, first = call.operations[0], call.saves[0]
        if begin <= script.decided or (found and (begin, first) < (found[-1].operations[1], found[-1].saves[1])):
            continue
        end = last.get(done(begin, first))
        if end is None or calls[end].operations[1] - begin < LEAST_KEPT:
            continue
        ending = calls[end]
        until = ending.operations[1], ending.saves[1]
        # Calls that began before this one, around it, may end in the stretch as well: the model's own, where the loss calls it twice.
        ends = [
            (each.operations[1], each.saves[1])
            for each in calls[: max(number, end) + 1]
            if each.module == ending.module
        ]
        if (begin, first) == (call.operations[1], call.saves[1]) in ends:
            continue  # nothing runs in this call, so nothing tells whether that one is around it or before
        times = sum((begin, first) < each <= until for each in ends)
        later = [(each.operations[0], each.saves[0]) for each in calls[number:]]
        begun = bisect_left(later, until), bisect_right(later, until)
        found.append(
            KeptStretch(
                call.module, ending.module, times, (begin, ending.operations[1]), (first, ending.saves[1]), begun
            )
        )
    kept = sum(end - begin for begin, end in (stretch.operations for stretch in found))
    return tuple(found) if CALLS_AN_OPERATION * kept > len(calls) else ()


def _within_itself(calls: Sequence[ModuleCall], number: int) -> bool:
    """Whether a module is called again within this call of it: then not every end of its calls is one of a call that began before."""
    call = calls[number]
    for later in calls[number + 1 :]:
        if later.operations[0] >= call.operations[1] and later.saves[0] >= call.saves[1]:
            return False
        if later.module == call.module:
            return True
    return False


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
