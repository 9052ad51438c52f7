"""What a person names (a folder, a config.json, a function) as a model without weights, batches of any size, and the Python that makes both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.errors import CaptureError, InputError
from memfit.step.other_kernels import refuse_attention
from memfit.train.assemble import built_on_meta, resolve
from memfit.train.config import Config, DataConfig, ModelConfig
from memfit.train.hub_cache import in_cache

TASKS: Final = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "multimodal-lm": "AutoModelForMultimodalLM",
}
TEXT_ALONE: Final = "the step is on text alone: what this model does with images or sound is not in it (a python: model with --data asks for both)"
_WEIGHTS: Final = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class Named:
    """A model that was named.

    Attributes:
        title: how a person knows it.
        built: makes it, with floating-point parameters of the type that it is handed; on the meta device where the builder allows it.
        sample: makes a batch of so many samples of so many tokens.
        loss_fn: None where the model returns its own loss.
        has_length: samples can be made of any length.
        longest: tokens that the model has positions for; None where it does not say.
        model_lines, sample_lines: Python that makes `model` and, with `batch` and `length`, `sample` on `device`. "{dtype}" stands for the type of the weights.
        loss: name of the loss function in that Python; "None" for none.
        disk_bytes: of the weights' files; 0 where there are none.
        text_alone: its samples are text alone, though the model takes more.
    """

    title: str
    built: Callable[[torch.dtype], nn.Module]
    sample: Callable[[int, int], Batch]
    loss_fn: LossFunction | None
    has_length: bool
    longest: int | None
    model_lines: tuple[str, ...]
    sample_lines: tuple[str, ...]
    loss: str = "None"
    disk_bytes: int = 0
    text_alone: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know."""
        return (TEXT_ALONE,) if self.text_alone else ()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A step of it is captured inside the block.

        Raises:
            InputError: it does not run on the samples that are made for it.
        """
        try:
            yield
        except CaptureError as error:
            if not self.text_alone:
                raise
            raise InputError(
                f"{self.title} does not run on text alone: write a function that builds it and one that returns data, and name them with "
                f"python:package.module:function and --data package.module:function ({error})"
            ) from error


def of_text(config: Any) -> Any:
    """The part of a configuration that describes the language model; the configuration itself where it has no such part, or several."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config


def named(model: str, task: str | None = None, data: str | None = None) -> Named:
    """What was named.

    Args:
        model: a folder with a config.json of transformers, such a file, the name of a model in the Hub's cache, or
            "python:package.module:function", which returns a model or the pair (model, loss_fn).
        task: one of `TASKS`; None for what the configuration says.
        data: "package.module:function", which returns a dataset (length and items), for a function's model that does not take tokens.

    Raises:
        InputError: there is no such thing, or no batch can be made for it.
    """
    if model.startswith("python:") or (":" in model and not Path(model).exists()):
        return _of_function(model.removeprefix("python:"), data)
    if data is not None:
        raise InputError(
            "--data goes with python:package.module:function; batches for a configuration of transformers are made of its vocabulary"
        )
    path = Path(model).expanduser()
    found = None if path.exists() else in_cache(model)
    return _of_configuration(found or path, task, title="" if found is None else model)


def _of_configuration(path: Path, task: str | None, title: str) -> Named:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "a configuration of transformers needs transformers: pip install 'memfit[transformers]'"
        ) from error
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{path}: there is no config.json here. Name a folder of a transformers model, its config.json, a model that hf download has fetched, or "
            "python:package.module:function (memfit reads what is on this computer and downloads nothing)"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{folder / 'config.json'} is no configuration that transformers {transformers.__version__} reads: {reason}"
        ) from error
    refuse_attention(config._attn_implementation)  # noqa: SLF001 - transformers has no other name for it
    language = of_text(config)
    words = getattr(language, "vocab_size", None)
    if not isinstance(words, int) or (not _writes(config) if language is not config else _takes_no_tokens(config)):
        raise InputError(
            f"{folder / 'config.json'} describes a {config.model_type} model, which takes more than tokens: write a function that builds it and one that "
            "returns data, and name them with python:package.module:function and --data package.module:function"
        )
    language.use_cache = False
    task = task or _task_of(config)
    auto = TASKS[task]
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _WEIGHTS]

    def built(dtype: torch.dtype) -> nn.Module:
        try:
            with torch.device("meta"):
                made: nn.Module = getattr(transformers, auto).from_config(config, dtype=dtype)
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"transformers cannot make a {task} model of {folder}: name another task with --task, or a function that builds the model and one that returns "
                f"data, with python:package.module:function and --data package.module:function ({str(error).splitlines()[0].rstrip('.')})"
            ) from error
        return made.train()

    make = (
        f"model = {auto}.from_pretrained(folder, config=config, dtype={{dtype}})"
        if files
        else f"model = {auto}.from_config(config, dtype={{dtype}})  # random weights: the folder has none"
    )
    labels = "tokens" if task != "sequence-classification" else "torch.zeros(batch, dtype=torch.long, device=device)"
    longest = getattr(language, "max_position_embeddings", None)
    whole = language is config
    described = "config" if whole else "config.get_text_config()"
    return Named(
        title or str(folder.resolve().name),
        built,
        partial(_tokens, words, task != "sequence-classification"),
        None,
        True,
        longest if isinstance(longest, int) else None,
        (
            f"from transformers import AutoConfig, {auto}",
            "",
            f"folder = {str(folder)!r}",
            *(
                ("config = AutoConfig.from_pretrained(folder, use_cache=False)",)
                if whole
                else ("config = AutoConfig.from_pretrained(folder)", f"{described}.use_cache = False")
            ),
            make,
        ),
        (
            f"tokens = torch.randint({described}.vocab_size, (batch, length), device=device)  # your own batches in their place",
            f'sample = {{"input_ids": tokens, "labels": {labels}}}',
        ),
        disk_bytes=sum(file.stat().st_size for file in files),
        text_alone=not whole,
    )


def _takes_no_tokens(config: Any) -> bool:
    """Whether the architecture that the configuration names takes something else (sound, images)."""
    import transformers

    kinds = (getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ())
    return any(getattr(kind, "main_input_name", "input_ids") != "input_ids" for kind in kinds)


def _writes(config: Any) -> bool:
    """Whether a model of this composed configuration predicts tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def _task_of(config: Any) -> str:
    """What the architecture is for, as its configuration says; a causal language model where it does not."""
    said = " ".join(getattr(config, "architectures", None) or ())
    if "ForMaskedLM" in said or "ForPreTraining" in said:
        return "masked-lm"
    if "ForSequenceClassification" in said:
        return "sequence-classification"
    if of_text(config) is not config:
        return "multimodal-lm"
    return "seq2seq-lm" if getattr(config, "is_encoder_decoder", False) else "causal-lm"


def _tokens(words: int, predicted: bool, batch: int, length: int) -> Batch:  # noqa: FBT001 - a fact, not a switch
    tokens = torch.randint(words, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens if predicted else torch.zeros(batch, dtype=torch.long)}


def _of_function(target: str, data: str | None) -> Named:
    config = Config(ModelConfig(python=target), DataConfig(python=data or target), folder=".")
    build = resolve(target, config, "python")
    made = built_on_meta(build)
    model, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"python:{target} returned {type(model).__name__}: a model is needed, or the pair (model, loss_fn)"
        )
    module, _, function = target.partition(":")
    described = getattr(model, "config", None)
    words = getattr(described, "vocab_size", None)
    longest = getattr(described, "max_position_embeddings", None)
    model_lines = (
        f"from {module} import {function} as build",
        "",
        "model, loss_fn = build()" if loss_fn is not None else "model = build()",
    )
    if data is None:
        if not isinstance(words, int):
            raise InputError(
                f"python:{target}: the model does not say what it takes (model.config.vocab_size): name data, too, with --data package.module:function, "
                "which returns a dataset (length and items)"
            )
        sample: Callable[[int, int], Batch] = partial(_tokens, words, True)
        sample_lines: tuple[str, ...] = (
            "tokens = torch.randint(model.config.vocab_size, (batch, length), device=device)  # your own batches in their place",
            'sample = {"input_ids": tokens, "labels": tokens}',
        )
    else:
        found = resolve(data, config, "data")()
        dataset = found[0] if isinstance(found, tuple) and len(found) == 2 else found
        items = torch.utils.data.default_collate([dataset[i] for i in range(min(len(dataset), 8))])
        sample = partial(_resized, items)
        data_module, _, data_function = data.partition(":")
        sample_lines = (
            f"from {data_module} import {data_function} as read",
            "found = read()",
            "dataset = found[0] if isinstance(found, tuple) else found",
            "sample = torch.utils.data.default_collate([dataset[i % len(dataset)] for i in range(batch)])",
            "sample = memfit.batches.map_tensors(lambda tensor: tensor.to(device), sample)",
        )
    return Named(
        f"{target}",
        lambda _dtype: model.train(),
        sample,
        loss_fn,
        data is None,
        longest if isinstance(longest, int) else None,
        model_lines,
        sample_lines,
        "loss_fn" if loss_fn is not None else "None",
    )


def _resized(items: Batch, batch: int, length: int) -> Batch:
    """Of a dataset's items the first so many, over and over; what is in them is as long as it is."""
    del length
    return batches.repeated(items, batch)
