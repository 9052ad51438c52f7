"""The `search:` part is read strictly: what cannot be meant is one sentence that names the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import ConfigError, InputError
from memfit.tune import load_search, read_search, run
from memfit.tune.sampling import PRUNERS, SAMPLERS, pruner_of, sampler_of
from memfit.tune.search import Named, command_with
from memfit.tune.space import Choices, Range, read_space
from tune import searches

LR = {"optim.lr": {"low": 1e-5, "high": 1e-2, "log": True}}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"optim.lrr": [1, 2]}, "search.space.optim.lrr: the run has no such key; did you mean optim.lr?"),
        ({"fit.budgets": ["1MiB"]}, "search.space.fit.budgets: the run has no such key; did you mean fit.budget?"),
        ({"train.out": ["a", "b"]}, "search.space.train.out: each trial has a folder of its own below search.out"),
        ({"optim": [1]}, "search.space.optim is a section, not a key: search one of optim.name, "),
        ({"lora.rnk": [8]}, "search.space.lora.rnk: the run has no such key; did you mean lora.rank?"),
        ({"lora.rank.x": [8]}, "search.space.lora.rank.x: lora.rank is a value and has no keys"),
        ({"optim.lr.x": [1]}, "search.space.optim.lr.x: optim.lr is a value and has no keys"),
        ({"optim.lr": {"low": 1, "high": 0.1}}, "search.space.optim.lr: low is 1 and high is 0.1, so the range is empty"),
        ({"optim.lr": {"low": 0.0, "high": 0.1, "log": True}}, "a logarithmic scale begins above 0, and low is 0.0"),
        ({"optim.lr": {"low": 0.1, "high": 1.0, "log": True, "step": 0.1}}, "log and step contradict each other"),
        ({"optim.lr": {"low": 0.1, "high": 1.0, "step": 5}}, "step is 5, which does not fit between 0.1 and 1.0"),
        ({"optim.lr": {"low": 0.1, "hihg": 1.0}}, "search.space.optim.lr.hihg: no such key; did you mean high?"),
        ({"optim.lr": {"low": 0.1}}, "search.space.optim.lr.high is missing"),
        ({"optim.lr": {"low": "a", "high": 1}}, "search.space.optim.lr.low: expected a number, found 'a'"),
        ({"optim.lr": {"low": 0.1, "high": 1.0, "log": "yes"}}, "search.space.optim.lr.log: expected true or false"),
        ({"optim.lr": []}, "search.space.optim.lr: there are no choices"),
        ({"optim.lr": [0.1, 0.1]}, "search.space.optim.lr: a choice stands there twice"),
        ({"optim.lr": {"choices": 3}}, "search.space.optim.lr.choices: expected a list, or values by their labels"),
        ({"optim.lr": {"choices": [1], "low": 0}}, "choices stand alone; what else is there, low, belongs to a range"),
        ({"optim.lr": 0.1}, "search.space.optim.lr: 0.1 is one value, so there is nothing to search"),
        ({}, "search.space is empty"),
        ({"optim.lr": {"low": -1.0, "high": 0.1}}, "search.space.optim.lr: with -1.0 the run cannot be read: optim.lr: -1.0 is not positive"),
        ({"fit.global_batch": {"low": 1.5, "high": 8}}, "with 1.5 the run cannot be read: fit.global_batch: expected a whole number"),
        ({"fit.budget": ["8G"]}, "search.space.fit.budget: with '8G' the run cannot be read"),
        ({"lr": [0.1]}, "search.space.lr: the run has no such key; did you mean optim.lr?"),
        ({"optim.learning_rate": [0.1]}, "search.space.optim.learning_rate: the run has no such key; did you mean optim.lr?"),
        ({"train.batch_size": [8]}, "search.space.train.batch_size: the run has no such key; did you mean fit.global_batch?"),
        ({"optim.lr": {"type": "log", "low": 0.1}}, "search.space.optim.lr.type: no such key; a range has low, high, step and log"),
        ({"fit.global_batch": {"low": 1, "high": 10**30}}, "search.space.fit.global_batch.high: expected a number, found 1000"),
        ({"model.args.width": [{1, 2}]}, "the search holds more than texts, numbers, lists and keys with values"),
    ],
)  # fmt: skip
def test_a_space_that_cannot_be_meant_is_refused(tmp_path: Path, space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        searches.toy(tmp_path, space)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"objectiv": "loss"}, "search.objectiv: no such key; did you mean search.objective?"),
        ({"objective": "validation_los"}, "a run has no metric 'validation_los'; did you mean validation_loss?"),
        ({"objective": []}, "search.objective is missing"),
        (
            {"objective": "validation_accuracy"},
            "validation_accuracy is to become large: write {name: validation_accuracy, direction: maximize}",
        ),
        (
            {"objective": {"name": "loss", "direction": "up"}},
            "search.objective.direction: expected one of minimize, maximize, found 'up'",
        ),
        (
            {"objective": [{"name": "loss"}, {"metric": "loss"}]},
            "search.objective[1].metric: no such key; there are: name, direction, take",
        ),
        ({"objective": [{"name": "loss"}, {"name": "loss"}]}, "search.objective: loss, loss names a metric twice"),
        ({"memory": "1GiB"}, "search.memory goes with search.command"),
        ({"trials": 0}, "search.trials: 0 is less than 1"),
        ({"at_once": 0}, "search.at_once: 0 is less than 1"),
        ({"timeout": -1}, "search.timeout: -1.0 is not positive"),
        ({"grace": -1}, "search.grace: -1.0 is less than 0"),
        ({"budget": "8G"}, "search.budget is no number of bytes: '8G' has a unit memfit does not read"),
        ({"start": [{"optim.lrr": 1}]}, "search.start[0].optim.lrr: no such parameter; did you mean optim.lr?"),
        ({"start": [{"optim.lr": 1.0}]}, "search.start[0].optim.lr: 1.0 is not between 1e-05 and 0.01"),
        ({"timeout": float("inf")}, "search.timeout: expected a number, found inf"),
    ],
)
def test_a_search_that_cannot_be_meant_is_refused(tmp_path: Path, search: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        searches.toy(tmp_path, LR, **search)


@pytest.mark.parametrize(
    ("value", "message"),
    [(3, "3 is none of the values from 1 in steps of 5"), (2.5, "2.5 is none of the values from 1")],
)
def test_what_is_tried_first_is_of_the_space(tmp_path: Path, value: float, message: str) -> None:
    space = {"x": {"low": 1, "high": 11, "step": 5}}
    with pytest.raises(ConfigError, match=re.escape(f"search.start[0].x: {message}")):
        searches.command(tmp_path, space=space, start=[{"x": value}])
    assert searches.command(tmp_path, space=space, start=[{"x": 6}]).config.start


def test_what_is_wrong_with_the_run_itself_is_no_fault_of_the_space(tmp_path: Path) -> None:
    data = {**searches.toy_file(tmp_path, LR), "defaults": {"x": 1}}
    with pytest.raises(ConfigError, match="^defaults: no such key"):
        read_search(data, tmp_path)


def test_an_objective_of_validation_needs_validation_data(tmp_path: Path) -> None:
    data = searches.toy_file(tmp_path, LR)
    data["data"] = {"train": "train.npz"}
    with pytest.raises(ConfigError, match="validation_loss needs data.validation, and there is none"):
        read_search(data, tmp_path)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"command": "no-such-command {x}"}, "search.command: there is no command 'no-such-command'"),
        ({"command": "python3 {xx}"}, "search.command: {xx} is no parameter; did you mean x?"),
        ({"command": "python3 run.py"}, "search.space.x: the command does not use it: write {x}"),
        ({"command": "python3 {x}", "start": [{"x": "d"}]}, "search.start[0].x: 'd' is none of the choices 1, 2"),
        ({"command": "python3 '{x}"}, "search.command cannot be read as a shell reads it: No closing quotation"),
        ({"command": " "}, "search.command is empty: name a program"),
        (
            {"command": "python3 a.py {x} && python3 b.py"},
            "search.command: '&&' is a shell's, and no shell reads the command",
        ),
        (
            {"command": "train.py {x}"},
            "search.command: train.py is no program that the system starts: begin with what runs it, as in python3",
        ),
        ({"command": "./train.py {x}"}, "search.command: ./train.py is no program that the system starts"),
        (
            {"command": "python3 {x}", "at_once": "auto"},
            "search.at_once: auto needs search.memory, the bytes of each trial",
        ),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(tmp_path: Path, search: dict[str, Any], message: str) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_search({"search": {"space": {"x": [1, 2]}, "objective": "value", **search}}, tmp_path)


def test_a_trial_is_a_command_or_a_run(tmp_path: Path) -> None:
    data = searches.toy_file(tmp_path, LR)
    data["search"]["command"] = "python3 {optim.lr}"
    with pytest.raises(
        ConfigError, match="search.command and model, data, fit, train: a trial is a command or the run"
    ):
        read_search(data, tmp_path)


def test_a_file_without_a_search_says_so(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {python: 'toy:build'}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.yaml: search is missing: what is to be searched"):
        load_search(file)
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_search(tmp_path / "absent.yaml")


def test_a_file_in_place_of_a_search_is_told() -> None:
    with pytest.raises(InputError, match=r"run takes a search, not 'search.yaml': load_search"):
        run("search.yaml")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"read_search takes what a search file holds, not 'search.yaml': of a file, load"
    ):
        read_search("search.yaml")  # type: ignore[arg-type]


def test_settings_change_the_search_and_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(searches.toy_file(tmp_path, LR)), encoding="utf-8")
    search = load_search(file, ["search.trials=7", "fit.global_batch=32"])
    assert (search.config.trials, search.run["fit"]["global_batch"], search.name) == (7, 32, "run")


@pytest.mark.parametrize(
    "spec", [5, {"objective": "loss"}, {"objective": {"objectiveMetricName": "a"}, "parameters": [{}]}]
)
def test_a_katib_experiment_of_other_parts_is_told(tmp_path: Path, spec: object) -> None:
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps({"kind": "Experiment", "spec": spec}), encoding="utf-8")
    with pytest.raises(ConfigError, match="experiment.json: a part of this Katib Experiment is of another kind"):
        load_search(file)


def test_settings_change_a_parameter_whose_name_has_dots(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(searches.toy_file(tmp_path, LR)), encoding="utf-8")
    settings = ["search.space.optim.lr.high=0.1", "search.space.model.args.width=[8, 16]"]
    space = load_search(file, settings).space
    assert space["optim.lr"] == Range(1e-5, 0.1, log=True)
    assert space["model.args.width"] == Choices({8: 8, 16: 16})


def test_values_stand_where_the_run_has_them(tmp_path: Path) -> None:
    space = {**LR, "fit.allow": {"choices": {"none": [], "bf16": ["bf16"]}}, "model.args.width": [8, 16]}
    search = searches.toy(tmp_path, space)
    run = search.run_with({"optim.lr": 0.001, "fit.allow": ["bf16"], "model.args.width": 16})
    assert (run["optim"]["lr"], run["fit"]["allow"], run["model"]["args"]) == (0.001, ["bf16"], {"width": 16})
    assert search.run.get("optim") is None
    assert search.space["fit.allow"].value("bf16") == ["bf16"]


def test_what_lies_inside_another_parameter_is_set_after_it(tmp_path: Path) -> None:
    search = searches.toy(tmp_path, {"model.args.width": [8], "model.args": [{}, {"width": 4}]})
    for _ in range(2):
        values = {"model.args.width": 8, "model.args": search.space["model.args"].value('{"width": 4}')}
        assert search.run_with(values)["model"]["args"] == {"width": 8}
        assert search.space["model.args"].value('{"width": 4}') == {"width": 4}


def test_choices_that_are_no_scalars_are_known_by_their_text() -> None:
    (parameter,) = read_space({"fit.freeze": [[], ["embeddings"]]}).values()
    assert parameter == Choices({"[]": [], '["embeddings"]': ["embeddings"]})


def test_whole_ends_make_whole_numbers() -> None:
    space = read_space(
        {"a": {"low": 1, "high": 8}, "b": {"low": 1, "high": 8.5}, "c": {"low": 0, "high": 1, "step": 0.25}}
    )
    assert [space[name].whole for name in "abc"] == [True, False, False]  # type: ignore[union-attr]
    assert Range(1, 8, 2).grid("a") == [1, 3, 5, 7]
    assert space["c"].grid("c") == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_words_in_braces_are_replaced(tmp_path: Path) -> None:
    search = searches.command(tmp_path)
    words = command_with(search, {"x": 1.5, "y": ["a", 1]}, 3, tmp_path)
    assert words[-2:] == ("1.5", '["a", 1]')


def test_a_parameter_may_have_a_dash(tmp_path: Path) -> None:
    search = searches.command(tmp_path, space={"learning-rate": [0.1, 0.2]})
    assert command_with(search, {"learning-rate": 0.1}, 0, tmp_path)[-1] == "0.1"


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_can_be_made(tmp_path: Path, name: str) -> None:
    search = searches.command(tmp_path, space={"x": [1, 2], "y": {"low": 0, "high": 4}}, sampler=name)
    assert type(sampler_of(search, 0)).__name__ == SAMPLERS[name]


@pytest.mark.parametrize("name", PRUNERS)
def test_each_pruner_can_be_made(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"threshold": {"upper": 1.0}, "patient": {"wrapped_pruner": "median", "patience": 1}}
    made = pruner_of(searches.command(tmp_path, pruner={"name": name, "options": options.get(name, {})}))
    assert type(made).__name__ == PRUNERS[name]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"sampler": "tpee"}, "search.sampler: there is no 'tpee'; did you mean tpe?"),
        ({"sampler": {"name": "tpe", "options": {"n_startup": 3}}}, "search.sampler.options.n_startup: no such option; did you mean n_startup_trials?"),
        ({"pruner": "hyperbands"}, "search.pruner: there is no 'hyperbands'; did you mean hyperband?"),
        ({"pruner": "median", "objective": [{"name": "a"}, {"name": "b"}]}, "median compares trials by one objective, and there are 2"),
        ({"sampler": "grid"}, "search.space.x: a grid needs values that can be counted"),
        ({"pruner": {"name": "percentile", "options": {"percentile": 200}}}, "search.pruner: Optuna does not take these options"),
        ({"sampler": {"name": "tpe", "options": {"seed": 3}}}, "search.sampler.options.seed: the seed of a search is search.seed"),
        ({"sampler": {"name": "tpe", "options": {"n_startup_trials": "few"}}}, "search.sampler.options.n_startup_trials: expected a whole number, found 'few'"),
        ({"pruner": "patient"}, "search.pruner: patient needs wrapped_pruner, patience: write {name: patient, options: {wrapped_pruner: ...}}"),
    ],
)  # fmt: skip
def test_a_sampler_or_pruner_that_is_not_there_is_refused(tmp_path: Path, search: dict[str, Any], message: str) -> None:
    read = searches.command(tmp_path, **search)
    with pytest.raises((ConfigError, InputError), match=re.escape(message)):
        sampler_of(read, 0)
        pruner_of(read)


def test_options_reach_the_sampler(tmp_path: Path) -> None:
    read = searches.command(tmp_path, sampler={"name": "tpe", "options": {"n_startup_trials": "3"}})
    assert isinstance(read.config.sampler, Named)
    assert sampler_of(read, 0)._n_startup_trials == 3  # type: ignore[attr-defined]
