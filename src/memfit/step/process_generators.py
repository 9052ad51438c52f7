"""States of every generator that a model or a dataset may draw from: torch's, Python's and numpy's; taken and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def generators() -> dict[str, Any]:
    """States of the generators that a model or a dataset may draw from: torch's, Python's and numpy's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - users' datasets still draw from the global one
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Inverse of `generators`."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002 - as above


def outside_torch() -> tuple[Any, ...]:
    """States of Python's and numpy's global generators, to compare with and to set again."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - as above
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


@contextmanager
def outside_torch_kept() -> Iterator[None]:
    """Whatever is drawn inside from Python's and numpy's global generators, they go on as if nothing had been drawn."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002 - as above
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as above


def seed_alike() -> None:
    """From here on the generators draw the same numbers in every process that calls this."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - models draw from the global one


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on as if nothing had been drawn."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)
