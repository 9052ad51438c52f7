"""What one rank does with other people's means: DeepSpeed's stages 2 and 3, and a pipeline of `torch.distributed.pipelining` cut at equal parameters.

Both with torch's checkpoint around every block, or without. Bytes are metered as those of a plan's step are; what is there before the step is whatever the
arrangement has made and still holds, since DeepSpeed keeps flat copies of its own.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from sharding.arrangements import adamw, gpt, least_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memfit import dispatch
from memfit.meter import metered

# Elements in DeepSpeed's buckets: a block of this model has 198 thousand. Its own setting, 500 million, would be 2 GB of buffers beside a model of 4 MB.
BUCKET: Final = 200_000


class _Rebuilt(nn.Module):
    """A block under torch's checkpoint; in the form with a backward of its own where DeepSpeed needs that, as its stage 3 changes parameters in between."""

    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=self._reentrant, preserve_rng_state=False)
        return found


def _with_checkpoint(blocks: Any, *, reentrant: bool) -> None:
    for number, block in enumerate(blocks):
        blocks[number] = _Rebuilt(block, reentrant=reentrant)


class _Other:
    """An arrangement whose step is metered with all that it has made.

    Args:
        before: storages that were there before it was made; held, so that none of another tensor gets the identity of one.
    """

    def __init__(self, before: Mapping[int, torch.UntypedStorage]) -> None:
        self._before = before

    def step(self) -> None:
        """One."""
        raise NotImplementedError

    def peak(self) -> int:
        """Of one metered step."""
        present = [t for t in _tensors() if dispatch.storage_key(t) not in self._before]
        with metered(present) as reading:
            del present
            self.step()
        return reading.peak_bytes

    def close(self) -> None:
        """Nothing to undo."""


class DeepSpeed(_Other):
    """Stage 2 or 3, with torch's AdamW, buckets of a block, and nothing kept that can be let go."""

    def __init__(self, stage: int, *, rebuilds: bool) -> None:
        super().__init__(_storages())
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
        # Compiled at first use, for several ranks on one machine; gloo does it without.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        import deepspeed

        model, self.sample, self.loss_fn = gpt()
        if rebuilds:
            _with_checkpoint(model.blocks, reentrant=stage == 3)
        sharing = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        if stage == 3:
            sharing |= {
                "stage3_prefetch_bucket_size": BUCKET,
                "stage3_max_live_parameters": BUCKET,
                "stage3_max_reuse_distance": BUCKET,
                "stage3_param_persistence_threshold": 0,
            }
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": sharing,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        linear = functional.linear
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        # Stage 3 puts a function of its own in the place of torch's. Only its own steps are to run it, not those of a plan beside it.
        self._linear, functional.linear = functional.linear, linear

    def step(self) -> None:
        """One."""
        linear, functional.linear = functional.linear, self._linear
        try:
            self.engine.backward(self.loss_fn(self.engine, self.sample))
            self.engine.step()
        finally:
            functional.linear = linear


class _Stage(nn.Module):
    """Some blocks of the GPT, with its embeddings or its head where they are here."""

    def __init__(self, model: Any, begin: int, end: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[begin:end])
        self.token, self.position = (None, None) if begin else (model.token, model.position)
        self.norm, self.head = (model.norm, model.head) if end == len(model.blocks) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def equal_parameters(model: Any, stages: int) -> list[tuple[int, int]]:
    """The blocks of each stage, cut where the parameters of the fullest stage are fewest; embeddings are with the first block, norm and head with the last."""
    counts = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    counts[0] += sum(p.numel() for part in (model.token, model.position) for p in part.parameters())
    counts[-1] += sum(p.numel() for part in (model.norm, model.head) for p in part.parameters())

    def cut(begin: int, left: int) -> tuple[int, list[tuple[int, int]]]:
        if left == 1:
            return sum(counts[begin:]), [(begin, len(counts))]
        return min(
            (max(sum(counts[begin:end]), most), [(begin, end), *rest])
            for end in range(begin + 1, len(counts) - left + 2)
            for most, rest in [cut(end, left - 1)]
        )

    return cut(0, stages)[1]


class EqualParameters(_Other):
    """1F1B over stages with equal parameters, twice as many micro-batches as ranks, over the batches of all ranks."""

    def __init__(self, *, rebuilds: bool, size: str = "small") -> None:
        super().__init__(_storages())
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        ranks, self._rank = dist.get_world_size(), dist.get_rank()
        built: tuple[Any, Any, Any] = gpt(size)
        model, sample, _ = built
        begin, end = equal_parameters(model, ranks)[self._rank]
        module = _Stage(model, begin, end)
        if rebuilds:
            _with_checkpoint(module.blocks, reentrant=False)
        ids, targets = sample.values() if isinstance(sample, Mapping) else sample
        self._ids, self._targets = ids.repeat(ranks, 1), targets.repeat(ranks, 1)
        self._is_last, parts = end == len(model.blocks), 2 * ranks
        del model
        self.optimizer = adamw(module.parameters())
        stage = PipelineStage(module, self._rank, ranks, torch.device("cpu"))
        self._schedule: Any = Schedule1F1B(stage, parts, loss_fn=_loss)

    def step(self) -> None:
        """One."""
        losses: list[Tensor] = []
        inputs = () if self._rank else (self._ids,)
        target = self._targets if self._is_last else None
        self._schedule.step(*inputs, target=target, losses=losses if self._is_last else None, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _tensors() -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from libraries' lazy modules, when they are asked for their type
        return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]


def _storages() -> dict[int, torch.UntypedStorage]:
    return {dispatch.storage_key(t): t.untyped_storage() for t in _tensors()}


OTHERS: Final[Mapping[str, tuple[str, Any]]] = {
    "DeepSpeed stage 2": ("zero2", lambda: DeepSpeed(2, rebuilds=False)),
    "DeepSpeed stage 2, every block": ("zero2", lambda: DeepSpeed(2, rebuilds=True)),
    "DeepSpeed stage 3": ("zero3", lambda: DeepSpeed(3, rebuilds=False)),
    "DeepSpeed stage 3, every block": ("zero3", lambda: DeepSpeed(3, rebuilds=True)),
    "equal parameters, 1F1B": ("1f1b", lambda: EqualParameters(rebuilds=False)),
    "equal parameters, 1F1B, every block": ("1f1b", lambda: EqualParameters(rebuilds=True)),
}


def peaks(rank: int) -> dict[str, int]:
    """Of each of them."""
    del rank
    warnings.simplefilter("ignore")  # others' deprecations
    found = {}
    for name, (_, make) in OTHERS.items():
        arranged = make()
        arranged.step()
        arranged.step()
        found[name] = least_of(arranged.peak)
    return found
