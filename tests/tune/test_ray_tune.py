"""The same search through Ray Tune: trials are planned before Ray places them, and what cannot fit is never launched."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import ConfigError, InputError
from memfit.tune import ray_tune
from memfit.tune.ray_tune import reports
from tune import searches

MIB = 1 << 20


def test_without_ray_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="Ray Tune is missing .*: pip install 'memfit.raytune.'"):
        ray_tune(searches.command(tmp_path))


STEPS = """
import sys, time
for step in range(3):
    print('step=%d value=%r' % (step, float(sys.argv[1]) + step), flush=True)
    time.sleep(0.6)
"""


def test_a_trial_reports_as_ray_tune_takes_it(tmp_path: Path) -> None:
    """What Ray runs, here without Ray: steps as they come, the value that counts, and no launch of what cannot fit."""
    space = {"x": [1.0, 2.0]}
    search = searches.command(tmp_path, STEPS, space, memory="60MiB", budget="100MiB")
    told = list(reports(search, {"x": 1.0}, "first", 100 * MIB))
    assert [each["value"] for each in told[:-1]] == sorted({each["value"] for each in told[:-1]})
    assert (told[-1]["value"], told[-1]["memfit_state"], told[-1]["memfit_peak_bytes"]) == (3.0, "done", 60 * MIB)
    assert list(reports(search, {"x": 2.0}, "second", 50 * MIB)) == [
        {"value": math.inf, "memfit_state": "infeasible", "memfit_peak_bytes": 60 * MIB}
    ]
    assert not (search.out / "trials" / "second").exists()
    grows = searches.command(tmp_path, "bytearray(1 << 30)", space, memory="60MiB", budget="100MiB", out="grows")
    assert [each["memfit_state"] for each in reports(grows, {"x": 1.0}, "run", None)] == ["out of memory"]
    fails = searches.command(tmp_path, "raise SystemExit(3)", space, memory="60MiB", budget="100MiB", out="fails")
    with pytest.raises(InputError, match="the trial failed: failed .exit status 3."):
        list(reports(fails, {"x": 1.0}, "run", None))
    silent = searches.command(tmp_path, "print('loss=1')", space, memory="60MiB", budget="100MiB", out="silent")
    with pytest.raises(InputError, match="value was never reported as a number"):
        list(reports(silent, {"x": 1.0}, "run", None))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets have 107 letters at most
    monkeypatch.setenv("RAY_TMPDIR", short)
    found.init(
        num_cpus=2,
        object_store_memory=80 * MIB,
        resources={"memfit_cpu_MiB": 100},
        include_dashboard=False,
        log_to_driver=False,
    )
    yield found
    found.shutdown()
    shutil.rmtree(short, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_search_file_runs_through_ray_tune(ray: Any, tmp_path: Path) -> None:
    """Trials of 60 of 100 MiB, up to four at once by number: never two at once by their bytes."""
    code = "import os, sys, time; d = sys.argv[3]; os.mkdir(d); time.sleep(0.5); os.rmdir(d); print(f'value={float(sys.argv[1]) + float(sys.argv[2])!r}')"
    space = {"x": {"low": -5.0, "high": 5.0}, "y": [1.0, 2.0], "folder": [str(tmp_path / "running")]}
    search = searches.command(tmp_path, code, space, trials=4, at_once=4, memory="60MiB", budget="100MiB")
    found = ray_tune(search)
    assert len(found) == 4
    assert not found.errors
    for each in found:
        assert each.metrics["memfit_state"] == "done"
        assert each.metrics["value"] == each.config["x"] + each.config["y"]
    assert found.get_best_result().metrics["value"] == min(each.metrics["value"] for each in found)
    with pytest.raises(
        ConfigError, match="search.pruner: Ray Tune has no wilcoxon; it has none, median, halving, hyperband"
    ):
        ray_tune(searches.command(tmp_path, pruner="wilcoxon"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_runs_of_memfit_are_planned_before_ray_places_them(ray: Any, tmp_path: Path) -> None:
    search = searches.toy(tmp_path, {"model.args.width": [32, 256]}, sampler="grid", trials=2)
    found = ray_tune(search)
    assert not found.errors
    states = {each.config["model.args.width"]: each.metrics["memfit_state"] for each in found}
    assert states == {32: "done", 256: "infeasible"}
    assert len(list((search.out / "trials").iterdir())) == 1
    (done,) = [each for each in found if each.metrics["memfit_state"] == "done"]
    assert done.metrics["peak_bytes"] == done.metrics["memfit_peak_bytes"]
