"""MLflow: a database in the run's folder, or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from memfit.trackers.start import PROJECT, End, OpenRun, Start, flat

_STATUS: Final[Mapping[End, str]] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_LONGEST_VALUE: Final = 6000  # of a parameter
_MOST: Final = 100  # parameters at once


class _MLflow:
    """By the client, which knows one run: the module's functions act on whatever run is active in the process."""

    def __init__(self, start: Start) -> None:
        from mlflow import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{start.folder.resolve()}/mlflow.db"
        self.look = f"mlflow ui --backend-store-uri {place}"
        for name in ("mlflow.store.db.utils", "alembic"):  # they tell how they make their tables
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=place)
        self._run = self._go_on(start) or self._new(start)
        start.keep(self._run)

    def _new(self, start: Start) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        # What belongs to the runs of a database in a folder lies beside it; a server has a place of its own.
        files = None if "MLFLOW_TRACKING_URI" in os.environ else (start.folder / "artifacts").resolve().as_uri()
        experiment = self._client.create_experiment(name, files) if found is None else found.experiment_id
        run = self._client.create_run(experiment, run_name=start.name, tags={"mlflow.note.content": start.about})
        self._parameters(str(run.info.run_id), start, {})
        return str(run.info.run_id)

    def _go_on(self, start: Start) -> str | None:
        from mlflow.exceptions import MlflowException

        run = start.known()
        if run is None:
            return None
        try:
            there = self._client.get_run(run).data.params
        except MlflowException:  # another database, or deleted there
            return None
        self._client.update_run(run, status="RUNNING")
        self._parameters(run, start, there)
        return run

    def _parameters(self, run: str, start: Start, there: Mapping[str, str]) -> None:
        """A parameter is written once; what a resumed run has changed is told in a tag."""
        from mlflow.entities import Param, RunTag

        told = {name: str(value)[:_LONGEST_VALUE] for name, value in flat(start.settings)}
        new = [Param(name, value) for name, value in told.items() if name not in there]
        changed = [
            RunTag(f"from_step_{start.step + 1}.{name}", value)
            for name, value in told.items()
            if there.get(name, value) != value
        ]
        for first in range(0, len(new), _MOST):
            self._client.log_batch(run, params=new[first : first + _MOST])
        self._client.log_batch(run, tags=changed)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows: list[Any] = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=rows)

    def close(self, end: End) -> None:
        self._client.set_terminated(self._run, _STATUS[end])


def begin(start: Start) -> OpenRun:
    """A run in the experiment MLFLOW_EXPERIMENT_NAME, or "memfit"."""
    return _MLflow(start)
