"""Writes into tensors of forward that no operation shows: by a Triton kernel, an extension, numpy. A storage's bytes tell, while real tensors are recorded.

What is dropped is made again by the operations that were seen, so such a write would be missing in it. A tensor that was made empty and filled so is kept
instead (`rerunnable` of the operation that made it); a write into one that had values already is refused, since others may have read it before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from memfit.errors import InputError
from memfit.storage.raw_bytes import flat_storage
from memfit.values.trace import Operation

if TYPE_CHECKING:
    from torch._ops import OpOverload

EMPTY: Final = ("aten::empty", "aten::new_empty")  # beginnings of the names of what makes a tensor without values
_PATTERN: Final = 0x5A  # put into what is made empty, whose bytes may be those of the forward before by chance
_WORD: Final = 8
_PIECE: Final = 1 << 17  # words that are added up at a time, so that what that takes stays in the caches
_FAR: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, 2^64 over the golden ratio: tells the pieces apart


class UnseenWrites:
    """The bytes of storages as the last operation left them, as a sum of each."""

    def __init__(self) -> None:
        self._filled: set[int] = set()  # storages that were made empty and filled by something unseen
        self._sums: dict[int, int] = {}
        self._empty: set[int] = set()
        self._factors: dict[torch.device, torch.Tensor] = {}

    def made(self, func: OpOverload, tensor: torch.Tensor, storage: int) -> None:
        """An operation of forward has made this storage."""
        if isinstance(tensor, FakeTensor) or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
            return  # has no bytes
        if func._schema.name.startswith(EMPTY):
            with _disable_current_modes():
                flat_storage(tensor.untyped_storage()).fill_(_PATTERN)
            self._empty.add(storage)
        self._sums[storage] = self._sum(tensor)

    def wrote(self, tensors: Iterable[torch.Tensor], storages: Iterable[int], written: Container[int]) -> None:
        """An operation of forward has written into some of the storages of its arguments."""
        for tensor, storage in zip(tensors, storages, strict=True):
            if storage in written and storage in self._sums:
                self._empty.discard(storage)
                self._sums[storage] = self._sum(tensor)

    def forget(self, storages: Iterable[int]) -> None:
        """Something else than forward has written into these storages: what is in them is no longer looked at."""
        for storage in storages:
            self._sums.pop(storage, None)
            self._empty.discard(storage)

    def read(self, tensor: torch.Tensor, storage: int, module: str) -> None:
        """An operation of forward is about to read it, or autograd saves it.

        Raises:
            InputError: something has written into it since.
        """
        before = self._sums.get(storage)
        if before is None:
            return
        now = self._sum(tensor)
        if now == before:
            return
        if storage not in self._empty:
            where = f"a tensor in {module}" if module else "a tensor in forward"
            raise InputError(
                f"something writes into {where} where no operation of PyTorch says so (a Triton or CUDA kernel, numpy, an extension), so what memfit runs "
                "again would not be what ran: make it an operation (torch.library.custom_op, with mutates_args), or let it write into a new tensor "
                "(torch.empty_like) in place of one that has values"
            )
        self._empty.discard(storage)
        self._sums[storage] = now
        self._filled.add(storage)

    def kept(self, operations: Sequence[Operation]) -> Sequence[Operation]:
        """The operations, of which none that made what was filled unseen may run again."""
        if not self._filled:
            return operations
        return [
            replace(each, rerunnable=each.rerunnable and self._filled.isdisjoint(each.makes)) for each in operations
        ]

    def _sum(self, tensor: torch.Tensor) -> int:
        """Of all bytes, by their places, modulo 2^64."""
        with _disable_current_modes(), torch.no_grad():
            bytes_ = flat_storage(tensor.untyped_storage())
            whole = bytes_.numel() // _WORD * _WORD
            words, rest = bytes_[:whole].view(torch.int64), bytes_[whole:]
            factors = self._factors.get(bytes_.device)
            if factors is None:
                factors = self._factors[bytes_.device] = torch.arange(1, 2 * _PIECE, 2, device=bytes_.device)
            total = rest.sum()
            for piece in words.split(_PIECE):
                total = total * _FAR + (piece * factors[: len(piece)]).sum()
            return int(total)
