"""`memfit studies`: what a service searches, one study with its trials, its results, and its end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from memfit.cli.answer import Answer
from memfit.cli.submit import add_service, client_of
from memfit.errors import ConfigError


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "studies", parents=[shared], help="list, follow and end studies of a service", description=__doc__
    )
    parser.add_argument("number", metavar="STUDY", nargs="?", type=int, help="one study; without it, all are listed")
    parser.add_argument("--state", action="append", default=[], help="list only those: running, done, ...")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--follow", action="store_true", help="its trials as they end, until it is over")
    what.add_argument(
        "--fetch", metavar="FOLDER", type=Path, help="copy its results: trials.csv, best.yaml, report.html"
    )
    what.add_argument("--cancel", action="store_true", help="have it end, with all of its trials")
    add_service(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Ask the service."""
    number = arguments.number
    with client_of(arguments) as client:
        if number is None:
            if arguments.follow or arguments.fetch or arguments.cancel:
                raise ConfigError("say which study: memfit studies 3 --follow")
            found = client.studies(*arguments.state)
            return Answer({"verb": "studies", "studies": found}, "\n".join(map(line, found)) or "No studies.")
        if arguments.fetch is not None:
            files = [str(file) for file in client.fetch_study(number, arguments.fetch)]
            return Answer(
                {"verb": "studies", "study": number, "files": files}, "\n".join(files) or "It has no results yet."
            )
        if arguments.cancel:
            one = client.cancel_study(number)
            return Answer({"verb": "studies", **one}, line(one))
        if arguments.follow:
            one = client.wait_for_study(number, tell)
            return Answer({"verb": "studies", **one}, line(one))
        one = client.study(number)
        return Answer(
            {"verb": "studies", **one}, "\n".join([line(one), *(f"  {trial(each)}" for each in one["trials"])])
        )


def tell(each: dict[str, Any]) -> None:
    """A trial that is over, to whoever watches."""
    print(trial(each), file=sys.stderr, flush=True)


def trial(each: dict[str, Any]) -> str:
    """A trial in a line."""
    given = ", ".join(f"{name}={value}" for name, value in each["params"].items())
    values = ", ".join("not a number" if value is None else f"{value:.6g}" for value in each["values"])
    why = "" if each["why"] in {"", each["state"]} else f": {each['why']}"
    run = "" if each["run"] is None else f" (run {each['run']})"
    return f"trial {each['number']}{run}  {each['state']}{f'  {values}' if values else ''}  {given}{why}"


def line(study: dict[str, Any]) -> str:
    """A study in a line."""
    over = sum(number for state, number in study["states"].items() if state not in {"running", "waiting"})
    best = ""
    if study["best"]:
        first = study["best"][0]
        values = zip(study["objectives"], first["values"], strict=False)
        told = ", ".join(f"{name} {'not a number' if value is None else f'{value:.6g}'}" for (name, _), value in values)
        best = f", best: trial {first['trial']}, {told}"
    asked = f" ({study['asked']} asked)" if study["asked"] else ""
    return f"{study['study']}  {study['state']}{asked}  {study['name']} ({study['owner']}), {over} of {study['trials_asked']} trials{best}: {study['reason']}"
