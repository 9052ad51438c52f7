"""Scales, ticks, labels."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.views.axes import Scale, below, byte_ticks, number_ticks, spread, widened

GIB = 2**30


def test_byte_ticks_are_round_in_binary() -> None:
    assert [text for _, text in byte_ticks(0, 8.5 * GIB)] == ["0", "2 GiB", "4 GiB", "6 GiB", "8 GiB"]
    assert [text for _, text in byte_ticks(0, 1.3 * GIB)] == [
        "0",
        "0.25 GiB",
        "0.5 GiB",
        "0.75 GiB",
        "1 GiB",
        "1.25 GiB",
    ]
    assert [text for _, text in byte_ticks(0, 3)] == ["0", "1 B", "2 B", "3 B"]


def test_number_ticks_are_round_in_decimal() -> None:
    assert [text for _, text in number_ticks(0.96, 1.31)] == ["1.0", "1.1", "1.2", "1.3"]
    assert [text for _, text in number_ticks(1, 12_500)] == ["5,000", "10,000"]
    assert [text for _, text in number_ticks(1, 3, least=1)] == ["1", "2", "3"]


@given(st.floats(0, 1e15), st.floats(1e-3, 1e15), st.integers(2, 10))
def test_ticks_lie_inside_and_are_few(low: float, size: float, most: int) -> None:
    low, high = widened(low, low + size)
    slack = 1e-6 * (high - low)

    for ticks in (byte_ticks(low, high, most=most), number_ticks(low, high, most=most)):
        assert len(ticks) <= most + 1
        assert all(low - slack <= value <= high + slack for value, _ in ticks)


def test_a_scale_keeps_what_is_beyond_it_at_its_edge() -> None:
    scale = Scale(0, 10, 100, 0)

    assert [scale(v) for v in (-5, 0, 5, 10, 50)] == [100, 100, 50, 0, 0]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 10)), max_size=8))
def test_spread_labels_do_not_overlap_and_stay_in_order(labels: list[tuple[float, float]]) -> None:
    labels = sorted(labels)
    sizes = [size for _, size in labels]

    centres = spread([at for at, _ in labels], sizes, 0, 100)

    for i in range(1, len(labels)):
        assert centres[i] - centres[i - 1] >= (sizes[i] + sizes[i - 1]) / 2 - 1e-6
    assert all(size / 2 - 1e-6 <= at <= 100 - size / 2 + 1e-6 for at, size in zip(centres, sizes, strict=True))


def test_labels_with_room_stay_where_they_are_wanted() -> None:
    assert spread([10, 50, 90], [10, 10, 10], 0, 100) == [10, 50, 90]
    assert spread([50, 50], [10, 10], 0, 100) == [45, 55]


def test_a_line_is_cut_where_it_leaves_the_picture() -> None:
    assert below([(0, 0), (1, 10), (2, 0)], 5) == [((0, 0), (0.5, 5)), ((1.5, 5), (2, 0))]
    assert below([(0, 9), (1, 10)], 5) == []
    assert below([(0, 1), (1, 2)], 5) == [((0, 1), (1, 2))]
    assert below([], 5) == []


@pytest.mark.parametrize("low", [0.0, 1.0, -3.0])
def test_a_range_of_one_value_is_widened(low: float) -> None:
    bottom, top = widened(low, low)

    assert bottom < low < top
    assert math.isfinite(bottom)
