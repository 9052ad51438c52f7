"""`memfit frontier`: bytes against seconds, from the peak of plain PyTorch down to the smallest budget for which a plan is found."""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import Answer, add_config, add_device, check_place, device_of, read_config
from memfit.errors import ConfigError

if TYPE_CHECKING:
    from memfit.values.plan import Plan
    from memfit.values.report import FrontierPoint


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "frontier", parents=[shared], help="bytes against seconds, for all budgets", description=__doc__
    )
    add_config(parser)
    parser.add_argument("--points", metavar="N", type=int, default=9, help="plans to make (default 9)")
    add_device(parser, "plan")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with the picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Make the plans and print them as a table."""
    if arguments.points < 3:
        raise ConfigError(
            f"--points {arguments.points}: a frontier has at least 3, so that a line through them shows its shape"
        )
    check_place(arguments.html, "report", folder_is_made=True)
    device = device_of(arguments)
    config = read_config(arguments)
    from memfit.api import frontier_points
    from memfit.train import progress
    from memfit.train.plans import make_frontier
    from memfit.train.ranks import elsewhere
    from memfit.values.report import Report

    display = progress.display()
    try:
        plans = make_frontier(config, device or elsewhere(config), display, arguments.points)
    finally:
        display.close()
    points = frontier_points(plans)
    data: dict[str, Any] = {"verb": "frontier", "points": [asdict(p) for p in points]}
    text = table(plans[0], points)
    if arguments.html is not None:
        from memfit.views import write_report

        title = config.model.hf or config.model.python or "memfit"
        write_report(Report(title, chosen(plans, config.fit.budget), frontier=points), arguments.html)
        data["html"] = str(arguments.html)
        text += f"\nPage: {arguments.html}"
    return Answer(data, text)


def chosen(plans: Sequence[Plan], budget: str | int | None) -> Plan:
    """The plan the page shows in detail: the fastest inside the budget, or the plain one."""
    from memfit.errors import BudgetError
    from memfit.units import parse_bytes

    if budget is not None:
        try:
            limit = parse_bytes(budget)
        except BudgetError:  # a share of the device; any plan shows what there is to see
            return plans[0]
        inside = [plan for plan in plans if plan.prediction.peak_bytes <= limit]
        if inside:
            return min(inside, key=lambda plan: plan.prediction.step_seconds)
    return max(plans, key=lambda plan: plan.prediction.peak_bytes)


def table(plain: Plan, points: Sequence[FrontierPoint]) -> str:
    """The points as text, compared with the plain plan."""
    from rich.console import Console

    from memfit.views import frontier_table

    console = Console(file=io.StringIO(), width=max(80, shutil.get_terminal_size((100, 24)).columns), color_system=None)
    with console.capture() as capture:
        console.print(frontier_table(plain, points))
    return capture.get().rstrip()
