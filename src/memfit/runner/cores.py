"""The cores of this computer's processor, which runs on it share: how many run at one time, and with how many threads each.

Without that each takes a thread for every core, and the threads of two processes on one core wait for each other.
"""

from __future__ import annotations

import os
from typing import Final

CORES: Final = "cores"
"""Name of the account of a `Ledger` that has cores and no bytes."""
THREADS: Final = "OMP_NUM_THREADS"
"""Variable by which torch takes so many threads; where a user has set it, it stays as it is."""


def runs_at_once(number: int, ranks: int = 1, *, fit: int | None = None) -> int:
    """Runs that are side by side at most: more than there are cores are no faster.

    Args:
        number: of cores.
        ranks: processes of each run.
        fit: runs that there are bytes for; None for as many as there are cores for.
    """
    most = max(1, number // ranks)
    return most if fit is None else max(1, min(most, fit))


def threads(number: int, at_once: int, ranks: int = 1) -> dict[str, str]:
    """The variable by which each rank takes its share of the cores, as torchrun's do; nothing for a run that has them to itself, and where it is set already.

    Args:
        number: of cores.
        at_once: runs that are side by side.
        ranks: processes of each run.
    """
    if at_once == 1 or THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, number // (at_once * ranks)))}
