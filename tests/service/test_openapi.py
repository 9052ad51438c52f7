"""What the OpenAPI document promises holds for requests that are drawn from it, those that break it included.

Needs `pip install schemathesis`; without it the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import postgresql_server
from memfit.service import demo
from service.http import listening

pytest.importorskip("schemathesis")

# Uploads are sent as they are drawn. Whether a run file can be meant is more than a schema says: many that it allows are refused with 422.
HOOKS = """
import schemathesis

@schemathesis.serializer("application/zip")
def archive(_context, value):
    return value if isinstance(value, bytes) else str(value).encode()
"""
CONFIGURATION = """
[[operations]]
include-name = ["POST /v1/runs", "POST /v1/uploads"]

[operations.checks]
positive_data_acceptance.enabled = false
"""


@pytest.mark.slow  # hundreds of requests
@pytest.mark.parametrize("store", ["file", pytest.param("postgresql", marks=postgresql_server.needed)])
def test_drawn_requests_are_answered_as_the_document_says(tmp_path: Path, store: str) -> None:
    with ExitStack() as until_then:
        told: dict[str, Any] = {}
        if store == "postgresql":
            told = {"store": until_then.enter_context(postgresql_server.started()).url, "host": "one"}
        serving = until_then.enter_context(listening(tmp_path / "service", modules=(demo.MODULE,), **told))
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
