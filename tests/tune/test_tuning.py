"""Searches as a whole: what Optuna would suggest, what never starts, what is told once, and what goes on after a crash."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from memfit.errors import ConfigError, InfeasibleError, InputError
from memfit.runner import Runner, guard
from memfit.tune import Results, Search, run
from memfit.tune.live import PlainDisplay
from memfit.tune.plans import Fit
from memfit.tune.sampling import quietly, sampler_of
from memfit.tune.study_store import beat, open_study
from memfit.tune.trials import MemfitTrials, most_at_once, threads_of
from memfit.tune.tuning import Live, Tuning
from tune import searches

optuna.logging.set_verbosity(optuna.logging.WARNING)


def states(found: Results) -> list[str]:
    return [row.state for row in found.rows]


# ----------------------------------------------------------------------------------------------------- as Optuna by itself


@pytest.mark.parametrize(
    "sampler",
    ["tpe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("random", "gp", "cmaes", "qmc", "nsga2"))],
)
def test_the_suggestions_are_those_of_optuna(tmp_path: Path, sampler: str) -> None:
    """Optuna's quadratic of the tutorial, with a categorical parameter; TPE begins to model after ten trials."""
    space: dict[str, Any] = {"x": {"low": -5.0, "high": 5.0}, "n": {"low": 1, "high": 9}}
    code = "import sys; x, n = float(sys.argv[1]), int(sys.argv[2]); print(f'value={(x - 2) ** 2 + n!r}')"
    found = run(searches.command(tmp_path, code, space, sampler=sampler, seed=7, trials=12))

    alone = optuna.create_study(sampler=sampler_of(found.search, 7))
    alone.optimize(lambda t: (t.suggest_float("x", -5.0, 5.0) - 2) ** 2 + t.suggest_int("n", 1, 9), n_trials=12)
    assert [row.params for row in found.rows] == [trial.params for trial in alone.trials]
    assert [row.values for row in found.rows] == [tuple(trial.values) for trial in alone.trials]
    assert found.best[0].number == alone.best_trial.number


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", {"name": "nsga2", "options": {"population_size": 4}}], ids=str)
def test_the_suggestions_for_two_objectives_are_those_of_optuna(tmp_path: Path, sampler: Any) -> None:
    """Binh and Korn's problem, which Optuna's documentation has for several objectives."""
    space = {"x": {"low": 0.0, "high": 5.0}, "y": {"low": 0.0, "high": 3.0}}
    code = "import sys; x, y = map(float, sys.argv[1:]); print(f'a={4 * x**2 + 4 * y**2!r} b={(x - 5) ** 2 + (y - 5) ** 2!r}')"
    objective = [{"name": "a"}, {"name": "b"}]
    found = run(searches.command(tmp_path, code, space, objective=objective, sampler=sampler, seed=3, trials=16))

    def binh_korn(trial: optuna.Trial) -> tuple[float, float]:
        x, y = trial.suggest_float("x", 0.0, 5.0), trial.suggest_float("y", 0.0, 3.0)
        return 4 * x**2 + 4 * y**2, (x - 5) ** 2 + (y - 5) ** 2

    alone = optuna.create_study(sampler=sampler_of(found.search, 3), directions=["minimize"] * 2)
    alone.optimize(binh_korn, n_trials=16)
    assert [row.params for row in found.rows] == [trial.params for trial in alone.trials]
    assert [row.values for row in found.rows] == [tuple(trial.values) for trial in alone.trials]
    assert {row.number for row in found.best} == {trial.number for trial in alone.best_trials}


def test_trials_that_run_at_once_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do. A trial that runs alone has torch's own number of threads, and what the user says stands."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(at_once: Any, **fit: Any) -> dict[str, str]:
        return threads_of(searches.toy(tmp_path, {"optim.lr": [0.1, 0.2]}, fit, at_once=at_once))

    assert [threads(n) for n in (2, 3, 20)] == [{"OMP_NUM_THREADS": each} for each in ("4", "2", "1")]
    assert threads(1) == {}
    # As many as fit, of trials like this one; more than there are cores do not run at once.
    for peak, wanted in {None: "1", 1 << 30: "2", 4 << 30: "8", 1 << 20: "1"}.items():
        search = searches.toy(tmp_path, {"optim.lr": [0.1, 0.2]}, budget="4GiB", at_once="auto")
        assert threads_of(search, peak) == ({} if wanted == "8" else {"OMP_NUM_THREADS": wanted})
        assert most_at_once(search) == 8
    assert threads(2, devices=2) == {"OMP_NUM_THREADS": "2"}
    assert threads(2, device="cuda") == {}
    trials = MemfitTrials(searches.toy(tmp_path, {"optim.lr": [0.1, 0.2]}, at_once=2))
    request = trials.request("run", 0, {}, tmp_path, Fit(fits=True, rank_bytes=(1,)))
    assert request.environment["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(2) == {}


def test_several_objectives_have_several_best(tmp_path: Path) -> None:
    code = "import sys; x = float(sys.argv[1]); print(f'near={abs(x)!r} far={abs(x - 4)!r}')"
    space = {"x": [-1, 0, 1, 2, 4, 5]}
    objective = [{"name": "near"}, {"name": "far"}]
    found = run(searches.command(tmp_path, code, space, objective=objective, trials=6, sampler="grid"))
    assert {row.params["x"] for row in found.best} == {0, 1, 2, 4}


def test_what_is_to_be_tried_first_is_tried_first(tmp_path: Path) -> None:
    found = run(searches.command(tmp_path, trials=2, start=({"x": 1.0, "y": -2.0},)))
    assert (found.rows[0].params, found.rows[0].values) == ({"x": 1.0, "y": -2.0}, (0.0,))
    warm = run(
        searches.command(
            tmp_path, trials=1, study="second", warm_start=["search"], out="out2", store="out/study.sqlite"
        )
    )
    assert [row.values for row in warm.rows[:2]] == [row.values for row in found.rows]
    more: dict[str, Any] = {"study": "fourth", "out": "out4", "store": "out/study.sqlite", "trials": 1}
    with pytest.raises(ConfigError, match="search.warm_start: the store has no study 'third'"):
        run(searches.command(tmp_path, warm_start=["third"], **more))
    warm = run(searches.command(tmp_path, warm_start=["search"], start=({"x": 1.0, "y": -2.0},), **more))
    assert (len(warm.rows), warm.rows[-1].values) == (3, (0.0,)), "the mended file begins as if it had been the first"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"store": "postgres://me@here/base"}, "search.store: postgres://me@here/base is no store: name a file, or a"),
        ({"store": "nonsense://here"}, "search.store: nonsense://here is no store"),
        (
            {"out": "file/out"},
            "cannot write to the folder .*file/out .*: name another one in search.out or search.store",
        ),
        (
            {"out": "half", "store": "study.sqlite"},
            "cannot write .*half/runner: .*; name another folder, or free space",
        ),
        ({"out": "kept"}, "cannot write to the folder .*kept .*: name another one in search.out or search.store"),
        ({"store": "file/study.sqlite"}, "cannot write to the folder .*file .*: name another one in search.out or"),
    ],
)
def test_a_store_or_folder_that_cannot_be_is_one_sentence(tmp_path: Path, told: dict[str, Any], message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "half" / "runner" / "runner.lock").mkdir(parents=True)  # nobody can write there, not even root
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / ".study.sqlite.lock").symlink_to("/proc/nothing")
    with pytest.raises(InputError, match=message):
        run(searches.command(tmp_path, **told))


def test_options_that_optuna_fails_with_later_are_one_sentence(tmp_path: Path) -> None:
    none = {"name": "tpe", "options": {"n_startup_trials": 0, "n_ei_candidates": 0}}
    with pytest.raises(ConfigError, match=r"Optuna fails with their options \(ValueError: .*\): change them"):
        run(searches.command(tmp_path, sampler=none))


def test_the_command_that_goes_on_is_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    from cli.commands import Ran

    file = tmp_path / "a search.yaml"
    space = {"x": [1, 2]}
    file.write_text(yaml.safe_dump({"search": {"space": space, "command": "true {x}", "objective": "value"}}))
    monkeypatch.setattr("memfit.tune.call.run", interrupted)
    ran = Ran(capsys, "tune", file, "--trials", "3", "--set", "search.out=b c")
    assert ran.status == 130
    assert f"to go on: memfit tune '{file}' --trials=3 '--set=search.out=b c'\n" in ran.err


def test_a_search_goes_on_where_the_computer_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = searches.command(tmp_path, "import time; time.sleep(0.5); print('value=1')", {"x": [1, 2]}, trials=2)
    before = Tuning(search)
    before.step(0.0)
    assert before.live
    before.close()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert [row.state for row in run(search).rows] == ["done", "done"]


def test_metrics_are_read_from_a_file_too(tmp_path: Path) -> None:
    code = "import os, sys, json; open(os.environ['MEMFIT_TRIAL_DIR'] + '/m.jsonl', 'w').write(json.dumps({'step': 3, 'value': float(sys.argv[1])}))"
    found = run(searches.command(tmp_path, code, {"x": [1, 2]}, metrics="m.jsonl", trials=2, sampler="grid"))
    assert sorted(row.values or () for row in found.rows) == [(1.0,), (2.0,)]


# ---------------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('value=nan')", "value is nan"),
        ("print('vale=1')", "value was never reported: it reported vale; did you mean vale?"),
        pytest.param("pass", "value was never reported: it reported nothing", marks=pytest.mark.slow),
        ("print('value=good')", "value is reported as text, 'good': a number is needed"),
        pytest.param("raise SystemExit(3)", "failed (exit status 3)", marks=pytest.mark.slow),
    ],
)
def test_a_trial_without_its_objective_has_failed_with_the_reason(tmp_path: Path, code: str, why: str) -> None:
    found = run(searches.command(tmp_path, code + "  # ", trials=2, at_once=2))
    assert states(found) == ["failed", "failed"]
    assert {row.why for row in found.rows} == {why}
    assert not found.best


def test_a_search_whose_objective_never_comes_ends_soon(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="search.objective: 3 trials have ended, and in each value was never reported"
    ):
        run(searches.command(tmp_path, "print('loss=1')", trials=50))


def test_an_ignored_end_signal_does_not_hold_the_search_up(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    found = run(searches.command(tmp_path, code, trials=1, timeout=1.0, grace=0.2))
    assert states(found) == ["failed"]
    assert found.rows[0].why == "stopped (its time was over), by force: it ignored its end signal"


def test_out_of_memory_is_a_constraint_and_never_the_end(tmp_path: Path) -> None:
    code = "import sys; x = bytearray(int(sys.argv[1]) << 20); print('value=1')"
    found = run(
        searches.command(tmp_path, code, {"x": [1, 500]}, trials=2, sampler="grid", memory="100MiB", budget="200MiB")
    )
    by_size = {row.params["x"]: row for row in found.rows}
    assert (by_size[1].state, by_size[500].state) == ("done", "out of memory")
    assert by_size[500].why == "MemoryError"
    study = searches.study_in(found.store)
    (trial,) = [each for each in study.trials if each.params["x"] == 500]
    assert list(trial.constraints.values()) == [float(100 << 20)]
    runs = [each.name for each in (tmp_path / "out" / "runner" / "runs").iterdir()]
    assert [name for name in runs if name.endswith("-alone")] == [f"trial-{by_size[500].number:05d}-alone"]


@pytest.mark.slow
def test_a_run_of_memfit_that_runs_out_of_memory_is_a_constraint(tmp_path: Path) -> None:
    """Its steps take two gibibytes that no plan knows of, above the limit that the system keeps; in 85 % of its bytes it has no plan, so once."""
    search = searches.toy(tmp_path, {"optim.lr": [0.01]}, trials=1)
    file = tmp_path / "toy.py"
    grows = "import os; taken = bytearray((2 << 30) if os.environ.get('MEMFIT_TRIAL') else 1)"
    text = file.read_text().replace("        return (self", f"        {grows}\n        return (self")
    file.write_text(text, encoding="utf-8")
    found = run(search)
    assert states(found) == ["out of memory"]
    (trial,) = searches.study_in(found.store).trials
    assert min(trial.constraints.values()) > 0
    assert [each.name for each in (search.out / "runner" / "runs").iterdir()] == ["trial-00000"]


def test_snapshots_of_the_best_trial_alone_stay(tmp_path: Path) -> None:
    """Trials are told by hand: what is looked at is what stays on the disk."""
    kept: dict[str, list[int]] = {}
    for wanted in ("best", "none", "all"):
        search = searches.toy(tmp_path, {"optim.lr": [0.1, 0.2]}, trials=3, snapshots=wanted, out=wanted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tuning, "_prepare", lambda *_: None)
            patch.setattr("memfit.tune.tuning.check_feasible", lambda *_: None)
            tuning = Tuning(search)
        try:
            for number, value in enumerate((2.0, 1.0, 3.0)):
                with quietly():
                    trial = tuning.study.ask()
                trial.set_user_attr("memfit:worker", tuning.worker)
                folder = search.out / "trials" / f"trial-{number:05d}"
                (folder / "run" / "step-000002").mkdir(parents=True)
                watched = tuning.trials.watched(folder, folder / "stdout")
                tuning._tell(Live(trial, {}, Fit(fits=True), "", watched), TrialState.COMPLETE, "done", "done", [value])
            kept[wanted] = [n for n in range(3) if list((search.out / "trials").glob(f"trial-0000{n}/run/step-*"))]
        finally:
            tuning.close()
    assert kept == {"best": [1], "none": [], "all": [0, 1, 2]}


def test_a_disk_without_room_for_snapshots_ends_the_search_before_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the free space: no more trials would fare better. Nothing is started, and the same trial is the next one."""
    search = searches.toy(tmp_path, {"optim.lr": [0.1]}, trials=1)
    search.run["train"] |= {"save_every": 2, "keep": 2}  # type: ignore[index]
    size = shutil.disk_usage(tmp_path).free
    fit = Fit(fits=True, peak_bytes=1, budget_bytes=1, snapshot_bytes=size)
    monkeypatch.setattr(
        MemfitTrials, "fit", lambda _s, _v, folder, **_: folder.mkdir(parents=True, exist_ok=True) or fit
    )
    told = "search.out: trial 0 writes up to 3 snapshots of .* are free: free space, lower train.keep"
    for _ in range(2):
        with pytest.raises(InputError, match=told):
            run(search)
    (trial,) = open_study(search).trials
    assert trial.state == TrialState.RUNNING
    assert not list((search.out / "runner").glob("runs/*"))


@pytest.mark.parametrize(("out", "told"), [("runs/mine", ["runs/mine"]), (None, [])])
def test_the_folder_of_a_single_run_is_told_to_be_none_of_the_trials(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str | None,
    told: list[str],
) -> None:
    search = searches.toy(tmp_path, {"optim.lr": [0.1]}, trials=1)
    if out is not None:
        search.run["train"] |= {"out": out}  # type: ignore[index]
    monkeypatch.setattr("memfit.tune.tuning.check_feasible", lambda *_: None)
    monkeypatch.setattr(Tuning, "step", lambda _: False)

    run(search, PlainDisplay())

    found = re.findall(r"train\.out \((.*?)\) is where a single run writes; trials write into", capsys.readouterr().err)
    assert found == told


@pytest.mark.slow
def test_a_pruned_run_of_memfit_leaves_no_snapshots(tmp_path: Path) -> None:
    """The threshold prunes at the first evaluation, in step 10 of 2,000; log and plan stay."""
    pruner = {"name": "threshold", "options": {"upper": 0.0}}
    search = searches.toy(tmp_path, {"optim.lr": [0.01, 0.02]}, trials=1, pruner=pruner)
    search.run["train"] |= {"steps": 2000, "eval_every": 10, "save_every": 5}  # type: ignore[index]
    found = run(search)
    assert states(found) == ["pruned"]
    out = search.out / "trials" / "trial-00000" / "run"
    assert (out / "log.jsonl").exists()
    assert [each.name for each in out.iterdir() if "step-" in each.name] == []
    assert (out.parent / "plan.json").exists()


def test_pruned_trials_end_at_once(tmp_path: Path) -> None:
    code = """
import sys, time
x = int(sys.argv[1])
for step in range(6):
    print('step=%d value=%d' % (step, x), flush=True)
    time.sleep(0.02 if x < 3 else 0.5)
"""
    space = {"x": {"low": 0, "high": 9}}
    start = [{"x": 0}, {"x": 1}, {"x": 9}]
    pruner = {"name": "median", "options": {"n_startup_trials": 2}}
    found = run(searches.command(tmp_path, code, space, trials=3, start=start, pruner=pruner))
    assert states(found) == ["done", "done", "pruned"]
    study = searches.study_in(found.store)
    assert len(study.trials[2].intermediate_values) < 6
    assert study.trials[0].intermediate_values == dict.fromkeys(range(6), 0.0)


# --------------------------------------------------------------------------------------------------- bytes: runs of memfit


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three widths, of which one fits in no plan; two runs side by side."""
    folder = tmp_path_factory.mktemp("searched")
    space = {"model.args.width": [32, 64, 256], "fit.global_batch": [64]}
    return run(searches.toy(folder, space, sampler="grid", at_once=2))


def test_what_cannot_fit_is_never_launched(searched: Results) -> None:
    by_width = {row.params["model.args.width"]: row for row in searched.rows}
    assert {width: row.state for width, row in by_width.items()} == {32: "done", 64: "done", 256: "infeasible"}
    assert searched.launched == 2
    runs = searched.search.out / "runner" / "runs"
    assert sorted(each.name for each in runs.iterdir()) == sorted(
        f"trial-{by_width[width].number:05d}" for width in (32, 64)
    )
    assert by_width[256].why.endswith("and there are 400 KiB")
    assert (by_width[256].peak_bytes or 0) > 400 << 10


def test_the_peak_of_a_trial_is_the_predicted_one(searched: Results) -> None:
    study = searches.study_in(searched.store)
    for trial in study.trials:
        if trial.state == TrialState.COMPLETE:
            assert trial.user_attrs["metric:peak_bytes"] == trial.user_attrs["memfit:peak_bytes"]
            assert max(trial.constraints.values()) <= 0
        else:
            assert max(trial.constraints.values()) > 0


def test_the_results_are_files_that_others_read(searched: Results, capsys: pytest.CaptureFixture[str]) -> None:
    out = searched.search.out
    rows = list(csv.DictReader((out / "trials.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == states(searched)
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["model"]["args"]["width"] == searched.best[0].params["model.args.width"]
    page = (out / "report.html").read_text()
    assert "validation_loss against predicted peak" in page
    assert "<script" not in page
    from cli.commands import Ran

    trained = Ran(capsys, "train", out / "best.yaml", "--json")
    assert trained.status == 0
    assert trained.data["validation_loss"] == pytest.approx((searched.best[0].values or (0,))[0], rel=1e-6)


def test_a_finished_search_has_nothing_left_to_do(searched: Results) -> None:
    again = run(searched.search)
    assert (again.launched, again.rows) == (0, searched.rows)


@pytest.mark.slow
def test_trials_of_several_ranks_are_searched_side_by_side(tmp_path: Path) -> None:
    """Two ranks each, on three devices: one at a time fits, and each rank has its own bytes and limit."""
    space = {"optim.lr": [0.01, 0.02]}
    fit = {"devices": 2, "fixed": {"micro_batches": 1, "sharding": "data"}}
    first = MemfitTrials(searches.toy(tmp_path, space, fit))
    peak = first.fit({"optim.lr": 0.01}, tmp_path / "first").peak_bytes
    first.close()
    search = searches.toy(tmp_path, space, fit, sampler="grid", at_once=2, devices=3, budget=peak * 3 // 2)
    tuning = Tuning(search)
    most = 0
    try:
        while tuning.step(0.05):
            most = max(most, len(tuning.runner.running))
        from memfit.tune.results import results

        found = results(search, tuning.study)
    finally:
        tuning.close()
    assert states(found) == ["done", "done"]
    assert most == 1
    spec = json.loads((search.out / "runner" / "runs" / "trial-00000" / "1" / "spec.json").read_text())
    assert spec["command"][5:7] == ["--nproc", "2"]
    assert len(spec["rank_bytes"]) == len(set(spec["devices"])) == 2
    assert spec["environment"]["MEMFIT_MEMORY_LIMIT"] == ",".join(map(str, spec["rank_bytes"]))
    study = searches.study_in(f"sqlite:///{search.out}/study.sqlite")
    for trial in study.trials:
        assert trial.user_attrs["metric:peak_bytes"] == trial.user_attrs["memfit:peak_bytes"]


@pytest.fixture
def planned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made in this process, which has imported torch already."""
    from memfit.train.plan_server import PlanServer
    from memfit.tune.plans import Fit, Planner

    server = PlanServer()

    def ask(_: Planner, config: dict[str, Any], plan: Path | None = None) -> Fit:
        return Fit(**{"fits": False, **server.answer({"config": config, "plan": None if plan is None else str(plan)})})

    monkeypatch.setattr(Planner, "ask", ask)


@pytest.mark.usefixtures("planned_here")
def test_where_nothing_fits_it_is_said_before_the_first_trial(tmp_path: Path) -> None:
    search = searches.toy(tmp_path, {"model.args.width": [64, 128]}, {"budget": "20KiB"})
    with pytest.raises(
        InfeasibleError,
        match="nothing in search.space fits into its budget, so no trial was started: the smallest that would is .* with model.args.width=64",
    ) as caught:
        run(search)
    assert caught.value.minimum_bytes
    assert not (search.out / "trials").exists()
    study = searches.study_in(f"sqlite:///{search.out}/study.sqlite")
    assert study.trials == []


def test_trials_are_watched_while_another_is_planned(tmp_path: Path) -> None:
    """A server that takes its time, and another that dies: the first question is asked again."""
    from memfit.tune.plans import Planner

    (tmp_path / "slow.py").write_text(
        "import sys, time; sys.stdin.readline(); time.sleep(1.5); print('{\"fits\": true}', flush=True)"
    )
    planner = Planner(tmp_path / "log")
    looks: list[int] = []
    planner.idle = lambda: looks.append(1)
    commands = iter(
        ["raise SystemExit(1)", (tmp_path / "slow.py").read_text(), "raise SystemExit(1)", "raise SystemExit(1)"]
    )
    begin = subprocess.Popen

    def popen(_: list[str], **named: Any) -> Any:
        return begin([sys.executable, "-S", "-c", next(commands)], **named)

    with pytest.MonkeyPatch.context() as patch, planner:
        patch.setattr(subprocess, "Popen", popen)
        assert planner.ask({}).fits
        assert looks
        planner.close()
        with pytest.raises(
            InputError, match="the process that plans has died twice over one trial: what it said is in"
        ):
            planner.ask({})


def test_one_bundle_of_traces_serves_what_differs_in_budget_and_rate(tmp_path: Path) -> None:
    from memfit.train.plan_server import PlanServer

    search = searches.toy(tmp_path, {"optim.lr": [0.1, 0.01], "fit.budget": ["300KiB", "400KiB"]})
    server = PlanServer()
    answers = [
        server.answer({"config": search.run_with({"optim.lr": lr, "fit.budget": budget})})
        for lr in (0.1, 0.01)
        for budget in ("300KiB", "400KiB", "1KiB")
    ]
    assert [each["fits"] for each in answers] == [True, True, False] * 2
    assert answers[:3] == answers[3:]
    assert (server.captures, len(next(iter(server._known.values())).plannings)) == (1, 1)
    assert answers[2]["minimum_bytes"] <= answers[0]["peak_bytes"] <= 300 << 10
    width, moments = 64, 2  # of AdamW
    parameters = sum((inputs + 1) * outputs for inputs, outputs in ((8, width), (width, width), (width, 1)))
    assert answers[0]["snapshot_bytes"] >= 4 * (1 + moments) * parameters
    pytest.importorskip("peft")
    adapted = [server.answer({"config": {**search.run_with({}), "lora": {"rank": rank}}}) for rank in (1, 16)]
    assert adapted[0]["snapshot_bytes"] < adapted[1]["snapshot_bytes"]
    wrong = server.answer({"config": {**search.run_with({}), "model": {"python": "toy:absent"}}})
    assert (wrong["error"], wrong["message"].startswith("model.python")) == ("ConfigError", True)
    (search.folder / "no_loss.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(16, 4)\n")
    wrong = server.answer({"config": {**search.run_with({}), "model": {"python": "no_loss:build"}}})
    assert wrong["message"].startswith("TypeError: Linear.forward() got")
    assert "return (model, loss_fn) from model.python" in wrong["message"]


# --------------------------------------------------------------------------------------------------------------- the store


def test_two_searches_do_not_mix_in_one_study(tmp_path: Path) -> None:
    run(searches.command(tmp_path, trials=1))
    with pytest.raises(
        ConfigError,
        match="has a study 'search' that searches something else \\(space differ\\): give search.study another name",
    ):
        run(searches.command(tmp_path, space={"x": [1, 2], "y": [1]}))
    found = run(
        searches.command(
            tmp_path, space={"x": [1, 2], "y": [1]}, study="other", store="out/study.sqlite", out="out2", trials=1
        )
    )
    assert len(found.rows) == 1


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    search = searches.command(tmp_path, trials=1)
    run(search)
    connection = sqlite3.connect(search.out / "study.sqlite")
    connection.execute("UPDATE version_info SET schema_version = 99")
    connection.execute("UPDATE alembic_version SET version_num = 'v9.9.9.a'")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match="was written by another version of Optuna: `optuna storage upgrade"):
        run(search)


def test_a_damaged_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    search = searches.command(tmp_path, trials=1)
    run(search)
    file = search.out / "study.sqlite"
    content = bytearray(file.read_bytes())
    content[4096:12288] = b"\xff" * 8192
    file.write_bytes(content)
    with pytest.raises(InputError, match="study.sqlite is damaged .*put a copy back"):
        run(search)
    assert file.read_bytes() == content


def test_an_unreachable_server_is_said_without_the_password(tmp_path: Path) -> None:
    search = searches.command(tmp_path, store="postgresql+psycopg2://me:secret@127.0.0.1:9/none")
    with pytest.raises(InputError, match="postgresql.psycopg2://me@127.0.0.1:9/none cannot be used") as caught:
        run(search)
    assert "secret" not in str(caught.value)


def test_two_studies_never_share_a_folder_of_trials(tmp_path: Path) -> None:
    """Trials are numbered in each study, so one would find the runs of the other under the names of its own."""
    run(searches.command(tmp_path, trials=1))
    told = re.escape(
        "/out holds the trials of another study (search): give this search a folder of its own, or remove that one"
    )
    with pytest.raises(ConfigError, match=told):
        run(searches.command(tmp_path, "print('value=7')  # ", trials=1, study="second"))
    beside = run(
        searches.command(
            tmp_path, "print('value=7')  # ", trials=1, study="second", store="out/study.sqlite", out="out2"
        )
    )
    assert beside.rows[0].values == (7.0,)
    assert run(searches.command(tmp_path, trials=2)).count("done") == 2
    (tmp_path / "out" / "study.sqlite").unlink()
    with pytest.raises(ConfigError, match="holds the trials of another study"):
        run(searches.command(tmp_path, trials=1))
    (tmp_path / "out" / "study.json").unlink()  # as left by a version that wrote none
    with pytest.raises(ConfigError, match="holds the trials of another study"):
        run(searches.command(tmp_path, trials=1))


def test_a_promise_that_no_device_has_is_said_before_the_first_trial(tmp_path: Path) -> None:
    told = "search.memory promises 9.00 GiB to each, and the largest device has 8.00 GiB: .* that would do is 9.00 GiB .9663676416 bytes."
    with pytest.raises(InfeasibleError, match=told) as caught:
        run(searches.command(tmp_path, memory="9GiB", budget="8GiB"))
    assert (caught.value.budget_bytes, caught.value.minimum_bytes) == (8 << 30, 9 << 30)
    assert not (tmp_path / "out" / "trials").exists()


# ----------------------------------------------------------------------------------------------- killed, and taken up again

CALL = """
import sys, yaml
from memfit.tune import read_search, run
run(read_search(yaml.safe_load(open(sys.argv[1])), sys.argv[2]))
"""


def started(folder: Path, search: Search) -> subprocess.Popen[bytes]:
    """The same search in a process of its own."""
    from dataclasses import asdict

    told = {name: value for name, value in asdict(search.config).items() if value is not None}
    file = folder / f"{search.out.name}.yaml"
    file.write_text(json.dumps({"search": {**told, "command": list(told["command"])}}), encoding="utf-8")
    return subprocess.Popen([sys.executable, "-c", CALL, file, folder], stderr=subprocess.PIPE)


def forked(search: Search, said: Path | None = None) -> int:
    """The same search in a fork of this process, which has everything imported: its pid. What it refuses is written into a file, if any, and ends it with 2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forking beside threads; torch's are not used here
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run(search)
            status = 0
        except InputError as error:
            if said is None:
                raise
            said.write_text(str(error))
            status = 2
        finally:
            os._exit(status)
    return pid


SLOW = "import sys, time; x, y = map(float, sys.argv[1:]); time.sleep(0.15); print(f'value={x + y!r}')"


def check_whole(found: Results, trials: int) -> None:
    """Every trial is told once, with the value of its own parameters, and none runs any more."""
    assert [row.number for row in found.rows] == list(range(len(found.rows)))
    done = [row for row in found.rows if row.state == "done"]
    assert len(done) == trials
    for row in done:
        assert row.values == (row.params["x"] + row.params["y"],)
    connection = sqlite3.connect(found.search.out / "study.sqlite")
    (twice,) = connection.execute(
        "SELECT COUNT(*) FROM (SELECT trial_id FROM trial_values GROUP BY trial_id HAVING COUNT(*) > 1)"
    ).fetchone()
    connection.close()
    assert twice == 0


def until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("moment", [0.4, pytest.param(range(100), marks=pytest.mark.slow)], ids=["one", "many"])
def test_a_killed_search_goes_on_and_no_trial_is_lost_or_told_twice(tmp_path: Path, moment: Any) -> None:
    import random

    draw = random.Random(0)
    for number, seconds in enumerate([moment] if isinstance(moment, float) else [draw.uniform(0, 2.5) for _ in moment]):
        search = searches.command(tmp_path, SLOW, trials=6, at_once=2, out=f"out-{number}", sampler="random")
        pid = forked(search)
        until(lambda search=search: (search.out / "runner" / "runner.lock").exists())  # type: ignore[misc]
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check_whole(run(search), 6)


def test_a_search_that_is_ended_goes_on_with_its_trials(tmp_path: Path) -> None:
    """By Ctrl-C, or by whoever shuts the computer down: what ran was not pruned. It is run again, with the same values."""
    search = searches.command(tmp_path, SLOW.replace("0.15", "0.5"), trials=4, at_once=2, sampler="random")
    for _ in range(2):
        process = started(tmp_path, search)
        runs = search.out / "runner" / "runs"
        seen = set(runs.glob("*/*/claim")) if runs.exists() else set()
        until(lambda runs=runs, seen=seen: set(runs.glob("*/*/claim")) > seen)  # type: ignore[misc]
        process.terminate()
        process.communicate()
    found = run(search)
    assert states(found) == ["done"] * 4
    check_whole(found, 4)
    assert any((each / "2").exists() for each in runs.iterdir())


@pytest.mark.slow
def test_the_runs_of_a_killed_search_end_with_it(tmp_path: Path) -> None:
    search = searches.command(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)", trials=1)
    process = started(tmp_path, search)
    output = search.out / "runner" / "runs" / "trial-00000" / "1" / "stdout"
    until(lambda: output.exists() and output.read_text().endswith("\n"))
    process.kill()
    process.communicate()
    until(lambda: guard.started(int(output.read_text())) is None, 10)


@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", ["trial", "guard"])
def test_a_killed_trial_is_run_once_more_and_no_other_is_touched(tmp_path: Path, victim: str, kills: int) -> None:
    """The trial itself, or the process that watches it: then its end is not known, and it ends with it."""
    import random

    draw = random.Random(1)
    search = searches.command(tmp_path, SLOW, trials=max(4, kills), at_once=2, sampler="random")
    tuning = Tuning(search)
    killed: dict[str, int] = {}
    try:
        while tuning.step(0.02):
            for name in tuning.runner.running:
                if name not in killed and len(killed) < kills and draw.random() < 0.5:
                    pid = guard_of(tuning, name)
                    if children := _child(pid):
                        os.kill(pid if victim == "guard" else children[0], signal.SIGKILL)
                        killed[name] = children[0]
    finally:
        tuning.close()
    from memfit.tune.results import results

    found = results(search, tuning.study)
    check_whole(found, max(4, kills))
    again = [name for name in killed if (search.out / "runner" / "runs" / name / "2").exists()]
    assert sorted(again) == sorted(killed)
    until(lambda: all(guard.started(pid) is None for pid in killed.values()))


def guard_of(tuning: Tuning, name: str) -> int:
    """The process that watches a trial."""
    assert isinstance(tuning.runner, Runner)
    return tuning.runner._running[name].pid


def _child(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
def test_a_run_of_memfit_that_is_killed_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    search = searches.toy(tmp_path, {"optim.lr": [0.01]}, trials=1)
    search.run["train"]["steps"] = 400  # type: ignore[index]
    search.run["train"]["save_every"] = 10  # type: ignore[index]
    tuning = Tuning(search)
    out = search.out / "trials" / "trial-00000" / "run"
    killed = False
    try:
        while tuning.step(0.05):
            if not killed and any(out.glob("step-*")):
                (pid,) = _child(guard_of(tuning, "trial-00000"))
                os.kill(pid, signal.SIGKILL)
                killed = True
        from memfit.tune.results import results

        (row,) = results(search, tuning.study).rows
        assert row.state == "done"
        said = (search.out / "runner" / "runs" / "trial-00000" / "2" / "stdout").read_text()
        assert json.loads(said)["verb"] == "resume"
    finally:
        tuning.close()


def check_race(folder: Path, store: str) -> optuna.Study:
    """Four processes for one store that is empty; making its tables is where they fell over each other. Their study."""
    searched = [
        searches.command(folder, SLOW, trials=8, out=f"worker-{number}", store=store, study="shared", sampler="random")
        for number in range(4)
    ]
    processes = [started(folder, search) for search in searched]
    told = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, told
    return check_shared(open_study(searched[0]), 8)


def check_shared(study: optuna.Study, trials: int) -> optuna.Study:
    """So many trials, told by four processes, are numbered without gaps, and all are done."""
    numbers = [trial.number for trial in study.trials]
    assert numbers == list(range(len(numbers)))
    assert trials <= len(numbers) <= trials + 3  # each may have asked for one before it saw the others'
    assert all(trial.state == TrialState.COMPLETE for trial in study.trials)
    return study


@pytest.mark.slow
def test_workers_that_race_for_an_empty_store_share_its_trials(tmp_path: Path) -> None:
    check_race(tmp_path, "shared/study.sqlite")


def test_four_that_begin_in_the_same_moment_share_an_empty_store(tmp_path: Path) -> None:
    """Forks of this process have nothing to import, so all four are at the empty file at once."""
    shared: dict[str, Any] = {"store": "study.sqlite", "study": "shared", "sampler": "random"}
    searched = [searches.command(tmp_path, trials=4, out=f"worker-{number}", **shared) for number in range(4)]
    pids = [forked(search) for search in searched]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    check_shared(open_study(searched[0]), 4)


@pytest.mark.slow
def test_a_trial_of_a_lost_worker_is_tried_once_more(tmp_path: Path) -> None:
    search = searches.command(tmp_path, trials=2, heartbeat=1)
    study = open_study(search)
    with quietly():
        lost = study.ask()
    lost.set_user_attr("memfit:worker", "elsewhere")
    lost.suggest_float("x", -5.0, 5.0)
    lost.suggest_float("y", -5.0, 5.0)
    beat(study, [lost._trial_id])
    time.sleep(4.5)  # three heartbeats of a second are missed
    found = run(search)
    assert states(found) == ["failed", "done", "done"]
    assert found.rows[1].params == lost.params


def test_a_trial_that_another_process_told_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    """As after a halt of this process or a sleep of its computer, while others share the store and take its trials for dead."""
    search = searches.command(tmp_path, "import time; print('value=1', flush=True); time.sleep(60)  # ", trials=1)
    notes: list[str] = []
    tuning = Tuning(search, note=notes.append)
    try:
        tuning.step(0.0)
        study = open_study(search)
        with quietly():
            study.tell(0, state=TrialState.FAIL)
        until(lambda: not tuning.step(0.05))
        assert notes == [
            "trial 0 was told by another process, which had no sign of life of it for 3 heartbeats; what ran of it ends"
        ]
        until(lambda: bool(tuning.runner.poll(0.05)) or not tuning.runner.running)
        assert [trial.state for trial in open_study(search).trials] == [TrialState.FAIL]
    finally:
        tuning.close()


@pytest.mark.slow
def test_halted_searches_beside_another_lose_nothing(tmp_path: Path) -> None:
    """SIGSTOP at ten moments, for longer than three heartbeats of a second; the other one takes over, and the halted one goes on with what is left."""
    import random

    draw = random.Random(2)
    for number in range(10):
        shared: dict[str, Any] = {"store": f"{number}.sqlite", "study": "shared", "sampler": "random", "heartbeat": 1}
        first, second = (
            searches.command(tmp_path, SLOW, trials=8, at_once=2, out=f"{number}-{each}", **shared) for each in "ab"
        )
        halted = forked(first)
        until(lambda first=first: (first.out / "runner" / "runs").exists())  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.5))
        os.kill(halted, signal.SIGSTOP)
        other = forked(second)
        time.sleep(4.5)
        os.kill(halted, signal.SIGCONT)
        assert [os.waitpid(pid, 0)[1] for pid in (halted, other)] == [0, 0]
        trials = open_study(first).trials
        again = {trial.user_attrs.get("memfit:again") for trial in trials}
        done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert {trial.number for trial in trials} - {trial.number for trial in done} <= again
        assert 8 <= len(done) <= 11
        assert all(trial.values == [trial.params["x"] + trial.params["y"]] for trial in done)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes; left out where this user may mount none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount") or "mount"
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, check=False).returncode:  # fmt: skip
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run([shutil.which("umount") or "umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment_is_survived(tmp_path: Path, small_disk: Path) -> None:
    """Something else takes all space at twenty moments of a search, and gives it back after the search has ended."""
    import random

    draw = random.Random(3)
    search = searches.command(small_disk, SLOW, trials=20, at_once=2, sampler="random")
    said = tmp_path / "said"
    ends = []
    for _ in range(20):
        pid = forked(search, said)
        time.sleep(draw.uniform(0, 2.0))
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        filler.unlink()
        if ends[-1] == 2:
            assert "the same command goes on" in said.read_text() or "free space" in said.read_text()
    assert set(ends) <= {0, 2}
    assert 2 in ends
    check_whole(run(search), 20)


def test_a_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    """The kernel lets no file of this process grow past what it has; then it does again."""
    import resource

    search = searches.command(tmp_path, trials=6)
    run(searches.command(tmp_path, trials=2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        with pytest.raises(InputError, match="cannot be used|cannot write"):
            run(search)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    found = run(search)
    assert found.count("done") == 6
