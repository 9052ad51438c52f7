"""What a rank does in the tests of `memfit.fit` on several ranks: these processes join by themselves, as torchrun's do."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import memfit
import memfit.ranks
import small
from memfit import rehearsal
from memfit.cli.main import main
from memfit.rehearsal import rehearse
from memfit.sharding.pipelined import PipelinedModel
from memfit.values.report import Rehearsal
from sharding import steps


def fitted(rank: int, ranks: int, way: str) -> tuple[list[float], int, int, bool]:
    """Losses of three steps after a fit, this rank's measured and predicted peak, and whether the rehearsal left everything as it was."""
    model, sample, loss_fn = steps.chain()
    engine = memfit.fit(
        model, steps.part_of(sample, rank, ranks), loss_fn, "1MiB", small.adamw, devices=ranks, fixed={"sharding": way}
    )
    assert engine.sharded is not None
    assert engine.rehearsal is not None
    fresh = dict(steps.chain()[0].named_parameters())
    if isinstance(engine.sharded, PipelinedModel):
        unchanged = all(torch.equal(p, fresh[name]) for name, p in engine.sharded.named().items())
    else:
        unchanged = small.same(steps.whole(model), list(fresh.values()))
    assert [each.predicted_peak_bytes for each in engine.rehearsal.ranks] == [
        figures.peak_bytes for figures in engine.plan.prediction.ranks
    ]
    own = steps.part_of(sample, rank, ranks)
    losses = [engine.step(own).loss for _ in range(3)]
    rehearsal = engine.rehearsal
    torch.distributed.destroy_process_group()
    return losses, rehearsal.measured_peak_bytes, rehearsal.predicted_peak_bytes, unchanged


def repaired(rank: int, ranks: int, fixed: dict[str, Any], budget: int, extra: int) -> tuple[str, int, int, str]:
    """A fit in which one rank measures so much above its budget, or its step: what is said, else rounds, measured bytes, and the plan.

    Of stages it is the rank of the fullest one, wherever the seconds of this computer have cut; else the last rank.
    """
    model, sample, loss_fn = steps.chain()
    befallen: dict[int, int] = {}

    def more(engine: Any, sample: Any, loader_batches: int) -> Rehearsal:
        found = rehearse(engine, sample, loader_batches)
        if not befallen:
            peaks = [each.peak_bytes for each in engine.plan.prediction.ranks]
            fullest = peaks.index(max(peaks))
            befallen.update({fullest: budget - max(peaks) + extra} if engine.plan.pipeline else {ranks - 1: extra})
        return replace(found, measured_peak_bytes=found.predicted_peak_bytes + befallen.get(rank, 0))

    pytest.MonkeyPatch().setattr(memfit.ranks, "rehearse", more)
    try:
        engine = memfit.fit(
            model, steps.part_of(sample, rank, ranks), loss_fn, budget, small.adamw, devices=ranks, fixed=fixed
        )
    except memfit.InfeasibleError as error:
        return str(error), 0, error.minimum_bytes or 0, ""
    finally:
        torch.distributed.destroy_process_group()
    assert engine.rehearsal is not None
    plan = engine.plan
    followed = plan.script if plan.pipeline is None else plan.pipeline
    told = json.dumps([followed.to_json(), plan.budget_bytes, plan.notes])
    return "", engine.rehearsal.rounds, engine.rehearsal.measured_peak_bytes, told


def in_a_group(rank: int, ranks: int) -> dict[str, tuple[int, list[int], str]]:
    """In a group that is there: by way this rank's measured peak, the predicted ones, and what is said where nothing fits."""
    found = {}
    for way in ("data", "zero3"):
        model, sample, loss_fn = steps.chain()
        own = steps.part_of(sample, rank, ranks)
        fixed = {"sharding": way, "micro_batches": 1}
        error = ""
        try:
            memfit.fit(model, own, loss_fn, 1000, small.adamw, devices=ranks, fixed=fixed)
        except memfit.InfeasibleError as refused:
            error = str(refused)
        engine = memfit.fit(model, own, loss_fn, "1MiB", small.adamw, devices=ranks, fixed=fixed)
        assert engine.rehearsal is not None
        assert engine.sharded is not None
        predicted = [figures.peak_bytes for figures in engine.plan.prediction.ranks]
        found[way] = engine.rehearsal.measured_peak_bytes, predicted, error
        engine.sharded.close()
    return found


def refused(rank: int, ranks: int) -> list[str]:
    """What is said of calls that cannot be honoured.

    The ranks are of another number; rank 0 finds no plan before they have met; they are in a group, and no devices are named; a model is fitted twice; that of
    one rank is another one; so is its optimizer.
    """
    model, sample, loss_fn = steps.chain()
    said: list[str] = []

    def tried(optimizer: Any = small.adamw, **named: Any) -> None:
        try:
            memfit.fit(model, sample, loss_fn, "1MiB", optimizer, **named)
        except memfit.InputError as error:
            said.append(str(error))

    tried(devices=ranks + 1)
    tried(devices=ranks, fixed={"sharding": "zero4"})
    tried()
    for way in ("zero2", "1f1b"):
        fixed = {"sharding": way}
        model, sample, loss_fn = steps.chain()
        memfit.fit(model, sample, loss_fn, "1MiB", small.adamw, devices=ranks, fixed=fixed)
        tried(devices=ranks, fixed=fixed)
    model = small.chain(3 + rank)
    tried(devices=ranks, fixed={"sharding": "data"})
    model = small.chain(3)
    if rank:
        torch.nn.init.ones_(model.get_parameter("2.weight"))
    tried(devices=ranks, fixed={"sharding": "zero3"})
    for way in ("zero1", "1f1b"):
        model = small.chain(3)
        tried(lambda parameters: torch.optim.SGD(parameters, lr=0.1 + rank), devices=ranks, fixed={"sharding": way})
    torch.distributed.destroy_process_group()
    return said


def failing(rank: int, ranks: int) -> list[str]:
    """What each rank raises where the user's own loss or optimizer fails while the first one plans, and the loss of a fit after that."""
    model, sample, loss_fn = steps.chain()
    own, told = steps.part_of(sample, rank, ranks), []

    def wrong(*_: Any) -> Any:
        raise KeyError("nobody")

    for loss, optimizer in ((wrong, small.adamw), (loss_fn, wrong)):
        try:
            memfit.fit(model, own, loss, "1MiB", optimizer, devices=ranks)
        except Exception as error:  # noqa: BLE001 - any is told
            told.append(f"{type(error).__name__}: {error}")
    engine = memfit.fit(model, own, loss_fn, "1MiB", small.adamw, devices=ranks, fixed={"sharding": "data"})
    told.append(str(engine.step(own).loss))
    torch.distributed.destroy_process_group()
    return told


def evaluated(rank: int, ranks: int, way: str) -> tuple[int, list[int]]:
    """Predicted bytes, and those measured without an evaluation before the step and with one, each the least of four (why: `steps.judged`)."""
    model, _, loss_fn = steps.chain()
    own = small.rows(4)  # so few that parameters take most at the peak
    engine = memfit.fit(model, own, loss_fn, "1MiB", small.adamw, devices=ranks, fixed={"sharding": way})
    engine.step(own)
    alone, after = [], []
    for _ in range(4):
        alone.append(engine.step(own, meter=True).peak_bytes or 0)
        with engine.evaluating() as whole, torch.no_grad():
            loss_fn(whole, own)
        after.append(engine.step(own, meter=True).peak_bytes or 0)
    torch.distributed.destroy_process_group()
    return engine.plan.prediction.ranks[rank].peak_bytes, [min(alone), min(after)]


def left_alone(rank: int) -> str:
    """What the first rank says where it gathers the stages' weights alone, since the other one has ended."""
    model, sample, loss_fn = steps.chain()
    own = steps.part_of(sample, rank, 2)
    engine = memfit.fit(model, own, loss_fn, "1MiB", small.adamw, devices=2, fixed={"sharding": "1f1b"})
    if rank:
        torch.distributed.destroy_process_group()
        return ""
    with pytest.raises(memfit.EngineError) as error:
        engine.state_dict()
    return str(error.value)


def planned_apart(rank: int, plans: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """What `memfit.apply` says where each rank has made a plan of its own, with these arguments by rank; "" where it trains."""
    said = []
    for named in plans:
        model, sample, loss_fn = steps.chain()
        own = steps.part_of(sample, rank, 2)
        plan = memfit.plan(model, own, loss_fn, "1MiB", small.adamw, devices=2, **named[rank])
        try:
            memfit.apply(plan, model).step(own)
            said.append("")
        except memfit.InputError as error:
            said.append(str(error))
    return said


def listed(rank: int) -> str:
    """What is said of a list that holds more samples than are planned for."""
    model, sample, loss_fn = steps.chain()
    own = steps.part_of(sample, rank, 2)
    fixed = {"sharding": "data", "micro_batches": 2}
    engine = memfit.apply(memfit.plan(model, own, loss_fn, "1MiB", small.adamw, devices=2, fixed=fixed), model)
    with pytest.raises(memfit.BatchError) as error:
        engine.accumulate([own, steps.part_of(sample, 1 - rank, 2)])
    return str(error.value)


def apart(rank: int, way: str) -> list[str]:
    """What is said where ranks call different things of an engine; then all take a step and gather, as if nothing had been."""
    model, sample, loss_fn = steps.chain()
    own, told = steps.part_of(sample, rank, 2), []
    engine = memfit.fit(model, own, loss_fn, "1MiB", small.adamw, devices=2, fixed={"sharding": way})

    def evaluate() -> None:
        with engine.evaluating() as whole, torch.no_grad():
            loss_fn(whole, own)

    larger = torch.cat([own[0], own[0]]), torch.cat([own[1], own[1]])
    step, gather = partial(engine.step, own), engine.state_dict
    calls: list[tuple[Callable[[], object], Callable[[], object]]] = [(gather, step), (step, gather)]
    calls.append((partial(engine.step, larger), gather))
    if way != "1f1b":
        calls += [(evaluate, step), (gather, evaluate)]
    for pair in calls:
        with pytest.raises(memfit.MemfitError) as error:
            pair[rank]()
        told.append(f"{type(error.value).__name__}: {error.value}")
    told.append(repr(engine.step(own).loss))
    told.append(" ".join(engine.state_dict()))
    torch.distributed.destroy_process_group()
    return told


def commanded(rank: int, folder: str, *arguments: str) -> tuple[int, str]:
    """Status and standard output of a command in one of several ranks."""
    os.chdir(folder)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        status = main(list(arguments))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return status, told.getvalue()


def saved(rank: int, ranks: int, ways: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """For each way what a script saves after a fit."""
    found = []
    for way in ways:
        model, sample, loss_fn = steps.chain()
        own = steps.part_of(sample, rank, ranks)
        engine = memfit.fit(model, own, loss_fn, "1MiB", small.adamw, devices=ranks, fixed={"sharding": way})
        found.append(engine.state_dict())
    torch.distributed.destroy_process_group()
    return found


def looped(rank: int, ranks: int, ways: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """For each way the weights after three steps of a loop that is the script's own, with clipping, and a batch left out after its backward.

    Where the model stays whole it is fitted twice.
    """
    found = []
    for way in ways:
        model, sample, loss_fn = steps.chain()
        own = steps.part_of(sample, rank, ranks)
        fixed = {"sharding": way, "micro_batches": 1}
        engine = memfit.fit(model, own, loss_fn, "1MiB", steps.sgd, devices=ranks, fixed=fixed)
        if way == "data":
            engine = memfit.fit(model, own, loss_fn, "1MiB", steps.sgd, devices=ranks, fixed=fixed)
        assert engine.optimizer is not None
        for step in range(4):
            with engine.forward():
                loss = loss_fn(model, own)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if step != 1:
                engine.optimizer.step()
            engine.optimizer.zero_grad()
        found.append(engine.state_dict())
    torch.distributed.destroy_process_group()
    return found


def looped_in_fp16(rank: int, ranks: int, ways: Sequence[str]) -> list[tuple[list[bool], dict[str, torch.Tensor]]]:
    """For each way which steps were skipped in a loop that is the script's own, and the weights after it; in the second step the last rank overflows."""
    found = []
    for way in ways:
        model, sample, loss_fn = steps.chain()
        own = steps.part_of(sample, rank, ranks)
        fixed = {"sharding": way, "micro_batches": 1, "precision": "fp16"}
        engine = memfit.fit(model, own, loss_fn, "1MiB", steps.sgd, devices=ranks, allow=["fp16"], fixed=fixed)
        assert engine.optimizer is not None
        assert engine.scaling is not None
        scaler, skipped = engine.scaling.scaler, []
        for step in range(3):
            x, y = own
            with engine.forward():
                loss = loss_fn(model, (x * 1e6 if step == 1 and rank == ranks - 1 else x, y))
            scaler.scale(loss).backward()
            scaler.unscale_(engine.optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = scaler.get_scale()
            scaler.step(engine.optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < before)
            engine.optimizer.zero_grad()
        found.append((skipped, engine.state_dict()))
    torch.distributed.destroy_process_group()
    return found


def padded_elsewhere(rank: int, way: str, budget: int) -> tuple[list[float], list[int], int]:
    """Losses of three steps after a fit, where no sample of rank 0's part has padding; peaks of three more, and how often another path was run than planned."""
    model, sample, loss_fn = steps.padded()
    own = steps.part_of(sample, 1 - rank, 2)
    engine = memfit.fit(model, own, loss_fn, budget, steps.sgd, devices=2, fixed={"sharding": way})
    records = [engine.step(own) for _ in range(3)]
    peaks = [engine.step(own, meter=True).peak_bytes or 0 for _ in range(3)]
    torch.distributed.destroy_process_group()
    left = sum(len(record.divergences) + len(record.begun_anew) for record in records)
    return [record.loss for record in records], peaks, left


class Scaled(torch.nn.Module):
    """Two linear layers, between them a factor by an attribute, and perhaps one more operation."""

    def __init__(self, factor: float = 1.0, *, longer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.factor, self.longer = factor, longer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.factor
        return self.second(x.tanh() if self.longer else x)


def logged(model: Any, batch: Any) -> torch.Tensor:
    """The loss, beside which something is computed of the outputs that it does not need."""
    x, y = batch
    found = model(x)
    (found.flatten() > 0).float().mean().item()
    return torch.nn.functional.mse_loss(found, y)


def absolute(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.l1_loss(model(x), y)


# By name what the last rank has in place of the model and the loss of the others.
OTHER_CODE: dict[str, tuple[Callable[[], torch.nn.Module], Any]] = {
    "an operation more": (lambda: Scaled(longer=True), small.squared_error),
    "another factor": (lambda: Scaled(2.0), small.squared_error),
    "another loss": (Scaled, absolute),
    "a line of a log": (Scaled, logged),
}


def by_other_code(rank: int, cases: Sequence[tuple[str, str]]) -> tuple[list[str], int]:
    """For each way and kind of other code what is said of a fit, "" where it has worked; and how often all ranks had to look at one sample."""
    said = []
    looked = mock.patch("memfit.ranks.run_alike", wraps=rehearsal.run_alike).start()
    for way, kind in cases:
        make, loss_fn = OTHER_CODE[kind] if rank else (Scaled, small.squared_error)
        own = steps.part_of(small.rows(16), rank, 2)
        fixed = {"sharding": way, "micro_batches": 2 if way == "1f1b/2" else 1}
        try:
            engine = memfit.fit(make(), own, loss_fn, "1MiB", steps.sgd, devices=2, fixed=fixed)
            engine.step(own)
            said.append("")
        except memfit.InputError as error:
            said.append(str(error))
    torch.distributed.destroy_process_group()
    return said, looked.call_count
