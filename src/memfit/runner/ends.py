"""How a run ended. Out of memory has many faces: a CPU's is a plain RuntimeError of torch, the kernel's is a SIGKILL without a word."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from memfit.oom.messages import find

EndKind = Literal["done", "failed", "out_of_memory", "killed", "stopped", "lost"]

_FULL: Final = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
_TAIL: Final = 64 << 10  # bytes of output in which an error is looked for
_STOPPED: Final = {"time": "its time was over", "silence": "no sign of life"}  # in words, by reason
_NEVER_BEGUN: Final = "could not be started"
_RANK: Final = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) \(pid: \d+\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank of a run that torchrun has started ended.

    Attributes:
        rank: of it.
        status: exit status; None where a signal ended it.
        signal: number of the signal that ended it; None for none.
    """

    rank: int
    status: int | None = None
    signal: int | None = None

    @property
    def text(self) -> str:
        """In words."""
        how = f"exit status {self.status}" if self.signal is None else f"killed by {_named(self.signal)}"
        return f"rank {self.rank}: {how}"


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended.

    Attributes:
        kind: "done" (exit status 0), "failed" (another one), "out_of_memory", "killed" (by a signal that the runner did not send), "stopped" (by the runner:
            asked to, or at a limit), "lost" (nobody knows: the process that watched it is gone, too).
        status: exit status; None where a signal ended it, or nobody knows.
        signal: number of the signal that ended it; None for none.
        reason: why it was stopped ("asked", "time", "silence", "runner died", "runner closed", "lease"), what is known of another end, or "".
        forced: whether it ignored the end signal and was killed after the grace.
        seconds: from start to end.
        resident_bytes: largest resident set of its process.
        tail: the last line of its error output.
        attempts: how often it was started.
        ranks: those of a run of several ranks that failed first, as torchrun has told it; the others were ended for their sake.
        disk_full: whether the disk of its output or of its folder had no space when it ended, or its error output says so.
    """

    kind: EndKind
    status: int | None = None
    signal: int | None = None
    reason: str = ""
    forced: bool = False
    seconds: float = 0.0
    resident_bytes: int = 0
    tail: str = ""
    attempts: int = 1
    ranks: tuple[RankEnd, ...] = ()
    disk_full: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> End:
        """Inverse of `to_json`."""
        return cls(**{**data, "ranks": tuple(RankEnd(**each) for each in data.get("ranks", ()))})

    @property
    def text(self) -> str:
        """In words."""
        ranks = f" ({', '.join(each.text for each in self.ranks)})" if self.ranks else ""
        match self.kind:
            case "done":
                return "done"
            case "failed":
                status = self.reason or f"exit status {self.status}" + (", the disk was full" if self.disk_full else "")
                return f"failed ({status}){ranks}" + (f": {self.tail}" if self.tail else "")
            case "out_of_memory":
                return f"out of memory: {self.reason}{ranks}"
            case "killed":
                return f"killed{ranks}" if ranks else f"killed by {_named(self.signal)}"
            case "stopped":
                return f"stopped ({_STOPPED.get(self.reason, self.reason)})" + (
                    ", by force: it ignored its end signal" if self.forced else ""
                )
            case "lost":
                return f"lost: {self.reason}"


def _named(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def classified(left: Mapping[str, Any], output: Path, attempts: int) -> End:
    """The end that a guard has written down.

    Args:
        left: what it wrote.
        output: the file with the run's error output.
        attempts: so many, this one included.
    """
    text = tail_of(output)
    status, number = left.get("status"), left.get("signal")
    facts: dict[str, Any] = {
        "status": status,
        "signal": number,
        "forced": bool(left.get("forced")),
        "seconds": float(left.get("seconds", 0.0)),
        "resident_bytes": int(left.get("resident_bytes", 0)),
        "tail": next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300],
        "attempts": attempts,
        "ranks": rank_ends(text),
        "disk_full": bool(left.get("disk_full")) or any(words in text for words in _FULL),
    }
    if left.get("error"):
        return End("failed", reason=f"{_NEVER_BEGUN}: {left['error']}", attempts=attempts, disk_full=facts["disk_full"])
    if left.get("reason"):
        return End("stopped", reason=left["reason"], **facts)
    if status == 0:
        return End("done", **facts)
    if number == signal.SIGKILL and left.get("oom_kills"):
        return End("out_of_memory", reason="the kernel killed the process when memory ran out", **facts)
    found = find(text)
    if found is not None and found.kind != "killed":
        return End("out_of_memory", reason=found.evidence[:300], **facts)
    if last := _python_memory_error(text):
        return End("out_of_memory", reason=last[:300], **facts)
    of_ranks = [each.signal for each in facts["ranks"] if each.signal is not None]
    if number is not None or of_ranks:
        if left.get("oom_kills") and signal.SIGKILL in of_ranks:
            return End("out_of_memory", reason="the kernel killed a rank when memory ran out", **facts)
        return End("killed", **{**facts, "signal": number or of_ranks[0]})
    return End("failed", **facts)


def rank_ends(text: str) -> tuple[RankEnd, ...]:
    """The ranks that failed, from the report that torchrun prints; none where there is no report.

    Source: the report's form in torch/distributed/elastic/multiprocessing/errors (`ChildFailedError`): a negative exit code is a signal's number.
    """
    found = {int(rank): int(code) for rank, code in _RANK.findall(text)}
    first = {rank: code for rank, code in found.items() if code != -signal.SIGTERM}  # by which torchrun ends the others
    return tuple(
        RankEnd(rank, signal=-code) if code < 0 else RankEnd(rank, status=code)
        for rank, code in sorted((first or found).items())
    )


def _python_memory_error(text: str) -> str:
    """The line by which Python or C++ says that it got no memory; these name no numbers, so `memfit doctor` has no pattern for them."""
    for line in reversed(text.splitlines()):
        if line.startswith(("MemoryError", "numpy._core._exceptions._ArrayMemoryError")) or "std::bad_alloc" in line:
            return line.strip()
    return ""


def tail_of(file: Path) -> str:
    """The last of a file's text; "" where it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
