"""Frozen weights in 4 bits: linear layers that are not trained hold a little over half a byte for each weight, as in QLoRA.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314. The kernels are bitsandbytes'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from memfit.techniques.technique import Offer, OptimisticBound, Setting, StepFacts, Subject, Technique

NOTHING_FROZEN: Final = (
    "no linear layer of the model has a frozen weight of its own: freeze some first (freeze=[...], or as PEFT does). Tied weights and subclasses of "
    "torch.nn.Linear stay as they are"
)
NO_KERNELS: Final = "its kernels are bitsandbytes' (0.50 or later): pip install 'memfit[bnb]'"


class FrozenWeights(Technique):
    """Settings: "full" (as the model has them), "4bit" (NF4 in blocks of 64, the scales of the blocks in 8 bits)."""

    name = "frozen_weights"
    baseline = "full"
    lasting = True
    settings = ("full", "4bit")
    allow: ClassVar[Mapping[str, Setting]] = {"4bit": "4bit"}
    baseline_words = "frozen weights as the model has them"
    page = "techniques/4-bit-weights.md"
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "frozen linear weights in {setting}: put such layers into the model in the script"
    }
    repeatable = (
        "bitsandbytes::gemm_4bit",
        "bitsandbytes::dequantize_4bit",
        "bitsandbytes::dequantize_blockwise",
    )

    def words(self, setting: str) -> str:
        """As in: frozen linear weights in 4 bits."""
        del setting
        return "frozen linear weights in 4 bits"

    def asked_by(self, setting: str) -> str:
        """The word of `allow=`."""
        return setting

    def results(self, setting: str) -> str:
        """Frozen weights are rounded."""
        del setting
        return "this model with its frozen linear weights in 4 bits"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """What the parameters lose; what the kernels take meanwhile is left out of it."""
        del setting
        return max(0, without.parameter_bytes - used.parameter_bytes), "frozen linear weights at half a byte each"

    def offer(self, subject: Subject) -> Offer:
        """Where bitsandbytes is there and a linear layer is frozen, or is in 4 bits already."""
        from memfit.techniques.frozen_weights import four_bit

        if not four_bit.convertible(subject.model) and not four_bit.converted(subject.model):
            return Offer(why_not=NOTHING_FROZEN)
        return Offer(("4bit",)) if four_bit.has_kernels() else Offer(why_not=NO_KERNELS)

    def conflict(self, setting: str, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Streaming moves parameters of its own."""
        del setting, clips
        if "streamed" in used:
            return "streamed layers are offloaded with their weights in full precision"
        return None

    def bound(self, facts: StepFacts) -> OptimisticBound:
        """No more than 28 bits of each 32 that are frozen; where the weights are read more than they are computed with, fewer bytes may well be faster."""
        return OptimisticBound(facts.frozen_bytes * 7 // 8, -facts.step_seconds)

    def convert(self, model: Any, setting: str) -> None:
        """Put 4-bit layers in the place of frozen linear ones."""
        del setting
        from memfit.techniques.frozen_weights.four_bit import convert

        convert(model)


FROZEN_WEIGHTS = FrozenWeights()
