"""A stream is trained on in the order in which it comes, and a run that goes on reads what the whole one would have read, or says that it cannot."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memfit.errors import ConfigError, InputError, NonFiniteLossError, SnapshotError
from memfit.train import snapshots
from memfit.train.assemble import assemble
from memfit.train.config import TrainConfig, from_json
from memfit.train.data import Batches, Position
from memfit.train.loop import RunOutcome, RunOutput, train
from memfit.train.stream import StreamBatches, is_stream
from train.fakes import FakeEngine
from train.test_data import TALK, jsonl, talker
from train.test_loop import Crash, crash_at, engine, losses, same_state

ITEMS = [
    {"x": np.float32(row[:3]), "y": np.float32(row[3])} for row in np.random.default_rng(0).standard_normal((10, 4))
]


class Shuffled:
    """Samples in another order in each epoch."""

    def __init__(self, items: list[Any] = ITEMS) -> None:
        self.items, self.epoch = items, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        items = list(self.items)
        random.Random(self.epoch).shuffle(items)
        yield from items


def once(items: list[Any] = ITEMS, times: int = 5) -> Iterator[Any]:
    yield from chain(*[items] * times)


def run(out: Path, made: FakeEngine, stream: Any, steps: int = 11, **named: Any) -> RunOutcome:
    batches = StreamBatches(stream, 4)
    batches.sample()  # as planning looks at it
    return train(made, batches, RunOutput(out), TrainConfig(steps=steps, save_every=4, log_every=1), **named)


def taken(batches: StreamBatches, count: int, *start: Any) -> list[list[int]]:
    return [batch.tolist() for batch, _ in islice(batches.start(*start), count)]


# -- order ----------------------------------------------------------------------------------------------------------------


def test_batches_are_in_the_order_of_the_stream_and_begin_anew_at_its_end() -> None:
    batches = StreamBatches(list(range(10)), 4)

    assert batches.sample().tolist() == [0, 1, 2, 3]
    assert taken(batches, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    positions = [after for _, after in islice(batches.start(), 4)]
    assert positions == [Position(0, 4), Position(0, 8), Position(0, 10), Position(1, 4)]
    assert taken(batches, 2, Position(0, 10)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches.count is None


def test_an_epoch_is_told_to_the_stream() -> None:
    batches = StreamBatches(Shuffled(list(range(10))), 5)  # type: ignore[arg-type]

    first, second = taken(batches, 4)[:2], taken(batches, 4)[2:]

    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second


def test_looking_at_an_iterator_uses_nothing_up() -> None:
    batches = StreamBatches(iter(range(10)), 4)

    assert batches.sample().tolist() == batches.sample().tolist() == batches.some(7)[0].tolist() == [0, 1, 2, 3]
    assert taken(batches, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_ranks_make_up_the_batches_and_a_last_one_too_small_for_them_is_left_out(ranks: int) -> None:
    parts = [taken(StreamBatches(range(9), 4).of_rank(rank, ranks), 3) for rank in range(ranks)]

    assert [sorted(chain(*own)) for own in zip(*parts, strict=True)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    with pytest.raises(InputError, match="a batch has 2 samples for 3 ranks"):
        StreamBatches(range(9), 2).of_rank(0, 3)


def test_a_smaller_last_batch_is_left_out_where_that_is_asked_for() -> None:
    assert taken(StreamBatches(range(6), 4, drop_last=True), 2) == [[0, 1, 2, 3]] * 2
    assert taken(StreamBatches(range(8), 4, drop_last=True), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert taken(StreamBatches(range(3), 4, drop_last=True), 2) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("stream", [range(2), [5]])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stream_with_fewer_samples_than_ranks_is_refused(stream: Any, rank: int) -> None:
    words = rf"the stream holds {len(stream)} samples? for 3 ranks, and each needs one: take fewer ranks"

    with pytest.raises(InputError, match=words):
        StreamBatches(stream, 4).of_rank(rank, 3).sample()
    with pytest.raises(InputError, match=words):
        taken(StreamBatches(stream, 4).of_rank(rank, 3), 1)
    with pytest.raises(InputError, match=words):
        taken(StreamBatches(iter(stream), 4).of_rank(rank, 3), 1)


def test_what_is_a_stream() -> None:
    class OfTorch(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert is_stream(OfTorch())
    assert is_stream(once())
    assert is_stream(Shuffled())
    assert not is_stream([1, 2])
    assert not is_stream(3)


# -- going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [6, 7, 10])
@pytest.mark.parametrize("stream", [Shuffled, once])
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(tmp_path: Path, stream: Any, at: int) -> None:
    whole = engine()
    run(tmp_path / "whole", whole, stream())
    with pytest.raises(Crash):
        run(tmp_path / "cut", engine(crash_at(at)), stream())
    torch.manual_seed(123)
    resumed = engine()

    run(tmp_path / "cut", resumed, stream(), snapshot=snapshots.latest(tmp_path / "cut", pytest.fail))

    assert len(resumed.records) < 8
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_state(whole, resumed)


def stopped(folder: Path, stream: Any) -> Any:
    with pytest.raises(Crash):
        run(folder, engine(crash_at(6)), stream)
    return snapshots.latest(folder, pytest.fail)


def test_a_stream_with_other_samples_is_refused(tmp_path: Path) -> None:
    snapshot = stopped(tmp_path, Shuffled())  # after step 4, which is the first of the second epoch
    changed = [{**item, "y": np.float32(0)} for item in ITEMS]

    with pytest.raises(
        SnapshotError, match=r"the stream does not give the samples that it gave before \(of epoch 2 those up to 4 "
    ):
        run(tmp_path, engine(), Shuffled(changed), snapshot=snapshot)
    with pytest.raises(SnapshotError, match=r"the stream ends after 3 samples of epoch 2, of which 4 were trained on"):
        run(tmp_path, engine(), Shuffled(ITEMS[:3]), snapshot=snapshot)


def test_a_stream_that_draws_its_order_is_refused_and_generators_are_left_alone(tmp_path: Path) -> None:
    class Drawn:
        def __iter__(self) -> Iterator[Any]:
            for _ in range(100):
                yield ITEMS[int(torch.randint(10, ()))]

    snapshot = stopped(tmp_path, Drawn())

    with pytest.raises(SnapshotError, match=r"have its order depend on nothing but its arguments and set_epoch"):
        run(tmp_path, engine(), Drawn(), snapshot=snapshot)


def test_a_run_goes_on_from_the_snapshot_before_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    def not_finite(step: int) -> None:
        if step == 6:  # its batch is read by then, and the snapshot is of step 5
            raise NonFiniteLossError("the loss is nan")

    whole, resumed = engine(), engine()
    run(tmp_path / "whole", whole, Shuffled())
    with pytest.raises(NonFiniteLossError, match="The state before it is in .*step-000005"):
        run(tmp_path / "cut", engine(not_finite), Shuffled())

    run(tmp_path / "cut", resumed, Shuffled(), snapshot=snapshots.latest(tmp_path / "cut", pytest.fail))

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_state(whole, resumed)


def test_data_with_a_length_does_not_go_on_from_a_stream(tmp_path: Path) -> None:
    from train.test_loop import data

    snapshot = stopped(tmp_path, Shuffled())

    with pytest.raises(SnapshotError, match="training on an unknown number of samples, and the data now holds 10"):
        train(engine(), data(), RunOutput(tmp_path), TrainConfig(steps=11), snapshot=snapshot)


def test_a_stream_that_ends_for_good_leaves_a_snapshot(tmp_path: Path) -> None:
    made = engine()

    with pytest.raises(
        InputError,
        match=r"the stream has ended after 20 samples of epoch 1, .* The state after step 5 is in .*step-000005",
    ):
        run(tmp_path, made, once(times=2))

    assert snapshots.latest(tmp_path, pytest.fail).step == 5
    with pytest.raises(InputError, match="the data holds no samples"):
        run(tmp_path / "empty", engine(), once(times=0))


def test_a_dataset_of_hugging_face_goes_on_where_it_was(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"x": item["x"].tolist(), "y": float(item["y"])} for item in ITEMS]

    def shuffled() -> Any:
        whole = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
        return whole.shuffle(seed=1, buffer_size=4).with_format("torch")

    one = engine()
    run(tmp_path / "whole", one, shuffled())
    snapshot = stopped(tmp_path / "cut", shuffled())
    resumed = engine()
    run(tmp_path / "cut", resumed, shuffled(), snapshot=snapshot)

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_state(one, resumed)


# -- files ----------------------------------------------------------------------------------------------------------------


def configured(folder: Path, **data: Any) -> Any:
    task = data.pop("task", "causal-lm")
    (folder / "streamed_model.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(1, 1)\n\n"
        "def sized():\n    return torch.utils.data.TensorDataset(torch.zeros(3, 2))\n\n"
        "def stream(train=True):\n    made = (torch.zeros(2) for _ in range(9))\n    return made if train else (sized(), made)\n\n"
        "def loader():\n    return torch.utils.data.DataLoader(sized())\n"
    )
    run_file: dict[str, Any] = {
        "model": {"python": "streamed_model:build", "task": task},
        "data": {"tokenizer": "bytes", "max_length": 16, "stream": True, **data},
        "fit": {"device": "cpu", "global_batch": 4},
        "train": {"steps": 5},
    }
    run_file["train"] |= run_file["data"].pop("train_section", {})
    return from_json(run_file, folder)


def parquet(folder: Path, *rows: Any) -> str:
    arrow, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written.write_table(arrow.Table.from_pylist(list(rows)), folder / "data.parquet")
    return "data.parquet"


TEXTS = [{"text": f"text number {n}", "kind": n % 2} for n in range(10)]


@pytest.mark.parametrize("kind", ["lines", "classes", "parquet", "running", "masked", "talks"])
def test_batches_of_files_are_those_of_the_same_files_read_at_once(tmp_path: Path, kind: str) -> None:
    more: dict[str, Any] = {"text": "text"}
    if kind == "parquet":
        more["train"] = parquet(tmp_path, *TEXTS)
    elif kind == "running":
        (tmp_path / "book.txt").write_text("a word and another\n" * 12)
        more = {"train": "book.txt"}
    elif kind == "talks":
        talker(tmp_path)
        jsonl(tmp_path, *[{"messages": TALK}, {"messages": TALK[:1]}] * 5)
        more = {"train": "data.jsonl", "messages": "messages", "tokenizer": "words"}
    else:
        more["train"] = jsonl(tmp_path, *TEXTS).name
    if kind == "classes":
        more |= {"label": "kind", "task": "sequence-classification"}
    if kind == "masked":
        more["task"] = "masked-lm"

    streamed = assemble(configured(tmp_path, **more)).batches
    whole = assemble(configured(tmp_path, **more, stream=False)).batches

    assert isinstance(streamed, StreamBatches)
    assert isinstance(whole, Batches)
    in_order = list(Batches(whole.samples, 4, None).once())
    for (batch, _), expected in zip(streamed.start(), in_order, strict=False):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)
    second = [batch for batch, _ in islice(streamed.start(), len(in_order) + 1)][-1]
    if kind == "masked":  # what is hidden is drawn anew in each epoch
        assert not torch.equal(second["input_ids"], in_order[0]["input_ids"])
    else:
        assert torch.equal(second["input_ids"], in_order[0]["input_ids"])


def test_a_bad_line_is_told_when_it_is_read(tmp_path: Path) -> None:
    jsonl(tmp_path, *TEXTS[:6], {"text": 3})
    batches = assemble(configured(tmp_path, train="data.jsonl", text="text")).batches.start()

    with pytest.raises(InputError, match=r"data\.jsonl:7: field 'text' is no text"):
        list(islice(batches, 3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "a.jsonl", "text": "t", "train_section": {"steps": None}}, "train.steps is missing: with data.stream"),
        ({"train": "a.jsonl", "text": "t", "packing": True}, "data.packing needs the lengths of all samples"),
        ({"python": "streamed_model:stream"}, "data.stream is of files"),
        ({"train": "data.jsonl", "task": None}, "data.stream reads texts and conversations, and .*data.jsonl holds numbers"),
        ({"python": "streamed_model:stream", "stream": False, "train_section": {"steps": None}},
         "train.steps is missing: the data is a stream"),
        ({"python": "streamed_model:stream", "stream": False, "args": {"train": False}}, "generator, which has no length and items"),
        ({"python": "streamed_model:loader", "stream": False}, "returned a DataLoader: return its dataset"),
    ],
)  # fmt: skip
def test_streams_that_cannot_be_meant_are_refused(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    jsonl(tmp_path, {"x": 1})
    with pytest.raises(ConfigError, match=message):
        assemble(configured(tmp_path, **data))


def test_what_a_function_returns_may_be_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    made = assemble(configured(tmp_path, python="streamed_model:stream", stream=False))

    assert [len(batch) for batch, _ in islice(made.batches.start(), 3)] == [4, 4, 1]
    assert json.loads(json.dumps(made.batches.mark()))["samples"] == 1
