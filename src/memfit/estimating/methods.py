"""Ways to train a model that people name: all of it, low-rank adapters beside frozen weights, the same with those weights in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import InputError
from memfit.techniques.frozen_weights.four_bit import bitsandbytes_quiet, left_whole
from memfit.train.adapters import ALL_LINEAR, injected
from memfit.units import format_bytes

RANK: Final = 16  # of adapters, as most recipes have it


@dataclass(frozen=True, slots=True)
class Method:
    """One way.

    Attributes:
        name: as people type it.
        title: in words.
        dtype: of the weights as they are read.
        adapters: adapters are trained instead of the weights.
        settings: of techniques (`fixed=`).
        allow: words that the settings need (`allow=`).
        left_out: names of linear layers that get no adapter.
    """

    name: str
    title: str
    dtype: torch.dtype
    adapters: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Python that puts adapters into `model`."""
        if not self.adapters:
            return ()
        left_out = f", exclude_modules={list(self.left_out)}" if self.left_out else ""
        return (
            "import peft",
            "",
            f'model = peft.get_peft_model(model, peft.LoraConfig(r={RANK}, target_modules="{ALL_LINEAR}"{left_out}))',
        )

    def on(self, model: nn.Module) -> tuple[Method, nn.Module]:
        """The model as it is trained this way, and the way as it is on this model.

        Raises:
            InputError: the way needs a package that is not installed, or finds no layer for an adapter.
        """
        if not self.adapters:
            return self, model
        if find_spec("peft") is None:
            raise InputError(f"--method {self.name} needs PEFT: pip install peft")
        with bitsandbytes_quiet():  # PEFT imports it
            import peft

        try:
            adapted, left_out = injected(model, peft.LoraConfig(r=RANK, target_modules=ALL_LINEAR))
        except ValueError as error:
            raise InputError(
                f"--method {self.name}: PEFT finds no layer for adapters: {str(error).splitlines()[0]}"
            ) from error
        return replace(self, left_out=left_out), adapted.train()

    def in_16_bits(self, model: nn.Module) -> str | None:
        """What to say where most frozen weights are not in 4 bits though they were asked for; None elsewhere.

        Args:
            model: as it is trained this way, not packed yet.
        """
        if "frozen_weights" not in self.settings:
            return None
        whole = left_whole(model)
        left = sum(whole.values())
        frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        if 2 * left <= frozen:
            return None
        largest = max(whole, key=whole.__getitem__)
        return (
            f"{format_bytes(left)} of the {format_bytes(frozen)} of frozen weights stay in 16 bits, as only torch.nn.Linear layers are packed (the largest "
            f"that stays is {largest} with {format_bytes(whole[largest])})"
        )


FULL: Final = Method(
    "full", "all weights trained, in fp32 with forward in bf16", torch.float32, False, {"precision": "bf16"}, ("bf16",)
)
FULL_FP32: Final = Method("full", "all weights trained, in fp32", torch.float32, False)
LORA: Final = Method("lora", f"adapters of rank {RANK} beside frozen 16-bit weights", torch.bfloat16, True)
QLORA: Final = Method(
    "qlora",
    f"adapters of rank {RANK} beside frozen 4-bit weights",
    torch.bfloat16,
    True,
    {"frozen_weights": "4bit"},
    ("4bit",),
)
METHODS: Final = ("full", "lora", "qlora")


def method_of(name: str, *, bf16: bool) -> Method:
    """The method of this name, on a card with or without units for bf16."""
    if name == "full":
        return FULL if bf16 else FULL_FP32
    return {"lora": LORA, "qlora": QLORA}[name]


def least_bytes(model: nn.Module, method: Method) -> int:
    """Bytes of weights, gradients and AdamW's state: what a step holds whatever is done about activations.

    Args:
        model: without adapters.
        method: which would be little more.
    """
    numbers = sum(p.numel() for p in model.parameters())
    if not method.adapters:
        return numbers * 4 * 4
    # A subclass (Falcon's) stays in 16 bits, as in transformers' `replace_with_bnb_linear`.
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    return 2 * (numbers - linear) + (linear * 33 // 64 if method.settings else 2 * linear)
