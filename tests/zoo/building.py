"""Build a small trainable model of an architecture with a batch on which a plain forward and backward work."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import particulars
from .architectures import model_classes
from .inputs import VARIANTS, Batch, batch_of, mean_square
from .shrinking import WAYS, Way, shrunk

LARGEST = 20_000_000  # parameters; a model that is still larger is not small, and the next way is tried
_CLASSES = 3  # so many heads are tried
_MISMATCH = re.compile(r"tokens:? (\d+),.*?features:? (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Specimen:
    """A model of the zoo.

    Attributes:
        loss_fn: None where the model gives its own loss.
        how: class, way of shrinking, variant of the inputs.
    """

    model: nn.Module
    batch: Batch
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None
    how: str


class NotBuiltError(Exception):
    """No small model of the architecture runs plainly; says what the first try met."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds of this process, however busy the machine is."""

    def late(*_: object) -> None:
        message = f"more than {seconds:.0f} s"
        raise TimeoutError(message)

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def in_short(error: BaseException) -> str:
    """Type and first words of an error."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"


def built(name: str, known: list[str], seconds: float = 20.0) -> Specimen:
    """The first head, way of shrinking and form of inputs that runs forward and backward plainly.

    Raises:
        NotBuiltError: none does.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    first: str | None = None
    ends = time.process_time() + seconds
    if name in particulars.CLASSES:
        known = [particulars.CLASSES[name]]
    configuration = getattr(transformers, particulars.CONFIGURATIONS.get(name, CONFIG_MAPPING_NAMES[name]))
    try:
        classes = model_classes(name, known)
    except ImportError as error:
        raise NotBuiltError(in_short(error)) from error
    for found in classes[:_CLASSES]:
        for way in WAYS:
            if time.process_time() > ends:
                break
            try:
                with at_most(6.0):
                    specimen, reason = _tried(name, configuration, found, way)
            except Exception as error:  # noqa: BLE001  (whatever a configuration does not like)
                specimen, reason = None, in_short(error)
            if specimen is not None:
                return specimen
            first = first or f"{found.__name__}: {reason}"
    raise NotBuiltError(first or "transformers has no class for it")


def _tried(name: str, configuration: Any, found: Any, way: Way) -> tuple[Specimen | None, str]:
    """One head shrunk one way, with each form of the inputs."""
    torch.manual_seed(0)
    small = shrunk(configuration(), way, particulars.FIELDS.get(name, {}))
    if way == "layers":
        with torch.device("meta"):
            if sum(p.numel() for p in found(small).parameters()) > LARGEST:
                return None, "too many parameters"
    model = found(small).train()
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        return None, "too many parameters"
    reason = ""
    for variant in range(VARIANTS):
        for with_labels in (True, False):
            try:
                batch, loss_fn = _runs(model, name, variant, with_labels=with_labels)
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001  (the next form is tried)
                reason = reason or in_short(error)
                continue
            labels = "labels" if {"labels", "start_positions"} & set(batch) else "no labels"
            return Specimen(model, batch, loss_fn, f"{found.__name__}, {way}, variant {variant}, {labels}"), ""
    return None, reason


def _runs(model: nn.Module, name: str, variant: int, *, with_labels: bool) -> tuple[Batch, Any]:
    """A batch that runs, and its loss function; the number of placeholders for an image is learnt from the complaint."""
    placeholders = 16
    guesses = [4, 8, 1]  # where the complaint counts tokens on one side and numbers on the other
    learnt = False
    while True:
        torch.manual_seed(1)
        batch = batch_of(
            model,
            particulars.INPUTS.get(name, {}),
            variant=variant,
            placeholders=placeholders,
            with_labels=with_labels,
        )
        try:
            return batch, _loss_fn(model, batch)
        except Exception as error:
            wrong = _MISMATCH.search(str(error))
            if (wrong is None and "mask" not in str(error)) or not guesses:
                raise
            told = None if wrong is None or learnt else placeholders * int(wrong[2]) // max(1, int(wrong[1]))
            placeholders = guesses.pop(0) if told is None else max(1, told)
            learnt = True


def _loss_fn(model: nn.Module, batch: Batch) -> Any:
    """The loss function with which a forward and backward work; None for the model's own."""
    output = model(**batch)
    loss = getattr(output, "loss", None)
    chosen: Any = None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        chosen = mean_square
        loss = mean_square(model, batch)
    if not bool(torch.isfinite(loss)):
        message = "the loss is not finite"
        raise FloatingPointError(message)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        p.grad = None
    if not gradients:
        message = "no parameter gets a gradient"
        raise ValueError(message)
    return chosen
