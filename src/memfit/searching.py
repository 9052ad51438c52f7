"""What a user asked for -> the Search over every way to run the step that respects it; and what a plan's techniques save and cost."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn

from memfit import batches
from memfit.batches import LossFunction
from memfit.errors import InputError, SplitError
from memfit.planner.by_hand import Placement
from memfit.planner.candidates import Offers, candidates, offers_to
from memfit.planner.head import head_of, sets_peak
from memfit.planner.optimistic import step_facts
from memfit.planner.search import CANNOT_RUN, Search
from memfit.planner.timeline import Timeline
from memfit.planner.transfers import StreamedLayer
from memfit.step.program import OptimizerFactory
from memfit.storage.folders import free_bytes, offload_folder
from memfit.storage.staging import STAGES_BYTES
from memfit.techniques.accumulation import ACCUMULATION
from memfit.techniques.autocast.precision import FORMATS
from memfit.techniques.choices import Choices
from memfit.techniques.freezing import FrozenPart
from memfit.techniques.freezing.freeze import frozen, frozen_parts
from memfit.techniques.layer_streaming.blocks import MODEL_ITSELF, blocks_at, repeated_blocks
from memfit.techniques.registry import BY_NAME
from memfit.techniques.technique import Subject
from memfit.tracing import Tracing
from memfit.units import format_bytes, format_seconds, parse_bytes
from memfit.values.machine import Link
from memfit.values.plan import Plan
from memfit.values.prediction import Saving
from memfit.values.trace import Category, Trace

Budget = str | int

SLOTS: Final = 2  # layers that are on the device while others are streamed
OF_OPTIMIZERS: Final = ("state_format", "state_place", "update")  # choices that only the optimizer can refuse


def search_for(
    tracing: Tracing,
    *,
    host_budget: Budget | None = None,
    disk_budget: Budget | None = None,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
) -> Search:
    """The search over this model and batch; the rest as for `memfit.plan`.

    Raises:
        SplitError: a number of micro-batches was fixed and the batch does not split.
        InputError, BudgetError, CaptureError: as for `memfit.plan`.
    """
    model, clip_norm = tracing.model, tracing.clip_norm
    for name, value in (("allow", allow), ("freeze", freeze)):
        if not isinstance(value, Iterable):
            raise InputError(f"{name}={value!r} is no list of words: write {name}=[...], or leave it out")
    if fixed is not None and not isinstance(fixed, Mapping):
        raise InputError(f'fixed={fixed!r} is no mapping: write names and values, such as {{"micro_batches": 4}}')
    fixed = fixed or {}
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm={clip_norm!r}: a positive number is needed, or None for no clipping")
    samples = batches.size(tracing.sample) * tracing.loader_batches
    micro_batches = _micro_batches(fixed, samples)
    parts_frozen(model, freeze)
    below = _below(tracing, host_budget, disk_budget)
    optimizers = _optimizer_offers(model, tracing.optimizer, freeze)
    # What the optimizer cannot have is said before anything is captured.
    candidates(optimizers, fixed={name: value for name, value in fixed.items() if name in OF_OPTIMIZERS})
    if micro_batches is not None and micro_batches > 1:
        how, reason = tracing.weights(freeze)
        if how is None:
            raise SplitError(
                f'fixed={{"micro_batches": {micro_batches}}} cannot be honoured: {reason}. Leave it out, or use a model that treats samples apart'
            )
    plain = tracing.trace_of(Choices(micro_batches=micro_batches or 1, frozen=tuple(freeze)))
    timeline = Timeline(plain)
    head = head_of(timeline)
    state = plain.bytes_of(Category.OPTIMIZER_STATE)
    layers = _streamable(tracing, below, freeze, fixed.get("streamed"))
    place = fixed.get("state_place", "device")
    host = f"host_budget={host_budget!r}"
    if host_budget is not None and fixed.get("streamed"):
        lying = _lying_bytes(layers, clip_norm)
        _check_room(host, below, lying, "layers and optimizer state", "plan without streaming")
    elif host_budget is not None and place != "device":
        tier = _tier(below, place)
        lying = tracing.state_bytes(tuple(freeze), fixed.get("state_format", "32bit"))
        if below is None or tier is below:
            _check_room(host, below, lying, "optimizer state", "keep the state on the device")
        elif tier is not None:  # else nobody said how much of the disk may be used
            _check_room(f"disk_budget={disk_budget!r}", tier, lying, "optimizer state", "keep the state on the device")
    subject = Subject(
        model,
        _made(model, tracing.optimizer, freeze),
        fixed,
        step_facts(timeline, below, layers),
        head_sets_peak=head is not None and sets_peak(timeline, head),
        capacity_bytes={link.tier: link.room_bytes for link in (below.chain if below is not None else ())},
        streamed=(layers[0].path.rpartition(".")[0] or MODEL_ITSELF) if layers else "",
    )
    offers = offers_to(subject)
    possible, refused = candidates(offers, allow=allow, freeze=freeze, fixed=fixed, clips=clip_norm is not None)
    given = host_budget is not None and below is not None and state > 0 and "state_place" not in fixed
    if given and not any(way.streamed or way.state_place != "device" for way in possible):
        no_room = f"host_budget={host_budget!r} has no room for its {format_bytes(state)}"
        why = no_room if offers.on_request.get("state_place") else offers.why_not["state_place"]
        refused = (*refused, f"optimizer state on the tier below: {why}")
    chunks = fixed.get("loss_chunks", 1)
    if head is not None and chunks > 1:
        found = head_of(Timeline(tracing.trace_of(replace(possible[0], micro_batches=micro_batches or 1))))
        if found is not None and found.rows == head.rows:
            raise InputError(
                f"fixed loss_chunks={chunks} cannot be honoured: the model uses its logits for more than a mean or sum of their cross entropy, "
                "or makes them otherwise than by a linear layer or torch.nn.functional.linear. Leave it out"
            )
    return Search(
        tracing.trace_of,
        samples,
        partial(tracing.weights, freeze),
        micro_batches,
        possible,
        refused,
        below,
        state,
        layers,
    )


def _below(tracing: Tracing, host_budget: Budget | None, disk_budget: Budget | None) -> Link | None:
    """The link to the tier below and the room there, with the disk below a GPU's host where that is open; None where nothing may be moved there.

    A GPU's host is open by default, a machine's disk only where the user says how much of it.
    """
    gpu = tracing.machine.kind == "cuda"
    if disk_budget is not None and disk_budget != 0:
        return _two_below(tracing, host_budget, disk_budget)
    if host_budget == 0 or (host_budget is None and not gpu):
        return None
    if host_budget is not None:
        total = _host_bytes() if gpu else _disk_bytes(tracing.folder)
        return replace(tracing.link, room_bytes=parse_bytes(host_budget, total_bytes=total))
    return tracing.link


def _two_below(tracing: Tracing, host_budget: Budget | None, disk_budget: Budget) -> Link:
    if tracing.machine.kind != "cuda":
        raise InputError(
            f"disk_budget={disk_budget!r} is room on the disk below a GPU's host, and this plan is for a CPU, which has its disk right below it: give "
            "host_budget"
        )
    if host_budget is None:
        raise InputError(
            f"disk_budget={disk_budget!r} is room for what the host has none for, and how much the host has nobody said: give host_budget, too"
        )
    host_bytes = 0 if host_budget == 0 else parse_bytes(host_budget, total_bytes=_host_bytes())
    if host_bytes <= STAGES_BYTES:
        raise InputError(
            f"host_budget={host_budget!r} does not hold the {format_bytes(STAGES_BYTES)} that copies to the disk pass through: give it more, or leave out "
            "disk_budget"
        )
    disk = replace(tracing.disk, room_bytes=parse_bytes(disk_budget, total_bytes=_disk_bytes(tracing.folder)))
    return replace(tracing.link, room_bytes=host_bytes - STAGES_BYTES, below=disk)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk_bytes(folder: str | Path | None) -> int:
    """What is free on the disk that is offloaded to."""
    return free_bytes(offload_folder(folder))


def _tier(below: Link | None, name: str) -> Link | None:
    """Of the tiers that are open, the one of this name."""
    return next((link for link in (below.chain if below is not None else ()) if link.tier == name), None)


def _streamable(tracing: Tracing, below: Link | None, freeze: Sequence[str], asked: Any) -> tuple[StreamedLayer, ...]:
    """The layers that the user wants streamed, or that could be; none where there is nothing to gain or no room below."""
    if isinstance(asked, str) and asked:
        return tracing.layers(Choices(frozen=tuple(freeze), streamed=blocks_at(tracing.model, asked).path))
    if asked is not None or below is None or tracing.optimizer is None:
        return ()
    found = repeated_blocks(tracing.model)
    if not found or len(found[0].paths) <= SLOTS:
        return ()
    layers = tracing.layers(Choices(frozen=tuple(freeze), streamed=found[0].path))
    lying = _lying_bytes(layers, tracing.clip_norm)
    return layers if below.room_bytes is None or lying <= below.room_bytes else ()


def _lying_bytes(layers: Sequence[StreamedLayer], clip_norm: float | None) -> int:
    """What lies below where these are streamed; gradients only where they wait there for the norm of all."""
    return sum(
        layer.weight_bytes + layer.state_bytes + (layer.gradient_bytes if clip_norm is not None else 0)
        for layer in layers
    )


def _check_room(given: str, tier: Link | None, needed: int, what: str, way_out: str) -> None:
    """See that what the user wants to lie on a tier finds room in what he gives of it."""
    room_bytes = 0 if tier is None else tier.room_bytes
    if room_bytes is not None and needed > room_bytes:
        raise InputError(
            f"{given} is less than the {what} that is to lie there ({format_bytes(needed)}): give it as much, or {way_out}"
        )


def _optimizer_offers(model: nn.Module, make_optimizer: OptimizerFactory | None, freeze: Sequence[str]) -> Offers:
    """What the optimizer alone decides; known before anything is captured."""
    return offers_to(Subject(model, _made(model, make_optimizer, freeze)), OF_OPTIMIZERS)


def _made(model: nn.Module, make_optimizer: OptimizerFactory | None, freeze: Sequence[str]) -> Any:
    if make_optimizer is None:
        return None
    with frozen(model, freeze):
        return make_optimizer(p for p in model.parameters() if p.requires_grad)


def _micro_batches(fixed: Mapping[str, Any], samples: int) -> int | None:
    number = fixed.get("micro_batches")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= samples:
        raise InputError(
            f"fixed micro_batches={number!r}: a whole number from 1 to the {samples} samples of the batch is needed"
        )
    return number


def parts_frozen(model: nn.Module, patterns: Sequence[str]) -> tuple[FrozenPart, ...]:
    """What the patterns freeze; nothing where there are none."""
    return frozen_parts(model, patterns) if patterns else ()


class Runtime:
    """What a plan was made from, kept beside it in the process that made it."""

    def __init__(
        self,
        search: Search,
        loss_fn: LossFunction | None,
        optimizer: OptimizerFactory | None,
        fixed: Mapping[str, Any] | None = None,
        frozen: tuple[FrozenPart, ...] = (),
        placement: Placement | None = None,
        host_budget: Budget | None = None,
        disk_budget: Budget | None = None,
    ) -> None:
        self.search = search
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.fixed = fixed
        self.frozen = frozen
        self.host_budget = host_budget
        self.disk_budget = disk_budget
        self.placement = placement  # of recomputation, where the user did it by hand

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan found, with what its techniques save and what they cost that nobody may expect."""
        found = self.search.plan(budget_bytes)
        return replace(
            found,
            savings=tuple(self._savings(found)),
            frozen=self.frozen,
            notes=(*found.notes, *self._slow_precisions()),
            runtime=self,
        )

    def _plain(self, way: Choices) -> tuple[Trace, int]:
        """The step run this way and nothing dropped, and its peak."""
        solver = self.search.solver(self.search.fixed_micro_batches or 1, way)
        return solver.trace, solver.plain.peak

    def _savings(self, plan: Plan) -> Iterator[Saving]:
        """Of each technique the plan uses: what the step would take without it, all others kept and nothing dropped."""
        chosen = plan.choices
        way = chosen.but(micro_batches=1, micro_batch_size=0, weights="whole", unforced=())
        trace, peak = self._plain(way)
        for name, setting in way.techniques:
            technique = BY_NAME[name]
            with suppress(*CANNOT_RUN):
                other, other_peak = self._plain(way.but(**{name: technique.baseline}))
                facts = step_facts(Timeline(other)), step_facts(Timeline(trace))
                claimed, claim = technique.claim(*facts, setting)
                seconds = trace.plain_step_seconds - other.plain_step_seconds
                yield Saving(technique.asked_by(setting), claimed, other_peak - peak, claim, seconds)
        number = chosen.micro_batches
        if number > 1 and self.search.fixed_micro_batches is None:
            parts = self.search.solver(number, way)
            facts = step_facts(Timeline(trace)), step_facts(parts.timeline)
            claimed, claim = ACCUMULATION.claim(*facts, number)
            seconds = parts.trace.plain_step_seconds - trace.plain_step_seconds
            yield Saving(ACCUMULATION.words(number), claimed, peak - parts.plain.peak, claim, seconds)

    def _slow_precisions(self) -> Iterator[str]:
        """Of 16-bit ways that were weighed, those whose operations take longer than in full precision."""
        for precision in FORMATS:
            way = next((w for w in self.search.ways if w.precision == precision), None)
            if way is None:
                continue
            with suppress(*CANNOT_RUN):
                seconds = self._plain(way)[0].plain_step_seconds
                full = self._plain(way.but(precision="full"))[0].plain_step_seconds
                if seconds > full:
                    yield (
                        f"{precision} is slower than full precision on this device: {format_seconds(seconds)} a step against {format_seconds(full)} "
                        "before anything is dropped; what it may save is bytes"
                    )
