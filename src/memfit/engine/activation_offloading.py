"""Activation offloading: the space that an engine has on lower tiers (arenas), used by one followed forward at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from memfit.storage.arenas import Arena, Copy, DiskArena, HostArena
from memfit.storage.staging import StagedDiskArena
from memfit.values.script import TIERS

Makers = Mapping[str, Callable[[int], Arena]]
"""For each tier by its name, the nearest first: a function that allocates an arena of so many bytes there."""


def arena_makers(device: torch.device, folder: str | Path | None = None) -> Makers:
    """How to allocate arenas on the lower tiers of a device. For a CPU every tier is its disk, also under a plan that was made for a GPU.

    Args:
        device: the engine's.
        folder: to offload to on disk; None for the default (`MEMFIT_OFFLOAD_DIR`).
    """
    if device.type == "cuda":
        return {
            "host": lambda size: HostArena(size, device),
            "disk": lambda size: StagedDiskArena(size, device, folder),
        }
    return dict.fromkeys(TIERS, lambda size: DiskArena(size, folder))


class LowerTiers:
    """The arenas of an engine, one on each lower tier in use. One followed forward at a time borrows them, until its backward is done.

    Args:
        makers: how to allocate an arena on each tier.
    """

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self.arenas: dict[str, Arena] = {}
        self._borrower: weakref.ref[object] | None = None

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Reserve at least so many bytes on each tier.

        Raises:
            InfeasibleError, EngineError: a tier does not have the space; earlier reservations stay.
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
        """The arenas, until `give_back` or until the borrower is collected; None while another borrower has them."""
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
        """End the loan: what the borrower wrote is not needed any more."""
        if self._borrower is not None and self._borrower() is borrower:
            self._borrower = None
            self._settle()

    def _settle(self) -> None:
        for arena in self.arenas.values():
            arena.settle()

    def close(self) -> None:
        """Free the space."""
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        self._borrower = None


__all__ = ["Arena", "Copy", "LowerTiers", "Makers", "arena_makers"]
