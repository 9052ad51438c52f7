"""Sweeps: what the quick run takes of many seeds or combinations, and what is left for the night.

Seeds are one test per claim, which names the seed that failed and the command that repeats it alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch

OPTION = "--only-seed"


def each_seed(
    quick: int | Collection[int], full: int | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that takes `seed`: it becomes one test that runs once for each seed.

    Fixtures are made once for the whole sweep, and torch's generator is set anew for each seed.

    Args:
        quick: how many seeds, from 0 on, the quick run takes; or which.
        full: how many there are; what `quick` leaves out is a second test, marked slow, for the night. None: no more than `quick`.
    """

    def fold(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def folded(*, seeds: Collection[int], **arguments: Any) -> None:
            for seed in seeds:
                torch.manual_seed(0)
                try:
                    test(seed=seed, **arguments)
                except BaseException as error:
                    error.add_note(
                        f"With seed {seed} of {test.__name__}. To repeat it alone: pytest -k {test.__name__} {OPTION} {seed}"
                    )
                    raise

        signature = inspect.signature(test)
        replaced = [p.replace(name="seeds") if p.name == "seed" else p for p in signature.parameters.values()]
        folded.__signature__ = signature.replace(parameters=replaced)  # type: ignore[attr-defined]
        first = range(quick) if isinstance(quick, int) else quick
        marked: Callable[..., None] = pytest.mark.seeds(first, [n for n in range(full or 0) if n not in first])(folded)
        return marked

    return fold


def by_turns(*lists: Iterable[Any]) -> list[Any]:
    """All combinations for `pytest.mark.parametrize`, every second one for the night: the quick run has each value with half of the others."""
    numbered = [list(enumerate(values)) for values in lists]
    return [
        pytest.param(
            *(value for _, value in combination), marks=pytest.mark.slow if sum(n for n, _ in combination) % 2 else ()
        )
        for combination in itertools.product(*numbered)
    ]


def at_night(values: Iterable[Any], night: Collection[str]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which those with these names are for the night: others in the list stand for them in the quick run."""
    named = [(value, getattr(value, "name", str(value))) for value in values]
    unknown = set(night) - {name for _, name in named}
    assert not unknown, f"nothing is called {', '.join(sorted(unknown))}"
    return [pytest.param(value, id=name, marks=pytest.mark.slow if name in night else ()) for value, name in named]


def alternate(items: Iterable[pytest.Item]) -> None:
    """Of each test that is marked `alternate(third)`, mark all variants slow but one third (0, 1 or 2: which); those that are slow anyway do not count.

    Each three in a row begin one further than the three before, so that where two or three values take turns each is in every third. Tests that sweep over the
    same models take other thirds. Of two variants or one, one is left.
    """
    items = sorted(items, key=_place)  # they may have been shuffled
    counts = Counter(_test_of(item) for item in items if _alternates(item))
    variants: Counter[str] = Counter()
    night: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("alternate")
        if mark is None or not _alternates(item):
            continue
        test = _test_of(item)
        number = variants[test]
        if (number + number // 3) % min(3, counts[test]) != mark.args[0] % min(3, counts[test]):
            night.append(item)
        variants[test] += 1
    for item in night:
        item.add_marker(pytest.mark.slow)


def _place(item: pytest.Item) -> tuple[str, list[int]]:
    """A test, and which of its variants: the index of each parameter."""
    variant = getattr(item, "callspec", None)
    return _test_of(item), [] if variant is None else list(variant.indices.values())


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _alternates(item: pytest.Item) -> bool:
    return item.get_closest_marker("alternate") is not None and item.get_closest_marker("slow") is None


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a decorated test its seeds: the quick ones and the others, or the one that was asked for."""
    mark = metafunc.definition.get_closest_marker("seeds")
    if mark is None:
        return
    quick, others = mark.args
    only = metafunc.config.getoption(OPTION)
    if only is not None:
        sweeps = [pytest.param([only], id=f"seed {only}")]
    else:
        sweeps = [pytest.param(quick, id=f"{len(quick)} seeds")]
        if others:
            sweeps.append(pytest.param(others, id=f"{len(others)} more seeds", marks=pytest.mark.slow))
    metafunc.parametrize("seeds", sweeps)
