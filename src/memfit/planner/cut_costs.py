"""What a cut takes: the bytes of each device, and the seconds of a step under its schedule. For the search, and for cuts that somebody made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memfit.planner.schedules import Order, Played, moments, rank_orders
from memfit.values.stages import Cut, Line, Parts, Schedule, Stage, StageCost


def cost_of(
    parts: Parts,
    line: Line,
    ends: Sequence[int],
    micro_batches: int,
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD,
    devices: Sequence[int] | None = None,
) -> Cut:
    """What a cut that somebody made takes: stages that end before these parts, on these devices (the first ones of the line where none are named).

    More stages than devices go round. Each stage holds its activations in the fastest way that fits, else in the smallest one.
    """
    used = tuple(devices if devices is not None else range(min(len(ends), len(line.devices))))
    per_device = len(ends) // len(used)
    orders = rank_orders(schedule, len(used), micro_batches, per_device)
    costs = CutCosts(parts, line, used, schedule, orders, micro_batches, per_device)
    chosen: list[Stage] = []
    for first, end in zip((0, *ends[:-1]), ends, strict=True):
        ways = costs.ways(len(chosen), first, end)
        chosen.append(next((way for way in ways if costs.fits([*chosen, way])), ways[-1]))
    return costs.judged(chosen)


@dataclass(slots=True)
class CutCosts:
    """Stages on devices in one order.

    Attributes:
        parts, line, schedule, micro_batches, per_device: as for `cutting.cut`.
        devices, orders: of rank r. Stage s is on rank s modulo their number.
    """

    parts: Parts
    line: Line
    devices: tuple[int, ...]
    schedule: Schedule
    orders: tuple[Order, ...]
    micro_batches: int
    per_device: int
    _costs: dict[tuple[int, int], StageCost] = field(default_factory=dict)
    _ways: dict[tuple[int, int, int], list[Stage]] = field(default_factory=dict)
    _moments: list[list[tuple[int, dict[int, int]]]] = field(default_factory=list)
    _shared: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    _peaks: dict[tuple[int, ...], tuple[int, Mapping[int, Stage]]] = field(default_factory=dict)
    _crossing: dict[tuple[int, int], float] = field(default_factory=dict)
    _played: Played = field(init=False)

    def __post_init__(self) -> None:
        self._moments = [[(running, dict(others)) for running, others in moments(order)] for order in self.orders]
        self._played = Played(self.orders)

    @property
    def number(self) -> int:
        """Of stages."""
        return len(self.devices) * self.per_device

    def bytes_of(self, stage: int) -> int:
        """Of the device that runs it."""
        return self.line.devices[self.devices[stage % len(self.devices)]].bytes

    def cost(self, first: int, end: int) -> StageCost:
        """Of parts [first, end) as a stage, on a device of speed 1."""
        if (first, end) not in self._costs:
            self._costs[first, end] = self.parts.stage(first, end)
        return self._costs[first, end]

    def ways(self, stage: int, first: int, end: int) -> list[Stage]:
        """The ways to run parts [first, end) as this stage, the fastest first; alone on its device, only the fastest that fits, else the smallest."""
        key = (stage, first, end)
        if key not in self._ways:
            cost, device = self.cost(first, end), self.devices[stage % len(self.devices)]
            speed = self.line.devices[device].speed
            found = [
                Stage(
                    first,
                    end,
                    device,
                    way,
                    cost.forward_seconds / speed,
                    (cost.backward_seconds + way.extra_seconds) / speed,
                )
                for way in sorted(cost.menu, key=lambda way: way.extra_seconds)
            ]
            if self.per_device == 1:
                fitting = [one for one in found if self.alone_bytes(stage, one) <= self.line.devices[device].bytes]
                found = fitting[:1] or [min(found, key=lambda one: self.alone_bytes(stage, one))]
            self._ways[key] = found
        return self._ways[key]

    def alone_bytes(self, stage: int, made: Stage) -> int:
        """The most that its device holds for this stage while it runs, and in the update."""
        cost = self.cost(made.first, made.end)
        return cost.state_bytes + max(
            cost.update_bytes,
            *(
                self._held_bytes(stage, others, {stage: made})
                for running, others in self._moments[stage % len(self.devices)]
                if running == stage
            ),
        )

    def _held_bytes(self, running: int, others: Mapping[int, int], mine: Mapping[int, Stage]) -> int:
        """What a rank holds for micro-batches in the pass of one, of those of its stages that are known.

        Args:
            running: the stage in whose pass it is.
            others: how many other micro-batches of each stage are in flight, at most; those that are not are counted as done.
            mine: the stages that are known.
        """
        held = mine[running].recompute.pass_bytes if running in mine else 0
        for number, stage in mine.items():
            way = stage.recompute
            held += way.done_bytes * (self.micro_batches - (number == running))
            held += max(0, way.kept_bytes - way.done_bytes) * others.get(number, 0)
        return held

    def peak_bytes(self, rank: int, stages: Sequence[Stage]) -> int:
        """The most that a rank holds with those of its stages that are known."""
        mine = {s: stages[s] for s in range(rank, len(stages), len(self.devices))}
        # A search asks for the same ones again and again, beside others of other ranks. They are kept, so none other has their identity.
        key = rank, *map(id, mine.values())
        if key not in self._peaks:
            self._peaks[key] = self._peak_bytes(rank, mine), mine
        return self._peaks[key][0]

    def _peak_bytes(self, rank: int, mine: Mapping[int, Stage]) -> int:
        state = sum(self.cost(one.first, one.end).state_bytes for one in mine.values())
        state -= self.parts.fixed_bytes * max(0, len(mine) - 1)
        counted: set[int] = set()
        for one in mine.values() if len(mine) > 1 else ():
            shared = self._shared_in(one.first, one.end)
            state -= sum(self.parts.shared[number].bytes for number in shared & counted)
            counted |= shared
        update = max((self.cost(one.first, one.end).update_bytes for one in mine.values()), default=0)
        held = (self._held_bytes(running, others, mine) for running, others in self._moments[rank])
        return state + max(update, *held)

    def _shared_in(self, first: int, end: int) -> frozenset[int]:
        """Which of what parts share is in a stage, by its number."""
        if (first, end) not in self._shared:
            self._shared[first, end] = frozenset(
                number
                for number, tied in enumerate(self.parts.shared)
                if any(first <= part < end for part in tied.parts)
            )
        return self._shared[first, end]

    def fits(self, stages: Sequence[Stage]) -> bool:
        """Whether the rank of the last of these stages has the bytes for those of its stages among them."""
        rank = (len(stages) - 1) % len(self.devices)
        return self.peak_bytes(rank, stages) <= self.line.devices[self.devices[rank]].bytes

    def crossing(self, stage: int, end: int) -> float:
        """Seconds of a message from this stage, which ends before part `end`, to the next one."""
        key = stage, end
        if key not in self._crossing:
            self._crossing[key] = self._crossing_seconds(stage, end)
        return self._crossing[key]

    def _crossing_seconds(self, stage: int, end: int) -> float:
        if end == len(self.parts.parts):
            return 0.0
        one, other = (self.devices[s % len(self.devices)] for s in (stage, stage + 1))
        return self.line.message_seconds(one, other, self.parts.parts[end - 1].boundary_bytes)

    def judged(self, stages: Sequence[Stage]) -> Cut:
        """A whole cut, played through."""
        taken = [(one.forward_seconds, one.backward_seconds) for one in stages]
        crossing = [self.crossing(s, one.end) for s, one in enumerate(stages[:-1])]
        played = self._played
        passing, busy, _, _ = played.through([taken[a.stage][a.backward] for a in played.actions], crossing)
        update = max(
            sum(
                self.cost(s.first, s.end).update_seconds / self.line.devices[s.device].speed
                for s in stages
                if s.device == device
            )
            for device in self.devices
        )
        peaks = tuple(self.peak_bytes(rank, stages) for rank in range(len(self.devices)))
        seconds = passing + update
        return Cut(
            tuple(stages),
            self.schedule,
            self.micro_batches,
            seconds,
            busy,
            peaks,
            seconds,
            passing,
        )
