"""`memfit train --nproc`: torchrun starts the same command in as many processes; what they answer comes back through files.

A rank that ends without an answer (killed, or taken for lost by the others, which have waited for it) ends the run; where restarts are left, it goes on from
its last snapshot.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from memfit.cli.answer import Answer, Status, failure, read_config, settings_of
from memfit.errors import ConfigError, MemfitError
from memfit.hardware.cores import cores
from memfit.runner.cores import THREADS
from memfit.units import format_bytes
from memfit.values.plan import Plan

ANSWERS: Final = "MEMFIT_ANSWERS"  # names the folder in the environment of the processes that were started here
TRACES: Final = "traces.json.gz"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launched(arguments: argparse.Namespace) -> Answer:
    """Plan here, where there is no process group, and train in ranks; again where one was lost and restarts are left.

    Args:
        arguments: of `memfit train`, or of `memfit resume`, which goes on in the folder `out`.

    Raises:
        ConfigError: there is no such number of processes.
        MemfitError: as for training on one device, as far as it is known before the ranks start.
    """
    least, number = _numbers(arguments.nproc)
    begun = getattr(arguments, "out", None)  # the folder to go on in; None to start from the beginning
    given = None if arguments.plan is None else Plan.load(arguments.plan)
    for restarts_left in range(arguments.restarts, -1, -1):
        with tempfile.TemporaryDirectory(prefix="memfit-ranks-") as folder:
            plan, out = _plan(arguments, number, begun, given)
            _hand_on(plan, Path(folder, "plan.json"))
            command = _command(arguments, folder, number, begun)
            status = _run(command, {**os.environ, ANSWERS: folder, **_threads(number)})
            answers = _answers(Path(folder))
            lost = sorted(set(range(number)) - answers.keys()) if status else []
            if not lost or not restarts_left or _interrupted(status):
                return _answered(answers, lost, status)
        if begun is not None or (out / "config.json").is_file():
            begun, given = out, None  # the run's own plan from here on, or another where the number of ranks changes
        number = max(least, number - len(lost))
        print(
            f"memfit: {_lost(lost)}; going on with {number} ranks from the last snapshot in {out}, {restarts_left - 1} more restarts are left",
            file=sys.stderr,
        )
    raise AssertionError("the last round has answered")


def _numbers(named: str) -> tuple[int, int]:
    """The fewest and the most processes."""
    least, _, most = named.rpartition(":")
    if not most.isdecimal() or not (least or most).isdecimal() or not 2 <= int(least or most) <= int(most):
        raise ConfigError(
            f'--nproc {named}: give a number of processes from 2 on, or the fewest and the most, as "2:4"; leave it out for one'
        )
    return int(least or most), int(most)


def _plan(arguments: argparse.Namespace, number: int, begun: Path | None, given: Plan | None) -> tuple[Plan, Path]:
    """The plan, and the run's folder."""
    config = read_config(arguments) if begun is None else None
    from memfit.train import progress
    from memfit.train.run import plan_for_ranks, plan_to_resume

    with closing(progress.display()) as display:
        if config is not None:
            return plan_for_ranks(config, number, display, given), config.out
        assert begun is not None
        return given or plan_to_resume(begun, number, display, settings_of(arguments)), begun


def _hand_on(plan: Plan, file: Path) -> None:
    """Leave a plan for the ranks, and what it was made of, where that is known: they may have to plan again for less, and cannot capture."""
    from memfit.planning import planning_of

    plan.save(file)
    planning = planning_of(plan)
    if planning is not None:  # of stages there is no bundle
        planning.bundle.save(file.with_name(TRACES))


def handed_on(file: Path) -> Plan:
    """A plan to follow; on the first rank with what it was made of, where the process that has started it has left that beside the plan."""
    plan, traces = Plan.load(file), file.with_name(TRACES)
    if os.environ.get(ANSWERS) != str(file.parent) or os.environ.get("RANK") != "0" or not traces.is_file():
        return plan
    from memfit.planning import Planning, remember
    from memfit.values.bundle import TraceBundle

    return remember(plan, Planning(TraceBundle.load(traces)))


def _command(arguments: argparse.Namespace, folder: str, number: int, begun: Path | None) -> list[str]:
    """torchrun, on this machine alone, at a port that is free."""
    own = ["train", str(arguments.config)] if begun is None else ["resume", str(begun)]
    own += ["--plan", str(Path(folder, "plan.json"))]
    own += [word for setting in settings_of(arguments) for word in ("--set", setting)]
    own += [name for name in ("--json", "--debug") if getattr(arguments, name[2:])]
    torchrun = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", str(number)]
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "memfit", *own]


def _threads(ranks: int) -> dict[str, str]:
    """Ranks share the processor; torchrun would take one thread for each, and say so."""
    return {THREADS: os.environ.get(THREADS) or str(max(1, cores() // ranks))}


def _run(command: list[str], environment: dict[str, str]) -> int:
    # In a session of its own a Ctrl-C reaches the ranks once: through torchrun, which is told here.
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno(), start_new_session=True)  # noqa: S603 - our own command
    with _passed_on(process):
        return process.wait()


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def on_signal(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {each: signal.signal(each, on_signal) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    """By rank."""
    return {int(file.suffix[1:]): json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank.*")}


def _interrupted(status: int) -> bool:
    """Whether torchrun itself was told to stop."""
    return status < 0 or status in {128 + number for number in _SIGNALS}


def _lost(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {names} ended without an answer (killed, out of memory, or hung until the others gave up)"


def _answered(answers: Mapping[int, dict[str, Any]], lost: Sequence[int], status: int) -> Answer:
    """What rank 0 has answered; where one was lost, which; where one failed, what the first one to fail said."""
    failed = {rank: each for rank, each in answers.items() if each["error"]}
    if lost and len(failed) == len(answers):
        text = f"{_lost(lost)}, so all were stopped. To go on from the last snapshot: memfit resume, or --restarts N from the beginning"
        print(f"memfit: {text}", file=sys.stderr)
        return Answer({"error": "EngineError", "message": text, "lost_ranks": list(lost)}, "", Status.COULD_NOT_TELL)
    if failed:
        rank, first = min(failed.items(), key=lambda each: each[1]["at"])
        text, together = first["text"], {each["text"] for each in answers.values()} == {first["text"]}
        told = text if together or f"rank {rank}" in text else f"rank {rank}: {text}"
        print(f"memfit: {told}", file=sys.stderr)
        return Answer({**first["data"], "message": told}, "", first["status"])
    for each in answers.values():
        if each["data"]:
            return Answer(each["data"], each["text"], each["status"])
    text = f"a rank ended without an answer (torchrun's exit status is {status}): what it printed stands above"
    print(f"memfit: {text}", file=sys.stderr)
    return Answer({"error": "EngineError", "message": text}, "", Status.COULD_NOT_TELL)


def _failure(error: BaseException) -> Answer:
    """As a command alone says it; what an allocator has refused in a sentence, since the others end with errors of their own right after it."""
    found = failure(error)
    if isinstance(error, MemfitError):
        return found
    from memfit.oom.messages import find

    refused = find(found.text)
    if refused is None or refused.kind != "allocation":
        return found
    wanted = "" if refused.wanted_bytes is None else f" ({format_bytes(refused.wanted_bytes)} more were refused)"
    text = (
        f"out of memory{wanted}, so all were stopped. Something else takes memory beside the step, or the budget is more than there is: give a smaller one "
        "(--budget), or fewer ranks to a computer, and go on from the last snapshot with memfit resume"
    )
    return replace(found, data={**found.data, "message": text}, text=text)


def reported(run: Callable[[], Answer]) -> Answer:
    """An answer, left in a file where this process was started from here; else as it is."""
    folder = os.environ.get(ANSWERS)
    if folder is None:
        return run()
    file = Path(folder, f"rank.{os.environ['RANK']}")
    try:
        answer = run()
    except (Exception, KeyboardInterrupt) as error:
        _leave(file, _failure(error), error=True)
        raise
    _leave(file, answer, error=False)
    # torchrun takes any other status for a failure.
    return Answer({}, "")


def _leave(file: Path, answer: Answer, *, error: bool) -> None:
    import time

    waiting = file.with_name(f".{file.name}")
    told = {"data": dict(answer.data), "text": answer.text, "status": int(answer.status)}
    waiting.write_text(json.dumps({**told, "error": error, "at": time.time()}), encoding="utf-8")
    waiting.replace(file)
