"""Which candidates one model, batch and optimizer allow under a request, and whether the request is possible: the bundle that planning starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from memfit import lower_tiers
from memfit.capture.source import model_digest
from memfit.capture.trace_source import TraceSource
from memfit.errors import InputError, SplitError
from memfit.garbage import uncollected
from memfit.hardware.machine import Link
from memfit.hardware.topology import Topology
from memfit.planner.by_hand import RecomputePlacement
from memfit.planner.candidates import candidates, offers_to
from memfit.planner.head import head_of, sets_peak
from memfit.planner.optimistic import step_facts
from memfit.planner.timeline import Timeline
from memfit.planning import Planning
from memfit.sharding.by_rows import check_by_rows
from memfit.sharding.roles import roles_of
from memfit.step.given import check_closure, made_optimizer
from memfit.step.program import OptimizerFactory
from memfit.techniques.choices import Choices
from memfit.techniques.conversions import conversion_of
from memfit.techniques.freezing.freeze import frozen, frozen_parts
from memfit.techniques.layer_streaming import MODEL_ITSELF
from memfit.techniques.layer_streaming.blocks import blocks_at, repeated_blocks
from memfit.techniques.registry import BY_NAME
from memfit.techniques.sharding import way_of
from memfit.techniques.technique import Subject
from memfit.units import format_bytes
from memfit.values.bundle import StreamedLayer, TraceBundle
from memfit.values.request import Request
from memfit.values.trace import Category

SLOTS: Final = 2  # layers that are on the device while others are streamed
OF_OPTIMIZERS: Final = ("state_format", "state_place", "update")  # choices that only the optimizer can refuse


def planning_for(source: TraceSource, request: Request, placement: RecomputePlacement | None = None) -> Planning:
    """The `Planning` for this model, batch and request.

    Args:
        source: of the traces; several requests may share it.
        request: what the user asked.
        placement: of recomputation, where the user does it by hand.

    Raises:
        SplitError: a number of micro-batches was fixed and the batch does not split.
        InputError, CaptureError: as for `memfit.plan`.
    """
    return Planning(offered_bundle(source, request), source, placement)


def offered_bundle(source: TraceSource, request: Request) -> TraceBundle:
    """The bundle that planning starts from: the request checked against model, batch and optimizer, the candidates, and the trace of the baseline.

    Raises:
        SplitError, InputError, CaptureError: as for `planning_for`.
    """
    model, freeze = source.model, request.freeze
    conversion = conversion_of(model, model_digest(model))
    converted = {} if conversion is None else conversion.settings
    request = request.fixing(**{**converted, **request.fixed})
    fixed = request.fixed
    micro_batches = _micro_batches(fixed, source.samples)
    parts = frozen_parts(model, freeze) if freeze else ()
    lower_tiers.check(source.machine, request)
    subject = Subject(model, _made(model, source.optimizer, freeze), fixed, device_kind=source.machine.kind)
    # Requests that the optimizer rules out are refused before anything is captured.
    candidates(
        offers_to(subject, OF_OPTIMIZERS), fixed={name: value for name, value in fixed.items() if name in OF_OPTIMIZERS}
    )
    check_closure(subject.optimizer)
    if subject.optimizer is not None and str(fixed.get("sharding", "")).startswith(("zero2", "zero3")):
        check_by_rows(subject.optimizer)
    weighting = None
    if micro_batches is not None and micro_batches > 1:
        weighting = source.weighting(freeze)
        if weighting.weights is None:
            raise SplitError(
                f'fixed={{"micro_batches": {micro_batches}}} cannot be honoured: {weighting.reason}. Leave micro_batches out, and the batch stays whole'
            )
    links = lower_tiers.measured_links(source.here, source.machine, request)
    network = source.network
    if network is not None:
        links = lower_tiers.shared_out(links, network.most_on_a_computer)
    elif sharding := str(fixed.get("sharding", "")):
        links = lower_tiers.shared_out(links, way_of(sharding)[1])
    topology = Topology.single(source.machine, links)
    if network is not None:
        topology = replace(network, down=(links,) * len(network.devices))
    below = lower_tiers.opened(topology, request)
    choices = Choices(**{**converted, "micro_batches": micro_batches or 1, "frozen": tuple(freeze)})
    plain = source.trace_of(choices)
    with uncollected():
        timeline = Timeline(plain)
    head = head_of(timeline)
    state = plain.bytes_of(Category.OPTIMIZER_STATE)
    layers = _streamable(source, below, freeze, fixed.get("streamed"))
    _check_free_space(source, request, below, layers)
    with frozen(model, freeze):  # as the step has it
        offers = offers_to(
            replace(
                subject,
                facts=step_facts(timeline, below, layers),
                head_sets_peak=head is not None and sets_peak(timeline, head),
                capacity_bytes={link.tier: link.free_bytes for link in (below.chain if below is not None else ())},
                streamed=(layers[0].path.rpartition(".")[0] or MODEL_ITSELF) if layers else "",
            )
        )
    clips = request.clip_norm is not None
    possible, refused = candidates(offers, allow=request.allow, freeze=freeze, fixed=fixed, clips=clips)
    given = request.host_budget is not None and below is not None and state > 0 and "state_place" not in fixed
    if given and not any(candidate.streamed or candidate.state_place != "device" for candidate in possible):
        assert request.host_budget is not None
        too_small = f"host_budget={request.host_budget.given!r} is less than its {format_bytes(state)}"
        why = too_small if offers.on_request.get("state_place") else offers.why_not["state_place"]
        refused = (*refused, f"optimizer-state offloading: {why}")
    chunks = fixed.get("loss_chunks", 1)
    if head is not None and chunks > 1:
        found = head_of(Timeline(source.trace_of(replace(possible[0], micro_batches=micro_batches or 1))))
        if found is not None and found.rows == head.rows:
            raise InputError(
                f"fixed loss_chunks={chunks} cannot be honoured: the model uses its logits for more than a mean or sum of their cross entropy, "
                "or makes them otherwise than by a linear layer or torch.nn.functional.linear. Leave it out"
            )
    return TraceBundle(
        request,
        topology,
        source.samples,
        possible,
        refused,
        lower_tier=below,
        state_bytes=state,
        layers=layers,
        frozen=parts,
        roles=_roles(model, freeze, fixed.get("sharding", "")),
        weighting=weighting,
        traces={choices: plain},
    )


def _roles(model: nn.Module, freeze: Sequence[str], sharding: str) -> tuple[int, ...]:
    """Of each rank, where the step is sharded."""
    if not sharding:
        return ()
    with frozen(model, freeze):
        return roles_of(model, sharding)


def _check_free_space(
    source: TraceSource, request: Request, below: Link | None, layers: Sequence[StreamedLayer]
) -> None:
    """Check that what the user wants offloaded fits into the budget of its lower tier.

    Raises:
        InputError: it does not.
    """
    fixed, given = request.fixed, request.host_budget
    place = fixed.get("state_place", "device")
    if given is None:
        return
    host = f"host_budget={given.given!r}"
    if fixed.get("streamed"):
        needed = _bytes_on_lower_tier(layers, request.clip_norm)
        _check_capacity(host, below, needed, "layers and optimizer state", "plan without streaming")
    elif place != "device":
        tier = next((link for link in (below.chain if below is not None else ()) if link.tier == place), None)
        needed = source.state_bytes(Choices(**{**_techniques(fixed), "frozen": tuple(request.freeze)}))
        if below is None or tier is below:
            _check_capacity(host, below, needed, "optimizer state", "keep the state on the device")
        elif tier is not None:  # Without a disk_budget the disk is not limited.
            assert request.disk_budget is not None
            disk = f"disk_budget={request.disk_budget.given!r}"
            _check_capacity(disk, tier, needed, "optimizer state", "keep the state on the device")


def _streamable(
    source: TraceSource, below: Link | None, freeze: Sequence[str], asked: Any
) -> tuple[StreamedLayer, ...]:
    """The layers that the user wants streamed, or that could be; none where that saves nothing or they do not fit on the lower tier."""
    if isinstance(asked, str) and asked:
        return source.layers(Choices(frozen=tuple(freeze), streamed=blocks_at(source.model, asked).path))
    if asked is not None or below is None or source.optimizer is None:
        return ()
    found = repeated_blocks(source.model)
    if not found or len(found[0].paths) <= SLOTS:
        return ()
    layers = source.layers(Choices(frozen=tuple(freeze), streamed=found[0].path))
    offloaded_bytes = _bytes_on_lower_tier(layers, source.clip_norm)
    return layers if below.free_bytes is None or offloaded_bytes <= below.free_bytes else ()


def _bytes_on_lower_tier(layers: Sequence[StreamedLayer], clip_norm: float | None) -> int:
    """Bytes on the lower tier while these layers are streamed. Gradients count only with clipping: they wait there until the global norm is known."""
    return sum(
        layer.weight_bytes + layer.state_bytes + (layer.gradient_bytes if clip_norm is not None else 0)
        for layer in layers
    )


def _check_capacity(given: str, tier: Link | None, needed: int, what: str, way_out: str) -> None:
    """Check that `needed` bytes fit into the budget `given` for a tier.

    Raises:
        InputError: they do not.
    """
    free_bytes = 0 if tier is None else tier.free_bytes
    if free_bytes is not None and needed > free_bytes:
        raise InputError(
            f"{given} is less than the {what} to be offloaded ({format_bytes(needed)}): give at least as much, or {way_out}"
        )


def _made(model: nn.Module, make_optimizer: OptimizerFactory | None, freeze: Sequence[str]) -> Any:
    """The optimizer, over what is trained; None where there is none."""
    if make_optimizer is None:
        return None
    with frozen(model, freeze):
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise InputError(
                "no parameter of the model is trained, as none requires gradients: call requires_grad_(True) on what is to be trained, or freeze less"
            )
        return made_optimizer(make_optimizer, trained)


def _techniques(fixed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fixed.items() if name in BY_NAME}


def _micro_batches(fixed: Mapping[str, Any], samples: int) -> int | None:
    number = fixed.get("micro_batches")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= samples:
        raise InputError(
            f"fixed micro_batches={number!r}: a whole number from 1 to the {samples} samples of the batch is needed"
        )
    return number
