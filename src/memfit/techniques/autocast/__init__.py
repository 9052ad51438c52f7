"""Autocast: forward and loss in 16 bits where torch's own autocast has it so; in fp16 with a gradient scaler."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any, ClassVar

from memfit.techniques.technique import DialectKey, Offer, OptimisticBound, Setting, StepFacts, Subject, Technique


class Autocast(Technique):
    """Settings: "full" (every operation as the model asks), "bf16", "fp16"."""

    name = "precision"
    baseline = "full"
    lasting = True
    settings = ("full", "bf16", "fp16")
    allow: ClassVar[Mapping[str, Setting]] = {"bf16": "bf16", "fp16": "fp16"}
    baseline_words = "full precision"
    expected_faster = True
    page = "techniques/mixed-precision.md"
    dialect_keys: ClassVar[Sequence[DialectKey]] = (
        DialectKey("deepspeed", "bf16.enabled", {True: "bf16"}, allowed=True),
        DialectKey("deepspeed", "fp16.enabled", {True: "fp16"}, allowed=True),
        DialectKey(
            "deepspeed",
            "torch_autocast.dtype",
            {"bf16": "bf16", "fp16": "fp16"},
            when="torch_autocast.enabled",
            allowed=True,
        ),
    )

    def words(self, setting: str) -> str:
        """As in: bf16 autocast."""
        return f"{setting} autocast"

    def asked_by(self, setting: str) -> str:
        """The word of `allow=`."""
        return setting

    def results(self, setting: str) -> str:
        """The numbers are those of PyTorch's own autocast."""
        return f"PyTorch's own {setting} autocast" + (" and gradient scaler" if setting == "fp16" else "")

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """Half of the activations."""
        del used, setting
        return without.activation_bytes // 2, "half of what is saved for backward"

    def offer(self, subject: Subject) -> Offer:
        """Both formats; fp16 only where no trained parameter is fp16 itself."""
        from memfit.techniques.autocast.precision import why_not_scaled

        reason = why_not_scaled(subject.model)
        return Offer(("bf16", "fp16")) if reason is None else Offer(("bf16",), why_not=reason)

    def bound(self, facts: StepFacts) -> OptimisticBound:
        """Nothing is known but that parameters, gradients and state, all that is there in the update, keep their types."""
        return OptimisticBound(None, -inf, within=(0, facts.pass_events - 1))

    def region(self, model: Any, setting: str, device_type: str) -> AbstractContextManager[object]:
        """`torch.autocast`, one region for each micro-batch.

        Where `fully_shard` gathers weights, their casts are not kept for a second use: to the end of forward they would be the whole model in 16 bits.
        """
        from memfit.techniques.autocast.precision import autocast

        return autocast(setting, device_type, cache=not _gathers(model))


def _gathers(model: Any) -> bool:
    """Whether the model's weights are gathered block by block."""
    engine = sys.modules.get("torch.distributed.fsdp")
    return engine is not None and isinstance(model, engine.FSDPModule)


AUTOCAST = Autocast()
