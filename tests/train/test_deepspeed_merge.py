"""A DeepSpeed configuration merged with a run's own says what it says; contradictions name both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memfit.cli.main import main
from memfit.errors import ConfigError
from memfit.integrations.deepspeed import read
from memfit.train import log
from memfit.train.assemble import assemble, read_deepspeed
from memfit.train.config import Config, from_json
from memfit.train.plans import plan_arguments

Data = dict[str, Any]
WARMUP: Data = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "warmup_type": "linear"},
}
SAID: Data = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "scheduler": WARMUP,
}


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return type("Output", (), {"loss": nn.functional.mse_loss(self.layers(x), y)})()


def build() -> nn.Module:
    return Model()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((24, 8)).astype(np.float32) for name in ("x", "y")}
    np.savez(tmp_path / "train.npz", **arrays)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(said: Data | str, **sections: Any) -> Data:
    return {
        "model": {"python": "train.test_deepspeed_merge:build"},
        "data": {"train": "train.npz"},
        "deepspeed": said,
        **sections,
    }


def config(said: Data | str, folder: Path | None = None, **sections: Any) -> Config:
    return from_json(data(said, **sections), folder or Path())


def test_it_fills_the_sections_of_the_run() -> None:
    fit = config(SAID).fit

    assert (fit.global_batch, fit.clip_norm, fit.allow) == (8, 0.5, ())
    assert fit.fixed == {"micro_batches": 2, "precision": "full"}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("fit", "global_batch", 8), ("fit", "clip_norm", 0.5), ("optim", "lr", 0.1), ("optim", "name", "sgd"), ("schedule", "warmup_steps", 3)],
)  # fmt: skip
def test_both_may_say_the_same(section: str, key: str, value: Any) -> None:
    assert config(SAID, **{section: {key: value}}).fit == config(SAID).fit  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "section", "value", "words"),
    [
        ({}, "fit", {"global_batch": 4}, "fit.global_batch: 4 contradicts train_batch_size of the DeepSpeed configuration, which comes to 8"),
        ({}, "fit", {"clip_norm": 1.0}, "fit.clip_norm: 1.0 contradicts gradient_clipping of the DeepSpeed configuration, which comes to 0.5"),
        ({}, "fit", {"fixed": {"micro_batches": 4}}, "fit.fixed.micro_batches: 4 contradicts gradient_accumulation_steps"),
        ({}, "fit", {"fixed": {"precision": "bf16"}}, "fit.fixed.precision: 'bf16' contradicts fp16, bf16 and torch_autocast"),
        ({}, "fit", {"allow": ["bf16"]}, "fit.allow: bf16 contradicts the DeepSpeed configuration"),
        ({}, "optim", {"lr": 0.2}, "optim.lr: 0.2 contradicts optimizer.params.lr of the DeepSpeed configuration, which is 0.1"),
        ({}, "optim", {"name": "adamw"}, "optim.name: 'adamw' contradicts optimizer.type of the DeepSpeed configuration, which is 'sgd'"),
        ({"optimizer": {"type": "Adam"}}, "optim", {"name": "adam"}, "which is 'adamw': change one of them"),
        ({}, "optim", {"weight_decay": 0.2}, "contradicts optimizer.params.weight_decay of the DeepSpeed configuration, which is not there"),
        ({}, "schedule", {"name": "cosine"}, "schedule.name: 'cosine' contradicts the scheduler of the DeepSpeed configuration, WarmupLR"),
        ({"train_batch_size": "auto"}, "train", {}, 'train_batch_size is "auto" in the DeepSpeed configuration: give fit.global_batch'),
        ({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, "train", {}, 'optimizer.params.lr is "auto" in the DeepSpeed configuration: give optim.lr'),
        ({"scheduler": {**WARMUP, "params": {"warmup_num_steps": "auto"}}}, "train", {}, '"auto" in the DeepSpeed configuration: give schedule.warmup_steps'),
        ({"gradient_cliping": 1}, "train", {}, "gradient_cliping: DeepSpeed 0.19.8 has no such key; did you mean gradient_clipping?"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both(said: Data, section: str, value: Data, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config({**SAID, **said}, **{section: value})  # type: ignore[arg-type]

    assert words in str(refused.value)


def test_what_it_leaves_open_the_run_says() -> None:
    said = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    }
    run = config(
        said,
        fit={"global_batch": 12, "clip_norm": 0.25},
        optim={"lr": 0.5, "betas": [0.8, 0.9]},
        schedule={"warmup_steps": 2},
    )
    found = read_deepspeed(run, 7)

    assert found is not None
    assert run.fit.fixed["micro_batches"] == 4
    assert found.config.optimizer is not None
    assert found.config.optimizer.params == {"lr": 0.5, "betas": [0.8, 0.9]}
    assert found.config.scheduler is not None
    assert found.config.scheduler.params == {"total_num_steps": 7, "warmup_num_steps": 2}
    assert found.config.gradient_clipping == 0.25


def test_a_run_can_be_read_back_without_the_file(folder: Path) -> None:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(SAID))
    run = config(file.name, folder)
    file.unlink()

    again = from_json(json.loads(json.dumps(run.to_json())), folder)

    assert again == run
    assert again.deepspeed == SAID


def test_lenient_ignores_what_deepspeed_ignores(folder: Path) -> None:
    run = config({**SAID, "gradient_cliping": 1}, folder, deepspeed_strict=False, fit={"device": "cpu"})

    assert any("gradient_cliping is ignored" in note for note in assemble(run).notes)


def test_state_on_the_cpu_does_not_go_with_state_on_the_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {**SAID, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    fit = {"budget": "1MiB", "device": "cpu", "fixed": {"state_place": "disk"}}
    (folder / "run.json").write_text(json.dumps(data(said, fit=fit)))

    assert main(["plan", "run.json"]) == 3
    assert "fit.fixed.state_place: 'disk' contradicts zero_optimization.offload_optimizer" in capsys.readouterr().err


def test_for_several_ranks_batch_and_stage_are_those_of_as_many(folder: Path) -> None:
    """However many there are when it is planned: a run may be resumed on others."""
    said = {**SAID, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    run = config(said, folder, fit={"device": "cpu", "devices": "2x1GiB"})

    assert "micro_batches" not in run.fit.fixed
    fixed = plan_arguments(run, assemble(run))["fixed"]
    assert (fixed["sharding"], fixed["micro_batches"]) == ("zero2", 2)
    with pytest.raises(ConfigError, match=r"train_batch_size: 8 is not 2 \* 2 \* 1"):
        config(said, folder, fit={"device": "cpu"})
    with pytest.raises(ConfigError, match="fit.fixed.sharding: 'zero3' contradicts zero_optimization.stage"):
        fixing = config(said, folder, fit={"device": "cpu", "devices": 2, "fixed": {"sharding": "zero3"}})
        plan_arguments(fixing, assemble(fixing))


def plainly(steps: int) -> list[float]:
    """Losses of SAID's own loop, with torch alone."""
    run = config(SAID, train={"steps": steps, "seed": 3}, fit={"device": "cpu"})
    made = assemble(run)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    batches = made.batches.start()
    for step in range(steps):
        batch, _ = next(batches)
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, max(0, step - 1) / 3)
        total = 0.0
        for part in ({k: v[:4] for k, v in batch.items()}, {k: v[4:] for k, v in batch.items()}):
            loss = made.model(**part).loss
            loss.backward(torch.tensor(0.5))
            total += loss.item() * 0.5
        torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_the_command_trains_what_it_says_and_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    run = data(
        "", train={"steps": 6, "seed": 3, "log_every": 1, "meter_every": 1, "out": "out"}, report={"html": False}
    )
    (folder / "run.json").write_text(json.dumps({**run, "fit": {"budget": "64KiB", "device": "cpu"}}))
    (folder / "ds_config.json").write_text(json.dumps(SAID))

    first = ["train", "run.json", "--deepspeed", "ds_config.json", "--set", "train.steps=4"]
    assert main(first) == 0
    (folder / "ds_config.json").unlink()
    assert main(["resume", "out", "--set", "train.steps=6"]) == 0

    lines = [line for line in log.read(folder / "out") if "lr" in line]
    assert [line["loss"] for line in lines] == plainly(6)
    assert [line["lr"] for line in lines] == [
        0.1 * (0.0 + max(0, step - 1) / 3 if step < 4 else 1.0) for step in range(6)
    ]
    assert "DeepSpeed configuration: gradient_accumulation_steps" in capsys.readouterr().err


def test_a_plan_is_written_as_a_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = data(SAID, fit={"budget": "64KiB", "device": "cpu"})
    (folder / "run.json").write_text(json.dumps(run))

    assert main(["plan", "run.json", "--json", "--deepspeed-out", "written.json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    written = read(folder / "written.json")
    said = read(SAID)
    assert answer["deepspeed"] == "written.json"
    assert any(each.startswith("the budget") for each in answer["left_out"])
    assert (written.batch, written.optimizer, written.scheduler) == (said.batch, said.optimizer, said.scheduler)
    assert written.arguments() == said.arguments()
