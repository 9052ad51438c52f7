"""`memfit tune`: search what a configuration leaves open; each trial is planned before it starts."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import Answer, Status, add_set
from memfit.errors import ConfigError, PlanFileError

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
        "--cluster",
        metavar="ADDRESS",
        help='run trials on the machines of this Ray cluster, "auto" for ours (sets search.cluster)',
    )
    add_set(parser, "search.at_once=2")
    parser.add_argument(
        "--export",
        choices=("katib", "trainjob"),
        help="search nothing: write a Katib Experiment, or a TrainJob of the best trial so far",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="file for --export")
    parser.add_argument("--image", metavar="IMAGE", help="container image for --export, with command and data in it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Search, and report the best."""
    from memfit.tune.call import run as search_all
    from memfit.tune.live import display

    search = _search(arguments)
    if arguments.export is not None:
        return _exported(search, arguments)
    shown = display()
    try:
        found = search_all(search, shown)
    except KeyboardInterrupt:
        shown.note(f"stopped; to go on: {_command(arguments)}")
        raise
    finally:
        shown.close()
    return answer(found)


def _command(arguments: argparse.Namespace) -> str:
    """The same command again."""
    given = {name: getattr(arguments, name) for name in ("trials", "budget", "cluster")}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return shlex.join(["memfit", "tune", arguments.config, *words, *(f"--set={each}" for each in arguments.settings)])


def _search(arguments: argparse.Namespace) -> Search:
    from memfit.tune.search import load_search

    settings = list(arguments.settings)
    for name in ("trials", "budget", "cluster"):
        value = getattr(arguments, name)
        if value is not None:
            settings.append(f"search.{name}={json.dumps(value)}")
    return load_search(arguments.config, settings)


def _exported(search: Search, arguments: argparse.Namespace) -> Answer:
    if arguments.output is None or arguments.image is None:
        raise ConfigError("--export needs --output FILE and --image IMAGE")
    import yaml

    from memfit.tune import katib
    from memfit.tune.results import results, values_of
    from memfit.tune.study_store import open_study
    from memfit.tune.train_job import train_job

    notes: tuple[str, ...] = ("checked against the published schema, and never applied to a cluster",)
    if arguments.export == "katib":
        resource, more = katib.experiment(search, arguments.image)
        notes += more
    else:
        best = results(search, open_study(search)).best
        if not best:
            raise ConfigError("--export trainjob is of the best trial, and no trial is done yet: search first")
        resource = train_job(search, values_of(search, best[0].params), arguments.image)
    try:
        arguments.output.write_text(yaml.safe_dump(resource, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise PlanFileError(f"cannot write the export {arguments.output}: {error.strerror or error}") from error
    data = {"verb": "tune", "export": arguments.export, "output": str(arguments.output), "notes": list(notes)}
    return Answer(data, "\n".join([f"Written: {arguments.output}", *(f"- {each}" for each in notes)]))


def answer(found: Results) -> Answer:
    """The answer for a search that is over."""
    from memfit.tune.results import BEST_NAME, CSV_NAME, PAGE_NAME
    from memfit.views.drawing import counted

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
        f"{counted(len(found.rows), 'trial')}: "
        + ", ".join(f"{number} {state}" for state, number in states.items() if number)
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
