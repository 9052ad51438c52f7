"""`memfit runs`: what a service runs, one run as it goes on, and what may be done with it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from memfit.cli.answer import Answer
from memfit.cli.submit import add_export, add_service, client_of, followed, written
from memfit.errors import ConfigError
from memfit.units import format_bytes

_VERBS = ("cancel", "pause", "resume", "remove")


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "runs", parents=[shared], help="list, follow and end runs of a service", description=__doc__
    )
    parser.add_argument("number", metavar="RUN", nargs="?", type=int, help="one run; without it, all are listed")
    parser.add_argument("--state", action="append", default=[], help="list only those: waiting, running, done, ...")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--follow", action="store_true", help="its events and output until it is over")
    what.add_argument("--output", action="store_true", help="the end of what it has printed")
    what.add_argument("--plan", action="store_true", help="its plan in words")
    what.add_argument("--fetch", metavar="FOLDER", type=Path, help="copy the files that it has written")
    what.add_argument("--cancel", action="store_true", help="have it end for good")
    what.add_argument("--pause", action="store_true", help="have it stop with a snapshot, and give its bytes back")
    what.add_argument("--resume", action="store_true", help="put it back into the queue")
    what.add_argument("--remove", action="store_true", help="remove its files, once it is over")
    what.add_argument(
        "--export", choices=("slurm", "trainjob"), help="write it for another scheduler, with the bytes of its plan"
    )
    add_export(parser)
    add_service(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Ask the service."""
    number = arguments.number
    with client_of(arguments) as client:
        if number is None:
            if any(getattr(arguments, name) for name in ("follow", "output", "plan", "fetch", "export", *_VERBS)):
                raise ConfigError("say which run: memfit runs 12 --follow")
            found = client.runs(*arguments.state)
            return Answer({"verb": "runs", "runs": found}, "\n".join(map(_line, found)) or "No runs.")
        if arguments.follow:
            for line in followed(client, number):
                print(line, flush=True)
            return Answer({"verb": "runs", **client.run(number)}, "")
        if arguments.output:
            text = client.output(number)
            return Answer({"verb": "runs", "run": number, "output": text}, text.rstrip("\n"))
        if arguments.plan:
            text = client.plan(number)
            return Answer({"verb": "runs", "run": number, "plan": text}, text)
        if arguments.fetch is not None:
            files = [str(file) for file in client.fetch(number, arguments.fetch)]
            return Answer(
                {"verb": "runs", "run": number, "files": files},
                "\n".join(files) or "It has no files: none was written, or they were removed.",
            )
        if arguments.export is not None:
            return written(client.export(number, arguments.export, arguments.image or ""), arguments, {"run": number})
        for verb in _VERBS:
            if getattr(arguments, verb):
                found_run = getattr(client, verb)(number)
                return Answer({"verb": "runs", **found_run}, _line(found_run))
        one = client.run(number)
        events = [
            f"  {time.strftime('%H:%M:%S', time.localtime(each['time']))}  {each['kind']}: {each['text']}"
            for each in one["events"]
        ]
        return Answer({"verb": "runs", **one}, "\n".join([_line(one), *events]))


def _line(run: dict[str, Any]) -> str:
    """A run in a line."""
    plan = run["plan"]
    size = "" if plan is None else f", {format_bytes(plan['peak_bytes'])} of {format_bytes(plan['budget_bytes'])}"
    asked = f" ({run['asked']} asked)" if run["asked"] else ""
    step = "" if run["step"] is None else f", step {run['step']}"
    step += f" of {plan['total_steps']}" if step and plan and plan["total_steps"] is not None else ""
    return f"{run['run']}  {run['state']}{asked}  {run['name']} ({run['owner']}){size}{step}: {run['reason']}"
