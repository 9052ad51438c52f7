"""What ranks decide together, since a rank that goes another way alone leaves the others waiting in a collective for ever."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


class Agreement:
    """Small collectives among the ranks of a group; every rank has to call the same ones in the same order.

    Args:
        group: of all ranks.
        device: where the group's backend wants tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.rank = group.rank()
        # Made once: a backend's own thread may hold what it sends a little longer than the step does.
        self._word = torch.zeros((), dtype=torch.int64, device=device)
        self._value = torch.zeros((), dtype=torch.float64, device=device)

    def total(self, count: int) -> int:
        """The sum of all ranks' counts."""
        return self._reduced(count, dist.ReduceOp.SUM)

    def largest(self, count: int) -> int:
        """The largest of all ranks' counts."""
        return self._reduced(count, dist.ReduceOp.MAX)

    def largest_of(self, values: Iterable[torch.Tensor]) -> None:
        """Each becomes the largest that a rank has."""
        for value in values:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)

    def mean(self, value: float) -> float:
        """Of all ranks' values."""
        self._value.fill_(value)
        dist.all_reduce(self._value, group=self._group)
        return float(self._value.item()) / self._group.size()

    def first(self, *, concerned: bool) -> int | None:
        """The lowest rank that is concerned; None where none is."""
        found = -self._reduced(-self.rank if concerned else -self._group.size(), dist.ReduceOp.MAX)
        return None if found == self._group.size() else found

    def _reduced(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        self._word.fill_(number)
        dist.all_reduce(self._word, op=how, group=self._group)
        return int(self._word.item())
