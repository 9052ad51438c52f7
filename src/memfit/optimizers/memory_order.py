"""Parameters as flat tensors in the order of their memory, which is how an update takes them chunk by chunk."""

from __future__ import annotations

from torch import Tensor


def order_of(tensor: Tensor) -> list[int]:
    """The dimensions in the order of memory, outermost first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: -int(strides[d]) if tensor.shape[d] > 1 else 0)


def flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of a parameter's shape in the order of the parameter's memory: a view where it is laid out alike and without gaps, else a copy."""
    return tensor.permute(order_of(parameter)).reshape(-1)


def shaped(values: Tensor, parameter: Tensor) -> Tensor:
    """Inverse of `flat`, as a view."""
    order = order_of(parameter)
    return values.view([parameter.shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
