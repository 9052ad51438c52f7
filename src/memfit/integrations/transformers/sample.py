"""A sample of one optimizer step of a Trainer, of the largest shape that its data can give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memfit import batches
from memfit.batches import Batch
from memfit.errors import InputError
from memfit.integrations.window import OtherBatches, largest_in
from memfit.step.process_generators import generators_kept

# Entry of a sample: Trainer's count of what the losses are divided by.
ITEMS: Final = "num_items_in_batch"


def windows_of(trainer: Any) -> tuple[Batch, OtherBatches, str]:
    """The largest batch of as many samples as an optimizer step takes, collated as the trainer does, and others that may come.

    A collator may make other numbers of rows than it is given samples: two of a pair, one of all that are packed. Then the largest batch of the loader is there
    once for each that a step takes. Generators are left as they were: a dataset may draw.

    Returns:
        These, and why batches cannot be divided by their rows; "" where they can.

    Raises:
        InputError: the data cannot be looked through, or there is less of it than a step takes.
    """
    args = trainer.args
    given, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    with generators_kept():
        loader = trainer.get_train_dataloader()
        largest = largest_in(loader)
        window, others = largest(given * accumulated)
        if _rows(window) == given * accumulated:
            return window, others, ""
        if len(loader.dataset) < given * accumulated:
            raise _of_another_size(window, args)
        batch, others = largest(given)
    rows = _rows(batch)

    def for_each(one: Batch) -> Batch:
        return batches.repeated(one, rows * accumulated)

    return for_each(batch), others.changed(for_each), _by_rows(rows, given)


def window_given(trainer: Any, sample: Batch) -> tuple[Batch, str]:
    """The user's own sample of a step, and why its batches cannot be divided by their rows; "" where they can.

    Raises:
        InputError: it is not of as many samples as a step takes.
    """
    args = trainer.args
    given, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if _rows(sample) == given * accumulated:
        return sample, ""
    with generators_kept():
        batch = next(iter(trainer.get_train_dataloader()), None)
    rows = 0 if batch is None else _rows(batch)
    if rows in {0, given} or rows * accumulated != _rows(sample):
        raise _of_another_size(sample, args)
    return sample, _by_rows(rows, given)


def _rows(batch: Batch) -> int:
    if not isinstance(batch, Mapping):
        raise InputError(
            f"a batch of this trainer is a {type(batch).__name__}; Trainer hands a mapping to the model: let the collator make one"
        )
    return batches.size(batch)


def _by_rows(rows: int, samples: int) -> str:
    return f"the data collator makes {rows} rows of {samples} samples"


def _of_another_size(window: Batch, args: Any) -> InputError:
    return InputError(
        f"the largest step holds {batches.size(window)} samples, and the arguments say {samples_of(args)} (per_device_train_batch_size x "
        "gradient_accumulation_steps): give as many, or lower the arguments"
    )


def makes_own_sizes(trainer: Any) -> str:
    """Why a smaller `per_device_train_batch_size` would not make smaller batches, where the trainer has a loader of its own; "" where it would."""
    if trainer.get_train_dataloader.__module__.partition(".")[0] == "transformers":
        return ""
    args, own = trainer.args, trainer._train_batch_size  # noqa: SLF001 - Trainer reads its own copy
    given = args.per_device_train_batch_size
    try:
        args.per_device_train_batch_size, trainer._train_batch_size = 1, 1  # noqa: SLF001 - likewise
        with generators_kept():
            loader = trainer.get_train_dataloader()
    finally:
        args.per_device_train_batch_size, trainer._train_batch_size = given, own  # noqa: SLF001 - likewise
    made = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(loader, "batch_size", None)
    if made == 1:
        return ""
    return f"{type(trainer).__name__}.get_train_dataloader makes batches whose size per_device_train_batch_size does not set"


def samples_of(args: Any) -> int:
    """Samples in an optimizer step."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)
