"""The storages of the plan that are kept between forward and backward: on the device, being copied to a lower tier or back, or on that tier alone.

A copy to a lower tier begins after the last operation that writes a storage, and the engine waits for it where the script says; so too for the copy back.
Thus the bytes held depend on the script alone, not on the speed of the copies (`activation_offloading`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from memfit.engine.activation_offloading import LowerTiers
from memfit.engine.compiled import CompiledScript
from memfit.engine.geometry import WriteCheck
from memfit.errors import EngineError
from memfit.storage.arenas import Arena, Copy

FREED: Final = (
    "backward asked again for a tensor that was already freed. For a second backward through the same graph use "
    "`with engine.forward(retain_graph=True)`"
)


class KeptStorages:
    """The kept storages of one followed forward, until its backward is done.

    Args:
        compiled: the script.
        lower_tiers: where to offload to, for a script that does.

    Attributes:
        live: kept on the device, by their number in the plan.
        made: those that forward has made, kept or not. Weak: an address may be used again once a storage is gone, the storage itself may not.
        offloaded: storages copied to a lower tier: their bytes and device.
        arenas: space on the lower tiers, while it is borrowed; None where the script needs none or another forward has borrowed it.
    """

    def __init__(self, compiled: CompiledScript, lower_tiers: LowerTiers | None) -> None:
        self._script = compiled.script
        self.live: dict[int, torch.UntypedStorage] = {}
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.offloaded: dict[int, tuple[int, torch.device]] = {}
        self._number_at: dict[int, int] = {}  # by address
        self._checks: dict[int, WriteCheck] = {}
        self._written: set[int] = set()  # since writes were last noted
        self._leaving: dict[int, tuple[torch.UntypedStorage, Copy]] = {}
        self._returning: dict[int, Copy] = {}
        self.arenas: Mapping[str, Arena] | None = None
        self._lower_tiers: LowerTiers | None = None
        if compiled.offloads:
            assert lower_tiers is not None, "an engine whose plan offloads has tiers to offload to"
            self._lower_tiers, self.arenas = lower_tiers, lower_tiers.lend(self)

    def follow(self, compiled: CompiledScript) -> None:
        """Go by the script of another branch, in which what was made so far has the same numbers."""
        self._script = compiled.script

    # -- on the device -------------------------------------------------------------------------------------------------------

    def know(self, number: int, storage: torch.UntypedStorage) -> None:
        """Note a storage of the plan that forward has made."""
        self.made[number] = weakref.ref(storage)
        self._number_at[storage._cdata] = number

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, -1 where it is none of the plan."""
        storage = tensor.untyped_storage()
        number = self._number_at.get(storage._cdata, -1)
        return number if number >= 0 and self.made[number]() is storage else -1

    def keep(self, number: int, tensor: torch.Tensor) -> None:
        """Keep what forward has made, and detect writes into it that the plan does not have."""
        self.live[number] = tensor.untyped_storage()
        if not tensor.is_inference():  # PyTorch forbids writes into these where gradients are wanted.
            self._checks[number] = WriteCheck(tensor)
            self._written.add(number)

    def written(self, numbers: Iterable[int]) -> None:
        """An operation of the plan writes into these storages. It is counted as a write only when the operation is through."""
        self._written.update(numbers)

    def not_followed(self) -> None:
        """What runs from here on is not followed: writes into kept storages are errors."""
        for number in self._written:
            if number in self._checks:
                self._checks[number].begin()
        self._written.clear()

    def forward_ends(self) -> None:
        """Check for writes to kept storages from here on, and wait for all copies to lower tiers."""
        self.not_followed()
        for number in list(self._leaving):  # after a divergence
            self.finish_leaving(number)

    def put(self, number: int, storage: torch.UntypedStorage) -> None:
        """Keep another storage under this number: a copy, or a recomputed one."""
        self.live[number] = storage
        self._checks.pop(number, None)

    def release(self, number: int) -> None:
        """Keep a storage no longer."""
        self.finish_returning(number)
        self.live.pop(number, None)
        self._checks.pop(number, None)

    def read(self, number: int) -> torch.UntypedStorage:
        """What is kept under this number, complete.

        Raises:
            RuntimeError: it has been written into since forward.
        """
        self.finish_returning(number)
        if number in self._checks:
            self._checks[number].check()
        return self.live[number]

    def preserve(self, storage: torch.UntypedStorage) -> None:
        """Keep what is in a storage now: it is about to be written, and not by the plan."""
        for number in [n for n, (leaving, _) in self._leaving.items() if leaving is storage]:
            self.finish_leaving(number)
        for number in [n for n, kept in self.live.items() if kept is storage]:
            self.put(number, storage.clone())

    # -- on a lower tier -----------------------------------------------------------------------------------------------------

    def begin_leaving(self, number: int) -> None:
        """Begin to copy a storage to its tier; where it is larger than the space planned there, keep it on the device."""
        place = self._script.swaps[number]
        storage = self.made[number]()
        assert storage is not None, "the operation that has just run wrote it"
        assert self.arenas is not None
        arena = self.arenas[place.tier]
        if number not in self._script.held:
            self.live.pop(number, None)
            self._checks.pop(number, None)
        if 0 < storage.nbytes() <= place.bytes and storage.device.type == arena.device_type:
            self.offloaded[number] = storage.nbytes(), storage.device
            self._leaving[number] = storage, arena.copy_down(storage, place.offset)
        else:
            self.put(number, storage)

    def finish_leaving(self, number: int) -> None:
        """Wait for a copy to a lower tier, and release its storage on the device."""
        if number in self._leaving:
            self._leaving[number][1].wait()
            del self._leaving[number]

    def begin_returning(self, number: int) -> None:
        """Allocate an offloaded storage on the device again, and begin to copy its bytes back.

        Raises:
            EngineError: the space on the lower tier was returned already.
        """
        if number not in self.offloaded:
            return  # it was kept
        if self.arenas is None:
            raise EngineError(FREED)
        self.finish_leaving(number)
        self.finish_returning(number)
        size, device = self.offloaded[number]
        storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self.put(number, storage)
        place = self._script.swaps[number]
        self._returning[number] = self.arenas[place.tier].copy_up(storage, place.offset)

    def finish_returning(self, number: int) -> None:
        """Wait for the copy back of a storage."""
        copy = self._returning.pop(number, None)
        if copy is not None:
            copy.wait()

    def end(self) -> None:
        """Backward is done: return the arenas."""
        if self._lower_tiers is not None:
            self._lower_tiers.give_back(self)
            self.arenas = None
