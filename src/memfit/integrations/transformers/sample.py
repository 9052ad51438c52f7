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


def samples_of(args: Any) -> int:
    """Samples in an optimizer step."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)
