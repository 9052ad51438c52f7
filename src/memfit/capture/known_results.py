"""What operations give on fake tensors, remembered: a step repeats the calls of its blocks, and a capture would work out the same shapes again and again.

Torch has such a cache too (`FakeTensorMode.cache`), behind several layers of Python that take three times as long as what is done here. It stays in charge
of everything that is not plain: other libraries' operations, results whose shape depends on values, complex, sparse and constant tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memfit import dispatch

if TYPE_CHECKING:
    from torch._ops import OpOverload

DEVICE: Final = torch.ops.prim.device.default  # which autograd asks of every gradient

_aten: Final = torch.ops.aten
_GROUPED: Final = (torch.float32, torch.float16, torch.bfloat16)  # that the kernels of grouped products take
_CTC_LOSSES: Final = (_aten._ctc_loss.Tensor, _aten._ctc_loss.default)
_CTC_LOSS_BACKWARDS: Final = (_aten._ctc_loss_backward.Tensor, _aten._ctc_loss_backward.default)
# Views whose offset is no constant distance from that of their argument.
_OTHER_OFFSETS: Final = frozenset({_aten.as_strided.default, _aten.view.dtype})
_BY_VALUES: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_PLAIN: Final = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})  # fmt: skip


class KnownResults(dispatch.DispatchMode):
    """Is on above a fake mode for all that no recorder runs, such as the backward of a first pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operation gives."""
        kwargs = kwargs or {}
        if any(isinstance(t, FakeTensor) for t in dispatch.tensors_in((args, kwargs))):
            return run_fake(func, args, kwargs)
        return func(*args, **kwargs)


class Real(Enum):
    """Which real tensors among an operation's arguments are plain."""

    NONE = auto()
    WITH_DIMENSIONS = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor of a result.

    Attributes:
        shape, stride: in elements.
        dtype, device: as the fake tensor tells them.
        offset: in elements beyond that of the first argument, in whose storage it lies; None where it has a storage of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None = None


_FIRST_ARGUMENT: Final = object()  # is returned as it is
_Kind = tuple[type | None, tuple[Any, ...]]  # a list or a tuple, or None for one result; and what is in it

_KNOWN: Final[dict[tuple[Any, ...], _Kind | None]] = {}


def run_fake(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives, of which an argument is a fake tensor.

    What is new is left to the modes that are on, and remembered where a like tensor can be made of its shape alone.
    """
    if func is DEVICE:
        return args[0].fake_device
    key: list[Any] = [func, torch.get_default_dtype()]
    reals = _takes_real(func)
    if not _flattened(args, key, reals) or (kwargs and not _flattened(tuple(kwargs.items()), key, reals)):
        return _worked_out(func, args, kwargs)
    exact = tuple(key)
    if exact in _KNOWN:
        kind = _KNOWN[exact]
        return _worked_out(func, args, kwargs) if kind is None else _made(kind, args, kwargs)
    result = _worked_out(func, args, kwargs)
    _KNOWN[exact] = _kind_of(func, args, kwargs, result)
    return result


def _worked_out(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the modes that are on, laid out as the kernel does it: torch's fake one has the layout of the gradient (that of a mean over tokens is transposed)."""
    if func is _aten._grouped_mm.default and args[0].dtype in _GROUPED and args[0].dtype is args[1].dtype:
        return _grouped_product(*args, **kwargs)
    if func in _CTC_LOSSES and not isinstance(args[3], FakeTensor):
        return _ctc_losses(args[0], args[3])
    if func in _CTC_LOSS_BACKWARDS:
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    if func is _aten.index.Tensor:
        args = args[0], _without_masks(args[1])
    result = func(*args, **kwargs)
    if func is _aten.native_layer_norm_backward.default and result[0] is not None:
        return result[0].contiguous(), *result[1:]
    return result


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Of each group of rows with its matrix, as in mixtures of experts: torch's fake one takes bf16 alone. Rows of the result are padded to 16 bytes."""
    del bias  # no kernel takes one
    rows, columns = left.shape[-2], right.shape[-1]
    dtype = out_dtype or left.dtype
    aligned = 16 // dtype.itemsize
    padded = -(-columns // aligned) * aligned
    if left.dim() != right.dim():
        return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device=left.device)
    groups = left.shape[0] if offs is None else offs.shape[0]
    return torch.empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype, device=left.device)


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks that are real as the positions that they choose: how many these are is known, and the fake mode would ask a copy of them."""
    found: list[torch.Tensor | None] = []
    for each in indices:
        if each is None or isinstance(each, FakeTensor) or each.dtype not in dispatch.MASKS:
            found.append(each)
            continue
        with _disable_current_modes():
            found += each.nonzero(as_tuple=True)
    return found


def _ctc_losses(log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sample its loss, and what backward goes on from: at each moment the blanks and labels of the longest target. Torch has no fake kernel.

    Args:
        log_probs: [moments, samples, classes].
        lengths: of the targets, by sample.
    """
    moments, samples, _ = log_probs.shape
    with _disable_current_modes():
        longest = max(lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths, default=0)
    return log_probs.new_empty(samples), log_probs.new_empty((samples, moments, 2 * longest + 1))


@cache
def _takes_real(func: OpOverload) -> Real:
    """Of which of its arguments that are real, as those are that come of the batch alone, the shape decides like that of fake ones.

    The fake mode runs the operation on a fake copy. Where a result lies in it, or it is written and returned, the copy would be seen; and a number by itself
    counts for less than a tensor when types are promoted.
    """
    if not func._schema.returns:
        return Real.ALL
    return Real.NONE if func._schema.is_mutable or func.is_view else Real.WITH_DIMENSIONS


def _flattened(values: Sequence[Any], key: list[Any], reals: Real) -> bool:
    """Add what decides about the result to a key; False where something is not plain."""
    key.append(len(values))
    for value in values:
        kind = type(value)
        if isinstance(value, FakeTensor):
            if (
                value.constant is not None
                or value.dtype.is_complex
                or value.is_neg()
                or not dispatch.has_storage(value)
            ):
                return False
            key += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif kind is torch.Tensor:
            if reals is Real.NONE or (reals is Real.WITH_DIMENSIONS and not value.dim()):
                return False
            if value.dtype.is_complex or value.is_neg() or not dispatch.has_storage(value):
                return False
            key += (torch.Tensor, value.shape, value.stride(), value.dtype, value.device)
        elif kind in _PLAIN:  # 1, 1.0 and True are equal, and not alike
            key += (kind, value)
        elif isinstance(value, (list, tuple)):
            if not _flattened(value, key, reals):
                return False
        else:
            return False
    return True


def _kind_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> _Kind | None:
    """How a like result is made; None where it has to be worked out each time."""
    if func.namespace not in {"aten", "prims"} or any(tag in func.tags for tag in _BY_VALUES) or func in _OTHER_OFFSETS:
        return None
    several = isinstance(result, (list, tuple))
    items = result if several else (result,)
    inputs = {dispatch.storage_key(t) for t in dispatch.tensors_in((args, kwargs))}
    found = [_of_tensor(func, args, inputs, item) for item in items]
    if any(each is None and item is not None for each, item in zip(found, items, strict=True)):
        return None
    own = [each for each in items if isinstance(each, FakeTensor) and dispatch.storage_key(each) not in inputs]
    if len({dispatch.storage_key(each) for each in own}) < len(own):
        return None  # two in one new storage
    return (type(result) if several else None), tuple(found)


def _of_tensor(func: OpOverload, args: tuple[Any, ...], inputs: set[int], item: Any) -> Any:
    if item is None or type(item) is not FakeTensor or item.constant is not None or not dispatch.has_storage(item):
        return None
    first = args[0] if args and isinstance(args[0], FakeTensor) else None
    if item is first:
        return _FIRST_ARGUMENT
    if item.dtype.is_complex or item.is_neg() or item.requires_grad:
        return None
    shape, stride, offset = tuple(item.shape), tuple(item.stride()), int(item.storage_offset())
    if dispatch.storage_key(item) in inputs:
        view = func.is_view or func is _aten._unsafe_view.default  # the latter does not say so
        whole = first is not None and view and dispatch.storage_key(item) == dispatch.storage_key(first)
        if not whole or first is None or item.dtype is not first.dtype:
            return None
        return _Result(shape, stride, item.dtype, item.fake_device, offset - int(first.storage_offset()))
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if offset or item.untyped_storage().nbytes() != extent * item.dtype.itemsize:
        return None
    return _Result(shape, stride, item.dtype, item.fake_device)


def _made(kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    several, items = kind
    first = args[0] if args else None
    mode = next(t.fake_mode for t in dispatch.tensors_in((args, kwargs)) if isinstance(t, FakeTensor))
    made = [_again(item, first, mode) for item in items]
    return made[0] if several is None else made if several is list else tuple(made)


def _again(item: Any, first: Any, mode: FakeTensorMode) -> Any:
    if item is None:
        return None
    if item is _FIRST_ARGUMENT:
        return first
    with torch._C._DisableTorchDispatch():
        if item.offset is None:
            elem = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="meta")
        else:
            elem = torch.empty(0, dtype=item.dtype, device="meta")
            elem.set_(first.untyped_storage(), first.storage_offset() + item.offset, item.shape, item.stride)
    return FakeTensor(mode, elem, item.device)
