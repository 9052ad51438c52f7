"""Parameters in bf16 with stochastic rounding: weights, gradients and optimizer state in 16 bits, and no copy of the weights in 32.

The update is computed in 32 bits, chunk by chunk, and its results are rounded up or down at random, so that what a bf16 number is too coarse to hold is
there in the mean (Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from memfit.techniques.technique import Offer, Setting, StepFacts, Subject, Technique


class Bf16Parameters(Technique):
    """Settings: "full" (every parameter in the type the model has it in), "bf16"."""

    name = "parameters"
    baseline = "full"
    lasting = True
    sizes_state = True
    settings = ("full", "bf16")
    allow: ClassVar[Mapping[str, Setting]] = {"bf16_parameters": "bf16"}
    baseline_words = "parameters as the model has them"
    expected_faster = True
    page = "techniques/bf16-parameters.md"
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "parameters in {setting} written with stochastic rounding: the optimizer would have to do it itself"
    }

    def words(self, setting: str) -> str:
        """As in: bf16 parameters with stochastic rounding."""
        return f"{setting} parameters with stochastic rounding"

    def asked_by(self, setting: str) -> str:
        """The word of `allow=`."""
        return f"{setting}_parameters"

    def results(self, setting: str) -> str:
        """Every update is rounded at random."""
        return f"this model in {setting}, with this optimizer computed in 32 bits and rounded stochastically"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """Half of all that there is for each parameter."""
        del used, setting
        kept = without.parameter_bytes + without.gradient_bytes + without.state_bytes
        return kept // 2, "half of parameters, gradients and optimizer state"

    def offer(self, subject: Subject) -> Offer:
        """Where the optimizer, if there is one, updates every element by itself."""
        from memfit.optimizers.chunked import kind_and_groups
        from memfit.techniques.bf16_parameters.conversion import trains_any
        from memfit.techniques.bf16_parameters.rounding import RoundedStochastically

        if not trains_any(subject.model):
            return Offer(why_not="it rounds fp32 parameters to bf16, and the model trains none")
        if subject.optimizer is None:
            return Offer(("bf16",))
        reason = RoundedStochastically().why_not(*kind_and_groups(subject.optimizer))
        return Offer(("bf16",)) if reason is None else Offer(why_not=reason)

    def conflict(self, setting: str, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Autocast is its own; it has a format of state of its own, which streamed layers do not know."""
        del clips
        if "precision" in used:
            return f"{setting} parameters run under bf16 autocast already, so there is no other to choose"
        if "state_format" in used:
            return f"{setting} parameters keep their optimizer state in {setting}, rounded stochastically"
        if "streamed" in used:
            return (
                f"streamed layers bring their optimizer state along as the optimizer keeps it, not in rounded {setting}"
            )
        return None

    def region(self, model: Any, setting: str, device_type: str) -> AbstractContextManager[object]:
        """bf16 autocast: inputs, buffers and constants in 32 bits meet parameters in 16."""
        del model
        from memfit.techniques.autocast.precision import autocast

        return autocast(setting, device_type)

    def convert(self, model: Any, setting: str) -> None:
        """Every fp32 parameter becomes bf16 and stays the same object; those beside running statistics stay as they are."""
        del setting
        from memfit.techniques.bf16_parameters.conversion import convert

        convert(model)

    def why_no_optimizer(self, optimizer: Any, setting: str) -> str | None:
        """One that has state packed otherwise stays what it is."""
        have = getattr(optimizer, "state_format", "32bit")
        if have in {"32bit", self.optimizer_settings(setting)["state_format"].name}:
            return None
        return (
            f"{self.words(setting)} keep optimizer state in {setting}, and this optimizer was made with {have} state: make it an ordinary one, or plan "
            f'without "{self.asked_by(setting)}"'
        )

    def optimizer_settings(self, setting: str) -> Mapping[str, Any]:
        """The chunked optimizer computes in 32 bits and rounds."""
        del setting
        from memfit.techniques.bf16_parameters.rounding import RoundedStochastically

        return {"state_format": RoundedStochastically()}


BF16_PARAMETERS = Bf16Parameters()
