"""Which techniques the stages of a pipeline can have besides frozen parts, and what a request allows or asks of them that they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memfit.capture.trace_source import TraceSource
from memfit.errors import InputError
from memfit.planner.candidates import candidates, offers_to
from memfit.step.given import check_closure, made_optimizer
from memfit.techniques.choices import Choices
from memfit.techniques.freezing.freeze import frozen
from memfit.techniques.registry import ALLOWED, BY_NAME
from memfit.techniques.technique import Subject, listed
from memfit.values.request import Request

OPEN: Final = ("sharding", "micro_batches")  # what may be fixed of any pipeline
# Settings besides the baseline. In fp16 all ranks would have to skip a step together, those that train nothing included.
IN_STAGES: Final[Mapping[str, tuple[Any, ...]]] = {"precision": ("bf16",), "state_format": ("8bit",)}


def candidates_for_stages(source: TraceSource, request: Request) -> tuple[tuple[Choices, ...], tuple[str, ...]]:
    """Sets of techniques with which stages can run, those with fewest first; and what is allowed and left out, with its reason.

    Args:
        source: of the model and its optimizer.
        request: what the user asked.

    Raises:
        InputError: the request fixes what stages cannot have, or gives them memory that they cannot use.
    """
    for name, tier in (("host_budget", request.host_budget), ("disk_budget", request.disk_budget)):
        if tier is not None and tier.bytes:
            raise InputError(
                f"{name}={tier.given!r} is for what is offloaded, and stages of a pipeline offload nothing: leave {name} out, or take data parallelism or ZeRO"
            )
    fixed = {name: value for name, value in request.fixed.items() if name not in OPEN}
    for name, value in fixed.items():
        if name in BY_NAME and value not in (BY_NAME[name].baseline, *IN_STAGES.get(name, ())):
            have = ", ".join(f"{each}={setting!r}" for each, settings in IN_STAGES.items() for setting in settings)
            raise InputError(f"fixed {name}={value!r} is not for stages of a pipeline: of techniques they have {have}")
    stays_out = {
        word: technique for word, technique in ALLOWED.items() if technique[1] not in IN_STAGES.get(technique[0], ())
    }
    left_out = tuple(
        f"{word}: stages of a pipeline do not have it, of all that can be allowed they have "
        f"{listed(other for other in ALLOWED if other not in stays_out)}"
        for word in dict.fromkeys(request.allow)
        if word in stays_out
    )
    with frozen(source.model, request.freeze):
        made = None
        if source.optimizer is not None:
            made = made_optimizer(source.optimizer, [p for p in source.model.parameters() if p.requires_grad])
            check_closure(made)
        subject = Subject(source.model, made, fixed, device_kind=source.machine.kind)
        offers = offers_to(subject, tuple(IN_STAGES))
    possible, refused = candidates(
        offers,
        allow=[word for word in request.allow if word not in stays_out],
        freeze=request.freeze,
        fixed=fixed,
        clips=request.clip_norm is not None,
    )
    return possible, (*left_out, *refused)
