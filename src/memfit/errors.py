"""Every exception memfit raises on purpose.

    MemfitError
    ├── InputError (also ValueError)
    │   ├── BudgetError
    │   ├── BatchError
    │   ├── ConfigError
    │   ├── PlanFileError
    │   └── SnapshotError
    ├── InfeasibleError
    ├── SplitError
    ├── CaptureError
    ├── NonFiniteLossError
    └── EngineError

The type is for programs, the message for people: what was asked, what is there, what is at fault, what to do next. Any other
exception that comes out of memfit is either the user's own, passed on unchanged, or a bug.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self


class MemfitError(Exception):
    """Base of all: catches whatever memfit raises on purpose, and nothing else."""


def in_words(error: BaseException) -> str:
    """What an exception says, in one line: any but memfit's own with its type, and all with the notes that they were given."""
    said = str(error) if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
    return "; ".join((said, *getattr(error, "__notes__", ())))


class InputError(MemfitError, ValueError):
    """An argument, a file or a batch handed in cannot be used as it is."""


class BudgetError(InputError):
    """A number of bytes cannot be read, or is not positive."""


class BatchError(InputError):
    """A batch has another structure than the one planned for, or is longer."""


class ConfigError(InputError):
    """A configuration names something that does not exist, lacks something, or contradicts itself."""


class PlanFileError(InputError):
    """A plan or trace file is damaged, of a format this version does not read, or belongs to another model."""


class SnapshotError(InputError):
    """Saved training state cannot be read back (truncated, checksum differs) or cannot be written (no space left)."""


class Remedy(NamedTuple):
    """A way out of a budget that is too small.

    Attributes:
        text: what to do, as the user would write it: 'allow=["bf16"]', or a statement before the call.
        saved_bytes: by how much at least it lowers the smallest budget that would do.
        extra_seconds: what it adds to a step of plain PyTorch; negative when it makes the step faster.
        kind: what it changes: "budget" (whose `saved_bytes` are bytes more), "micro_batches", "optimizer" or "batch"; "" for something else.
        arguments: of `memfit.plan` and `memfit.fit`, by name, in place of those given: the part of `text` that is an argument; None where there is none.
        settings: of a run file, as `--set` takes them: what does there the rest of `text`; None where nothing does.
    """

    text: str
    saved_bytes: int
    extra_seconds: float
    kind: str = ""
    arguments: Mapping[str, Any] | None = None
    settings: Sequence[str] | None = ()

    @classmethod
    def larger_budget(cls, budget: str, more_bytes: int, extra_seconds: float = 0.0, how: str = "") -> Self:
        """The budget that would do.

        Args:
            budget: as the argument has it.
            more_bytes: than were asked for.
            extra_seconds: as in the attributes.
            how: what the plan in it is made of; "" for nothing of note.
        """
        text = f'budget="{budget}"' + (f" ({how})" if how else "")
        return cls(text, more_bytes, extra_seconds, "budget", {"budget": budget})


class InfeasibleError(MemfitError):
    """No plan fits into the budget under the constraints given.

    Attributes:
        budget_bytes: what was asked.
        minimum_bytes: the smallest budget that would do; None when none was found.
        moment: when in the step the bytes run out.
        module: path of the module that sets the smallest peak; "" when it is none in particular.
        beside_bytes: of the smallest budget, what lies on the device beside model and step: workspaces of libraries, other tensors of this process.
        remedies: ways out, each tried: the budget that would do, then those that change results least first.
        weighed: what was considered and does not fit, each with its reason.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        minimum_bytes: int | None = None,
        moment: str = "",
        module: str = "",
        beside_bytes: int = 0,
        remedies: tuple[Remedy, ...] = (),
        weighed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.moment = moment
        self.module = module
        self.beside_bytes = beside_bytes
        self.remedies = remedies
        self.weighed = weighed

    @property
    def facts(self) -> dict[str, Any]:
        """All that it tells besides its message, as it was given."""
        return {
            "budget_bytes": self.budget_bytes,
            "minimum_bytes": self.minimum_bytes,
            "moment": self.moment,
            "module": self.module,
            "beside_bytes": self.beside_bytes,
            "remedies": self.remedies,
            "weighed": self.weighed,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is rebuilt from its message alone; this one must survive the way home from a worker.
        return partial(type(self), **self.facts), self.args


class SplitError(MemfitError):
    """A batch cannot be split into micro-batches without changing the result."""


class CaptureError(MemfitError):
    """A training step cannot be captured, so its bytes and seconds cannot be predicted."""


class NonFiniteLossError(MemfitError):
    """The loss is infinite or not a number; the optimizer step was not taken."""


class EngineError(MemfitError):
    """A step cannot continue as planned, for example a second backward through freed tensors."""
