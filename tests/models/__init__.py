"""The models on which exactness and prediction are proven: one list, used by every test that says "on all models".

Each case builds, from its own seed, a model in train mode, one batch and a loss. They are small (a step takes tens
of milliseconds on one core) but keep the property that matters here: what autograd saves is larger than the
parameters. A bug found on a user's model becomes a case.

Random programs, which nobody would write but which PyTorch accepts, are in `programs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import convolution, huggingface, oddities, recurrent, routing, transformer
from .built import Built, LossFn, Sample, WeightFn, labels_or_rows, loss_of
from .oddities import build_chain
from .transformer import build_gpt

__all__ = ["CASES", "Built", "Case", "LossFn", "Sample", "build_chain", "build_gpt", "case", "loss_of"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its batch and loss, and what may be asked of it.

    Attributes:
        name: unique; also the test's id.
        build: makes (model, sample, loss function); seeds itself, so two calls give equal parts. Dropout draws from
            the global generator, which the caller seeds before each step.
        splits: the loss and gradients of a batch are the mean of those of its parts, weighted by `weight`. Up to
            rounding, and without dropout.
        bit_exact: two runs from one seed give the same bits.
        slow: thousands of operations; leave it out of quick runs.
        weight: what a batch counts for in that mean. For a model that shifts its labels (Hugging Face causal ones)
            this is not the number of labels given.
    """

    name: str
    build: Callable[[], Built]
    splits: bool
    bit_exact: bool = True
    slow: bool = False
    weight: WeightFn = labels_or_rows


CASES: tuple[Case, ...] = (
    Case("gpt", transformer.gpt, splits=True),
    Case("gpt_dropout", transformer.gpt_dropout, splits=True),
    Case("gpt_tied", transformer.gpt_tied, splits=True),
    Case("amp_gpt", transformer.amp_gpt, splits=True),
    Case("frozen", transformer.frozen, splits=True),
    Case("checkpointed", transformer.checkpointed, splits=True),
    Case("bert_eager", partial(huggingface.bert, "eager"), splits=True),
    Case("bert_sdpa", partial(huggingface.bert, "sdpa"), splits=True),
    Case("bert_eager_bf16", partial(huggingface.bert, "eager", bf16=True), splits=True),
    Case("bert_sdpa_bf16", partial(huggingface.bert, "sdpa", bf16=True), splits=True),
    Case("llama", huggingface.llama, splits=True, weight=huggingface.shifted_labels),
    Case("input_grads", huggingface.input_grads, splits=True, weight=huggingface.shifted_labels),
    Case("hf_checkpointed", huggingface.hf_checkpointed, splits=True, weight=huggingface.shifted_labels),
    Case("t5", huggingface.t5, splits=True),
    Case("vit", huggingface.vit, splits=True),
    Case("resnet", convolution.resnet, splits=False),
    Case("resnet_bottleneck", convolution.resnet_bottleneck, splits=False),
    Case("channels_last", convolution.channels_last, splits=False),
    Case("unet", convolution.unet, splits=True),
    Case("unet_batchnorm", convolution.unet_batchnorm, splits=False),
    Case("mlp_mixer", convolution.mlp_mixer, splits=True),
    Case("lstm", recurrent.lstm, splits=True),
    Case("gru", recurrent.gru, splits=True),
    Case("twice", oddities.twice, splits=True),
    Case("custom_function", oddities.custom_function, splits=True),
    Case("custom_function_ctx", oddities.custom_function_ctx, splits=True),
    Case("views", oddities.views, splits=False),
    Case("residual_chain_50", oddities.residual_chain_50, splits=True),
    Case("residual_chain_1000", oddities.residual_chain_1000, splits=True, slow=True),
    Case("contrastive", oddities.contrastive, splits=False),
    Case("moe_like", routing.moe_like, splits=True),
    Case("nonzero_model", routing.nonzero_model, splits=True),
    Case("item_control_flow", routing.item_control_flow, splits=False),
)

_BY_NAME = {each.name: each for each in CASES}


def case(name: str) -> Case:
    """The case of this name.

    Raises:
        KeyError: there is none; names those that are there.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        message = f"no case is named {name!r}; there are {', '.join(_BY_NAME)}"
        raise KeyError(message) from None
