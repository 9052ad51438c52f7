"""Chunked loss: the logits of a large vocabulary a few rows at a time, so that they are never all in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

from memfit.techniques.technique import LossHead, Offer, OptimisticBound, StepFacts, Subject, Technique

CHUNKS: Final = (8, 64)  # worth weighing: the first saves most of what there is to save
FEWEST_ROWS: Final = 16  # of a chunk: smaller products take longer


class ChunkedLoss(Technique):
    """Setting: parts in which the rows of the loss head are taken, one after the other; 1 for all at once."""

    name = "loss_chunks"
    baseline = 1
    reorders = True
    page = "techniques/loss-head.md"
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "the loss head in {setting} chunks: the model would have to do it itself"
    }

    def words(self, setting: int) -> str:
        """As in: loss head in 8 chunks."""
        return f"loss head in {setting} chunks"

    def claim(self, without: StepFacts, used: StepFacts, setting: int) -> tuple[int, str]:
        """All but one chunk of what is as large as the logits."""
        del used
        whole = without.head.bytes if without.head is not None else 0
        return whole - whole // setting, "all but one chunk of what is as large as the logits"

    def offer(self, subject: Subject) -> Offer:
        """Where a cross entropy of what a linear layer makes is taken; weighed where it sets the peak and results may be added up in another order."""
        if subject.facts is None:
            return Offer()
        head = subject.facts.head
        if head is None:
            return Offer(why_not="this step takes no cross entropy of what a linear layer makes")
        chunks = subject.fixed.get("loss_chunks", 1)
        own = (chunks,) if isinstance(chunks, int) and 1 < chunks <= head.rows else ()
        to_the_bit = subject.fixed.get("micro_batches") == 1
        worth = worth_weighing(head) if subject.head_sets_peak and not to_the_bit else ()
        return Offer(tuple(dict.fromkeys((*own, *worth))), why_not=f"its loss head has {head.rows} rows")

    def conflict(self, setting: int, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Gradients are made before the scaler's factor is known."""
        del setting, clips
        if used.get("precision") == "fp16":
            return "in fp16 gradients are scaled before they are rounded, and a loss head in chunks makes its own before backward brings the scale: take bf16"
        return None

    def bound(self, facts: StepFacts) -> OptimisticBound | None:
        """All that is as large as the logits, while it is there; what stays in the cache may take no time."""
        head = facts.head
        if head is None:
            return None
        return OptimisticBound(head.bytes, -facts.micro_batches * head.seconds, within=(head.first, head.last))

    def goes_beyond(self, setting: int, known: int) -> bool:
        """More chunks go beyond fewer."""
        return setting > known

    def bound_beyond(self, facts: StepFacts, known: int) -> OptimisticBound:
        """One chunk of so many, in a batch that is not divided."""
        whole = 0 if facts.head is None else facts.head.bytes * facts.micro_batches
        return OptimisticBound(-(-whole // known), 0.0)

    def region(self, model: Any, setting: int, device_type: str) -> AbstractContextManager[object]:
        """What the model's head returns is a placeholder for the logits, and cross entropy of it takes their rows in chunks."""
        del device_type
        from memfit.techniques.chunked_loss.head import chunked_head

        return chunked_head(model, setting)


def worth_weighing(head: LossHead) -> tuple[int, ...]:
    """In how many chunks the rows may be taken with profit."""
    return tuple(number for number in CHUNKS if head.rows >= number * FEWEST_ROWS)


CHUNKED_LOSS = ChunkedLoss()
