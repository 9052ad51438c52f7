"""Whether all ranks compute the same loss: each runs its own model and loss function, and with others on some rank a mixture would be trained."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit import dispatch
from memfit.errors import InputError

_SIZE: Final = re.compile(r"SymInt\S* (\w+)")  # an argument that is a size, or several, and differs with the batch
# What is told of arguments: no devices or generators, which are each rank's own.
_PLAIN: Final = (bool, int, float, complex, str, torch.dtype)


class FirstLoss:
    """Notes what the first loss that it is called for is computed from, and only calls for others.

    That is told by operations and by what their results are used for: what does not reach the loss (an accuracy, a line of a log) is left out, as are views,
    sizes, and where parameters come from. So is what autograd does, and no tensor is held.

    Args:
        given: tensors that forward reads and nothing in it computes, as parameters that are gathered.

    Attributes:
        digest: of the operations, once there was a loss; "" until then.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self._given = {dispatch.storage_key(tensor) for tensor in given if dispatch.has_storage(tensor)}
        self.digest = ""

    def __call__(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `loss` gives."""
        if self.digest:
            return loss()
        with _Operations(self._given) as operations:
            found = loss()
        self.digest = operations.behind(found)
        return found


def check_same_loss(digests: Mapping[int, str]) -> None:
    """Check that ranks have computed the loss of one batch by the same operations.

    Args:
        digests: of `FirstLoss`, by rank; the batch is that of the first of them.

    Raises:
        InputError: they have not.
    """
    first, digest = next(iter(digests.items()))
    other = next((rank for rank, each in digests.items() if each != digest), None)
    if other is not None:
        raise InputError(
            f"rank {other} computes the loss of rank {first}'s sample by other operations than rank {first} does, and a mixture of both would be trained: have "
            "all ranks run the same code, with the same model and the same loss function"
        )


class _Operations(dispatch.DispatchMode):
    """Operations by number, each with those that wrote what it reads."""

    def __init__(self, given: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self._told: list[str] = []
        self._read: list[set[int]] = []
        # By storage: the last operation that wrote it. A reference that keeps no bytes keeps the identity from being another storage's.
        self._writers: dict[int, tuple[int, StorageWeakRef]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if dispatch.is_operation(func):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read = [t for t in dispatch.tensors_in([args, kwargs]) if dispatch.has_storage(t)]
        keys = set(map(dispatch.storage_key, read))
        written = [t for t in dispatch.written(func, args, kwargs) if dispatch.has_storage(t)]
        fresh = [t for t in dispatch.tensors_in(result) if dispatch.has_storage(t)]
        written += [t for t in fresh if dispatch.storage_key(t) not in keys]
        if not written:
            return
        number = len(self._told)
        self._told.append(" ".join([str(func), *_numbers(func, args, kwargs), *map(_layout, read)]))
        self._read.append({self._writers[key][0] for key in keys if key in self._writers})
        for tensor in written:
            key = dispatch.storage_key(tensor)
            if key not in self._given:
                self._writers[key] = number, StorageWeakRef(tensor.untyped_storage())

    def behind(self, result: torch.Tensor) -> str:
        """A digest of what a result is computed from."""
        found = set[int]()
        last = self._writers.get(dispatch.storage_key(result)) if dispatch.has_storage(result) else None
        waiting = [] if last is None else [last[0]]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._read[number]
        order = {number: place for place, number in enumerate(sorted(found))}
        lines = (f"{self._told[n]} {sorted(order[r] for r in self._read[n])}" for n in order)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@cache
def _arguments(func: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names of an operation's arguments that are sizes, and of all in order."""
    schema = func._schema
    return frozenset(_SIZE.findall(str(schema).partition("->")[0])), tuple(each.name for each in schema.arguments)


def _numbers(func: Any, args: Any, kwargs: Any) -> list[str]:
    """What is told of the arguments: floats to five digits, as they may come from values that differ by rounding."""
    sizes, names = _arguments(func)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return [
        f"{name}={value:.5g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in sorted(named.items())
        if name not in sizes
        and all(isinstance(each, _PLAIN) for each in (value if isinstance(value, (list, tuple)) else [value]))
    ]


def _layout(tensor: torch.Tensor) -> str:
    """Type and order of the dimensions: of a product, whether a factor is transposed."""
    strides = tensor.stride()
    return f"{tensor.dtype}{sorted(range(tensor.ndim), key=lambda dim: -strides[dim])}"
