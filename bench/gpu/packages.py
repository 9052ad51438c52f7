"""The programs of other people (`bench/programs`) on the GPU, each in a process of its own, fewer steps of those whose forward changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu.cases import beside_each_other, repeatable
from gpu.setting import Setting

import memfit
from memfit import batches
from memfit.api import default_optimizer

CHANGING_STEPS = {"share": 30, "smallest": 20}
STEPS = 3
SHARE = 0.6  # of the plain peak


def packages(setting: Setting) -> Iterator[dict[str, Any]]:
    """Losses, parameters and buffers bit by bit, and peaks, at the budgets of `bench/programs`."""
    from programs.run import programs

    every = sorted(programs(), key=lambda each: not each.changing)
    titles = [f"{each.package}: {each.name}" for each in every]
    workers = 1 if setting.tiny else max(1, (os.cpu_count() or 1) - 5)
    yield from beside_each_other(titles[-2:] if setting.tiny else titles, _rows, workers, tiny=setting.tiny)


def _rows(setting: Setting, title: str) -> Iterator[dict[str, Any]]:
    from programs.run import Plain, programs, seeded

    repeatable()
    program = next(each for each in programs() if f"{each.package}: {each.name}" == title)
    row: dict[str, Any] = {"case": title, "changing": program.changing}

    def built(*, there: bool) -> tuple[Any, Any, Any]:
        """Made on the CPU and moved, or made on the device."""
        seeded(0)
        with torch.device(setting.device if there else "cpu"):
            model, batch, loss_fn = program.build()
        return model.to(setting.device), batches.map_tensors(lambda t: t.to(setting.device), batch), loss_fn

    for there in (False, True):
        moved = replace(program, build=partial(built, there=there))
        try:
            batch = moved.build()[1]
            Plain(moved).step(batch, 1)
            break
        except ModuleNotFoundError as error:
            yield {**row, "kind": "not installed", "reason": str(error)}
            return
        except Exception as error:  # noqa: BLE001 - plain PyTorch alone
            reason = f"{type(error).__name__}: {error}"[:300]
    else:
        yield {**row, "kind": "not for a GPU", "reason": reason}
        return
    try:
        yield {**row, **_tried(setting, moved)}
    except memfit.MemfitError as error:
        yield {**row, "kind": "refused", "reason": f"{type(error).__name__}: {error}"[:500]}


def _tried(setting: Setting, program: Any) -> dict[str, Any]:
    from programs.run import apart

    from memfit.planning import planning_of

    made = program.build()
    fixed = {"micro_batches": 1, "streamed": ""}
    model, batch, loss_fn = made
    plain = memfit.plan(model, batch, loss_fn, 1 << 50, default_optimizer, fixed=fixed, host_budget=0)
    planning = planning_of(plain)
    assert planning is not None
    smallest, peak = memfit.smallest_budget(plain), planning.plain_peak()
    wanted = {"plain": peak, "share": max(smallest, int(SHARE * peak)), "smallest": smallest}
    steps = {"plain": 2, **(CHANGING_STEPS if program.changing else dict.fromkeys(CHANGING_STEPS, STEPS))}
    count = max(steps.values())
    first, again = (_plainly(setting, program, count) for _ in range(2))
    repeats = first[0] == again[0] and not apart(first[1][-1], again[1][-1])
    row: dict[str, Any] = {"plain_repeats": repeats, "paths": 1 + len(planning.solver(1).trace.paths)}
    del again
    row["budgets"] = {
        name: _under(
            setting, memfit.replan(plain, budget), made if name == "share" else program.build(), steps[name], first
        )
        for name, budget in wanted.items()
    }
    tried = row["budgets"].values()
    different = any(each["different_losses"] or each["different_tensors"] for each in tried)
    row["kind"] = "trained" if not different else "wrong" if row["plain_repeats"] else "not deterministic"
    return {**row, "captured_on": plain.source, "notes": list(plain.notes)}


State = dict[str, torch.Tensor]


def _plainly(setting: Setting, program: Any, steps: int) -> tuple[list[float], list[State]]:
    """Losses, and all tensors of the model after each number of steps, on the host."""
    from programs.run import Plain

    batch = program.build()[1]
    reference = Plain(program)
    losses, states = [], []
    for step in range(steps):
        losses.append(reference.step(batch, 1000 + step))
        states.append(_state(reference.model))
    setting.fresh()
    return losses, states


def _state(model: Any) -> State:
    return {
        name: value.detach().cpu().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _under(
    setting: Setting, plan: memfit.Plan, made: Any, steps: int, reference: tuple[list[float], list[State]]
) -> dict[str, Any]:
    from programs.run import apart, equal, of_peaks, seeded

    model, batch, loss_fn = made
    engine = memfit.apply(plan, model, loss_fn, default_optimizer)
    different = 0
    setting.fresh()
    for step in range(steps):
        seeded(1000 + step)
        record = engine.step(batch, meter=True)
        different += not equal(torch.tensor(record.loss), torch.tensor(reference[0][step]))
    peaks = [record.peak_bytes or 0 for record in engine.records]
    return {
        **of_peaks(plan, peaks),
        "divergences": [str(each) for record in engine.records for each in record.divergences][:3],
        "begun_anew": sum(bool(record.begun_anew) for record in engine.records),
        "different_losses": different,
        "different_tensors": apart(_state(model), reference[1][steps - 1])[:5],
        "recomputations": plan.script.recomputations,
        "seconds": sum(record.seconds for record in engine.records[1:]) / max(1, steps - 1),
        "predicted_seconds": plan.prediction.step_seconds,
    }
