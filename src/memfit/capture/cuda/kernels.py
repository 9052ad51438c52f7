"""Leads a step on the CPU's fake tensors through the operations that CUDA would run.

Most operations are the same on every device. What differs is decided above the dispatcher, in calls that branch on the device: dropout (fused, with a mask of
one byte), attention (which kernel, and what it saves), batch norm and recurrent layers (cuDNN's), and what autocast runs in fp32. Those calls are replaced,
by a mode of torch for functions, while a step is captured; autograd, and the recorder, then see CUDA's operations with torch's own meta kernels.

Fake tensors on "cuda" would need no replacing, but backward asks for the accelerator, and a torch without CUDA has no guard for such a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.overrides import TorchFunctionMode

from memfit.capture.cuda import attention, autocast
from memfit.capture.cuda.recurrent import recurrent
from memfit.capture.cuda.rms_norm import rms_norm
from memfit.dispatch import DispatchMode
from memfit.hardware.machine import Capability

ASSUMED: Final = "the kernels of CUDA are assumed"  # begins the note that tells which
NOT_COUNTED: Final = "not counted: workspaces of convolutions, the CUDA context"
AUTOCAST: Final = "autocast: CUDA's list of what runs in fp32"
LARGEST_CUDNN_BATCH: Final = 880801  # samples that cuDNN's spatial batch norm takes in training


class _Operations(DispatchMode):
    """Knows whether an operation is running: what fake kernels and decompositions call is not the step's.

    Attributes:
        running: how many are, one inside the other.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running -= 1


class CudaKernels(TorchFunctionMode):
    """While it is on, functions of torch that branch on the device run what they would run on a GPU.

    Args:
        capability: of the GPU.

    Attributes:
        assumed: what was replaced, in words, with the kernel that is assumed; in order of appearance.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__()
        self.capability = capability
        self.assumed: dict[str, None] = {}
        self._operations = _Operations()

    @contextmanager
    def on(self) -> Iterator[None]:
        """The step runs inside; entered after the mode that makes tensors fake."""
        with self._operations, self:
            yield

    @property
    def in_words(self) -> str:
        """What a plan says of it."""
        kernels = "; ".join(self.assumed) or "the same operations as here"
        return f"{ASSUMED}, as PyTorch {torch.__version__.split('+')[0]} chooses them ({kernels}); {NOT_COUNTED}"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run CUDA's operation in place of the function, where it is another than the CPU's."""
        kwargs = kwargs or {}
        result = self._instead(func, args, kwargs) if self._concerns(func) else NotImplemented
        if result is not NotImplemented:
            return result
        if func in _SEEN_INTO:
            with self:
                return _unguarded(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _concerns(self, func: Any) -> bool:
        if self._operations.running:
            return False
        return func in _STAND_INS or func in autocast.SOFTMAXES or func in autocast.IN_FP32 or func in autocast.TO_FP32

    def _instead(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _STAND_INS:
            return _STAND_INS[func](self, *args, **kwargs)
        if func in autocast.SOFTMAXES:
            made = autocast.softmax(func, args, kwargs) if args else NotImplemented
            if made is not NotImplemented and autocast.autocast_dtype() is not None:
                self.assumed[AUTOCAST] = None
            return made
        if autocast.autocast_dtype() is None or not any(_is_half(a) for a in args):
            return NotImplemented
        self.assumed[AUTOCAST] = None
        if func in autocast.TO_FP32:
            return func(*args, **{"dtype": torch.float32, **kwargs})
        with torch.autocast("cpu", enabled=False):
            return func(*autocast.raised(args), **{name: autocast.raised(value) for name, value in kwargs.items()})

    # -- the calls that branch on the device -----------------------------------------------------------------------------------

    def dropout(self, *args: Any, **kwargs: Any) -> Any:
        """Fused, with a mask of one byte an element; in place it is the CPU's way on a GPU, too."""
        given, p, training, inplace = _arguments(F.dropout, args, kwargs)
        if inplace or not training or not 0 < p < 1 or not given.numel():
            return NotImplemented
        self.assumed["dropout: fused, masks of one byte"] = None
        return torch.native_dropout(given, p, True)[0]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The kernel that PyTorch would choose."""
        if not _fake(query, key, value):
            return NotImplemented
        given = attention.Call(query, key, value, *args, **kwargs)
        mask = given.attn_mask
        call = replace(
            given,
            query=autocast.lowered(query),
            key=autocast.lowered(key),
            value=autocast.lowered(value),
            attn_mask=autocast.lowered(mask) if mask is not None and mask.is_floating_point() else mask,
        )
        kernel = attention.chosen(call, self.capability)
        self.assumed[f"attention: the {kernel} kernel"] = None
        with torch.autocast("cpu", enabled=False):
            return attention.attended(call, kernel)

    def batch_norm(self, *args: Any, **kwargs: Any) -> Any:
        """That of cuDNN, where it takes the call."""
        given, mean, variance, weight, bias, training, momentum, eps = _arguments(F.batch_norm, args, kwargs)
        affine, kept = weight is not None and bias is not None, (mean is None) == (variance is None)
        takes = given.dim() >= 3 and given.shape[0] <= LARGEST_CUDNN_BATCH and torch.backends.cudnn.enabled
        if not (training and affine and kept and takes and _fake(given, weight)):
            return NotImplemented
        if torch.bfloat16 in (given.dtype, weight.dtype) or given.dtype is torch.float64:
            return NotImplemented
        self.assumed["batch norm: cuDNN"] = None
        return torch.cudnn_batch_norm(given, weight, bias, mean, variance, True, momentum, eps)[0]

    def rms_norm(self, *args: Any, **kwargs: Any) -> Any:
        """One kernel."""
        given, shape, weight, _ = _arguments(F.rms_norm, args, kwargs)
        made = rms_norm(given, shape, weight) if _fake(given, weight) else None
        if made is None:
            return NotImplemented
        self.assumed["RMS norm: one kernel"] = None
        return made

    def recurrent(self, kind: str, *args: Any) -> Any:
        """Fused layers of cuDNN."""
        fake = any(isinstance(a, (list, tuple)) and _fake(*a) for a in args)
        made = recurrent(kind, args) if fake and torch.backends.cudnn.enabled else None
        if made is None:
            return NotImplemented
        self.assumed["recurrent layers: cuDNN, whose reserve is estimated"] = None
        return made


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order of the function's own, with its defaults."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


_signature = cache(inspect.signature)


def _fake(*tensors: object) -> bool:
    """Whether the result will be fake; what is computed from the batch alone is computed here, by the CPU's kernels."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _recurrent(kind: str) -> Callable[..., Any]:
    return lambda kernels, *args: kernels.recurrent(kind, *args)


_STAND_INS: Final[Mapping[Any, Callable[..., Any]]] = {
    F.dropout: CudaKernels.dropout,
    torch.dropout: CudaKernels.dropout,
    F.scaled_dot_product_attention: CudaKernels.attention,
    F.batch_norm: CudaKernels.batch_norm,
    F.rms_norm: CudaKernels.rms_norm,
    torch.lstm: _recurrent("lstm"),
    torch.gru: _recurrent("gru"),
    torch.rnn_tanh: _recurrent("rnn_tanh"),
    torch.rnn_relu: _recurrent("rnn_relu"),
}

# Written in Python, and what they call is to be seen too: attention and dropout, and whatever backward runs again.
_SEEN_INTO: Final[frozenset[Any]] = frozenset(
    {F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)


def _is_half(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_half(item) for item in value)
    return isinstance(value, Tensor) and value.dtype in autocast.HALF


@cache
def _unguarded(function: FunctionType) -> FunctionType:
    """A copy of a function of torch that does not look for modes itself; with the mode on, it would be handed back without end."""
    blind = {name: _never for name in function.__code__.co_names if name.startswith("has_torch_function")}
    made = FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _never(*_: object) -> bool:
    return False
