"""memfit's techniques on a GPU, each alone: the same numbers, the predicted peak, and how much of the copying computing hides."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu.overlap import device_spans, hidden_share
from gpu.rows import planned_row, room_below
from gpu.setting import Setting, adamw, bert
from torch import nn

import memfit
from memfit.step.program import StepProgram
from memfit.techniques.autocast.precision import Scaling
from memfit.techniques.choices import Choices


@dataclass(frozen=True)
class Technique:
    """One technique, and how PyTorch alone gets the same numbers.

    Attributes:
        name: for the row.
        fixed: of `memfit.plan`.
        share: budget, of the way from the smallest to plain; 1 for plenty.
        swaps: whether activations may go to the tier below.
        precision: of the reference's autocast.
        exact: whether the parameters must be the reference's, bit for bit.
    """

    name: str
    fixed: dict[str, Any]
    share: float = 1.0
    swaps: bool = False
    precision: str = "full"
    exact: bool = True


TECHNIQUES = (
    Technique("nothing", {}),
    Technique("8-bit state", {"state_format": "8bit"}, exact=False),
    Technique("state on the host", {"state_place": "host"}),
    Technique("bf16 parameters", {"parameters": "bf16"}, exact=False),
    Technique("update in backward", {"update": "in_backward"}),
    Technique("bf16", {"precision": "bf16"}, precision="bf16"),
    Technique("fp16", {"precision": "fp16"}, precision="fp16"),
    Technique("recompute", {}, share=0.3),
    Technique("swap", {"state_place": "device", "streamed": ""}, share=0.3, swaps=True),
    Technique("streaming", {"streamed": "bert.encoder.layer"}),
)

TAKEN = 3  # steps after which parameters are compared


def techniques(setting: Setting) -> Iterator[dict[str, Any]]:
    """Each technique alone, six of BERT-large's layers: parameters after three steps against PyTorch's own, predicted against measured peak."""
    build = partial(bert, setting, *((4, 32) if setting.tiny else (16, 128)), layers=6)
    references: dict[str, list[torch.Tensor]] = {}
    for technique in TECHNIQUES:
        if technique.fixed.get("state_place") == "host" and setting.device.type == "cpu":
            yield {"technique": technique.name, "not_run": "on a CPU the host's memory is the device's"}
            continue
        setting.fresh()
        try:
            yield {"technique": technique.name, **technique_row(setting, technique, build, references)}
        except Exception as error:  # noqa: BLE001 - one technique that fails must not take the others along
            text = "".join(traceback.format_exception(error))
            yield {"technique": technique.name, "failed": f"{type(error).__name__}: {error}"[:500], "at": text[-2500:]}


def technique_row(setting: Setting, technique: Technique, build: Any, references: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps with it, and once as PyTorch's users would."""
    if technique.precision not in references:
        references[technique.precision] = by_hand(setting, technique.precision, build)
    model, sample = build()
    made, engine = planned_with(setting, technique, model, sample)
    seed(setting)
    for _ in range(TAKEN):
        engine.step(sample)
    with engine.gathered():
        found = [p.detach().cpu().clone() for p in model.parameters()]
    apart = sum(
        float((a - b).double().square().sum()) for a, b in zip(found, references[technique.precision], strict=True)
    )
    whole = sum(float(b.double().square().sum()) for b in references[technique.precision])
    setting.fresh()
    while (record := engine.step(sample, meter=True)).skipped:  # the first ones in fp16, and they hold less
        pass
    return {
        "must_be_equal": technique.exact,
        "equal": all(torch.equal(a, b) for a, b in zip(found, references[technique.precision], strict=True)),
        "difference": (apart / whole) ** 0.5,
        "plain_bytes": made.prediction.plain_peak_bytes,
        "predicted_bytes": made.prediction.peak_bytes,
        "allocated_bytes": record.peak_bytes,
        "error": made.prediction.peak_bytes / (record.peak_bytes or 1) - 1,
        "predicted_seconds": made.prediction.step_seconds,
        "seconds": setting.timed(partial(engine.step, sample), 5),
        "swapped_bytes": sum(swap.bytes for swap in made.script.swaps.values()),
        "divergences": list(record.divergences),
    }


def planned_with(setting: Setting, technique: Technique, model: nn.Module, sample: Any) -> tuple[Any, Any]:
    """Plan and engine."""
    fixed = {"micro_batches": 1, **technique.fixed}
    below = room_below(setting) if technique.swaps or technique.fixed.keys() & {"streamed", "state_place"} else 0
    made = memfit.plan(model, sample, None, 1 << 50, adamw, fixed=fixed, host_budget=below)
    if technique.share < 1.0:
        high, low = made.prediction.plain_peak_bytes, memfit.smallest_budget(made)
        made = memfit.replan(made, round(low + technique.share * (high - low)))
    return made, memfit.apply(made, model)


def by_hand(setting: Setting, precision: str, build: Any) -> list[torch.Tensor]:
    """Parameters after a loop in plain PyTorch, under its own autocast."""
    model, sample = build()
    program = StepProgram(
        model,
        None,
        adamw(model.parameters()),
        choices=Choices(precision=precision),
        scaling=Scaling(setting.device) if precision == "fp16" else None,
    )
    seed(setting)
    for _ in range(TAKEN):
        program.forward_backward(sample)
        program.update()
        program.clear()
    return [p.detach().cpu().clone() for p in model.parameters()]


def seed(setting: Setting) -> None:
    """Of the generators dropout draws from."""
    torch.manual_seed(5)
    if setting.device.type == "cuda":
        torch.cuda.manual_seed(5)


def overlap_of(setting: Setting, step: Callable[[], object]) -> dict[str, Any]:
    """Of the copies of one step, what computing hid: kernels of the stream that computes most, against copies on any stream. Nothing on a CPU."""
    if setting.device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kernels, down, up = device_spans(profile.events())
    return {
        "copies_down_seconds": sum(end - start for start, end in down),
        "copies_up_seconds": sum(end - start for start, end in up),
        "hidden_down": hidden_share(down, kernels),
        "hidden_up": hidden_share(up, kernels),
        "hidden": hidden_share([*down, *up], kernels),
    }


def swap(setting: Setting) -> Iterator[dict[str, Any]]:
    """Swapping to the host, twelve of BERT-large's layers: seconds and hidden copies beside what the plan says, and the same bytes without it."""
    model, sample = bert(setting, *((8, 32) if setting.tiny else (32, 128)), layers=12)
    fixed = {"micro_batches": 1, "state_place": "device", "streamed": ""}
    bases = {
        "recompute and swap": memfit.plan(
            model, sample, None, 1 << 50, adamw, fixed=fixed, host_budget=room_below(setting)
        ),
        "recompute only": memfit.plan(model, sample, None, 1 << 50, adamw, fixed=fixed, host_budget=0),
    }
    high = bases["recompute only"].prediction.plain_peak_bytes
    low = memfit.smallest_budget(bases["recompute only"])
    for share in (1.0, 0.7, 0.4, 0.1):
        for name, base in bases.items():
            if share == 1.0 and name == "recompute and swap":
                continue  # plain is plain
            made = memfit.replan(base, round(low + share * (high - low)))
            row = planned_row(setting, made, model, sample)
            engine = memfit.apply(made, model)
            engine.step(sample)
            yield {
                "ways": name,
                "share": share,
                **row,
                "swapped_bytes": sum(each.bytes for each in made.script.swaps.values()),
                "recomputations": made.script.recomputations,
                **said(made),
                **overlap_of(setting, partial(engine.step, sample)),
            }
            del engine, made


def said(made: memfit.Plan) -> dict[str, Any]:
    """What the plan says about its copies."""
    prediction = made.prediction
    if not prediction.copy_seconds:
        return {}
    return {
        "planned_copy_seconds": prediction.copy_seconds,
        "planned_hidden": prediction.hidden_share,
    }


def streaming(setting: Setting) -> Iterator[dict[str, Any]]:
    """Layer streaming, six of BERT-large's layers at growing batches: from which on do transfers hide, by the step's own account and by the profiler's?"""
    tokens = 32 if setting.tiny else 128
    for batch in (2, 4) if setting.tiny else (8, 32, 128):
        setting.fresh()
        model, sample = bert(setting, batch, tokens, layers=6)
        fixed = {"micro_batches": 1, "streamed": "bert.encoder.layer"}
        made = memfit.plan(model, sample, None, 1 << 50, adamw, fixed=fixed)
        engine = memfit.apply(made, model)
        step = partial(engine.step, sample)
        step()
        step()
        setting.fresh()
        record = engine.step(sample, meter=True)
        assert engine.stream is not None, "the plan streams"
        account = engine.stream.hiding()
        yield {
            "batch": batch,
            "tokens": account.tokens,
            "predicted_bytes": made.prediction.peak_bytes,
            "allocated_bytes": record.peak_bytes,
            "error": made.prediction.peak_bytes / (record.peak_bytes or 1) - 1,
            "plain_bytes": made.prediction.plain_peak_bytes,
            "seconds": setting.timed(step, 3),
            "hides": account.hides,
            "forward_tokens": account.forward_tokens,
            "backward_tokens": account.backward_tokens,
            "waited_seconds": account.waited_seconds,
            "link_bytes_per_second": account.link_bytes_per_second,
            "flops": account.flops,
            **overlap_of(setting, step),
        }
        engine.stream.close(restore=False)
        del step, engine, made, model, sample
