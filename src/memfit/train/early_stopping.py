"""Ending a run when evaluations get no better: which one was the best, and how many came after it.

Torch-free: the section of a run file, and the count. The loop evaluates, saves the best state and goes back to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from memfit.errors import ConfigError

Metric = Literal["validation_loss", "validation_accuracy"]
IN_WORDS: Final[Mapping[str, str]] = {
    "validation_loss": "validation loss",
    "validation_accuracy": "validation accuracy",
}


@dataclass(frozen=True, slots=True)
class EarlyStoppingConfig:
    """Training ends when evaluations (`train.eval_every`) get no better. The snapshot of the best one is kept, and the model that is written is that one's.

    Attributes:
        patience: evaluations in a row without improvement after which training ends.
        min_delta: an improvement is a change by more than this.
        metric: what has to improve: validation_loss falls, validation_accuracy (of a classifier, 0 to 1) rises.
    """

    patience: int = 3
    min_delta: float = 0.0
    metric: Metric = "validation_loss"

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"early_stopping.patience: {self.patience} is less than 1")
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"early_stopping.min_delta: {self.min_delta} is no change: write 0 or more")


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run.

    Attributes:
        metric: what was compared.
        value: of it.
        step: optimizer steps before it.
    """

    metric: str
    value: float
    step: int

    def __str__(self) -> str:
        shown = f"{100 * self.value:.1f} %" if self.metric == "validation_accuracy" else f"{self.value:.4f}"
        return f"{IN_WORDS[self.metric]} {shown} after step {self.step}"


class EarlyStopping:
    """Counts evaluations.

    Attributes:
        settings: of the run.
        best: the best evaluation so far; None before the first with a finite value.
        misses: evaluations since then.
    """

    def __init__(self, settings: EarlyStoppingConfig) -> None:
        self.settings = settings
        self.best: Best | None = None
        self.misses = 0

    def take(self, step: int, value: float) -> bool:
        """Count an evaluation after `step` optimizer steps; whether it is the best so far. One that is not finite is no improvement."""
        falls = self.settings.metric == "validation_loss"
        better = math.isfinite(value) and (
            self.best is None
            or (self.best.value - value if falls else value - self.best.value) > self.settings.min_delta
        )
        if better:
            self.best = Best(self.settings.metric, value, step)
        self.misses = 0 if better else self.misses + 1
        return better

    @property
    def over(self) -> bool:
        """Whether training is to end."""
        return self.misses >= self.settings.patience

    def reason(self) -> str:
        """Why it ended, in words."""
        count = self.misses
        by = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        return f"no better {IN_WORDS[self.settings.metric]}{by} in {count} evaluation{'s' if count != 1 else ''}"

    def state(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {"best": None if self.best is None else asdict(self.best), "misses": self.misses}

    def set_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on counting where a snapshot was taken; anew where that run compared another metric, or none."""
        best = None if state is None else state["best"]
        if state is None or (best is not None and best["metric"] != self.settings.metric):
            return
        self.best = None if best is None else Best(**best)
        self.misses = state["misses"]
