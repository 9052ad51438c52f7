"""A sample of one optimizer step of a Trainer, of the largest shape that its data can give."""

from __future__ import annotations

from typing import Any, Final

from memfit.batches import Batch
from memfit.train import state
from memfit.train.window import largest_samples

# Entry of a sample: Trainer's count of what the losses are divided by.
ITEMS: Final = "num_items_in_batch"


def largest_window(trainer: Any) -> Batch:
    """A batch of as many samples as an optimizer step takes, collated as the trainer does; generators are left as they were: a dataset may draw.

    Raises:
        InputError: the data cannot be looked through.
    """
    generators = state.generators()
    try:
        loader = trainer.get_train_dataloader()
        chosen = largest_samples(loader.dataset, samples_of(trainer.args))
        return loader.collate_fn([loader.dataset[index] for index in chosen])
    finally:
        state.set_generators(generators)


def samples_of(args: Any) -> int:
    """Samples in an optimizer step."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)
