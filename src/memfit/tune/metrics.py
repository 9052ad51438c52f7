"""What a trial reports while it runs: numbers by name and step, from a run's log or from whatever a command prints or writes.

A line is JSON ({"step": 3, "accuracy": 0.9}) or holds pairs such as `accuracy=0.9`, `accuracy: 0.9` or `'accuracy': '0.9'`, as transformers' Trainer prints
them; what is neither is left alone.
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
_PAIR: Final = re.compile(rf"(?<![\w.])([^\W\d][\w./-]*)['\"]?\s*[=:]\s*({_NUMBER}|'{_NUMBER}'|\"[^\"]*\"|[^\s,;]+)")
_REMEMBERED: Final = 1 << 12  # bytes before what is new, by which a file that was written anew is told
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
                content = json.loads(line, parse_int=float)  # of any size
            except ValueError:
                content = None
            if isinstance(content, Mapping):
                self._take(content)
                return
        pairs: dict[str, Any] = {}
        for name, text in _PAIR.findall(line):
            try:
                pairs[name] = float(text.strip("'"))
            except ValueError:
                pairs[name] = text.strip("\"'")
        self._take(pairs)

    def _take(self, content: Mapping[str, Any]) -> None:
        step = next((int(content[name]) for name in _STEPS if _counts(content.get(name))), None)
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


def _counts(value: Any) -> bool:
    """Whether it is a step as a study takes it: an epoch of -1, before training, is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**31


class MetricsFile:
    """A file of lines that grows; what a run that starts again takes back (a log cut at its snapshot) is forgotten."""

    def __init__(self, file: Path, opened: Callable[[], IO[bytes]] | None = None, most: int = 1 << 30) -> None:
        """Of a file; opened in another way, and no more than so many bytes of it read, where whoever writes it is not trusted."""
        self.file = file
        self._opened = partial(_open, file) if opened is None else opened
        self._most = most
        self._node, self._offset, self._before = -1, 0, b""  # what has been read: of which file, how much, and its end
        self._metrics = Metrics()

    def read(self) -> Metrics:
        """All that is in the file by now; a last line without its end waits."""
        self._rest()
        return self._metrics

    def finished(self) -> Metrics:
        """The same once nothing more will come: the last line counts, whole or not."""
        rest = self._rest()
        self._metrics.add(rest.decode("utf-8", "replace"))
        return self._metrics

    def _rest(self) -> bytes:
        """Take the lines that are new, and return what comes after the last of them."""
        try:
            with self._opened() as stream:
                node = os.fstat(stream.fileno()).st_ino
                stream.seek(self._offset - len(self._before))
                if node != self._node or stream.read(len(self._before)) != self._before:
                    self._node, self._offset, self._before, self._metrics = node, 0, b"", Metrics()
                    stream.seek(0)
                whole, end, rest = stream.read(self._most - self._offset).rpartition(b"\n")
        except (OSError, InputError):
            return b""
        if end:
            self._offset += len(whole) + 1
            self._before = (self._before + whole + end)[-_REMEMBERED:]
            for line in whole.decode("utf-8", "replace").split("\n"):
                self._metrics.add(line)
        return rest
