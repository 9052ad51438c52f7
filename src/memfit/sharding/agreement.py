"""What ranks decide together, since a rank that goes another way alone leaves the others waiting in a collective for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar, get_args

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
# Ranks up to which each sends its numbers to every other one. The last one to come waits less than half as long as in an all-reduce, which gloo runs in a
# thread of its own (docs/design/log.md). Of more ranks an all-reduce takes fewer messages.
FEW_RANKS: Final = 8
_FAILED: Final = -1  # in place of what a rank lacks
_EVERYTHING: Final = -2  # likewise
_MOST: Final = 3  # numbers that a rank tells at once
_TAG: Final = 7021  # of these messages, beside a pipeline's in the same group


class Trouble(NamedTuple):
    """Why a rank can take no update.

    Attributes:
        rank: which one.
        lacking: number of the first of its parameters that got no gradient; None where its loss is not finite.
    """

    rank: int
    lacking: int | None


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
        self._group, self._device = group, device
        self.rank = group.rank()
        # By how many numbers a rank tells. Made once: a backend's own thread may hold what it sends a little longer than the step does.
        self._tables = [
            torch.zeros((group.size(), numbers), dtype=torch.float64, device=device) for numbers in range(_MOST + 1)
        ]
        self._few = self.real and device == host and group.size() <= FEW_RANKS

    @property
    def real(self) -> bool:
        """Whether there are others; in a capture there are none."""
        return dist.get_backend(self._group) != dist.Backend.FAKE

    def total(self, count: int) -> int:
        """The sum of all ranks' counts."""
        return int(sum(each for (each,) in self.rows((count,))))

    def largest(self, count: int) -> int:
        """The largest of all ranks' counts."""
        return int(max(each for (each,) in self.rows((count,))))

    def largest_of(self, values: Iterable[torch.Tensor]) -> None:
        """Each becomes the largest that a rank has."""
        for value in values:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)

    def mean(self, value: float) -> float:
        """Of all ranks' values."""
        return sum(each for (each,) in self.rows((value,))) / self._group.size()

    def counts(self, micro_batches: int, counted: int) -> list[list[int]]:
        """How many micro-batches every rank has, and what they count for, by rank; on all ranks, as the first message of a step.

        Raises:
            BatchError: a rank has refused its batch (`refuse`).
            EngineError: a rank calls something else (`call`).
        """
        found = [list(map(int, told)) for told in self.rows((micro_batches, counted))]
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
        self.rows((0, 0))
        self.of_all(str(error))

    def lacking(self, own: int | None, *, everything: bool) -> tuple[int, int] | None:
        """The lowest rank on which a parameter got no gradient, and that one's number; None where all got theirs on all ranks, and where none got any on any.

        Args:
            own: of this rank, as for `losses`.
            everything: none got one on this rank.

        Raises:
            EngineError: a rank has failed (`fail`).
        """
        told = [number for (number,) in self.rows((_EVERYTHING if everything else 0 if own is None else own + 1,))]
        self._hear_of_failure(told)
        if all(number == _EVERYTHING for number in told):
            return None
        return next(((rank, max(0, int(number) - 1)) for rank, number in enumerate(told) if number), None)

    def fail(self, error: Exception, *, alone: bool) -> None:
        """This rank's forward or backward has failed: in place of `losses`, or of `lacking`, which raises on the others.

        Args:
            error: why.
            alone: in place of `lacking`.
        """
        self.rows((_FAILED,) if alone else (0.0, 0, _FAILED))
        self.of_all(f"{type(error).__name__}: {error}")

    def _hear_of_failure(self, told: Sequence[float]) -> None:
        """Raise where a rank has failed.

        Args:
            told: what each lacks.
        """
        if _FAILED not in told:
            return
        reasons = self.of_all("")
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise EngineError(f"rank {rank} has failed in this step, and no rank has taken it: {reasons[rank]}")

    @staticmethod
    def _raise_refusal(reasons: Sequence[str]) -> NoReturn:
        """On the ranks that would have taken the step.

        Args:
            reasons: by rank, "" where it has none.
        """
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise BatchError(f"rank {rank} refuses its batch, and no rank takes the step: {reasons[rank]}")

    def losses(self, own: float, *, finite: bool, lacking: int | None = None) -> tuple[float, Trouble | None]:
        """The mean of all ranks' losses, and the trouble of the lowest rank that has some; None where none has.

        Args:
            own: of this rank.
            finite: whether it is, where that is asked for.
            lacking: number of a parameter that got no gradient on this rank; None where all got theirs.

        Raises:
            EngineError: a rank has failed (`fail`).
        """
        told = self.rows((own if finite else 0.0, not finite, 0 if lacking is None else lacking + 1))
        self._hear_of_failure([number for *_, number in told])
        trouble = (
            Trouble(rank, int(number) - 1 if number else None)
            for rank, (_, bad, number) in enumerate(told)
            if bad or number
        )
        return sum(loss for loss, *_ in told) / len(told), next(trouble, None)

    def rows(self, own: Sequence[float]) -> list[list[float]]:
        """What every rank tells, by rank; as many numbers on each. In a capture the others tell zeros.

        Args:
            own: of this rank, three at most; whole ones below 2**53 stay what they are.
        """
        table = self._tables[len(own)]
        if self._few:
            # As numpy sees it: what torch runs first after a wait has to come into the caches, which takes longer than the message.
            table.numpy()[self.rank] = own
        else:
            table.zero_()  # rows that are zero elsewhere add up to those that the ranks know
            table[self.rank].copy_(torch.tensor(own, dtype=table.dtype))
        with self._waiting():
            if self._few:
                self._send_to_each(table)
            else:
                dist.all_reduce(table, group=self._group)
        return table.tolist()

    def _send_to_each(self, table: torch.Tensor) -> None:
        others = [rank for rank in range(len(table)) if rank != self.rank]
        how: Any = {"group": self._group, "tag": _TAG}
        works = [dist.isend(table[self.rank], group_dst=rank, **how) for rank in others]
        works += [dist.irecv(table[rank], group_src=rank, **how) for rank in others]
        # Left to itself it waits as long as when the group was made, whatever the group's limit has become since.
        limit = self._group._get_backend(self._device).options._timeout
        for work in works:
            if work is not None:
                work.wait(limit)

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

    def others_error(self, own: Exception | None) -> tuple[int, str] | None:
        """As `first_error`, on a rank that has none itself; one that has raises its own."""
        first = self.first_error(own)
        if own is not None:
            raise own
        return first

    def first(self, *, concerned: bool) -> int | None:
        """The lowest rank that is concerned; None where none is."""
        return next((rank for rank, (said,) in enumerate(self.rows((concerned,))) if said), None)

    def said_by_all(self, own: Sequence[bool]) -> list[bool]:
        """Which of these every rank says, of as many on each; where none says any, that takes one message. In a capture all say the same."""
        if not self.real:
            return list(own)
        if not self.largest(int(any(own))):
            return [False] * len(own)
        said = torch.tensor(own, dtype=torch.uint8, device=self._device)
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._group)
        return [bool(each) for each in said.tolist()]
