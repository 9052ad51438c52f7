"""What a step frees stays with the process, for the next step.

glibc gives the top of its heap back to the system whenever more than twice its largest block is free there, as it is at the end of a step, and of a
micro-batch; the next one gets it page by page, each zeroed by the kernel. That takes a part of each step on a CPU (docs/design/log.md), and as it depends on
where blocks happen to lie nothing can predict it. With it a process is as large between steps as at their peak. So operations are timed with it, too: whether a
convolution got its scratch memory anew each time made it two to six times as long in some processes, and in others not.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

# Blocks of so many bytes and more are given back at once: malloc cannot be told to keep larger ones. Told to map none at all it would keep them, too, but among
# the small ones, with holes between them: an LSTM's process grew by up to a third more than its tensors (docs/design/log.md).
GIVEN_BACK_BYTES: Final = 32 << 20
_TRIM_THRESHOLD: Final = -1, -1  # of mallopt(3): its number, and the value that switches it off
# Setting the other one leaves this where it happens to be, so it is set as well.
_MMAP_THRESHOLD: Final = -3, GIVEN_BACK_BYTES
# By which a user says how malloc is to do it.
_BY_THE_USER: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, from here on, in the whole process. Does nothing where it is not glibc's, or where the environment says how.

    Returns:
        Whether it does.
    """
    if any(name in os.environ for name in _BY_THE_USER) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(*_MMAP_THRESHOLD) == 1, mallopt(*_TRIM_THRESHOLD) == 1])
