"""Layer streaming: the repeated blocks of the model are kept in host memory or on disk, and come to the device one at a time.

A streamed step has an order of its own (layer by layer, micro-batch by micro-batch), so the engine runs it with a schedule of its own (`LayerStream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from memfit.techniques.technique import DialectKey, Offer, OptimisticBound, StepFacts, Subject, Technique

MODEL_ITSELF: Final = "."  # path of the blocks that are children of the model itself


class LayerStreaming(Technique):
    """Setting: path of the repeated blocks that are streamed; "" for none."""

    name = "streamed"
    baseline = ""
    page = "techniques/streaming.md"
    dialect_keys: ClassVar[Sequence[DialectKey]] = (
        # DeepSpeed's key names the place, not which blocks are streamed.
        DialectKey(
            "deepspeed", "zero_optimization.offload_param.device", {"none": "device", "cpu": "host", "nvme": "disk"}
        ),
    )
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "that the layers of {setting} are what is moved: DeepSpeed moves every parameter above a size"
    }

    def words(self, setting: str) -> str:
        """As in: layers of encoder.layer streamed."""
        return f"layers of {'the model' if setting == MODEL_ITSELF else setting} streamed"

    def claim(self, without: StepFacts, used: StepFacts, setting: str) -> tuple[int, str]:
        """All that belongs to parameters, but for two layers."""
        del setting
        lost = (
            without.parameter_bytes
            + without.gradient_bytes
            + without.state_bytes
            - used.parameter_bytes
            - used.gradient_bytes
            - used.state_bytes
        )
        return lost, "parameters, gradients and state of all layers but two"

    def offer(self, subject: Subject) -> Offer:
        """Where there are repeated blocks, and they fit on a lower tier that may be used."""
        if not subject.streamed:
            return Offer()
        path = (subject.streamed,)
        return Offer(on_request=path) if subject.fixed.get("streamed") else Offer(path)

    def conflict(self, setting: str, used: Mapping[str, Any], *, clips: bool) -> str | None:
        """Whatever moves state or updates by itself, and what needs all gradients at once."""
        del setting, clips
        if used.get("precision") == "fp16":
            return "streaming updates a layer while others are in backward, the gradient scaler must see all gradients before: take bf16"
        if "state_format" in used:
            return "streamed layers bring their own optimizer state along, in 32 bits"
        if "state_place" in used:
            return "streaming moves the optimizer's state of the layers itself"
        if "update" in used:
            return "streaming updates behind backward by itself"
        if "loss_chunks" in used:
            return "streaming runs the loss head with its own cut of the graph, as a whole"
        return None

    def bound(self, facts: StepFacts) -> OptimisticBound | None:
        """Layers are computed again, so bytes are bounded as recomputation's are: not at all; copies may all be overlapped with computing but the rest."""
        if facts.streaming is None:
            return None
        again, copies = facts.streaming.again_seconds, facts.streaming.copy_seconds
        return OptimisticBound(None, again - facts.update_seconds + max(0.0, copies - facts.step_seconds - again))


LAYER_STREAMING = LayerStreaming()
