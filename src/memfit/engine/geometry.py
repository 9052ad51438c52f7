"""Tensors remembered as a storage and a geometry (dtype, shape, strides, offset), never as tensors of the graph.

What autograd holds in place of a saved tensor, and what a recomputation reads, must not keep a graph node alive: a node would come to own itself.
Autograd's check for writes between forward and backward is lost that way, so it is made here, by the same version counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from memfit.engine.tape import Tape


class Argument:
    """A tensor argument of an operation that may run again: where its bytes are, and how they are viewed."""

    __slots__ = ("base", "conj", "dtype", "neg", "offset", "place", "shape", "storage", "stride", "version")

    def __init__(self, tensor: torch.Tensor, place: int) -> None:
        self.place = place  # number of a storage of the plan, or -1
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.storage: torch.UntypedStorage | None = None
        self.base: torch.Tensor | None = None
        self.version = 0
        if place < 0:
            self.storage = tensor.untyped_storage()
            base = tensor._base if tensor._is_view() else tensor
            if base is not None and base.is_leaf and not base.is_inference():  # nobody counts writes into these
                self.base, self.version = base, base._version


class Handle:
    """What autograd holds in place of a saved tensor whose storage the engine drops or keeps by itself."""

    __slots__ = ("conj", "dtype", "neg", "offset", "save", "shape", "stride", "tape")

    def __init__(self, tape: Tape, save: int, tensor: torch.Tensor) -> None:
        self.tape = tape
        self.save = save
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()


def view_as(geometry: Argument | Handle, storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of this geometry."""
    tensor = torch.empty(0, dtype=geometry.dtype, device=storage.device).set_(
        storage, geometry.offset, geometry.shape, geometry.stride
    )
    # Lazy conjugation and negation are bits of the tensor; the bytes know nothing of them.
    if geometry.conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if geometry.neg else tensor


class WriteCheck:
    """A storage kept since forward, and how often it has been written, as autograd counts it.

    Below autograd a detached tensor has a count of its own; with the key above let in again it shares that of the tensor that the user has.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_WRITES)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, False)
        try:
            with torch._C._DisableTorchDispatch():
                self.alias = tensor.detach()
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, excluded)
        self.version = -1

    def begin(self) -> None:
        """Note the number of writes; from here on every write is an error, until it is noted anew."""
        self.version = self.alias._version

    def check(self) -> None:
        """Raise RuntimeError where the storage has been written into since `begin`."""
        if self.version >= 0 and self.alias._version != self.version:
            raise written_after(self.alias, self.version)


_COUNTS_WRITES: Final = torch._C.DispatchKey.ADInplaceOrView


def written_after(tensor: torch.Tensor, version: int) -> RuntimeError:
    """What to raise where a tensor is not at the version that it had when it was noted."""
    return RuntimeError(
        f"a tensor of shape {tuple(tensor.shape)} needed to rebuild what backward reads was changed in place "
        f"after forward (version {tensor._version}, expected {version}): write into a copy of it (clone)"
    )
