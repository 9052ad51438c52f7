"""Which storage is which, when each is made and when it dies: storages, not tensors, as views share one allocation.

A storage is known by its address while it lives; a weak reference tells when it dies, and then the address may be another's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memfit import dispatch
from memfit.step.absent import Absent
from memfit.values.trace import BEFORE_STEP, Category


@dataclass(slots=True)
class StorageLife:
    """One storage as far as it is known; `values.trace.Storage` is made of it. `death` is None while it lives."""

    bytes: int
    category: Category
    module: str
    birth: int
    death: int | None = None


class Lifetimes:
    """All storages of a step, by number.

    Args:
        device: type of the device whose bytes count; None to count all.

    Attributes:
        storages: in the order in which they were first seen.
        now: the last event that has begun; what dies now dies after it.
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self.storages: list[StorageLife] = []
        self.now = BEFORE_STEP
        self._ids: dict[int, int] = {}
        # The same the other way round: a storage handed to backward has a key of its own.
        self._keys: dict[int, set[int]] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def id_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the tensor's storage; None for one never seen before."""
        return self._ids.get(dispatch.storage_key(tensor))

    def add(self, tensor: torch.Tensor, category: Category, module: str, birth: int) -> int:
        """Follow the tensor's storage from now on, under a number of its own. One on another device than the step's takes no bytes, nor does an absent one."""
        storage = tensor.untyped_storage()
        sid = len(self.storages)
        # Absent ones say that they are on the device; autograd is given some to save, by checkpoints of the user's around earlier stages.
        elsewhere = isinstance(tensor, Absent) or (self._device is not None and tensor.device.type != self._device)
        self.storages.append(StorageLife(0 if elsewhere else storage.nbytes(), category, module, birth))
        self._follow(storage, sid)
        return sid

    def add_bytes(self, size: int, category: Category, module: str, birth: int) -> StorageLife:
        """A storage that no tensor shows; whoever adds it says when it dies."""
        self.storages.append(StorageLife(size, category, module, birth))
        return self.storages[-1]

    def move(self, sid: int, tensor: torch.Tensor) -> None:
        """From now on this number is the tensor's storage; the death of what it was counts no longer."""
        for key in list(self._keys.get(sid, ())):
            self._forget(key, sid)
        self._follow(tensor.untyped_storage(), sid)

    def lend(self, sid: int, tensor: torch.Tensor, released: Callable[[int], None]) -> None:
        """Until it dies the tensor's storage goes under this number as well; then `released` is called with the event."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._know(key, sid)

        def died(_: object) -> None:
            self._forget(key, sid)
            released(self.now)

        self._references[key] = weakref.ref(storage, died)

    def _follow(self, storage: torch.UntypedStorage, sid: int) -> None:
        key = int(storage._cdata)
        self._know(key, sid)

        def died(_: object, key: int = key, sid: int = sid) -> None:
            self._forget(key, sid)
            self.storages[sid].death = self.now

        self._references[key] = weakref.ref(storage, died)

    def _know(self, key: int, sid: int) -> None:
        self._ids[key] = sid
        self._keys.setdefault(sid, set()).add(key)

    def _forget(self, key: int, sid: int) -> None:
        self._ids.pop(key, None)
        self._references.pop(key, None)
        keys = self._keys.get(sid, set())
        keys.discard(key)
        if not keys:
            self._keys.pop(sid, None)
