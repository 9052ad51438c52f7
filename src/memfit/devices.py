"""Which way of sharing a step out among several devices is the fastest that fits into each of them: all are captured, planned for and compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from memfit.capture.gloo_time import MOST_RANKS, as_processes, core_sharing, timed_beside_others
from memfit.capture.trace_source import TraceSource
from memfit.errors import CaptureError, InfeasibleError, InputError, Remedy
from memfit.hardware.machine import Machine
from memfit.hardware.machine_file import Devices, named_devices
from memfit.hardware.network import ASSUMED_BANDWIDTH, devices_of
from memfit.hardware.topology import Topology
from memfit.offers import planning_for
from memfit.pipelining.planning import PipelinePlanning, StagePlanners, settings_for
from memfit.pipelining.stages import SURE, NotFasterError
from memfit.planner.candidates import check_names
from memfit.planner.infeasible import BESIDE, NothingFitsError, worth_telling
from memfit.planning import Planning, changed
from memfit.progress import tell
from memfit.sharding.roles import fullest
from memfit.techniques.choices import Choices, in_words
from memfit.techniques.freezing.freeze import frozen
from memfit.techniques.layer_streaming.blocks import repeated_blocks
from memfit.techniques.sharding import (
    ANY_PIPELINE,
    ONE_UNIT,
    PIPELINES,
    WAYS,
    Pipelines,
    at_rank,
    is_one_unit,
    is_pipeline,
    setting_of,
    way_of,
)
from memfit.techniques.technique import listed
from memfit.units import format_budget, format_bytes, format_seconds, parse_bytes
from memfit.values.plan import Plan
from memfit.values.request import Budget, Request, TierBudget

# What shares out less sends less and is closer to one device; more of it must make a step faster by this factor.
WORTH_MORE: Final = 1.01
# What the ways are called elsewhere, without signs between letters and numbers.
_ELSEWHERE: Final = {
    "ddp": "data",
    "dp": "data",
    "dataparallel": "data",
    "noshard": "data",
    "shardgradop": "zero2",
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "fullshard": "zero3",
    "pp": "pipeline",
    **{stage.format(n): f"zero{n}" for n in (1, 2, 3) for stage in ("{}", "zero{}", "stage{}")},
    **{each: each for each in PIPELINES},
}
CLAIMS: Final = 8  # tries of what a pipeline says that it needs


def several_devices(devices: Devices, here: Machine) -> Topology:
    """The devices that a user named; where they are such as this CPU and nothing is said of links, processes of this computer.

    Raises:
        ConfigError: the machine file cannot be read.
        InputError: they cannot be read.
    """
    found = named_devices(devices, here)
    told = (
        isinstance(devices, Topology)
        or found.nodes is not None
        or not set(found.peers) <= set(devices_of(len(found.devices), here).peers)
    )
    processes = here.kind == "cpu" and all(device.name == here.name for device in found.devices)
    return as_processes(found) if processes and not told and len(found.devices) > 1 else found


def share_of(topology: Topology, budget: Budget) -> int:
    """A budget in bytes, also where it is a share of a device's memory.

    Raises:
        BudgetError: it cannot be read.
        InputError: it is a share, and the devices have more and less memory.
    """
    sizes = {machine.memory_bytes for machine in topology.devices}
    asked = {parse_bytes(budget, total_bytes=size) for size in sizes}
    if len(asked) > 1:
        raise InputError(
            f"budget={budget!r} is a share, and the devices have from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}: give bytes; of a device that "
            "has less, no more than it has is taken"
        )
    return asked.pop()


def plan_sharded(
    source: TraceSource, request: Request, topology: Topology, make: Callable[[Request], Plan] | None = None
) -> Plan:
    """The fastest plan among data parallelism, ZeRO 1, 2 and 3, and pipelines; what was turned down is told with its reason.

    Args:
        source: of the traces; its sample is the batch of one rank.
        request: whose budget is that of each device, or all of its memory where that is less.
        topology: the devices.
        make: the plan for a request in which one way is settled; None for that of the source's step.

    Raises:
        InfeasibleError: no way fits; carries the smallest budget of all.
        InputError: the request cannot be honoured; or the way that it fixes.
    """
    check_names(request.allow, request.fixed)  # once, and not as what each way says of it
    ranks = len(topology.devices)
    asked = str(request.fixed.get("sharding", ""))
    if ranks == 1:
        raise InputError(
            'devices names one device: plan without devices (device="rtx4090" for a GPU that is not here), or name several'
        )
    if topology.alike and request.budget is not None:
        bytes_of_each = min(request.budget.bytes, topology.devices[0].memory_bytes)
        request = replace(request, budget=TierBudget(request.budget.given, bytes_of_each))
    best: Plan | None = None
    turned_down: list[str] = []
    unable: dict[str, list[str]] = {}  # ways by the reason that they have in common
    refused: dict[str, InfeasibleError] = {}
    unexplained: dict[str, NothingFitsError] = {}
    # Elsewhere what a block sends may overlap with computing, which no prediction counts: one unit would look faster than it is.
    ways = _ways(asked, ranks, one_unit=topology.processes and bool(repeated_blocks(source.model)))
    planning = _Planning(source, request, topology, make)
    for way in ways:
        named = in_words(Choices(sharding=way))
        tell(source.progress, f"planning for {named}", 0.0)
        try:
            made = planning.plan(way, faster_than=inf if best is None else best.prediction.step_seconds / WORTH_MORE)
        except InfeasibleError as error:
            refused[way] = error
            continue
        except NothingFitsError as error:
            unexplained[way] = error
            continue
        except NotFasterError as error:
            turned_down.append(f"{named}: {format_seconds(error.at_best_seconds)} a step at best")
            continue
        except (CaptureError, InputError) as error:
            if len(ways) == 1:
                raise
            unable.setdefault(str(error), []).append(named)
            continue
        if best is None or made.prediction.step_seconds * WORTH_MORE < best.prediction.step_seconds:
            turned_down += [] if best is None else [_slower(best)]
            best = made
        else:
            turned_down.append(_slower(made))
    turned_down += [
        reason if len(names) == len(ways) else f"{', and '.join(names)}: {reason}" for reason, names in unable.items()
    ]
    least = _needs_least(refused, unexplained, planning) if best is None and (refused or unexplained) else None
    turned_down += _do_not_fit(refused, unexplained)
    if best is None:
        if least is None:
            raise InputError(f"the step cannot be shared out among {ranks} ranks: {'; '.join(turned_down)}")
        refusals: list[InfeasibleError | NothingFitsError] = [*refused.values(), *unexplained.values()]
        beside = max(error.beside_bytes for error in refusals)
        if worth_telling(beside, least.minimum_bytes or 1 << 62):
            turned_down.append(f"of what each device needs, {format_bytes(beside)} are {BESIDE}")
        remedies = least.remedies or _larger_budget(least, topology)
        larger = "".join(f"Ways out: {each.text}. " for each in remedies if each.kind == "budget")
        raise InfeasibleError(
            f"no way of sharing the step out among {ranks} devices fits: {'; '.join(turned_down)}. {larger}Not tried: more devices, a smaller batch for each, "
            "words of allow=",
            budget_bytes=least.budget_bytes,
            minimum_bytes=least.minimum_bytes,
            moment=least.moment,
            module=least.module,
            remedies=remedies,
            beside_bytes=beside,
            weighed=tuple(turned_down),
        )
    kinds = Counter((kind.name, kind.memory_bytes) for kind in topology.devices)
    such = [f"{name}, with {format_bytes(size)}" for name, size in kinds]
    if len(kinds) == 1:
        assumed = f"each of the {ranks} devices is taken to be such as {such[0]}"
    else:
        counted = "; ".join(f"{number} such as {kind}" for kind, number in zip(such, kinds.values(), strict=True))
        assumed = f"the {ranks} devices are taken to be: {counted}"
    note = (
        f"seconds of collectives are estimated for {_links(topology)}, and counted as if none of them overlapped with computing: "
        "a step may be faster by what does"
    )
    if topology.processes:
        note = f"seconds of collectives are measured among {min(ranks, MOST_RANKS)} ranks of gloo that compute in between, on this computer"
        if timed_beside_others(ranks, source.slowdown):
            note += ", while other programs used its cores, so they are too high: plan again when it is quiet"
        sharing = core_sharing(topology)
        if sharing > 1.0:
            note += f"; the {ranks} ranks share fewer cores than they have threads, so computing is counted as {sharing:.3g} times as long as alone"
    return changed(best, rejected=(*best.rejected, *turned_down), notes=(*best.notes, assumed, note))


def _links(topology: Topology) -> str:
    nodes = topology.nodes
    if nodes is None:
        slowest = topology.slowest_bandwidth or float(ASSUMED_BANDWIDTH)
        return f"a ring of links of {slowest / 1e9:.3g} GB/s each way"
    inside = f"rings in nodes of {max(nodes.sizes)} devices, with {nodes.inside.bandwidth / 1e9:.3g} GB/s each way for each device"
    if len(nodes.sizes) == 1:
        return inside
    return f"{inside}, and {nodes.between.bandwidth / 1e9:.3g} GB/s between each of the {len(nodes.sizes)} nodes and the others"


def _ways(asked: str, ranks: int, *, one_unit: bool) -> tuple[str, ...]:
    """The settings to weigh: all, or those that a user leaves open.

    Args:
        asked: what the user fixed: a way, or with "/" and a number of ranks all of it.
        ranks: of all devices.
        one_unit: under ZeRO 2 the whole model as one unit is weighed beside gathering it block by block.
    """
    way = asked.partition("/")[0].partition("+")[0]
    whole = is_one_unit(asked)
    unknown = way not in (*WAYS, *PIPELINES, ANY_PIPELINE) or (way in WAYS and "+" in asked and not whole)
    if way and unknown:
        known = _ELSEWHERE.get(re.sub(r"[^a-z0-9]", "", way.lower()))
        meant = "" if known in {None, way} else f"; memfit's name for {way} is {known!r}"
        if "+" in asked:
            meant += f"; of what has a + there are {ONE_UNIT!r} and pipelines such as {str(Pipelines('1f1b', 2, 2, shards_state=True))!r}"
        raise InputError(f"fixed sharding={asked!r}: there is {listed((*WAYS, *PIPELINES, ANY_PIPELINE))}{meant}")
    if way in WAYS and "/" in asked and way_of(asked)[1] != ranks:
        raise InputError(
            f"fixed sharding={asked!r} is for {way_of(asked)[1]} devices, and there are {ranks}: write "
            f"{setting_of(ONE_UNIT if whole else way, ranks)!r}, or name as many devices"
        )
    if whole:
        return (setting_of(ONE_UNIT, ranks),)
    found = [each for each in WAYS if way in {"", each}]
    if one_unit and "zero2" in found and "/" not in asked:
        found.insert(found.index("zero2"), ONE_UNIT)
    sharded = (setting_of(each, ranks) for each in found)
    return (*sharded, *(settings_for(asked, ranks) if way not in WAYS else ()))


def _do_not_fit(refused: dict[str, InfeasibleError], unexplained: dict[str, NothingFitsError]) -> list[str]:
    """What to say of ways that do not fit, those first that need least."""
    told: list[tuple[float, str]] = [
        (error.least_bytes, f"at least {format_bytes(error.least_bytes)} are needed on each device")
        for error in unexplained.values()
    ]
    for way, error in refused.items():
        size = error.minimum_bytes
        # A cut of parts that were not captured as stages is told with what they take by themselves.
        least = "no plan was found for less than" if is_pipeline(way) else "the smallest plan needs"
        told.append((inf, "") if size is None else (size, f"{least} {format_bytes(size)} on each device"))
    named = (in_words(Choices(sharding=way)) for way in (*unexplained, *refused))
    lines = (
        (size, f"{name}: does not fit{', ' if why else ''}{why}") for name, (size, why) in zip(named, told, strict=True)
    )
    return [line for _, line in sorted(lines, key=lambda each: each[0])]


def _needs_least(
    refused: dict[str, InfeasibleError], unexplained: dict[str, NothingFitsError], planning: _Planning
) -> InfeasibleError:
    """Of the ways that do not fit, the one that needs least.

    What pipelines need is tried, and told anew where it is more; what others need is looked for, and then they are no longer among those `unexplained`.
    """

    def needed(way: str) -> int:
        return unexplained[way].least_bytes if way in unexplained else refused[way].minimum_bytes or 1 << 62

    tries: Counter[str] = Counter()
    while True:
        ways = [*refused, *unexplained]
        if tries.total() == CLAIMS:
            ways = [way for way in ways if not is_pipeline(way)]
        if not ways:  # pipelines alone, and what they need was not found
            least = refused[min(refused, key=needed)]
            return InfeasibleError(str(least), budget_bytes=least.budget_bytes)
        way = min(ways, key=needed)
        if way in unexplained:
            refused[way] = planning.refusal(way)
            del unexplained[way]
            continue
        least = refused[way]
        if not is_pipeline(way) or least.minimum_bytes is None:
            return least
        # Each refusal costs seconds, and says that a percent more is needed: so more than that is asked for each time.
        asked = least.minimum_bytes * (64 + tries[way] ** 2) // 64
        tries[way] += 1
        try:
            planning.plan(way, asked)
        except InfeasibleError as error:
            error.budget_bytes = least.budget_bytes
            refused[way] = error
        else:
            least.minimum_bytes = asked
            return least


def _larger_budget(least: InfeasibleError, topology: Topology) -> tuple[Remedy, ...]:
    """The one that would do, where the devices have as much."""
    size = least.minimum_bytes
    # Of a device that has less, no more than it has is taken: the search of a pipeline for unequal ones has heeded that.
    if size is None or size > max(device.memory_bytes for device in topology.devices):
        return ()
    return (Remedy.larger_budget(format_budget(size), size - least.budget_bytes),)


def _slower(plan: Plan) -> str:
    figures = plan.prediction
    return (
        f"{in_words(plan.choices)}: {format_seconds(figures.step_seconds)} a step at {format_bytes(figures.peak_bytes)}"
    )


@dataclass(eq=False)
class _Planning:
    """Plans for one way of sharing out after the other; what was captured for one budget of a pipeline serves the next.

    Args:
        source, request, topology, make: as for `plan_sharded`.
    """

    source: TraceSource
    request: Request
    topology: Topology
    make: Callable[[Request], Plan] | None
    _pipelines: dict[str, PipelinePlanning] = field(default_factory=dict)
    _unexplained: dict[str, Planning] = field(default_factory=dict)
    _planners: StagePlanners = field(default_factory=dict)

    def plan(self, setting: str, budget_bytes: int | None = None, *, faster_than: float = inf) -> Plan:
        """The plan for one way. It is searched for the rank with the most state, and fits on every one.

        Args:
            setting: the way.
            budget_bytes: of each device, where it is a pipeline; the request's if None.
            faster_than: seconds of a step: what cannot be faster is not planned for, and other ranks than the first one are not captured.

        Raises:
            NotFasterError: it cannot be.
            NothingFitsError: nothing fits, and `refusal` tells how much would do.
            InfeasibleError, InputError, CaptureError: as for any plan.
        """
        if is_pipeline(setting):
            if self.make is not None:
                raise InputError("a trainer runs the whole model in every process, so it trains no stages")
            if setting not in self._pipelines:
                self._pipelines[setting] = PipelinePlanning(
                    self.source, self.request, self.topology, setting, self._planners
                )
            return self._pipelines[setting].plan(budget_bytes, faster_than=faster_than)
        if not self.topology.alike:
            raise InputError(
                "equal parts are for devices that are alike, and these are not: take a pipeline over all of them, or name devices with the memory of the "
                "smallest"
            )
        with frozen(self.source.model, self.request.freeze):
            here = at_rank(setting, fullest(self.source.model, setting))
        settled = self.request.settling(sharding=here)
        if self.make is not None:
            return self.make(settled)
        planning = planning_for(self.source, settled)
        at_best = planning.seconds_at_best() if faster_than < inf else 0.0
        if SURE * at_best >= faster_than:
            raise NotFasterError(at_best)
        try:
            return planning.plan(explained=False)
        except NothingFitsError:
            self._unexplained[setting] = planning
            raise

    def refusal(self, setting: str) -> InfeasibleError:
        """That of a way in which nothing fits, with the smallest budget that would do."""
        try:
            self._unexplained.pop(setting).plan()
        except InfeasibleError as error:
            return error
        raise AssertionError("a plan of the same captures fits now")
