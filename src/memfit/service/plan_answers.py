"""What the process that planned a run has answered: its plan, and what it printed. That process may be the run's own code, so neither is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from memfit.errors import PlanFileError
from memfit.service import launching
from memfit.service.own_folder import open_inside
from memfit.service.settings import ServiceSettings
from memfit.units import format_bytes
from memfit.values.plan import Plan

_MOST_ANSWER: Final = 4 << 20  # bytes of `memfit plan --json`
MOST_PLAN_BYTES: Final = 256 << 20


def read_plan(settings: ServiceSettings, number: int) -> Plan:
    """The plan of a run.

    Raises:
        PlanFileError, InputError, OSError: there is none that can be read.
    """
    with open_inside(launching.folder_of(settings, number), "plan.json") as stream:
        content = stream.read(MOST_PLAN_BYTES + 1)
    if len(content) > MOST_PLAN_BYTES:
        raise PlanFileError(f"the plan of run {number} is larger than {format_bytes(MOST_PLAN_BYTES)}")
    try:
        return Plan.from_json(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"the plan of run {number} is no JSON: {error}") from error


def answer(file: Path) -> dict[str, Any]:
    """What a command has answered as JSON; empty where it has not."""
    try:
        with file.open("rb") as stream:
            content = json.loads(stream.read(_MOST_ANSWER))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
