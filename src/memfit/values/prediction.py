"""What a step will take: bytes over time, seconds, copies; and what single modules and techniques have to do with it. Values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.units import format_bytes
from memfit.values.script import TIERS


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a plan needs of one lower tier.

    Attributes:
        tier: "host" or "disk".
        bytes: of activations, on that tier when forward ends.
        copy_seconds: in a step, in which the link to the tier is busy.
        exposed_seconds: of these, in which computing waits.
        state_bytes: of optimizer state that is offloaded to it.
        layer_bytes: of streamed layers: their parameters, and their gradients where they wait there for the norm of all.
    """

    tier: str
    bytes: int
    copy_seconds: float
    exposed_seconds: float
    state_bytes: int = 0
    layer_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """Everything that is on the tier at once."""
        return self.bytes + self.state_bytes + self.layer_bytes

    @property
    def contents(self) -> str:
        """What is on the tier, in words."""
        parts = (("layers", self.layer_bytes), ("optimizer state", self.state_bytes), ("activations", self.bytes))
        return ", ".join(f"{format_bytes(size)} of {what}" for what, size in parts if size)

    @property
    def hidden_share(self) -> float:
        """The part of the copying that overlaps with computing."""
        return 1 - self.exposed_seconds / self.copy_seconds if self.copy_seconds else 1.0


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """What a step will take on one of several devices.

    Attributes:
        rank: position of the device in the plan's topology.
        peak_bytes: largest number of bytes held at once there.
        step_seconds: of a step, waiting for other devices included.
        stage: of the pipeline, that it runs; 0 where there is none.
        waiting: the share of the passes of all micro-batches in which it waits for other stages (the bubble); 0 where there is no pipeline.
    """

    rank: int
    peak_bytes: int
    step_seconds: float
    stage: int = 0
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step will take.

    Attributes:
        peak_bytes: largest number of bytes held at once, of the budget's device.
        plain_peak_bytes: the same without a plan.
        plain_with: what the figures without a plan have all the same, as it was fixed: techniques and micro-batches in words; empty for plain PyTorch.
        step_seconds, plain_step_seconds: one optimizer step, with and without the plan.
        bound_seconds: no plan in these bytes (with these micro-batches) takes less.
        seconds_are: "measured" (operation by operation, on this device) or "estimated" (from a device's data sheet).
        peak_phase, peak_module, peak_operation: where the peak is.
        categories_at_peak: bytes by category there.
        curve: bytes by category at chosen moments of the step, under the plan; `moments` are their positions, `plain_curve` the plain totals there.
        copy_seconds: in a step, in which links to lower tiers are busy, added up over links.
        exposed_seconds: of these, in which computing waits; the rest overlaps with it.
        tiers: activation offloading, by tier.
        varies_bytes: where random numbers decide sizes, how far apart the peaks of the draws seen lie: `peak_bytes` is the largest of them, and as much
            is kept free above it.
        allocated_bytes, reserved_bytes: on a GPU, what its allocator is likely to count (`torch.cuda.max_memory_allocated` and `max_memory_reserved`): blocks,
            which may be larger than the tensors in them, and the segments that these are in. 0 elsewhere.
        ranks: of each of several devices; empty for one. The other fields are then those of the fullest rank, the seconds those of the slowest.
    """

    peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    plain_step_seconds: float
    bound_seconds: float
    seconds_are: str
    peak_phase: str = ""
    peak_module: str = ""
    peak_operation: str = ""
    categories_at_peak: Mapping[str, int] = field(default_factory=dict)
    moments: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    curve: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plain_curve: tuple[int, ...] = ()
    copy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    varies_bytes: int = 0
    tiers: tuple[TierUse, ...] = ()
    plain_with: str = ""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    ranks: tuple[RankPrediction, ...] = ()

    @property
    def by_rank(self) -> tuple[RankPrediction, ...]:
        """Of every device, also where there is one."""
        return self.ranks or (RankPrediction(0, self.peak_bytes, self.step_seconds),)

    @property
    def slowdown(self) -> float:
        """Seconds of a step divided by those of plain PyTorch."""
        return self.step_seconds / self.plain_step_seconds if self.plain_step_seconds else 1.0

    @property
    def hidden_share(self) -> float:
        """The share of copying seconds that overlap with computing; 1 where nothing is copied."""
        return 1 - self.exposed_seconds / self.copy_seconds if self.copy_seconds else 1.0


@dataclass(frozen=True, slots=True)
class ModuleSaving:
    """What a plan does in one module.

    Attributes:
        module: path.
        kept_bytes, dropped_bytes: of what autograd saves there.
        recompute_seconds: spent running operations of this module again, per micro-batch.
        swapped_bytes: offloaded to lower tiers and copied back.
    """

    module: str
    kept_bytes: int
    dropped_bytes: int
    recompute_seconds: float
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Saving:
    """What one technique takes off the peak of a step in which nothing is dropped, its cost, and the saving that is commonly claimed for it.

    Attributes:
        technique: its name, as in `allow=` or as the argument that asks for it.
        claimed_bytes: by the formula that is usually given for it.
        predicted_bytes: the peak without it less the peak with it, all other techniques of the plan used in both.
        claim: the formula, in words.
        seconds: that a step takes longer for it, before anything is dropped; negative where it is faster.
    """

    technique: str
    claimed_bytes: int
    predicted_bytes: int
    claim: str = ""
    seconds: float = 0.0


def is_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_prediction(prediction: Prediction) -> None:
    """Raise ValueError where a prediction read from JSON cannot be one."""
    for name in ("peak_bytes", "plain_peak_bytes"):
        value = getattr(prediction, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{name} is {value!r}")
    for name in ("varies_bytes", "allocated_bytes", "reserved_bytes"):
        value = getattr(prediction, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    for name in ("step_seconds", "plain_step_seconds", "bound_seconds", "copy_seconds", "exposed_seconds"):
        value = getattr(prediction, name)
        if not is_number(value) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    for use in prediction.tiers:
        if use.tier not in TIERS or not all(
            is_number(n) for n in (use.bytes, use.copy_seconds, use.exposed_seconds, use.state_bytes, use.layer_bytes)
        ):
            raise ValueError(f"{use!r} is among its tiers")
    if not isinstance(prediction.categories_at_peak, Mapping) or not all(
        is_number(n) for n in prediction.categories_at_peak.values()
    ):
        raise ValueError(f"categories_at_peak is {prediction.categories_at_peak!r}")
