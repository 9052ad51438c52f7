"""The state of autocast, to be replayed where the same operations run again later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class AutocastState:
    """What autocast does for the CPU and one device.

    Attributes:
        regions: (device type, dtype) where it is on.
        cache: whether casts of weights are kept until it ends.
    """

    regions: tuple[tuple[str, torch.dtype], ...]
    cache: bool

    @classmethod
    def present(cls, device: torch.device) -> Self:
        """As it is here and now."""
        kinds = dict.fromkeys(("cpu", device.type))
        on = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
        return cls(on, torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self, *, cache: bool | None = None) -> Iterator[None]:
        """The same inside the block, where autocast may be off. `cache` overrides whether casts of weights are kept."""
        with ExitStack() as stack:
            for kind, dtype in self.regions:
                keep = self.cache if cache is None else cache
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=keep))
            yield
