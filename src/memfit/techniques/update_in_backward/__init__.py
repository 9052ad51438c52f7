"""Update in backward: each parameter is updated as soon as its gradient is whole, and the gradient is freed at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from memfit.techniques.technique import Offer, OptimisticBound, Setting, StepFacts, Subject, Technique


class UpdateInBackward(Technique):
    """Settings: "after", "in_backward". Only where the user names it: results stay, but no gradients are there after a step."""

    name = "update"
    baseline = "after"
    settings = ("after", "in_backward")
    allow: ClassVar[Mapping[str, Setting]] = {"in_backward": "in_backward"}
    page = "techniques/update-in-backward.md"
    unsaid: ClassVar[Mapping[str, str]] = {"deepspeed": "the update inside backward: DeepSpeed updates after it"}

    def words(self, setting: str) -> str:
        """As in: update inside backward."""
        del setting
        return "update inside backward"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """All gradients."""
        del used, setting
        return without.gradient_bytes, "all gradients"

    def offer(self, subject: Subject) -> Offer:
        """Where the optimizer updates each parameter independently of the others."""
        if subject.optimizer is None:
            return Offer(why_not="there is no optimizer")
        reason = self.why_no_optimizer(subject.optimizer, "in_backward")
        return Offer(("in_backward",)) if reason is None else Offer(why_not=reason)

    def conflict(self, setting: str, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Clipping and gradient scaling need all gradients before any parameter changes."""
        del setting
        if clips:
            return "clipping needs the norm of all gradients before any parameter is updated, so nothing can be updated inside backward"
        if used.get("precision") == "fp16":
            return "the gradient scaler must see all gradients before any parameter is updated, so nothing can be updated inside backward"
        return None

    def bound(self, facts: StepFacts) -> OptimisticBound:
        """All gradients, and what an update of all parameters at once holds beside them; a gradient that is still in the cache may be read for nothing."""
        return OptimisticBound(facts.gradient_bytes + facts.update_temporary_bytes, -facts.update_seconds)

    def why_no_optimizer(self, optimizer: Any, setting: str) -> str | None:
        """Why this optimizer cannot update inside backward."""
        del setting
        from memfit.techniques.update_in_backward.updating import why_not_in_backward

        return why_not_in_backward(optimizer)


UPDATE_IN_BACKWARD = UpdateInBackward()
