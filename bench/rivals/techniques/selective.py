"""Selective checkpoint contexts: blocks are run again, but for matrix products, whose results are kept; or for every second one, as torchtitan does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit import batches
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

from .checkpoint_blocks import checkpointed

NAME = "torch selective checkpoint"
PACKAGE = INSTALL = None
NOTE = "torchtitan's rule keeps every second matrix product and all attention kernels."

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_DEAR = {
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
}


def obstacle(subject: Subject) -> str | None:
    return None if subject.blocks else "the model has no blocks"


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return [("save products", _arrange(every=1)), ("save every second product", _arrange(every=2))]


class _Policy:
    """Keep the result of each product, or of every second; all else is made again. Forward and recomputation each count their own."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen = {True: 0, False: 0}

    def __call__(self, context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if func in _DEAR:
            return CheckpointPolicy.MUST_SAVE
        if func not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.seen[context.is_recompute] += 1
        left_out = self.every == 2 and self.seen[context.is_recompute] % 2 == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if left_out else CheckpointPolicy.MUST_SAVE


def _contexts(every: int) -> Any:
    return create_selective_checkpoint_contexts(_Policy(every))


def _arrange(every: int) -> Arrange:
    def arrange(subject: Subject, built: Built) -> Loss:
        for block in subject.block_list(built[0]):
            block.forward = checkpointed(block.forward, context_fn=partial(_contexts, every))
        return lambda: batches.loss_of(*built)

    return arrange
