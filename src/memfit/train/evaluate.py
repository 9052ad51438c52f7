"""The loss on data that is not trained on, in micro-batches no larger than the plan's.

Evaluation is where trainers run out of memory that planned everything else: here nothing is kept for backward, logits
are freed after each micro-batch, and no micro-batch is larger than those of training, so it takes less than a training
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit import batches as batching
from memfit.batches import Batch, LossFunction
from memfit.step import process_generators
from memfit.techniques.autocast.precision import autocast
from memfit.train.data import Batches


@dataclass(slots=True)
class Accuracy:
    """Of how many samples the highest logit is the label.

    Counted where the model returns `logits` of shape (samples, classes) and the batch has `labels` of whole numbers, one for each sample.
    """

    right: int = 0
    samples: int = 0

    @property
    def share(self) -> float | None:
        """0 to 1; None where nothing was counted."""
        return self.right / self.samples if self.samples else None

    def add(self, output: Any, batch: Batch) -> None:
        """Count one micro-batch by what the model returned for it; of the look at a pipeline's forward, which has no values, nothing."""
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if (
            not isinstance(logits, torch.Tensor)
            or not isinstance(labels, torch.Tensor)
            or isinstance(logits, FakeTensor)
        ):
            return
        if logits.ndim == 2 and labels.shape == logits.shape[:1] and not labels.is_floating_point():
            self.right += int((logits.argmax(1) == labels).sum())
            self.samples += len(labels)


@contextmanager
def _counted(model: torch.nn.Module, batch: Batch, accuracy: Accuracy | None) -> Iterator[None]:
    """While the block runs, what the model returns is counted."""
    if accuracy is None:
        yield
        return
    hook = model.register_forward_hook(lambda _module, _inputs, output: accuracy.add(output, batch))
    try:
        yield
    finally:
        hook.remove()


def evaluate(
    model: torch.nn.Module,
    data: Batches,
    loss_fn: LossFunction | None,
    *,
    largest: int,
    weights: str = "samples",
    precision: str = "full",
    stop: Callable[[], bool] = lambda: False,
    accuracy: Accuracy | None = None,
) -> float | None:
    """Mean loss over the data; the model's modes and all generators are as before.

    Args:
        model: in evaluation mode while this runs.
        data: every sample of it is used once.
        loss_fn: as for training.
        largest: samples in a micro-batch.
        weights: what a micro-batch's loss averages over, in the words of `batches.weightings`.
        precision: as in training, in the words of `Choices`.
        stop: asked before each micro-batch.
        accuracy: counts what is told right, where the model classifies.

    Returns:
        The loss; None when stopped.
    """
    total, weight = 0.0, 0.0
    with undisturbed(model):
        for batch in data.once():
            count = batching.size(batch)
            for part in batching.split(batch, [min(largest, count - i) for i in range(0, count, largest)]):
                if stop():
                    return None
                share = _count(part, weights)
                if share:
                    with autocast(precision, data.device.type), _counted(model, part, accuracy):
                        loss = _loss(model, part, loss_fn)
                    total += loss * (1 if weights == "sum" else share)
                    weight += share
    return total / weight if weight else float("nan")


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode and every generator is put back."""
    modes = {module: module.training for module in model.modules()}
    states = process_generators.generators()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        process_generators.set_generators(states)


def _loss(model: torch.nn.Module, batch: Batch, loss_fn: LossFunction | None) -> float:
    if loss_fn is not None:
        return float(loss_fn(model, batch))
    return float(batching.loss_without_gradients(model, batch, None))


def _count(batch: Batch, weights: str) -> int:
    """What the loss of a micro-batch counts for; samples where nothing else is said or found."""
    kind, _, name = weights.partition(":")
    values = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(values, torch.Tensor) or kind not in {"tokens", "next_tokens", "filled"}:
        return batching.size(batch)
    if kind == "filled":
        return int(values.count_nonzero())
    return int((values[..., 1:] if kind == "next_tokens" else values).ne(batching.IGNORED_LABEL).sum())
