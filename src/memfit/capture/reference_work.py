"""How busy the machine is while operations are timed: a fixed piece of work, timed beside them.

Processor time leaves out what other processes run, not what they do to the caches, the memory bus, the clock rate and the other half of the core: on a busy
machine an operation takes up to twice its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import inf
from statistics import median
from typing import Final

import torch

# Times its least time that the reference work takes on a computer that does nothing else, in between other work: so much it wavers by itself. What is timed
# was divided by that, too, and came out 3 to 8 % too short, each time by another amount (docs/design/log.md, 2026-11-26).
QUIET: Final = 1.15
BUSY: Final = 1.1  # slowdown of a busy machine
QUIETER: Final = 0.85  # times the slowdown that a cost was taken under: then it is worth taking again
EVERY_SECONDS: Final = 0.02  # of timing other work, after which it is timed again
LEAST_OTHER: Final = 20  # times what that took: while threads wait for each other it is more than all other work
RUNS: Final = 7
COLD_RUNS: Final = 2  # of these bring the work back into the caches, which what was timed before has filled
LOOKS: Final = 9
# More than neighbours do (up to two times). Threads that wait for one whose core has gone to another process, which is 20 ms later, make it
# some hundred times, of which one look in twenty on a crowded computer is; then it is looked at again after a pause (docs/design/log.md, 2026-11-27).
STALLED: Final = 4.0
TRIES: Final = 5
PAUSE_SECONDS: Final = 0.05


class ReferenceWork:
    """A product of matrices, for the clock rate, and a pass over a mebibyte, for the caches that cores share.

    Args:
        clock: seconds, as operations are timed.
        least_seconds: it has ever taken on this machine; infinite where it has not been run.

    Attributes:
        least_seconds: as given, and less where it has taken less since.
        stalls: whether most of its last runs waited for a thread.
    """

    def __init__(self, clock: Callable[[], float], least_seconds: float = inf) -> None:
        self.least_seconds = least_seconds
        self.stalls = False
        self._clock = clock
        self._matrix: torch.Tensor | None = None
        self._numbers = torch.empty(0)
        self._seconds = inf
        self._next_at = -inf

    def seconds(self, *, now: bool = False) -> float:
        """That it takes; that it took a moment ago where it was timed a moment ago and not `now`."""
        begin = time.monotonic()
        if now or begin > self._next_at:
            runs = [self._once() for _ in range(RUNS)][COLD_RUNS:]
            # Not the least: a virtual machine runs some of them in two thirds of the time, for a few milliseconds (docs/design/log.md, 2026-11-30).
            self._seconds = typical(runs)
            self.least_seconds = min(self.least_seconds, self._seconds)
            self.stalls = median(runs) > STALLED * self.least_seconds
            end = time.monotonic()
            self._next_at = end + max(EVERY_SECONDS, LEAST_OTHER * (end - begin))
        return self._seconds

    def slowdown(self) -> float:
        """How many times longer work takes now than on a quiet computer: by the median of some looks, as each gives another; of several while it stalls."""
        found = inf
        for tried in range(TRIES):
            if tried:
                time.sleep(PAUSE_SECONDS)
            found = min(found, self._slower(median(self.seconds(now=True) for _ in range(LOOKS))))
            if found < STALLED:
                break
        return found

    def slowdown_beside(self) -> float:
        """As `slowdown`, of a moment ago, for what is timed right after or before."""
        return self._slower(self.seconds())

    def _slower(self, taken: float) -> float:
        return max(1.0, taken / (QUIET * self.least_seconds))

    def _once(self) -> float:
        if self._matrix is None:
            self._matrix, self._numbers = torch.full((192, 192), 0.5), torch.full((1 << 18,), 0.5)
            self._work(self._matrix)  # the first run sets the libraries up
        begin = self._clock()
        self._work(self._matrix)
        return self._clock() - begin

    def _work(self, matrix: torch.Tensor) -> None:
        torch.mm(matrix, matrix)
        self._numbers.add_(0.0)


def typical(seconds: Iterable[float]) -> float:
    """The median of what runs of one thing took, of those that waited for no thread whose core had gone to another process.

    On a crowded computer most runs on several threads wait, and then take a scheduler's time slice, however short they are.
    """
    seconds = list(seconds)
    least = min(seconds)
    return median(each for each in seconds if each <= STALLED * least)


def noted(slowdown: float, *, stalls: bool) -> float:
    """What a cost that was taken under a slowdown is noted with. One taken only while threads wait may be a wait: a later process takes it again."""
    return max(slowdown, STALLED) if stalls else slowdown
