"""One process at a time trains in a run's folder: two would delete each other's snapshots."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memfit.errors import ConfigError
from memfit.train import snapshots


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """While the block runs, no other process of this computer trains in the folder, which is made where it is missing.

    The system lets go of the lock when the process ends, however it ends, and nothing is left in the folder.

    Raises:
        ConfigError: another one does.
        SnapshotError: the folder cannot be made.
    """
    snapshots.check_space(out, 0)
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in {out}: wait until it has ended, or train in another folder (train.out)"
            ) from None
        except OSError:  # a file system that has no locks on folders
            pass
        yield
    finally:
        os.close(folder)
