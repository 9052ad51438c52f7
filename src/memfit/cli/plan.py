"""`memfit plan`: does it fit, and at what cost?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit.cli.answer import Answer, add_config, read_config, summary
from memfit.errors import PlanFileError


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "plan", parents=[shared], help="say whether training fits, and what it costs", description=__doc__
    )
    add_config(parser)
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan as JSON, for memfit train --plan")
    parser.add_argument(
        "--device", metavar="NAME", help='plan for a GPU that is not here, such as "rtx4090"; times are estimated'
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Plan, and say what came of it."""
    config = read_config(arguments)
    from memfit.train import progress
    from memfit.train.run import check_budget, make_plan

    check_budget(config)
    display = progress.display()
    try:
        plan = make_plan(config, arguments.device, display)
    finally:
        display.close()
    data = {"verb": "plan", "fits": True, **summary(plan)}
    text = plan.explain()
    if arguments.save is not None:
        try:
            plan.save(arguments.save)
        except OSError as error:
            raise PlanFileError(f"cannot write the plan {arguments.save}: {error.strerror or error}") from error
        data["saved"] = str(arguments.save)
        text += f"\nSaved: {arguments.save}"
    return Answer(data, text)
