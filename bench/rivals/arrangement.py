"""One way of taking the same training step: build it, take its first gradients, its peak, its work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memfit import batches
from memfit.meter import metered
from memfit.step.program import state_tensors

from .subjects import Built, Subject
from .work import Work, counted

Loss = Callable[[], Tensor]
Arrange = Callable[[Subject, Built], Loss]

SEED = 7  # of the generator before a first step, from which dropout draws


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every arrangement: fused, as memfit's default."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Arrangement(Protocol):
    """Something that takes steps."""

    optimizer: Any

    def step(self) -> None:
        """One optimizer step."""

    def present(self) -> list[Tensor]:
        """Tensors that are there before a step."""


class Rival:
    """A model under a rival technique, or plain.

    Args:
        subject: the model.
        arrange: the technique; None for plain PyTorch.
        optimizer: makes the optimizer.
    """

    def __init__(
        self, subject: Subject, arrange: Arrange | None = None, optimizer: Callable[[Any], Any] = adamw
    ) -> None:
        built = subject.build()
        self.model, self.sample, loss_fn = built
        self.loss = arrange(subject, built) if arrange else lambda: batches.loss_of(self.model, self.sample, loss_fn)
        self.optimizer = optimizer(p for p in self.model.parameters() if p.requires_grad)

    def step(self) -> None:
        """Forward, backward, update; gradients are let go."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def make_state(self) -> None:
        """Give the optimizer its state without a step on the batch: one on gradients of zero."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def present(self) -> list[Tensor]:
        """Parameters, buffers, the batch, the optimizer's state."""
        kept = [*self.model.parameters(), *self.model.buffers(), *batches.leaves(self.sample)]
        return [*kept, *state_tensors(self.optimizer)]


def first_gradients(arranged: Arrangement) -> tuple[list[Tensor], float]:
    """Take the first step, from a fixed seed: the gradients the optimizer is given, and the wall seconds it took (compiling included)."""
    found: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            found.extend(p.grad.detach().clone() for p in group["params"] if p.grad is not None)

    handle = arranged.optimizer.register_step_pre_hook(look)
    torch.manual_seed(SEED)
    begin = time.perf_counter()
    arranged.step()
    seconds = time.perf_counter() - begin
    handle.remove()
    return found, seconds


def difference(found: Sequence[Tensor], plain: Sequence[Tensor]) -> float | None:
    """Relative difference of two lists of gradients, in the 2-norm over all of them; zero only where every bit is equal, None where they do not pair up."""
    if len(found) != len(plain):
        return None
    if all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)):
        return 0.0
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, plain, strict=True))
    whole = sum(float(b.double().square().sum()) for b in plain)
    return float((apart / whole) ** 0.5) or 5e-324  # not all bits are equal, so it is not zero


def peak_of(arranged: Arrangement) -> int:
    """Bytes held at most during a step that is not the first: the optimizer's state is there."""
    gc.collect()
    with metered(arranged.present()) as reading:
        arranged.step()
    return reading.peak_bytes


def work_of(arranged: Arrangement) -> Work:
    """What a step runs, counted by operation."""
    with recomputations_seen():
        return counted(arranged.step)


@contextmanager
def recomputations_seen() -> Iterator[None]:
    """Let a counting mode see what memfit runs again: its engine hides recomputations from modes that are on during backward."""
    from memfit.engine import repeated_calls, tape

    hiding = {module: getattr(module, "_disable_current_modes", None) for module in (tape, repeated_calls)}
    found = {module: hides for module, hides in hiding.items() if hides is not None}
    for module in found:
        module._disable_current_modes = nullcontext  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        for module, hides in found.items():
            module._disable_current_modes = hides  # type: ignore[attr-defined]
