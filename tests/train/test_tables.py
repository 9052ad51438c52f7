"""Columns of Parquet files and of saved datasets are learnt from like the fields of .jsonl lines, and what is wrong with one is said with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memfit.errors import ConfigError, InputError
from memfit.train import readers
from memfit.train.assemble import assemble
from memfit.train.config import from_json

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ROWS: list[dict[str, Any]] = [
    {"text": "well done" if n % 2 else "oh", "kind": n % 2, "messages": [{"role": "user", "content": "a"}], "x": [n, n + 1]}
    for n in range(10)
]  # fmt: skip


def saved(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "data") -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / name))
    return folder / name


def written(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "data.parquet") -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name, row_group_size=3)
    return folder / name


def jsonl(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder / "data.jsonl"


def samples(folder: Path, train: str, **more: Any) -> Any:
    data = {"train": train, "tokenizer": "bytes", "max_length": 16, **more}
    model = {"python": "tables_model:build", "task": "sequence-classification"}
    (folder / "tables_model.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(1, 1)\n")
    return assemble(from_json({"model": model, "data": data, "fit": {"device": "cpu"}}, folder)).batches.samples


@pytest.mark.parametrize("write", [written, saved])
def test_texts_and_classes_are_those_of_the_same_lines(tmp_path: Path, write: Any) -> None:
    name = write(tmp_path).name
    jsonl(tmp_path)

    table, lines = (samples(tmp_path, each, text="text", label="kind") for each in (name, "data.jsonl"))

    ours, theirs = table.batch(range(10), 0), lines.batch(range(10), 0)
    assert len(table) == 10
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("write", [written, saved])
def test_numbers_become_tensors_as_they_are(tmp_path: Path, write: Any) -> None:
    rows = [{"x": [n, n + 0.5], "y": n} for n in range(4)]
    file = write(tmp_path, rows)

    arrays = readers.numbers(readers.rows(readers.find([file.name], tmp_path, "data.train")))

    assert arrays["x"].tolist() == [[n, n + 0.5] for n in range(4)]
    assert arrays["y"].dtype == np.int64


@pytest.mark.parametrize("write", [written, saved])
def test_messages_have_the_keys_that_they_were_written_with(tmp_path: Path, write: Any) -> None:
    """A table has every key in every object of a list, and None where there was none."""
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "calls": [{"name": "f"}]},
    ]
    file = write(tmp_path, [{"messages": talk, "n": 1}])

    (row,) = readers.rows([file], ["messages"])

    assert row.content == {"messages": talk}
    assert row.where == f"{file} row 1"


def test_files_are_read_one_after_the_other_and_rows_counted_in_each(tmp_path: Path) -> None:
    written(tmp_path, ROWS[:3], "a.parquet")
    written(tmp_path, ROWS[3:], "b.parquet")

    found = list(readers.rows(readers.find(["*.parquet"], tmp_path, "data.train")))

    assert [row.content["x"][0] for row in found] == list(range(10))
    assert [row.where.rpartition("/")[2] for row in found[2:4]] == ["a.parquet row 3", "b.parquet row 1"]


def test_a_dataset_that_was_filtered_and_shuffled_is_read_as_it_was_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS).shuffle(seed=3).filter(lambda row: row["kind"] == 1).with_format("numpy")
    data.save_to_disk(str(tmp_path / "some"))

    found = [row.content["x"] for row in readers.rows([tmp_path / "some"])]

    assert found == [row.tolist() for row in data["x"]]
    assert all(type(each[0]) is int for each in found)


def test_of_several_splits_one_has_to_be_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))

    with pytest.raises(
        ConfigError, match=r"data\.train: .*both holds several datasets, test, train: name one of them, .*both/train"
    ):
        readers.find(["both"], tmp_path, "data.train")
    assert len(list(readers.rows(readers.find(["both/test"], tmp_path, "data.train")))) == 10


def test_a_folder_without_a_dataset_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    written(tmp_path / "some")

    with pytest.raises(
        ConfigError,
        match=r"some is a folder, and Dataset\.save_to_disk has not written it: name files by a pattern, such as .*some/\*\.parquet",
    ):
        readers.find(["some"], tmp_path, "data.train")


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    saved(tmp_path)
    jsonl(tmp_path)

    with pytest.raises(
        ConfigError, match=r"found \.jsonl, a saved dataset; memfit reads files of one kind: \.jsonl, \.parquet"
    ):
        readers.find(["data", "data.jsonl"], tmp_path, "data.train")


@pytest.mark.parametrize("write", [written, saved])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, write: Any) -> None:
    name = write(tmp_path).name

    with pytest.raises(InputError, match=rf"{name}: no field 'txt'; there are: 'text', 'kind', 'messages', 'x'"):
        samples(tmp_path, name, text="txt", label="kind")


@pytest.mark.parametrize("write", [written, saved])
def test_a_row_that_cannot_be_learnt_from_is_named(tmp_path: Path, write: Any) -> None:
    rows = [*ROWS[:4], {**ROWS[4], "text": None}, *ROWS[5:]]
    name = write(tmp_path, rows).name

    with pytest.raises(InputError, match=rf"{name} row 5: field 'text' is no text"):
        samples(tmp_path, name, text="text", label="kind")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    file = saved(tmp_path)
    next(file.glob("*.arrow")).unlink()
    empty = written(tmp_path, [], "empty.parquet")

    with pytest.raises(InputError, match=r"cannot read .*a\.parquet: "):
        list(readers.rows([tmp_path / "a.parquet"]))
    with pytest.raises(InputError, match=r"cannot read .*data: "):
        list(readers.rows([file]))
    with pytest.raises(InputError, match=r"empty\.parquet is empty"):
        list(readers.rows([empty]))
