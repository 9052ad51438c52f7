"""Low-rank adapters of PEFT on the model of a run file (`lora:`), and the model with its adapters merged into its weights at the end.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685. The layers are PEFT's own, so what is trained and saved is what
PEFT trains and reads.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import ConfigError, InputError
from memfit.techniques.frozen_weights.four_bit import FourBitLinear, bitsandbytes_quiet
from memfit.train.config import LoraConfig, Task

ALL_LINEAR: Final = "all-linear"  # PEFT's word
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
    with bitsandbytes_quiet():  # PEFT imports it
        import peft

    settings: Any = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        task_type=_TASKS.get(task or ""),
    )
    try:
        return injected(model, settings)[0].train()
    except ValueError as error:
        raise ConfigError(f"lora.targets: PEFT finds no layers for adapters: {str(error).splitlines()[0]}") from error


def injected(model: nn.Module, settings: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """The model with PEFT's adapters, and the names of layers that are left out; on the meta device where its parameters are.

    Where adapters for all linear layers are asked for, PEFT refuses a model that has one which takes none (a Mamba's `out_proj`, whose weight kernels read
    without calling the layer). Such layers are left out, and so are those whose results no adapter could be added to.

    Args:
        settings: a `peft.LoraConfig`.

    Raises:
        ValueError: PEFT finds no layers.
    """
    import peft

    on_meta = any(parameter.is_meta for parameter in model.parameters())
    left_out = _of_another_form(model) if settings.target_modules == ALL_LINEAR else []
    while True:
        attempt = copy.deepcopy(settings)  # PEFT writes the paths of the layers into it
        attempt.exclude_modules = left_out or None
        try:
            with warnings.catch_warnings(), torch.device("meta") if on_meta else nullcontext():
                warnings.simplefilter("ignore")  # of models that PEFT knows less well
                return peft.get_peft_model(model, attempt), tuple(left_out)
        except ValueError:
            refused = _first_without(model, attempt.target_modules) if settings.target_modules == ALL_LINEAR else None
            if refused is None:
                raise
            left_out.append(refused)


def _of_another_form(model: nn.Module) -> list[str]:
    """Names of the layers that PEFT takes for linear ones, and that do not return one tensor of `out_features` (Llama 4's router: a pair)."""
    found = {
        path.rpartition(".")[2]: None
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is not nn.Linear.forward
        and type(module.weight) is nn.Parameter  # a packed one is called by its own rules, and PEFT knows them
        and not _returns_its_features(module)
    }
    return list(found)


def _returns_its_features(module: nn.Linear) -> bool:
    meta = {name: t.to("meta") for name, t in (*module.named_parameters(), *module.named_buffers())}
    try:
        found = torch.func.functional_call(
            module, meta, (module.weight.new_empty(2, module.in_features, device="meta"),)
        )
    except (RuntimeError, TypeError, ValueError, IndexError):  # it takes inputs of another form
        return False
    return isinstance(found, torch.Tensor) and found.shape == (2, module.out_features)


def _first_without(model: nn.Module, paths: Any) -> str | None:
    """Name of the first of these layers that has no adapter, where PEFT stopped; the others' adapters are taken off.

    Args:
        paths: of layers, or the ends of their paths, as PEFT has them where there are many.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    first: str | None = None
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            model.set_submodule(path, module.get_base_layer())
        elif first is None and any(path == each or path.endswith(f".{each}") for each in paths):
            first = path.rpartition(".")[2]
    return first


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
