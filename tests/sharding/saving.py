"""What a rank does in the tests of snapshots: it trains, writes one with the others, and trains on; or goes on from one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import memfit
from memfit.engine.engine import Engine
from memfit.errors import SnapshotError
from memfit.sharding.pipelined import PipelinedModel
from memfit.step import process_generators
from memfit.train import rank_snapshots, snapshots
from memfit.train.data import Position
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


def written(engine: Engine, folder: str) -> Path:
    """A snapshot after the first steps."""
    moment = Moment(STEPS, Position(0, 0), 1, {"generators": process_generators.generators()}, {})
    if engine.sharded is None:
        return snapshots.write(Path(folder), engine, moment)
    return rank_snapshots.write(Path(folder), engine, engine.sharded.agreement, moment)


def saved(rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], steps.Built], folders: Sequence[str]) -> Any:
    """For each plan the whole parameters three steps after the snapshot."""
    del rank
    found: list[list[Tensor]] = []
    for data, folder in zip(plans, folders, strict=True):
        engine, own = applied(data, build)
        for step in range(2 * STEPS):
            if step == STEPS:
                written(engine, folder)
            engine.step(own)
        found.append(whole(engine))
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


def failing(rank: int, data: dict[str, Any], build: Callable[[], steps.Built], folder: str) -> tuple[str, list[str]]:
    """What is said on each rank where the second one cannot write, and what the folder holds then."""
    engine, own = applied(data, build)
    engine.step(own)
    written(engine, folder)
    engine.step(own)
    if rank == 1:

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        snapshots.written = full  # type: ignore[assignment]
    try:
        written(engine, folder)
    except SnapshotError as error:
        return str(error), sorted(os.listdir(folder))
    return "", []
