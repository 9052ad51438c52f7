"""A model on the meta device with values: whether its batch splits shows only in numbers, and any will do that lead to finite ones."""

from __future__ import annotations

import copy
from typing import Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch
from memfit.step.generators import forked_generators

SPREAD: Final = 0.02  # of weights that no layer initialises, as language models have it


def filled(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, initialised as its layers do it themselves, and with small random numbers where they do not.

    Buffers of numbers are ones (variances, scales), those of integers and truth values zeros; it is a model of the same program, not of the same function.
    """
    with forked_generators():
        torch.manual_seed(0)
        made = copy.deepcopy(model).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.normal_(0.0, SPREAD)
                else:
                    parameter.zero_()
            for buffer in made.buffers():
                buffer.fill_(1 if buffer.is_floating_point() else 0)
            for module in made.modules():
                initialise = getattr(module, "reset_parameters", None)
                if callable(initialise):
                    initialise()
    return made


def filled_rows(few: Batch, device: torch.device) -> Batch:
    """A few samples with values in place of tensors that are on the meta device.

    Numbers are normal ones. Integers are zeros and ones, which are tokens and classes of nearly every model, drawn so that samples differ: alike ones would
    hide a layer that sees the whole batch.
    """
    generator = torch.Generator().manual_seed(0)

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(device, tensor.dtype)
        return torch.randint(2, tensor.shape, generator=generator).to(device, tensor.dtype)

    return batches.map_tensors(values, few)
