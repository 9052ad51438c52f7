"""The trials of one study as runs of the service: each is planned, queued and confined like a run that somebody has submitted, in the same account of bytes.

`memfit.tune` searches as it does on one computer; what differs is here. A trial is submitted without waiting for its plan; that it cannot fit is known once
the service has refused it. Trials have the names of `memfit.tune`, and with them keys in the store ("study 3 trial-00001", which nobody can send), so that a
study which comes back after a crash finds its runs and none is submitted twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.runner import End, Ledger, RunRequest
from memfit.runner.ends import EndKind, tail_of
from memfit.service import launching
from memfit.service.own_folder import open_inside
from memfit.service.progress import LOG
from memfit.service.service import Service
from memfit.service.states import CANCELLED, DONE, OVER, PLANNED, PLANNING, REFUSED, RUNNING, WAITING
from memfit.service.store import StoredRun
from memfit.service.stored_studies import StoredStudy
from memfit.service.submission import checked
from memfit.train.snapshot_folders import folders
from memfit.tune.feasibility import check_feasible, to_plan
from memfit.tune.metrics import Metrics, MetricsFile
from memfit.tune.plans import Fit
from memfit.tune.search import Search
from memfit.tune.trials import ALONE, snapshots_of, with_answer
from memfit.tune.tuning import BYTES, Live, Tuning

_MOST_LOG: Final = 16 << 20  # bytes of a trial's log that are looked at
_LESS: Final = 0.85  # of its predicted peak, for a trial that is repeated after it ran out of memory
_CHECK: Final = "check-{}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a trial's run is to be."""

    config: dict[str, Any]
    plan_only: bool = False


def key_of(study: StoredStudy, name: str) -> str:
    """Under which the run of a trial is known, so that a trial that is begun twice is one run."""
    return f"study {study.number} {name}"


class StudyTrials:
    """Trials of one study, both how they are made and where they run.

    Args:
        service: whose runs they are.
        study: that they belong to.
        search: of it.
        folder: of the study.
    """

    def __init__(self, service: Service, study: StoredStudy, search: Search, folder: Path) -> None:
        self._service, self._study, self._search = service, study, search
        self.folder = folder
        self.ledger = Ledger(service.settings.capacity)
        self._open: dict[str, int] = {}  # numbers of runs whose end has not been told
        self._made: dict[str, Mapping[str, Any]] = {}

    # -------------------------------------------------------------------------------------------------- how they are made

    def fit(self, values: Mapping[str, Any], folder: Path, *, again: int | None = None) -> Fit:
        """What is known before the service has planned: nothing. The run is made ready to be submitted."""
        config = self.config(values)
        if again is not None:
            config["fit"] = {**config.get("fit", {}), "budget": int(_LESS * again)}
        folder.mkdir(parents=True, exist_ok=True)
        self._made[_name(folder)] = config
        return Fit(fits=True)

    def config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The run file of a trial."""
        config = self._search.run_with(values)
        del config["folder"]  # the service has folders of its own
        return config

    def request(self, name: str, number: int, values: Mapping[str, Any], folder: Path, fit: Fit) -> RunRequest:  # noqa: ARG002 - as in the protocol
        """Its name alone: what is started is the service's business."""
        return RunRequest(name, ())

    def watched(self, folder: Path, stdout: Path) -> MetricsFile:  # noqa: ARG002 - as in the protocol
        """The run's log, read without being led out of its folder."""
        name = _name(folder)

        def opened() -> Any:
            run = self.run(name)
            if run is None:
                raise FileNotFoundError(name)
            return open_inside(self._service.folder(run), LOG)

        return MetricsFile(folder / "log.jsonl", opened, _MOST_LOG)

    def final(self, folder: Path, stdout: Path, fit: Fit | None, seconds: float, metrics: Metrics) -> Metrics:  # noqa: ARG002 - as in the protocol
        """What the log has, and what the run has answered at its end."""
        return with_answer(metrics, tail_of(stdout), fit, seconds)

    def snapshots(self, values: Mapping[str, Any]) -> int:
        """As of any run. What they take is not known before the service has planned, and the service has quotas of its own."""
        return snapshots_of(self._search.run_with(values))

    def forget(self, folder: Path) -> None:
        """The snapshots of a trial that was pruned, or ran out of memory, are removed."""
        for name in (_name(folder), _name(folder) + ALONE):
            run = self.run(name)
            out = None if run is None else self._service.folder(run) / "out"
            if out is None or out.is_symlink() or not out.is_dir():  # a run may have put a link there
                continue
            for each in (*folders(out), *out.glob(".step-*")):
                if not each.is_symlink():
                    shutil.rmtree(each, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------- where they run

    def run(self, name: str) -> StoredRun | None:
        """The run of a trial; None before it was submitted."""
        return self._service.store.by_key(self._study.owner, key_of(self._study, name))

    def _states(self, *states: str) -> tuple[str, ...]:
        store = self._service.store
        return tuple(name for name, number in self._open.items() if store.run(number).state in states)

    @property
    def waiting(self) -> tuple[str, ...]:
        """As in `TrialRuns`: those that are planned, or wait for their bytes."""
        return self._states(PLANNING, WAITING)

    @property
    def running(self) -> tuple[str, ...]:
        """As in `TrialRuns`."""
        return self._states(RUNNING)

    def knows(self, name: str) -> bool:
        """As in `TrialRuns`."""
        return self.run(name) is not None

    def end_of(self, name: str) -> End | None:
        """As in `TrialRuns`."""
        run = self.run(name)
        if run is None or run.state not in OVER:
            if run is not None:
                self._open[name] = run.number  # found again after the service has ended
            return None
        return self._end(run)

    def stdout(self, name: str) -> Path:
        """As in `TrialRuns`."""
        run = self.run(name)
        part = launching.name_of(0, 0) if run is None else launching.name_of(run.number, run.part)
        return launching.output_of(self._service.settings, part) / "stdout"

    def submit(self, request: RunRequest) -> None:
        """As in `TrialRuns`."""
        self.have(request.name, self._made.pop(request.name))

    def have(self, name: str, config: Mapping[str, Any], *, plan_only: bool = False) -> StoredRun:
        """A run under a name; the one that is there already, where there is one.

        Raises:
            Refusal, ConfigError: it names what runs of the service may not read, or cannot be meant.
        """
        run = self.run(name)
        if run is None:
            code = None if self._study.code is None else launching.code_of(self._service.settings, self._study.code)
            config = checked(config, code, self._service.everywhere)
            digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
            columns = {
                "owner": self._study.owner,
                "name": f"{self._study.name or f'study {self._study.number}'}, {name}"[:80],
                "key": key_of(self._study, name),
                "digest": digest,
                "config": config,
                "code": self._study.code,
                "priority": self._study.priority,
                "plan_only": int(plan_only),
                "study": self._study.number,
            }
            run = self._service.store.add(columns)
        if not plan_only:
            self._open[name] = run.number
        return run

    def stop(self, name: str, *, at_once: bool = False) -> None:  # noqa: ARG002 - a run of the service has its grace
        """As in `TrialRuns`."""
        run = self.run(name)
        if run is not None and run.state not in OVER and run.asked != "cancel":
            self._service.store.change(run.number, "cancel", "asked by its study", asked="cancel")

    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:  # noqa: ARG002 - the loop of studies waits
        """As in `TrialRuns`."""
        over = [
            (name, run) for name, number in self._open.items() if (run := self._service.store.run(number)).state in OVER
        ]
        for name, _ in over:
            del self._open[name]
        return [(name, self._end(run)) for name, run in over]

    def _end(self, run: StoredRun) -> End:
        if run.state == DONE:
            return End("done", status=0, seconds=run.run_seconds)
        if run.state == CANCELLED:
            return End("stopped", reason="asked", seconds=run.run_seconds)
        known = self._service.dispatcher.runner.end_of(launching.name_of(run.number, run.part))
        if run.part and known is not None:
            return known
        # On another host: what is known of its end is its reason.
        memory = "out of memory: "
        kind: EndKind = "out_of_memory" if run.reason.startswith(memory) else "failed"
        return End(kind, reason=run.reason.removeprefix(memory), seconds=run.run_seconds)

    def close(self) -> None:
        """Runs go on."""


class ServiceTuning(Tuning):
    """The search of one study of a service."""

    def __init__(self, search: Search, trials: StudyTrials) -> None:
        self.trials_of_study = trials
        self._unchecked, _ = to_plan(search.space)
        self._checked: list[tuple[dict[str, Any], Fit]] = []
        super().__init__(search, trials=trials, runs=trials)
        if self.study.trials:
            self._unchecked.clear()

    def _check(self) -> None:
        """Before the first trial, in `step`: whether anything fits is found out by the service's own planning, which takes its time."""

    def step(self, seconds: float = 0.0) -> bool:
        """As in `Tuning`; the first steps have the extreme values planned, until one fits."""
        if self._unchecked:
            self._check_next()
            return True
        return super().step(seconds)

    def _check_next(self) -> None:
        values = self._unchecked[0]
        name = _CHECK.format(len(self._checked))
        run = self.trials_of_study.have(name, self.trials_of_study.config(values), plan_only=True)
        if run.state == PLANNED:
            self._unchecked.clear()
        elif run.state in OVER:
            self._checked.append((values, fit_of(run)))
            self._unchecked.pop(0)
            if not self._unchecked:
                known: Callable[[dict[str, Any], Path], Fit] = partial(_known, self._checked)
                check_feasible(self.search, self.runner.ledger.capacity, known)

    def _over(self, live: Live, end: End) -> None:
        run = self.trials_of_study.run(live.run)
        assert run is not None, "it has ended, so it was submitted"
        live.fit = fit_of(run)
        if live.fit.peak_bytes:
            live.trial.set_user_attr(BYTES, live.fit.peak_bytes)
        if run.state != REFUSED:
            super()._over(live, end)
            return
        self.live.pop(live.run, None)
        if live.fit.error:
            self._failed(live, f"could not be planned: {run.reason}")
        else:
            self._infeasible(live)

    def _start(self, live: Live, folder: Path) -> None:
        try:
            super()._start(live, folder)
        except InputError as error:
            # It names what runs of the service may not read; a store that cannot be written is tried again.
            if str(error).startswith("cannot write"):
                raise
            self._failed(live, f"is refused: {error}")


def fit_of(run: StoredRun) -> Fit:
    """What the service has found out about a run."""
    refusal, plan = run.refusal or {}, run.plan or {}
    budget = plan.get("budget_bytes") or refusal.get("budget_bytes") or 0
    if run.state != REFUSED:
        ranks = tuple(plan.get("rank_bytes", ()))
        return Fit(
            fits=True, budget_bytes=budget, peak_bytes=plan.get("peak_bytes", 0), tiers=plan.get("tiers", {}),
            step_seconds=plan.get("step_seconds", 0.0), device=plan.get("device", "cpu"), rank_bytes=ranks,
        )  # fmt: skip
    infeasible = refusal.get("error") == "InfeasibleError"
    least = refusal.get("minimum_bytes") if infeasible else plan.get("peak_bytes")
    error = "" if infeasible or plan else str(refusal.get("error") or "InputError")
    return Fit(fits=False, budget_bytes=budget, minimum_bytes=least, message=run.reason, error=error)


def _known(checked_already: list[tuple[dict[str, Any], Fit]], values: dict[str, Any], _folder: Path) -> Fit:
    return next((fit for each, fit in checked_already if each == values), replace(Fit(fits=True)))


def _name(folder: Path) -> str:
    """Of a trial whose folder it is."""
    return folder.parent.name + ALONE if folder.name == "alone" else folder.name
