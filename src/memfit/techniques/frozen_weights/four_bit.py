"""A linear layer whose frozen weight is in 4 bits, and putting it in the place of `torch.nn.Linear`.

The format is that of bitsandbytes' `Linear4bit` as QLoRA uses it (Dettmers et al. 2023, arXiv:2305.14314, section 3): NF4, one scale for each 64 weights,
the scales in 8 bits with one scale of theirs for each 256 ("double quantisation"). A weight takes 4.127 bits. The layer differs from `Linear4bit` in that all
it holds are parameters and buffers, so that what looks at a model's tensors (captures, checkpoints, `Module.to`) finds them all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import InputError
from memfit.techniques.frozen_weights import NO_KERNELS
from memfit.techniques.frozen_weights.read_elsewhere import weight_read_elsewhere

BLOCK: Final = 64  # weights that share a scale
SCALES_BLOCK: Final = 256  # scales that share one of theirs
FORMAT: Final = "nf4"


def has_kernels() -> bool:
    """Whether bitsandbytes is installed and has the operation that the layer runs."""
    if find_spec("bitsandbytes") is None:
        return False
    with bitsandbytes_quiet():
        import bitsandbytes  # noqa: F401 - it registers the operations

    return hasattr(torch.ops.bitsandbytes, "gemm_4bit")


@contextmanager
def bitsandbytes_quiet() -> Iterator[None]:
    """Imported inside the block, it says nothing of kernels that it would rather have: whoever only plans has not asked for it.

    Nor does it change what models do: it compiles a function as it is imported, and torch.compile ends the checks of torch.distributions for the process.
    """
    logger = logging.getLogger("bitsandbytes")
    before, checked = logger.level, Distribution._validate_args  # noqa: SLF001 - what set_default_validate_args sets
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
        Distribution.set_default_validate_args(checked)


class FourBitLinear(nn.Module):
    """`torch.nn.Linear` with a frozen weight in 4 bits.

    It computes in the dtype of its input, under autocast in autocast's. Inputs are (..., in_features), outputs (..., out_features); gradients go to the input
    and the bias.

    Args:
        linear: whose weight is packed and whose bias is taken over, the same parameter.

    Attributes:
        weight: two weights in a byte, (ceil(out_features * in_features / 2), 1), uint8.
        bias: as in `linear`, or None.
        scales: of the blocks, in 8 bits.
        scales_mean, scales_scales: float32, what the codes of the scales are relative to.
        scales_code: what the 256 codes of the scales mean, float32; a constant, so it is in no state dict.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    scales: Tensor
    scales_mean: Tensor
    scales_scales: Tensor
    scales_code: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = weight.dtype
        operations = torch.ops.bitsandbytes
        packed, scales = operations.quantize_4bit.default(weight, BLOCK, FORMAT, torch.uint8)
        mean = scales.mean()
        code = torch.tensor(_scale_codes(), dtype=torch.float32, device=weight.device)
        coded, scales_scales = operations.quantize_blockwise.default(scales - mean, code, SCALES_BLOCK)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.register_buffer("scales", coded)
        self.register_buffer("scales_mean", mean)
        self.register_buffer("scales_scales", scales_scales)
        self.register_buffer("scales_code", code, persistent=False)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, as `torch.nn.Linear` has it."""
        from bitsandbytes.autograd._functions import matmul_4bit

        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        result: Tensor = matmul_4bit(x, self.weight, bias=bias, quant_state=self._quant_state())
        return result

    def full_weight(self) -> Tensor:
        """The weight that the 4 bits stand for, (out_features, in_features), in the dtype that it had."""
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self.weight, self._quant_state())
        return weight

    def _quant_state(self) -> Any:
        """What bitsandbytes asks for, made of the tensors that are here now: others may be lent to the module."""
        from bitsandbytes.functional import QuantState

        make: Any = QuantState  # it is not annotated
        of_scales = make(absmax=self.scales_scales, code=self.scales_code, blocksize=SCALES_BLOCK, dtype=torch.float32)
        return make(
            absmax=self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            blocksize=BLOCK,
            quant_type=FORMAT,
            dtype=self.dtype,
            offset=self.scales_mean,
            state2=of_scales,
        )

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def convertible(model: nn.Module) -> list[str]:
    """Paths of the linear layers that could be in 4 bits: frozen, with a weight that they alone have and read, and of no subclass.

    The forward of a subclass may be another. One with hooks is left alone too: they are not the layer's own to hand on.
    """
    used = Counter(id(p) for _, p in nn.Module.named_parameters(model, remove_duplicate=False))
    return [
        path
        for path, module in model.named_modules()
        if path
        and type(module) is nn.Linear
        and not module.weight.requires_grad
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and module.weight.numel()
        and used[id(module.weight)] == 1
        and not (module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 - torch has no public way to ask
        and not (module._backward_hooks or module._backward_pre_hooks)  # noqa: SLF001 - as above
        and not weight_read_elsewhere(model, path)
    ]


def left_whole(model: nn.Module) -> dict[str, int]:
    """Bytes of the frozen parameters that `convert` leaves as they are, by name: embeddings, and experts that are one tensor of three dimensions."""
    packed = {f"{path}.weight" for path in convertible(model)}
    return {name: p.nbytes for name, p in model.named_parameters() if not p.requires_grad and name not in packed}


def converted(model: nn.Module) -> bool:
    """Whether a layer of the model is in 4 bits."""
    return any(isinstance(module, FourBitLinear) for module in model.modules())


def convert(model: nn.Module) -> None:
    """Put a `FourBitLinear` in the place of each layer of `convertible`; each weight is freed before the next is packed.

    Raises:
        InputError: bitsandbytes is not here.
    """
    paths = convertible(model)
    if paths and not has_kernels():
        raise InputError(f"frozen weights in 4 bits were asked for: {NO_KERNELS}")
    for path in paths:
        parent, _, name = path.rpartition(".")
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        with torch.no_grad():
            model.get_submodule(parent)._modules[name] = FourBitLinear(linear)  # noqa: SLF001 - by name, whatever setattr does in it
        del linear


@cache
def _scale_codes() -> tuple[float, ...]:
    """What the 256 codes of 8 bits mean, bitsandbytes' dynamic map; made of real numbers, also while a capture has fake ones."""
    with _disable_current_modes():
        from bitsandbytes import functional

        make: Any = functional.create_dynamic_map  # it is not annotated
        return tuple(make().tolist())
