"""The batch rule: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, and what is inferred when some are left out.

As DeepSpeed infers: two give the third by whole divisions, which must come out even; one alone means a single micro-batch per step. "auto" differs
from left out only where one alone is known: it leaves the split (or the batch) open instead of taking a single micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memfit.errors import ConfigError
from memfit.integrations.deepspeed.values import AUTO, Auto

TRAIN: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
ACCUMULATION: Final = "gradient_accumulation_steps"
RULE: Final = f"{TRAIN} = {MICRO} * {ACCUMULATION} * ranks"

Count = int | Auto | None


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """What one optimizer step takes.

    Attributes:
        train: samples per optimizer step, of all ranks.
        micro: samples per forward and rank.
        accumulation: micro-batches per optimizer step and rank.
    """

    train: int | Auto
    micro: int | Auto
    accumulation: int | Auto


def infer(train: Count, micro: Count, accumulation: Count, world_size: int) -> BatchSizes:
    """The three sizes from those that are given.

    Args:
        train, micro, accumulation: whole numbers, AUTO, or None where left out.
        world_size: ranks that share a batch.

    Raises:
        ConfigError: too few are given, one is not positive, or they do not multiply.
    """
    if isinstance(train, int) and isinstance(micro, int) and not isinstance(accumulation, int):
        if micro > 0:  # or the check below says so
            accumulation = train // micro // world_size
    elif isinstance(train, int) and isinstance(accumulation, int) and not isinstance(micro, int):
        if accumulation > 0:
            micro = train // world_size // accumulation
    elif isinstance(micro, int) and isinstance(accumulation, int) and not isinstance(train, int):
        train = micro * accumulation * world_size
    elif AUTO in (micro, accumulation) and isinstance(train, int):
        micro = accumulation = AUTO
    elif accumulation is AUTO and isinstance(micro, int):
        train = AUTO
    elif isinstance(train, int) and not isinstance(micro, int):
        micro, accumulation = train // world_size, 1
    elif isinstance(micro, int) and not isinstance(train, int):
        train, accumulation = micro * world_size, 1
    elif AUTO in (train, micro):
        train, micro = AUTO, AUTO
        accumulation = AUTO if accumulation is None else accumulation
    elif train is None:
        raise ConfigError(f"{TRAIN} or {MICRO} is missing, and the batch cannot be known without: {RULE}")
    sizes = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    for name, value in sizes.items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(
                f"{name}: {value} is less than 1, given or inferred ({_written(sizes, world_size)}; {RULE})"
            )
    assert train is not None
    assert micro is not None
    assert accumulation is not None
    if (
        isinstance(train, int)
        and isinstance(micro, int)
        and isinstance(accumulation, int)
        and train != micro * accumulation * world_size
    ):
        raise ConfigError(
            f"{TRAIN}: {train} is not {micro} * {accumulation} * {world_size} ({RULE}): change one of them"
        )
    return BatchSizes(train, micro, accumulation)


def _written(sizes: dict[str, Count], world_size: int) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items()) + f", {world_size} ranks"
