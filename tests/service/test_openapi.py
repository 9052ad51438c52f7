"""What the OpenAPI document promises holds for requests that are drawn from it, those that break it included.

Needs `pip install schemathesis`; without it the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import postgresql_server
from memfit.service.service import Submission
from memfit.service.serving import Serving
from service import killing
from service.http import listening

pytest.importorskip("schemathesis")

# Uploads are sent as they are drawn. Every other number is one of what there is, else nearly all would be of runs that there are not. Whether a run file can
# be meant is more than a schema says: many that it allows are refused with 422. So is a TrainJob without an image.
HOOKS = """
import schemathesis

@schemathesis.hook
def map_path_parameters(_context, parameters):
    number = (parameters or {}).get("number")
    if isinstance(number, int) and 1 <= number <= 2**62 and number % 2:  # others are to be refused
        parameters["number"] = number % 10 // 2 + 1
    return parameters

@schemathesis.serializer("application/zip")
def archive(_context, value):
    return value if isinstance(value, bytes) else str(value).encode()
"""
CONFIGURATION = """
[[operations]]
include-name = ["POST /v1/runs", "POST /v1/studies", "POST /v1/uploads", "GET /v1/runs/{number}/export"]

[operations.checks]
positive_data_acceptance.enabled = false
"""


def there(serving: Serving) -> None:
    """Runs and a study of the one who asks, all over, as the stream of any other does not end: done, planned alone, failed, cancelled, refused."""
    service, studies = serving.service, serving.studies
    numbers = []
    for number in range(5):
        config = killing.run_file(1)
        if number == 2:
            config["model"]["args"]["status"] = 3
        if number == 4:
            config["train"]["steps"] = 10**9
            config["fit"]["devices"] = 64
        run = service.submit(killing.CLIENT, Submission(config, name=f"run {number}", plan_only=number == 1))[0]
        if number == 3:
            service.cancel(killing.CLIENT, run.number)
        numbers.append(run.number)
    assert numbers == [1, 2, 3, 4, 5]
    search = {"space": {"optim.lr": [0.1, 0.2]}, "objective": "loss", "trials": 2}
    study, _ = studies.submit(killing.CLIENT, Submission({**killing.run_file(1), "search": search}))
    deadline = time.monotonic() + 60
    while service.store.live() or studies.store.study(study.number).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    states = [service.store.run(number).state for number in numbers]
    assert states == ["done", "planned", "failed", "cancelled", "refused"], states


@pytest.mark.slow  # hundreds of requests
@pytest.mark.parametrize("store", ["file", pytest.param("postgresql", marks=postgresql_server.needed)])
def test_drawn_requests_are_answered_as_the_document_says(tmp_path: Path, store: str) -> None:
    with ExitStack() as until_then:
        told: dict[str, Any] = {}
        if store == "postgresql":
            told = {"store": until_then.enter_context(postgresql_server.started()).url, "host": "one"}
        killing.write_plan(tmp_path)
        cheap = killing.settings(tmp_path)
        about = {name: getattr(cheap, name) for name in ("capacity", "modules", "confined", "program")}
        serving = until_then.enter_context(listening(tmp_path / "service", **about, **told))
        there(serving)
        (tmp_path / "hooks.py").write_text(HOOKS)
        (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
        path = os.pathsep.join(each for each in (str(tmp_path), os.environ.get("PYTHONPATH")) if each)
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": path}
        token = serving.service.tokens.make("anna", "submit")
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{serving.url}/openapi.json", "--header", f"Authorization: Bearer {token}",
            "--max-examples", "25", "--no-color", "--continue-on-failure",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout[-6000:]
        assert serving.service.dispatcher.view.error == ""
