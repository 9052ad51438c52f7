"""Messages that are received before anybody reads them.

gloo sends a message once it knows that somebody receives it, which takes two messages more and a wait for whoever still computes. Of one that is received ahead
it knows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def receive_ahead(into: Tensor, source: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Begin to receive a message that may come much later, or never.

    Args:
        into: contiguous, of the size of the message; to be left alone until it is there.
        source: rank in the group.
        group: of gloo. NCCL runs messages one after the other, and would wait for ever.
        tag: of this message and those like it, which come in their order; of no message that another receiver might begin to receive.
    """
    # A process group tells a profiler when the message has come, also one that has ended by then: what it writes to is another's memory.
    torch._C._autograd._enable_record_function(False)
    try:
        work = dist.irecv(into, group=group, group_src=source, tag=tag)
    finally:
        torch._C._autograd._enable_record_function(True)
    assert work is not None, "this rank is in the group"
    return work
