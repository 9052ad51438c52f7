"""One run as it goes on, as server-sent events: its state, what happens to it, lines of its log, and what it prints.

The id of an event says how much of each has been sent ("events:log:output"), so a client that was cut off goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from memfit.service.own_folder import open_inside
from memfit.service.progress import LOG, parsed
from memfit.service.refusals import NotKnownError
from memfit.service.service import Service
from memfit.service.states import OVER
from memfit.service.tokens import Caller

_MOST: Final = 64 << 10  # bytes of each file sent at one time
_SECONDS: Final = 0.5
_PING_SECONDS: Final = 15.0
_ID: Final = re.compile(r"(\d{1,15}):(\d{1,15}):(\d{1,15})")


class RunStream:
    """What is new of one run since the last look.

    Args:
        service: that has it.
        caller: who looks.
        number: of the run.
        last: id of the last event that was received; "" from the beginning.

    Raises:
        NotKnownError: there is no such run, or they may not see it.
    """

    def __init__(self, service: Service, caller: Caller, number: int, last: str = "") -> None:
        self.service, self.caller, self.number = service, caller, number
        found = _ID.fullmatch(last)
        self._events, self._log, self._output = map(int, found.groups()) if found else (0, 0, 0)
        self._part = service.run(caller, number).part
        self._state: dict[str, Any] = {}

    def look(self) -> tuple[list[str], bool]:
        """Messages that are new, and whether nothing will come any more."""
        run = self.service.run(self.caller, self.number)
        if run.part != self._part:  # it prints into another file now
            self._part, self._output = run.part, 0
        told: list[str] = []
        for event in self.service.store.events(self.number, self._events):
            self._events = event.number
            told.append(self._message("event", asdict(event)))
        for line in self._lines(partial(open_inside, self.service.folder(run), LOG), "_log"):
            content = parsed(line)
            if content is not None:
                told.append(self._message("metrics", content))
        output = self.service.output(self.caller, self.number)
        lines = [line.decode("utf-8", "replace") for line in self._lines(partial(_opened, output), "_output")]
        if lines:
            told.append(self._message("output", {"part": run.part, "lines": lines}))
        state = self.service.described(run)
        if {**state, "expected_start": None, "expected_end": None} != self._state:
            self._state = {**state, "expected_start": None, "expected_end": None}
            told.append(self._message("run", state))
        return told, run.state in OVER and not lines

    def _lines(self, opened: Any, place: str) -> list[bytes]:
        """Whole lines of a file after what has been sent of it."""
        try:
            stream: IO[bytes] = opened()
        except (NotKnownError, OSError):
            return []
        with stream:
            if stream.seek(0, 2) < getattr(self, place):  # cut at a snapshot: what comes now comes again
                setattr(self, place, 0)
            stream.seek(getattr(self, place))
            content = stream.read(_MOST)
        whole, end, _ = content.rpartition(b"\n")
        if not end and len(content) < _MOST:
            return []
        setattr(self, place, getattr(self, place) + (len(whole) + 1 if end else len(content)))
        return (whole if end else content).split(b"\n")

    def _message(self, kind: str, content: Any) -> str:
        data = json.dumps(content)  # in one line, in ASCII
        return f"id: {self._events}:{self._log}:{self._output}\nevent: {kind}\ndata: {data}\n\n"


async def followed(stream: RunStream) -> AsyncIterator[str]:
    """Messages until the run is over, with a comment now and then so that nobody on the way takes the connection for dead."""
    silent = 0.0
    while True:
        told, over = await asyncio.to_thread(stream.look)
        for message in told:
            yield message
        if over and not told:
            yield "event: end\ndata: {}\n\n"
            return
        silent = 0.0 if told else silent + _SECONDS
        if silent >= _PING_SECONDS:
            silent = 0.0
            yield ": waiting\n\n"
        await asyncio.sleep(0.0 if over else _SECONDS)


def _opened(file: Path) -> IO[bytes]:
    return file.open("rb")
