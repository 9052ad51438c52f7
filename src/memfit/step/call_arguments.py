"""Arguments of a module's call, as far as the call can be made again from them: tensors and plain values, in tuples, lists and dictionaries.

Any other object may be changed by the call (a cache of keys and values that grows), so a call that is given one is not made a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final, TypeVar

import torch

_PLAIN: Final = (
    *(type(None), bool, int, float, complex, str, bytes, slice, type(...), Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
Kind = TypeVar("Kind")
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tensors_passed(passed: Any) -> list[torch.Tensor] | None:
    """The tensors among arguments, in order; None where there is something among them that no call can be made again from."""
    found: list[torch.Tensor] = []
    return found if all(_collected(each, found) for each in _leaves(passed)) else None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is torch's own kind of tensor: one of another class may do anything when it is touched, and one of `torch.func`'s stands for others."""
    own = type(tensor) in _TENSORS or type(tensor).__name__ == "FakeTensor"
    return own and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001 - torch has no public word for it


def copied(passed: Any, kind: type | tuple[type, ...], made: Callable[[Any], Any]) -> Any:
    """The same arguments in new containers, each object of a kind replaced by what a function makes of it."""
    if isinstance(passed, kind):
        return made(passed)
    if type(passed) in (tuple, list):
        return type(passed)(copied(each, kind, made) for each in passed)
    if type(passed) is dict:
        return {key: copied(value, kind, made) for key, value in passed.items()}
    return passed


def found(passed: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The objects of a kind among arguments."""
    return (leaf for leaf in _leaves(passed) if isinstance(leaf, kind))


def _leaves(passed: Any) -> Iterator[Any]:
    if type(passed) in (tuple, list):
        for each in passed:
            yield from _leaves(each)
    elif type(passed) is dict:
        for each in passed.values():
            yield from _leaves(each)
    else:
        yield passed


def _collected(leaf: Any, found: list[torch.Tensor]) -> bool:
    if isinstance(leaf, torch.Tensor):
        found.append(leaf)
        return is_plain(leaf)
    return isinstance(leaf, _PLAIN)
