"""Bytes and seconds as people write them, and as programs count them: "8GiB" <-> 8589934592.

One parser for every place that takes a size (Python, command line, YAML), so that all accept the same spellings and
refuse the same nonsense. A budget read wrongly by a unit is off by 7 % (GB for GiB) or by a thousand, and then a
promise about bytes is worth nothing; so nothing is guessed: "8G" could be either, and is refused.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Final, SupportsIndex

from memfit.errors import BudgetError

_BINARY_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_BYTES_OF: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtpe", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtpe", start=1)},
}
# Thirty digits are beyond any machine; on thousands of digits Python fails with an error of its own.
_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?P<unit>[a-z]*|%)", re.IGNORECASE)
_LARGEST_BYTES: Final = 2**63 - 1  # What torch counts bytes in.
# The unit in which sizes are written, as a power of 1024; None for each in its own.
_POWER: Final[ContextVar[int | None]] = ContextVar("power", default=None)
_ACCEPTED: Final = 'write "8GiB" or "512MiB" (binary), "8GB" (decimal), or a whole number of bytes'


def parse_bytes(text: str | SupportsIndex, *, total_bytes: int | None = None) -> int:
    """Read a number of bytes.

    Fractions of a byte are dropped, never rounded up: a budget is a limit.

    Args:
        text: "8GiB" (binary), "8GB" (decimal), "1.5 GiB", digits (bytes), or a whole number. Units in any case.
        total_bytes: what the device has in all; with it, a share such as "80%" is accepted too.

    Returns:
        The number of bytes, at least 1.

    Raises:
        BudgetError: it cannot be read, or is not positive.
    """
    accepted = _ACCEPTED + ('; or a share of the device such as "80%".' if total_bytes is not None else ".")
    num_bytes = _read_text(text, total_bytes, accepted) if isinstance(text, str) else _read_number(text, accepted)
    if num_bytes < 1:
        raise BudgetError(f"{text!r} is less than one byte: {accepted}")
    if num_bytes > _LARGEST_BYTES:
        raise BudgetError(f"{text!r} is more bytes than can be counted: {accepted}")
    return num_bytes


def _read_text(text: str, total_bytes: int | None, accepted: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None and text.strip().startswith("-") and _SIZE.fullmatch(text.strip()[1:].strip()):
        raise BudgetError(f"{text!r} is not a number of bytes, as it is negative: {accepted}")
    if match is None:
        raise BudgetError(f"{text!r} is not a number of bytes: {accepted}")
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if unit == "%":
        return _share(text, number, total_bytes, accepted)
    if unit not in _BYTES_OF:
        either = (
            f" ({match['number']}{unit.upper()}iB or {match['number']}{unit.upper()}B?)" if unit in "kmgtpe" else ""
        )
        raise BudgetError(f"{text!r} has a unit memfit does not read{either}: {accepted}")
    if unit in {"", "b"} and number.denominator != 1:
        raise BudgetError(f"{text!r} is not a whole number of bytes: {accepted}")
    return math.floor(number * _BYTES_OF[unit])


def _share(text: str, percent: Fraction, total_bytes: int | None, accepted: str) -> int:
    if total_bytes is None:
        raise BudgetError(f"{text!r} is a share, but of what is not known here: {accepted}")
    if percent > 100:
        raise BudgetError(f"{text!r} is more than the device has: {accepted}")
    return math.floor(total_bytes * percent / 100)


def _read_number(number: SupportsIndex, accepted: str) -> int:
    # True is an int in Python, but never a size; a float may be inf, nan or 1.5, and its author meant some unit.
    if isinstance(number, bool):
        raise BudgetError(f"{number!r} is not a number of bytes: {accepted}")
    try:
        return operator.index(number)
    except TypeError:
        hint = ""
        if isinstance(number, float) and 0 < number <= 1 and "%" in accepted:
            hint = f' ("{100 * number:g}%" for this share)'
        elif isinstance(number, float) and 1 < number < 4096:
            hint = f' ("{number:g}GiB" for gibibytes)'
        elif isinstance(number, float) and number.is_integer():
            raise BudgetError(
                f"{number!r} is a float: write int(...) around it, or {int(number)}: {accepted}"
            ) from None
        raise BudgetError(f"{number!r} is not a whole number of bytes{hint}: {accepted}") from None


@contextmanager
def one_unit(num_bytes: int) -> Iterator[None]:
    """While it is open, `format_bytes` writes sizes in the unit of this one, as far as they can be told in it: for a page whose numbers are compared."""
    token = _POWER.set(_power_of(num_bytes))
    try:
        yield
    finally:
        _POWER.reset(token)


def _power_of(num_bytes: int) -> int:
    return next(
        p for p in range(len(_BINARY_UNITS)) if abs(num_bytes) < 1023.5 * 1024**p or p + 1 == len(_BINARY_UNITS)
    )


def format_bytes(num_bytes: int) -> str:
    """Write bytes in binary units, three or four significant digits: "1.50 GiB", "1023 B", "-12.0 MiB".

    Inside `one_unit` it is that unit, with three decimals at most, for all that is a hundredth of it or more.
    """
    fixed = _POWER.get()
    if fixed and abs(num_bytes) >= 0.01 * 1024**fixed:
        size = abs(num_bytes) / 1024**fixed
        number = f"{size:,.0f}" if size >= 9999.5 else f"{size:.3f}" if size < 0.9995 else _three_digits(size)
        return f"{'-' if num_bytes < 0 else ''}{number} {_BINARY_UNITS[fixed]}"
    size, power = float(abs(num_bytes)), 0
    # 1023.5 and above would print as 1024: the next unit's 1.00.
    while power + 1 < len(_BINARY_UNITS) and size >= (1024 if power == 0 else 1023.5):
        size /= 1024
        power += 1
    sign = "-" if num_bytes < 0 else ""
    number = f"{size:.0f}" if power == 0 else _three_digits(size)
    return f"{sign}{number} {_BINARY_UNITS[power]}"


def format_budget(num_bytes: int) -> str:
    """A size for `parse_bytes` of at least so many bytes, in the largest binary unit that adds at most a 64th: "52428800B", "512MiB"."""
    for unit in ("GiB", "MiB"):
        number = -(-num_bytes // _BYTES_OF[unit.lower()])
        if number >= 64:
            return f"{number}{unit}"
    return f"{num_bytes}B"


def format_seconds(seconds: float) -> str:
    """Write a time, three significant digits: "12.3 ms", "1.50 s"; from two minutes on "2 min 05 s", "1 h 03 min"."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    sign, size = ("-" if seconds < 0 else ""), abs(seconds)
    if size == 0:
        return "0 s"
    if size < 119.5:
        for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
            if size * scale >= 0.9995 and (unit == "s" or size * scale < 999.5):
                return f"{sign}{_three_digits(size * scale)} {unit}"
        return f"{sign}{size * 1e9:.3g} ns"
    minutes, rest = divmod(round(size), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(size / 60), 60)
    return f"{sign}{hours} h {minutes:02d} min"


def _three_digits(size: float) -> str:
    """1.50, 15.0, 150; the limits are where rounding would add a digit."""
    if size < 9.995:
        return f"{size:.2f}"
    if size < 99.95:
        return f"{size:.1f}"
    return f"{size:.0f}"
