"""Indices that a GPU's kernel would assert on are refused before it runs, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit.capture import index_bounds
from memfit.capture.index_bounds import _InBounds, indices_checked
from memfit.dispatch import DispatchMode

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "embedding": lambda i: functional.embedding(i, torch.zeros(5, 2)),
    "bag": lambda i: functional.embedding_bag(i, torch.zeros(5, 2), torch.tensor([0])),
    "brackets": lambda i: torch.zeros(3, 5)[:, i],
    "brackets after a mask": lambda i: torch.zeros(2, 3, 5)[torch.ones(2, 3, dtype=torch.bool).nonzero()[0], 0, i[:1]],
    "written in brackets": lambda i: torch.zeros(5).index_put((i,), torch.ones(len(i))),
    "select": lambda i: torch.zeros(3, 5).index_select(1, i),
    "add": lambda i: torch.zeros(5).index_add(0, i, torch.ones(len(i))),
    "gather": lambda i: torch.zeros(5).gather(0, i),
    "scatter": lambda i: torch.zeros(5).scatter(0, i, torch.ones(len(i))),
    "take": lambda i: torch.zeros(5).take(i),
    "classes": lambda i: functional.cross_entropy(torch.zeros(len(i), 5), i),
    "classes of pixels": lambda i: functional.cross_entropy(torch.zeros(1, 5, 1, len(i)), i[None, None]),
}


@pytest.fixture(autouse=True)
def cpus_assert(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(index_bounds, "ASSERTING", {"cpu"})
        yield


@pytest.mark.parametrize("name", OPERATIONS)
@given(indices=st.lists(st.integers(-7, 7), min_size=1, max_size=4))
def test_what_is_refused_is_what_torch_refuses_on_a_cpu(name: str, indices: list[int]) -> None:
    index = torch.tensor(indices)

    def refused() -> bool:
        try:
            OPERATIONS[name](index)
        except (IndexError, RuntimeError):
            return True
        return False

    alone = refused()
    with _InBounds():
        assert refused() == alone


class Kernels(DispatchMode):
    """Entered first, so that it hands to the kernels what all others have handed on.

    Attributes:
        raised: operations whose kernels found an index out of range.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.raised: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except IndexError:
            self.raised.append(str(func))
            raise


class Contrasted(nn.Module):
    """Negatives are taken from the whole batch by their place in it, as wav2vec 2.0 does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)

    def forward(self, x: Tensor, negatives: Tensor) -> Tensor:
        made = self.body(x)
        far: Tensor = made[negatives]
        return (made - far).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_batch_of_indices_into_itself_never_reaches_a_kernel_out_of_range(micro_batches: int) -> None:
    sample = (small.rows(16)[0], torch.arange(15, -1, -1))
    with Kernels() as kernels, suppress(memfit.SplitError):
        memfit.plan(
            Contrasted(), sample, lambda m, b: m(*b), 1 << 50, small.adamw, fixed={"micro_batches": micro_batches}
        )
    assert not kernels.raised


class Conditioned(nn.Module):
    """Looks tags up in a table, in which a masked one (-100) has no place."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.body = nn.Embedding(10, small.WIDTH), small.chain(2)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        made: Tensor = self.body(x + self.tags(tags).mean(1))
        return made.square().mean()


def test_what_is_taken_for_labels_never_reaches_a_table_masked() -> None:
    sample = (small.rows(16)[0], torch.randint(10, (16, 6)))
    with Kernels() as kernels:
        plan = memfit.plan(Conditioned(), sample, lambda m, b: m(*b), 1 << 50, small.adamw, fixed={"micro_batches": 2})
    assert plan.choices.micro_batches == 2
    assert not kernels.raised


@pytest.mark.parametrize("form", ["padded", "one after the other"])
@given(targets=st.lists(st.integers(-2, 6), min_size=6, max_size=6), lengths=st.tuples(*[st.integers(0, 3)] * 2))
def test_targets_of_ctc_are_looked_at_on_every_device(form: str, targets: list[int], lengths: tuple[int, int]) -> None:
    rows = torch.tensor(targets).view(2, 3)
    counted = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    given_as = rows if form == "padded" else counted
    right = bool(((counted >= 0) & (counted < 5)).all())
    with (
        indices_checked(torch.device("cpu")),
        nullcontext() if right else pytest.raises(IndexError, match="out of bounds for a dimension with size 5"),
    ):
        functional.ctc_loss(torch.zeros(8, 2, 5).log_softmax(-1), given_as, torch.tensor([8, 8]), torch.tensor(lengths))


class Spoken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        frames = self.body(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(frames, targets, torch.full_like(lengths, x.shape[1]), lengths)


def test_targets_of_ctc_are_no_labels_to_be_masked() -> None:
    sample = (torch.randn(8, 20, small.WIDTH), torch.randint(1, small.WIDTH, (8, 6)), torch.full((8,), 6))
    with Kernels() as kernels:
        plan = memfit.plan(Spoken(), sample, lambda m, b: m(*b), 1 << 50, small.adamw, fixed={"micro_batches": 2})
    assert plan.choices.micro_batches == 2
    assert not kernels.raised
