"""Studies: trials are runs of the service, each planned first; a study survives the service, ends with its owner's word, and says why nothing fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from memfit.errors import InputError
from memfit.service.refusals import NotKnownError, NotNowError, Refusal
from memfit.service.service import Submission
from memfit.service.states import PLANNING
from memfit.service.store import StoredRun
from memfit.service.stored_studies import StoredStudy
from memfit.service.tokens import Caller
from service import small_runs
from service.conftest import ANNA, Serving
from service.http import client, listening

PLAN = {"budget_bytes": 400 << 10, "peak_bytes": 300 << 10, "plain_peak_bytes": 350 << 10, "rank_bytes": [300 << 10]}


def search_file(**search: Any) -> dict[str, Any]:
    told = {
        "space": {"optim.lr": {"low": 1e-4, "high": 1e-1, "log": True}},
        "objective": "loss",
        "trials": 3,
        "sampler": "random",
        **search,
    }
    return {**small_runs.run_file(), "search": told}


def submitted(serving: Serving, **search: Any) -> StoredStudy:
    return serving.studies.submit(ANNA, Submission(search_file(**search), code=serving.code()))[0]


def runs(serving: Serving, study: StoredStudy) -> list[StoredRun]:
    return serving.service.store.of_study(study.number)


def ended(serving: Serving, run: StoredRun, state: str, *, losses: tuple[float, ...] = (), **columns: Any) -> None:
    """What the dispatcher and the run itself would do, at once."""
    folder = serving.service.folder(run) / "out"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
    (folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")
    told = {"plan": PLAN} if state != "refused" else {}
    serving.service.store.change(
        run.number, state, state, state=state, reason=state, ended=1.0, asked="", **{**told, **columns}
    )


def begun(serving: Serving, study: StoredStudy) -> list[StoredRun]:
    """The first trials, once the extreme values were found to fit."""
    serving.studies.look()
    (check,) = runs(serving, study)
    assert check.plan_only
    ended(serving, check, "planned")
    serving.studies.look()
    serving.studies.look()
    return runs(serving, study)[1:]


def test_trials_are_runs_and_the_best_is_told(serve: Callable[..., Serving]) -> None:
    serving = serve()
    study = submitted(serving)
    for loss in (0.5, 0.2, 0.9):
        trial = begun(serving, study)[-1] if loss == 0.5 else runs(serving, study)[-1]
        assert (trial.state, trial.owner, trial.study) == (PLANNING, "anna", study.number)
        assert 1e-4 <= trial.config["optim"]["lr"] <= 1e-1
        assert "search" not in trial.config
        ended(serving, trial, "done", losses=(1.0, loss))
        serving.studies.look()
        serving.studies.look()
    study = serving.studies.store.study(study.number)
    assert (study.state, study.reason) == ("done", "3 done")
    told = serving.studies.described(study)
    assert [each["values"] for each in told["best"]] == [[0.2]]
    trials = serving.studies.trials(ANNA, study.number)
    assert [trial["run"] for trial in trials] == [run.number for run in runs(serving, study)[1:]]
    with serving.studies.file(ANNA, study.number, "best.yaml") as stream:
        best = yaml.safe_load(stream)
    assert best["optim"]["lr"] == trials[1]["params"]["optim.lr"]
    assert serving.service.submit(ANNA, Submission(best, code=study.code))[1], (
        "the best run file can be submitted as it is"
    )


def test_a_study_goes_on_with_the_next_service_and_submits_no_trial_twice(serve: Callable[..., Serving]) -> None:
    serving = serve()
    study = submitted(serving, at_once=2)
    (first,) = begun(serving, study)
    serving.service.store.change(first.number, "running", "started", state="running", plan=PLAN)
    serving.studies.look()
    assert len(runs(serving, study)) == 3
    serving.again()
    ended(serving, first, "done", losses=(0.7,))  # while nobody looked
    serving.studies.look()
    assert [trial["state"] for trial in serving.studies.trials(ANNA, study.number)[:2]] == ["done", "running"]
    assert len({run.key for run in runs(serving, study)}) == len(runs(serving, study))


def test_what_cannot_fit_is_a_constraint_and_a_study_of_nothing_else_is_refused(serve: Callable[..., Serving]) -> None:
    serving = serve()
    refusal = {
        "error": "InfeasibleError",
        "message": "does not fit",
        "minimum_bytes": 900 << 10,
        "budget_bytes": 400 << 10,
        "remedies": [],
    }
    study = submitted(serving)
    (trial,) = begun(serving, study)
    ended(serving, trial, "refused", refusal=refusal)
    serving.studies.look()
    (row,) = [each for each in serving.studies.trials(ANNA, study.number) if each["state"] == "infeasible"]
    assert (row["peak_bytes"], row["why"]) == (900 << 10, "needs 900 KiB, and there are 400 KiB")

    hopeless = submitted(serving, space={"optim.lr": [0.1, 0.2]})
    for _ in range(4):
        serving.studies.look()
        for run in runs(serving, hopeless):
            if run.state == PLANNING:
                ended(serving, run, "refused", refusal=refusal)
    found = serving.studies.store.study(hopeless.number)
    assert found.state == "refused"
    assert "nothing in search.space fits" in found.reason
    assert f"{900 << 10} bytes" in found.reason
    assert all(run.plan_only for run in runs(serving, hopeless))


def test_a_pruned_trial_is_stopped_and_gives_up_its_snapshots_and_a_link_is_not_followed(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    serving = serve()
    study = submitted(serving, pruner={"name": "threshold", "options": {"upper": 2.0}})
    (trial,) = begun(serving, study)
    out = serving.service.folder(trial) / "out"
    (out / "step-00000002").mkdir(parents=True)
    (out / "log.jsonl").write_text('{"step": 1, "loss": 5.0}\n', encoding="utf-8")
    serving.service.store.change(trial.number, "running", "started", state="running", plan=PLAN)
    serving.studies.look()
    assert serving.service.store.run(trial.number).asked == "cancel"
    victim = tmp_path / "victim"
    (victim / "step-00000002").mkdir(parents=True)
    (out / "step-00000002").rmdir()
    (out / "log.jsonl").unlink()
    out.rmdir()
    out.symlink_to(victim)
    serving.service.store.change(trial.number, "cancelled", "cancelled", state="cancelled", ended=1.0, asked="")
    serving.studies.look()
    assert serving.studies.trials(ANNA, study.number)[0]["state"] == "pruned"
    assert (victim / "step-00000002").is_dir()


def test_a_study_is_cancelled_with_its_trials_and_by_its_owner_alone(serve: Callable[..., Serving]) -> None:
    serving = serve()
    study = submitted(serving)
    (trial,) = begun(serving, study)
    with pytest.raises(NotKnownError):
        serving.studies.cancel(Caller("eve", "submit"), study.number)
    assert serving.studies.cancel(ANNA, study.number).asked == "cancel"
    serving.studies.look()
    assert serving.studies.store.study(study.number).state == "cancelled"
    assert serving.service.store.run(trial.number).asked == "cancel"
    serving.studies.look()
    assert len(runs(serving, study)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"command": ["rm", "-rf", "{optim.lr}"]}, "search.command: on a service the trials are runs of memfit"),
        ({"store": "postgresql://elsewhere/x"}, "search.store: on a service"),
        ({"out": "/etc"}, "search.out: on a service"),
        ({"sampler": "gp"}, "gp needs torch"),
        ({"sampler": "tpee"}, "search.sampler: there is no 'tpee'; did you mean tpe?"),
        ({"sampler": {"name": "tpe", "options": {"n_ei_candidates": "1e12"}}}, "search.sampler.options.n_ei_candidates"),
        ({"sampler": {"name": "tpe", "options": {"n_ei_candidates": 10**12}}}, "search.sampler.options.n_ei_candidates"),
        ({"sampler": "grid", "space": {"optim.lr": {"low": 0.0001, "high": 1.0, "step": 0.00000001}}}, "a grid of 10000 is taken"),
        ({"trials": 10**9}, "search.trials"),
        ({"space": {"optim.nothing": [1, 2]}}, "optim.nothing"),
        ({"space": {"data.train": ["train.npz", "/etc/passwd"]}}, "/etc/passwd"),
        ({"objective": "beauty"}, "a run has no metric 'beauty'"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_meant_here_is_refused(
    serve: Callable[..., Serving], change: dict[str, Any], words: str
) -> None:
    serving = serve()
    with pytest.raises(InputError, match=words):
        submitted(serving, **change)
    assert serving.studies.store.listed(owner=None) == []


def test_the_same_key_is_the_same_study(serve: Callable[..., Serving]) -> None:
    serving = serve()
    sent = Submission(search_file(), code=serving.code(), key="one")
    first, new = serving.studies.submit(ANNA, sent)
    assert new
    assert serving.studies.submit(ANNA, sent) == (first, False)
    with pytest.raises(NotNowError, match="belongs to study 1"):
        serving.studies.submit(ANNA, Submission(search_file(trials=4), code=sent.code, key="one"))
    with pytest.raises(Refusal, match="no state"):
        serving.studies.studies(ANNA, ["unknown"])


@pytest.mark.slow  # a dozen processes that import torch
def test_a_real_study_over_http(tmp_path: Path) -> None:
    with listening(tmp_path / "service") as serving, client(serving) as asking:
        code = asking.upload(small_runs.code(tmp_path / "code"))
        study = asking.submit(
            search_file(trials=2, space={"fit.budget": ["300KiB", "400KiB"], "optim.lr": [0.01]}), code=code
        )
        done = asking.wait_for_study(study["study"])
        assert done["state"] == "done", done
        assert done["states"] == {"done": 2}
        assert done["best"][0]["values"][0] > 0
        names = {file.name for file in asking.fetch_study(study["study"], tmp_path / "results")}
        assert names == {"trials.csv", "best.yaml", "report.html"}
