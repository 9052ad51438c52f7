"""What else a step may be run with, on every architecture: each with the numbers of plain PyTorch, and the peak as predicted?

Where a technique changes numbers (16 bits, 8-bit state, parts frozen), the numbers are those of the same technique done plainly.
"""

from __future__ import annotations

import copy
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn

import memfit
from engine.forced import LINK, everything, forced
from memfit.errors import InfeasibleError, MemfitError
from memfit.planner.head import head_of
from memfit.planner.recipes import Recipes
from memfit.planning import Planning
from memfit.step.program import StepProgram
from memfit.techniques.choices import Choices
from memfit.techniques.layer_streaming.blocks import repeated_blocks
from step import ways

from .building import Specimen, in_short
from .comparing import same_bits, seeds_of, weighed, where

CLASSES = ("exact", "drawn", "kept plain", "refused", "not deterministic", "does not apply", "wrong")
SHARE = 0.8  # budget over the peak of the step run this way, or the least that there is: what else is dropped has to go along with it
STEPS = 2
ROUNDING = 1e-5  # of gradients that are added up in another order, as a plan promises


@dataclass(slots=True)
class Applied:
    """What came of one technique on one architecture.

    Attributes:
        kind: one of CLASSES.
        reason: why it is not "exact".
        detail: what was frozen or streamed.
    """

    technique: str
    kind: str = ""
    reason: str = ""
    where: str = ""
    detail: str = ""
    plain_bytes: int = 0
    predicted_bytes: int = 0
    metered_bytes: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Technique:
    """One of them.

    Attributes:
        way: how the step is run with it, for a model and its plain step; None where it has nothing to be applied to.
    """

    name: str
    way: Callable[[nn.Module, Planning], Choices | None]


def _frozen(model: nn.Module, _: Planning) -> Choices | None:
    """The lowest part: the first module that has parameters, but not more than half of all."""
    count = sum(p.numel() for p in model.parameters())
    path, module = "", model
    while True:
        inside = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
        if not inside:
            return None
        path, module = f"{path}.{inside[0][0]}".lstrip("."), inside[0][1]
        if 2 * sum(p.numel() for p in module.parameters()) <= count:
            return Choices(frozen=(path,))


def _streamed(model: nn.Module, _: Planning) -> Choices | None:
    """The largest family of blocks."""
    blocks = repeated_blocks(model)
    return Choices(streamed=blocks[0].path) if blocks else None


def _in_chunks(_: nn.Module, search: Planning) -> Choices | None:
    head = head_of(search.solver(1).timeline)
    return Choices(loss_chunks=2) if head is not None and head.rows > 1 else None


def _swapped(_: nn.Module, search: Planning) -> Choices | None:
    recipes = Recipes(search.solver(1).trace, LINK)
    return Choices() if recipes.reloads_of.keys() & recipes.saved else None


TECHNIQUES: Final = (
    Technique("8-bit state", lambda _, __: Choices(state_format="8bit")),
    Technique("state on disk", lambda _, __: Choices(state_place="disk")),
    Technique("update in backward", lambda _, __: Choices(update="in_backward")),
    Technique("freezing", _frozen),
    Technique("bf16", lambda _, __: Choices(precision="bf16")),
    Technique("swap", _swapped),
    Technique("loss in chunks", _in_chunks),
    Technique("streaming", _streamed),
)


def turn_of(architecture: str, model: nn.Module, search: Planning) -> Technique:
    """Whose turn it is on an architecture: of those that apply to it, the one that its name picks."""
    possible = [technique for technique in TECHNIQUES if technique.way(model, search) is not None]
    return possible[zlib.crc32(architecture.encode()) % len(possible)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With steps so small that what values decide (which expert, which rows) hardly changes from step to step."""
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def applied(technique: Technique, specimen: Specimen, search: Planning, tell: Callable[[str], None]) -> Applied:
    """Train a few steps plainly and by a plan, compare, and meter one more step; the specimen's model is left as it was.

    Args:
        technique: what is tried.
        specimen: on what.
        search: of its plain step.
        tell: called with what is done next.
    """
    result = Applied(technique.name)
    started = time.monotonic()
    way = technique.way(specimen.model, search)
    if way is None:
        result.kind, result.reason = "does not apply", "this step has nothing that it could be applied to"
        return result
    result.detail = ", ".join((*way.frozen, way.streamed)).strip(", ")
    try:
        result.kind, result.reason = _compared(result, way, specimen, lambda what: tell(f"{technique.name}: {what}"))
    except MemfitError as error:
        result.kind, result.reason, result.where = "refused", in_short(error), where(error)
    except Exception as error:  # noqa: BLE001  (a crash is what is looked for)
        result.kind, result.reason, result.where = "wrong", f"crash: {in_short(error)}", where(error)
    result.seconds = round(time.monotonic() - started, 2)
    return result


def _compared(result: Applied, way: Choices, specimen: Specimen, tell: Callable[[str], None]) -> tuple[str, str]:
    def build() -> tuple[nn.Module, Any, Any]:
        return copy.deepcopy(specimen.model), specimen.batch, specimen.loss_fn

    tell("plain")
    try:
        losses, model = ways.plainly(way, build, adamw, STEPS)
    except Exception as error:  # noqa: BLE001  (16 bits that a kernel does not know, nothing trained that the loss depends on)
        return "does not apply", f"plain PyTorch: {in_short(error)}"
    if not all(map(math.isfinite, losses)):
        return "does not apply", "the loss is not finite in plain PyTorch"
    expected = _state(model)

    tell("planning")
    made = _plan(way, result.technique, build)
    result.plain_bytes, result.predicted_bytes = made.prediction.plain_peak_bytes, made.prediction.peak_bytes

    tell("following")
    try:
        engine = ways.run(made, build, STEPS)
    except MemfitError as error:
        return "wrong", f"a plan that was made cannot be run: {in_short(error)}"
    with engine.gathered():
        found = _state(engine.model)
    divergences = [divergence for record in engine.records for divergence in record.divergences]
    _closed(engine)
    differ = [a for a, b in zip([r.loss for r in engine.records], losses, strict=True) if a != b]
    wrong = sum(not same_bits(a, b) for a, b in zip(found, expected, strict=True))
    if differ or wrong:
        again, model = ways.plainly(way, build, adamw, STEPS)
        if again != losses or not all(map(same_bits, _state(model), expected)):
            return "not deterministic", "plain PyTorch differs from itself"
        return "wrong", f"numbers differ: {len(differ)} losses, {wrong} of {len(expected)} parameters and buffers"
    if way.loss_chunks > 1 and (rounding := _rounding(way, build)) > ROUNDING:
        return "wrong", f"gradients differ from those of the whole loss head by {rounding:.1g}"
    if divergences:
        return "kept plain", f"divergence: {divergences[0]}"

    tell("metering")
    peaks = [ways.peak_of(made, *build(), seed=seed) for seed in seeds_of(made)]
    result.metered_bytes = max(peaks)
    return weighed(made, peaks)


def _plan(way: Choices, technique: str, build: Callable[[], Any]) -> memfit.Plan:
    if technique == "swap":
        return forced(*build(), everything(1), adamw)[0]  # type: ignore[call-arg]
    plain = ways.planned(way, *build(), adamw, freeze=way.frozen, fixed={"micro_batches": 1})  # type: ignore[call-arg]
    try:
        return memfit.replan(plain, round(SHARE * plain.prediction.peak_bytes))
    except InfeasibleError as error:
        return memfit.replan(plain, error.minimum_bytes)  # type: ignore[arg-type]


def _state(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def _closed(engine: memfit.Engine) -> None:
    if engine.stream is not None:
        engine.stream.close(restore=False)


def _rounding(way: Choices, build: Callable[[], Any]) -> float:
    """How far the gradients of a loss head in chunks lie from those of the whole one."""
    gradients = []
    for choices in (way, Choices()):
        model, batch, loss_fn = build()
        torch.manual_seed(3)
        StepProgram(model, loss_fn, choices=choices).forward_backward(batch)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    distance = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in zip(*gradients, strict=True)) ** 0.5
    norm = sum(float(g.double().norm()) ** 2 for g in gradients[1]) ** 0.5
    return distance / norm if norm else 0.0


def worst(rows: Sequence[dict[str, Any]]) -> float:
    """How far, at most, the prediction of a technique lay from the metered peak, as a share."""
    return max((abs(r["predicted_bytes"] / r["metered_bytes"] - 1) for r in rows if r["metered_bytes"]), default=0.0)
