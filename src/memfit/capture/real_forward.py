"""A real forward on a few samples: which operations the model truly runs, and whether torch lets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.extreme_draws import at_the_end
from memfit.capture.index_bounds import indices_checked
from memfit.capture.isolation import batch_kept, lent, parameters_kept
from memfit.capture.samples import rows_of
from memfit.capture.source import StepSource
from memfit.step.device import device_of
from memfit.step.generators import forked_generators
from memfit.step.program import StepProgram
from memfit.techniques.choices import BASELINE, Choices, convert, converting

T = TypeVar("T")


class _Names(dispatch.DispatchMode):
    """Only notes which operations forward runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dispatch.is_operation(func):
            self.names.append(str(func))
        return at_the_end(func, args, func(*args, **(kwargs or {})))


def real_forward_names(
    source: StepSource, sample: Batch, choices: Choices = BASELINE, *, twice: bool = False
) -> list[str]:
    """Operations of a real forward and loss on a sample (the second one, for models that build things once); nothing of the model is changed.

    First of all the buffers that a kernel resizes inside, as that of an observer does, which finds the number of channels: fake ones do not.
    """
    names = _Names()
    with forward_for_real(source, choices) as program:
        before = [(name, buffer, buffer.shape) for name, buffer in source.model.named_buffers()]
        for _ in range(2 if twice else 1):
            names.names.clear()
            with batch_kept(sample), names:
                program.loss(sample)
            if "aten.resize_.default" in names.names:
                before = []  # an operation of its own, which is run on fake tensors, too
        resized = [f"a resizing of {name}" for name, buffer, shape in before if buffer.shape != shape]
    return [*resized, *names.names]


def first_other_forward(source: StepSource, most: int) -> int | None:
    """After how many forwards one runs other operations than the one before it; None where none of the first `most` does. Nothing of the model is changed."""

    def look(sample: Batch) -> int | None:
        names, before = _Names(), None
        with forward_for_real(source) as program:
            for number in range(most):
                names.names.clear()
                with batch_kept(sample), names:
                    program.loss(sample)
                if before is not None and names.names != before:
                    return number
                before = list(names.names)
        return None

    return _on_two(source.sample, look)[1]


@contextmanager
def forward_for_real(source: StepSource, choices: Choices = BASELINE) -> Iterator[StepProgram]:
    """Forwards run inside leave the model and the generators as they were."""
    with (
        indices_checked(device_of(source.model)),
        forked_generators(),
        parameters_kept(source.model, source.loss_fn),
        lent(source.model, _copied if converting(choices) else _private, source.loss_fn),
    ):
        convert(choices, source.model)
        yield StepProgram(source.model, source.loss_fn, choices=choices)


def looked_at(source: StepSource, choices: Choices = BASELINE) -> tuple[Batch, list[str]]:
    """Two samples and the operations of a real forward on them; the whole batch where the model does not run on two (a table made for its size)."""
    return _on_two(source.sample, lambda some: real_forward_names(source, some, choices))


def _on_two(sample: Batch, look: Callable[[Batch], T]) -> tuple[Batch, T]:
    """What a look at two samples of a batch gives, as for `on_few`."""
    return on_few(sample if batches.size(sample) <= 2 else rows_of(sample, 2), sample, look)


def on_few(few: Batch, sample: Batch, look: Callable[[Batch], T]) -> tuple[Batch, T]:
    """What a look at few samples gives, or one at all where the model does not run on few; asked at each look, as a branch may go another way each time."""
    try:
        return few, look(few)
    except Exception:
        if few is sample:
            raise
    return sample, look(sample)


def refused_by_torch(source: StepSource, choices: Choices = BASELINE) -> None:
    """Run a few samples without hooks, so that a step torch refuses is refused by torch, with its own words and the user's traceback.

    Saved-tensor hooks switch autograd's check for writes off; this one run has none.
    """
    few, _ = looked_at(source, choices)
    model = source.model
    with (
        indices_checked(device_of(model)),
        forked_generators(),
        batch_kept(few),
        parameters_kept(model, source.loss_fn),
        lent(model, _copied if converting(choices) else _private, source.loss_fn),
    ):
        convert(choices, model)
        loss = StepProgram(model, source.loss_fn, choices=choices).loss(few)
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _private(tensor: torch.Tensor) -> torch.Tensor:
    # Forward writes to buffers; what it writes to parameters is undone (`parameters_kept`).
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
