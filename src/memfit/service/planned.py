"""What is known of a run before it starts: its bytes on each device and tier, and how long it will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.values.plan import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """The figures of a plan.

    Attributes:
        budget_bytes: that it was made for.
        peak_bytes: predicted, on the fullest device.
        plain_peak_bytes: that plain PyTorch would take.
        rank_bytes: predicted, of each rank.
        tiers: bytes on lower tiers, by name.
        device: kind of the devices: "cpu" or "cuda".
        step_seconds: of one optimizer step, predicted.
        plain_step_seconds: of plain PyTorch.
        total_steps: that the run takes; None where that was not told.
        startup_seconds: from the start of its process to its first step, as long as planning took.
    """

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    rank_bytes: tuple[int, ...]
    tiers: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    step_seconds: float = 0.0
    plain_step_seconds: float = 0.0
    total_steps: int | None = None
    startup_seconds: float = 0.0

    @classmethod
    def of(cls, plan: Plan, *, total_steps: int | None, startup_seconds: float) -> Planned:
        """The figures of one plan."""
        prediction = plan.prediction
        return cls(
            budget_bytes=plan.budget_bytes,
            peak_bytes=prediction.peak_bytes,
            plain_peak_bytes=prediction.plain_peak_bytes,
            rank_bytes=tuple(rank.peak_bytes for rank in prediction.by_rank),
            tiers={use.tier: use.all_bytes for use in prediction.tiers},
            device=plan.device_kind,
            step_seconds=prediction.step_seconds,
            plain_step_seconds=prediction.plain_step_seconds,
            total_steps=total_steps,
            startup_seconds=startup_seconds,
        )

    def seconds(self, done_steps: int = 0) -> float:
        """That a run takes from its start, after so many steps are done."""
        return self.startup_seconds + max(0, (self.total_steps or 0) - done_steps) * self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Planned:
        """Inverse of `to_json`."""
        return cls(**{**data, "rank_bytes": tuple(data["rank_bytes"])})
