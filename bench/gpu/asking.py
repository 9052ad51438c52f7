"""Questions asked for a number of seconds each, so that all of them together stay within what one call may take, and a second call goes on."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.setting import Setting


class OutOfTime(BaseException):
    """A question has had its seconds; not an Exception, so that nothing on the way takes it for a failure of its own."""


@contextlib.contextmanager
def cut_after(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` in the block when it takes longer, again and again in case the first one comes where none can be raised."""

    def ring(_signal: int, _frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 2.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


Ask = Callable[[Setting], Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        seconds: that it gets when it is asked first.
        grace_seconds: for the row that it is at when its time is over.
    """

    ask: Ask
    seconds: float
    grace_seconds: float = 15.0


def state_of(path: Path) -> str:
    """One of "new", "cut" (asked, and to be asked again) and "done"."""
    if not path.exists():
        return "new"
    return "done" if '"done": true' in path.read_text() else "cut"


def turns(names: Iterable[str], out: Path) -> list[tuple[str, bool]]:
    """What is asked in this call, in order, and whether it was asked before: what never was first."""
    states = {name: state_of(out / f"{name}.jsonl") for name in names}
    return [(name, state == "cut") for state in ("new", "cut") for name, have in states.items() if have == state]


def answer(name: str, question: Question, setting: Setting, path: Path, seconds: float) -> None:
    """Ask one question for at most so many seconds; its rows are written as they come."""
    begin = time.perf_counter()
    with path.open("w") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        write({"bench": f"gpu/{name}", "machine": setting.about()})
        try:
            # Between two rows it can be cut and leaves nothing behind; in the middle of one it is only where that takes very long.
            with cut_after(seconds + question.grace_seconds), contextlib.closing(question.ask(setting)) as rows:
                for row in rows:
                    write(row)
                    print(name, json.dumps(row), flush=True)
                    if time.perf_counter() - begin > seconds:
                        raise OutOfTime
            write({"done": True, "seconds": time.perf_counter() - begin})
        except OutOfTime:
            write({"cut_after_seconds": seconds})
            print(f"{name}: cut after {time.perf_counter() - begin:.0f} s", flush=True)
        except Exception as error:  # noqa: BLE001 - one question that fails must not take the others along
            write({"failed": f"{type(error).__name__}: {error}"[:2000]})
            print(f"{name}: {''.join(traceback.format_exception(error))[-6000:]}", flush=True)
