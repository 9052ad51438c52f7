"""What a rank does in the tests of `memfit.fit` on several ranks: these processes join by themselves, as torchrun's do."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
import memfit.ranks
import small
from memfit.cli.main import main
from memfit.rehearsal import rehearse
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
    unchanged = small.same(steps.whole(model), steps.whole(steps.chain()[0]))
    own = steps.part_of(sample, rank, ranks)
    losses = [engine.step(own).loss for _ in range(3)]
    rehearsal = engine.rehearsal
    torch.distributed.destroy_process_group()
    return losses, rehearsal.measured_peak_bytes, rehearsal.predicted_peak_bytes, unchanged


def repaired(rank: int, ranks: int, budget: int, extra: int) -> tuple[str, int, int, str]:
    """A fit in which the last rank measures so much more than its step takes: what is said, else rounds, measured bytes, and the plan."""
    model, sample, loss_fn = steps.chain()

    def more(engine: Any, sample: Any) -> Rehearsal:
        found = rehearse(engine, sample)
        unforeseen = extra if rank == ranks - 1 else 0
        return replace(found, measured_peak_bytes=found.predicted_peak_bytes + unforeseen)

    pytest.MonkeyPatch().setattr(memfit.ranks, "rehearse", more)
    fixed = {"sharding": "zero1", "micro_batches": 1}
    try:
        engine = memfit.fit(
            model, steps.part_of(sample, rank, ranks), loss_fn, budget, small.adamw, devices=ranks, fixed=fixed
        )
    except memfit.InfeasibleError as error:
        return str(error), 0, error.minimum_bytes or 0, ""
    finally:
        torch.distributed.destroy_process_group()
    assert engine.rehearsal is not None
    told = json.dumps([engine.plan.script.to_json(), engine.plan.budget_bytes, engine.plan.notes])
    return "", engine.rehearsal.rounds, engine.rehearsal.measured_peak_bytes, told


def refused(rank: int, ranks: int) -> list[str]:
    """What is said where there is a group already, with and without devices, and where the ranks are of another number."""
    model, sample, loss_fn = steps.chain()
    said: list[str] = []

    def tried(**named: Any) -> None:
        try:
            memfit.fit(model, sample, loss_fn, "1MiB", small.adamw, **named)
        except memfit.InputError as error:
            said.append(str(error))

    tried(devices=ranks + 1)
    torch.distributed.init_process_group("gloo")
    tried(devices=ranks)
    tried()
    torch.distributed.destroy_process_group()
    return said


def commanded(rank: int, folder: str, *arguments: str) -> tuple[int, str]:
    """Status and standard output of a command in one of several ranks."""
    os.chdir(folder)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        status = main(list(arguments))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return status, told.getvalue()
