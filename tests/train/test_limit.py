"""The limit that the environment names holds in the process that trains."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import ConfigError
from memfit.train import limit
from memfit.train.limit_variable import VARIABLE

CODE = """
import torch
from memfit.train import limit
from memfit.train.limit_variable import VARIABLE
model = torch.nn.Linear(4096, 4096)
limit.enforce(model, torch.device("cpu"))
held = []
try:
    while len(held) < 99:
        held.append(torch.ones(4 << 20))
except RuntimeError as error:
    assert "can't allocate memory" in str(error)
print(len(held))
"""


@pytest.mark.parametrize("mib", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_a_cpu_process_gets_no_more_than_its_limit(mib: int) -> None:
    environment = {**os.environ, VARIABLE: str(mib << 20)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    allowed = (mib + mib // limit.SLACK_SHARE << 20) - 4096 * 4097 * 4 + limit.SLACK_BYTES  # beside the model
    assert 0 <= allowed // (16 << 20) - int(done.stdout) <= 2  # of 16 MiB each; what malloc keeps counts, too


def test_without_the_variable_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert limit.enforce(nn.Linear(2, 2), torch.device("cpu")) is None


def test_each_rank_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for text, rank, limit_bytes in (("100,200", "1", 200), ("100,200", "0", 100), ("300", "1", 300)):
        monkeypatch.setenv(VARIABLE, text)
        monkeypatch.setenv("RANK", rank)
        assert limit._named() == limit_bytes
    monkeypatch.setenv(VARIABLE, "1,2,3")
    with pytest.raises(ConfigError, match="is for 3 ranks, and there are 2: give one number for all, or one for each"):
        limit._named()


@pytest.mark.parametrize("text", ["8GiB", "-1", "0", "1,", "1,x"])
def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match="MEMFIT_MEMORY_LIMIT=.* is not a number of bytes: write digits, or unset it"):
        limit.enforce(nn.Linear(2, 2), torch.device("cpu"))


def test_on_a_gpu_it_is_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 1000})())
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: set_to.append(given))
    monkeypatch.setenv(VARIABLE, "250")
    assert limit.enforce(nn.Linear(2, 2), torch.device("cuda")) == 250
    assert set_to == [(0.25, torch.device("cuda"))]
