"""A chain of stages, and what running a schedule on it takes.

Stages count from 0. Stage i reads value i and makes value i + 1; value 0 is the input of the chain. All bytes are bytes, all times seconds; parameters,
their gradients and optimizer state are not part of a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of a chain.

    Attributes:
        forward_seconds: time of its forward, the same whatever is kept of it.
        backward_seconds: time of its backward.
        output_bytes: the value it makes.
        saved_bytes: all that its backward needs besides its input; the output is counted in.
        gradient_bytes: the gradient of the value it makes.
        forward_overhead_bytes: alive only while its forward runs.
        backward_overhead_bytes: alive only while its backward runs, besides both gradients and what was saved.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be zero or more.")
        if self.saved_bytes < self.output_bytes:
            raise ValueError(f"saved_bytes ({self.saved_bytes}) counts the output of {self.output_bytes} bytes in.")


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that read each other's outputs, the last of which makes the loss.

    Attributes:
        stages: in order of execution.
        input_bytes: value 0, in memory from the start until the backward of stage 0.
        input_gradient_bytes: the gradient of value 0; zero where none is wanted.
    """

    stages: tuple[ChainStage, ...]
    input_bytes: int
    input_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("A chain needs at least one stage.")
        if self.input_bytes < 0 or self.input_gradient_bytes < 0:
            raise ValueError(
                f"Negative bytes: {self.input_bytes} of input, {self.input_gradient_bytes} of its gradient."
            )

    def value_bytes(self, i: int) -> int:
        """Bytes of value i, what stage i reads."""
        return self.stages[i - 1].output_bytes if i else self.input_bytes

    def gradient_bytes(self, i: int) -> int:
        """Bytes of the gradient of value i."""
        return self.stages[i - 1].gradient_bytes if i else self.input_gradient_bytes


class OperationKind(StrEnum):
    """What a schedule can do with a stage; the names are rotor's F_none, F_ck, F_all and B."""

    FORWARD_NONE = "forward, drop the input"
    FORWARD_CHECKPOINT = "forward, keep the input"
    FORWARD_ALL = "forward, keep the input and all that backward needs"
    BACKWARD = "backward, drop the input and what was saved"


class ChainOperation(NamedTuple):
    """One operation of a schedule."""

    kind: OperationKind
    stage: int


class ChainRun(NamedTuple):
    """What running a schedule takes, the input of the chain counted in."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChainSchedule:
    """A schedule and what it takes, as `simulate_chain` finds it."""

    operations: tuple[ChainOperation, ...]
    peak_bytes: int
    seconds: float


class Memory(NamedTuple):
    """What is in memory between operations. Sets of small numbers are bits of an integer."""

    values: int  # Values held by themselves, not as the output among what a stage saved.
    saved: int  # Stages of which all that backward needs is held.
    gradient: int  # The value whose gradient is held.
    held_bytes: int


def initial_memory(chain: Chain) -> Memory:
    """Before the first operation: the input of the chain."""
    return Memory(values=1, saved=0, gradient=len(chain.stages), held_bytes=chain.input_bytes)


def obstacle(memory: Memory, operation: ChainOperation) -> str | None:
    """Why this operation cannot run now; None if it can."""
    kind, i = operation
    by_itself = memory.values >> i & 1
    if not (by_itself or (i and memory.saved >> (i - 1) & 1)):
        return f"value {i} is not in memory"
    if kind is OperationKind.BACKWARD:
        if memory.gradient != i + 1:
            return f"the gradient in memory is that of value {memory.gradient}"
        return None if memory.saved >> i & 1 else "what it saves is not in memory"
    if i >= memory.gradient:
        return "its backward is done"
    if (memory.values >> (i + 1) | memory.saved >> i) & 1:
        return f"value {i + 1} is in memory already"
    if kind is OperationKind.FORWARD_NONE and not by_itself:
        return f"value {i} belongs to what stage {i - 1} saved, so it cannot be dropped"
    return None


def run(chain: Chain, memory: Memory, operation: ChainOperation) -> tuple[Memory, int]:
    """The memory after an operation that can run, and the bytes at its fullest moment."""
    kind, i = operation
    stage = chain.stages[i]
    values, saved, gradient, held = memory
    match kind:
        case OperationKind.BACKWARD:
            # The gradient of the loss is made by whoever starts backward, so it is not held before.
            made = chain.gradient_bytes(i) + (stage.gradient_bytes if gradient == len(chain.stages) else 0)
            peak = held + made + stage.backward_overhead_bytes
            held += made - stage.gradient_bytes - stage.saved_bytes
            if values >> i & 1:
                held -= chain.value_bytes(i)
            return Memory(values & ~(1 << i), saved & ~(1 << i), i, held), peak
        case OperationKind.FORWARD_ALL:
            held += stage.saved_bytes
            return Memory(values, saved | 1 << i, gradient, held), held + stage.forward_overhead_bytes
        case _:
            held += stage.output_bytes
            peak = held + stage.forward_overhead_bytes
            values |= 1 << (i + 1)
            if kind is OperationKind.FORWARD_NONE:
                values &= ~(1 << i)
                held -= chain.value_bytes(i)
            return Memory(values, saved, gradient, held), peak


def simulate_chain(chain: Chain, operations: Iterable[ChainOperation]) -> ChainRun:
    """Run a schedule on the model of the chain.

    Every operation holds its inputs, its results and its overhead at once, besides all that is held for later.

    Raises:
        ValueError: an operation lacks what it needs or makes what is there, or the backward of a stage never runs.
    """
    memory = initial_memory(chain)
    peak_bytes, seconds = memory.held_bytes, 0.0
    for number, operation in enumerate(operations):
        if not 0 <= operation.stage < len(chain.stages):
            raise ValueError(f"Operation {number}: the chain has no stage {operation.stage}.")
        reason = obstacle(memory, operation)
        if reason:
            raise ValueError(f"Operation {number}, {operation.kind.name} of stage {operation.stage}: {reason}.")
        memory, moment_bytes = run(chain, memory, operation)
        peak_bytes = max(peak_bytes, moment_bytes)
        seconds += operation_seconds(chain, operation)
    if memory.gradient:
        raise ValueError(f"The schedule ends before the backward of stage {memory.gradient - 1}.")
    return ChainRun(peak_bytes, seconds)


def operation_seconds(chain: Chain, operation: ChainOperation) -> float:
    """Of one operation."""
    stage = chain.stages[operation.stage]
    return stage.backward_seconds if operation.kind is OperationKind.BACKWARD else stage.forward_seconds


def schedule_of(chain: Chain, operations: Sequence[ChainOperation]) -> ChainSchedule:
    """Operations with what they take."""
    return ChainSchedule(tuple(operations), *simulate_chain(chain, operations))
