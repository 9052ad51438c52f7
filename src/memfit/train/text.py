"""Text to tokens of a fixed length, with the labels that a task asks for.

Every batch has the same width, `max_length`, whatever is in it: memory is planned for the longest sample and must not
depend on luck.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memfit.batches import IGNORED_LABEL
from memfit.errors import ConfigError, InputError
from memfit.train.config import Task
from memfit.train.readers import Row

_CHUNK: Final = 1000  # texts handed to a tokenizer at once
_MASKED_SHARE: Final = 0.15
_TOKENIZER_FILES: Final = re.compile(r"tokenizer|vocab|.*\.(model|spm|tiktoken)$")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in tokens.

    Attributes:
        tokens: all of it, as the template writes it out.
        learnt: which of them the assistant says.
    """

    tokens: Sequence[int]
    learnt: Sequence[bool]


class Encoder(Protocol):
    """Text to numbers.

    Attributes:
        pad: number that fills a sample up.
        mask: number that hides a token; None when there is none.
        special: numbers that stand for no text.
        ends: numbers after which a text is over.
        size: numbers are below it.
    """

    pad: int
    mask: int | None
    special: frozenset[int]
    ends: frozenset[int]
    size: int

    def encode(self, texts: Sequence[str], max_length: int | None) -> tuple[list[list[int]], int]:
        """Tokens of each text and how many texts were cut; `max_length` None: all of it, nothing added at the ends."""

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """A conversation written out by the tokenizer's chat template.

        Raises:
            ConfigError: it has none.
            InputError: the template refuses these messages, or writes earlier ones in another way once more are there.
        """

    def prompt(self, text: str, *, chat: bool) -> list[int]:
        """Tokens that a model goes on from: the beginning of a text, or, in a chat, what a user says and the opening of an answer.

        Raises:
            ConfigError, InputError: as for `conversation`.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class ByteEncoder:
    """A token is a byte of UTF-8 plus one; needs no file and no extra."""

    pad: int = 0
    mask: int | None = 257
    special: frozenset[int] = frozenset((0, 257))
    ends: frozenset[int] = frozenset((0,))
    size: int = 258

    def encode(self, texts: Sequence[str], max_length: int | None) -> tuple[list[list[int]], int]:
        """See `Encoder`."""
        encoded = [[byte + 1 for byte in text.encode()] for text in texts]
        if max_length is None:
            return encoded, 0
        return [tokens[:max_length] for tokens in encoded], sum(len(tokens) > max_length for tokens in encoded)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """See `Encoder`."""
        del messages
        raise ConfigError(
            "data.messages needs a tokenizer with a chat template, and bytes have none: name a folder in data.tokenizer"
        )

    def prompt(self, text: str, *, chat: bool) -> list[int]:
        """See `Encoder`."""
        if chat:
            self.conversation([])
        return self.encode([text], None)[0][0]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Encoder`."""
        return bytes(token - 1 for token in tokens if 1 <= token <= 256).decode(errors="replace")


class FolderEncoder:
    """A Hugging Face tokenizer read from a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise InputError("reading a tokenizer needs transformers: pip install 'memfit[transformers]'") from error
        if not folder.is_dir():
            raise ConfigError(f"data.tokenizer: there is no folder {folder} (memfit downloads nothing)")
        # Without files of its own transformers may make up a tokenizer that knows no word.
        if not has_tokenizer(folder):
            raise ConfigError(f"data.tokenizer: {folder} holds no tokenizer (tokenizer.json, vocab.txt or the like)")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.tokenizer: transformers finds no tokenizer in {folder}: {error}") from error
        pad = self._tokenizer.pad_token_id
        self.pad: int = (
            0 if pad is None else int(pad)
        )  # attention_mask and labels tell padding apart, whatever its number
        self.mask: int | None = self._tokenizer.mask_token_id
        self.special: frozenset[int] = frozenset(self._tokenizer.all_special_ids)
        end = self._tokenizer.eos_token_id
        self.ends: frozenset[int] = frozenset() if end is None else frozenset((end,))
        self.size: int = len(self._tokenizer)

    def encode(self, texts: Sequence[str], max_length: int | None) -> tuple[list[list[int]], int]:
        """See `Encoder`."""
        if max_length is None:
            return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"], 0
        encoded = self._tokenizer(list(texts), truncation=True, max_length=max_length)
        # Tokenizers in pure Python do not tell what they cut.
        return encoded["input_ids"], sum(bool(e.overflowing) for e in encoded.encodings or ())

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """See `Encoder`.

        What an answer adds to the conversation before it, with the template's opening of an answer, is what the assistant says: its end of turn included.
        """
        self._check_template()
        whole = self._written(messages)
        learnt = [False] * len(whole)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = self._written(messages[:number], opened=True), self._written(messages[: number + 1])
            if whole[: len(after)] != after or after[: len(before)] != before:
                raise InputError(
                    "the chat template writes earlier messages in another way once an answer follows, so it cannot be told which tokens the assistant says"
                )
            learnt[len(before) : len(after)] = [True] * (len(after) - len(before))
        return Conversation(whole, learnt)

    def _check_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError("data.tokenizer: this tokenizer has no chat template, which data.messages needs")

    def _written(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = False) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened)
        except (TemplateError, ValueError, TypeError) as error:
            raise InputError(f"the chat template refuses this conversation: {error}") from error
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)[
            "input_ids"
        ]  # the template writes them itself
        return tokens

    def prompt(self, text: str, *, chat: bool) -> list[int]:
        """See `Encoder`."""
        if chat:
            self._check_template()
            return self._written([{"role": "user", "content": text}], opened=True)
        tokens: list[int] = list(self._tokenizer(text)["input_ids"])
        while tokens and tokens[-1] in self.special:  # some end each text by themselves
            tokens.pop()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Encoder`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside a model."""
        self._tokenizer.save_pretrained(str(folder))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any(_TOKENIZER_FILES.match(file.name) for file in folder.iterdir())


@dataclass(frozen=True, slots=True)
class Labels:
    """How a field of a line becomes a class.

    Attributes:
        field: its name; None when the data holds no classes.
        names: class of each name, for labels that are words.
        count: number of classes; None when not known, 1 when the label is a number to hit (a regression).
    """

    field: str | None = None
    names: Mapping[str, int] | None = None
    count: int | None = None

    def read(self, line: Row) -> int | float:
        """The class (or the number, for a regression) on a line.

        Raises:
            InputError: there is none, or it is not one of the model's classes.
        """
        assert self.field is not None
        value = _field(line, self.field)
        if isinstance(value, str):
            if value not in (self.names or {}):
                known = ", ".join(self.names or ()) or "none"
                raise InputError(
                    f"{line.where}: label {value!r} is no class of the model; there are: {known}. Write classes as 0, 1, 2, ..., or give them these names in "
                    "the model's config.json (id2label, label2id)"
                )
            return (self.names or {})[value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{line.where}: label {value!r} is neither a number nor a name")
        if self.count == 1:  # one output is a number to hit, not a class
            return float(value)
        if not isinstance(value, int) or value < 0 or (self.count is not None and value >= self.count):
            raise InputError(
                f"{line.where}: label {value}, but classes are 0 "
                + ("and up" if self.count is None else f"to {self.count - 1}")
            )
        return value


@dataclass(frozen=True, slots=True)
class Format:
    """How text becomes samples.

    Attributes:
        encoder: text to tokens.
        max_length: tokens in a sample.
        task: what the labels are; None for none, or for classes.
        seed: of what masked-lm hides.
    """

    encoder: Encoder
    max_length: int
    task: Task | None = None
    seed: int = 0

    @property
    def least(self) -> int:
        """Tokens without which there is nothing to learn."""
        return 2 if self.task in ("causal-lm", "masked-lm") else 1


Tokens = tuple[Sequence[int] | Conversation, int | float | None]  # a sample, and its class where it has one


class TokenSamples:
    """Tokenised text; each batch is padded to one width.

    Args:
        tokens: of each sample.
        form: of the samples.
        first: number of the first one in the data, where these are a part of it; what masked-lm hides depends on it.

    Attributes:
        truncated: samples that were longer than `max_length` and were cut.
        left_out: conversations in which nothing is learnt before the cut.
    """

    def __init__(self, tokens: Iterable[Tokens], form: Format, first: int = 0) -> None:
        self._form, self._first = form, first
        self.truncated = 0
        self.left_out = 0
        learnt: list[NDArray[np.bool_]] = []
        flat: list[NDArray[np.int32]] = []
        labels: list[int | float] = []
        ends = [0]
        for sample, label in tokens:
            if isinstance(sample, Conversation):
                learnt.append(np.asarray(sample.learnt, dtype=np.bool_))
                sample = sample.tokens  # noqa: PLW2901 - the rest is alike
            flat.append(np.asarray(sample, dtype=np.int32))
            ends.append(ends[-1] + len(sample))
            if label is not None:
                labels.append(label)
        self._flat = np.concatenate(flat) if flat else np.empty(0, np.int32)
        self._learnt = np.concatenate(learnt) if learnt else None
        self._ends = np.asarray(ends)
        whole = all(isinstance(label, int) for label in labels)
        self._labels = np.asarray(labels, dtype=np.int64 if whole else np.float32) if labels else None

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens in each sample."""
        lengths: list[int] = np.diff(self._ends).tolist()
        return lengths

    @property
    def pad(self) -> int:
        """The token that fills a sample up."""
        return self._form.encoder.pad

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """Of a sample, and which of them are learnt; None for all."""
        part = slice(self._ends[index], self._ends[index + 1])
        return self._flat[part], None if self._learnt is None else self._learnt[part]

    def batch(self, indices: Sequence[int], epoch: int) -> dict[str, torch.Tensor]:
        """input_ids, attention_mask and, where the task has them, labels."""
        shape = (len(indices), self._form.max_length)
        ids = np.full(shape, self._form.encoder.pad, dtype=np.int64)
        attended = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for row, index in enumerate(indices):
            tokens, learnt = self.tokens(index)
            length = len(tokens)
            ids[row, :length] = tokens
            attended[row, :length] = 1
            if self._form.task == "causal-lm":
                labels[row, :length] = tokens
                if learnt is not None:
                    labels[row, :length][~learnt] = IGNORED_LABEL
            elif self._form.task == "masked-lm":
                self._hide(ids[row, :length], labels[row, :length], (self._form.seed, epoch, self._first + index))
        out = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(attended)}
        if self._form.task in ("causal-lm", "masked-lm"):
            out["labels"] = torch.from_numpy(labels)
        elif self._labels is not None:
            out["labels"] = torch.from_numpy(self._labels[np.asarray(indices)])
        return out

    def _hide(self, ids: NDArray[np.int64], labels: NDArray[np.int64], seed: tuple[int, int, int]) -> None:
        """Choose tokens to be guessed, as in BERT (Devlin et al. 2019, section 3.1).

        It depends on sample and epoch alone, so that a resumed run draws the same.
        """
        random = np.random.default_rng(seed)
        open_places = np.flatnonzero(~np.isin(ids, list(self._form.encoder.special)))
        if not len(open_places):
            return
        chosen = open_places[random.random(len(open_places)) < _MASKED_SHARE]
        if not len(chosen):  # a sample without anything to guess would have no loss
            chosen = open_places[[int(random.random() * len(open_places))]]
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        others = (random.random(len(chosen)) * self._form.encoder.size).astype(np.int64)
        assert self._form.encoder.mask is not None
        ids[chosen] = np.where(fate < 0.8, self._form.encoder.mask, np.where(fate < 0.9, others, ids[chosen]))


@dataclass(slots=True)
class Cut:
    """What was not taken of the data, counted while it is read.

    Attributes:
        truncated: samples that were longer than `max_length` and were cut.
        left_out: conversations in which nothing is learnt before the cut.
    """

    truncated: int = 0
    left_out: int = 0


def samples_of_lines(lines: Iterable[Row], field: str, labels: Labels, form: Format) -> TokenSamples:
    """One sample for each row that holds a text, cut at `max_length` tokens."""
    cut = Cut()
    samples = TokenSamples(tokens_of_lines(lines, field, labels, form, cut), form)
    samples.truncated = cut.truncated
    return samples


def samples_of_conversations(lines: Iterable[Row], field: str, form: Format) -> TokenSamples:
    """One sample for each row that holds a conversation, cut at `max_length` tokens; only what the assistant says has labels."""
    cut = Cut()
    samples = TokenSamples(tokens_of_conversations(lines, field, form, cut), form)
    samples.truncated, samples.left_out = cut.truncated, cut.left_out
    return samples


def samples_of_stream(lines: Iterable[str], form: Format) -> TokenSamples:
    """Running text cut into samples of `max_length` tokens; the last one may be shorter.

    Raises:
        ConfigError: the task needs a label for each text, which running text has not.
    """
    return TokenSamples(tokens_of_stream(lines, form), form)


def tokens_of_lines(lines: Iterable[Row], field: str, labels: Labels, form: Format, cut: Cut) -> Iterator[Tokens]:
    """The same one after the other, as they are read; what is cut is counted in `cut`."""
    rest = iter(lines)
    while chunk := list(islice(rest, _CHUNK)):
        encoded, truncated = form.encoder.encode([_text(line, field) for line in chunk], form.max_length)
        cut.truncated += truncated
        for line, tokens in zip(chunk, encoded, strict=True):
            if len(tokens) < form.least:
                raise InputError(
                    f"{line.where}: the text has {len(tokens)} tokens, and {form.least} are the least to learn from"
                )
            yield tokens, None if labels.field is None else labels.read(line)


def tokens_of_conversations(lines: Iterable[Row], field: str, form: Format, cut: Cut) -> Iterator[Tokens]:
    """Likewise."""
    for line in lines:
        messages = _field(line, field)
        if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
            raise InputError(f"{line.where}: field {field!r} is no list of messages, each with a role and content")
        try:
            made = form.encoder.conversation(messages)
        except InputError as error:
            if isinstance(error, ConfigError):
                raise
            raise InputError(f"{line.where}: {error}") from error
        cut.truncated += len(made.tokens) > form.max_length
        learnt = made.learnt[: form.max_length]
        if not any(learnt[1:]):  # the first token is predicted from nothing
            cut.left_out += 1
            continue
        yield Conversation(made.tokens[: form.max_length], learnt), None


def tokens_of_stream(lines: Iterable[str], form: Format) -> Iterator[Tokens]:
    """Likewise; errors as for `samples_of_stream`."""
    if form.task not in ("causal-lm", "masked-lm"):
        raise ConfigError(
            "data.train: .txt files are running text for causal-lm and masked-lm; "
            "for other tasks use .jsonl with data.text"
        )
    rest = iter(lines)
    waiting: list[int] = []
    while chunk := list(islice(rest, _CHUNK)):
        for tokens in form.encoder.encode(chunk, None)[0]:
            waiting += tokens
        whole = len(waiting) - len(waiting) % form.max_length
        for start in range(0, whole, form.max_length):
            yield waiting[start : start + form.max_length], None
        waiting = waiting[whole:]
    if len(waiting) > 1:  # a single token has nothing to predict
        yield waiting, None


def _text(line: Row, field: str) -> str:
    value = _field(line, field)
    if not isinstance(value, str):
        raise InputError(f"{line.where}: field {field!r} is no text")
    return value


def _field(line: Row, field: str) -> Any:
    if field not in line.content:
        raise InputError(f"{line.where}: no field {field!r}; there are: {', '.join(map(repr, line.content)) or 'none'}")
    return line.content[field]
