"""What a technique can do to a step at best, known before the step is captured with it: so that hopeless ways are not captured at all.

Bounds, not estimates: no fewer seconds, no more bytes. Where one is wrong a faster plan is missed, so what nobody knows is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.planner.head import head_of
from memfit.planner.prices import Solver
from memfit.planner.transfers import block_seconds, state_transfers
from memfit.values.bundle import StreamedLayer
from memfit.values.machine import Link
from memfit.values.trace import Category, Phase


@dataclass(frozen=True, slots=True)
class AtBest:
    """One technique, added to a step.

    Attributes:
        saved_bytes: the most it takes off any moment of the step; None where it does what recomputation does, and a bound for that says nothing.
        seconds: the least it adds to a step; negative where it may be faster.
    """

    saved_bytes: int | None
    seconds: float


def at_best(plain: Solver, name: str, link: Link | None, layers: Sequence[StreamedLayer] = ()) -> AtBest | None:
    """The bound for a field of `Choices`, whatever its value; None where nobody knows.

    Args:
        plain: the step as it is, the whole batch at once or as the user fixed it.
        name: of the field.
        link: to the lower tier; None for none.
        layers: that would be streamed, and what is in no block.
    """
    trace = plain.trace
    state = trace.bytes_of(Category.OPTIMIZER_STATE)
    update = sum(o.seconds for o in trace.operations if o.phase is Phase.OPTIMIZER)
    if name == "state_format":
        return AtBest(state, -update)  # fewer bytes to read and write may well be faster
    if name == "update":
        return AtBest(trace.bytes_of(Category.GRADIENT), -update)  # of a gradient that is still in the cache
    if name == "state_place" and link is not None:
        return AtBest(state, state_transfers(state, link).waited_seconds - update)
    if name == "loss_chunks":
        head = head_of(plain.timeline)
        return None if head is None else AtBest(head.bytes, -trace.micro_batches * head.seconds)
    if name == "streamed" and link is not None and layers:
        again = trace.micro_batches * sum(block_seconds(trace, [layer.path for layer in layers[:-1]])[0])
        weights = sum(layer.weight_bytes for layer in layers)
        moved = sum(layer.state_bytes for layer in layers)
        busy = link.in_seconds(2 * weights + moved) + link.out_seconds(weights + moved)
        computing = trace.plain_step_seconds + again
        # The two last layers need not come twice; with two layers none does.
        once = link.in_seconds(sum(sorted(layer.weight_bytes for layer in layers)[-2:]))
        return AtBest(None, again - update + max(0.0, busy - once - computing))
    return None


def least_bytes(plain: Solver) -> int:
    """Bytes that lie there when the optimizer updates, whatever is recomputed and however the batch is split."""
    trace = plain.trace
    floor = plain.timeline.floor()[trace.pass_events :]
    return int(floor.max()) if len(floor) else trace.bytes_before_step
