"""A lock on a file, waited for no longer than told: what held it may have been halted, and never lets go then."""

from __future__ import annotations

import fcntl
import time
from typing import Final

_PAUSE_SECONDS: Final = 0.05


def locked(file: int, seconds: float) -> bool:
    """Whether the lock of an open file could be had within some seconds. It goes with the file."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        else:
            return True
