"""`memfit train --nproc`: torchrun starts the same command in as many processes; what they answer comes back through files."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from memfit.cli.answer import Answer, Status, failure, read_config, settings_of
from memfit.errors import ConfigError
from memfit.values.plan import Plan

ANSWERS: Final = "MEMFIT_ANSWERS"  # names the folder in the environment of the processes that were started here
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launched(arguments: argparse.Namespace) -> Answer:
    """Plan here, where there is no process group, and train in ranks.

    Raises:
        ConfigError: there is no such number of processes.
        MemfitError: as for training on one device, as far as it is known before the ranks start.
    """
    if arguments.nproc < 2:
        raise ConfigError(f"--nproc {arguments.nproc}: several processes are at least 2; leave it out for one")
    with tempfile.TemporaryDirectory(prefix="memfit-ranks-") as folder:
        _plan(arguments).save(Path(folder, "plan.json"))
        status = _run(_command(arguments, folder), {**os.environ, ANSWERS: folder, **_threads(arguments.nproc)})
        return _answered(Path(folder), status)


def _plan(arguments: argparse.Namespace) -> Plan:
    config = read_config(arguments)
    from memfit.train import progress
    from memfit.train.run import plan_for_ranks

    given = None if arguments.plan is None else Plan.load(arguments.plan)
    display = progress.display()
    try:
        return plan_for_ranks(config, arguments.nproc, display, given)
    finally:
        display.close()


def _command(arguments: argparse.Namespace, folder: str) -> list[str]:
    """torchrun, on this machine alone, at a port that is free."""
    own = ["train", str(arguments.config), "--plan", str(Path(folder, "plan.json"))]
    own += [word for setting in settings_of(arguments) for word in ("--set", setting)]
    own += [name for name in ("--json", "--debug") if getattr(arguments, name[2:])]
    torchrun = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    number = ["--nproc-per-node", str(arguments.nproc)]
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, *number, "-m", "memfit", *own]


def _threads(ranks: int) -> dict[str, str]:
    """Ranks share the processor; torchrun would take one thread for each, and say so."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))}


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


def _answered(folder: Path, status: int) -> Answer:
    """What rank 0 has answered; where one failed, what the first one to fail said."""
    answers = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank.*")]
    failed = [each for each in answers if each["error"]]
    if failed:
        first = min(failed, key=lambda each: each["at"])
        print(f"memfit: {first['text']}", file=sys.stderr)
        return Answer(first["data"], "", first["status"])
    for each in answers:
        if each["data"]:
            return Answer(each["data"], each["text"], each["status"])
    text = f"a rank ended without an answer (torchrun's exit status is {status}): what it printed stands above"
    print(f"memfit: {text}", file=sys.stderr)
    return Answer({"error": "EngineError", "message": text}, "", Status.COULD_NOT_TELL)


def reported(run: Callable[[], Answer]) -> Answer:
    """An answer, left in a file where this process was started from here; else as it is."""
    folder = os.environ.get(ANSWERS)
    if folder is None:
        return run()
    file = Path(folder, f"rank.{os.environ['RANK']}")
    try:
        answer = run()
    except (Exception, KeyboardInterrupt) as error:
        _leave(file, failure(error), error=True)
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
