"""Read .jsonl, .parquet, .txt and .npz files and saved datasets; whatever is wrong with one is said with its name and line.

Training data is where a run meets the world: a bad line found in the second epoch costs a day, so everything is read
and checked at the start.
"""

from __future__ import annotations

import glob
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.errors import ConfigError, InputError
from memfit.train import tables

Array = NDArray[Any]
DATASET: Final = "dataset"  # a folder that Hugging Face's datasets has saved
KINDS: Final = {
    ".jsonl": ".jsonl",
    ".parquet": ".parquet",
    ".txt": ".txt",
    ".md": ".txt",
    ".npz": ".npz",
}  # suffix -> how it is read
WITH_FIELDS: Final = (".jsonl", ".parquet", DATASET)


class Row(NamedTuple):
    """The fields of a line of .jsonl, or of a row of a table, and where it stands."""

    where: str
    content: Any


def kind_of(file: Path) -> str:
    """How a file is read: a value of `KINDS`, or `DATASET`; "" for one that cannot be."""
    if file.is_dir():
        return DATASET if tables.is_dataset(file) else ""
    return KINDS.get(file.suffix, "")


def find(patterns: Iterable[str], folder: Path, path: str) -> list[Path]:
    """The files that patterns name, in the order of the patterns, each pattern's files sorted.

    Raises:
        ConfigError: a pattern names nothing, or the files are not of one known kind; the message starts with `path`.
    """
    files: list[Path] = []
    for pattern in patterns:
        where = Path(folder, Path(pattern).expanduser())
        # A name with brackets in it may well be a file's own name.
        found = [where] if where.exists() else [Path(p) for p in sorted(glob.glob(str(where), recursive=True))]  # noqa: PTH207
        if not found:
            raise ConfigError(f"{path}: there is no file {where}")
        files += [f for f in found if f not in files]
    kinds = {kind_of(f) for f in files}
    folder_of_others = next((f for f in files if f.is_dir() and not kind_of(f)), None)
    if folder_of_others is not None:
        raise tables.no_dataset(folder_of_others, path)
    if len(kinds) != 1 or "" in kinds:
        suffixes = {f.suffix for f in files if f.is_file()} | ({"a saved dataset"} if DATASET in kinds else set())
        raise ConfigError(
            f"{path}: found {', '.join(sorted(suffixes)) or 'no suffix'}; "
            f"memfit reads files of one kind: {', '.join(KINDS)}, or a dataset that Dataset.save_to_disk has written{_converted(suffixes)}"
        )
    return files


def _converted(suffixes: Iterable[str]) -> str:
    """How a table of a kind that is not read becomes one that is; "" for other files."""
    with_pandas = {".csv": "read_csv(file)", ".tsv": 'read_csv(file, sep="\\t")', ".json": "read_json(file)"}
    made = next((with_pandas[suffix] for suffix in sorted(suffixes) if suffix in with_pandas), None)
    return f': pandas.{made}.to_json("data.jsonl", orient="records", lines=True) writes one' if made else ""


def rows(files: Iterable[Path], fields: Sequence[str] = ()) -> Iterator[Row]:
    """What has fields, of any kind: lines of .jsonl files, rows of .parquet files and of saved datasets.

    Args:
        files: of one kind.
        fields: that are needed; of a table no others are read. Where none is named, all of them.

    Raises:
        InputError: a file cannot be read or is empty, or a table lacks a field.
    """
    for file in files:
        kind = kind_of(file)
        if kind == ".jsonl":
            yield from json_lines([file])
            continue
        number = 0
        read = tables.rows_of_dataset if kind == DATASET else tables.rows_of_parquet
        for number, content in enumerate(read(file, fields), 1):
            yield Row(f"{file} row {number}", content)
        if not number:
            raise InputError(f"{file} is empty: leave it out, or name another file")


def text_lines(files: Iterable[Path]) -> Iterator[str]:
    """Lines of text files, with their line ends."""
    for file in files:
        empty = True
        for _, line in _lines(file):
            empty = empty and not line.strip()
            yield line
        if empty:
            raise InputError(f"{file} is empty: leave it out, or name another file")


def json_lines(files: Iterable[Path]) -> Iterator[Row]:
    """Objects of .jsonl files, blank lines left out.

    Raises:
        InputError: a line is no JSON object, or a file holds none.
    """
    for file in files:
        empty = True
        for number, line in _lines(file):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                content = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where}: not JSON ({error})") from None
            if not isinstance(content, dict):
                raise InputError(f"{where}: expected an object such as {{...}}, found {type(content).__name__}")
            empty = False
            yield Row(where, content)
        if empty:
            raise InputError(f"{file} is empty: leave it out, or name another file")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as stream:
            for number, line in enumerate(stream, 1):
                yield number, line
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        # Text is decoded in blocks, so the bad byte is at or soon after the next line.
        raise InputError(f"{file}: not UTF-8 after line {number} ({error.reason})") from error


def numbers(lines: Iterable[Row]) -> dict[str, Array]:
    """Fields that are numbers, or even lists of numbers, as arrays: int64 when all are whole, float32 otherwise.

    Raises:
        InputError: a line has other fields, shapes or types than the first.
    """
    rows: dict[str, list[Array]] = {}
    first = ""
    for where, content in lines:
        if not rows:
            rows, first = {key: [] for key in content}, where
        if content.keys() != rows.keys():
            raise InputError(
                f"{where}: fields {', '.join(content) or '(none)'}, but {first} has {', '.join(rows) or '(none)'}"
            )
        for key, value in content.items():
            try:
                row = np.asarray(value)
            except ValueError:
                row = np.asarray(None)
            if row.dtype.kind not in "biuf":
                raise InputError(
                    f"{where}: field {key!r} is no number and no even list of numbers; "
                    "if it is text, name it in data.text"
                )
            if rows[key] and row.shape != rows[key][0].shape:
                raise InputError(
                    f"{where}: field {key!r} has shape {row.shape}, but {rows[key][0].shape} at {first}: "
                    "pad all lines to the longest (labels with -100, where the loss leaves these out)"
                )
            rows[key].append(row)
    if not rows:
        raise InputError(f"{first or 'the data'}: no fields")
    return {key: _typed(np.stack(values)) for key, values in rows.items()}


def _typed(array: Array) -> Array:
    return array if array.dtype.kind == "b" else array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)


def arrays(files: Iterable[Path]) -> dict[str, Array]:
    """The arrays of .npz files, joined along samples, of the types they were saved with.

    Raises:
        InputError: no .npz file, lengths that differ, or objects instead of numbers.
    """
    parts: list[tuple[Path, dict[str, Array]]] = []
    for file in files:
        try:
            # numpy would leave a damaged file open.
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                part = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"cannot read {file}: {error}") from error
        _check_arrays(file, part)
        parts.append((file, part))
        start, names = parts[0]
        if part.keys() != names.keys() or any(part[k].shape[1:] != names[k].shape[1:] for k in names):
            raise InputError(f"{file} holds {_shapes(part)}, but {start} holds {_shapes(names)}")
    return {name: np.concatenate([part[name] for _, part in parts]) for name in parts[0][1]}


def _check_arrays(file: Path, part: Mapping[str, Array]) -> None:
    lengths = {len(a) if a.ndim else -1 for a in part.values()}
    if not part or lengths == {0}:
        raise InputError(f"{file} is empty: leave it out, or name another file")
    if len(lengths) > 1 or -1 in lengths:
        raise InputError(
            f"{file} holds {_shapes(part)}: the first dimension counts samples, so it must be the same in all"
        )
    for name, array in part.items():
        if array.dtype.kind not in "biuf":
            raise InputError(f"{file}: {name} holds {array.dtype}, not numbers")


def _shapes(part: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in part.items()) or "nothing"
