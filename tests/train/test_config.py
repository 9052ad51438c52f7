"""A configuration says what is meant or is refused, with the path and the nearest real key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from memfit.errors import ConfigError
from memfit.train.config import Config, from_json, load_config
from memfit.train.early_stopping import EarlyStoppingConfig

LEAST: dict[str, Any] = {"model": {"python": "toy:build"}, "data": {"train": "data.npz"}, "fit": {"budget": "1GiB"}}


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def with_(**sections: dict[str, Any]) -> Config:
    data = {name: {**part} for name, part in LEAST.items()}
    for name, part in sections.items():
        data[name] = {**data.get(name, {}), **part}
    return from_json(data, Path("/there"))


def test_the_shortest_configuration_has_torchs_defaults_and_one_list_of_one_file() -> None:
    config = with_()

    assert config.data.train == ("data.npz",)
    assert config.optim.settings() == {"lr": 1e-3, "fused": True}
    assert (config.fit.global_batch, config.train.seed, config.schedule.name) == (8, 0, "constant")


FULL = """
model: {hf: ./bert, task: sequence-classification, num_labels: 3}
data: {train: [a.jsonl, b.jsonl], validation: c.jsonl, text: body, label: kind, max_length: 64, tokenizer: ./bert}
fit:
  {budget: 2GiB, host_budget: 8GiB, global_batch: 16, allow: bf16, freeze: [embeddings.*], fixed: {micro_batches: 2},
   clip_norm: 1}
optim: {name: adamw, lr: 1e-4, weight_decay: 0.01, betas: [0.9, 0.95], eps: 1e-8}
schedule: {name: linear, warmup_steps: 10}
train: {epochs: 2, seed: 3, save_every: 50, keep: 3, log_every: 5, eval_every: 20, meter_every: 0, out: runs/one}
report: {html: false, frontier: true}
"""


def test_no_room_below_is_something_to_say(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            json.dumps({**LEAST, "fit": {"budget": "1GiB", "host_budget": 0, "disk_budget": "2GiB"}}),
            "c.json",
        )
    )
    assert config.fit.host_budget == 0
    assert config.fit.disk_budget == "2GiB"


def test_everything_can_be_said_and_written_back(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, FULL))

    assert config.fit.allow == ("bf16",)
    assert config.fit.clip_norm == 1.0
    assert config.fit.fixed == {"micro_batches": 2}
    assert config.optim.settings() == {
        "lr": 1e-4,
        "weight_decay": 0.01,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "fused": True,
    }
    assert config.out == tmp_path / "runs" / "one"
    again = load_config(write(tmp_path, json.dumps(config.to_json()), "again.json"))
    assert again == config


def test_written_from_elsewhere_paths_lead_to_the_same_place(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, FULL))
    other = tmp_path / "other"
    other.mkdir()

    again = load_config(write(other, json.dumps(config.to_json()), "config.json"))

    assert again.path("a.jsonl") == tmp_path / "a.jsonl"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model:\n\tpython: toy:build\n", "line 2 is indented with a tab, which YAML does not take: use spaces"),
        ("optim: {name: AdamW}\nmodel: {python: 'a:b'}\nfit: {budget: 1GiB}\n", "did you mean adamw"),
    ],
)
def test_first_guesses_at_a_run_file_lead_to_what_works(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("fit", "bugdet", "fit.bugdet: no such key; did you mean fit.budget?"),
        ("optim", "learning_rate", "optim.learning_rate: no such key"),
        ("train", "save_evry", "did you mean train.save_every?"),
    ],
)
def test_a_misspelt_key_names_the_nearest(section: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_(**{section: {key: 1}})


def test_a_misspelt_section_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"modle: no such key; did you mean model\?"):
        from_json({**LEAST, "modle": {}}, Path())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"lr": "fast"}}, "optim.lr: expected a number, found 'fast'"),
        ({"optim": {"lr": True}}, "optim.lr: expected a number, found true"),
        ({"optim": {"lr": "nan"}}, "optim.lr: expected a number"),
        ({"optim": {"lr": -1}}, "optim.lr: -1.0 is not positive"),
        ({"optim": {"name": "adamm"}}, "did you mean adam"),
        ({"optim": {"betas": [0.9]}}, "optim.betas: expected 2 values, found 1"),
        ({"optim": {"betas": [0.9, "x"]}}, r"optim.betas\[1\]: expected a number"),
        ({"optim": {"momentum": 0.9}}, "optim.momentum: adamw has none"),
        ({"optim": {"name": "sgd", "eps": 1e-8}}, "optim.eps: sgd has none"),
        ({"train": {"seed": 1.5}}, "train.seed: expected a whole number, found 1.5"),
        ({"train": {"epochs": 0}}, "train.epochs: 0 is less than 1"),
        ({"train": {"epochs": 1, "steps": 1}}, "not both"),
        ({"train": {"out": True}}, "train.out: expected text, found true; put it in quotes"),
        (
            {"train": {"eval_every": None}},
            "train.eval_every: expected a whole number, found nothing; left out it is 0$",
        ),
        ({"report": {"html": None}}, "report.html: expected true or false, found nothing; left out it is true$"),
        ({"early_stopping": {"metric": None}}, "found nothing; left out it is 'validation_loss'$"),
        ({"report": {"html": "yes"}}, "report.html: expected true or false, found 'yes'"),
        ({"fit": {"budget": "8G"}}, "fit.budget: '8G' has a unit"),
        ({"fit": {"budget": 0}}, "fit.budget: 0 is less than one byte"),
        ({"fit": {"host_budget": -1}}, "fit.host_budget: -1 is less than one byte"),
        ({"fit": {"disk_budget": -1}}, "fit.disk_budget: -1 is less than one byte"),
        ({"fit": {"budget": [1]}}, "fit.budget: expected text or a whole number"),
        ({"fit": {"global_batch": 0}}, "fit.global_batch: 0 is less than 1"),
        ({"fit": {"clip_norm": 0}}, "fit.clip_norm"),
        ({"fit": {"fixed": [1]}}, "fit.fixed: expected keys and values"),
        ({"fit": {"allow": {"bf16": True}}}, "fit.allow: expected a list"),
        ({"model": {"hf": "x"}}, "exactly one of model.hf"),
        ({"model": {"python": "toy.py:build"}}, None),
        ({"model": {"python": "toy build"}}, "not of the form package.module:function"),
        ({"model": {"num_labels": 2}}, "model.num_labels goes with"),
        ({"data": {"python": "toy:data"}}, "exactly one of data.train"),
        ({"data": {"max_length": 1}}, "data.max_length"),
        ({"schedule": {"name": "step"}}, "schedule.name: expected one of constant, linear, cosine"),
        ({"schedule": {"warmup_steps": -1}}, "schedule.warmup_steps"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_path(sections: dict[str, Any], message: str | None) -> None:
    if message is None:  # a module may well be called py
        with_(**sections)
        return
    with pytest.raises(ConfigError, match=message):
        with_(**sections)


STOPPED: dict[str, Any] = {
    "data": {"train": "a.npz", "validation": "b.npz"},
    "train": {"eval_every": 10},
    "early_stopping": {},
}


def test_a_run_that_may_end_early_says_what_it_compares(tmp_path: Path) -> None:
    text = yaml.safe_dump({**LEAST, **STOPPED}).replace("early_stopping: {}", "early_stopping:")  # nothing below it
    config = load_config(write(tmp_path, text))

    assert config.early_stopping == EarlyStoppingConfig(3, 0.0, "validation_loss")
    assert load_config(write(tmp_path, json.dumps(config.to_json()), "again.json")) == config
    assert with_().early_stopping is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"eval_every": 0}}, "early_stopping compares evaluations, and train.eval_every is 0"),
        ({"data": {"train": "a.npz"}}, "early_stopping needs data to evaluate on: name files in data.validation"),
        ({"early_stopping": {"metric": "loss"}}, "early_stopping.metric: expected one of validation_loss, validation_accuracy"),
        ({"early_stopping": {"metric": "validation_accuracy"}, "model": {"python": "a:b", "task": "causal-lm"}},
         "validation_accuracy is of a classifier, and model.task is causal-lm"),
        ({"early_stopping": {"monitor": "x"}}, "did you mean early_stopping.metric"),
        ({"early_stopping": {"patience": 0}}, "early_stopping.patience: 0 is less than 1"),
        ({"early_stopping": True}, "early_stopping: expected keys and values"),
        ({"train": {"patience": 3, "eval_every": 1}}, "train.patience: no such key; did you mean early_stopping.patience"),
    ],
)  # fmt: skip
def test_early_stopping_that_cannot_be_meant_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json({**LEAST, **STOPPED, **sections}, Path("/there"))


@pytest.mark.parametrize("missing", ["model", "data"])
def test_a_missing_section_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{missing} is missing"):
        from_json({name: part for name, part in LEAST.items() if name != missing}, Path())


def test_a_hugging_face_model_needs_its_task() -> None:
    with pytest.raises(ConfigError, match=r"model\.task is missing"):
        from_json({**LEAST, "model": {"hf": "x"}}, Path())


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "'1e-4'", "0.0001", "+1.0e-04", ".0001"])
def test_numbers_are_numbers_however_yaml_reads_them(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, yaml.safe_dump(LEAST) + f"optim: {{lr: {text}}}\n")

    assert load_config(path).optim.lr == pytest.approx(1e-4, rel=0, abs=0)


def test_free_arguments_get_their_numbers_too(tmp_path: Path) -> None:
    path = write(
        tmp_path, "model: {python: 'toy:build', args: {scale: 1e-4, name: e5, at: 12}}\ndata: {train: data.npz}\n"
    )

    assert load_config(path).model.args == {"scale": 1e-4, "name": "e5", "at": 12}


def test_settings_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump({**LEAST, "train": {"epochs": 3}}))

    config = load_config(path, ["optim.lr=1e-2", "train.steps=7", "fit.allow=[bf16]", "data.train=[a.npz, b.npz]"])

    assert (config.optim.lr, config.train.steps, config.train.epochs) == (1e-2, 7, None)
    assert config.fit.allow == ("bf16",)
    assert config.data.train == ("a.npz", "b.npz")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.lr", "is no setting"),
        ("=1", "is no setting"),
        ("optim..lr=1", "is no setting"),
        ("optim.rl=1", "did you mean optim.lr"),
        ("fit.budget.x=1", "budget holds a value"),
        ("optim.lr=[", "optim.lr"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, yaml.safe_dump(LEAST)), [setting])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "run.yaml: line 1"),
        ("a: 1\nmodel: {hf: x, hf: y}\n", "line 2: the key 'hf' is given twice"),
        ("model: {args: {x: !!binary aGk=}}", "it holds more than texts, numbers, lists and keys with values"),
        ("model: &model {args: *model}", "it holds more than texts, numbers, lists and keys with values"),
        ("just words", "expected sections"),
        ("", "expected sections"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_a_date_is_text(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "model: {python: 'net:build', args: {since: 2026-01-31}}\ndata: {train: a.npz}\n")
    )
    assert config.model.args == {"since": "2026-01-31"}


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_what_may_be_left_out_is_no_number_without_an_end_either(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"--set fit.clip_norm=.*: expected a number, found (nan|inf)"):
        load_config(write(tmp_path, yaml.safe_dump(LEAST)), [f"fit.clip_norm={value}"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*nothing.yaml: No such file"):
        load_config(tmp_path / "nothing.yaml")


def test_an_error_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json: fit\.x: no such key"):
        load_config(write(tmp_path, json.dumps({**LEAST, "fit": {"x": 1}}), "run.json"))
