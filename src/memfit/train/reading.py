"""From files to samples, as a configuration says: all of them before the first step, or one after the other while training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.batches import Batch
from memfit.errors import ConfigError
from memfit.train import packing, readers, text
from memfit.train.config import Config
from memfit.train.data import ArraySamples, Samples
from memfit.train.stream import Readable, Stream


def encoder_of(config: Config) -> text.Encoder:
    """The tokenizer of a configuration.

    Raises:
        ConfigError: none is named, or it is not there.
    """
    folder = config.data.tokenizer or config.model.hf
    if folder is None:
        raise ConfigError('data.tokenizer is missing: the folder of a tokenizer, or "bytes"')
    return text.ByteEncoder() if folder == "bytes" else text.FolderEncoder(config.hf_folder(folder))


class Reader:
    """Files to samples; the tokenizer is read once for all of them.

    Args:
        config: of the run.
        model: that learns them; a classifier's configuration may name the classes.
        constants: that batches of packed samples have besides (`packing.constants_for`).

    Attributes:
        notes: what the reader of the log should know, such as texts that were cut.
    """

    def __init__(self, config: Config, model: torch.nn.Module, constants: Mapping[str, Any]) -> None:
        self.config, self.constants = config, constants
        self.notes: list[str] = []
        self._encoder: text.Encoder | None = None
        described = getattr(model, "config", None)
        count = config.model.num_labels or getattr(described, "num_labels", None)
        names = getattr(described, "label2id", None)
        self._labels = text.Labels(
            config.data.label, names if isinstance(names, Mapping) else None, count if isinstance(count, int) else None
        )

    def samples(self, path: str, patterns: Iterable[str]) -> Samples:
        """All samples of files that patterns name; `path` is the key that names them.

        Raises:
            ConfigError: the files are not there, or the configuration does not say how to read them.
            InputError: they cannot be read.
        """
        data = self.config.data
        files, kind = self._found(path, patterns)
        if kind == ".npz":
            return ArraySamples(readers.arrays(files))
        if self._holds_numbers(files, kind):
            return ArraySamples(readers.numbers(readers.rows(files)))
        form = self._form()
        if kind == ".txt" and data.packing:
            raise ConfigError(
                f"data.packing: {files[0]} is running text, which fills every row without it: leave it out"
            )
        if kind == ".txt":
            return text.samples_of_stream(readers.text_lines(files), form)
        rows = readers.rows(files, self._fields(files))
        if data.messages is not None:
            samples = text.samples_of_conversations(rows, data.messages, form)
            if samples.truncated:
                self.notes.append(
                    f"{path}: {samples.truncated} conversations are longer than {form.max_length} tokens and were cut"
                )
            if samples.left_out:
                self.notes.append(
                    f"{path}: {samples.left_out} conversations have no answer of the assistant within {form.max_length} tokens and were left out"
                )
            return self._packed(path, samples)
        assert data.text is not None
        samples = text.samples_of_lines(rows, data.text, self._labels, form)
        if samples.truncated:
            self.notes.append(
                f"{path}: {samples.truncated} of {len(samples)} texts are longer than {form.max_length} tokens "
                "and were cut"
            )
        return self._packed(path, samples)

    def stream(self, path: str, patterns: Iterable[str]) -> Stream:
        """The same one after the other, in the order of the files; errors of a line come when it is read.

        Raises:
            ConfigError: as for `samples`; or the files hold numbers.
        """
        data = self.config.data
        files, kind = self._found(path, patterns)
        if kind == ".npz" or self._holds_numbers(files, kind):
            raise ConfigError(
                f"data.stream reads texts and conversations, and {files[0]} holds numbers: leave it out, or return a stream from data.python"
            )
        form, labels = self._form(), self._labels
        fields = () if kind == ".txt" else self._fields(files)

        def tokens() -> Iterator[text.Tokens]:
            if kind == ".txt":
                return text.tokens_of_stream(readers.text_lines(files), form)
            rows, cut = readers.rows(files, fields), text.Cut()
            if data.messages is not None:
                return text.tokens_of_conversations(rows, data.messages, form, cut)
            assert data.text is not None
            return text.tokens_of_lines(rows, data.text, labels, form, cut)

        def collate(samples: Iterable[text.Tokens], epoch: int, first: int) -> Batch:
            made = text.TokenSamples(samples, form, first)
            return made.batch(range(len(made)), epoch)

        return Stream(Readable(tokens), collate)

    def _found(self, path: str, patterns: Iterable[str]) -> tuple[list[Path], str]:
        """Files, and how they are read."""
        files = readers.find(patterns, Path(self.config.folder or "."), path)
        return files, readers.kind_of(files[0])

    def _holds_numbers(self, files: list[Path], kind: str) -> bool:
        """Whether rows are numbers, which become tensors as they are."""
        data, task = self.config.data, self.config.model.task
        if data.messages is not None and kind not in readers.WITH_FIELDS:
            raise ConfigError(
                f"data.messages names a field of .jsonl lines or of a table, and {files[0]} has no fields"
            )
        if data.messages is not None and task != "causal-lm":
            raise ConfigError(
                "data.messages needs model.task: causal-lm: what the assistant says is learnt token by token"
            )
        if kind not in readers.WITH_FIELDS or data.text is not None or data.messages is not None:
            return False
        if task is not None:
            raise ConfigError(f"data.text is missing: the field of {files[0]} that holds the text for {task}")
        return True

    def _fields(self, files: list[Path]) -> list[str]:
        """What is read of a row."""
        data = self.config.data
        if data.messages is not None:
            return [data.messages]
        if self.config.model.task == "sequence-classification" and data.label is None:
            raise ConfigError(f"data.label is missing: the field of {files[0]} that holds the class")
        return [name for name in (data.text, data.label) if name is not None]

    def _form(self) -> text.Format:
        """How text becomes samples."""
        data, task = self.config.data, self.config.model.task
        if data.max_length is None:
            raise ConfigError(
                "data.max_length is missing: the number of tokens per sample; longer text is cut, shorter is padded"
            )
        if self._encoder is None:
            self._encoder = encoder_of(self.config)
        if task == "masked-lm" and self._encoder.mask is None:
            raise ConfigError("model.task: masked-lm needs a tokenizer with a mask token, and this one has none")
        # A sample that is alone in its row leaves one place of it free (see `packing`).
        return text.Format(self._encoder, data.max_length - data.packing, task, self.config.train.seed)

    def _packed(self, path: str, samples: text.TokenSamples) -> Samples:
        """The samples in rows, where that is asked for."""
        width = self.config.data.max_length
        if not self.config.data.packing or width is None:
            return samples
        rows = packing.PackedSamples(samples, width, self.constants)
        self.notes.append(
            f"{path}: {len(samples)} samples are packed into {len(rows)} rows of {width} tokens, {100 * rows.filled:.0f} % filled"
        )
        return rows
