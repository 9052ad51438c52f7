"""What a rank does in the tests of `memfit.fit` on several ranks: these processes join by themselves, as torchrun's do."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import torch

import memfit
import small
from memfit.cli.main import main
from memfit.sharding.pipelined import PipelinedModel
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
