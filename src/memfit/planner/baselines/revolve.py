"""Revolve (Griewank and Walther 2000): going backward through equal steps with few states in memory."""

from __future__ import annotations

from enum import StrEnum
from math import comb
from typing import NamedTuple


class RevolveKind(StrEnum):
    """What a revolve schedule does next. The state in hand is what the last advance made, or one read from its slot."""

    ADVANCE = "from state `start`, in hand or in a slot, run forward to state `stop`"
    SNAPSHOT = "put the state in hand into a slot"
    BACKWARD = "from state `start`, in hand or in a slot, run step `start` recording it, and go backward through it"
    RELEASE = "free the slot of state `start`"


class RevolveAction(NamedTuple):
    """One action; `stop` differs from `start` for an advance only. Step i leads from state i to state i + 1."""

    kind: RevolveKind
    start: int
    stop: int


def revolve_cost(length: int, slots: int) -> int:
    """The least forward steps that going backward through equal steps takes besides recording each once.

    This is t(l, s) of Griewank and Walther 2000: r l - binomial(s + r, r - 1), where r, the most often that any step is
    run, is the least with l <= binomial(s + r, s).

    Conventions: slots hold states, and the initial state takes one of them, so there is at least one. The state in hand
    and the record of the step being reversed are not counted. Each step is run once more, recording, when it is
    reversed: evaluations in all are cost + length. So even with a slot for every state the cost is length - 1.

    Args:
        length: number of steps, zero or more.
        slots: states that can be held, the initial one among them.
    """
    repeats = _repeats(length, slots)
    return repeats * length - _binomial(slots + 1, repeats - 1)


def _binomial(slots: int, repeats: int) -> int:
    """beta(s, r) = binomial(s + r, s): the longest chain reversible with s slots and no step run more than r times."""
    return comb(slots + repeats, slots) if repeats >= 0 else 0


def _repeats(length: int, slots: int) -> int:
    if length < 0 or slots < 1:
        raise ValueError(f"{length} steps with {slots} slots: steps cannot be negative, and the input needs a slot.")
    repeats, reach = 0, 1
    while reach < length:
        repeats += 1
        reach = reach * (slots + repeats) // repeats
    return repeats


def revolve_schedule(length: int, slots: int) -> tuple[RevolveAction, ...]:
    """Actions that go backward through equal steps with `revolve_cost(length, slots)` forward steps.

    At the start state 0 is in hand. Conventions as for the cost; never more than `slots` states are in slots.
    """
    _repeats(length, slots)
    actions: list[RevolveAction] = []

    def act(kind: RevolveKind, start: int, stop: int | None = None) -> None:
        actions.append(RevolveAction(kind, start, start if stop is None else stop))

    # An action to write down, or (a, b, s): go backward from state b to state a, with state a in hand or in a slot and
    # s slots, that one counted in. A stack: there may be more slots than Python has levels of recursion.
    to_do: list[RevolveAction | tuple[int, int, int]] = [(0, length, slots)]
    if length > 1:
        act(RevolveKind.SNAPSHOT, 0)
        to_do.insert(0, RevolveAction(RevolveKind.RELEASE, 0, 0))
    while to_do:
        task = to_do.pop()
        if isinstance(task, RevolveAction):
            actions.append(task)
            continue
        a, b, s = task
        if b - a <= 1:
            if a < b:
                act(RevolveKind.BACKWARD, a)
            continue
        # Any middle in a certain interval is optimal (section 2 of the paper); this is the earliest.
        repeats = _repeats(b - a, s)
        middle = a + max(1, _binomial(s, repeats - 2), b - a - _binomial(s - 1, repeats))
        act(RevolveKind.ADVANCE, a, middle)
        to_do.append((a, middle, s))
        if b - middle > 1:
            act(RevolveKind.SNAPSHOT, middle)
            to_do.append(RevolveAction(RevolveKind.RELEASE, middle, middle))
        to_do.append((middle, b, s - 1))
    return tuple(actions)
