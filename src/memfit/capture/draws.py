"""Other draws of the random numbers: where what is drawn in forward may decide sizes or operations, the step is captured under several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import torch

from memfit.capture.captured import Captured
from memfit.capture.comparing import same_forward, same_operations
from memfit.step.generators import forked_generators
from memfit.values.trace import Trace

OTHER_DRAWS: Final = 5  # of the random numbers are captured as well where they may decide sizes


def with_other_draws(captured: Captured, again: Callable[[], Captured], others: Iterable[Captured] = ()) -> Captured:
    """The capture with the sizes that other random numbers give, where numbers drawn in forward may decide any; and what the user should know of it.

    Args:
        captured: the step under one draw.
        again: captures it in the same way, under the present state of the generators.
        others: captures of the same step run in other ways.
    """
    trace = captured.trace
    told: dict[str, str] = {}
    for operation in trace.operations:
        if operation.by_values:
            told.setdefault(operation.module, operation.name)
    notes: list[str] = []
    if told:
        module, name = next(iter(told.items()))
        more = f" and in {len(told) - 1} more modules" if len(told) > 1 else ""
        notes.append(
            f"values decide how large some results are ({name} in {module or 'the model'}{more}): bytes are those of this sample and these parameters, and "
            "other batches or later steps may hold more"
        )
    drawn: list[tuple[int, ...]] = []
    diverging = 0
    if _draws_before_it_looks(trace) and not any(c.steady and same_forward(c.trace, trace) for c in others):
        own = tuple(s.bytes for s in trace.storages)
        for seed in range(1, OTHER_DRAWS + 1):
            with forked_generators():
                torch.manual_seed(seed)
                try:
                    other = again().trace
                except Exception:  # noqa: BLE001 - what this draw runs cannot be captured, or is the user's own error: no step that was planned for
                    diverging += 1
                    continue
            sizes = tuple(s.bytes for s in other.storages)
            if not same_operations(trace, other):
                diverging += 1
            elif sizes != own:
                drawn.append(sizes)
            else:
                break  # what is drawn decides values only
    if diverging:
        notes.append(
            f"random numbers, drawn anew in each step, decide which operations run: {diverging} of {OTHER_DRAWS} other draws ran others than are planned for. "
            "Such a step is kept plain from where it diverges"
        )
    trace = replace(trace, drawn_bytes=tuple(drawn), notes=(*trace.notes, *notes))
    return replace(captured, trace=trace, steady=not drawn and not diverging)


def _draws_before_it_looks(trace: Trace) -> bool:
    """Whether forward draws random numbers before values decide sizes, or are read by Python, which may decide anything by them."""
    drawn = False
    for operation in (trace.operations[e] for e in trace.events[: trace.forward_events] if e >= 0):
        if drawn and (operation.by_values or operation.name == "aten._local_scalar_dense.default"):
            return True
        drawn = drawn or operation.random
    return False
