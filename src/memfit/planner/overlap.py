"""Seconds of a step whose collectives run beside computing: a stated model, as torch's engines queue them on a GPU.

Operations are queued in the order of the trace on two streams. Computing runs one operation after the other; collectives, too, one after the other, as all go
over the same links. Between the two, only what they read and write counts, but for one rule:

* an operation waits for the collectives that wrote what it reads; a collective for the operations that made what it sends;
* parameters are gathered one group ahead: no gather begins before the result of the last one is first read. That is the order in which `fully_shard` frees its
  buffers (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `wait_for_unshard`); in forward it may go one further;
* what copies shards into a gather's buffer is queued before it, and what reads a reduced gradient in backward after it, both beside computing.

Left out: links and kernels that slow each other down, the host, which is taken to be ahead of the device, and copies to lower tiers. So the seconds are a lower
bound of this schedule, and those of `Prediction`, in which nothing overlaps, an upper one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memfit.values.trace import Operation, Phase, Trace

_COPIES_IN: Final = "fsdp.all_gather_copy_in"
_MAKES_NOTHING: Final = ("aten.empty", "aten.resize_")


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Seconds of a step, its collectives beside computing.

    Attributes:
        seconds: of the step.
        computing_seconds: of these, of operations and of recomputation.
        sending_seconds: that all collectives take.
    """

    seconds: float
    computing_seconds: float
    sending_seconds: float

    @property
    def waiting_seconds(self) -> float:
        """In which computing waits for a collective."""
        return max(0.0, self.seconds - self.computing_seconds)


def overlapped(
    trace: Trace,
    recomputations: Mapping[int, Sequence[int]] | None = None,
    run_seconds: Callable[[int], float] | None = None,
) -> Overlapped:
    """Play a step's two streams through: as many passes as it has micro-batches, of which the last one synchronises gradients, then the update.

    Args:
        trace: of the step; its update comes after backward.
        recomputations: recipes that run before unpack events.
        run_seconds: of one run of a recipe (`Timeline.run_seconds`).
    """
    streams = _Streams()
    again = recomputations or {}
    once = trace.synchronising if trace.micro_batches > 1 else frozenset()

    def play(events: Sequence[int], left_out: frozenset[int]) -> None:
        for event, code in enumerate(events):
            if again and run_seconds is not None:
                streams.compute(sum(run_seconds(recipe) for recipe in again.get(event, ())))
            if code >= 0 and code not in left_out:
                streams.queue(trace.operations[code])

    for _ in range(trace.micro_batches - 1):
        play(trace.events[: trace.pass_events], once)
    play(trace.events, frozenset())
    return Overlapped(max(streams.computing, streams.network), streams.computed, streams.sent)


class _Streams:
    """When each stream is free, and when what each storage holds is there."""

    def __init__(self) -> None:
        self.computing = self.network = 0.0
        self.computed = self.sent = 0.0
        self._made: dict[int, float] = {}  # by computing
        self._arrived: dict[int, float] = {}  # by a collective, or what is queued after it
        self._reduced: set[int] = set()
        self._gathered: frozenset[int] = frozenset()  # by the last gather, until its result is read
        self._gate = 0.0  # no gather begins before

    def compute(self, seconds: float) -> None:
        """Computing goes on for so long."""
        self.computing += seconds
        self.computed += seconds

    def queue(self, operation: Operation) -> None:
        """Put an operation on its stream."""
        touched = (*operation.reads, *operation.writes)
        if operation.collective is not None:
            self._send(operation, touched)
        elif operation.name.startswith(_COPIES_IN):
            self.computed += operation.seconds
            self.network = max(self.network, self._gate) + operation.seconds
        elif operation.phase is Phase.BACKWARD and not self._reduced.isdisjoint(touched):
            self.computed += operation.seconds
            self.network = max(self.network, self._made_of(touched)) + operation.seconds
            self._note_arrival((*operation.writes, *operation.makes))
            self._reduced.update(operation.makes)
        else:
            if not self._gathered.isdisjoint(touched):
                arrived = max((self._arrived.get(s, 0.0) for s in touched), default=0.0)
                self._gate = max(self.computing, arrived) + operation.seconds
                self._gathered = frozenset()
            self.computing = max(self.computing, *(self._arrived.get(s, 0.0) for s in touched), 0.0)
            self.compute(operation.seconds)
            if not operation.name.startswith(_MAKES_NOTHING):
                for s in (*operation.writes, *operation.makes):
                    self._made[s] = self.computing

    def _made_of(self, touched: Sequence[int]) -> float:
        return max((self._made.get(s, 0.0) for s in touched), default=0.0)

    def _send(self, operation: Operation, touched: Sequence[int]) -> None:
        assert operation.collective is not None
        begin = max(self.network, self._made_of(touched))
        if operation.collective.kind == "all_gather":
            begin = max(begin, self._gate)
            self._gathered = frozenset((*touched, *operation.makes))
        else:
            self._reduced.update(touched, operation.makes)
        self.network = begin + operation.seconds
        self.sent += operation.seconds
        self._note_arrival((*touched, *operation.makes))

    def _note_arrival(self, storages: Sequence[int]) -> None:
        for s in storages:
            self._arrived[s] = self.network
