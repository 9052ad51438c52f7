"""What ranks decide together, since a rank that goes another way alone leaves the others waiting in a collective for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NoReturn, TypeVar, get_args

import torch
import torch.distributed as dist

from memfit.errors import BatchError, EngineError
from memfit.sharding.process_exit import wait_for_senders_at_exit

Told = TypeVar("Told")
# What all ranks have to call, where each has a part of the model.
Call = Literal["engine.state_dict()", "engine.evaluating()"]
# Messages of a few numbers in each step: of data parallelism and ZeRO what the batch of each rank counts for, and its loss; of a pipeline whether shapes are
# others than before, and the loss.
IN_A_STEP: Final = 2
OF_SHARDS: Final = 1  # more under ZeRO 2 and 3: whether a rank has used no parameter that others may have used


class Agreement:
    """Small collectives among the ranks of a group; every rank has to call the same ones in the same order.

    Args:
        group: of all ranks.
        device: on which the ranks compute. Messages lie there only where the group sends nothing from the host's memory: on a GPU they would take bytes that
            are in no prediction, and wait for its kernels.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        wait_for_senders_at_exit()
        host = torch.device("cpu")
        device = host if host in group._device_types else device
        self._group = group
        self.rank = group.rank()
        # Made once: a backend's own thread may hold what it sends a little longer than the step does.
        self._word = torch.zeros((), dtype=torch.int64, device=device)
        self._value = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = torch.zeros((group.size(), 2), dtype=torch.int64, device=device)
        self._losses = torch.zeros((group.size(), 2), dtype=torch.float64, device=device)

    @property
    def real(self) -> bool:
        """Whether there are others; in a capture there are none."""
        return dist.get_backend(self._group) != dist.Backend.FAKE

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

    def counts(self, micro_batches: int, counted: int) -> list[list[int]]:
        """How many micro-batches every rank has, and what they count for, by rank; on all ranks, as the first message of a step.

        Raises:
            BatchError: a rank has refused its batch (`refuse`).
            EngineError: a rank calls something else (`call`).
        """
        found = self._of_ranks(self._counts, (micro_batches, counted))
        if [0, 0] in found:
            self._raise_refusal(self.of_all(""))
        one = next((rank for rank, (number, _) in enumerate(found) if not number), None)
        if one is not None and any(each != found[one] for each in found):
            does = ["takes a step" if number else f"calls {get_args(Call)[call - 1]}" for number, call in found]
            other = next(rank for rank, each in enumerate(found) if each != found[one])
            raise EngineError(
                f"rank {one} {does[one]} and rank {other} {does[other]}, and each has only a part of the model, so neither can go on alone: have all ranks "
                'make this call (take it out of "if rank == 0:"), and do on rank 0 alone what is done with its result'
            )
        return found

    def call(self, call: Call) -> None:
        """Begin what all ranks have to call as a step begins (with no micro-batches), so that a rank that does something else is told, as this one is.

        Raises:
            BatchError, EngineError: as for `counts`.
        """
        if self.real:
            self.counts(0, 1 + get_args(Call).index(call))

    def refuse(self, error: BatchError) -> None:
        """This rank takes no step, for this reason, and so no rank does: in place of `counts`, which raises on the others."""
        self._of_ranks(self._counts, (0, 0))
        self.of_all(str(error))

    @staticmethod
    def _raise_refusal(reasons: Sequence[str]) -> NoReturn:
        """On the ranks that would have taken the step.

        Args:
            reasons: by rank, "" where it has none.
        """
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise BatchError(f"rank {rank} refuses its batch, and no rank takes the step: {reasons[rank]}")

    def losses(self, own: float, *, finite: bool) -> tuple[float, int | None]:
        """The mean of all ranks' losses, and the lowest rank that says its own is not finite; None where none does."""
        told = self._of_ranks(self._losses, (own if finite else 0.0, float(not finite)))
        return sum(loss for loss, _ in told) / len(told), next(
            (rank for rank, (_, bad) in enumerate(told) if bad), None
        )

    def _of_ranks(self, table: torch.Tensor, own: Sequence[float]) -> list[Any]:
        """The rows of all ranks, of which each knows its own: their sum where the others' are zero takes one message."""
        table.zero_()
        table[self.rank].copy_(torch.tensor(own, dtype=table.dtype))
        self._all_reduce(table)
        return table.tolist()

    def _all_reduce(self, words: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        with self._waiting():
            dist.all_reduce(words, op=how, group=self._group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around a message of all ranks: where it fails, what torch says of sockets is put into words."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
            raise EngineError(
                f"another rank has ended, or has kept rank {self.rank} waiting for too long ({reason}): see what it says; where it says nothing, let all ranks "
                "take as many steps (DistributedSampler or drop_last=True deals out as many batches to each), and call engine.state_dict() on all of them"
            ) from error

    def told(self, value: Told | None) -> Told:
        """Rank 0's value, on all ranks; plain data that pickle can copy."""
        told = [value if self.rank == 0 else None]
        with self._waiting():
            dist.broadcast_object_list(told, src=0, group=self._group)
        found: Told = told[0]  # type: ignore[assignment]  # rank 0 has one
        return found

    def of_all(self, value: Told) -> list[Told]:
        """Every rank's value, on all ranks, by rank."""
        found: list[Any] = [None] * self._group.size()
        with self._waiting():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def first_error(self, error: Exception | None) -> tuple[int, str] | None:
        """The lowest rank that has an error, and its text; None where none has one."""
        texts = self.of_all(None if error is None else str(error))
        return next(((rank, text) for rank, text in enumerate(texts) if text is not None), None)

    def first(self, *, concerned: bool) -> int | None:
        """The lowest rank that is concerned; None where none is."""
        found = -self._reduced(-self.rank if concerned else -self._group.size(), dist.ReduceOp.MAX)
        return None if found == self._group.size() else found

    def said_by_all(self, own: Sequence[bool]) -> list[bool]:
        """Which of these every rank says, of as many on each; where none says any, that takes one message. In a capture all say the same."""
        if not self.real:
            return list(own)
        if not self.largest(int(any(own))):
            return [False] * len(own)
        said = torch.tensor(own, dtype=torch.uint8, device=self._word.device)
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._group)
        return [bool(each) for each in said.tolist()]

    def _reduced(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        self._word.fill_(number)
        self._all_reduce(self._word, how)
        return int(self._word.item())
