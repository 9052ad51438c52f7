"""What Ray runs on a machine for one run: it starts the run's guard there, and hands on what the run prints and how it ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from memfit.runner import guard
from memfit.runner.cores import THREADS

_MOST: Final = 4 << 20  # bytes of output handed on at a time


def start_guard(folder: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the guard of an attempt.

    Args:
        folder: of the attempt, with its `spec.json`.
        environment: of the run, before what its request adds; None for that of this process.
    """
    # Inherited: the guard must not die of a signal that comes early.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, guard.SIGNALS)
    try:
        return subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", guard.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the runner alone
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class NodeWatch:
    """An actor of Ray; each method returns at once."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="memfit-run-"))
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, spec: dict[str, Any], python: str, threads: str | None) -> str:
        """Start the run.

        Args:
            spec: as a guard reads it.
            python: the interpreter where the run was asked for; a command that begins with it gets this machine's.
            threads: OMP_NUM_THREADS where the run was asked for; Ray's own value would leave a run one thread.

        Returns:
            The first eight letters of the machine's id.
        """
        import ray

        command = [sys.executable if word == python else word for word in spec["command"][:1]] + spec["command"][1:]
        told = {**spec, "command": command, "runner": os.getpid(), "outlives_runner": False}
        (self._folder / guard.SPEC).write_text(json.dumps(told), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != THREADS}
        if threads is not None:
            environment[THREADS] = threads
        self._process = start_guard(self._folder, environment)
        return str(ray.get_runtime_context().get_node_id())[:8]

    def look(self, out: int, err: int) -> dict[str, Any]:
        """How it stands, and what it has printed after so many bytes."""
        assert self._process is not None
        over = self._process.poll() is not None
        output = (self._after("stdout", out), self._after("stderr", err))
        end = None
        if over:
            with suppress(OSError, ValueError):
                end = json.loads((self._folder / guard.END).read_text(encoding="utf-8"))
            if not any(output):  # and so nobody asks again
                shutil.rmtree(self._folder, ignore_errors=True)
        return {"over": over, "end": end, "output": output}

    def stop(self, *, at_once: bool) -> None:
        """End it, as the runner of one machine does."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1 if at_once else signal.SIGTERM)

    def _after(self, name: str, size: int) -> bytes:
        try:
            with (self._folder / name).open("rb") as stream:
                stream.seek(size)
                return stream.read(_MOST)
        except OSError:
            return b""
