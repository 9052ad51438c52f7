"""What a builder of a case returns, and how its loss is taken.

Here and not in the package's `__init__`, so that the families can import the words without importing each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Sample: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
# The batch is Any so that each loss can name the one form of Sample which its own model takes.
LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
WeightFn: TypeAlias = Callable[[Any], int]
Built: TypeAlias = tuple[nn.Module, Sample, LossFn | None]


IGNORED = -100  # the label that cross entropy leaves out of the average


def labels_or_rows(sample: Sample) -> int:
    """What a batch counts for in a mean over several: its labels that are not ignored or, without labels, its rows."""
    if isinstance(sample, dict):
        return int((sample["labels"] != IGNORED).sum())
    return len(sample if isinstance(sample, Tensor) else sample[0])


def loss_of(model: nn.Module, sample: Sample, loss_fn: LossFn | None) -> Tensor:
    """The scalar loss of one batch; without a loss function the model speaks Hugging Face's: `model(**sample).loss`."""
    if loss_fn is not None:
        return loss_fn(model, sample)
    if not isinstance(sample, dict):
        message = f"a case without a loss function needs a dict as its sample, this one has a {type(sample).__name__}"
        raise TypeError(message)
    loss: Tensor = model(**sample).loss
    return loss


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of `model(x)`, shape (..., classes), against targets, shape (...)."""
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def cross_entropy_bf16(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """`cross_entropy`, with the forward pass under bfloat16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error of `model(x)` against targets of the same shape."""
    x, y = batch
    return functional.mse_loss(model(x), y)


def tokens_and_targets(batch: int, tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Random token ids and next-token targets, both of shape (batch, tokens)."""
    ids = torch.randint(vocab, (batch, tokens + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
