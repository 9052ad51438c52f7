"""Rates and betas are DeepSpeed's, step by step and bit by bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from integrations.deepspeed.courses import COURSES, optimizer, walked
from integrations.deepspeed.record import WALKED, walk
from memfit.errors import ConfigError
from memfit.integrations.deepspeed import VERSION, Scheduler
from memfit.integrations.deepspeed.schedules import DeepSpeedSchedule

RECORDED: dict[str, Any] = json.loads(WALKED.read_text(encoding="utf-8"))
KINDS = (torch.optim.AdamW, torch.optim.SGD)


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_taken_with_what_deepspeed_sets(name: str, kind: type[torch.optim.Optimizer]) -> None:
    found = walked(lambda chosen: DeepSpeedSchedule(Scheduler(*COURSES[name]), chosen), kind)

    assert found == RECORDED[name][kind.__name__]


@pytest.mark.filterwarnings("default")  # DeepSpeed's own
def test_deepspeed_itself_sets_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs = pytest.importorskip("deepspeed", reason="deepspeed is not installed; its schedules are recorded")
    if theirs.__version__ != VERSION:
        pytest.skip(f"deepspeed {theirs.__version__} is installed, the recording is of {VERSION}")

    assert {name: walk(name) for name in COURSES} == RECORDED


@pytest.mark.parametrize("name", COURSES)
def test_a_schedule_goes_on_where_another_stopped(name: str) -> None:
    def broken(chosen: torch.optim.Optimizer) -> Any:
        first = DeepSpeedSchedule(Scheduler(*COURSES[name]), optimizer(torch.optim.AdamW))
        for _ in range(4):
            first.step()
        second = DeepSpeedSchedule(Scheduler(*COURSES[name]), chosen)
        second.load_state_dict(first.state_dict())
        second.set()
        return second

    whole = walked(lambda chosen: DeepSpeedSchedule(Scheduler(*COURSES[name]), chosen), torch.optim.AdamW)

    assert walked(broken, torch.optim.AdamW)[:-4] == whole[4:]


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("WarmupLR", {"warmup_max_lr": "auto"}, 'scheduler.params.warmup_max_lr is "auto"'),
        ("WarmupLR", {"warmup_max_lr": [0.1]}, "2 values are needed, one for each parameter group"),
        ("WarmupLR", {"warmup_max_lr": "0.1"}, "expected a number, found '0.1'"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "expected a whole number from 1 on, found 0"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "must be positive"),
    ],
)
def test_what_deepspeed_refuses_is_refused(kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DeepSpeedSchedule(Scheduler(kind, params), optimizer(torch.optim.AdamW))
