"""Tensors that another stage has: they know shape, type and device, and hold no values.

A stage runs the user's whole forward, in which the parts of earlier stages are not run. What the forward does with their results between parts (a sum, a view)
is done on these, which costs no memory and no computing. A meta tensor alone would not do: it cannot be added to a tensor of the device, and models ask for
`x.device` to make masks and positions, which are needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memfit import batches
from memfit.batches import Batch
from memfit.errors import EngineError
from memfit.step.part_calls import TensorMeta

KNOWN: Final = 1024  # calls whose results are remembered
_PLAIN: Final = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)


_TENSOR: Any = torch.Tensor
# What a meta tensor knows without computing; forwards ask it for each micro-batch.
_KNOWS: Final = frozenset(
    (
        *(described.__get__ for described in (_TENSOR.shape, _TENSOR.dtype, _TENSOR.ndim)),
        *(_TENSOR.size, _TENSOR.stride, _TENSOR.dim, _TENSOR.numel),
    )
)


class _Elsewhere:
    """Stands in a batch for a tensor that this rank's stages do not read."""

    def __repr__(self) -> str:
        """For signatures and errors."""
        return "ELSEWHERE"


ELSEWHERE: Final = _Elsewhere()


def only(batch: Batch, places: Collection[int]) -> Batch:
    """A batch of which the leaves at these places are here, and ELSEWHERE stands for all others."""
    leaves, structure = batches.flattened(batch)
    return batches.rebuilt((leaf if place in places else ELSEWHERE for place, leaf in enumerate(leaves)), structure)


class Absent(torch.Tensor):
    """A meta tensor that says that it is on a device, and turns into its like whatever is computed with it."""

    place: torch.device

    @classmethod
    def like(cls, meta: TensorMeta | torch.Tensor, place: torch.device) -> Self:
        """One of this shape and type."""
        stride = meta.stride if isinstance(meta, TensorMeta) else meta.stride()
        with _disable_current_modes(), torch.no_grad():
            made = torch.empty_strided(tuple(meta.shape), stride, dtype=meta.dtype, device="meta").as_subclass(cls)
        made.place = place
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on meta tensors."""
        if func in _KNOWS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        # Most calls have one first, and no tree to be walked through.
        place = args[0].__dict__.get("place") if args and type(args[0]) is cls else None
        if place is None:
            place = next(
                leaf.__dict__["place"]
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, cls) and "place" in leaf.__dict__
            )
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return place

        def meta(value: Any) -> Any:
            if isinstance(value, cls):
                return value.as_subclass(torch.Tensor)
            if isinstance(value, torch.Tensor):  # fake ones are of a mode of their own
                return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
            return value

        if func in {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}:
            return cls._moved(func, place, args, kwargs)
        if kwargs.get("device") is not None:
            place, kwargs["device"] = torch.device(kwargs["device"]), "meta"
        known = _known_result(func, args, kwargs)
        if known is not None:
            leaves, structure = known
            found = [absent(each, place) if isinstance(each, TensorMeta) else each for each in leaves]
            return found[0] if structure.is_leaf() else pytree.tree_unflatten(found, structure)
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
            args, kwargs = pytree.tree_map(meta, (args, kwargs))
            args = tuple("meta" if isinstance(value, torch.device) else value for value in args)
            with _values_are_elsewhere(func):
                result = func(*args, **kwargs)

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            made = value.as_subclass(cls)
            made.place = place
            return made

        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return pytree.tree_map(wrapped, result)

    @classmethod
    def _moved(cls, func: Any, place: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """To another type or device: of the latter only the name changes."""
        tensor, *others = args
        dtype = kwargs.get("dtype")
        for value in (*others, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, torch.Tensor):
                place, dtype = value.device, value.dtype
            elif isinstance(value, (str, torch.device)):
                place = torch.device(value)
            elif isinstance(value, torch.dtype):
                dtype = value
        if func is not torch.Tensor.to:
            place = torch.device(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            meta = TensorMeta(tuple(tensor.shape), tensor.stride(), dtype or tensor.dtype, requires_grad=False)
        return cls.like(meta, place)


@lru_cache(maxsize=KNOWN)
def absent(meta: TensorMeta, place: torch.device) -> Absent:
    """One of this shape and type, the same one each time: it holds no values, and what writes into it changes none."""
    return Absent.like(meta, place)


@contextmanager
def _values_are_elsewhere(func: Any) -> Iterator[None]:
    """Inside, torch's error at a function that needs values, which has many words, becomes one that says what to do."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is one
        if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
            raise
        raise EngineError(
            f"{getattr(func, '__name__', func)} needs the values of a tensor, of an earlier stage or of the batch, that were not read when the model was cut: "
            "plan again"
        ) from error


def _known_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
    """What a function makes of absent tensors and plain values, by their description; None where that does not tell it.

    Every micro-batch makes the same calls, and meta kernels of torch that are written in Python take a tenth of a millisecond each.
    """
    name = str(getattr(func, "__name__", ""))
    if name in {"__set__", "__setitem__"} or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
        return None  # it writes
    given = (*args, *kwargs.values())
    if any(isinstance(value, (list, tuple, dict)) for value in given):
        leaves, structure = pytree.tree_flatten((args, kwargs))
    else:
        leaves, structure = list(given), _flat(len(args), tuple(kwargs))
    described: list[Any] = []
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        for leaf in leaves:
            if type(leaf) is Absent:
                described.append(_described(leaf))
            elif isinstance(leaf, _PLAIN):
                described.append((type(leaf), leaf))  # 1, 1.0 and True are equal, and give other types
            else:
                return None
    return _result(func, tuple(described), structure, torch.get_default_dtype())


@lru_cache(maxsize=KNOWN)
def _flat(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """How so many arguments, and named ones, none of which has others in it, are arranged."""
    return pytree.tree_structure(((0,) * count, dict.fromkeys(names, 0)))


def _described(tensor: torch.Tensor) -> TensorMeta:
    """Of an absent one inside `DisableTorchFunctionSubclass`."""
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype, requires_grad=False)


@lru_cache(maxsize=KNOWN)
def _result(
    func: Any, described: tuple[Any, ...], structure: Any, _default: torch.dtype
) -> tuple[tuple[Any, ...], Any] | None:
    """The leaves of a result and how they are arranged; None where one is neither a tensor nor a plain value."""
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
        leaves = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, TensorMeta)
            else leaf[1]
            for leaf in described
        ]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        with _values_are_elsewhere(func):
            made, arranged = pytree.tree_flatten(
                func(*("meta" if isinstance(value, torch.device) else value for value in args), **kwargs)
            )
    if not all(type(leaf) is torch.Tensor or isinstance(leaf, _PLAIN) for leaf in made):
        return None
    return tuple(_described(leaf) if type(leaf) is torch.Tensor else leaf for leaf in made), arranged
