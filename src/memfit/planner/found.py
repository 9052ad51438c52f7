"""What a search has found so far: plans not yet put into words, and candidates rejected, each with its kind of reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.techniques.choices import Choices, named
from memfit.units import format_bytes, format_seconds

# A candidate with more techniques must be faster by this factor: with fewer, results are closer to those of plain PyTorch (a single batch is bit-equal).
WORTH_MORE: Final = 1.01
# Share of a step that getting large blocks from the system has to take, for more micro-batches to be looked at where nothing is dropped: results are no longer
# bit-equal then, and predicted seconds are not known to fewer percent.
WORTH_DIVIDING: Final = 0.03


class Reason(StrEnum):
    """Why something was rejected."""

    NOT_OFFERED = "not_offered"  # the model, the optimizer or the request rule it out
    NOTHING_TO_OFFLOAD = "nothing_to_offload"
    DOES_NOT_SPLIT = "does_not_split"
    CANNOT_WIN = "cannot_win"  # a bound rules it out before it is captured
    CANNOT_RUN = "cannot_run"
    DOES_NOT_FIT = "does_not_fit"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate that was considered and not taken.

    Attributes:
        what: the candidate in words.
        kind: of the reason.
        why: the reason in words.
    """

    what: str
    kind: Reason
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.what else self.why


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits, not yet put into words.

    Attributes:
        candidate: its techniques, with one micro-batch.
        number: of micro-batches.
        solver: for its trace.
        solution: what is recomputed and offloaded.
    """

    candidate: Choices
    number: int
    solver: Solver
    solution: Solution

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return self.solver.trace.planned_step_seconds + self.solver.trace.micro_batches * self.solution.seconds

    def worth_no_more(self) -> bool:
        """Whether recomputation and offloading cost so little in this plan that avoiding them would not be worth another choice."""
        return self.solver.trace.micro_batches * self.solution.seconds <= (WORTH_MORE - 1) * self.seconds

    def waits_for_blocks(self) -> bool:
        """Whether large blocks, which come from the system anew each time, take so much of a step that smaller ones may be worth another choice."""
        trace = self.solver.trace
        return trace.micro_batches * trace.fresh_memory_seconds > WORTH_DIVIDING * self.seconds

    def slower(self) -> Rejection:
        """Why it is not taken."""
        why = f"not faster, {format_seconds(self.seconds)} a step at {format_bytes(self.solution.peak)}"
        return Rejection(named(self.candidate, self.number), Reason.SLOWER, why)
