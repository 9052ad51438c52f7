"""Page-locked host memory, which a GPU copies to and from while it computes.

Pages are locked where they are (`cudaHostRegister`): torch's own pinned allocator rounds every block up to a power of two.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import InfeasibleError
from memfit.units import format_bytes


class PinnedMemory:
    """Blocks of page-locked memory of one owner, freed together.

    Args:
        device: the GPU that copies; for a CPU, as in tests, nothing is locked.
        purpose: what the memory is for, in the plural, for the error message.
        instead: what the user could do where the host cannot lock as much.

    Attributes:
        size_bytes: allocated so far.
    """

    def __init__(self, device: torch.device, purpose: str, instead: str) -> None:
        self.size_bytes = 0
        self._device, self._purpose, self._instead = device, purpose, instead
        self._blocks: list[Tensor] = []
        self._finalizer = weakref.finalize(self, _unlock, self._blocks, device)
        self._finalizer.atexit = False  # the process gives back everything

    def block(self, size_bytes: int) -> Tensor:
        """One more block, uint8, of at least one byte.

        Raises:
            InfeasibleError: the host cannot lock as much.
        """
        size_bytes = max(size_bytes, 1)
        try:
            block = torch.empty(size_bytes, dtype=torch.uint8)
            if self._device.type == "cuda":
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size_bytes, 0)))
        except RuntimeError as error:  # the allocator's, or cudaHostRegister's
            raise InfeasibleError(
                f"{self._purpose} need {format_bytes(self.size_bytes + size_bytes)} of page-locked host memory, of which there is "
                f"{format_bytes(self.size_bytes)} ({str(error).splitlines()[0]}): free host memory, raise the limit on locked memory (ulimit -l), or "
                f"{self._instead}",
                budget_bytes=self.size_bytes,
                minimum_bytes=self.size_bytes + size_bytes,
            ) from error
        self._blocks.append(block)
        self.size_bytes += size_bytes
        return block

    def close(self) -> None:
        """Unlock and free all blocks; no copy of the owner's may be in progress."""
        self._finalizer()
        self.size_bytes = 0


def _unlock(blocks: list[Tensor], device: torch.device) -> None:
    if device.type == "cuda" and blocks:
        torch.cuda.synchronize(device)  # an owner that is collected has not waited for its copies
        for block in blocks:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
    blocks.clear()


def empty_on_host(like: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of the host's memory for what belongs to `like`: pinned where that lies on a GPU, and fake where that is fake.

    Torch's own allocator makes it: these are tensors of an optimizer's state, which live and die one by one.
    """
    pinned = like.is_cuda and not isinstance(like, FakeTensor)
    return like.new_empty((length,), dtype=dtype, device="cpu", pin_memory=pinned)
