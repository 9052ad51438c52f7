"""Draws at the ends of their range: every number that Python code may decide by is as small, or as large, as it can be.

A model that leaves each block out with a small probability runs all of them in few draws, and hardly ever in one of a few seeds. With every such number at
the top of its range it leaves none out, with every one at the bottom all of them; what other draws run lies between.

Of torch's generator, tensors of one element are set: larger ones (dropout's masks) decide no path by themselves. Python's generator and numpy's are Mersenne
Twisters: a word of their state is *tempered* into the word that they give out (Matsumoto and Nishimura, https://doi.org/10.1145/272991.272995), and tempering
can be undone, so a state can be written down that gives one word 600 times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.step.process_generators import outside_torch_kept

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten
WORDS: Final = 624  # of a state
# Of these the last are ordinary. Python draws until it likes what it gets (`random.sample` wants numbers that it does not have yet); of a state that gives one
# word for ever it would never have enough. What is drawn later than the others is no more at an end.
ORDINARY_WORDS: Final = 24
_TO_0_TO_1: Final = frozenset({aten.rand.default, aten.rand_like.default, aten.rand.generator})
_INTEGERS: Final = frozenset({aten.randint.default, aten.randint.low})
_BERNOULLI: Final = frozenset({aten.bernoulli.default, aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.bernoulli.p})


class End(Enum):
    """An end of the range that numbers are drawn from, as a word of 32 bits."""

    LOWEST = 0
    HIGHEST = 0xFFFFFFFF


_present: End | None = None
_single = 0  # random numbers drawn one by one while something was captured


@contextmanager
def drawing(end: End) -> Iterator[None]:
    """What is captured inside draws at this end; Python's and numpy's generators are left as they were."""
    global _present  # noqa: PLW0603 - a state of the process, as the generators are
    before, _present = _present, end
    try:
        with outside_torch_kept():
            words = _words(end)
            random.setstate((3, (*words, 0), None))
            np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))  # noqa: NPY002 - models draw from the global one
            yield
    finally:
        _present = before


def at_the_end(func: OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """The result of an operation, and where it is one random number and `drawing` is on, that number at the end of its range; written in place."""
    global _single  # noqa: PLW0603 - as above
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return result
    if type(result) is not torch.Tensor or result.numel() != 1:
        return result
    _single += 1
    if _present is None:
        return result
    if func in _INTEGERS:
        least, above = (0, args[0]) if func is aten.randint.default else args[:2]
        with _disable_current_modes():
            return result.fill_(least if _present is End.LOWEST else above - 1)
    if not result.is_floating_point():
        return result
    low, high = 0.0, 1.0
    if func is aten.uniform_.default:
        bounds = [*args[1:], *(0.0, 1.0)[len(args) - 1 :]]
        low, high = float(bounds[0]), float(bounds[1])
    elif func not in _TO_0_TO_1 and func not in _BERNOULLI:
        return result
    value = low if _present is End.LOWEST else high
    with torch.no_grad(), _disable_current_modes():
        result.fill_(value)
        if _present is End.HIGHEST and func not in _BERNOULLI:
            torch.nextafter(result, torch.full_like(result, low), out=result)  # the top of the range is not in it
    return result


def drawn_one_by_one() -> int:
    """How many tensors of one element captures have drawn so far: Python code may decide by them."""
    return _single


def _words(end: End) -> list[int]:
    """Of a state."""
    ordinary = random.Random(0).getstate()[1][:ORDINARY_WORDS]
    return [_untempered(end.value)] * (WORDS - ORDINARY_WORDS) + [int(word) for word in ordinary]


def _untempered(word: int) -> int:
    """The word of a state that is tempered into this one."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(5):
        found = word ^ ((found << 7) & 0x9D2C5680)
    word = found & 0xFFFFFFFF
    found = word
    for _ in range(3):
        found = word ^ (found >> 11)
    return found & 0xFFFFFFFF
