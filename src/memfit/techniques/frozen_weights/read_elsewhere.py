"""Which layers' weights are read by the code of a module that holds them, past the layer.

A Mamba multiplies by `self.dt_proj.weight` itself, a T5 casts to `self.wo.weight.dtype`. In 4 bits there would be other numbers, so it stays as it is.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_HARMLESS = ("device", "is_meta")  # of a weight, these are the same in 4 bits


def weight_read_elsewhere(model: nn.Module, path: str) -> bool:
    """Whether a module that holds the layer at this path reads its weight."""
    module = model
    for name in path.split("."):
        kind: Any = type(module)
        if name in _weights_read(kind):
            return True
        module = module.get_submodule(name)
    return False


@cache
def _weights_read(kind: Any) -> frozenset[str]:
    """Names of the children whose weights the methods of a class read."""
    found: set[str] = set()
    for each in kind.__mro__:
        if each is nn.Module:
            break
        for name, value in vars(each).items():
            if name != "__init__":
                for code in _codes(value, set()):
                    found |= _read_by(code)
    return frozenset(found)


def _codes(value: Any, seen: set[int]) -> Iterator[CodeType]:
    """The code of a method, of what it wraps, and of the functions within."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, property):
        yield from _codes(value.fget, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _codes(value.__func__, seen)
    elif isinstance(value, FunctionType):
        yield from _codes(value.__code__, seen)
        for cell in value.__closure__ or ():
            try:
                yield from _codes(cell.cell_contents, seen)
            except ValueError:  # it is still empty
                continue
    elif isinstance(value, CodeType):
        yield value
        for inner in value.co_consts:
            yield from _codes(inner, seen)


def _read_by(code: CodeType) -> set[str]:
    """The x of every `.x.weight`."""
    steps = [*dis.get_instructions(code)]
    attributes = [step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None for step in steps] + [None, None]
    return {
        child
        for child, weight, of_it in zip(attributes, attributes[1:], attributes[2:], strict=False)
        if child and weight == "weight" and of_it not in _HARMLESS
    }
