"""Ranks that would train a mixture, of other code, data, weights or settings, are noticed before the first step, and named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from memfit.errors import ConfigError
from memfit.sharding.agreement import Agreement
from memfit.train.alike import check_alike, marks_of
from memfit.train.assemble import Assembly, assemble
from memfit.train.config import Config, load_config
from sharding import toy_run


class Heard:
    """What the ranks tell each other."""

    def __init__(self, *of_all: dict[str, Any]) -> None:
        self._of_all = of_all

    def of_all(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [*self._of_all, own]


def read_again(folder: Path) -> tuple[Config, Assembly]:
    sys.modules.pop("ranks_toy", None)
    config = load_config(folder / "run.yaml")
    return config, assemble(config)


def other_code(folder: Path) -> None:
    written = (folder / "ranks_toy.py").read_text(encoding="utf-8")
    (folder / "ranks_toy.py").write_text(written.replace("- y).square()", "- y).abs()"), encoding="utf-8")


def other_order(folder: Path) -> None:
    found = dict(np.load(folder / "train.npz"))
    np.savez(folder / "train.npz", **{name: values[::-1] for name, values in found.items()})


@pytest.mark.parametrize(
    ("change", "what"), [(other_code, "the code of model and loss"), (other_order, "the data")], ids=["code", "data"]
)
def test_another_file_on_a_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], what: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    toy_run.written(tmp_path)
    first = marks_of(*read_again(tmp_path))
    check_alike(cast("Agreement", Heard(first)), marks_of(*read_again(tmp_path)))
    change(tmp_path)
    other = marks_of(*read_again(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"rank 1 differs from rank 0 in {what} \('\w+', not '\w+'\): start all with"
    ):
        check_alike(cast("Agreement", Heard(first)), other)


def test_other_weights_settings_and_numbers_of_samples_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    toy_run.written(tmp_path)
    config, assembly = read_again(tmp_path)
    first = marks_of(config, assembly)
    longer = replace(config, train=replace(config.train, steps=6))
    with pytest.raises(ConfigError, match=r"rank 1 differs from rank 0 in train\.steps \(6, not 5\)"):
        check_alike(cast("Agreement", Heard(first)), marks_of(longer, assembly))
    with torch.no_grad():
        next(assembly.model.parameters()).mul_(2.0)
    with pytest.raises(ConfigError, match="differs from rank 0 in the initial weights"):
        check_alike(cast("Agreement", Heard(first)), marks_of(config, assembly))
    with pytest.raises(ConfigError, match=r"rank 2 differs from rank 0 in torch \('2\.0', not "):
        check_alike(cast("Agreement", Heard(first, first)), first | {"torch": "2.0"})
