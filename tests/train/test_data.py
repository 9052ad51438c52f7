"""What is read is what stands in the files, and what cannot be read is named; order is a function of seed and epoch."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memfit.batches import IGNORED_LABEL
from memfit.errors import ConfigError, InputError
from memfit.train import readers, text
from memfit.train.data import ArraySamples, Batches, ItemSamples, Position
from memfit.train.text import ByteEncoder, Format, Labels, samples_of_lines, samples_of_stream

START = Position()


def jsonl(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def numbered(count: int) -> ArraySamples:
    return ArraySamples({"x": np.arange(count)})


def taken(batches: Batches, count: int, position: Position = START) -> list[list[int]]:
    return [batch["x"].tolist() for batch, _ in islice(batches.start(position), count)]


def test_every_epoch_uses_every_sample_once_in_an_order_of_its_own() -> None:
    batches = Batches(numbered(10), 4, seed=1)

    first, second = taken(batches, 3), taken(batches, 3, Position(1, 0))

    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert batches.per_epoch == 3


def test_the_order_depends_on_the_seed_and_not_on_the_global_generator() -> None:
    before = taken(Batches(numbered(50), 8, seed=3), 7)
    torch.manual_seed(99)

    assert taken(Batches(numbered(50), 8, seed=3), 7) == before
    assert taken(Batches(numbered(50), 8, seed=4), 7) != before


def test_a_position_is_where_the_rest_goes_on() -> None:
    batches = Batches(numbered(10), 4)
    whole = list(islice(batches.start(), 8))

    for i, (_, position) in enumerate(whole[:-1]):
        assert taken(batches, 7 - i, position) == [batch["x"].tolist() for batch, _ in whole[i + 1 :]]


def test_a_smaller_last_batch_is_left_out_where_that_is_asked_for() -> None:
    batches = Batches(numbered(10), 4, drop_last=True)

    epochs = taken(batches, 2), taken(batches, 2, Position(1, 0))
    assert [taken(batches, 4), taken(batches, 2, Position(0, 8))] == [epochs[0] + epochs[1], epochs[1]]
    assert [len(batch) for batch in chain(*epochs)] == [4] * 4
    assert batches.per_epoch == 2
    assert Batches(numbered(12), 4, drop_last=True).per_epoch == 3
    assert taken(Batches(numbered(3), 4, None, drop_last=True), 2) == [[0, 1, 2]] * 2


def test_a_position_may_be_taken_up_with_another_batch_size() -> None:
    _, position = next(Batches(numbered(10), 4).start())

    order = Batches(numbered(10), 4).order(0)
    assert taken(Batches(numbered(10), 3), 2, position) == [order[4:7], order[7:10]]


def test_without_a_seed_and_for_an_evaluation_the_order_is_the_datas() -> None:
    batches = Batches(numbered(5), 2, seed=None)

    assert taken(batches, 3) == [[0, 1], [2, 3], [4]]
    assert [batch["x"].tolist() for batch in Batches(numbered(5), 2).once()] == [[0, 1], [2, 3], [4]]


def test_no_samples_are_no_data() -> None:
    with pytest.raises(InputError, match="holds no samples"):
        Batches(numbered(0), 2)


def test_a_users_dataset_is_stacked() -> None:
    dataset = [(torch.tensor([i, i]), i) for i in range(4)]

    x, y = ItemSamples(dataset).batch([3, 1], 0)

    assert x.tolist() == [[3, 3], [1, 1]]
    assert y.tolist() == [3, 1]


def test_numbers_in_jsonl_become_tensors(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"x": [1, 2.5], "y": 1, "z": True}, "", {"x": [3, 4], "y": 0, "z": False})

    batch = ArraySamples(readers.numbers(readers.json_lines([path]))).batch([1, 0], 0)

    assert batch["x"].tolist() == [[3, 4], [1, 2.5]]
    assert (batch["x"].dtype, batch["y"].dtype, batch["z"].dtype) == (torch.float32, torch.int64, torch.bool)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (({"x": 1}, "{'x': 2}"), r"data\.jsonl:2: not JSON"),
        (({"x": 1}, "", "[1]"), r"data\.jsonl:3: expected an object"),
        (({"x": 1}, {"y": 1}), r"data\.jsonl:2: fields y, but .*data\.jsonl:1 has x"),
        (({"x": [1, 2]}, {"x": [1]}), r"data\.jsonl:2: field 'x' has shape \(1,\), .*: pad all lines"),
        (({"x": "text"},), r"data\.jsonl:1: field 'x' is no number.*data\.text"),
        (({"x": [[1], [1, 2]]},), r"data\.jsonl:1: field 'x' is no number"),
        (({"x": None},), r"data\.jsonl:1: field 'x' is no number"),
        (({},), r"no fields"),
        ((), r"data\.jsonl is empty"),
        (("", " "), r"data\.jsonl is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, rows: tuple[Any, ...], message: str) -> None:
    path = jsonl(tmp_path, *rows)

    with pytest.raises(InputError, match=message):
        readers.numbers(readers.json_lines([path]))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"x": 1}\n{"x": "\xff"}\n')

    with pytest.raises(InputError, match=r"data\.jsonl: not UTF-8"):
        list(readers.json_lines([path]))


def test_arrays_are_joined_and_keep_their_types(tmp_path: Path) -> None:
    for i in range(2):
        np.savez(tmp_path / f"{i}.npz", x=np.full((3, 2), i, np.float64), y=np.arange(3))
    files = readers.find(["*.npz"], tmp_path, "data.train")

    arrays = readers.arrays(files)

    assert arrays["x"].dtype == np.float64
    assert arrays["x"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 1)), "y": np.zeros(3)}, "the first dimension counts samples"),
        ({"x": np.zeros(())}, "the first dimension counts samples"),
        ({"x": np.zeros((0, 2))}, "is empty"),
        ({"x": np.array(["a", "b"])}, "holds <U1, not numbers"),
        ({"x": np.array([None, 1])}, "cannot read"),
    ],
)
def test_arrays_that_are_no_samples_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)

    with pytest.raises(InputError, match=message):
        readers.arrays([tmp_path / "a.npz"])


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(1000))
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:300])

    with pytest.raises(InputError, match=r"cannot read .*a\.npz"):
        readers.arrays([tmp_path / "a.npz"])


@pytest.mark.parametrize(
    ("names", "patterns", "message"),
    [
        ((), ["*.npz"], "data.train: there is no file"),
        (("a.npz", "b.jsonl"), ["a.npz", "b.jsonl"], "files of one kind"),
        (("a.csv",), ["a.csv"], "data.train: found .csv; memfit reads"),
    ],
)
def test_files_that_are_not_there_or_not_readable_are_refused(
    tmp_path: Path, names: tuple[str, ...], patterns: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).touch()

    with pytest.raises(ConfigError, match=message):
        readers.find(patterns, tmp_path, "data.train")


@pytest.mark.parametrize(("name", "with_pandas"), [("rows.csv", "read_csv"), ("rows.json", "read_json")])
def test_tables_of_other_kinds_are_told_how_to_become_one_that_is_read(
    tmp_path: Path, name: str, with_pandas: str
) -> None:
    (tmp_path / name).write_text("text,label\nhello,1\n")
    with pytest.raises(ConfigError, match=rf"pandas\.{with_pandas}\(file\)\.to_json\(\"data\.jsonl\""):
        readers.find([name], tmp_path, "data.train")


def test_patterns_find_files_sorted_and_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "x[1].txt"):
        (tmp_path / name).touch()

    found = readers.find(["b.txt", "*.txt", "x[1].txt"], tmp_path, "data.train")

    assert [f.name for f in found] == ["b.txt", "a.txt", "x[1].txt"]


def lines(folder: Path, *rows: Any) -> list[readers.Row]:
    return list(readers.json_lines([jsonl(folder, *rows)]))


def test_text_is_padded_to_one_width_and_cut_at_it(tmp_path: Path) -> None:
    rows = lines(tmp_path, {"t": "ab"}, {"t": "abcdef"})

    samples = samples_of_lines(rows, "t", Labels(), Format(ByteEncoder(), 4))

    batch = samples.batch([0, 1], 0)
    assert batch["input_ids"].tolist() == [[98, 99, 0, 0], [98, 99, 100, 101]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert "labels" not in batch
    assert samples.truncated == 1


def test_a_language_models_labels_leave_padding_out(tmp_path: Path) -> None:
    samples = samples_of_lines(lines(tmp_path, {"t": "ab"}), "t", Labels(), Format(ByteEncoder(), 4, "causal-lm"))

    assert samples.batch([0], 0)["labels"].tolist() == [[98, 99, IGNORED_LABEL, IGNORED_LABEL]]


def test_masking_depends_on_sample_and_epoch_alone(tmp_path: Path) -> None:
    rows = lines(tmp_path, *({"t": "the quick brown fox jumps"[i:]} for i in range(4)))
    samples = samples_of_lines(rows, "t", Labels(), Format(ByteEncoder(), 32, "masked-lm", seed=5))

    together, alone = samples.batch([0, 1, 2, 3], 0), samples.batch([2], 0)

    assert torch.equal(together["input_ids"][2], alone["input_ids"][0])
    assert torch.equal(together["labels"][2], alone["labels"][0])
    assert not torch.equal(samples.batch([2], 1)["labels"], alone["labels"])
    hidden = together["labels"] != IGNORED_LABEL
    assert (hidden.sum(1) > 0).all()
    plain = samples_of_lines(rows, "t", Labels(), Format(ByteEncoder(), 32)).batch([0, 1, 2, 3], 0)["input_ids"]
    assert torch.equal(together["labels"][hidden], plain[hidden])
    assert torch.equal(together["input_ids"][~hidden], plain[~hidden])


def test_classes_are_read_as_numbers_or_by_the_models_names(tmp_path: Path) -> None:
    rows = lines(tmp_path, {"t": "a", "k": 1}, {"t": "b", "k": "good"})

    samples = samples_of_lines(rows, "t", Labels("k", {"good": 0, "bad": 1}, 2), Format(ByteEncoder(), 4))

    assert samples.batch([0, 1], 0)["labels"].tolist() == [1, 0]


def test_a_single_output_is_a_number_to_hit(tmp_path: Path) -> None:
    rows = lines(tmp_path, {"t": "a", "k": 3}, {"t": "b", "k": 0.5})

    samples = samples_of_lines(rows, "t", Labels("k", None, 1), Format(ByteEncoder(), 4))

    assert samples.batch([0, 1], 0)["labels"].tolist() == [3.0, 0.5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"k": 0}, r"data\.jsonl:1: no field 't'; there are: 'k'"),
        ({"t": "a"}, r"data\.jsonl:1: no field 'k'"),
        ({"t": 1, "k": 0}, r"data\.jsonl:1: field 't' is no text"),
        ({"t": "", "k": 0}, r"data\.jsonl:1: the text has 0 tokens"),
        ({"t": "a", "k": 2}, r"data\.jsonl:1: label 2, but classes are 0 to 1"),
        ({"t": "a", "k": -1}, r"data\.jsonl:1: label -1"),
        ({"t": "a", "k": 0.5}, r"data\.jsonl:1: label 0.5"),
        (
            {"t": "a", "k": "so"},
            r"data\.jsonl:1: label 'so' is no class of the model; there are: none. Write classes as 0",
        ),
        ({"t": "a", "k": None}, r"data\.jsonl:1: label None is neither"),
    ],
)
def test_a_bad_text_line_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        samples_of_lines(lines(tmp_path, row), "t", Labels("k", None, 2), Format(ByteEncoder(), 4))


def test_running_text_is_cut_into_samples_and_none_of_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")

    samples = samples_of_stream(readers.text_lines([path]), Format(ByteEncoder(), 6, "causal-lm"))

    batch = samples.batch(range(len(samples)), 0)
    read = batch["input_ids"][batch["attention_mask"].bool()] - 1
    assert bytes(read.tolist()) == path.read_bytes()
    assert len(samples) == 3


def test_running_text_has_no_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.txt files are running text"):
        samples_of_stream(["a"], Format(ByteEncoder(), 6, "sequence-classification"))


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*gone \(memfit downloads nothing\)"):
        text.FolderEncoder(tmp_path / "gone")


def test_without_the_extra_the_command_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)

    with pytest.raises(InputError, match=r"pip install 'memfit\[transformers\]'"):
        text.FolderEncoder(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_ranks_do_not_overlap_and_make_up_the_batch(ranks: int) -> None:
    whole = Batches(ArraySamples({"x": np.arange(23)}), 5, seed=7)
    parts = [whole.of_rank(rank, ranks).start() for rank in range(ranks)]

    for (batch, after), *own in zip(islice(whole.start(), 12), *parts, strict=False):
        assert torch.cat([part["x"] for part, _ in own]).equal(batch["x"])
        assert {each for _, each in own} == {after}
        assert max(len(part["x"]) for part, _ in own) == len(own[0][0]["x"])


def test_every_rank_needs_a_sample_of_every_batch_that_is_not_left_out() -> None:
    with pytest.raises(InputError, match=r"of 10 samples has 2, and each of 3 ranks needs one: leave it out \(data\."):
        Batches(numbered(10), 4).of_rank(0, 3)
    with pytest.raises(InputError, match="a batch has 2 samples for 3 ranks"):
        Batches(numbered(10), 2).of_rank(0, 3)
    Batches(numbered(12), 4).of_rank(0, 3)
    parts = [taken(Batches(numbered(10), 4, None, drop_last=True).of_rank(rank, 3), 3) for rank in range(3)]
    assert [list(chain(*own)) for own in zip(*parts, strict=True)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


# -- conversations ---------------------------------------------------------------------------------------------------------

UNKNOWN, PADDING = {"unk_token": "[UNK]"}, {"pad_token": "[PAD]"}
WORDS = ["[PAD]", "[UNK]", "<user>", "<assistant>", "<system>", "<end>", "how", "are", "you", "fine", "and", "well"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
TALK = [
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "and you"},
    {"role": "assistant", "content": "well"},
]


def talker(folder: Path, template: str | None = TEMPLATE) -> text.FolderEncoder:
    """A tokenizer of a few whole words, with a chat template."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, **UNKNOWN)
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **PADDING, **UNKNOWN)
    made.chat_template = template
    made.save_pretrained(str(folder / "words"))
    return text.FolderEncoder(folder / "words")


def talks(folder: Path, *rows: Any, max_length: int = 16, template: str | None = TEMPLATE) -> text.TokenSamples:
    form = Format(talker(folder, template), max_length, "causal-lm")
    return text.samples_of_conversations(readers.json_lines([jsonl(folder, *rows)]), "messages", form)


def told(batch: dict[str, torch.Tensor], row: int = 0) -> tuple[str, str]:
    """What is read, and what of it is learnt."""
    ids, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
    assert all(label in (token, IGNORED_LABEL) for token, label in zip(ids, labels, strict=True))
    read = [WORDS[token] for token, there in zip(ids, batch["attention_mask"][row].tolist(), strict=True) if there]
    return " ".join(read), " ".join(WORDS[label] for label in labels if label != IGNORED_LABEL)


def test_of_a_conversation_what_the_assistant_says_is_learnt_and_nothing_else(tmp_path: Path) -> None:
    samples = talks(tmp_path, {"messages": TALK}, {"messages": TALK[:2]})

    assert told(samples.batch([0], 0)) == (
        "<user> how are you <end> <assistant> fine <end> <user> and you <end> <assistant> well <end>",
        "fine <end> well <end>",
    )
    assert told(samples.batch([1], 0))[1] == "fine <end>"


def test_a_conversation_that_is_cut_keeps_what_is_learnt_before_the_cut(tmp_path: Path) -> None:
    samples = talks(tmp_path, {"messages": TALK}, {"messages": TALK[:1]}, max_length=7)

    assert (len(samples), samples.truncated, samples.left_out) == (1, 1, 1)
    assert told(samples.batch([0], 0)) == ("<user> how are you <end> <assistant> fine", "fine")


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": "hello"}, TEMPLATE, r"data.jsonl.*1.*field 'messages' is no list of messages"),
        ({"messages": TALK}, None, "this tokenizer has no chat template"),
        ({"messages": TALK}, "{{ raise_exception('no system role') }}", r"data.jsonl.*refuses this conversation: no system role"),
        (
            {"messages": TALK},
            "{% for m in messages %}{% if not loop.last or m.role == 'user' %}<{{ m.role }}> {% endif %}{{ m.content }} <end> {% endfor %}",
            "writes earlier messages in another way",
        ),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_learnt_from_is_named(
    tmp_path: Path, row: dict[str, Any], template: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        talks(tmp_path, row, template=template)


def test_bytes_have_no_chat_template() -> None:
    with pytest.raises(ConfigError, match="bytes have none"):
        ByteEncoder().conversation(TALK)
