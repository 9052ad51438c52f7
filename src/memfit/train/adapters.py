"""Low-rank adapters of PEFT on the model of a run file (`lora:`), and the model with its adapters merged into its weights at the end.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685. The layers are PEFT's own, so what is trained and saved is what
PEFT trains and reads.
"""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import ConfigError, InputError
from memfit.techniques.frozen_weights.four_bit import FourBitLinear
from memfit.train.config import LoraConfig, Task

_TASKS: Final = {
    "causal-lm": "CAUSAL_LM",
    "sequence-classification": "SEQ_CLS",
}  # of a classifier PEFT trains the new head besides


def with_adapters(model: nn.Module, lora: LoraConfig, task: Task | None) -> nn.Module:
    """The model with adapters, all else frozen, in training mode; on the meta device where its parameters are.

    Raises:
        InputError: PEFT is not installed.
        ConfigError: it finds no layer of the names given.
    """
    if find_spec("peft") is None:
        raise InputError("lora needs PEFT: pip install peft")
    import peft

    targets: Any = lora.targets[0] if lora.targets == ("all-linear",) else list(lora.targets)
    settings: Any = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type=_TASKS.get(task or ""),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that PEFT knows less well
        try:
            if any(parameter.is_meta for parameter in model.parameters()):
                with torch.device("meta"):
                    adapted: nn.Module = peft.get_peft_model(model, settings)
            else:
                adapted = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(
                f"lora.targets: PEFT finds no layers for adapters: {str(error).splitlines()[0]}"
            ) from error
    return adapted.train()


def merged(adapted: nn.Module) -> nn.Module:
    """A copy of the model with the adapters added to its weights and no adapter left; layers in 4 bits are unpacked first, to the dtype that they had.

    Args:
        adapted: of `with_adapters`, trained or not; it is left as it is, so the copy takes as much memory again, and more where weights are packed.
    """
    made = copy.deepcopy(adapted)
    for path, module in list(made.named_modules()):
        if isinstance(module, FourBitLinear):
            parent, _, name = path.rpartition(".")
            made.get_submodule(parent)._modules[name] = _unpacked(module)  # noqa: SLF001 - by name, as it was packed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole: nn.Module = made.merge_and_unload()  # type: ignore[operator] # PEFT's own
    return whole


def _unpacked(packed: FourBitLinear) -> nn.Linear:
    linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
    linear.weight = nn.Parameter(packed.full_weight(), requires_grad=False)
    linear.register_parameter("bias", packed.bias)
    return linear
