"""What Ray runs on a machine for one attempt of a run that outlives whoever asked for it: it starts the attempt's guard there, and renews its lease.

The attempt's folder is one that all machines see, so output, snapshots and the end are where they are on one computer. Who asked speaks to this actor again and
again; each word renews the lease of the run, for some seconds from the moment at which the actor gave the answer *before*. So a word that was long on its
way makes no lease longer than whoever sent it counts on, and no clock is compared with another computer's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from memfit.runner import guard
from memfit.runner.node_watch import start_guard
from memfit.runner.runs import read_json

LEASE: Final = "lease"
"""Name of the file in an attempt's folder that says until when it may go on."""
SIGNALS: Final = {"ask": signal.SIGTERM, "kill": signal.SIGUSR1, "close": signal.SIGQUIT}
"""By which a guard is told to end its run, by the word for it."""
_RENEWALS: Final = 20  # in one lease, at most: each is a write into a shared folder
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def _end_process() -> None:
    os._exit(0)


class DetachedWatch:
    """An actor of Ray; each method returns at once. It leaves when nobody has spoken to it for so long that its run has ended.

    Args:
        folder: of the attempt, with its `spec.json`.
        inherits: whether the run gets the environment of this actor; else it gets what its request says, and which GPUs this machine has.
        leave: called once nobody has spoken to it for so long; by default it ends this process, and Ray frees what the actor has.
    """

    def __init__(self, folder: str, *, inherits: bool = False, leave: Callable[[], None] = _end_process) -> None:
        self._folder, self._inherits, self._gone = Path(folder), inherits, leave
        self._process: subprocess.Popen[bytes] | None = None
        self._renewed = -1e9
        self._spoken, self._seconds = guard.since_boot(), 3600.0
        threading.Thread(target=self._leave, daemon=True).start()

    def look(self, heard: float | None, seconds: float, stop: str = "") -> dict[str, Any]:
        """How the attempt stands. Once the other side has heard this actor, the run is begun if it has not been, and its lease is renewed.

        Args:
            heard: `clock` of the answer before; None for none.
            seconds: of a lease.
            stop: a word of `SIGNALS`, to end the run; "" to let it go on.

        Returns:
            `clock`, seconds since this machine has started; `over`, whether nothing of the attempt runs any more; `end`, what its guard left then.
        """
        self._spoken, self._seconds = guard.since_boot(), seconds
        claimed = read_json(self._folder / guard.CLAIM)
        if heard is not None:
            self._renew(heard, seconds)
            if claimed is None and self._process is None:
                self._process = start_guard(self._folder, self._environment())
        clock = guard.since_boot()
        over = self._is_over(claimed)
        if over:
            if read_json(self._folder / guard.END) is None:
                guard.end_left_behind(str(self._folder))
            return {"clock": clock, "over": True, "end": read_json(self._folder / guard.END)}
        if claimed is not None:
            with suppress(ProcessLookupError):
                if guard.halted(claimed["pid"]):
                    os.kill(claimed["pid"], signal.SIGCONT)
                if stop:
                    os.kill(claimed["pid"], SIGNALS[stop])
        return {"clock": clock, "over": False, "end": None}

    def _renew(self, heard: float, seconds: float) -> None:
        if heard - self._renewed < seconds / _RENEWALS:
            return
        with suppress(OSError):  # a lease that cannot be written is not renewed, and the run ends by it
            guard.write_lease(str(self._folder / LEASE), heard + seconds, heard + 1.5 * seconds)
            self._renewed = heard

    def _is_over(self, claimed: Mapping[str, Any] | None) -> bool:
        ended = self._process is not None and self._process.poll() is not None  # leaves no zombie
        if claimed is None:
            return ended and read_json(self._folder / guard.CLAIM) is None  # its guard could not begin
        return (guard.started(claimed["pid"]), guard.boot()) != (claimed["started"], claimed["boot"])

    def _environment(self) -> dict[str, str]:
        kept = None if self._inherits else {_VISIBLE}  # a machine of one GPU among several joins with that variable
        return {name: value for name, value in os.environ.items() if kept is None or name in kept}

    def _leave(self) -> None:
        while guard.since_boot() - self._spoken < 2.5 * self._seconds:
            time.sleep(min(1.0, self._seconds / 4))
        self._gone()


def problem(folder: str, word: str, answer: str, probe: Sequence[str], environment: Mapping[str, str]) -> str:
    """What keeps this machine from running what a computer that shares a folder with it would start; "" for nothing.

    Args:
        folder: that is to be shared.
        word: name and content of a file that is in it.
        answer: name of a file to leave there.
        probe: a command that is to end with 0, started as runs are.
        environment: of that command.
    """
    place = Path(folder)
    try:
        shared = (place / word).read_text(encoding="utf-8") == word
        if shared:
            (place / answer).touch()
    except OSError as error:
        return f"cannot use the folder {folder} ({error.strerror}): put it on a file system that all machines share, under one path and for one user"
    if not shared:
        return f"has another folder {folder}: put it on a file system that all machines share, under one path and for one user"
    try:
        tried = subprocess.run(  # noqa: S603 - as runs are started
            list(probe), env=dict(environment), capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot start {probe[0]} ({error}): install Python and memfit there as here"
    if tried.returncode:
        last = tried.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {tried.returncode}"]
        return f"cannot start runs ({last[0][:200]}): install Python and memfit there as here"
    return ""
