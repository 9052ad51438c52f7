"""`memfit explain`: a plan in words, and the results of the run that followed it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit.cli.answer import Answer
from memfit.errors import PlanFileError
from memfit.units import format_bytes, format_seconds


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser("explain", parents=[shared], help="say what a plan does and why", description=__doc__)
    parser.add_argument("path", metavar="PLAN.json|OUT_DIR", type=Path, help="a saved plan, or the folder of a run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Read the plan, and the log where there is one; needs no torch."""
    from memfit.train.log import records
    from memfit.values.plan import Plan

    folder = arguments.path if arguments.path.is_dir() else None
    if folder is not None and not (folder / "plan.json").is_file():
        raise PlanFileError(f"{folder} is no run's folder: it holds no plan.json")
    plan = Plan.load(arguments.path if folder is None else folder / "plan.json")
    data: dict[str, Any] = {"verb": "explain", **plan.summary(), "explanation": plan.explain().splitlines()}
    lines = [plan.explain()]
    steps = () if folder is None else records(folder)
    if steps:
        last = steps[-1]
        peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
        seconds = sorted(step.seconds for step in steps)[len(steps) // 2]
        data["run"] = {
            "step": last.step,
            "loss": last.loss,
            "peak_bytes": max(peaks, default=None),
            "median_seconds": seconds,
            "divergences": sorted({text for step in steps for text in step.divergences}),
        }
        lines.append(f"Run: {last.step} steps, loss {last.loss:.4f}, {format_seconds(seconds)} a step.")
        if peaks:
            lines.append(
                f"Measured: {format_bytes(max(peaks))} at the peak; "
                f"predicted: {format_bytes(plan.prediction.peak_bytes)}."
            )
        lines += [f"Not as planned: {text}" for text in data["run"]["divergences"]]
    return Answer(data, "\n".join(lines))
