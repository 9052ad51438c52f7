"""The parts of a model and what each takes, found from its trace: nothing is declared.

A part is a call of a module that has parameters: of the repeated blocks each one, and of everything else the largest modules that hold no block. Where
repeated blocks are less than half of a model (two kinds in turn, say), its blocks are the innermost modules, or the members of lists (with a number for a name)
that these are in, unless one of those is most of it. Modules without parameters are parts, too, where they change in place what they are given (an in-place
ReLU, after which alone the model can be cut) or are the last to read it and return less (a pooling layer, after which there is less to send). Whatever else
runs between two parts (masks, positions, other activations) belongs to the later one, what follows the last to that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.errors import InputError
from memfit.planner.modules import repeated_blocks
from memfit.planner.timeline import Timeline
from memfit.values.stages import Part, Parts, Shared
from memfit.values.trace import BEFORE_STEP, Category, ModuleCall, Phase, Trace


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between two parts.

    Attributes:
        bytes: of what crosses, for one micro-batch.
        refused: why the model cannot be cut there; empty where it can.
    """

    bytes: int
    refused: str = ""


def part_calls(trace: Trace, outwards: int = 0) -> tuple[ModuleCall, ...]:
    """The calls of the parts, in order.

    Args:
        trace: of one micro-batch.
        outwards: how many levels of numbered modules further out the blocks are taken, where they are within others: `stages.0.layers.1.layer.0`, then
            `stages.0.layers.1`, then `stages.0`.

    Raises:
        InputError: the model has one part at most.
    """
    with_parameters = [call for call in trace.calls if call.module and _reads_parameters(trace, call)]
    repeated = repeated_blocks(trace)
    blocks = {_outer(block.path, outwards) for block in repeated}
    if 2 * sum(block.last - block.first + 1 for block in repeated) < trace.forward_events:  # two norms of a layer, say
        most = {c.module for c in with_parameters if 2 * (c.operations[1] - c.operations[0]) > trace.forward_operations}
        paths = {call.module for call in with_parameters}
        around_others = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "."}
        innermost = paths - around_others
        blocks = {path if (around := _in_list(path, outwards)) in most else around for path in innermost}
    found: list[ModuleCall] = []
    end = 0
    tails = _with_less_to_send(trace) - {call.module for call in with_parameters}
    candidates = [*with_parameters, *(call for call in trace.calls if call.module in tails)]
    # In the order in which they begin, a module before those in it.
    for call in sorted(candidates, key=lambda c: (c.operations[0], -c.operations[1], len(c.module))):
        begins, ends = call.operations
        if begins < end:
            continue  # in the part before
        holds_blocks = any(
            other.module in blocks
            and other.module.startswith(f"{call.module}.")
            and begins <= other.operations[0]
            and other.operations[1] <= ends
            for other in with_parameters
        )
        if call.module in blocks or not holds_blocks:
            found.append(call)
            end = ends
    if len(found) < 2:
        raise InputError(
            f"the model has {len(found)} modules with parameters that are called one after the other, so there is nothing to cut: "
            "its forward must call at least two"
        )
    return tuple(found)


def _outer(path: str, levels: int) -> str:
    """The module with a number for a name that is so many of them further out; the outermost of them where there are fewer."""
    names = path.split(".")
    numbered = [i for i, name in enumerate(names) if name[-1:].isdigit()]
    return ".".join(names[: numbered[max(0, len(numbered) - 1 - levels)] + 1]) if numbered else path


def _in_list(path: str, outwards: int) -> str:
    """The member of a list that a module is in, so many lists further out; the module itself where it is in none."""
    names = path.split(".")
    lists = [number for number, name in enumerate(names[:-1]) if name.isdigit()]
    return ".".join(names[: lists[max(0, len(lists) - 1 - outwards)] + 1]) if lists else path


def _with_less_to_send(trace: Trace) -> set[str]:
    """Modules of which a call changes in place what it is given, or returns less than that and nothing else reads it later in forward."""
    last_read = {s: op for op in range(trace.forward_operations) for s in trace.operations[op].reads}
    found = set()
    for call in trace.calls:
        first, end = call.operations
        changes = any(s in call.arguments for operation in trace.operations[first:end] for s in operation.writes)
        given, returned = (sum(trace.storages[s].bytes for s in {*each}) for each in (call.arguments, call.results))
        shrinks = 0 < returned < given and all(last_read.get(s, -1) < end for s in call.arguments)
        if call.module and (changes or shrinks):
            found.add(call.module)
    return found


def _reads_parameters(trace: Trace, call: ModuleCall) -> bool:
    return bool(_parameters_read(trace, *call.operations))


def _parameters_read(trace: Trace, first: int, end: int) -> set[int]:
    """Storages of parameters that operations [first, end) read."""
    return {
        s
        for operation in trace.operations[first:end]
        for s in operation.reads
        if trace.storages[s].category is Category.PARAMETER and trace.storages[s].birth == BEFORE_STEP
    }


def part_ends(trace: Trace, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """Of each part, the forward operation before which it ends."""
    return (*(call.operations[1] for call in calls[:-1]), trace.forward_operations)


def chain(trace: Trace, calls: Sequence[ModuleCall], boundaries: Sequence[Boundary]) -> Parts:
    """What each part takes in a step of this trace, with everything kept.

    Args:
        trace: of one micro-batch.
        calls: as `part_calls` has found.
        boundaries: after each part but the last.
    """
    ends = part_ends(trace, calls)
    part_of = [bisect_right(ends[:-1], op) for op in range(trace.forward_operations)]
    forward, backward, again = ([0.0] * len(calls) for _ in range(3))
    kept, used = [0] * len(calls), [set[int]() for _ in calls]
    for op, part in enumerate(part_of):
        operation = trace.operations[op]
        forward[part] += operation.seconds + trace.beside_seconds(operation)
        again[part] += operation.seconds
    for part, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        used[part] = _parameters_read(trace, first, end)
    saved = {save.storage for save in trace.saves if save.unpacks}
    for s in saved:
        birth = trace.storages[s].birth
        if 0 <= birth < trace.forward_events:
            kept[part_of[trace.events[birth]]] += trace.storages[s].bytes
    by_part = list(range(len(calls)))
    here = by_part[-1]
    levels = Timeline(trace).plain().levels
    working = [0] * len(calls)
    before = trace.bytes_before_step
    grads = 0
    for event, code in enumerate(trace.events[: trace.pass_events]):
        if code < 0:
            maker = trace.events[trace.saves[~code].by]
            here = part_of[maker] if 0 <= maker < len(part_of) else here
        else:
            operation = trace.operations[code]
            if event < trace.forward_events:
                here = part_of[code]
            elif operation.phase is Phase.BACKWARD:
                backward[here] += operation.seconds + trace.beside_seconds(operation)
                grads += sum(
                    trace.storages[s].bytes for s in operation.makes if trace.storages[s].category is Category.GRADIENT
                )
        above = int(levels[event]) - before - grads - sum(kept[: here + 1])
        working[here] = max(working[here], above)
    return _with_state(trace, calls, boundaries, used, (forward, backward, again), kept, working)


def _with_state(
    trace: Trace,
    calls: Sequence[ModuleCall],
    boundaries: Sequence[Boundary],
    used: Sequence[set[int]],
    seconds: tuple[Sequence[float], Sequence[float], Sequence[float]],
    kept: Sequence[int],
    working: Sequence[int],
) -> Parts:
    forward, backward, again = seconds
    parameters = trace.bytes_of(Category.PARAMETER) or 1
    # Gradients are as large as their parameters, and the optimizer's state is in proportion.
    share = 1 + (trace.bytes_of(Category.GRADIENT) + trace.bytes_of(Category.OPTIMIZER_STATE)) / parameters
    update = sum(o.seconds for o in trace.operations if o.phase in {Phase.CLIP, Phase.OPTIMIZER})
    holders: dict[int, list[int]] = {}
    for part, storages in enumerate(used):
        for s in storages:
            holders.setdefault(s, []).append(part)
    state = [round(share * sum(trace.storages[s].bytes for s in storages if len(holders[s]) == 1)) for storages in used]
    shared = tuple(
        Shared(f"parameter {s}", round(share * trace.storages[s].bytes), tuple(parts))
        for s, parts in sorted(holders.items())
        if len(parts) > 1
    )
    parts = tuple(
        Part(
            call.module,
            forward[i],
            backward[i],
            state[i],
            kept[i],
            working[i],
            boundaries[i].bytes if i < len(boundaries) else 0,
            update * state[i] / (share * parameters),
            boundaries[i].refused if i < len(boundaries) else "",
            again[i],
        )
        for i, call in enumerate(calls)
    )
    return Parts(parts, shared, trace.bytes_of(Category.BATCH))
