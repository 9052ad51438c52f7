"""Everything that planning needs to know of one model and batch under one request. A value: frozen, torch-free, saved as one gzipped JSON file.

Whoever holds a bundle can plan any number of budgets, in another process, without the model and without torch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from memfit.errors import PlanFileError
from memfit.garbage import uncollected
from memfit.hardware.machine import Link
from memfit.hardware.topology import Topology
from memfit.techniques.choices import BASELINE, Choices
from memfit.techniques.freezing import FrozenPart
from memfit.values.request import Request
from memfit.values.trace import Trace

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """Bytes of one block that is offloaded between its uses.

    Attributes:
        path: of its module; "" for what is in no block, of which the optimizer state alone moves.
        weight_bytes, gradient_bytes, state_bytes: of its parameters, of gradients of those that are trained, and of their optimizer state.
    """

    path: str
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Weighting:
    """How the losses of micro-batches add up to the batch's.

    Attributes:
        weights: one of `batches.weightings`; None where the batch cannot be split without changing the result.
        reason: why it cannot; "" where it can.
    """

    weights: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a step cannot be captured with some choices.

    Attributes:
        kind: name of the exception's class.
        text: what it said.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class TraceBundle:
    """One model and batch, as far as planning is concerned.

    Attributes:
        request: what it was captured for. Budgets of lower tiers decided which candidates there are; the device's budget may be any.
        topology: the device that seconds are for, and the links from it that were measured.
        samples: in a batch.
        candidates: sets of techniques that respect the request, each with one micro-batch; the first is the baseline, the step as the user has it.
        refused: techniques that were asked for or allowed and cannot be used, each with its reason.
        lower_tier: the link to the nearest tier that may be offloaded to, with those to further tiers and the capacity of each; None for none.
        state_bytes: of the whole optimizer state in 32 bits.
        layers: that some candidates stream, and last an entry for what is in no block; empty where no candidate streams.
        frozen: what the request freezes.
        weighting: how the losses of micro-batches add up; None where it has not been determined yet.
        roles: of a sharded step, for each rank the first one whose step is the same, bytes included.
        traces: by the choices they were captured for.
        refusals: choices that could not be captured, and why.
    """

    request: Request
    topology: Topology
    samples: int
    candidates: tuple[Choices, ...] = (BASELINE,)
    refused: tuple[str, ...] = ()
    lower_tier: Link | None = None
    state_bytes: int = 0
    layers: tuple[StreamedLayer, ...] = ()
    frozen: tuple[FrozenPart, ...] = ()
    weighting: Weighting | None = None
    roles: tuple[int, ...] = ()
    traces: Mapping[Choices, Trace] = field(default_factory=dict)
    refusals: Mapping[Choices, Refusal] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, lower_tier: Link | None = None) -> TraceBundle:
        """A bundle of a single trace; its plans use the choices of the trace.

        Args:
            trace: as captured.
            lower_tier: the link to the tier that plans may offload to, with its capacity.
        """
        how = trace.choices
        number = how.micro_batches
        # The last micro-batch may be smaller, so there may be fewer samples; only a search for their number would need them exactly.
        return cls(
            Request(freeze=how.frozen, clip_norm=trace.clip_norm).settling(micro_batches=number),
            Topology((), ((),)),
            how.micro_batch_size * number,
            (candidate_of(how),),
            lower_tier=lower_tier,
            weighting=Weighting(how.weights),
            traces={replace(candidate_of(how), micro_batches=number): trace},
        )

    @property
    def trace(self) -> Trace:
        """The baseline: the step as the user has it, nothing dropped.

        Raises:
            LookupError: it was not captured.
        """
        trace = self.traces[replace(self.candidates[0], micro_batches=self.request.micro_batches or 1)]
        if trace.micro_batches == 1 or self.weighting is None:
            return trace
        return replace(trace, choices=replace(trace.choices, weights=self.weighting.weights or "whole"))

    def with_trace(self, choices: Choices, trace: Trace) -> TraceBundle:
        """The same, with one trace more."""
        return replace(self, traces={**self.traces, choices: trace})

    def with_refusal(self, choices: Choices, refusal: Refusal) -> TraceBundle:
        """The same, with one refusal more."""
        return replace(self, refusals={**self.refusals, choices: refusal})

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON; each trace in columns."""
        return {
            "memfit": "bundle",
            "format_version": FORMAT_VERSION,
            "request": self.request.to_json(),
            "topology": self.topology.to_json(),
            "samples": self.samples,
            "candidates": [_choices_to_json(choices) for choices in self.candidates],
            "refused": list(self.refused),
            "lower_tier": None if self.lower_tier is None else asdict(self.lower_tier),
            "state_bytes": self.state_bytes,
            "layers": [asdict(layer) for layer in self.layers],
            "frozen": [asdict(part) for part in self.frozen],
            "weighting": None if self.weighting is None else asdict(self.weighting),
            "roles": list(self.roles),
            "traces": [[_choices_to_json(choices), trace.to_json()] for choices, trace in self.traces.items()],
            "refusals": [[_choices_to_json(choices), asdict(why)] for choices, why in self.refusals.items()],
        }

    @classmethod
    def from_json(cls, data: Any) -> TraceBundle:
        """Inverse of `to_json`.

        Raises:
            PlanFileError: not a bundle, another format version, or fields that do not fit together.
        """
        have = data if isinstance(data, Mapping) else {}
        if have.get("memfit") != "bundle":
            if "operations" in have:
                raise PlanFileError(
                    f"this is a single trace of format {have.get('format_version')!r}, where a bundle of format {FORMAT_VERSION} is needed: capture it "
                    "again with memfit.record(...).save(path)"
                )
            raise PlanFileError("this is not a trace bundle: make one with memfit.record(...).save(path)")
        if have.get("format_version") != FORMAT_VERSION:
            raise PlanFileError(
                f"this trace bundle has format {have.get('format_version')!r}, this memfit reads {FORMAT_VERSION}: capture it again with "
                "memfit.record(...).save(path)"
            )
        try:
            weighting = have["weighting"]
            return cls(
                request=Request.from_json(have["request"]),
                topology=Topology.from_json(have["topology"]),
                samples=int(have["samples"]),
                candidates=tuple(map(_choices_from_json, have["candidates"])),
                refused=tuple(map(str, have["refused"])),
                lower_tier=Link.from_json(have["lower_tier"]),
                state_bytes=int(have["state_bytes"]),
                layers=tuple(StreamedLayer(**layer) for layer in have["layers"]),
                frozen=tuple(FrozenPart(**part) for part in have["frozen"]),
                weighting=None if weighting is None else Weighting(**weighting),
                roles=tuple(map(int, have.get("roles", ()))),
                traces={_choices_from_json(choices): Trace.from_json(trace) for choices, trace in have["traces"]},
                refusals={_choices_from_json(choices): Refusal(**why) for choices, why in have["refusals"]},
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, PlanFileError):
                raise
            raise PlanFileError(f"this trace bundle is damaged ({error}): capture it again") from error

    def save(self, path: str | Path) -> None:
        """Write the bundle as gzipped JSON."""
        Path(path).write_bytes(gzip.compress(json.dumps(self.to_json()).encode(), mtime=0))

    @classmethod
    @uncollected()
    def load(cls, path: str | Path) -> TraceBundle:
        """Read what `save` wrote.

        Raises:
            PlanFileError: not a bundle, of another format, or damaged.
        """
        try:
            data = json.loads(gzip.decompress(Path(path).read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise PlanFileError(f"{path} is not a readable trace bundle ({error}): capture it again") from error
        return cls.from_json(data)


def candidate_of(choices: Choices) -> Choices:
    """The candidate that these choices belong to: the same techniques with one micro-batch."""
    return replace(choices, micro_batches=1, micro_batch_size=0, weights="whole", unforced=())


def _choices_to_json(choices: Choices) -> dict[str, Any]:
    # Choices that a step was captured for have no micro-batch size yet; a value of choices has one.
    return choices.but(micro_batch_size=1).to_json()


def _choices_from_json(data: Mapping[str, Any]) -> Choices:
    return replace(Choices.from_json(data), micro_batch_size=0)
