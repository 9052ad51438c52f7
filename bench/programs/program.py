"""What a training program is to this benchmark: a model of some package, a sample batch and a loss, all small and from random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import MagicMock

Build = Callable[[], tuple[Any, Any, Any]]
"""A model in train mode, a batch, and the loss (None for the model's own)."""

PROGRAMS: Final[list[Program]] = []


@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
        package: on the package index; `requirements.txt` has its version.
        name: what of the package is trained.
        build: makes it; the same one from the same seed.
        changing: whether its forward takes other paths or other sizes from step to step.
    """

    package: str
    name: str
    build: Build
    changing: bool = False


def program(package: str, name: str, *, changing: bool = False) -> Callable[[Build], Build]:
    """Add a function that builds a program to the list."""

    def add(build: Build) -> Build:
        PROGRAMS.append(Program(package, name, build, changing))
        return build

    return add


def seeded(number: int) -> None:
    """Seed every generator that programs draw from."""
    import numpy as np
    import torch

    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the generator that packages draw from


def own_loss(model: Any, batch: Any) -> Any:
    """Of a model whose forward returns the loss."""
    return model(*batch)


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let packages be imported that want torchvision for reading pictures, which is not done here: its wheel does not load beside a torch for the CPU."""
    names = [
        "torchvision",
        *(
            f"torchvision.{part}"
            for part in (
                "transforms",
                "transforms.functional",
                "transforms.v2",
                "utils",
                "models",
                "datasets",
                "io",
                "ops",
            )
        ),
    ]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: MagicMock() for name in names})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
