"""What is known of one failure, whichever kind of file told it. A value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GRAPHICS: Final = ("cuda", "hip")  # devices whose caching allocator is CUDA's
CONTEXT_BYTES: Final = (
    512 << 20
)  # what CUDA and its libraries take beside the allocator when nobody says: a few hundred MiB


@dataclass(frozen=True, slots=True)
class Holder:
    """Live allocations that one place in the code has made.

    Attributes:
        where: "file.py:12 in name"; "" when no stack was recorded.
        bytes: of all of them, as the allocator counts.
        blocks: how many.
        stage: in which part of the step the place ran; "" when the stack does not say.
    """

    where: str
    bytes: int
    blocks: int
    stage: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. Numbers of bytes are None where the file does not tell.

    Attributes:
        source: "message" or "snapshot".
        device: such as "cuda:0" or "mps"; "host" for the memory of the computer.
        kind: "allocation" (one was refused), "killed" (the system ended the process), "library" (cuBLAS or cuDNN got no memory), or "none" (a snapshot
            without a failure).
        evidence: the words of the file that say so.
        wanted_bytes: what was asked for.
        total_bytes: of the device.
        free_bytes: of it, as the driver says.
        allocated_bytes: in tensors.
        unallocated_bytes: held by PyTorch's allocator, in no tensor.
        private_bytes: of `allocated_bytes`, in pools of their own, as those of CUDA graphs.
        process_bytes: of this process in all, its context and libraries included.
        other_bytes: of other processes.
        allowed_bytes: a limit set below the device's size.
        largest_gap_bytes: the largest piece of `unallocated_bytes` that is in one.
        expandable: whether the allocator's segments can grow, which keeps them from falling to pieces.
        freed_after_bytes: freed between the failure and the snapshot, so no longer seen in it.
        stage: the part of the step: "forward", "backward", "recomputing in backward", "optimizer", "moving the model", "pinning memory"; "" when unknown.
        where: the innermost line that is not a library's: "train.py:31 in step".
        holders: who holds most, the largest first.
        times: how often the file tells of such a failure.
    """

    source: str
    device: str = ""
    kind: str = "allocation"
    evidence: str = ""
    wanted_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    private_bytes: int | None = None
    process_bytes: int | None = None
    other_bytes: int | None = None
    allowed_bytes: int | None = None
    largest_gap_bytes: int | None = None
    expandable: bool | None = None
    freed_after_bytes: int = 0
    stage: str = ""
    where: str = ""
    holders: tuple[Holder, ...] = ()
    times: int = 1

    @property
    def reserved_bytes(self) -> int | None:
        """What PyTorch's allocator holds."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def beside_bytes(self) -> int | None:
        """What the process holds beside PyTorch's allocator: the CUDA context, libraries."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def in_pieces(self) -> bool | None:
        """Whether there were bytes enough, only not in one piece; None when that cannot be told."""
        if self.wanted_bytes is None or self.free_bytes is None or self.unallocated_bytes is None:
            return None
        if not self.device.startswith(GRAPHICS) or self.wanted_bytes <= self.free_bytes:
            return False
        return self.wanted_bytes <= self.free_bytes + self.unallocated_bytes
