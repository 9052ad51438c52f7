"""A batch is split, counted, described and compared by its structure; a loss must be one scalar that can be trained on."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import memfit
import small
from memfit import batches
from memfit.errors import BatchError, InputError


class Encoding(UserDict[str, Tensor]):
    """Like transformers' BatchEncoding: a mapping that is no dict."""


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(6, 2),
        (torch.zeros(6, 2), torch.zeros(6)),
        [torch.zeros(6, 2), 3],
        {"x": torch.zeros(6, 2), "scale": 2.0},
        Encoding({"x": torch.zeros(6, 2)}),
        (torch.tensor(3.0), torch.zeros(6)),
        {"inner": {"x": torch.zeros(6, 2)}},
    ],
    ids=["tensor", "tuple", "list", "dict", "encoding", "scalar first", "nested"],
)
def test_samples_are_counted_whatever_the_structure(batch: Any) -> None:
    assert batches.size(batch) == 6


@pytest.mark.parametrize("batch", [torch.tensor(1.0), {}, (), {"n": 3}, None])
def test_a_batch_without_samples_is_refused_with_a_sentence(batch: Any) -> None:
    with pytest.raises(
        BatchError, match="no tensor with a dimension.*: memfit needs at least one whose first dimension counts samples"
    ):
        batches.size(batch)


@given(total=st.integers(1, 200), parts=st.integers(1, 200))
def test_micro_batches_differ_by_one_at_most_and_lose_no_sample(total: int, parts: int) -> None:
    parts = min(parts, total)
    sizes = batches.micro_batch_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1
    assert sizes[0] >= 1


def test_parts_are_views_of_the_batch_in_order() -> None:
    x, y = torch.arange(14.0).view(7, 2), torch.arange(7)
    parts = batches.split({"x": x, "y": y, "w": torch.ones(3), "s": torch.tensor(2.0), "n": 5}, [3, 2, 2])
    assert torch.equal(torch.cat([p["x"] for p in parts]), x)
    assert torch.equal(torch.cat([p["y"] for p in parts]), y)
    assert {p["x"].untyped_storage().data_ptr() for p in parts} == {x.untyped_storage().data_ptr()}
    # What has not the batch's length in front goes whole into every part.
    assert all(len(p["w"]) == 3 and p["s"].dim() == 0 and p["n"] == 5 for p in parts)


def named(count: int) -> dict[str, Any]:
    """With what a loader hands over beside tensors: texts (torch's own collation makes a tuple of them), numbers, a size."""
    names = [f"{i}.png" for i in range(count)]
    return {
        "x": torch.arange(float(count)),
        "names": names,
        "texts": tuple(names),
        "ids": list(range(count)),
        "size": (2, 2),
    }


def test_lists_of_values_that_are_as_long_as_the_batch_go_with_its_samples() -> None:
    batch = named(5)
    one, two = batches.split(batch, [2, 3])
    assert (one["names"], two["texts"], two["ids"]) == (["0.png", "1.png"], ("2.png", "3.png", "4.png"), [2, 3, 4])
    assert one["size"] == two["size"] == (2, 2)
    assert batches.repeated(one, 3)["names"] == ["0.png", "1.png", "0.png"]
    some = batches.rows(batch, [4, 0])
    assert (some["x"].tolist(), some["ids"], some["size"]) == ([4.0, 0.0], [4, 0], (2, 2))
    # A last batch with fewer of them is no other structure.
    assert batches.fits_within(batches.signature(named(3)), batches.signature(batch))
    assert not batches.fits_within(batches.signature({**named(3), "names": "0.png"}), batches.signature(batch))


def test_a_step_hands_each_micro_batch_the_names_of_its_samples() -> None:
    seen: list[tuple[int, list[str]]] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append((len(batch["x"]), batch["names"]))
        out: Tensor = model(batch["x"][:, None])
        return out.square().mean()

    engine = memfit.fit(nn.Linear(1, 1), named(6), loss_fn, "1GiB", small.adamw, fixed={"micro_batches": 2})
    seen.clear()
    engine.step(named(6))
    engine.step(named(4))
    assert seen == [
        (3, ["0.png", "1.png", "2.png"]),
        (3, ["3.png", "4.png", "5.png"]),
        (2, ["0.png", "1.png"]),
        (2, ["2.png", "3.png"]),
    ]


def test_one_part_is_the_batch_itself() -> None:
    batch = (torch.zeros(4),)
    assert batches.split(batch, [4])[0] is batch


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(BatchError, match=r"cannot split 4 samples into parts of \[3, 2\]"):
        batches.split(torch.zeros(4), [3, 2])


def test_an_encoding_is_split_by_its_keys() -> None:
    parts = batches.split(Encoding({"x": torch.arange(4)}), [2, 2])
    assert [p["x"].tolist() for p in parts] == [[0, 1], [2, 3]]


def test_what_is_made_of_an_encoding_is_one() -> None:
    """Losses ask transformers' for its entries as attributes."""
    batch = Encoding({"x": torch.arange(4)})
    leaves, structure = batches.flattened(batch)
    mapped = batches.map_tensors(lambda t: t + 1, batch)
    made = [*batches.split(batch, [2, 2]), batches.rows(batch, [0, 3]), mapped, batches.rebuilt(leaves, structure)]
    assert all(type(each) is Encoding for each in made)
    assert mapped["x"].tolist() == [1, 2, 3, 4]
    assert batch["x"].tolist() == [0, 1, 2, 3]


# -- shares ----------------------------------------------------------------------------------------------------------------


def labels() -> Tensor:
    """Two samples with 3 and 1 labels; the first column of the second is ignored."""
    return torch.tensor([[1, 2, 3, -100], [-100, -100, -100, 4]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("samples", [0.5, 0.5]),
        ("sum", [1.0, 1.0]),
        ("tokens:labels", [0.75, 0.25]),
        ("next_tokens:labels", [2 / 3, 1 / 3]),
        ("filled:mask", [0.8, 0.2]),
    ],
)
def test_shares_count_what_the_weighting_names(how: str, expected: list[float]) -> None:
    batch = {"labels": labels(), "mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1]])}
    assert batches.shares(batches.split(batch, [1, 1]), how) == pytest.approx(expected)


def test_nothing_counted_has_no_shares() -> None:
    assert batches.shares([{"labels": torch.full((1, 3), -100)}], "tokens:labels") is None


def test_a_weighting_by_what_the_batch_lacks_is_refused() -> None:
    with pytest.raises(BatchError, match="weighted by tokens:labels, but the batch has no 'labels'"):
        batches.shares([{"x": torch.zeros(1, 3)}], "tokens:labels")


def test_the_more_particular_weightings_come_first() -> None:
    batch = {"ids": torch.ones(2, 4, dtype=torch.long), "labels": labels(), "x": torch.zeros(2, 3)}
    assert batches.weightings(batch) == ["tokens:labels", "next_tokens:labels", "samples", "sum", "filled:ids"]


def test_labels_in_a_tuple_are_found_by_position() -> None:
    assert batches.weightings((torch.zeros(2, 4), labels()))[0] == "tokens:1"


# -- signatures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(4, 3), "tensor float32[4, 3]"),
        ((torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64)), "0 float32[4], 1 int64[4, 1]"),
        (
            {"ids": torch.zeros(4, 3, dtype=torch.int64), "n": 3, "s": torch.tensor(1.0)},
            "ids int64[4, 3], n int, s float32[]",
        ),
        (Encoding({"x": torch.zeros(2, 2)}), "x float32[2, 2]"),
    ],
)
def test_a_signature_reads_like_the_batch_and_back(batch: Any, text: str) -> None:
    assert batches.signature(batch) == text
    parsed = batches.parse_signature(text)
    assert [shape for _, _, shape in parsed if shape is not None] == [tuple(t.shape) for t in batches.leaves(batch)]
    assert batches.fits_within(text, text)


def x_y(rows: int, columns: int, **more: Any) -> str:
    return batches.signature({"x": torch.zeros(rows, columns), "y": torch.zeros(rows, dtype=torch.int64), **more})


@pytest.mark.parametrize(
    ("have", "fits"),
    [
        (x_y(4, 3), True),
        (x_y(3, 3), True),
        (x_y(4, 1), True),
        (x_y(5, 3), False),
        (x_y(4, 4), False),
        (x_y(4, 3, z=torch.zeros(1)), False),
        (x_y(4, 3, z=1), False),
        (batches.signature({"x": torch.zeros(4, 3)}), False),
        (batches.signature({"x": torch.zeros(4, 3), "y": torch.zeros(4)}), False),
        (batches.signature({"x": torch.zeros(4, 3), "z": torch.zeros(4, dtype=torch.int64)}), False),
        (batches.signature({"x": torch.zeros(4, 3, 1), "y": torch.zeros(4, dtype=torch.int64)}), False),
        (batches.signature({"x": torch.zeros(4, 3), "y": 3}), False),
        (batches.signature((torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))), False),
    ],
)
def test_a_batch_fits_when_nothing_in_it_is_larger_or_other(have: str, fits: bool) -> None:  # noqa: FBT001
    assert batches.fits_within(have, x_y(4, 3)) is fits


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda n: {"a": {"b": torch.zeros(n, 3)}, "c": torch.zeros(n)},
        lambda n: (torch.zeros(n), (torch.zeros(n, 3), torch.zeros(n))),
        lambda n: {"a": [torch.zeros(n, 3)]},
    ],
    ids=["dict in dict", "tuple in tuple", "list in dict"],
)
def test_nested_batches_are_compared_like_flat_ones(batch_of: Any) -> None:
    planned = batches.signature(batch_of(4))
    assert batches.fits_within(batches.signature(batch_of(3)), planned)
    assert not batches.fits_within(batches.signature(batch_of(5)), planned)


# -- the loss --------------------------------------------------------------------------------------------------------------


class Answers(nn.Module):
    """Gives what it is told to give, a function of its one parameter."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        total = (x * self.weight).sum() if y is None else (x * y * self.weight).sum()
        return self.answer(total)


@pytest.mark.parametrize(
    "answer", [lambda t: t, lambda t: {"loss": t}, lambda t: SimpleNamespace(loss=t)], ids=["tensor", "dict", "object"]
)
@pytest.mark.parametrize(
    ("batch", "value"),
    [
        (torch.ones(3), 3.0),
        ((torch.ones(3), 2 * torch.ones(3)), 6.0),
        ({"x": torch.ones(3), "y": 3 * torch.ones(3)}, 9.0),
        (Encoding({"x": torch.ones(3)}), 3.0),
    ],
)
def test_a_model_that_makes_its_own_loss_is_called_as_its_batch_says(answer: Any, batch: Any, value: float) -> None:
    assert batches.loss_of(Answers(answer), batch, None).item() == value


def test_a_loss_function_is_given_the_model_and_the_batch() -> None:
    model, batch = Answers(None), torch.ones(2)
    assert batches.loss_of(model, batch, lambda m, b: m.weight * b.sum()).item() == 2.0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda t: t.expand(2), r"a tensor of shape \(2,\)"),
        (lambda _: None, "NoneType"),
        (lambda t: {"logits": t}, "NoneType"),
        (lambda t: t.item(), "NoneType"),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_what_is_no_scalar_is_refused_and_named(answer: Any, found: str) -> None:
    with pytest.raises(InputError, match=rf"model\(\*\*sample\)\.loss gave {found}; memfit needs one scalar tensor"):
        batches.loss_of(Answers(answer), torch.ones(2), None)
    with pytest.raises(InputError, match=r"loss_fn\(model, batch\) gave "):
        batches.loss_of(Answers(answer), torch.ones(2), lambda m, b: m(b) if not isinstance(m(b), float) else None)  # type: ignore[arg-type, return-value]


def test_a_loss_that_trains_nothing_is_refused() -> None:
    model = Answers(lambda t: t.detach())
    with pytest.raises(InputError, match="does not depend on any trainable parameter"):
        batches.loss_of(model, torch.ones(2), None)


def test_of_many_entries_a_refusal_names_those_that_differ() -> None:
    planned = {"graphs": [torch.zeros(5, 2) for _ in range(40)], "y": torch.zeros(40)}
    larger = {**planned, "graphs": [torch.zeros(6 if n == 7 else 5, 2) for n in range(40)]}
    told = str(batches.larger_than_planned(batches.signature(larger), batches.signature(planned)))
    assert "the batch is [graphs.7 float32[6, 2], and 40 more]" in told
    assert "batches up to [graphs.7 float32[5, 2], and 40 more]" in told
    other = {**planned, "graphs": [*planned["graphs"][:-1], {"left": 3, "right": 4}]}
    told = str(batches.larger_than_planned(batches.signature(other), batches.signature(planned)))
    assert "the batch is [graphs.39.left int, graphs.39.right int, and 40 more]" in told
    assert "another form, [graphs.39 float32[5, 2], and 40 more]" in told
