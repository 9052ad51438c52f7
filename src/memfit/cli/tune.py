"""`memfit tune`: search what a configuration leaves open; each trial is planned before it starts."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import Answer, Status

if TYPE_CHECKING:
    from memfit.tune.results import Results
    from memfit.tune.search import Search


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "tune", parents=[shared], help="search hyperparameters inside the budget", description=__doc__
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration file with a search: part (YAML, or JSON)")
    parser.add_argument("--trials", metavar="N", type=int, help="trials in all (sets search.trials)")
    parser.add_argument("--budget", metavar="BYTES", help="what all trials together may take (sets search.budget)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key, as if it stood in the file: --set search.at_once=2",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Search, and report the best."""
    from memfit.tune.call import run as search_all
    from memfit.tune.live import display

    search = _search(arguments)
    shown = display()
    try:
        found = search_all(search, shown)
    except KeyboardInterrupt:
        shown.note(f"stopped; to go on: memfit tune {arguments.config}")
        raise
    finally:
        shown.close()
    return answer(found)


def _search(arguments: argparse.Namespace) -> Search:
    from memfit.tune.search import load_search

    settings = list(arguments.settings)
    for name in ("trials", "budget"):
        value = getattr(arguments, name)
        if value is not None:
            settings.append(f"search.{name}={json.dumps(value)}")
    return load_search(arguments.config, settings)


def answer(found: Results) -> Answer:
    """The answer for a search that is over."""
    from memfit.tune.results import BEST_NAME, CSV_NAME, PAGE_NAME

    out = found.search.out
    states = {state: found.count(state) for state in ("done", "pruned", "infeasible", "out of memory", "failed")}
    names = [each.name for each in found.search.config.objectives]
    data: dict[str, Any] = {
        "verb": "tune",
        "study": found.search.name,
        "store": found.store,
        "trials": len(found.rows),
        "states": states,
        "launched": found.launched,
        "best": [
            {
                "trial": row.number,
                "values": dict(zip(names, row.values or (), strict=False)),
                "params": row.params,
                "peak_bytes": row.peak_bytes,
            }
            for row in found.best
        ],
        "csv": str(out / CSV_NAME),
        "report": str(out / PAGE_NAME),
        "best_run": str(out / BEST_NAME) if found.best and not found.search.is_command else None,
    }
    lines = [
        f"{len(found.rows)} trials: " + ", ".join(f"{number} {state}" for state, number in states.items() if number)
    ]
    for row in found.best[:5]:
        values = ", ".join(f"{name} {value:.6g}" for name, value in zip(names, row.values or (), strict=False))
        lines.append(
            f"Best: trial {row.number}, {values}, with "
            + ", ".join(f"{name}={value}" for name, value in row.params.items())
        )
    if data["best_run"]:
        lines.append(f"To train with it: memfit train {data['best_run']}")
    lines += [f"Trials: {data['csv']}", f"Report: {data['report']}", f"Store: {found.store}"]
    return Answer(data, "\n".join(lines), Status.FITS if found.best else Status.COULD_NOT_TELL)
