"""Pipeline schedules: in which order each rank runs its micro-batches, how many are then in flight, and what a step takes. No torch.

The orders are those of `torch.distributed.pipelining`, which runs them (a test compares the two). A step's seconds are the longest path through the order:
a forward waits for its input from the stage before, a backward for the gradient from the stage after, both for their own rank; a link carries one message
at a time each way, while its ends compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.errors import InputError
from memfit.values.stages import Schedule


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward or backward of one micro-batch."""

    backward: bool
    stage: int
    micro_batch: int


Order = tuple[Action, ...]


def textbook_bubble(stages: int, micro_batches: int) -> float:
    """Share of a step in which equal stages wait: (K - 1) / (M + K - 1) for K stages and M micro-batches (Huang et al. 2019, section 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)


def check_schedule(schedule: Schedule, ranks: int, micro_batches: int, per_rank: int = 1) -> None:
    """Raise InputError where a schedule does not exist in these numbers."""
    if micro_batches < 1 or ranks < 1 or per_rank < 1:
        raise InputError(
            f"a pipeline of {ranks} ranks with {per_rank} stages each and {micro_batches} micro-batches: each must be 1 or more"
        )
    if schedule is not Schedule.INTERLEAVED and per_rank > 1:
        raise InputError(
            f"{per_rank} stages on a rank need the schedule {Schedule.INTERLEAVED}, and {schedule} was asked: take that, or one stage for each rank"
        )
    if schedule is Schedule.ONE_FORWARD_ONE_BACKWARD and micro_batches < ranks:
        raise InputError(
            f"{schedule} needs at least as many micro-batches as stages, and {micro_batches} were asked for {ranks}: take {ranks} or more, or {Schedule.GPIPE}"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule is Schedule.INTERLEAVED and micro_batches % rounds:
        raise InputError(
            f"interleaved stages run in rounds of {ranks} micro-batches, and {micro_batches} do not divide into {rounds} of them: "
            f"take a multiple of {ranks}"
        )


def rank_orders(schedule: Schedule, ranks: int, micro_batches: int, per_rank: int = 1) -> tuple[Order, ...]:
    """What each rank runs, in order; stage s is on rank s modulo `ranks`.

    Raises:
        InputError: this schedule does not exist in these numbers.
    """
    check_schedule(schedule, ranks, micro_batches, per_rank)
    if schedule is Schedule.INTERLEAVED:
        return tuple(_interleaved(rank, ranks, micro_batches, per_rank) for rank in range(ranks))
    orders = []
    for stage in range(ranks):
        ahead = micro_batches if schedule is Schedule.GPIPE else min(micro_batches, ranks - stage)
        order = [Action(False, stage, m) for m in range(ahead)]
        for m in range(micro_batches):
            order.append(Action(True, stage, m))
            if m + ahead < micro_batches:
                order.append(Action(False, stage, m + ahead))
        orders.append(tuple(order))
    return tuple(orders)


def _interleaved(rank: int, ranks: int, micro_batches: int, per_rank: int) -> Order:
    # Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: rounds of some micro-batches go through one stage of a rank, then through its next.
    rounds = max(1, micro_batches // ranks)
    in_round = micro_batches // rounds
    total = micro_batches * per_rank
    warm_up = min(total, (per_rank - 1) * in_round + 2 * (ranks - 1 - rank))

    def forward(n: int) -> Action:
        local, batch = (n // in_round) % per_rank, n % in_round + in_round * (n // (in_round * per_rank))
        return Action(False, local * ranks + rank, batch)

    def backward(n: int) -> Action:
        local, batch = per_rank - 1 - (n // in_round) % per_rank, n % in_round + in_round * (n // (in_round * per_rank))
        return Action(True, local * ranks + rank, batch)

    order = [forward(n) for n in range(warm_up)]
    for n in range(total - warm_up):
        order += [forward(warm_up + n), backward(n)]
    return tuple(order + [backward(n) for n in range(total - warm_up, total)])


def moments(order: Order) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """What a rank holds while it runs: (the stage that runs, how many other micro-batches of each of its stages are in flight), each kind once."""
    held: dict[int, int] = {}
    found: dict[tuple[int, tuple[tuple[int, int], ...]], None] = {}
    for action in order:
        if action.backward:
            held[action.stage] -= 1
        found[action.stage, tuple(sorted((s, n) for s, n in held.items() if n))] = None
        if not action.backward:
            held[action.stage] = held.get(action.stage, 0) + 1
    return tuple(
        (stage, others)
        for stage, others in found
        if not any(stage == one and others != more and _within(others, more) for one, more in found)
    )


def _within(some: tuple[tuple[int, int], ...], more: tuple[tuple[int, int], ...]) -> bool:
    counts = dict(more)
    return all(counts.get(stage, 0) >= n for stage, n in some)


def in_flight(order: Order, stage: int) -> int:
    """How many micro-batches of a stage have run forward and not yet ended backward, at most, the running one included."""
    return max(
        (dict(others).get(stage, 0) + (running == stage) for running, others in moments(order)),
        default=0,
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A step played through.

    Attributes:
        seconds: from its first forward to its last backward.
        busy_seconds: of each rank, computing.
        ends: of each rank, when its last backward ends.
        begins: when each action begins.
    """

    seconds: float
    busy_seconds: tuple[float, ...]
    ends: tuple[float, ...]
    begins: dict[Action, float]

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks wait, on average."""
        return 1 - sum(self.busy_seconds) / (self.seconds * len(self.busy_seconds)) if self.seconds else 0.0


def simulate(
    orders: Sequence[Order], action_seconds: Callable[[Action], float], message_seconds: Sequence[float] = ()
) -> Simulated:
    """Play a step through.

    Args:
        orders: of each rank.
        action_seconds: of a forward or backward.
        message_seconds: of what stage s sends to stage s + 1 for a micro-batch, and gets back; none where messages take no time.
    """
    played = Played(orders)
    seconds, busy, ends, begins = played.through(list(map(action_seconds, played.actions)), message_seconds)
    return Simulated(seconds, busy, ends, dict(zip(played.actions, begins, strict=True)))


class Played:
    """Orders that are played through for many seconds: which action waits for which is the same each time, and found out once.

    Args:
        orders: of each rank.

    Attributes:
        actions: of all ranks, each after those that it waits for.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        last_stage = max(rank_of)
        self._ranks = len(orders)
        self._links = 2 * (last_stage + 1)
        self.actions: list[Action] = []
        # Of each action its rank; the place of the one whose message it waits for; its link, and the boundary that this crosses. -1 for none.
        self._steps: list[tuple[int, int, int, int]] = []
        places: dict[Action, int] = {}  # by the action that a message is for, of the one that sends it
        at = [0] * len(orders)
        waiting = deque(range(len(orders)))
        stuck = 0
        while waiting:
            rank = waiting.popleft()
            progressed = False
            while at[rank] < len(orders[rank]):
                action = orders[rank][at[rank]]
                outer = action.stage == (last_stage if action.backward else 0)
                if not outer and action not in places:
                    break
                at[rank] += 1
                progressed = True
                to = action.stage + (-1 if action.backward else 1)
                sends = 0 <= to <= last_stage
                if sends:
                    places[Action(action.backward, to, action.micro_batch)] = len(self.actions)
                link = 2 * action.stage + action.backward if sends else -1
                self._steps.append((rank, places.get(action, -1), link, min(action.stage, to)))
                self.actions.append(action)
            stuck = 0 if progressed else stuck + 1
            if at[rank] < len(orders[rank]):
                waiting.append(rank)
                assert stuck <= len(waiting), "ranks wait for each other in a circle"

    def through(
        self, seconds: Sequence[float], message_seconds: Sequence[float] = ()
    ) -> tuple[float, tuple[float, ...], tuple[float, ...], list[float]]:
        """As `Simulated` has them: seconds, busy_seconds, ends, and begins of each of `actions`.

        Args:
            seconds: of each of `actions`.
            message_seconds: as for `simulate`.
        """
        clocks, busy, link_free = [0.0] * self._ranks, [0.0] * self._ranks, [0.0] * self._links
        sent: list[float] = []
        begins: list[float] = []
        for taken, (rank, before, link, boundary) in zip(seconds, self._steps, strict=True):
            here = clocks[rank]
            if before >= 0 and sent[before] > here:
                here = sent[before]
            begins.append(here)
            here += taken
            clocks[rank] = here
            busy[rank] += taken
            if link >= 0:
                here = max(here, link_free[link])
                if message_seconds:
                    here += message_seconds[boundary]
                link_free[link] = here
            sent.append(here)
        return max(clocks), tuple(busy), tuple(clocks), begins
