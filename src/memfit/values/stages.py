"""A model as a chain of parts, devices in a line, and the cut of one into stages for the other. Values: frozen, torch-free.

Words: a *part* is what is never divided (an embedding, a block, a head), a *stage* the consecutive parts that one device runs, a *boundary* the place
between two neighbouring parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from memfit.errors import InputError
from memfit.hardware.topology import PeerLink, Topology


class Schedule(StrEnum):
    """In which order the stages of a pipeline run their micro-batches.

    GPIPE: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). ONE_FORWARD_ONE_BACKWARD: each backward as early as it can be, so that
    fewer micro-batches are in flight (PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503). INTERLEAVED: the same with several stages on each device
    (Narayanan et al. 2021, arXiv:2104.04473).
    """

    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class Recompute:
    """One way to hold the activations of a stage.

    Attributes:
        kept_bytes: between forward and backward, of each micro-batch in flight.
        pass_bytes: at the peak of one micro-batch's forward or backward, what it keeps included; what is there between steps is not.
        extra_seconds: of one micro-batch's backward, for what is run again.
        done_bytes: after backward, of each micro-batch, to the end of the step: what was sent, where the schedule holds it for so long.
    """

    kept_bytes: int
    pass_bytes: int
    extra_seconds: float = 0.0
    done_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stretch of parts takes as one stage, on a device of speed 1.

    Attributes:
        forward_seconds, backward_seconds: of one micro-batch with nothing dropped.
        update_seconds: of clipping and the optimizer, once a step.
        state_bytes: what is there throughout: parameters, gradients, optimizer state, buffers.
        menu: ways to hold its activations, the fastest first; none of them is better than another one in everything.
        update_bytes: at the peak of clipping and the optimizer, above what is there throughout.
    """

    forward_seconds: float
    backward_seconds: float
    state_bytes: int
    menu: tuple[Recompute, ...]
    update_seconds: float = 0.0
    update_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What is never divided.

    Attributes:
        name: path of the module; "" for what runs outside of modules.
        forward_seconds, backward_seconds, update_seconds, state_bytes: as in `StageCost`.
        kept_bytes: of each micro-batch in flight.
        working_bytes: at the peak of its forward or backward, besides what is kept.
        boundary_bytes: of what goes on to the next part's device for one micro-batch, whatever was made earlier and is read later included; in backward as
            much comes back.
        cut_after: why no stage may end here; empty where one may.
        again_seconds: of its operations in forward, as they are run again in backward; `forward_seconds` if None.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    state_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0
    boundary_bytes: int = 0
    update_seconds: float = 0.0
    cut_after: str = ""
    again_seconds: float | None = None

    @property
    def recompute_seconds(self) -> float:
        """Of running it again."""
        return self.forward_seconds if self.again_seconds is None else self.again_seconds


@dataclass(frozen=True, slots=True)
class Shared:
    """State that several parts use (a tied embedding and head): each stage with one of them has all of it.

    Attributes:
        name: of the parameter.
        bytes: its parameter, gradient and optimizer state.
        parts: positions of the parts that use it.
    """

    name: str
    bytes: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A model as a chain.

    Attributes:
        parts: in the order in which they run.
        shared: state of more than one part, which theirs leave out.
        fixed_bytes: that every stage has, whatever its parts (the batch).
        menus: for some stretches (first, end), the ways to hold their activations as one stage.
        known: for those that were captured as stages, what they take.
        recompute: elsewhere each part may also be run again in backward, from what it is given; otherwise everything is kept.
        around_seconds: of the forward of every stage that was not captured, and of its backward, whatever its parts.
    """

    parts: tuple[Part, ...]
    shared: tuple[Shared, ...] = ()
    fixed_bytes: int = 0
    menus: Mapping[tuple[int, int], tuple[Recompute, ...]] | None = None
    known: Mapping[tuple[int, int], StageCost] | None = None
    recompute: bool = False
    around_seconds: float = 0.0

    def stage(self, first: int, end: int) -> StageCost:
        """The cost of parts [first, end) as one stage."""
        if self.known is not None and (first, end) in self.known:
            return self.known[first, end]
        inside = self.parts[first:end]
        kept = sum(part.kept_bytes for part in inside)
        menu = (self.menus or {}).get((first, end))
        if menu is None:
            menu = (Recompute(kept, kept + max(part.working_bytes for part in inside)),)
            given = sum(part.boundary_bytes for part in self.parts[max(0, first - 1) : end - 1])
            if self.recompute and given < kept:
                again = sum(part.recompute_seconds for part in inside)
                menu += (Recompute(given, given + max(p.kept_bytes + p.working_bytes for p in inside), again),)
        return StageCost(
            sum(part.forward_seconds for part in inside) + self.around_seconds,
            sum(part.backward_seconds for part in inside) + self.around_seconds,
            self.fixed_bytes
            + sum(part.state_bytes for part in inside)
            + sum(tied.bytes for tied in self.shared if any(first <= p < end for p in tied.parts)),
            menu,
            sum(part.update_seconds for part in inside),
        )

    def may_end(self, end: int) -> bool:
        """Whether a stage may end before part `end`."""
        return end == len(self.parts) or not self.parts[end - 1].cut_after


@dataclass(frozen=True, slots=True)
class StageDevice:
    """One device of a pipeline.

    Attributes:
        bytes: that a step may hold on it.
        speed: how many times as fast it is as the device for which the parts' seconds are.
    """

    bytes: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.bytes <= 0 or not self.speed > 0:
            raise InputError(
                f"a device of {self.bytes} bytes and speed {self.speed} cannot run a stage: both must be more than 0"
            )


@dataclass(frozen=True, slots=True)
class Line:
    """Devices that may run stages, and their links.

    Attributes:
        devices: their budgets and speeds.
        peers: links between them; where there are none, what crosses a boundary takes no time. With some, two neighbours in a pipeline need one.
    """

    devices: tuple[StageDevice, ...]
    peers: tuple[PeerLink, ...] = ()

    @classmethod
    def of(cls, topology: Topology, budgets: Sequence[int] | None = None) -> Line:
        """The devices of a topology and the links between them, as fast as the first one times the ratio of their FLOP/s.

        Args:
            topology: its first device is the one that the parts' seconds are for.
            budgets: bytes of each; None for all of their memory.

        Raises:
            InputError: there are more or fewer budgets than devices.
        """
        first = topology.devices[0]
        sizes = budgets if budgets is not None else [machine.memory_bytes for machine in topology.devices]
        if len(sizes) != len(topology.devices):
            raise InputError(f"{len(sizes)} budgets for {len(topology.devices)} devices: give one for each")
        rates = [machine.fp32_flops / first.fp32_flops for machine in topology.devices]
        return cls(tuple(StageDevice(size, speed) for size, speed in zip(sizes, rates, strict=True)), topology.links())

    def message_seconds(self, one: int, other: int, size: int) -> float:
        """Time of a message of so many bytes from one device to another one; infinite where no link joins them."""
        if not self.peers or one == other:
            return 0.0
        between = [link for link in self.peers if {link.first, link.second} == {one, other}]
        return min((link.seconds(size) for link in between), default=float("inf"))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one device runs in one go.

    Attributes:
        first, end: its parts.
        device: position among the line's devices.
        recompute: how it holds its activations.
        forward_seconds, backward_seconds: of a micro-batch on that device, recomputation included.
    """

    first: int
    end: int
    device: int
    recompute: Recompute
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A model divided into stages.

    Attributes:
        stages: in the order in which forward runs them.
        schedule, micro_batches: for which it was made.
        step_seconds: of one optimizer step.
        busy_seconds: of each device, in the order of `devices`: computing.
        peak_bytes: of each device.
        bound_seconds: no cut takes less; equal to `step_seconds` where the search ended.
        pass_seconds: of the step, from the first forward to the last backward.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    micro_batches: int
    step_seconds: float
    busy_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound_seconds: float
    pass_seconds: float = 0.0

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that are used, in the order of the pipeline."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    @property
    def slowest_seconds(self) -> float:
        """Of one micro-batch on the device that takes longest for it."""
        return max(
            sum(s.forward_seconds + s.backward_seconds for s in self.stages if s.device == device)
            for device in self.devices
        )

    @property
    def bubble(self) -> float:
        """The share of a step in which devices wait, on the average of those used."""
        return 1 - sum(self.busy_seconds) / (self.step_seconds * len(self.busy_seconds))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cut:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: these are not the fields of a cut.
        """
        stages = tuple(Stage(**{**stage, "recompute": Recompute(**stage["recompute"])}) for stage in data["stages"])
        lists = {name: tuple(data[name]) for name in ("busy_seconds", "peak_bytes")}
        return cls(**{**data, "stages": stages, "schedule": Schedule(data["schedule"]), **lists})
