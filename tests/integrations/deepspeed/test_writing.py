"""A plan written as a DeepSpeed configuration is read back as what it was, by us and by DeepSpeed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from integrations.deepspeed.record import asked
from memfit.errors import ConfigError
from memfit.integrations.deepspeed import VERSION, Optimizer, Scheduler, Written, read, write
from memfit.techniques.choices import Choices
from memfit.values.plan import Plan
from memfit.values.script import OffloadedStorage, RepeatedCalls, Script
from train.fakes import plan as made

ADAM = Optimizer("AdamW", {"lr": 1e-4, "torch_adam": True})
WARMUP = Scheduler("WarmupLR", {"warmup_num_steps": 5})


def chosen(**choices: Any) -> Plan:
    """A plan of eight samples, on a GPU."""
    return replace(made(), device="a GPU", device_kind="cuda", choices=Choices(**{"micro_batch_size": 8, **choices}))


PLANS: dict[str, Plan] = {
    "plain": chosen(),
    "micro-batches": chosen(micro_batches=4, micro_batch_size=2, weights="samples"),
    "clipped": replace(chosen(), clip_norm=0.25),
    "bf16": chosen(precision="bf16"),
    "fp16": chosen(precision="fp16"),
    "state on the host": chosen(state_place="host"),
    "state on the disk": chosen(state_place="disk"),
    "streamed": chosen(streamed="layers"),
}


def written(plan: Plan) -> Written:
    return write(plan, optimizer=ADAM, scheduler=WARMUP, nvme_path="/disk")


@pytest.mark.parametrize("name", PLANS)
def test_it_is_read_back_as_what_it_was(name: str) -> None:
    plan = PLANS[name]
    config = read(written(plan).content)
    choices = plan.choices

    said = config.arguments(streamed=choices.streamed, samples=8, device="cuda")

    assert said["clip_norm"] == plan.clip_norm
    assert {field: getattr(choices, field) for field in said["fixed"]} == said["fixed"]
    assert said["fixed"].get("state_place", "device") == choices.state_place
    assert said["fixed"].get("streamed", "") == choices.streamed
    assert config.optimizer == Optimizer("adamw", ADAM.params)
    assert config.scheduler == WARMUP


@pytest.mark.filterwarnings("default")  # DeepSpeed's own
def test_deepspeed_itself_reads_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs = pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    if theirs.__version__ != VERSION:
        pytest.skip(f"deepspeed {theirs.__version__} is installed, and {VERSION} is what is followed")

    for plan in PLANS.values():
        found = asked(dict(written(plan).content), 1)
        assert found == [8, plan.choices.micro_batch_size, plan.choices.micro_batches]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (chosen(), "the budget of 1048576 bytes"),
        (PLANS["micro-batches"], "the weights of micro-batches (samples)"),
        (chosen(state_format="8bit"), "optimizer state in 8 bits"),
        (chosen(update="in_backward"), "the update inside backward"),
        (chosen(frozen=("embeddings",)), "what is frozen (embeddings)"),
        (chosen(loss_chunks=4), "the loss head in 4 chunks"),
        (PLANS["streamed"], "that the layers of layers are what is moved"),
        (
            replace(chosen(), script=Script(swaps={0: OffloadedStorage(0, 8, 0, 0, "disk")})),
            "activation offloading, 1 storage of each micro-batch",
        ),
    ],
)
def test_what_it_cannot_say_is_told(plan: Plan, words: str) -> None:
    assert sum(words in each for each in written(plan).left_out) == 1
    assert not any("the optimizer:" in each for each in written(plan).left_out)


def test_a_plan_that_recomputes_says_so() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    plan = memfit.recompute(model, torch.randn(64, 16), lambda model, x: model(x).sum(), keep=["4"])

    assert plan.script.recomputations
    assert any(
        each.startswith(f"recomputation, {plan.script.recomputations} operations") for each in write(plan).left_out
    )
    assert any(each.startswith("the optimizer: a plan holds no functions") for each in write(plan).left_out)


def test_a_plan_that_calls_modules_again_says_which() -> None:
    """They are what the user has to put through DeepSpeed's checkpoint to have the same."""
    rows = (("0", 0), ("1", 0)), (("1", 1),)
    calls = tuple(RepeatedCalls(modules, 2, (0,), 3, random=False, buffers=()) for modules in rows)
    (said,) = (
        each for each in write(replace(chosen(), script=Script(repeated_calls=calls))).left_out if "checkpoint" in each
    )
    assert said.startswith("recomputation, 6 operations of each micro-batch in 3 whole calls of modules: ")
    assert "deepspeed.checkpointing.checkpoint (0 to 1, 1 (call 2))" in said


def test_what_lies_on_the_disk_lies_in_a_folder() -> None:
    with pytest.raises(ConfigError, match="name the folder, nvme_path="):
        write(PLANS["state on the disk"])


def test_the_file_holds_the_content(tmp_path: Path) -> None:
    found = written(PLANS["bf16"])
    found.save(tmp_path / "ds_config.json")

    assert json.loads((tmp_path / "ds_config.json").read_text(encoding="utf-8")) == found.content
