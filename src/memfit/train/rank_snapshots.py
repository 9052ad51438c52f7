"""Snapshots that several ranks write and read together: committed by all of them or by none.

    out/step-000123/
        state/          parameters and optimizer state, of torch.distributed.checkpoint
        rank-0.pt ...   of each rank: generators, buffers, what of the optimizer's state is no part of a whole, the loop's values
        snapshot.json   as for one process, with the sums of the files of all ranks

They are of whole tensors, so they can be gone on from in another number of ranks, sharded in another way, and on one device. The ranks share the folder's disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from memfit.errors import SnapshotError
from memfit.sharding.agreement import Agreement
from memfit.sharding.sharded import ShardedModel
from memfit.step import process_generators
from memfit.step.buffers import set_buffers
from memfit.train import durable, rank_state, snapshots
from memfit.train.rank_state import Apart, Parts
from memfit.train.snapshot_folders import named
from memfit.train.snapshots import Moment, Snapshot, Staged
from memfit.train.state import Trained

STATE: Final = "state"


def check_space(out: Path, trained: Trained, together: Agreement) -> None:
    """See that a snapshot of all ranks fits on the disk of the first one.

    Raises:
        SnapshotError: it does not; on all ranks.
    """
    needed = bytes_needed(trained, together)
    error = None
    if together.rank == 0:
        try:
            snapshots.check_space(out, needed)
        except SnapshotError as found:
            error = found
    _raise_together(together, error)


def bytes_needed(trained: Trained, together: Agreement) -> int:
    """Bytes of a snapshot of all ranks as they are now: what several of them have is written once. All ranks have to call it."""
    assert trained.sharded is not None
    tensors, apart = rank_state.tensors_of(Parts(trained.model, trained.optimizer, trained.sharded))
    parts = {name: _bytes_here(tensor) for name, tensor in tensors.items()}
    kept = snapshots.bytes_of([apart.state, dict(trained.model.named_buffers())])
    of_all = together.of_all((parts, kept))
    written: dict[str, int] = {}
    for of_rank, _ in of_all:
        for name, size in of_rank.items():
            written[name] = size + (written.get(name, 0) if trained.sharded.shards_parameters else 0)
    return sum(written.values()) + sum(kept for _, kept in of_all)


def _bytes_here(tensor: torch.Tensor) -> int:
    """Of a tensor, or of this rank's part of one."""
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.nbytes


def stage(out: Path, trained: Trained, together: Agreement, moment: Moment) -> Staged:
    """Write the files of a snapshot of all ranks, or leave everything as it was; all ranks have to call it. Arguments as for `snapshots.stage`.

    Raises:
        SnapshotError: a rank could not write its part; on all ranks, naming that one.
    """
    assert trained.sharded is not None
    final, rank = out / named(moment.step), together.rank
    partial = out / f".{final.name}.partial"
    error: Exception | None = None
    if rank == 0:
        try:
            durable.remove(partial)
            partial.mkdir(parents=True)
        except OSError as found:
            error = snapshots.failed(out, final, 0, found)
    _raise_together(together, error)
    names: tuple[str, ...] = ()
    try:
        names = _part(partial, trained, rank, moment.loop)
    except (OSError, SnapshotError, CheckpointException) as found:
        error = _in_words(out, final, found, rank)
    try:
        _raise_together(together, error)
    except BaseException:
        if rank == 0:
            durable.remove(partial)
        raise
    return Staged(partial, final, names, moment.record(trained, ranks=trained.sharded.ranks))


def commit(staged: Staged, together: Agreement, files: Mapping[str, Any], error: OSError | None) -> None:
    """Give a snapshot its name where the files of all ranks are on the disk; all ranks have to call it.

    Args:
        staged: as this rank has it.
        together: all ranks.
        files: of this rank.
        error: why its files could not reach the disk; None where they did.

    Raises:
        SnapshotError: those of a rank are not; on all ranks, naming that one. Then nothing is left of it.
    """
    out = staged.final.parent
    _raise_together(together, None if error is None else snapshots.failed(out, staged.final, 0, error))
    of_all = together.of_all(dict(files))
    failed: SnapshotError | None = None
    if together.rank == 0:
        try:
            snapshots.commit(staged, {name: about for each in of_all for name, about in each.items()})
        except OSError as found:
            failed = snapshots.failed(out, staged.final, 0, found)
    _raise_together(together, failed)


def _part(partial: Path, trained: Trained, rank: int, loop: Mapping[str, Any]) -> tuple[str, ...]:
    """Write what is this rank's; returns the names of its files."""
    apart = rank_state.save(Parts(trained.model, trained.optimizer, trained.sharded), partial / STATE)
    content = {
        **loop,
        "scaling": None if trained.scaling is None else trained.scaling.state(),
        "buffers": dict(trained.model.named_buffers(remove_duplicate=False)),
        "apart": asdict(apart),
    }
    snapshots.check_readable(content)
    snapshots.written(partial / _own(rank), content)
    found = [file.name for file in sorted((partial / STATE).glob(f"__{rank}_*"))]
    found += [".metadata"] if rank == 0 else []
    return _own(rank), *(f"{STATE}/{name}" for name in found)


def restore(snapshot: Snapshot, trained: Trained) -> dict[str, Any]:
    """Put back what ranks have written, or one process for ranks; as `snapshots.restore`. All ranks have to call it.

    Random generators go on as they were where the ranks are as many; else they are left as they are.

    Raises:
        SnapshotError: it is of another model or optimizer, or in parts that another number of ranks cannot use.
    """
    sharded = trained.sharded
    rank = 0 if sharded is None else sharded.agreement.rank
    ranks = 1 if sharded is None else sharded.ranks
    error: Exception | None = None
    loop: dict[str, Any] = {}
    try:
        if snapshot.ranks == 1:
            assert sharded is not None, "one process restores its own by itself"
            loop = _from_one(snapshot, trained, sharded)
        else:
            kept = {each: snapshot.load(_own(each)) for each in range(snapshot.ranks)}
            apart = {each: Apart(**values["apart"]) for each, values in kept.items()}
            loop = kept[rank if ranks == snapshot.ranks else 0]
            rank_state.load(Parts(trained.model, trained.optimizer, sharded), snapshot.folder / STATE, apart)
            set_buffers(trained.model, _buffers(trained, kept, loop))
    except (SnapshotError, CheckpointException, RuntimeError, ValueError, KeyError) as found:
        error = found if isinstance(found, SnapshotError) else _of_another(snapshot, found)
    if sharded is None:
        if error is not None:
            raise error
    else:
        _raise_together(sharded.agreement, error)
    if trained.scaling is not None and loop.get("scaling") is not None:
        trained.scaling.set_state(loop["scaling"])
    if ranks == snapshot.ranks:
        process_generators.set_generators(loop["generators"])
    return loop


def _from_one(snapshot: Snapshot, trained: Trained, sharded: ShardedModel) -> dict[str, Any]:
    """Of what one process has written, this rank's part."""
    parts = Parts(trained.model, trained.optimizer, sharded)
    model, optimizer = snapshot.load("model.pt"), snapshot.load("optimizer.pt")
    state = dict(
        zip(snapshot.parameters, (optimizer["state"].get(n, {}) for n in range(len(snapshot.parameters))), strict=True)
    )
    rank_state.load_whole(parts, model["state"], state)
    names = dict(trained.model.named_buffers(remove_duplicate=False))
    set_buffers(trained.model, {n: v for n, v in {**model["state"], **model["buffers"]}.items() if n in names})
    loop: dict[str, Any] = snapshot.load("loop.pt")
    return loop


def _buffers(trained: Trained, kept: Mapping[int, Mapping[str, Any]], own: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's own of before; of stages that it did not have, those of the first rank that had them."""
    of_all = {n: v for rank in sorted(kept, reverse=True) for n, v in kept[rank]["buffers"].items()}
    found = {**of_all, **own["buffers"]}
    if trained.sharded is None or not trained.sharded.lacks_parameters:
        return found
    names = dict(trained.model.named_buffers(remove_duplicate=False))
    return {n: v for n, v in found.items() if n in names}


def _own(rank: int) -> str:
    return f"rank-{rank}.pt"


def _of_another(snapshot: Snapshot, error: BaseException) -> SnapshotError:
    return SnapshotError(f"{snapshot.folder} is of another model or optimizer: {error}")


def _in_words(out: Path, final: Path, error: BaseException, rank: int) -> SnapshotError | None:
    """What this rank has to say of it; None where it is another rank that could not write."""
    if isinstance(error, SnapshotError):
        return error
    if isinstance(error, CheckpointException):  # the same on all ranks
        if rank not in error.failures:
            return None
        error = error.failures[rank][0]
    if isinstance(error, OSError):
        return snapshots.failed(out, final, 0, error)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SnapshotError(f"cannot write the snapshot {final}: {reason}; {snapshots.older(out)}")


def _raise_together(together: Agreement, error: Exception | None) -> None:
    """Raise on all ranks where one has an error.

    Raises:
        SnapshotError: naming the first rank that has one, with its words.
    """
    found = together.first_error(error)
    if found is not None:
        rank, text = found
        raise SnapshotError(f"rank {rank}: {text}") from error
