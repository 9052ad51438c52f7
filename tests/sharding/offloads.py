"""What a rank does in the tests of offloading beside sharding."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

import memfit
from sharding import steps


def without_room(rank: int, plan: dict[str, Any]) -> str:
    """What is said on this rank where the disk of the last one is full."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, _, loss_fn = steps.chain()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(os, "posix_fallocate", full)
        try:
            memfit.apply(memfit.Plan.from_json(plan), model, loss_fn, steps.adamw)
        except memfit.MemfitError as error:
            return str(error)
    return ""
