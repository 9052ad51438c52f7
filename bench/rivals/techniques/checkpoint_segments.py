"""`torch.utils.checkpoint` around stretches of blocks: about sqrt(n) of them, and the last one left free, as `checkpoint_sequential` does."""

from __future__ import annotations

from math import sqrt
from typing import Any

from torch import nn

from memfit import batches
from memfit.planner.baselines.segment_rules import sqrt_segments
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

from .checkpoint_blocks import checkpointed

NAME = "torch checkpoint, segments"
PACKAGE = INSTALL = None
NOTE = "About sqrt(n) segments of n blocks (Chen et al. 2016)."


def obstacle(subject: Subject) -> str | None:
    return None if subject.chain else "its blocks are no chain, so neighbours cannot be joined"


def settings(subject: Subject) -> list[tuple[str, Arrange]]:
    count = len(subject.block_list(subject.build()[0]))
    return [
        (f"{round(sqrt(count))} segments", _arrange(free_last=False)),
        ("the last one free", _arrange(free_last=True)),
    ]


class _Segment(nn.Module):
    """Blocks called one after another, with whatever else the model hands to each of them."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


class _Nothing(nn.Module):
    """Stands where a block was that a segment has taken in; models that count their blocks still find as many."""

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return x


def _arrange(*, free_last: bool) -> Arrange:
    def arrange(subject: Subject, built: Built) -> Loss:
        (holder,) = subject.holders(built[0])
        blocks = list(holder)  # type: ignore[call-overload]
        starts = sqrt_segments(len(blocks))
        for start, end in zip(starts, (*starts[1:], len(blocks)), strict=True):
            segment = _Segment(blocks[start:end])
            if not (free_last and end == len(blocks)):
                segment.forward = checkpointed(segment.forward)  # type: ignore[method-assign]
            holder[start] = segment
            for place in range(start + 1, end):
                holder[place] = _Nothing()
        return lambda: batches.loss_of(*built)

    return arrange
