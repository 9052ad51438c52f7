"""A sample of one optimizer step of a Trainer, of the largest shape that its data can give."""

from __future__ import annotations

from typing import Any, Final

from memfit.batches import Batch
from memfit.integrations.window import OtherBatches, batches_of
from memfit.step.process_generators import generators_kept

# Entry of a sample: Trainer's count of what the losses are divided by.
ITEMS: Final = "num_items_in_batch"


def windows_of(trainer: Any) -> tuple[Batch, OtherBatches]:
    """The largest batch of as many samples as an optimizer step takes, collated as the trainer does, and others that may come.

    Generators are left as they were: a dataset may draw.

    Raises:
        InputError: the data cannot be looked through.
    """
    with generators_kept():
        return batches_of(trainer.get_train_dataloader(), samples_of(trainer.args))


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
