"""The batch rule: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, and what is inferred when some are left out.

As DeepSpeed infers: two give the third by whole divisions, which must come out even; one alone means a single micro-batch per step. "auto" differs
from left out only where one alone is known: it leaves the split (or the batch) open instead of taking a single micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.integrations.deepspeed.values import AUTO, Auto, ConfigReader, convert

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


def read_batch(given: Mapping[str, Any], reader: ConfigReader, world_size: int) -> BatchSizes:
    """The sizes that the file gives or leaves to be inferred.

    Raises:
        ConfigError: as for `infer`; or the loop, or ranks that share a sequence, would decide what a step takes.
    """
    if given.get("managed_gradient_accumulation", True) is not True:
        raise ConfigError(
            "managed_gradient_accumulation: memfit's step takes the whole batch, so where a step ends cannot be left to the loop"
        )
    ranks = convert(int | None, given.get("sequence_parallel_size"), "sequence_parallel_size", quoted=False)
    if ranks not in (None, 1):
        raise ConfigError("sequence_parallel_size: memfit trains on one device, which has sequences whole")
    train, micro, accumulation = (
        convert(int | Auto | None, given.get(name), name, quoted=False) for name in (TRAIN, MICRO, ACCUMULATION)
    )
    sizes = infer(train, micro, accumulation, world_size)
    if sizes.accumulation != 1:
        reader.notices.append(
            "gradient_accumulation_steps: micro-batches count for what the loss averages over (samples, or tokens that are not masked), where DeepSpeed "
            "counts each alike; the same where each holds as much"
        )
    return sizes


def micro_batches(sizes: BatchSizes, samples: int | None, ranks: int = 1) -> int | None:
    """Micro-batches in a step of one rank; None where the planner is to choose.

    Args:
        sizes: that the configuration gives.
        samples: in the batch that is planned for, that of one rank; None where that is not known yet.
        ranks: that share a batch.

    Raises:
        ConfigError: the configuration is for a batch of another size.
    """
    if samples is not None and isinstance(sizes.train, int) and samples * ranks != sizes.train:
        each = "" if ranks == 1 else f" on each of {ranks} ranks"
        raise ConfigError(
            f"{TRAIN}: the configuration takes {sizes.train} samples a step and the sample holds {samples}{each}: "
            "give a sample of a whole step, or change the configuration"
        )
    if isinstance(sizes.accumulation, int):
        return sizes.accumulation
    if samples is None or not isinstance(sizes.micro, int):
        return None
    if samples % sizes.micro:
        raise ConfigError(
            f"{MICRO}: a batch of {samples} samples cannot be taken {sizes.micro} at a time: change one of them"
        )
    return samples // sizes.micro
