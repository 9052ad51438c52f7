"""The end of a process that was one rank of several, where PyTorch leaves more to the program than a program knows of."""

from __future__ import annotations

import atexit
import sys
import time
from functools import cache
from typing import Final

import torch.distributed as dist

# Seconds; a waiting thread takes microseconds, and joins in only while this one does not hold the interpreter.
_LETTING_GO: Final = 0.05


@cache
def wait_for_senders_at_exit() -> None:
    """Before the interpreter ends, give the threads of a group on CPUs time to let go of the tensors that they sent.

    They need the interpreter for that, and where it ends first they end the process by SIGABRT ("terminate called without an active exception"), after all its
    work is done: https://github.com/pytorch/pytorch/pull/179291. `destroy_process_group` alone is no remedy, as it joins them only where nothing else has the
    group. May be called any number of times.
    """
    atexit.register(_wait)


def leave_group_at_exit() -> None:
    """Destroy the default group before the interpreter ends: for whoever made it where the program did not, and so does not know of it.

    Not after an exception: other ranks may still be in a collective, and NCCL would wait for them.
    """
    wait_for_senders_at_exit()  # what is registered first comes last
    atexit.register(_leave)


def _wait() -> None:
    time.sleep(_LETTING_GO)


def _leave() -> None:
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
