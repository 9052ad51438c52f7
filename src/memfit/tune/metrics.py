"""What a trial reports while it runs: numbers by name and step, from a run's log or from whatever a command prints or writes.

A line is JSON ({"step": 3, "accuracy": 0.9}) or holds pairs such as `accuracy=0.9` or `accuracy: 0.9`; what is neither is left alone.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from memfit.errors import InputError

_NUMBER: Final = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"
_PAIR: Final = re.compile(rf"(?<![\w.])([A-Za-z_][\w./-]*)\s*[=:]\s*({_NUMBER}|\"[^\"]*\"|[^\s,;]+)")
_STEPS: Final = ("step", "epoch", "global_step")


@dataclass
class Metrics:
    """What a trial has reported so far.

    Attributes:
        values: by metric, (step, value) in the order in which they came.
        texts: metrics whose value is no number, with it.
    """

    values: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """What a line reports."""
        line = line.strip()
        if line.startswith("{"):
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            if isinstance(content, Mapping):
                self._take(content)
                return
        pairs: dict[str, Any] = {}
        for name, text in _PAIR.findall(line):
            try:
                pairs[name] = float(text)
            except ValueError:
                pairs[name] = text.strip('"')
        self._take(pairs)

    def _take(self, content: Mapping[str, Any]) -> None:
        step = next((int(content[name]) for name in _STEPS if _finite(content.get(name))), None)
        for name, value in content.items():
            if name in _STEPS or isinstance(value, (bool, Mapping, list)):
                continue
            if value is None:  # what JSON says for a NaN
                value = math.nan  # noqa: PLW2901
            if isinstance(value, str):
                self.texts[str(name)] = value
                continue
            series = self.values.setdefault(str(name), [])
            at = len(series) if step is None else step
            if series and series[-1][0] == at:
                series[-1] = (at, float(value))
            else:
                series.append((at, float(value)))

    def last(self, name: str) -> float | None:
        """The last value of a metric; None where it was not reported."""
        series = self.values.get(name)
        return series[-1][1] if series else None


def _open(file: Path) -> IO[bytes]:
    return file.open("rb")


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class MetricsFile:
    """A file of lines that grows; what a run that starts again takes back (a log cut at its snapshot) is forgotten."""

    def __init__(self, file: Path, opened: Callable[[], IO[bytes]] | None = None, most: int = 1 << 30) -> None:
        """Of a file; opened in another way, and no more than so many bytes of it read, where whoever writes it is not trusted."""
        self.file = file
        self._opened = partial(_open, file) if opened is None else opened
        self._most = most
        self._seen: tuple[int, int, int] | None = None
        self._metrics = Metrics()

    def read(self) -> Metrics:
        """All that is in the file by now; a last line without its end waits."""
        try:
            with self._opened() as stream:
                about = os.fstat(stream.fileno())
                state = (about.st_ino, about.st_size, about.st_mtime_ns)
                if state == self._seen:
                    return self._metrics
                text = stream.read(self._most).decode("utf-8", "replace")
        except (OSError, InputError):
            return self._metrics
        metrics = Metrics()
        for line in text.split("\n")[:-1]:
            metrics.add(line)
        self._seen, self._metrics = state, metrics
        return metrics

    def finished(self) -> Metrics:
        """The same once nothing more will come: the last line counts, whole or not."""
        metrics = self.read()
        try:
            with self._opened() as stream:
                text = stream.read(self._most).decode("utf-8", "replace")
        except (OSError, InputError):
            return metrics
        if text and not text.endswith("\n"):
            metrics.add(text.rpartition("\n")[2])
        return metrics
