"""Storages that their owner resizes: whole parameters of `fully_shard`, which take bytes while they are gathered and none otherwise.

The tensor stays the same throughout, so autograd and recipes refer to one storage, of no bytes, that is always there (its *handle*). The bytes are storages
of their own, one for each time that they are there (its *lives*), which nothing reads: they are born and die when the step resizes, whatever a plan does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from memfit.capture.lifetimes import Lifetimes, StorageLife
from memfit.values.trace import BEFORE_STEP, Category, Operation, Phase, Save

Spans = Sequence[tuple[int, int]]
# What `fully_shard` copies gathered parameters with to where the model reads them.
GATHERS: Final = frozenset({"fsdp.split_with_sizes_copy.default"})


@dataclass(slots=True)
class _Watched:
    storage: torch.UntypedStorage
    handle: int
    module: str
    lives: list[StorageLife] = field(default_factory=list)

    @property
    def alive(self) -> StorageLife | None:
        """The life that has not ended."""
        return self.lives[-1] if self.lives and self.lives[-1].death is None else None


class Resized:
    """Looks at each event which of the watched storages have been resized. No operation shows it: `UntypedStorage.resize_` is not dispatched."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._watched: list[_Watched] = []

    def watch(self, tensor: torch.Tensor, module: str = "") -> None:
        """From now on."""
        handle = self._lifetimes.add(tensor, Category.PARAMETER, module, BEFORE_STEP)
        self._lifetimes.storages[handle].bytes = 0
        self._watched.append(_Watched(tensor.untyped_storage(), handle, module))
        self.look(BEFORE_STEP)

    def look(self, event: int) -> None:
        """The event is about to begin: what happened to sizes since the one before it."""
        for each in self._watched:
            size, life = each.storage.nbytes(), each.alive
            if life is not None and size != life.bytes:
                life.death = self._lifetimes.now
                life = None
            if life is None and size:
                each.lives.append(self._lifetimes.add_bytes(size, Category.PARAMETER, each.module, event))

    def spans(self, end: int) -> dict[int, Spans]:
        """Of each handle, the events between which it takes bytes.

        Args:
            end: number of events.
        """
        return {
            each.handle: [(life.birth, end if life.death is None else life.death) for life in each.lives]
            for each in self._watched
        }


def rerunnable_where_gathered(
    operations: Sequence[Operation], events: Sequence[int], saves: Sequence[Save], spans: Mapping[int, Spans]
) -> tuple[Operation, ...]:
    """The operations, of which those may not run again whose results are wanted while a parameter that their recomputation reads is not gathered.

    What one block hands to the next is such a result where blocks are resharded after forward (ZeRO 3). It is kept, and within a block all may be dropped, as
    with activation checkpointing of each block. So no plan gathers anything that the step does not gather by itself.

    Gathering for backward writes into a storage what gathering for forward has written, so it counts as no write: recomputations read the same values.

    Args:
        operations, events, saves: of the step.
        spans: of each handle, the events between which it takes bytes.
    """
    if not spans:
        return tuple(operations)
    needs: dict[int, frozenset[int]] = {}  # of a storage, the handles that its recomputation reads
    maker: dict[int, int] = {}
    kept: set[int] = set()

    def there(handle: int, event: int) -> bool:
        return any(birth <= event <= death for birth, death in spans[handle])

    def keep_unless_there(storage: int, event: int) -> None:
        if not all(there(handle, event) for handle in needs.get(storage, ())):
            kept.add(maker[storage])
            needs[storage] = frozenset()

    # What forward reads at an event, backward may want again then; so handles that were there together in forward are together in backward.
    for event, code in enumerate(events):
        if code < 0 or operations[code].phase is not Phase.FORWARD:
            continue
        operation = operations[code]
        for storage in operation.reads:
            keep_unless_there(storage, event)
        wanted = frozenset(s for s in operation.reads if s in spans)
        wanted = wanted.union(*(needs.get(s, frozenset()) for s in operation.reads))
        for storage in (*operation.makes, *operation.writes):
            maker.setdefault(storage, code)
            needs[storage] = needs.get(storage, frozenset()) | wanted if operation.rerunnable else frozenset()
    for save in saves:
        for event, _ in save.unpacks:
            keep_unless_there(save.storage, event)
    return tuple(
        replace(
            o,
            rerunnable=o.rerunnable and index not in kept,
            writes=tuple(s for s in o.writes if s not in spans) if o.name in GATHERS else o.writes,
        )
        for index, o in enumerate(operations)
    )
