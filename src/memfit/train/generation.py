"""Texts that a model writes while it is trained, within the bytes of its training step.

Each token takes a forward over all before it, of one sample, without gradients and without a cache of keys and values. A training step runs a forward
over at least one sample of the planned length, with the same parameters and optimizer state beside it, and holds in it what backward needs besides. So no
sample is longer here than planned, and the peak is below that of a step; the first texts of a run are written under the meter, which is the proof. A cache
would be faster, and would hold keys and values of all layers, which a step that recomputes does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memfit.errors import ConfigError
from memfit.techniques.autocast.precision import autocast
from memfit.train.data import seed_of
from memfit.train.evaluate import undisturbed
from memfit.train.prompts import GenerateConfig
from memfit.train.text import Encoder
from memfit.values.report import GeneratedText


class Generation:
    """Prompts, ready to be gone on from.

    Args:
        settings: of the run.
        encoder: of the training data.
        model: that will write; where its own settings of generation name tokens that end a text, these end it, too.
        longest: tokens of a sample that memory is planned for.
        chat: prompts are what users say, written out by the tokenizer's chat template.

    Raises:
        ConfigError: a prompt and what is written after it are longer than a sample.
    """

    def __init__(
        self, settings: GenerateConfig, encoder: Encoder, model: torch.nn.Module, longest: int, *, chat: bool
    ) -> None:
        self.settings, self._encoder = settings, encoder
        own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._ends = encoder.ends | frozenset(own if isinstance(own, list) else () if own is None else (own,))
        self._prompts = [encoder.prompt(text, chat=chat) for text in settings.prompts]
        for text, tokens in zip(settings.prompts, self._prompts, strict=True):
            if not tokens:
                raise ConfigError(f"generate.prompts: {text!r} is no token for this tokenizer")
            if len(tokens) + settings.max_new_tokens > longest:
                raise ConfigError(
                    f"generate.prompts: {text!r} has {len(tokens)} tokens, and with generate.max_new_tokens: {settings.max_new_tokens} that is more than the "
                    f"{longest} of a sample, for which memory is planned: shorten it, or write fewer"
                )

    def check(self, model: torch.nn.Module, device: torch.device) -> None:
        """Try whether the model gives logits of a prompt; its modes and all generators are as before.

        Raises:
            ConfigError: it does not.
        """
        needed = _needed(model) - {"input_ids", "attention_mask"}
        if needed:
            raise ConfigError(
                f"generate calls the model with input_ids, and the forward of {type(model).__name__} needs {', '.join(sorted(needed))} besides: "
                "give it a default, and have it return logits where there are no labels"
            )
        with undisturbed(model):
            _last_logits(model, self._prompts[0][:2], device)

    def texts(
        self,
        model: torch.nn.Module,
        step: int,
        device: torch.device,
        precision: str = "full",
        stop: Callable[[], bool] = lambda: False,
        agreed: Callable[[int], int] = lambda token: token,
    ) -> tuple[GeneratedText, ...] | None:
        """What the model writes after each prompt; its modes and all generators are as before.

        Args:
            model: being trained, between two steps.
            step: optimizer steps taken; with the seed and the prompt it decides what is drawn.
            device: of the model.
            precision: as in training, in the words of `Choices`.
            stop: asked before each token.
            agreed: the token that all ranks go on with, of the one that this rank has chosen.

        Returns:
            The texts; None when stopped.
        """
        written = []
        with undisturbed(model), autocast(precision, device.type):
            for number, (text, prompt) in enumerate(zip(self.settings.prompts, self._prompts, strict=True)):
                words = f"{self.settings.seed} {step} {number}"
                draws = torch.Generator().manual_seed(seed_of(words))
                tokens = list(prompt)
                while len(tokens) < len(prompt) + self.settings.max_new_tokens:
                    if stop():
                        return None
                    token = agreed(self._chosen(_last_logits(model, tokens, device), draws))
                    if token in self._ends:
                        break
                    tokens.append(token)
                written.append(GeneratedText(step, text, self._encoder.decode(tokens[len(prompt) :])))
        return tuple(written)

    def _chosen(self, logits: torch.Tensor, draws: torch.Generator) -> int:
        """The next token, by logits of shape (vocabulary,)."""
        settings = self.settings
        if not settings.temperature:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.float().cpu() / settings.temperature, 0)
        if not bool(probabilities.isfinite().all()):  # what was trained to nothing writes nothing sensible either
            return int(logits.argmax())
        if settings.top_p < 1:
            sizes, order = probabilities.sort(descending=True)
            sizes[sizes.cumsum(0) - sizes >= settings.top_p] = 0.0
            probabilities = torch.zeros_like(probabilities).scatter_(0, order, sizes)
        return int(torch.multinomial(probabilities, 1, generator=draws))


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model whose forward is written down, of one that PEFT has wrapped."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's own method
    assert isinstance(inner, torch.nn.Module)
    return inner


def _needed(model: torch.nn.Module) -> set[str]:
    """Arguments that the forward cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)
    taken = inspect.signature(_inner(model).forward).parameters.values()
    return {each.name for each in taken if each.kind in kinds and each.default is each.empty}


def _last_logits(model: torch.nn.Module, tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Logits of the token after these, of shape (vocabulary,).

    Raises:
        ConfigError: the model gives none.
    """
    ids = torch.tensor([tokens], device=device)
    batch: dict[str, Any] = {"input_ids": ids}
    taken = inspect.signature(_inner(model).forward).parameters
    if "attention_mask" in _needed(model):
        batch["attention_mask"] = torch.ones_like(ids)
    if "use_cache" in taken:
        batch["use_cache"] = False
    if "logits_to_keep" in taken:  # of the whole prompt they may be more than a step with a chunked loss ever holds
        batch["logits_to_keep"] = 1
    output = model(**batch)
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    logits = output.get("logits") if logits is None and isinstance(output, Mapping) else logits
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or len(logits) != 1:
        shape = (
            f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(output).__name__
        )
        raise ConfigError(
            "generate needs logits of shape (1, tokens, vocabulary) from the model where it is called with input_ids alone, and "
            f"{type(model).__name__} gave {shape}: return them, as a tensor or as logits, or leave generate out"
        )
    return logits[0, -1]
