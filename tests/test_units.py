"""Sizes are read exactly or refused with a sentence, and written so that a person can compare them."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import BudgetError
from memfit.units import format_bytes, format_seconds, one_unit, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("  16 kib ", 16 * 1024),
        ("2tb", 2 * 10**12),
        ("1PiB", 2**50),
        ("640B", 640),
        ("123456789", 123_456_789),
        (4096, 4096),
        (np.int64(4096), 4096),
    ],
)
def test_sizes_are_read_as_written(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


def test_a_decimal_fraction_is_read_exactly() -> None:
    """0.1 has no exact float; a budget must not move by a byte because of that."""
    assert parse_bytes("0.7GB") == 700_000_000


def test_a_fraction_of_a_byte_is_dropped() -> None:
    assert parse_bytes("1.0005KiB") == 1024


@pytest.mark.parametrize(("text", "num_bytes"), [("80%", 800), ("33.3 %", 333), ("100%", 1000)])
def test_a_share_is_of_the_whole_device(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, total_bytes=1000) == num_bytes


def test_a_share_of_nothing_known_is_refused() -> None:
    with pytest.raises(BudgetError, match="'80%' is a share, but of what is not known here"):
        parse_bytes("80%")


def test_more_than_the_whole_device_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"'101%' is more than the device has: write "):
        parse_bytes("101%", total_bytes=1024)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a number of bytes"),
        ("lots", "is not a number of bytes"),
        ("-1", "is not a number of bytes"),
        ("-8GiB", "is not a number of bytes"),
        ("inf", "is not a number of bytes"),
        ("nan", "is not a number of bytes"),
        ("1e9", "is not a number of bytes"),
        ("8 GiB 2", "is not a number of bytes"),
        ("9" * 5000, "is not a number of bytes"),
        ("٨GiB", "is not a number of bytes"),
        ("8G", "has a unit memfit does not read"),
        ("8 bananas", "has a unit memfit does not read"),
        ("1.5", "is not a whole number of bytes"),
        ("1.5B", "is not a whole number of bytes"),
        ("0", "is less than one byte"),
        ("0GiB", "is less than one byte"),
        ("0.0001KiB", "is less than one byte"),
        ("9" * 30 + "PiB", "is more bytes than can be counted"),
        (0, "is less than one byte"),
        (-5, "is less than one byte"),
        (2**63, "is more bytes than can be counted"),
        (True, "is not a number of bytes"),
        (1.5, "is not a whole number of bytes"),
        (1e9, "is a float: write int"),
        (math.inf, "is not a whole number of bytes"),
        (math.nan, "is not a whole number of bytes"),
        (None, "is not a whole number of bytes"),
    ],
)
def test_nonsense_is_refused_with_what_is_accepted(text: object, complaint: str) -> None:
    with pytest.raises(BudgetError, match=f'{complaint}.*: write "8GiB" or "512MiB"') as caught:
        parse_bytes(text)  # type: ignore[arg-type]

    assert str(caught.value).startswith(repr(text))


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(BudgetError):
        assert parse_bytes(text, total_bytes=2**40) >= 1


@given(st.integers(1, 2**63 - 1))
def test_a_plain_number_is_itself(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == parse_bytes(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10_235, "10.0 KiB"),
        (1_047_552, "1023 KiB"),
        (1_048_064, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (150 * 2**30, "150 GiB"),
        (-12 * 2**20, "-12.0 MiB"),
    ],
)
def test_bytes_are_written_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**60))
def test_what_is_written_reads_back_within_half_a_percent(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.0051)


@given(st.integers(1, 2**60), st.integers(1, 2**60))
def test_more_bytes_are_never_written_as_fewer(one: int, other: int) -> None:
    less, more = sorted((one, other))

    assert parse_bytes(format_bytes(less)) <= parse_bytes(format_bytes(more))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.2e-7, "320 ns"),
        (9.999e-7, "1.00 us"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (119.4, "119 s"),
        (119.5, "2 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3780, "1 h 03 min"),
        (-0.5, "-500 ms"),
        (math.inf, "inf s"),
    ],
)
def test_seconds_are_written_in_the_unit_a_person_would_use(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_sizes_of_one_page_are_in_one_unit_as_far_as_they_can_be_told_in_it() -> None:
    with one_unit(8 * 2**30):
        assert format_bytes(890 * 2**20) == "0.869 GiB"
        assert format_bytes(-890 * 2**20) == "-0.869 GiB"
        assert format_bytes(30 * 2**40) == "30,720 GiB"
        assert format_bytes(3 * 2**20) == "3.00 MiB"  # 0.00293 GiB says less
        with one_unit(2**20):
            assert format_bytes(2**30) == "1024 MiB"
    with one_unit(100):
        assert format_bytes(2**20) == "1.00 MiB"  # bytes are a unit for small numbers alone

    assert format_bytes(890 * 2**20) == "890 MiB"
