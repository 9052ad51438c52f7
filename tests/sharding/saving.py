"""What a rank does in the tests of snapshots: it trains, writes one with the others, and trains on; or goes on from one."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import memfit
from memfit.engine.engine import Engine
from memfit.errors import SnapshotError
from memfit.sharding.pipelined import PipelinedModel
from memfit.step import process_generators
from memfit.train import durable, rank_snapshots, snapshots
from memfit.train.data import Position
from memfit.train.saving import Saving
from memfit.train.snapshots import Moment
from sharding import steps

STEPS = 3  # before the snapshot and after it


def whole(engine: Engine) -> list[Tensor]:
    """All parameters; of stages on rank 0 alone."""
    if isinstance(engine.sharded, PipelinedModel):
        return list(engine.sharded.whole().values())
    return steps.whole(engine.model)


def applied(data: dict[str, Any], build: Callable[[], steps.Built]) -> tuple[Engine, Any]:
    """An engine, and this rank's part of the batch."""
    model, sample, loss_fn = build()
    engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, steps.adamw)
    sharded = engine.sharded
    return engine, sample if sharded is None else steps.part_of(sample, sharded.agreement.rank, sharded.ranks)


def begun(engine: Engine, folder: str) -> Saving:
    """A snapshot after the first steps, whose files are written and reach the disk in a thread."""
    moment = Moment(STEPS, Position(0, 0), 1, {"generators": process_generators.generators()}, {})
    together = None if engine.sharded is None else engine.sharded.agreement
    return Saving.of(Path(folder), engine, moment, together, beside=True)


def saved(rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], steps.Built], folders: Sequence[str]) -> Any:
    """For each plan the whole parameters three steps after the snapshot, taken while its files reach the disk, and the bytes that it is said to take."""
    del rank
    found: list[tuple[list[Tensor], int]] = []
    for data, folder in zip(plans, folders, strict=True):
        engine, own = applied(data, build)
        for step in range(2 * STEPS):
            if step == STEPS:
                under_way = begun(engine, folder)
            engine.step(own)
        together = None if engine.sharded is None else engine.sharded.agreement
        bytes_needed = 0 if together is None else rank_snapshots.bytes_needed(engine, together)
        under_way.finish()
        found.append((whole(engine), bytes_needed))
        if engine.sharded is not None:
            engine.sharded.close()
    return found


def gone_on(
    rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], steps.Built], folders: Sequence[str]
) -> Any:
    """For each plan the whole parameters three steps after going on from a snapshot; or what was said against it."""
    del rank
    found: list[Any] = []
    for data, folder in zip(plans, folders, strict=True):
        engine, own = applied(data, build)
        try:
            snapshot = snapshots.read(Path(folder, f"step-{STEPS:06d}"))
            rank_snapshots.restore(snapshot, engine)
        except SnapshotError as error:
            found.append(str(error))
            continue
        for _ in range(STEPS):
            engine.step(own)
        found.append(whole(engine))
        if engine.sharded is not None:
            engine.sharded.close()
    return found


def failing(
    rank: int, data: dict[str, Any], build: Callable[[], steps.Built], folder: str
) -> list[tuple[str, list[str]]]:
    """What is said on each rank where the second one cannot write, where they do not reach the disk, and where they may not be so large; what is left."""
    engine, own = applied(data, build)
    engine.step(own)
    begun(engine, folder).finish()
    engine.step(own)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    found = []
    for module, function in ((snapshots, "written"), (durable, "sync")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(module, function, full)
            try:
                begun(engine, folder).finish()
            except SnapshotError as error:
                found.append((str(error), sorted(os.listdir(folder))))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        begun(engine, folder).finish()
    except SnapshotError as error:
        found.append((str(error), sorted(os.listdir(folder))))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found
