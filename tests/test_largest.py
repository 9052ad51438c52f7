"""The largest batch and length that fit are those at which a plan is found, and one more does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture.trace_source import TraceSource
from memfit.errors import BatchError, InfeasibleError, InputError
from memfit.largest import between, search_largest
from memfit.techniques.choices import BASELINE
from small import adamw, chain, rows, squared_error

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
WHOLE: dict[str, Any] = {"micro_batches": 1}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixed(self.embedding(tokens)).tanh())  # type: ignore[no-any-return]


def next_word(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_one_sample_more_than_the_largest_batch_does_not_fit() -> None:
    found = memfit.largest_batch(chain(2), rows(4), squared_error, "1MiB", adamw)
    fitting = memfit.plan(chain(2), rows(found.size), squared_error, "1MiB", adamw, fixed=WHOLE)
    assert fitting.prediction.peak_bytes <= found.needed_bytes <= 1 << 20
    with pytest.raises(InfeasibleError):
        memfit.plan(chain(2), rows(found.size + 1), squared_error, "1MiB", adamw, fixed=WHOLE)
    assert not found.limited
    limited = memfit.largest_batch(chain(2), rows(4), squared_error, "1MiB", adamw, most=3)
    assert (limited.size, limited.limited) == (3, True)


def test_one_position_more_than_the_largest_length_does_not_fit() -> None:
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    found = memfit.largest_length(Words(), tokens, next_word, "512KiB", adamw)
    longer = tokens.repeat(1, 1 + found.size // 16)
    made = memfit.plan(Words(), longer[:, : found.size], next_word, "512KiB", adamw, fixed=WHOLE)
    assert made.prediction.peak_bytes <= found.needed_bytes
    with pytest.raises(InfeasibleError):
        memfit.plan(Words(), longer[:, : found.size + 1], next_word, "512KiB", adamw, fixed=WHOLE)


def test_where_not_even_one_fits_the_size_is_nothing_and_the_bytes_say_what_one_needs() -> None:
    found = memfit.largest_batch(chain(2), rows(4), squared_error, "8KiB", adamw)
    assert found.size == 0
    assert found.needed_bytes > 8 << 10


def test_what_has_no_length_or_size_is_refused() -> None:
    with pytest.raises(BatchError, match="the batch has no one length along dimension 1"):
        memfit.largest_length(chain(1), rows(4), squared_error, "1MiB", adamw)
    with pytest.raises(InputError, match="most=0: a whole number of at least 1"):
        memfit.largest_batch(chain(1), rows(4), squared_error, "1MiB", adamw, most=0)


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3000), st.integers(1, 60), st.integers(1, 200))
def test_the_search_finds_the_last_size_that_fits(
    slope: int, square: int, capacity: int, start: int, most: int
) -> None:
    def needed(size: int) -> int:
        return 100 + slope * size + square * size * size // 7

    found = search_largest(needed, capacity, min(start, most), most)
    assert found.size == max((size for size in range(1, most + 1) if needed(size) <= capacity), default=0)


def test_bytes_that_jump_are_halved_in_on_and_not_crept_up_to() -> None:
    tried: list[int] = []

    def needed(size: int) -> int:
        tried.append(size)
        return size if size <= 3509 else 100_000 + size

    assert search_largest(needed, 9000, 32, 1 << 16).size == 3509
    assert len(tried) < 40


def test_the_step_of_a_size_between_two_is_the_one_captured_there() -> None:
    def trace(samples: int) -> Any:
        return TraceSource(chain(2), rows(samples), squared_error, adamw, device="rtx4090").trace_of(BASELINE)

    middle, there = between(trace(16), trace(64), (16, 64), 32), trace(32)
    assert [s.bytes for s in middle.storages] == [s.bytes for s in there.storages]
    assert [o.workspace_bytes for o in middle.operations] == [o.workspace_bytes for o in there.operations]
