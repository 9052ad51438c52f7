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

from torch.distributed.checkpoint.api import CheckpointException

from memfit.errors import SnapshotError
from memfit.sharding.agreement import Agreement
from memfit.sharding.sharded import ShardedModel
from memfit.step import process_generators
from memfit.step.buffers import set_buffers
from memfit.train import durable, rank_state, snapshots
from memfit.train.rank_state import Apart, Parts
from memfit.train.snapshot_folders import named
from memfit.train.snapshots import Moment, Snapshot
from memfit.train.state import Trained

STATE: Final = "state"


def check_space(out: Path, trained: Trained, together: Agreement) -> None:
    """See that a snapshot of all ranks fits on the disk of the first one.

    Raises:
        SnapshotError: it does not; on all ranks.
    """
    assert trained.sharded is not None
    tensors, apart = rank_state.tensors_of(Parts(trained.model, trained.optimizer, trained.sharded))
    own = snapshots.bytes_of([tensors, apart.state]) if trained.sharded.saves_its_part else 0
    needed = together.total(own)
    error = None
    if together.rank == 0:
        try:
            snapshots.check_space(out, needed)
        except SnapshotError as found:
            error = found
    _raise_together(together, error)


def write(out: Path, trained: Trained, together: Agreement, moment: Moment) -> Path:
    """Write a snapshot of all ranks, or leave everything as it was; all ranks have to call it. Arguments as for `snapshots.write`.

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
    files: dict[str, Any] = {}
    try:
        files = _part(partial, trained, rank, moment.loop)
    except (OSError, SnapshotError, CheckpointException) as found:
        error = _in_words(out, final, found)
    try:
        _raise_together(together, error)
        of_all = together.of_all(files)
        if rank == 0:
            every = {name: about for each in of_all for name, about in each.items()}
            try:
                snapshots.commit(partial, final, moment.record(trained, every, ranks=len(of_all)))
            except OSError as found:
                error = snapshots.failed(out, final, 0, found)
        _raise_together(together, error)
    finally:
        if rank == 0:
            durable.remove(partial)
    return final


def _part(partial: Path, trained: Trained, rank: int, loop: Mapping[str, Any]) -> dict[str, Any]:
    """Write what is this rank's, and say what is in the files."""
    apart = rank_state.save(Parts(trained.model, trained.optimizer, trained.sharded), partial / STATE)
    content = {
        **loop,
        "scaling": None if trained.scaling is None else trained.scaling.state(),
        "buffers": dict(trained.model.named_buffers(remove_duplicate=False)),
        "apart": asdict(apart),
    }
    snapshots.check_readable(content)
    files = {_own(rank): snapshots.written(partial / _own(rank), content)}
    found = sorted((partial / STATE).glob(f"__{rank}_*"))
    found += [partial / STATE / ".metadata"] if rank == 0 else []
    return files | {f"{STATE}/{file.name}": snapshots.about(file) for file in found}


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


def _in_words(out: Path, final: Path, error: BaseException) -> SnapshotError:
    if isinstance(error, SnapshotError):
        return error
    if isinstance(error, CheckpointException):
        # On every rank there are those of all that failed; the first of them that came from the disk says most.
        for _, (found, _) in sorted(error.failures.items()):
            if isinstance(found, OSError):
                return snapshots.failed(out, final, 0, found)
        return SnapshotError(f"cannot write the snapshot {final}: {error}")
    assert isinstance(error, OSError)
    return snapshots.failed(out, final, 0, error)


def _raise_together(together: Agreement, error: Exception | None) -> None:
    """Raise on all ranks where one has an error.

    Raises:
        SnapshotError: naming the first rank that has one, with its words.
    """
    found = together.first_error(error)
    if found is not None:
        rank, text = found
        raise SnapshotError(f"rank {rank}: {text}") from error
