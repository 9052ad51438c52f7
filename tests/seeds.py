"""Sweeps over seeds: one test per claim, which names the seed that failed and the command that repeats it alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
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
        return pytest.mark.seeds(first, [seed for seed in range(full or 0) if seed not in first])(folded)

    return fold


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
