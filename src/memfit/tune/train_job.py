"""A run as a TrainJob of Kubeflow's Trainer (trainer.kubeflow.org/v1alpha1). Checked against the published schema; never applied to a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.tune.search import Search


def train_job(
    search: Search,
    values: Mapping[str, Any],
    image: str,
    run_file: str = "run.yaml",
    *,
    runtime: str = "torch-distributed",
) -> dict[str, Any]:
    """The TrainJob of one trial, such as the best.

    Args:
        search: whose trial it is.
        values: of the parameters.
        image: with the command, the configuration and the data in it.
        run_file: the configuration inside the image.
        runtime: name of the ClusterTrainingRuntime.
    """
    from memfit.tune.search import command_with

    if search.is_command:
        from pathlib import Path

        words = list(command_with(search, values, 0, Path("/tmp/memfit")))  # noqa: S108 - inside the container
    else:
        words = ["memfit", "train", run_file]
        words += [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    name = re.sub(r"[^a-z0-9-]+", "-", search.name.lower()).strip("-") or "run"
    return resource(name, words, image, runtime)


def resource(
    name: str, words: Sequence[str], image: str, runtime: str = "torch-distributed", **trainer: Any
) -> dict[str, Any]:
    """A TrainJob of one node.

    Args:
        name: of it.
        words: the command.
        image: that it runs in.
        runtime: name of the ClusterTrainingRuntime.
        trainer: what else `spec.trainer` says.
    """
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": {"image": image, "command": list(words), "numNodes": 1, **trainer},
        },
    }
