"""How far a run has come, read from its `log.jsonl` as that grows."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memfit.service.own_folder import open_inside
from memfit.service.refusals import NotKnownError

LOG: Final = "out/log.jsonl"
_MOST: Final = 8 << 20  # bytes read at one time


@dataclass(slots=True)
class Progress:
    """What a log says.

    Attributes:
        step: the last one that was logged.
        loss: of it; None where it is no number.
        step_seconds: mean of those logged; None before the first.
        peak_bytes: largest of the metered steps; None before the first.
    """

    step: int = 0
    loss: float | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None


class LogFollower:
    """Reads what is new in the log of one run; one that was cut at a snapshot is read anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = Progress()
        self._node, self._offset = -1, 0
        self._seconds, self._steps = 0.0, 0

    def look(self) -> Progress:
        """Progress as of now."""
        try:
            stream = open_inside(self.folder, LOG)
        except (NotKnownError, OSError):
            return self.progress
        with stream:
            about = os.fstat(stream.fileno())
            if about.st_ino != self._node or about.st_size < self._offset:
                self._node, self._offset = about.st_ino, 0
                peak = self.progress.peak_bytes  # of a step that was really taken
                self.progress, self._seconds, self._steps = Progress(peak_bytes=peak), 0.0, 0
            stream.seek(self._offset)
            whole, _, _ = stream.read(_MOST).rpartition(b"\n")
        if whole:
            self._offset += len(whole) + 1
            for line in whole.split(b"\n"):
                self._take(line)
        return self.progress

    def _take(self, line: bytes) -> None:
        content = parsed(line)
        if content is None:
            return
        self.progress.step = max(self.progress.step, content["step"])
        if "loss" in content:
            self.progress.loss = _number(content["loss"])
        seconds, peak = _number(content.get("seconds")), content.get("peak_bytes")
        if seconds is not None:
            self._seconds, self._steps = self._seconds + seconds, self._steps + 1
            self.progress.step_seconds = self._seconds / self._steps
        if peak is not None and _counts(peak):
            self.progress.peak_bytes = max(self.progress.peak_bytes or 0, peak)


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line of a log; None for what is none, which a run may write as well."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and _counts(content.get("step")) else None


def _counts(value: Any) -> bool:
    """Whether it is a number that something can be counted in, of steps or of bytes."""
    return type(value) is int and 0 <= value < 2**62


def _number(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and abs(value) <= sys.float_info.max else None
