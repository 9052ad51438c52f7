"""Processes of an attempt whose guard was killed: the kernel kills the command with its guard, and what the command has started goes on."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from memfit.runner import guard


def end_left_behind(folder: Path) -> int:
    """Kill all that is left of an attempt, and wait until it is gone.

    What belongs to it is told by a variable of its environment, which the guard sets and whatever is started inherits, in whatever session. A process that
    was started without its parent's environment is not found.

    Args:
        folder: of the attempt.

    Returns:
        How many there were.
    """
    mark, ended = f"{guard.ATTEMPT}={folder}".encode(), 0
    while there := list(_marked(mark)):  # again: one may have started another in the meantime
        for watch in there:
            with suppress(OSError):
                signal.pidfd_send_signal(watch, signal.SIGKILL)
        for watch in there:
            select.select([watch], [], [])
            os.close(watch)
        ended += len(there)
    return ended


def _marked(mark: bytes) -> Iterator[int]:
    """Processes with a variable in their environment, as file descriptors that are readable once they have ended."""
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names alone are wanted
        with suppress(OSError):
            watch = os.pidfd_open(int(name))
            try:
                found = mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                found = False
            if found and not select.select([watch], [], [], 0)[0]:
                yield watch
            else:
                os.close(watch)
