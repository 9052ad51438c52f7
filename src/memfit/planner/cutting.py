"""Cut a chain of parts into stages for unequal devices: the cut whose step takes least, each device within its own bytes. Exact.

torchgpipe's `balance` (Lee et al. 2020, arXiv:2004.09910) and PipeDream's planner (Narayanan et al. 2019) minimise the slowest stage; that is right for many
micro-batches and equal links. What a user waits for is the step, which also has the way there and back through all stages, so a cut is judged by playing
the schedule through. The search is branch and bound over the ends of stages, from the first on. Two facts bound what is still open, for stage s with c(s)
seconds of forward and backward and w(s) forwards before its first backward:

* its first forward comes after one micro-batch has passed the stages before it, and after its last backward one has to go back through them;
* its first backward comes no earlier than one micro-batch's way to the end and back, in which it has w(s) forwards to do; and so
  between the last forward and the last backward. In GPipe all forwards come first, so nothing overlaps with these ways.

Both add up along the chain, so a dynamic program from the end has the least of them for every stretch that is left (`_Bound`).

Where stages share a device (interleaved), its bytes and seconds are those of all of them, so ways to hold activations are chosen together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Final, Literal

from memfit.errors import InfeasibleError, InputError
from memfit.planner.cut_costs import CutCosts
from memfit.planner.schedules import in_flight, rank_orders
from memfit.units import format_bytes
from memfit.values.stages import Cut, Line, Parts, Schedule, Stage

Objective = Literal["step", "slowest"]
MOST_NODES: Final = 5_000  # partial cuts looked at before the best one so far is taken; `Cut.bound_seconds` then says how much may be missing
MOST_ORDERED: Final = 6  # devices whose orders are all tried


def cut(
    parts: Parts,
    line: Line,
    micro_batches: int,
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD,
    *,
    stages: int | None = None,
    per_device: int = 1,
    any_order: bool = False,
    objective: Objective = "step",
) -> Cut:
    """The fastest cut into stages, each within the bytes of its device.

    Args:
        parts: the model as a chain.
        line: the devices, in the order of the pipeline unless `any_order`.
        micro_batches: of a step.
        schedule: in which stages run them.
        stages: how many devices are used; None for the best number of them. In the given order a device may be left out only at the end.
        per_device: stages on each device; more than one for INTERLEAVED alone.
        any_order: devices may be put in any order, and any of them left out; for at most `MOST_ORDERED`.
        objective: "step" for the seconds of a step, "slowest" for those of the slowest device for one micro-batch.

    Raises:
        InfeasibleError: no cut fits; says which device lacks most bytes in the cut that lacks least.
        InputError: there are fewer parts than stages, or the schedule does not exist in these numbers.
    """
    numbers = [stages] if stages is not None else list(range(1, len(line.devices) + 1))
    if any_order and len(line.devices) > MOST_ORDERED:
        raise InputError(
            f"all orders are tried for {MOST_ORDERED} devices at most, and there are {len(line.devices)}: give their order"
        )
    if stages is not None and not 1 <= stages <= len(line.devices):
        raise InputError(f"{stages} stages for {len(line.devices)} devices: ask for one on each device at most")
    best = _Best(objective)
    refused: InputError | None = None
    for number in numbers:
        if number * per_device > len(parts.parts):
            refused = refused or InputError(
                f"{number * per_device} stages need as many parts, and the model has {len(parts.parts)}: take fewer devices, or fewer stages on each"
            )
            continue
        try:
            orders = rank_orders(schedule, number, micro_batches, per_device)
        except InputError as error:
            refused = refused or error
            continue
        seen: set[tuple[object, ...]] = set()
        for devices in permutations(range(len(line.devices)), number) if any_order else [tuple(range(number))]:
            alike = _alike(line, devices)
            if alike not in seen:
                seen.add(alike)
                search = _Search(CutCosts(parts, line, devices, schedule, orders, micro_batches, per_device), best)
                search.run()
                lack = None if best.cut is not None else search.least_lack()
                if lack is not None and lack.bytes <= 0:
                    best.take(search.costs.judged(list(lack.stages)))
                elif lack is not None and (best.lack is None or lack.bytes < best.lack.bytes):
                    best.lack = lack
    if best.cut is None:
        if best.lack is not None:
            raise best.lack.error()
        if refused is not None:
            raise refused
        wanted = " or ".join(str(number * per_device) for number in numbers)
        boundaries = [part.cut_after for part in parts.parts[:-1]]
        free = boundaries.count("")
        if free >= numbers[0] * per_device - 1:
            raise InputError(f"the model cannot be cut into {wanted} stages: no link joins these devices")
        (why, _), *_ = Counter(filter(None, boundaries)).most_common(1)
        raise InputError(
            f"the model cannot be cut into {wanted} stages: it may be cut at {free} of the {len(boundaries)} boundaries between its parts; at others, most "
            f'often, {why}. Ask for fewer stages, or for another way to share the step out (fixed={{"sharding": "zero3"}})'
        )
    return best.result()


def _alike(line: Line, devices: tuple[int, ...]) -> tuple[object, ...]:
    """Equal for two orders that cost the same."""
    kinds = tuple((line.devices[d].bytes, line.devices[d].speed) for d in devices)
    joined = zip(devices, (*devices[1:], devices[0]), strict=True)
    return kinds, tuple(tuple(line.message_seconds(a, b, size) for size in (0, 1 << 30)) for a, b in joined)


@dataclass(slots=True)
class _Best:
    """The best cut so far, over all numbers of stages and orders of devices."""

    objective: Objective
    cut: Cut | None = None
    value: float = float("inf")
    unproved: float = float("inf")  # the least bound of what was not looked at
    lack: _Lack | None = None  # of the cut that lacks least

    def take(self, made: Cut) -> None:
        value = made.step_seconds if self.objective == "step" else made.slowest_seconds
        if value < self.value:
            self.cut, self.value = made, value

    def result(self) -> Cut:
        assert self.cut is not None
        if self.objective == "step" and self.unproved < self.value:
            return replace(self.cut, bound_seconds=self.unproved)
        return self.cut


@dataclass(frozen=True, slots=True)
class _Lack:
    """What a device would have to have more.

    Attributes:
        bytes: 0 where nothing is lacking, in the cut into these stages.
    """

    bytes: int
    device: int
    has: int
    stages: tuple[Stage, ...] = ()

    def error(self) -> InfeasibleError:
        return InfeasibleError(
            f"no cut into stages fits: in the one that lacks least, device {self.device} has {format_bytes(self.has)} and needs "
            f"{format_bytes(self.has + self.bytes)}. Give it more, add a device, or take more micro-batches",
            budget_bytes=self.has,
            minimum_bytes=self.has + self.bytes,
        )


class _Search:
    """Cuts for one order of devices."""

    def __init__(self, costs: CutCosts, best: _Best) -> None:
        self.costs = costs
        self.best = best
        self.nodes = 0
        self.bound = _Bound(costs)

    def run(self) -> None:
        self._take_balanced()
        self._descend([], 0, 0.0, 0.0)

    def least_lack(self) -> _Lack | None:
        """What a device lacks in the cut that lacks least, where `run` has found none that fits; None where there is no cut at all.

        Where stages share a device, of the cuts that were looked at: `MOST_NODES`. It may be one that fits, to which `run`, in the order of seconds, has not
        come.
        """
        least = self.bound.lack[0][0]
        if least is None or (self.costs.per_device == 1 and least.bytes > 0):
            return least
        self.nodes = 0
        return self._lacking_less([], 0, _Lack(0, -1, 0), None)

    def _lacking_less(self, chosen: list[Stage], first: int, lacking: _Lack, best: _Lack | None) -> _Lack | None:
        """The best so far, or what the chosen stages lack with those that may follow them."""
        costs, stage, total = self.costs, len(chosen), len(self.costs.parts.parts)
        if stage == costs.number:
            return replace(lacking, stages=tuple(chosen))
        has, device = costs.bytes_of(stage), costs.devices[stage % len(costs.devices)]
        found = []
        for end in range(first + 1, total + 1):
            rest = self.bound.lack[stage + 1][end]
            if rest is None or not costs.parts.may_end(end) or costs.crossing(stage, end) == float("inf"):
                continue
            for way in costs.ways(stage, first, end):
                needed = _Lack(costs.peak_bytes(stage % len(costs.devices), [*chosen, way]) - has, device, has)
                here = max(lacking, needed, key=lambda one: one.bytes)
                found.append((max(here.bytes, rest.bytes), way.recompute.extra_seconds, way, here))
        for low, _, way, here in sorted(found, key=lambda one: one[:2]):
            self.nodes += 1
            if best is not None and (low >= best.bytes or self.nodes > MOST_NODES):
                break
            best = self._lacking_less([*chosen, way], way.end, here, best)
        return best

    def _take_balanced(self) -> None:
        """The cut whose slowest stage is fastest, to begin with: where many bounds are equal, the first cuts tried may be poor."""
        chosen: list[Stage] = []
        costs, first, total = self.costs, 0, len(self.costs.parts.parts)
        for stage in range(costs.number):
            ways = [
                (max(way.forward_seconds + way.backward_seconds, self.bound.slowest[stage + 1][end]), -end, way)
                for end in range(first + 1, total + 1)
                if costs.parts.may_end(end) and costs.crossing(stage, end) != float("inf")
                for way in costs.ways(stage, first, end)
                if costs.fits([*chosen, way])
            ]
            best = min(ways, key=lambda one: one[:2], default=None)
            if best is None or best[0] == float("inf"):
                return
            chosen.append(best[2])
            first = best[2].end
        self.best.take(costs.judged(chosen))

    def _descend(self, chosen: list[Stage], first: int, before: float, least: float) -> None:
        """Try all that may follow the chosen stages.

        Args:
            chosen: stages 0 to s - 1.
            first: part at which stage s begins.
            before: seconds of one micro-batch's way through the chosen ones, there and back.
            least: bound that the chosen ones set.
        """
        if len(chosen) == self.costs.number:
            self.best.take(self.costs.judged(chosen))
            return
        for bound, way, after, reached in sorted(self._following(chosen, first, before, least), key=lambda f: f[0]):
            if bound >= self.best.value:
                return
            self.nodes += 1
            if self.nodes > MOST_NODES:
                self.best.unproved = min(self.best.unproved, bound)
                return
            self._descend([*chosen, way], way.end, after, reached)

    def _following(
        self, chosen: list[Stage], first: int, before: float, least: float
    ) -> Iterator[tuple[float, Stage, float, float]]:
        """(bound, stage, `before` and `least` after it) of each way to go on that fits."""
        costs, stage = self.costs, len(chosen)
        total, ranks = len(costs.parts.parts), len(costs.devices)
        left = costs.number - stage - 1
        for end in [total] if not left else range(first + 1, total - left + 1):
            crossing = costs.crossing(stage, end)
            if not costs.parts.may_end(end) or crossing == float("inf"):
                continue
            for way in costs.ways(stage, first, end):
                if not costs.fits([*chosen, way]):
                    continue
                seconds = way.forward_seconds + way.backward_seconds
                load = seconds + sum(s.forward_seconds + s.backward_seconds for s in chosen[stage % ranks :: ranks])
                if self.best.objective == "slowest":
                    reached = max(least, load)
                    yield max(reached, self.bound.slowest[stage + 1][end]), way, 0.0, reached
                else:
                    start = before if stage < ranks else self._before(chosen[: stage % ranks])
                    reached = max(least, start + costs.micro_batches * load)
                    after = before + seconds + 2 * crossing
                    yield max(reached, after + self.bound.step[stage + 1][end]), way, after, reached

    def _before(self, stages: Sequence[Stage]) -> float:
        """Seconds of one micro-batch's way through the first stages, there and back."""
        return sum(
            s.forward_seconds + s.backward_seconds + 2 * self.costs.crossing(i, s.end) for i, s in enumerate(stages)
        )


class _Bound:
    """For each stage s and part i: the least that stages from s on, beginning at part i, can take, whatever came before.

    Attributes:
        step: [s][i], seconds of their part of the step, from the first forward of stage s to its last backward.
        slowest: [s][i], of the slowest of them for a micro-batch.
        lack: [s][i], bytes that the device of one of them lacks, whichever lacks most; of each stage alone, also where several share a device.
    """

    def __init__(self, costs: CutCosts) -> None:
        total, number = len(costs.parts.parts), costs.number
        never = float("inf")
        self.step, self.slowest, passing = ([[never] * (total + 1) for _ in range(number + 1)] for _ in range(3))
        self.lack: list[list[_Lack | None]] = [[None] * (total + 1) for _ in range(number + 1)]
        for table in (self.step, self.slowest, passing):
            table[number][total] = 0.0
        self.lack[number][total] = _Lack(0, -1, 0)
        for stage in reversed(range(number)):
            rank = stage % len(costs.devices)
            ahead = in_flight(costs.orders[rank], stage) if costs.per_device == 1 else None
            for first in range(total):
                for end in range(first + 1, total + 1):
                    rest, crossing = self.lack[stage + 1][end], costs.crossing(stage, end)
                    if not costs.parts.may_end(end) or rest is None or crossing == never:
                        continue
                    way = costs.ways(stage, first, end)[0]
                    lack = self._lack(costs, stage, first, end, rest)
                    known = self.lack[stage][first]
                    if known is None or lack.bytes < known.bytes:
                        self.lack[stage][first] = lack
                    if lack.bytes:
                        continue
                    seconds = way.forward_seconds + way.backward_seconds
                    back = passing[stage + 1][end] + 2 * crossing
                    if ahead is None:
                        waits = 0.0
                    elif (
                        costs.schedule is Schedule.GPIPE
                    ):  # the last stage goes forward with all of them before it goes back
                        waits = back
                    else:
                        first_wait = max(0.0, back - (ahead - 1) * way.forward_seconds)
                        last_wait = max(0.0, back - (ahead - 1) * way.backward_seconds)
                        apart = ahead < costs.micro_batches  # a backward comes before the last forward
                        waits = first_wait + last_wait if apart else max(first_wait, last_wait)
                    step = max(
                        costs.micro_batches * seconds + waits, seconds + 2 * crossing + self.step[stage + 1][end]
                    )
                    passing[stage][first] = min(passing[stage][first], seconds + back)
                    self.step[stage][first] = min(self.step[stage][first], step)
                    slowest = max(seconds, self.slowest[stage + 1][end])
                    self.slowest[stage][first] = min(self.slowest[stage][first], slowest)

    @staticmethod
    def _lack(costs: CutCosts, stage: int, first: int, end: int, rest: _Lack) -> _Lack:
        has = costs.bytes_of(stage)
        least = min(costs.alone_bytes(stage, way) for way in costs.ways(stage, first, end))
        return max(
            rest, _Lack(max(0, least - has), costs.devices[stage % len(costs.devices)], has), key=lambda one: one.bytes
        )
