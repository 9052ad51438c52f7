"""Optimizer state in 8 bits, block-wise: a little over one byte for each number instead of four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from memfit.techniques.technique import Offer, OptimisticBound, Setting, StepFacts, Subject, Technique


class EightBitState(Technique):
    """Settings: "32bit" (as the optimizer keeps it), "8bit"."""

    name = "state_format"
    baseline = "32bit"
    lasting = True
    sizes_state = True
    settings = ("32bit", "8bit")
    allow: ClassVar[Mapping[str, Setting]] = {"8bit": "8bit"}
    page = "techniques/8-bit-state.md"
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "optimizer state in 8 bits: make such an optimizer in the script"
    }

    def words(self, setting: str) -> str:
        """As in: 8-bit optimizer state."""
        del setting
        return "8-bit optimizer state"

    def results(self, setting: str) -> str:
        """State is rounded."""
        del setting
        return "this optimizer with its state in 8 bits"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """Three quarters of the state."""
        del used, setting
        return without.state_bytes * 3 // 4, "three quarters of the optimizer's state"

    def offer(self, subject: Subject) -> Offer:
        """Where the optimizer updates every element by itself and its moments are known."""
        if subject.optimizer is None:
            return Offer(why_not="there is no optimizer")
        from memfit.optimizers import elementwise
        from memfit.optimizers.chunked import kind_and_groups

        reason = elementwise.why_no_8bit(*kind_and_groups(subject.optimizer))
        return Offer(("8bit",)) if reason is None else Offer(why_not=reason)

    def bound(self, facts: StepFacts) -> OptimisticBound:
        """Seven eighths of the state (where its numbers have 64 bits), and what an update that is not in chunks holds beside it; fewer bytes may be faster."""
        saved = facts.state_bytes * 7 // 8 + facts.update_temporary_bytes
        return OptimisticBound(saved, -facts.update_seconds, of_state=True)

    def optimizer_settings(self, setting: str) -> Mapping[str, Any]:
        """The chunked optimizer packs its state."""
        return {"state_format": setting}


EIGHT_BIT_STATE = EightBitState()
