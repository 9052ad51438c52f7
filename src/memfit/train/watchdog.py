"""Ends a rank that makes no progress: the last resort beside the limit that each collective has.

A collective that waits for too long raises by itself, and a rank that hangs elsewhere (in a loader, on a disk) is noticed by the others in their next
collective. Where all ranks hang so at once nobody would notice. A thread does, as long as what hangs leaves Python's lock to it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from memfit.units import format_seconds

STATUS: Final = 75  # of the process: something passing, as sysexits.h has it


class Watchdog:
    """While its block runs, the process ends where `progress` is not called for too long.

    Args:
        limit_seconds: without progress; None for no limit.
        who: what is ended, at the beginning of the sentence that is printed then.
        end: ends the process with a status; not by an exception, since the thread that hangs would not see it.
    """

    def __init__(self, limit_seconds: float | None, who: str, end: Callable[[int], object] = os._exit) -> None:
        self._limit, self._who, self._end = limit_seconds, who, end
        self._last = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def progress(self) -> None:
        """Something was done: a step, a part of an evaluation, a snapshot."""
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        self.progress()
        if self._limit is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._limit,), name="memfit-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, limit: float) -> None:
        while not self._done.wait(max(0.0, self._last + limit - time.monotonic())):
            if time.monotonic() - self._last < limit:
                continue
            sys.stderr.write(
                f"memfit: {self._who} has done no step, evaluation or snapshot for {format_seconds(limit)}, twice train.rank_timeout, so it ends: it hangs, or "
                "one of these takes that long; then give a larger train.rank_timeout\n"
            )
            sys.stderr.flush()
            self._end(STATUS)
            return
