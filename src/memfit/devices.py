"""Which way of sharing a step out among several devices is the fastest that fits into each of them: all are captured, planned for and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from memfit.capture.trace_source import TraceSource
from memfit.errors import CaptureError, InfeasibleError, InputError
from memfit.hardware.machine import Machine
from memfit.hardware.network import ASSUMED_BANDWIDTH, devices_of
from memfit.hardware.topology import Topology
from memfit.offers import planning_for
from memfit.planning import changed
from memfit.progress import tell
from memfit.sharding.roles import fullest
from memfit.techniques.choices import Choices, in_words
from memfit.techniques.freezing.freeze import frozen
from memfit.techniques.sharding import WAYS, setting_of
from memfit.techniques.technique import listed
from memfit.units import format_bytes, format_seconds, parse_bytes
from memfit.values.plan import Plan
from memfit.values.request import Budget, Request

# What shares out less sends less and is closer to one device; more of it must make a step faster by this factor.
WORTH_MORE: Final = 1.01
ROUNDS: Final = 3


def several_devices(devices: str | int | Topology, here: Machine) -> Topology:
    """The devices that a user named.

    Raises:
        InputError: they cannot be read, or are not alike.
    """
    topology = devices if isinstance(devices, Topology) else devices_of(devices, here)
    if len(set(topology.devices)) > 1:
        raise InputError(
            "sharding deals out equal parts, so its devices have to be alike: give those of one kind, with the memory of the smallest"
        )
    return topology


def share_of(topology: Topology, budget: Budget) -> Budget:
    """A budget in bytes where it is a share of a device's memory."""
    return parse_bytes(budget, total_bytes=topology.devices[0].memory_bytes)


def plan_sharded(
    source: TraceSource, request: Request, topology: Topology, make: Callable[[Request], Plan] | None = None
) -> Plan:
    """The fastest plan among data parallelism and ZeRO 1, 2 and 3; what was turned down is told with its reason.

    Args:
        source: of the traces; its sample is the batch of one rank.
        request: whose budget is that of each device.
        topology: the devices.
        make: the plan for a request in which one way is settled; None for that of the source's step.

    Raises:
        InfeasibleError: no way fits; carries the smallest budget of all.
        InputError: the request cannot be honoured; or the way that it fixes.
    """
    ranks = len(topology.devices)
    asked = str(request.fixed.get("sharding", "")).partition("/")[0]
    if asked and asked not in WAYS:
        raise InputError(f"fixed sharding={request.fixed['sharding']!r}: there is {listed(WAYS)}")
    if ranks == 1:
        raise InputError("devices names one device: plan without devices, or name several")
    best: Plan | None = None
    turned_down: list[str] = []
    least: InfeasibleError | None = None
    for way in (asked,) if asked else WAYS:
        named = in_words(Choices(sharding=setting_of(way, ranks)))
        tell(source.progress, f"planning for {named}", 0.0)
        try:
            made = _planned(source, request, way, ranks, make)
        except InfeasibleError as error:
            needs = (
                ""
                if error.minimum_bytes is None
                else f", the smallest plan needs {format_bytes(error.minimum_bytes)} on each device"
            )
            turned_down.append(f"{named}: does not fit{needs}")
            if least is None or (error.minimum_bytes or 1 << 62) < (least.minimum_bytes or 1 << 62):
                least = error
            continue
        except (CaptureError, InputError) as error:
            if asked:
                raise
            turned_down.append(f"{named}: {error}")
            continue
        if best is None or made.prediction.step_seconds * WORTH_MORE < best.prediction.step_seconds:
            turned_down += [] if best is None else [_slower(best)]
            best = made
        else:
            turned_down.append(_slower(made))
    if best is None:
        if least is None:
            raise InputError(f"the step cannot be shared out among {ranks} ranks: {'; '.join(turned_down)}")
        raise InfeasibleError(
            f"no way of sharing the step out among {ranks} devices fits: {'; '.join(turned_down)}. Ways out: "
            f"{''.join(f'{each.text}; ' for each in least.remedies if each.kind == 'budget')}more devices; a smaller batch for each; more in allow=",
            budget_bytes=least.budget_bytes,
            minimum_bytes=least.minimum_bytes,
            moment=least.moment,
            module=least.module,
            remedies=least.remedies,
            weighed=tuple(turned_down),
        )
    kind = topology.devices[0]
    assumed = f"each of the {ranks} devices is taken to be such as {kind.name}, with {format_bytes(kind.memory_bytes)}"
    slowest = min((p.bandwidth for p in topology.peers), default=float(ASSUMED_BANDWIDTH))
    note = (
        f"seconds of collectives are estimated for a ring of links of {slowest / 1e9:.3g} GB/s each way, and counted as if none of them overlapped with "
        "computing: a step may be faster by what does"
    )
    return changed(best, rejected=(*best.rejected, *turned_down), notes=(*best.notes, assumed, note))


def _slower(plan: Plan) -> str:
    figures = plan.prediction
    return (
        f"{in_words(plan.choices)}: {format_seconds(figures.step_seconds)} a step at {format_bytes(figures.peak_bytes)}"
    )


def _planned(
    source: TraceSource, request: Request, way: str, ranks: int, make: Callable[[Request], Plan] | None
) -> Plan:
    """The plan for one way, in which the fullest rank fits."""
    with frozen(source.model, request.freeze):
        setting = setting_of(way, ranks, fullest(source.model, setting_of(way, ranks)))
    if make is not None:
        return make(request.settling(sharding=setting))
    planning = planning_for(source, request.settling(sharding=setting))
    assert request.budget is not None, "whoever plans has one"
    budget_bytes = target = request.budget.bytes
    for _ in range(ROUNDS):
        made = planning.plan(target)
        excess = made.prediction.peak_bytes - budget_bytes
        if excess <= 0:
            return made if target == budget_bytes else changed(made, budget_bytes=budget_bytes)
        target -= excess  # another rank is fuller at its peak than the one that was planned for
    raise InfeasibleError(
        f"of {ranks} ranks one needs {format_bytes(excess)} more than the budget in every plan that was tried",
        budget_bytes=budget_bytes,
        minimum_bytes=budget_bytes + excess,
    )
