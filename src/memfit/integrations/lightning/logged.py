"""What `training_step` logs while it is followed: held back until it is over, and of a divided batch put together.

Logging copies, and a plan knows of no copies. Of the parts of a batch Lightning would keep the last one's values for the step, so each name is logged once, for
the whole: a value that is the loss adds up as the loss does, another number is a mean over samples, or what its `reduce_fx` says. A metric of torchmetrics has
seen every part by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

Number = torch.Tensor | float


@dataclass(frozen=True, slots=True)
class _Value:
    """One part's, of one name."""

    value: Number
    samples: int
    share: float | None  # of the part in the loss, where the value is the loss


_REDUCTIONS: Final[Mapping[str, Any]] = {"sum": sum, "max": max, "min": min}


class Calls:
    """Calls of `log` and `log_dict`, in order."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._values: dict[str, list[_Value]] = {}
        self._options: dict[str, dict[str, Any]] = {}

    def note(self, of: str, *args: Any, **named: Any) -> None:
        """One call; `of` names the method."""
        self._calls.append((of, args, named))

    def end_part(self, module: Any, loss: torch.Tensor, samples: int, share: float) -> None:
        """A part of a batch has run: its numbers wait for those of the others, and hold none of its graph.

        Args:
            module: whose methods were called.
            loss: of the part, detached.
            samples: in the part.
            share: of the part's loss in the batch's.
        """
        whole = []
        for of, args, named in self._calls:
            given = inspect.signature(getattr(type(module), of)).bind(module, *args, **named).arguments
            given = {key: value for key, value in given.items() if key not in {"self", "kwargs"}}
            entries = given.pop("dictionary") if of == "log_dict" else {given.pop("name"): given.pop("value")}
            if type(entries) is not dict or not all(isinstance(value, Number) for value in entries.values()):
                whole.append((of, args, named))  # metrics: the last call tells of all parts
                continue
            for name, value in entries.items():
                # A copy: some kernels (of the squared error) return a number in the storage of all elements, which would be held beside the next part.
                number = value.detach().clone() if isinstance(value, torch.Tensor) else value
                told = _Value(number, samples, share if float(number) == float(loss) else None)
                self._values.setdefault(name, []).append(told)
                self._options[name] = given
        self._calls = whole

    def log(self, module: Any) -> None:
        """Make the calls."""
        for name, values in self._values.items():
            options = self._options[name]
            if options.get("batch_size") is not None:
                options = {**options, "batch_size": sum(each.samples for each in values)}
            module.log(name, _together(values, options.get("reduce_fx", "mean")), **options)
        for of, args, named in self._calls:
            getattr(module, of)(*args, **named)


def _together(values: list[_Value], reduction: Any) -> Number:
    how = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if how in _REDUCTIONS:
        found: Number = _REDUCTIONS[how](each.value for each in values)
        return found
    if all(each.share is not None for each in values):
        return sum(each.value * (each.share or 0.0) for each in values)
    samples = sum(each.samples for each in values)
    return sum(each.value * (each.samples / samples) for each in values)


@contextmanager
def unlogged(module: Any, calls: Calls | None = None) -> Iterator[None]:
    """What `training_step` logs inside is noted in `calls`, or let go."""
    names = ("log", "log_dict")
    note = calls.note if calls is not None else _let_go
    for name in names:
        vars(module)[name] = functools.partial(note, name)
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)


def _let_go(*_: Any, **__: Any) -> None:
    pass
