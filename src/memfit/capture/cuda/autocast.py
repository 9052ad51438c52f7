"""What autocast runs in fp32 on a GPU and leaves in 16 bits on a CPU.

Fake tensors of a computer without a GPU are the CPU's, so inside an autocast region torch applies the CPU's lists. CUDA's list of what runs in fp32 is
longer (PyTorch's page "Automatic Mixed Precision", CUDA ops that can autocast to float32): layer norm, softmax, powers and sums among them, whose results
are then saved in four bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

HALF: Final = (torch.float16, torch.bfloat16)

# Arguments are cast to fp32 first.
IN_FP32: Final[frozenset[Any]] = frozenset(
    {
        F.layer_norm,
        F.group_norm,
        F.softplus,
        F.kl_div,
        F.cosine_similarity,
        torch.layer_norm,
        torch.group_norm,
        Tensor.__rpow__,
        Tensor.norm,
        *(getattr(torch, name) for name in ("cdist", "dist", "logsumexp", "renorm", "norm", "cosine_similarity")),
        *(
            getattr(home, name)
            for home in (torch, Tensor)
            for name in (
                *("pow", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt"),
                *("acos", "asin", "cosh", "erfinv", "sinh", "tan"),
            )
        ),
        Tensor.__pow__,
    }
)
# The kernel itself reads 16 bits and adds up or returns fp32, unless the call names another dtype.
TO_FP32: Final[frozenset[Any]] = frozenset(
    {
        *(getattr(home, name) for home in (torch, Tensor) for name in ("sum", "prod", "cumsum", "cumprod")),
    }
)
SOFTMAXES: Final[Mapping[Any, Callable[..., Any]]] = {
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), torch.ops.aten._softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), torch.ops.aten._log_softmax),
}


def autocast_dtype() -> torch.dtype | None:
    """The 16-bit dtype of the autocast region around the call; None outside of any."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def lowered(tensor: Tensor) -> Tensor:
    """A floating-point argument as autocast hands it to a matrix product."""
    dtype = autocast_dtype()
    if dtype is None or tensor.dtype not in (torch.float32, *HALF) or tensor.dtype is dtype:
        return tensor
    return tensor.to(dtype)


def raised(value: Any) -> Any:
    """16-bit tensors among an operation's arguments, as fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, (list, tuple)):
        return type(value)(raised(item) for item in value)
    return value


def softmax(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A softmax as a GPU runs it: where it is asked for in fp32, or autocast asks, the kernel reads fp16 as it is; bf16 is cast first.

    Returns:
        NotImplemented where the CPU's way is the same.
    """
    given, dtype = args[0], kwargs.get("dtype")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    asked = dtype is torch.float32 or (dtype is None and autocast_dtype() is not None)
    if given.dtype not in HALF or not asked or dim is None:
        return NotImplemented
    with torch.autocast("cpu", enabled=False):
        if given.dtype is torch.float16:
            return SOFTMAXES[func](given, dim, True)
        return SOFTMAXES[func](given.float(), dim, False)
