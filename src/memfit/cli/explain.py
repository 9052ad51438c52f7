"""`memfit explain`: a plan in words, and the results of the run that followed it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from memfit.cli.answer import Answer
from memfit.errors import PlanFileError
from memfit.train.snapshot_folders import folders, step_of
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan
from memfit.values.report import StepRecord


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser("explain", parents=[shared], help="say what a plan does and why", description=__doc__)
    parser.add_argument("path", metavar="PLAN.json|OUT_DIR", type=Path, help="a saved plan, or the folder of a run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Read the plan, and the log where there is one; needs no torch."""
    from memfit.train.log import peaks, records

    folder = arguments.path if arguments.path.is_dir() else None
    if folder is not None and not (folder / "plan.json").is_file():
        raise PlanFileError(f"{folder} is no run's folder: it holds no plan.json")
    if arguments.path.suffix in (".yaml", ".yml"):
        raise PlanFileError(
            f"{arguments.path} is a run file: memfit explain takes a saved plan or the folder of a run; memfit plan makes a plan of a run file"
        )
    plan = Plan.load(arguments.path if folder is None else folder / "plan.json")
    data: dict[str, Any] = {"verb": "explain", **plan.summary(), "explanation": plan.explain().splitlines()}
    lines = [plan.explain()]
    steps = () if folder is None else records(folder)
    saved = [] if folder is None else folders(folder)
    if steps or saved:
        logged = plan.prediction.ranks[0] if plan.prediction.ranks else plan.prediction  # rank 0 writes the log
        measured = () if folder is None else peaks(folder, logged.peak_bytes)
        told, run = _run(plan, steps, measured, saved[-1] if saved else None)
        data["run"] = run
        lines += told
    return Answer(data, "\n".join(lines))


def _run(
    plan: Plan, steps: Sequence[StepRecord], peaks: Sequence[int], saved: Path | None
) -> tuple[list[str], dict[str, Any]]:
    """What a run has done so far, for a person and for a program.

    Args:
        plan: that it follows.
        steps: of its log, which may have a line for some of them alone.
        peaks: bytes that were measured in steps under this plan, of rank 0 where there are several.
        saved: its last snapshot; None before the first.
    """
    logged = steps[-1] if steps else None
    snapshot = None if saved is None else step_of(saved)
    taken = max(logged.step if logged is not None else 0, snapshot or 0)
    data: dict[str, Any] = {
        "step": taken,
        "loss": None,
        "peak_bytes": None,
        "median_seconds": None,
        "divergences": [],
        "snapshot": None if saved is None else str(saved),
        "snapshot_step": snapshot,
    }
    lines = [f"Run: {taken} step{'' if taken == 1 else 's'}"]
    if logged is not None:
        seconds = median(step.seconds for step in steps)
        data |= {
            "loss": logged.loss,
            "peak_bytes": max(peaks, default=None),
            "median_seconds": seconds,
            "divergences": sorted({text for step in steps for text in step.divergences}),
        }
        at = "" if logged.step == taken else f" in step {logged.step}, the last in the log"
        lines[0] += f", loss {logged.loss:.4f}{at}, {format_seconds(seconds)} a step"
        if peaks:
            ranks = plan.prediction.ranks
            predicted, whose = (ranks[0].peak_bytes, " of rank 0") if ranks else (plan.prediction.peak_bytes, "")
            lines.append(
                f"Measured: {format_bytes(max(peaks))} at the peak{whose}; predicted: {format_bytes(predicted)}."
            )
        lines += [f"Not as planned: {text}" for text in data["divergences"]]
    lines[0] += "."
    if saved is not None:
        lines.insert(1, f"Last snapshot: after step {snapshot}, in {saved}.")
    return lines, data
