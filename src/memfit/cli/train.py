"""`memfit train` and `memfit resume`: train inside the budget, and resume a run that stopped."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.answer import Answer, Status, add_config, add_settings, read_config, settings_of
from memfit.errors import ConfigError
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.train.run import Result

_SIGNALLED = 128  # a shell's status for a process that a signal ended, less the signal's number


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Arguments of both verbs."""
    parser = verbs.add_parser(
        "train", parents=[shared], help="train inside the budget", description="Train inside the budget."
    )
    add_config(parser)
    parser.add_argument("--plan", metavar="FILE", type=Path, help="follow this plan instead of making one")
    _add_ranks(parser, "train in N processes on this machine, started by torchrun")
    parser.add_argument("--devices", metavar="DEVICES", help='what each process has: "4x24GiB" (sets fit.devices)')
    parser.set_defaults(run=run)
    parser = verbs.add_parser(
        "resume", parents=[shared], help="go on with a run that stopped", description="Go on with a run that stopped."
    )
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="folder of the run, or one of its snapshots")
    parser.add_argument("--plan", metavar="FILE", type=Path, help="follow this plan instead of the saved one")
    _add_ranks(parser, "in N processes; left out, in as many as before")
    add_settings(parser)
    parser.set_defaults(run=run_resume)


def _add_ranks(parser: argparse.ArgumentParser, number: str) -> None:
    parser.add_argument(
        "--nproc", metavar="N", help=f'{number}; "2:4": in 4, and in fewer, 2 at least, after one was lost'
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=0,
        help="go on from the last snapshot, so many times, when one of the processes was lost (0)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Train from the start, in processes of its own where that is asked for."""
    from memfit.cli import launch

    if arguments.nproc is None:
        if arguments.restarts:
            raise ConfigError("--restarts starts processes again, and --nproc says how many there are: give both")
        return launch.reported(lambda: _trained(arguments))
    if _started(arguments):
        return _trained(arguments)
    return launch.launched(arguments)


def _started(arguments: argparse.Namespace) -> bool:
    """Whether this process is one of as many as were asked for."""
    number = os.environ.get("WORLD_SIZE") if os.environ.get("RANK") else None
    if number not in {None, arguments.nproc}:
        raise ConfigError(
            f"--nproc {arguments.nproc}: this process is one of {number} that torchrun has started: leave --nproc out"
        )
    return number is not None


def _trained(arguments: argparse.Namespace) -> Answer:
    config = read_config(arguments)
    plan = None
    if arguments.plan is not None:
        from memfit.cli.launch import handed_on

        plan = handed_on(arguments.plan)
    from memfit.train import progress
    from memfit.train.run import start

    display = progress.display()
    try:
        result = start(config, display, plan)
    finally:
        display.close()
    if result.rank:
        return Answer({}, "")  # rank 0 answers
    return answer("train", result)


def run_resume(arguments: argparse.Namespace) -> Answer:
    """Go on from the newest snapshot."""
    if arguments.out.is_file():
        raise ConfigError(
            f"{arguments.out} is a file: memfit resume takes the folder of a run, train.out in its run file"
        )
    if not arguments.out.is_dir():
        raise ConfigError(
            f"there is no folder {arguments.out}: memfit resume takes the folder of a run, train.out in its run file"
        )
    from memfit.cli import launch

    if arguments.nproc is not None and _started(arguments):
        return _resumed(arguments)
    if not os.environ.get("RANK"):
        from memfit.train.begun import ranks_of

        arguments.nproc = arguments.nproc or str(ranks_of(arguments.out))
        if arguments.nproc != "1":
            return launch.launched(arguments)
        if arguments.restarts:
            raise ConfigError(
                "--restarts goes on when one of several processes was lost, and this run has one: leave it out, or give --nproc"
            )
        arguments.settings.append("fit.devices=null")
    return launch.reported(lambda: _resumed(arguments))


def _resumed(arguments: argparse.Namespace) -> Answer:
    from memfit.cli.launch import handed_on
    from memfit.train import progress
    from memfit.train.run import resume

    plan = None if arguments.plan is None else handed_on(arguments.plan)
    display = progress.display()
    try:
        result = resume(arguments.out, display, settings_of(arguments), plan)
    finally:
        display.close()
    if result.rank:
        return Answer({}, "")  # rank 0 answers
    return answer("resume", result)


def answer(verb: str, result: Result) -> Answer:
    """The answer for a finished or stopped run."""
    outcome = result.outcome
    predicted = result.plan.prediction.peak_bytes
    data: dict[str, Any] = {
        "verb": verb,
        "status": "done" if outcome.signal is None else "interrupted",
        "fits": True,
        "step": outcome.step,
        "total_steps": outcome.total_steps,
        "loss": outcome.loss,
        "validation_loss": outcome.validation_loss,
        "validation_accuracy": outcome.validation_accuracy,
        "best": None if outcome.best is None else asdict(outcome.best),
        "stopped_early": outcome.stopped_early,
        "budget_bytes": result.plan.budget_bytes,
        "predicted_peak_bytes": predicted,
        "peak_bytes": outcome.peak_bytes,
        "out": str(result.out),
        "snapshot": None if outcome.snapshot is None else str(outcome.snapshot),
        "model": None if result.model is None else str(result.model),
        "report": None if result.report is None else str(result.report),
    }
    if outcome.ranks:
        data["ranks"] = [
            {**asdict(measured), "predicted_waiting": predicted.waiting}
            for measured, predicted in zip(outcome.ranks, result.plan.prediction.ranks, strict=True)
        ]
    lines = [f"{outcome.step} of {outcome.total_steps} steps done"]
    if outcome.loss is not None:
        lines[0] += f", loss {outcome.loss:.4f}"
    if outcome.validation_loss is not None:
        lines[0] += f", validation loss {outcome.validation_loss:.4f}"
    if outcome.validation_accuracy is not None:
        lines[0] += f", accuracy {100 * outcome.validation_accuracy:.1f} %"
    if outcome.stopped_early is not None:
        lines.append(f"Stopped early: {outcome.stopped_early}")
    if outcome.best is not None:
        lines.append(f"Best: {outcome.best}" + ("; the model is that one" if outcome.signal is None else ""))
    if outcome.peak_bytes is not None:
        lines.append(
            f"Peak: {format_bytes(outcome.peak_bytes)} measured, {format_bytes(predicted)} predicted, "
            f"{format_bytes(result.plan.budget_bytes)} allowed"
        )
    if outcome.signal is not None:
        lines += [
            f"Snapshot: after step {outcome.step}, in {outcome.snapshot}",
            f"To go on: memfit resume {result.out}",
        ]
        status = (
            Status.INTERRUPTED if outcome.signal == Status.INTERRUPTED - _SIGNALLED else _SIGNALLED + outcome.signal
        )
        return Answer(data, "\n".join(lines), status)
    lines += [f"Model: {result.model}", f"Report: {result.report}"]
    return Answer(data, "\n".join(lines))
