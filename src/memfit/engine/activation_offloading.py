"""The arenas of an engine below its device, and who has them: one followed forward at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from memfit.storage.arenas import Arena, Copy, DiskArena, HostArena
from memfit.storage.staging import StagedDiskArena
from memfit.values.script import TIERS

Makers = Mapping[str, Callable[[int], Arena]]
"""Of each tier by its name, the nearest first: what makes an arena of so many bytes there."""


def tiers_below(device: torch.device, folder: str | Path | None = None) -> Makers:
    """The tiers below a device. All that is below a CPU is its disk, whatever tiers a plan knows that was made for a GPU.

    Args:
        device: the engine's.
        folder: on the disk to use; None for the one that is set.
    """
    if device.type == "cuda":
        return {
            "host": lambda size: HostArena(size, device),
            "disk": lambda size: StagedDiskArena(size, device, folder),
        }
    return dict.fromkeys(TIERS, lambda size: DiskArena(size, folder))


class LowerTiers:
    """The arenas of an engine, one on each tier that is used, lent to one followed forward at a time, until its backward is done.

    Args:
        makers: of the tiers below the engine's device.
    """

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self.arenas: dict[str, Arena] = {}
        self._borrower: weakref.ref[object] | None = None

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Have space for so many bytes on each tier.

        Raises:
            InfeasibleError, EngineError: there is none; what was reserved before is still there.
        """
        larger: dict[str, Arena] = {}
        try:
            for tier, size in sizes.items():
                if tier not in self.arenas or self.arenas[tier].bytes < size:
                    larger[tier] = self._makers[tier](size)
        except BaseException:
            for arena in larger.values():
                arena.close()
            raise
        for tier, arena in larger.items():
            if tier in self.arenas:
                self.arenas[tier].close()
            self.arenas[tier] = arena
        if larger:
            self._borrower = None

    def lend(self, borrower: object) -> Mapping[str, Arena] | None:
        """The arenas, until `give_back` or the end of the borrower; None while another one has them."""
        if not self.arenas or (self._borrower is not None and self._borrower() is not None):
            return None
        self._settle()
        tiers = weakref.ref(self)

        def settle(_: object) -> None:
            if (left := tiers()) is not None:
                left._settle()

        self._borrower = weakref.ref(borrower, settle)
        return dict(self.arenas)

    def give_back(self, borrower: object) -> None:
        """What the borrower left there is not needed any more."""
        if self._borrower is not None and self._borrower() is borrower:
            self._borrower = None
            self._settle()

    def _settle(self) -> None:
        for arena in self.arenas.values():
            arena.settle()

    def close(self) -> None:
        """Give the space back."""
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        self._borrower = None


__all__ = ["Arena", "Copy", "LowerTiers", "Makers", "tiers_below"]
