"""Runs of several ranks through the service: planned, promised for all ranks or none, confined and yet able to reach each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from service.conftest import ANNA, Serving


@pytest.mark.slow  # two ranks under torchrun
def test_a_run_of_two_ranks_is_planned_promised_and_trained(serve: Callable[..., Serving]) -> None:
    serving = serve(capacity={"cpu": 4 << 20})
    fit: dict[str, Any] = {"devices": 2, "fixed": {"micro_batches": 1, "sharding": "data"}}
    run = serving.submit(steps=4, fit=fit)
    found = serving.until_state(run.number, "done", "failed", "refused")
    assert found.state == "done", found.reason
    assert found.plan is not None
    assert len(found.plan["rank_bytes"]) == 2
    with serving.service.artifact(ANNA, run.number, "log.jsonl") as stream:
        steps = [json.loads(line)["step"] for line in stream]
    assert steps == [1, 2, 3, 4]
