"""Optimizer-state offloading: the state is kept in host memory or on disk, and comes to the device for the update, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from memfit.techniques.technique import DialectKey, Offer, OptimisticBound, StepFacts, Subject, Technique


class OptimizerOffload(Technique):
    """Settings: "device", "host", "disk"."""

    name = "state_place"
    baseline = "device"
    lasting = True
    settings = ("device", "host", "disk")
    page = "techniques/optimizer-state-offloading.md"
    dialect_keys: ClassVar[Sequence[DialectKey]] = (
        DialectKey(
            "deepspeed", "zero_optimization.offload_optimizer.device", {"none": "device", "cpu": "host", "nvme": "disk"}
        ),
    )

    def words(self, setting: str) -> str:
        """As in: optimizer state on the disk."""
        return f"optimizer state on the {setting}"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """All of the state."""
        del used, setting
        return without.state_bytes, "all of the optimizer's state"

    def offer(self, subject: Subject) -> Offer:
        """Considered where the user gave a budget for a lower tier that holds all of the state; elsewhere on request, as on a CPU the tier is the disk."""
        if subject.optimizer is None:
            return Offer(why_not="there is no optimizer")
        from memfit.optimizers import elementwise
        from memfit.optimizers.chunked import kind_and_groups

        kind, groups = kind_and_groups(subject.optimizer)
        reasons = {
            place: elementwise.why_not_there(kind, groups, place, subject.device_kind) for place in ("disk", "host")
        }
        places = tuple(place for place, reason in reasons.items() if reason is None)
        # Of two places the disk first: its reason for refusing holds for both.
        why_not = next((reason for reason in reasons.values() if reason is not None), "")
        state_bytes = 0 if subject.facts is None else subject.facts.state_bytes
        roomy = {tier for tier, free in subject.capacity_bytes.items() if free is None or state_bytes <= free}
        weighed = tuple(place for place in places if place in roomy) if state_bytes else ()
        return Offer(weighed, places, why_not)

    def bound(self, facts: StepFacts) -> OptimisticBound | None:
        """All of the state, and what an update that is not in chunks holds beside it; its copies cannot be overlapped with anything."""
        if facts.state_transfer_seconds is None:
            return None
        saved = facts.state_bytes + facts.update_temporary_bytes
        return OptimisticBound(saved, facts.state_transfer_seconds - facts.update_seconds, of_state=True)

    def optimizer_settings(self, setting: str) -> Mapping[str, Any]:
        """The chunked optimizer keeps its state there."""
        return {"state_place": setting}


OPTIMIZER_OFFLOAD = OptimizerOffload()
