"""`log.jsonl`: what happened, a line at a time, readable while the run goes on.

A resumed run goes on in the same file; lines after the snapshot it starts from are taken out, for those steps are taken
again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from memfit.errors import SnapshotError
from memfit.values.report import GeneratedText, StepRecord

NAME: Final = "log.jsonl"


class Log:
    """The log of a run, open for more lines."""

    def __init__(self, out: Path, step: int, evaluated: int, generated: int = -1) -> None:
        """Keep the lines up to `step` and go on behind them; of evaluations, those up to the one after step `evaluated`, of generated texts likewise."""
        self._file = out / NAME
        last = {"validation_loss": evaluated, "generated": generated}
        kept = [line for line in read(out) if line["step"] <= next((last[key] for key in last if key in line), step)]
        waiting = self._file.with_name(f".{NAME}.partial")
        try:
            waiting.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            waiting.replace(self._file)
            self._stream = self._file.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def step(self, record: StepRecord, *, epoch: int, learning_rate: float, predicted_peak_bytes: int) -> None:
        """A line for an optimizer step."""
        line = {**asdict(record), "epoch": epoch, "lr": learning_rate}
        if record.peak_bytes is not None:
            line["predicted_peak_bytes"] = predicted_peak_bytes
        line = {key: value for key, value in line.items() if value is not None and value != () and value is not False}
        self._add({**line, "loss": record.loss if math.isfinite(record.loss) else None})

    def validation(self, step: int, loss: float, accuracy: float | None = None, *, best: bool = False) -> None:
        """A line for an evaluation; with the accuracy of a classifier, and whether it is the best so far."""
        line: dict[str, Any] = {} if accuracy is None else {"validation_accuracy": accuracy}
        if best:
            line["best"] = True
        self._add({"step": step, "validation_loss": loss if math.isfinite(loss) else None, **line})

    def generated(self, step: int, texts: Sequence[GeneratedText], peak_bytes: int | None = None) -> None:
        """A line for what the model has written, with the peak while it did, where that was metered."""
        peak = {} if peak_bytes is None else {"generating_peak_bytes": peak_bytes}
        self._add({"step": step, "generated": [{"prompt": t.prompt, "text": t.text} for t in texts], **peak})

    def _add(self, line: dict[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"cannot write {self._file}: {error.strerror or error}; free space, then `memfit resume {self._file.parent}`"
        )

    def sync(self) -> None:
        """See that the lines reach the disk, as the snapshot beside them has."""
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """No more lines."""
        # What could not be written is tried again here, and has been told of.
        with suppress(OSError):
            self._stream.close()


class SilentLog:
    """Writes nothing, for the ranks that do not."""

    def step(self, record: StepRecord, *, epoch: int, learning_rate: float, predicted_peak_bytes: int) -> None:
        """Nothing."""

    def validation(self, step: int, loss: float, accuracy: float | None = None, *, best: bool = False) -> None:
        """Nothing."""

    def generated(self, step: int, texts: Sequence[GeneratedText], peak_bytes: int | None = None) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is open."""


def read(out: Path) -> Iterator[dict[str, Any]]:
    """Lines of a run's log; a last line that was cut off by a crash is left out."""
    try:
        text = (out / NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            yield content


def records(out: Path) -> tuple[StepRecord, ...]:
    """The steps of a run's log."""
    return tuple(
        StepRecord(
            step=line["step"],
            loss=math.nan if line["loss"] is None else line["loss"],
            seconds=line["seconds"],
            micro_batches=line.get("micro_batches", 1),
            peak_bytes=line.get("peak_bytes"),
            recomputations=line.get("recomputations", 0),
            divergences=tuple(line.get("divergences", ())),
            skipped=line.get("skipped", False),
            begun_anew=tuple(line.get("begun_anew", ())),
            waiting=line.get("waiting"),
        )
        for line in read(out)
        if "loss" in line
    )


def peaks(out: Path, predicted_bytes: int) -> tuple[int, ...]:
    """Bytes that were measured in the steps of a run's log that were predicted to take so many; others ran under another plan, before the run was resumed."""
    return tuple(line["peak_bytes"] for line in read(out) if line.get("predicted_peak_bytes") == predicted_bytes)


def texts(out: Path) -> tuple[GeneratedText, ...]:
    """What the model has written, by a run's log."""
    return tuple(GeneratedText(line["step"], **each) for line in read(out) for each in line.get("generated", ()))
