"""Rows of Parquet files and of datasets that Hugging Face's `datasets` has saved on disk.

Parquet is read with pyarrow, which comes with `datasets`, a thousand rows at a time: `datasets.load_dataset` would first copy all of it into a cache in the
home folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from memfit.errors import ConfigError, InputError

_ROWS: Final = 1000  # read at once
_OF_DATASET: Final = ("state.json", "dataset_info.json")  # what `Dataset.save_to_disk` writes beside the rows
_OF_SPLITS: Final = "dataset_dict.json"  # what `DatasetDict.save_to_disk` writes beside the folders of its splits


def is_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` has written a folder."""
    return all((folder / name).is_file() for name in _OF_DATASET)


def no_dataset(folder: Path, path: str) -> ConfigError:
    """The error for a folder that holds no single dataset, with what to name in its place; its message starts with `path`."""
    if (folder / _OF_SPLITS).is_file():
        splits = sorted(each.name for each in folder.iterdir() if is_dataset(each))
        return ConfigError(
            f"{path}: {folder} holds several datasets, {', '.join(splits) or 'none of which is whole'}: name one of them, {folder}/train"
        )
    found = sorted({f"{folder}/*{file.suffix}" for file in folder.iterdir() if file.is_file() and file.suffix})
    pattern = found[0] if found else f"{folder}/*.jsonl"
    return ConfigError(
        f"{path}: {folder} is a folder, and Dataset.save_to_disk has not written it: name files by a pattern, such as {pattern}"
    )


def rows_of_parquet(file: Path, fields: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a .parquet file, each with these fields, or all of them where none is named.

    Raises:
        InputError: pyarrow is missing; the file cannot be read, or lacks a field.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(f"reading {file} needs pyarrow: pip install 'memfit[datasets]'") from error
    try:
        with parquet.ParquetFile(file) as opened:
            _check(file, opened.schema_arrow.names, fields)
            for table in opened.iter_batches(batch_size=_ROWS, columns=list(fields) or None):
                yield from map(_said, table.to_pylist())
    except (OSError, ArrowException) as error:
        raise InputError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


def rows_of_dataset(folder: Path, fields: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a folder that `Dataset.save_to_disk` has written; fields and errors as for `rows_of_parquet`."""
    try:
        import datasets
        from pyarrow import ArrowException
    except ImportError as error:
        raise InputError(f"reading {folder} needs datasets: pip install 'memfit[datasets]'") from error
    try:
        with _without_bars(datasets):
            data = datasets.load_from_disk(str(folder))
        _check(folder, data.column_names, fields)
        if fields:
            data = data.select_columns(list(fields))
        # As Arrow's own tables: images and audio stay the bytes that they are, and what makes tensors of rows is ours.
        for table in data.with_format("arrow").iter(_ROWS):
            yield from map(_said, table.to_pylist())
    except (OSError, ValueError, KeyError, ArrowException) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {folder}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def _check(where: Path, have: Iterable[str], fields: Sequence[str]) -> None:
    have = list(have)
    for name in fields:
        if name not in have:
            raise InputError(f"{where}: no field {name!r}; there are: {', '.join(map(repr, have)) or 'none'}")


def _said(value: Any) -> Any:
    """A row without the keys that tables fill up with nothing in lists of objects: a message without tool calls has none, as in JSON."""
    if isinstance(value, dict):
        return {key: _in_lists(each) for key, each in value.items()}
    return value


def _in_lists(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [
            {key: _in_lists(part) for key, part in each.items() if part is not None or key == "content"}
            if isinstance(each, dict)
            else each
            for each in value
        ]
    return value


@contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    """While the block runs, datasets draws no progress bars between ours."""
    there = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if there:
            datasets.utils.enable_progress_bars()
