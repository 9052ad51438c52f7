"""Katib Experiments and TrainJobs: of the published form, and back again."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from memfit.errors import ConfigError
from memfit.tune import load_search, read_search
from memfit.tune.katib import experiment, imported
from memfit.tune.train_job import train_job
from tune import searches

SPACE: dict[str, Any] = {
    "lr": {"low": 1e-5, "high": 1e-2, "log": True},
    "layers": {"low": 2, "high": 8, "step": 2},
    "batch": [16, 32],
    "name": ["adam", "sgd"],
}


def search(folder: Path, **more: Any) -> Any:
    told = {
        "command": "python3 train.py {lr} --layers={layers} {batch} {name}",
        "space": SPACE,
        "objective": "accuracy",
        "direction": "maximize",
        **more,
    }
    return read_search({"search": {**told, "trials": 12, "at_once": 2}}, folder, "My search")


def test_an_experiment_says_what_the_search_says(tmp_path: Path) -> None:
    made, notes = experiment(search(tmp_path, pruner="median", memory="1GiB", budget="4GiB"), "image:1")
    spec = made["spec"]
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == (
        "kubeflow.org/v1beta1",
        "Experiment",
        "my-search",
    )
    assert spec["parameters"][0] == {
        "name": "lr",
        "parameterType": "double",
        "feasibleSpace": {"min": "1e-05", "max": "0.01", "distribution": "logUniform"},
    }
    assert [each["parameterType"] for each in spec["parameters"]] == ["double", "int", "discrete", "categorical"]
    (container,) = spec["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][2:4] == ["${trialParameters.lr}", "--layers=${trialParameters.layers}"]
    assert container["resources"] == {"limits": {"memory": str(1 << 30)}}
    assert spec["earlyStopping"] == {"algorithmName": "medianstop"}
    assert notes[0].startswith("Katib starts every trial")


def test_a_run_of_memfit_is_a_command_there(tmp_path: Path) -> None:
    space = {"optim.lr": [0.1, 0.2], "fit.allow": {"choices": {"fp32": [], "bf16": ["bf16"]}}}
    made, _ = experiment(searches.toy(tmp_path, space), "image:1")
    (container,) = made["spec"]["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["containers"]
    assert "fit.allow=${trialParameters.fit_allow}" in container["command"]
    assert made["spec"]["parameters"][1]["feasibleSpace"]["list"] == ["[]", '["bf16"]']


def test_katibs_own_model_reads_it_whole(tmp_path: Path) -> None:
    """Katib's types drop a field that they do not know without a word: what is read must be what was written."""
    models = pytest.importorskip("kubeflow_katib_api.models", reason="pip install kubeflow-katib-api")
    for each in (search(tmp_path), searches.toy(tmp_path, {"optim.lr": [0.1, 0.2]})):
        made, _ = experiment(each, "image:1")
        assert models.V1beta1Experiment.from_dict(copy.deepcopy(made)).to_dict() == made


def test_an_experiment_comes_back_as_the_search(tmp_path: Path) -> None:
    before = search(tmp_path, pruner="median")
    made, _ = experiment(before, "image:1")
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(made), encoding="utf-8")
    after = load_search(file)
    assert (after.space, after.config.command) == (before.space, before.config.command)
    assert after.config.objectives == before.config.objectives
    assert (after.config.trials, after.config.at_once, after.config.pruner) == (12, 2, "median")


def test_what_an_experiment_says_besides_is_told_and_its_sampler_is_kept(tmp_path: Path) -> None:
    made, _ = experiment(search(tmp_path), "image:1")
    made["spec"]["objective"]["goal"] = 0.99
    made["spec"]["algorithm"] = {"algorithmName": "multivariate-tpe"}
    with pytest.warns(UserWarning, match="spec.objective.goal is not read: the search runs all of its trials"):
        read = imported(made)
    assert read["search"]["sampler"] == {"name": "tpe", "options": {"multivariate": True}}
    made["spec"]["objective"].pop("goal")
    made["spec"]["algorithm"]["algorithmSettings"] = [{"name": "random_state", "value": "10"}]
    with pytest.warns(UserWarning, match="spec.algorithm.algorithmSettings is not read"):
        imported(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["spec"]["algorithm"].update(algorithmName="enas"), "spec.algorithm: enas has no meaning here"),
        (lambda e: e["spec"].update(nasConfig={"a": 1}), "spec.nasConfig has no meaning here"),
        (lambda e: e["spec"]["objective"].pop("objectiveMetricName"), "spec.objective.objectiveMetricName is missing"),
        (lambda e: e["spec"].update(earlyStopping={"algorithmName": "x"}), "spec.earlyStopping: x has no meaning here"),
        (
            lambda e: e["spec"]["parameters"][0].update(parameterType="float"),
            "spec.parameters: lr: there is no type 'float'",
        ),
        (
            lambda e: e["spec"]["parameters"][0]["feasibleSpace"].pop("min"),
            "spec.parameters: lr: its feasibleSpace cannot be read",
        ),
        (
            lambda e: e["spec"]["parameters"][0]["feasibleSpace"].update(distribution="normal"),
            "the distribution normal has no meaning here",
        ),
        (
            lambda e: e["spec"]["trialTemplate"]["trialParameters"].pop(0),
            "${trialParameters.lr} is none of its trialParameters",
        ),
        (lambda e: e["spec"]["trialTemplate"].pop("trialSpec"), "it holds no container with a command"),
        (
            lambda e: e["spec"]["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["containers"][0].pop(
                "command"
            ),
            "its container has no command",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    made, _ = experiment(search(tmp_path), "image:1")
    change(made)
    with pytest.raises(ConfigError, match=re.escape(message)):
        imported(made)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampler": "nsga2"}, "search.sampler: Katib has no nsga2"),
        ({"objective": [{"name": "a"}, {"name": "b"}]}, "search.objective: Katib takes one, and there are 2"),
    ],
)
def test_what_katib_cannot_say_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        experiment(search(tmp_path, **more), "image:1")


def test_a_train_job_has_the_values_of_a_trial(tmp_path: Path) -> None:
    made = train_job(searches.toy(tmp_path, {"optim.lr": [0.1, 0.2]}), {"optim.lr": 0.1}, "image:1")
    assert made["spec"]["trainer"]["command"] == ["memfit", "train", "run.yaml", "--set", "optim.lr=0.1"]


def test_a_train_job_is_of_the_published_schema(tmp_path: Path) -> None:
    """The CRD of Kubeflow's Trainer, a file named by the environment; objects are closed, as the cluster closes them."""
    file = os.environ.get("MEMFIT_TRAINJOB_CRD")
    if not file:
        pytest.skip(
            "MEMFIT_TRAINJOB_CRD names no file (manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer)"
        )
    jsonschema = pytest.importorskip("jsonschema")
    crd = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1alpha1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    made = train_job(search(tmp_path), {"lr": 0.1, "layers": 2, "batch": 16, "name": "sgd"}, "image:1")
    jsonschema.validate(made, schema)
    wrong = json.loads(json.dumps(made))
    wrong["spec"]["trainer"]["imagee"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if (
        isinstance(made.get("properties"), dict)
        and made.get("type") == "object"
        and "metadata" not in made["properties"].get("x", {})
    ):
        made.setdefault("additionalProperties", False)
    return made
