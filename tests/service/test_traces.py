"""Published traces are read in the formats in which they are published."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError

FOLDER = Path(__file__).resolve().parent.parent.parent / "bench" / "service"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("traces")
    del sys.modules["traces"]


def test_philly_names_gpus_and_no_bytes(traces: Any, tmp_path: Path) -> None:
    def attempt(begin: str | None, end: str | None, *gpus: int) -> dict[str, Any]:
        machines = [{"ip": f"m{n}", "gpus": [f"gpu{k}" for k in range(number)]} for n, number in enumerate(gpus)]
        return {"start_time": begin, "end_time": end, "detail": machines}

    rows = [
        {
            "status": "Pass", "vc": "v", "jobid": "late", "user": "b", "submitted_time": "2017-10-07 01:00:10",
            "attempts": [attempt("2017-10-07 01:01:00", "2017-10-07 01:02:00", 2, 1), attempt("2017-10-07 02:00:00", "2017-10-07 02:00:30", 3)],
        },
        {
            "status": "Killed", "vc": "v", "jobid": "first", "user": "a", "submitted_time": "2017-10-07 01:00:00",
            "attempts": [attempt("2017-10-07 01:00:00", "2017-10-08 01:00:00", 1)],
        },
        {"status": "Failed", "vc": "v", "jobid": "never", "user": "a", "submitted_time": "2017-10-07 01:00:00", "attempts": []},
        {
            "status": "Killed", "vc": "v", "jobid": "not ended", "user": "a", "submitted_time": "2017-10-07 01:00:00",
            "attempts": [attempt("2017-10-07 01:00:00", None, 1)],
        },
    ]  # fmt: skip
    file = tmp_path / "cluster_job_log"
    file.write_text(json.dumps(rows))
    assert traces.read(file, 10) == [traces.Job(0.0, 86400.0, 1, 1.0, "a"), traces.Job(10.0, 90.0, 3, 1.0, "b")]
    assert traces.read(file, 10, longest=1000) == [traces.Job(0.0, 90.0, 3, 1.0, "b")]


def test_openb_tells_the_share_of_a_gpu(traces: Any, tmp_path: Path) -> None:
    file = tmp_path / "pods.csv"
    file.write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "p2,4000,1,1,460,,BE,Running,120,300,150\n"
        "p1,4000,1,8,1000,V100M16,LS,Succeeded,100,400,100\n"
        "never,4000,1,1,1000,,LS,Pending,110,400,\n"
        "no gpu,4000,1,0,0,,LS,Running,110,400,110\n"
    )
    assert traces.read(file, 10) == [traces.Job(0.0, 300.0, 8, 1.0, "LS"), traces.Job(20.0, 150.0, 1, 0.46, "BE")]


def test_what_is_no_trace_is_refused(traces: Any, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="is no trace of Philly"):
        traces.read(tmp_path / "other.csv", 10)
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(InputError, match="has no job that ran on a GPU"):
        traces.read(tmp_path / "empty.json", 10)
