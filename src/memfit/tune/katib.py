"""A search as a Katib Experiment (kubeflow.org/v1beta1), and an Experiment as a search.

What one side cannot say is refused with a sentence, or told among the notes, and never guessed. The cluster's own schema accepts any fields; Katib's Python
types are what a test reads an Experiment with. None has been applied to a cluster.
Source: https://www.kubeflow.org/docs/components/katib/user-guides/hp-tuning/configure-experiment/
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from memfit.errors import ConfigError
from memfit.tune.search import PLACE, Objective, Search
from memfit.tune.space import Choices, Range

API_VERSION: Final = "kubeflow.org/v1beta1"
KIND: Final = "Experiment"
ALGORITHMS: Final = {
    "tpe": "tpe",
    "random": "random",
    "grid": "grid",
    "cmaes": "cmaes",
    "gp": "bayesianoptimization",
    "qmc": "sobol",
}
_CONTAINER: Final = "training-container"
_REFERENCE: Final = re.compile(r"\$\{trialParameters\.([\w-]+)\}")


def experiment(search: Search, image: str, run_file: str = "run.yaml") -> tuple[dict[str, Any], tuple[str, ...]]:
    """The Experiment of a search.

    Args:
        search: one objective, and a sampler that Katib has.
        image: of the container of a trial, with the command and the data in it.
        run_file: the configuration inside the image, where a trial is a run of memfit.

    Returns:
        The resource as plain data, and notes on what Katib cannot say.

    Raises:
        ConfigError: Katib has no such sampler, or takes one objective only.
    """
    config = search.config
    sampler = config.sampler if isinstance(config.sampler, str) else config.sampler.name
    if sampler not in ALGORITHMS:
        raise ConfigError(f"search.sampler: Katib has no {sampler}; it has {', '.join(ALGORITHMS)}")
    if len(config.objectives) > 1:
        raise ConfigError(f"search.objective: Katib takes one, and there are {len(config.objectives)}")
    (objective,) = config.objectives
    pruner = config.pruner if isinstance(config.pruner, str) else config.pruner.name
    notes = [
        "Katib starts every trial: what cannot fit ends there with memfit's exit status 1, and is not known before"
    ]
    if pruner not in {"none", "median"}:
        notes.append(f"search.pruner: Katib has no {pruner}; trials run to their end")
    if config.at_once == "auto":
        notes.append("search.at_once: Katib does not pack by bytes; 3 trials run at a time")
    if objective.take == "best":
        notes.append("search.objective.take: best is Katib's metric strategy max or min")
    spec: dict[str, Any] = {
        "objective": {
            "type": objective.direction,
            "objectiveMetricName": objective.name,
            "metricStrategies": [{"name": objective.name, "value": _strategy(objective)}],
        },
        "algorithm": {"algorithmName": ALGORITHMS[sampler]},
        "parallelTrialCount": 3 if config.at_once == "auto" else config.at_once,
        "maxTrialCount": config.trials,
        "maxFailedTrialCount": config.trials,
        "parameters": [
            {"name": _name(name), **_parameter(each, plain=search.is_command)} for name, each in search.space.items()
        ],
        "metricsCollectorSpec": _collector(search),
        "trialTemplate": {
            "primaryContainerName": _CONTAINER,
            "trialParameters": [
                {"name": _name(name), "description": name, "reference": _name(name)} for name in search.space
            ],
            "trialSpec": {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "spec": {
                    "template": {
                        "spec": {
                            "containers": [_container(search, image, run_file)],
                            "restartPolicy": "Never",
                        }
                    }
                },
            },
        },
    }
    if pruner == "median":
        spec["earlyStopping"] = {"algorithmName": "medianstop"}
    named = {"name": re.sub(r"[^a-z0-9-]+", "-", search.name.lower()).strip("-") or "search"}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": spec}, tuple(notes)


def _strategy(objective: Objective) -> str:
    if objective.take == "last":
        return "latest"
    return "max" if objective.direction == "maximize" else "min"


def _name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _parameter(parameter: Range | Choices, *, plain: bool) -> dict[str, Any]:
    if isinstance(parameter, Choices):
        values = list(parameter.values.values())
        numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
        texts = [each if isinstance(each, str) and plain else json.dumps(each) for each in values]
        return {"parameterType": "discrete" if numbers else "categorical", "feasibleSpace": {"list": texts}}
    space = {"min": repr(parameter.low), "max": repr(parameter.high)}
    if parameter.step is not None:
        space["step"] = repr(parameter.step)
    if parameter.log:
        space["distribution"] = "logUniform"
    return {"parameterType": "int" if parameter.whole else "double", "feasibleSpace": space}


def _collector(search: Search) -> dict[str, Any]:
    if search.is_command:
        return {"collector": {"kind": "StdOut"}}
    file = {"path": "/tmp/memfit/log.jsonl", "kind": "File", "format": "JSON"}  # noqa: S108 - inside the container
    return {"collector": {"kind": "File"}, "source": {"fileSystemPath": file}}


def _container(search: Search, image: str, run_file: str) -> dict[str, Any]:
    if search.is_command:
        words = [PLACE.sub(lambda match: _place(match[1]), word) for word in search.config.command]
        limit = search.config.memory
    else:
        words = ["memfit", "train", run_file, "--set", "train.out=/tmp/memfit"]
        words += [word for name in search.space for word in ("--set", f"{name}={_place(name)}")]
        limit = None
    made: dict[str, Any] = {"name": _CONTAINER, "image": image, "command": words}
    if limit is not None:
        from memfit.units import parse_bytes

        made["resources"] = {"limits": {"memory": str(parse_bytes(limit))}}
    return made


def _place(name: str) -> str:
    return f"${{trialParameters.{_name(name)}}}"


# ---------------------------------------------------------------------------------------------------------------- import


def imported(data: Mapping[str, Any]) -> dict[str, Any]:
    """An Experiment as what a search file holds: a search whose trials are its container's command.

    Args:
        data: the resource.

    Raises:
        ConfigError: a part of it has no meaning here.
    """
    spec = data.get("spec") or {}
    algorithm = (spec.get("algorithm") or {}).get("algorithmName", "random")
    samplers = {theirs: ours for ours, theirs in ALGORITHMS.items()} | {"multivariate-tpe": "tpe"}
    if algorithm not in samplers:
        raise ConfigError(f"spec.algorithm: {algorithm} has no meaning here; {', '.join(samplers)} have")
    for name in ("nasConfig",):
        if spec.get(name):
            raise ConfigError(f"spec.{name} has no meaning here: memfit searches values, not architectures")
    objective = spec.get("objective") or {}
    if not objective.get("objectiveMetricName"):
        raise ConfigError("spec.objective.objectiveMetricName is missing: the metric that counts")
    stopping = (spec.get("earlyStopping") or {}).get("algorithmName")
    if stopping not in {None, "medianstop"}:
        raise ConfigError(f"spec.earlyStopping: {stopping} has no meaning here; medianstop has")
    metric = objective["objectiveMetricName"]
    strategies = {each["name"]: each["value"] for each in objective.get("metricStrategies") or ()}
    template = spec.get("trialTemplate") or {}
    ignored = {
        "spec.objective.goal": objective.get("goal"),
        "spec.algorithm.algorithmSettings": (spec.get("algorithm") or {}).get("algorithmSettings"),
        "spec.earlyStopping.algorithmSettings": (spec.get("earlyStopping") or {}).get("algorithmSettings"),
    }
    for name, value in ignored.items():
        if value is not None:
            warnings.warn(
                f"{name} is not read: the search runs all of its trials, with Optuna's own settings", stacklevel=2
            )
    sampler: Any = samplers[algorithm]
    if algorithm == "multivariate-tpe":
        sampler = {"name": "tpe", "options": {"multivariate": True}}
    return {
        "search": {
            "space": {each["name"]: _read_parameter(each) for each in spec.get("parameters") or ()},
            "objective": {
                "name": metric,
                "direction": objective.get("type", "minimize"),
                "take": "last" if strategies.get(metric, "latest") == "latest" else "best",
            },
            "sampler": sampler,
            "pruner": "none" if stopping is None else "median",
            "trials": spec.get("maxTrialCount", 20),
            "at_once": spec.get("parallelTrialCount", 3),
            "command": _read_command(template),
            "study": (data.get("metadata") or {}).get("name", "experiment"),
        }
    }


def _read_parameter(parameter: Mapping[str, Any]) -> Any:
    kind, space = parameter.get("parameterType"), parameter.get("feasibleSpace") or {}
    where = f"spec.parameters: {parameter.get('name')}"
    try:
        match kind:
            case "categorical":
                return list(space["list"])
            case "discrete":
                return [_number(each) for each in space["list"]]
            case "int" | "double":
                read = int if kind == "int" else float
                made: dict[str, Any] = {"low": read(space["min"]), "high": read(space["max"])}
                if space.get("step"):
                    made["step"] = read(space["step"])
                if space.get("distribution", "uniform") != "uniform":
                    if space["distribution"] != "logUniform":
                        raise ConfigError(f"{where}: the distribution {space['distribution']} has no meaning here")
                    made["log"] = True
                return made
            case _:
                raise ConfigError(
                    f"{where}: there is no type {kind!r}; there are double, int, discrete and categorical"
                )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: its feasibleSpace cannot be read ({error})") from error


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _read_command(template: Mapping[str, Any]) -> list[str]:
    references = {each["name"]: each["reference"] for each in template.get("trialParameters") or ()}
    primary = template.get("primaryContainerName")
    for container in _containers(template.get("trialSpec")):
        if primary in {None, container.get("name")}:
            words = [str(word) for word in (*container.get("command", ()), *container.get("args", ()))]
            if not words:
                raise ConfigError("spec.trialTemplate: its container has no command, so there is nothing to run here")
            for word in words:
                for name in _REFERENCE.findall(word):
                    if name not in references:
                        raise ConfigError(
                            f"spec.trialTemplate: ${{trialParameters.{name}}} is none of its trialParameters"
                        )
            return [_REFERENCE.sub(lambda match: f"{{{references[match[1]]}}}", word) for word in words]
    raise ConfigError("spec.trialTemplate: it holds no container with a command")


def _containers(data: Any) -> list[dict[str, Any]]:
    """All containers in a resource, of whatever kind it is."""
    if isinstance(data, Mapping):
        found = [dict(each) for each in data.get("containers") or () if isinstance(each, Mapping)]
        return found + [each for value in data.values() for each in _containers(value)]
    if isinstance(data, list):
        return [each for value in data for each in _containers(value)]
    return []
