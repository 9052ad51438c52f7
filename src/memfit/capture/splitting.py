"""Does a batch split? Compare, on a few real samples, the gradient of the whole with the weighted sum of its parts.

Layers that see the whole batch (batch norm) and losses that compare samples (contrastive) do not split; a mean over unmasked tokens splits by token counts,
not by samples. None of this is guessed from names of layers: the gradients decide.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.capture import forked_generators
from memfit.capture.scaled import rows_of, shortened
from memfit.capture.standins import lent

SAMPLES: Final = 4
SAMPLES_OF_LARGE_MODELS: Final = 2  # above this many parameters a comparison takes seconds
LARGE_MODEL_PARAMETERS: Final = 50_000_000
TOLERANCE: Final = 1e-4  # of the gradient's norm, in fp32
LOW_PRECISION_TOLERANCE: Final = 3e-2  # where 16-bit operations run; wrong weights are off by tenths


@dataclass(frozen=True, slots=True)
class Splitting:
    """What the comparison found.

    Attributes:
        weights: how parts are weighted (`batches.weigh`), or None when the batch does not split.
        error: relative difference of the gradients with these weights (or the best ones tried).
        reason: in words, when it does not split.
    """

    weights: str | None
    error: float
    reason: str = ""


class _Certain(TorchDispatchMode):
    """Makes random operations certain, so that parts and whole can be compared; notes whether 16-bit operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.low_precision = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name == "aten::native_dropout":
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            for index, argument in enumerate(func._schema.arguments):
                if argument.name == "dropout_p":
                    args = (*args[:index], 0.0, *args[index + 1 :]) if index < len(args) else args
                    kwargs.pop("dropout_p", None)
            if name.endswith("_") and args:
                return args[0].fill_(0.5)
            if "scaled_dot_product" not in name and "rnn" not in name:
                result = func(*args, **kwargs)
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    return torch.full_like(result, 0.5)
                return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.low_precision = True
        return result


def find_splitting(model: nn.Module, sample: Batch, loss_fn: LossFunction | None) -> Splitting:
    """Whether gradients of parts add up to the gradient of the whole, and with which weights.

    The model's parameters, buffers, gradients and the generators are left as they were.
    """
    total = batches.size(sample)
    if total < 2:
        return Splitting(None, 0.0, "there is only one sample")
    short = shortened(sample) if sum(p.numel() for p in model.parameters()) >= LARGE_MODEL_PARAMETERS else None
    if short is not None:
        with suppress(Exception):  # a model of fixed length gets whole samples
            return _compare(model, short, loss_fn)
    return _compare(model, sample, loss_fn)


def _compare(model: nn.Module, sample: Batch, loss_fn: LossFunction | None) -> Splitting:
    total = batches.size(sample)
    parameters = sum(p.numel() for p in model.parameters())
    most = SAMPLES if parameters < LARGE_MODEL_PARAMETERS else SAMPLES_OF_LARGE_MODELS
    few = _varied(rows_of(sample, min(most, total)))
    count = batches.size(few)
    parts = batches.split(few, [count - 1, 1])
    trainable = _compared([p for p in model.parameters() if p.requires_grad])
    watch = _Certain()

    def gradient(part: Batch) -> list[torch.Tensor]:
        with lent(model, lambda t: t if isinstance(t, nn.Parameter) else t.clone()), watch:
            loss = batches.loss_of(model, part, loss_fn)
            found = torch.autograd.grad(loss, trainable, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trainable, found, strict=True)]

    with forked_generators():
        try:
            whole = gradient(few)
        except Exception:  # noqa: BLE001 - the variation may be what the model does not like
            few = rows_of(sample, min(most, total))
            parts = batches.split(few, [count - 1, 1])
            whole = gradient(few)
        try:
            pieces = [gradient(part) for part in parts]
        except Exception as refusal:  # noqa: BLE001 - e.g. batch norm over one value
            return Splitting(
                None, float("inf"), f"a part of the batch cannot be run alone ({type(refusal).__name__}: {refusal})"
            )
    tolerance = LOW_PRECISION_TOLERANCE if watch.low_precision else TOLERANCE
    best = Splitting(None, float("inf"))
    norm = sum(_norm(g) ** 2 for g in whole) ** 0.5
    if not norm > 0 or norm == float("inf"):
        return Splitting(None, float("nan"), f"the gradient of a few samples is {norm}, so nothing can be compared")
    for how in batches.weightings(few):
        shares = batches.shares(parts, how)
        if shares is None:
            continue
        difference = 0.0
        for index, g in enumerate(whole):
            added = sum(share * piece[index].float() for share, piece in zip(shares, pieces, strict=True))
            difference += _norm(g.float() - added) ** 2
        error = difference**0.5 / norm
        if error < tolerance:
            return Splitting(how, error)
        if error < best.error:
            best = Splitting(None, error)
    return Splitting(
        None,
        best.error,
        f"gradients of parts do not add up to the whole batch's (relative difference {best.error:.2g} with the best weights): "
        "a layer or the loss sees the whole batch, as batch norm and contrastive losses do",
    )


def _compared(trainable: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters whose gradients are compared: all, or of a large model the smaller ones, which every layer has (norms, biases).

    What sees the whole batch changes the gradient that flows back through everything before it, so no layer's large matrices are needed to notice.
    """
    chosen: list[nn.Parameter] = []
    total = 0
    for parameter in sorted(trainable, key=lambda p: p.numel()):
        total += parameter.numel()
        if total > LARGE_MODEL_PARAMETERS and chosen:
            break
        chosen.append(parameter)
    return chosen


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64 if tensor.numel() < 1 << 20 else None))


_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def _varied(batch: Batch) -> Batch:
    """The batch with some labels masked in one sample, so that token counts differ between samples.

    Labels are integers with a second dimension that are not what the model reads: not the first tensor, not one of the usual inputs. Where the guess is
    wrong the model refuses the masked values, and the samples are compared as they are.
    """
    first = next(iter(batches.named_leaves(batch)))

    def masked(path: Any, value: Any) -> Any:
        name = batches.leaf_name(path)
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.int64
            and value.dim() > 1
            and value.shape[1] > 3
            and (name != first or "label" in name)
            and name not in _INPUTS
        ):
            changed = value.clone()
            changed[0, : value.shape[1] // 2] = batches.IGNORED_LABEL
            return changed
        return value

    return batches.map_leaves(masked, batch)
