"""Saved training state: written whole or not at all, checked when read, enough to go on bit-equal.

A snapshot is a folder:

    out/step-000123/
        model.pt        parameters and buffers
        optimizer.pt    optimizer state
        loop.pt         schedule, generators
        snapshot.json   step, position, plan, configuration, and the size and SHA-256 of each file (and of itself)

Several ranks write parameters and optimizer state with torch.distributed.checkpoint (`rank_snapshots`), which keeps no checksums, and whose folder does not
say what it is; so the same record is beside it. Content is plain tensors and values, read with `weights_only=True`: a snapshot from elsewhere cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.utils import _pytree as pytree

from memfit.errors import SnapshotError
from memfit.step import process_generators
from memfit.step.buffers import further_buffers, set_buffers
from memfit.step.optimizer_state import set_optimizer
from memfit.train import durable
from memfit.train.data import Position
from memfit.train.rank_state import Parts
from memfit.train.snapshot_folders import folders, named, step_of
from memfit.train.state import Trained
from memfit.units import format_bytes

FORMAT_VERSION: Final = 2
RECORD: Final = "snapshot.json"
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_READABLE: Final = (
    torch.Tensor,
    torch.Size,
    torch.dtype,
    torch.device,
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot on disk whose files have been checked.

    Attributes:
        folder: where it is.
        step: optimizer steps taken.
        position: in the data.
        samples: how many the training data held; None where that was not known.
        plan: the plan it was trained under, as JSON (`Plan.from_json` reads it).
        config: the configuration as JSON; empty when the run had none.
        ranks: that wrote it together.
        parameters: names of those that the optimizer steps, in the order in which its state dict numbers them; empty where several ranks wrote it.
    """

    folder: Path
    step: int
    position: Position
    samples: int | None
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    ranks: int = 1
    parameters: tuple[str, ...] = ()

    def load(self, name: str, *, mapped: bool = False) -> Any:
        """Content of one of its files, on the CPU; `mapped`: read as it is used, in pages of the file that take no memory of their own."""
        try:
            return torch.load(self.folder / name, map_location="cpu", weights_only=True, mmap=mapped)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise SnapshotError(f"cannot read {self.folder / name}: {error}") from error


# ------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is when a snapshot is taken.

    Attributes:
        step: optimizer steps taken.
        position: in the data.
        samples: how many the training data holds; None where that is not known.
        loop: further values of the loop, such as generator states (`generators`).
        config: the configuration as JSON.
    """

    step: int
    position: Position
    samples: int | None
    loop: Mapping[str, Any]
    config: Mapping[str, Any]

    def record(self, trained: Trained, *, ranks: int = 1, parameters: Sequence[str] = ()) -> dict[str, Any]:
        """What the snapshot says of itself, but for its format and its files; `ranks` and `parameters` as in `Snapshot`."""
        return {
            "step": self.step,
            "epoch": self.position.epoch,
            "used": self.position.used,
            "samples": self.samples,
            "ranks": ranks,
            "parameters": list(parameters),
            "plan": trained.plan.to_json(),
            "config": dict(self.config),
        }


@dataclass(frozen=True, slots=True)
class Staged:
    """A snapshot whose files are written. They may not be on the disk yet but in the system's cache of it, and it has no name.

    Attributes:
        partial: the hidden folder that holds them.
        final: the folder that it becomes.
        names: of the files that this process has written, in the folder.
        record: what the snapshot says of itself, but for its files.
        needed_bytes: that it takes, where that is known.
    """

    partial: Path
    final: Path
    names: tuple[str, ...]
    record: Mapping[str, Any]
    needed_bytes: int = 0

    def on_disk(self) -> dict[str, Any]:
        """Have the files reach the disk, and say what is in each. Nothing of the training is read, so it may go on meanwhile.

        Raises:
            OSError: they could not be written, or not be read again.
        """
        found = {}
        for name in self.names:
            durable.sync(self.partial / name)
            found[name] = about(self.partial / name)
        for folder in {(self.partial / name).parent for name in self.names} - {self.partial}:
            durable.sync_folder(folder)
        return found


def stage(out: Path, trained: Trained, moment: Moment) -> Staged:
    """Write the files of a snapshot to a hidden folder beside the final one, or leave everything as it was.

    Args:
        out: folder of the run.
        trained: model and optimizer.
        moment: of the run.

    Raises:
        SnapshotError: no space is left, or the folder cannot be written. Older snapshots and the training state are as
            before.
    """
    final = out / named(moment.step)
    partial = out / f".{final.name}.partial"
    content = {
        "model.pt": {"state": trained.model.state_dict(), "buffers": further_buffers(trained.model)},
        "optimizer.pt": {} if trained.optimizer is None else trained.optimizer.state_dict(),
        "loop.pt": {**moment.loop, "scaling": None if trained.scaling is None else trained.scaling.state()},
    }
    check_readable(content)
    needed = sum(bytes_of(value) for value in content.values())
    try:
        check_space(out, needed)
        durable.remove(partial)
        partial.mkdir()
        for name, value in content.items():
            written(partial / name, value)
    except OSError as error:
        durable.remove(partial)  # before the free bytes are counted
        raise failed(out, final, needed, error) from error
    except BaseException:
        durable.remove(partial)
        raise
    parameters = Parts(trained.model, trained.optimizer).names()
    return Staged(partial, final, tuple(content), moment.record(trained, parameters=parameters), needed)


def commit(staged: Staged, files: Mapping[str, Any]) -> None:
    """Give a snapshot whose files are on the disk its record, and its name: what has the final name is complete.

    Args:
        staged: the snapshot.
        files: what is in each, of all processes that have written some.
    """
    whole = {
        "memfit": "snapshot",
        "format_version": FORMAT_VERSION,
        "torch_version": torch.__version__,
        **staged.record,
        "files": dict(files),
    }
    durable.put(staged.partial / RECORD, json.dumps({**whole, "sha256": _own_sum(whole)}, indent=1).encode())
    durable.sync_folder(staged.partial)
    durable.replace(staged.partial, staged.final)
    durable.sync_folder(staged.final.parent)


def failed(out: Path, final: Path, needed: int, error: OSError) -> SnapshotError:
    """In a sentence, why a snapshot could not be written."""
    if error.errno in _NO_SPACE:
        return _no_space(out, needed)
    return SnapshotError(f"cannot write the snapshot {final}: {error.strerror or error}; {older(out)}")


def check_space(out: Path, needed_bytes: int) -> None:
    """Make the folder and see that so many bytes fit into it.

    Raises:
        SnapshotError: they do not, or the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot write to {out}: {error.strerror or error}") from error
    if shutil.disk_usage(out).free < needed_bytes:
        raise _no_space(out, needed_bytes)


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a value, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(value)}  # noqa: SLF001 - the storage's identity
    return sum(storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def check_readable(content: Mapping[str, Any]) -> None:
    """Refuse to write what could not be read back: an object that only pickle with code could restore."""
    for path, leaf in pytree.tree_flatten_with_path(content)[0]:
        if not isinstance(leaf, _READABLE):
            raise SnapshotError(
                f"{pytree.keystr(path)} is a {type(leaf).__name__}, which a snapshot cannot hold: "
                "use tensors and plain values"
            )


def written(file: Path, value: Any) -> None:
    """Write one file."""
    with file.open("xb") as stream:
        save(value, stream)


def about(file: Path) -> dict[str, Any]:
    """What a record says of a file."""
    return {"bytes": file.stat().st_size, "sha256": _sum(file)}


class _Remembering:
    """A file for `torch.save`, which turns what went wrong in writing into a RuntimeError about positions."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write, and keep the first error."""
        try:
            return self._stream.write(data)
        except BaseException as error:  # Ctrl-C too
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Nothing: the stream's owner does."""


def save(value: Any, stream: BinaryIO) -> None:
    """`torch.save` into an open file; a full disk is an OSError, and Ctrl-C a KeyboardInterrupt."""
    file = _Remembering(stream)
    try:
        torch.save(value, file)  # type: ignore[arg-type]  # it only writes
    except RuntimeError:
        if file.error is not None:
            raise file.error from None
        raise


def _no_space(out: Path, needed: int) -> SnapshotError:
    free = shutil.disk_usage(out).free
    return SnapshotError(
        f"no space for a snapshot in {out}: it takes {format_bytes(needed)} and {format_bytes(free)} are free. "
        f"Free space, or lower train.keep. {older(out)}"
    )


def older(out: Path) -> str:
    """What can be gone on from where one could not be written, at the end of the message."""
    found = folders(out)
    if not found:
        return "No snapshot was there before"
    return f"{found[-1].name} is as it was: go on from it with `memfit resume {out}`"


# ------------------------------------------------------------------------------------------------------------- reading


def latest(out: Path, notice: Callable[[str], None]) -> Snapshot:
    """The newest snapshot that is whole; a damaged one is passed over with a notice.

    Raises:
        SnapshotError: there is none.
    """
    found = folders(out)
    for folder in reversed(found):
        try:
            return read(folder)
        except SnapshotError as error:
            notice(f"{error}; trying the one before")
    raise SnapshotError(f"no snapshot in {out} can be read" if found else f"there is no snapshot in {out}")


def read(folder: Path) -> Snapshot:
    """Read what a snapshot says of itself, and check every file.

    Raises:
        SnapshotError: it is damaged, incomplete, or of a format this version does not read.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        raise SnapshotError(f"{folder} is no snapshot: {RECORD}: {reason}") from error
    if not isinstance(record, dict) or record.get("memfit") != "snapshot":
        raise SnapshotError(f"{folder} is no snapshot of memfit's")
    if record.get("format_version") != FORMAT_VERSION:
        raise SnapshotError(
            f"{folder} has format {record.get('format_version')!r} and this memfit reads {FORMAT_VERSION}"
        )
    expected = record.pop("sha256", None)
    if expected != _own_sum(record):
        raise SnapshotError(f"{folder} is damaged: {RECORD} differs from its checksum")
    for name, expected in record["files"].items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise SnapshotError(f"{folder} is damaged: {name} has {size} bytes instead of {expected['bytes']}")
            if _sum(file) != expected["sha256"]:
                raise SnapshotError(f"{folder} is damaged: {name} differs from its checksum")
        except OSError as error:
            raise SnapshotError(f"{folder} is damaged: {name}: {error.strerror or error}") from error
    position = Position(record["epoch"], record["used"])
    return Snapshot(
        folder, record["step"], position, record["samples"], record["plan"], record["config"],
        record["ranks"], tuple(record["parameters"]),
    )  # fmt: skip


def glance(path: Path) -> Mapping[str, Any] | None:
    """The configuration in a snapshot, or in the newest one in a run's folder, unchecked; None where there is none."""
    for folder in (path, *reversed(folders(path))):
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return dict(record["config"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _sum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_sum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------- tidying up


def prune(out: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest snapshots and the one of step `best`, and what an interrupted write has left."""
    for folder in folders(out)[:-keep]:
        if step_of(folder) == best:
            continue
        # Renamed first: a half-removed folder must not look like a damaged snapshot.
        gone = folder.with_name(f".{folder.name}.gone")
        durable.remove(gone)
        durable.remove(_renamed(folder, gone))
    sweep(out)


def sweep(out: Path) -> None:
    """Remove what an interrupted write has left; a snapshot that was about to be replaced gets its name back."""
    for old in out.glob(".step-*.old"):
        final = out / old.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            _renamed(old, final)
    for folder in out.glob(".step-*"):
        durable.remove(folder)


def set_aside(out: Path, step: int) -> list[Path]:
    """Rename snapshots later than `step`: a run that goes on from there must not find a future that is not its own."""
    later = [f for f in folders(out) if (taken := step_of(f)) is not None and taken > step]
    moved = []
    for folder in later:
        target = folder.with_name(f"{folder.name}.superseded")
        durable.remove(target)
        moved.append(_renamed(folder, target))
    return moved


def _renamed(folder: Path, target: Path) -> Path:
    try:
        return folder.rename(target)
    except OSError as error:
        raise SnapshotError(f"cannot rename {folder} to {target.name}: {error.strerror or error}") from error


# ---------------------------------------------------------------------------------------------------------- going back


def restore(snapshot: Snapshot, trained: Trained) -> dict[str, Any]:
    """Put parameters, buffers, optimizer state, gradient scaling and generators back; returns the loop's values.

    Learning rates and the like stay those of the optimizer as it is now: they come from the configuration, which may
        have been changed on purpose.

    Raises:
        SnapshotError: it is of another model or optimizer.
    """
    try:
        _set_model(trained.model, snapshot.load("model.pt"))
        if trained.optimizer is not None:
            set_optimizer(trained.optimizer, snapshot.load("optimizer.pt"))
    except (RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{snapshot.folder} is of another model or optimizer: {error}") from error
    loop: dict[str, Any] = snapshot.load("loop.pt")
    if trained.scaling is not None and loop.get("scaling") is not None:
        trained.scaling.set_state(loop["scaling"])
    process_generators.set_generators(loop["generators"])
    return loop


def restore_model(snapshot: Snapshot, model: torch.nn.Module) -> None:
    """Put parameters and buffers back and nothing else, out of pages of the file: there is no second copy of them that the system could not drop.

    Raises:
        SnapshotError: it is of another model.
    """
    try:
        _set_model(model, snapshot.load("model.pt", mapped=True))
    except (RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{snapshot.folder} is of another model or optimizer: {error}") from error


def _set_model(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    model.load_state_dict(saved["state"])
    set_buffers(model, saved["buffers"])
