"""TensorBoard: event files below the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from memfit.trackers.start import End, OpenRun, Start

_FLUSH_SECONDS: Final = 10  # a run that is killed loses as much of its curves


class _TensorBoard:
    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was written of steps that are taken again is not shown.
        self._writer = SummaryWriter(str(start.folder), purge_step=start.step + 1, flush_secs=_FLUSH_SECONDS)
        self.look = f"tensorboard --logdir {start.folder}"
        text = json.dumps(start.settings, indent=1, default=str)
        self._text("settings", text, start.step)
        if start.about:
            self._text("plan", start.about, start.step)

    def _text(self, name: str, text: str, step: int) -> None:
        """As it stands: indented, Markdown leaves it alone."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, end: End) -> None:  # noqa: ARG002 - event files do not say how it ended
        self._writer.close()


def begin(start: Start) -> OpenRun:
    """An event file of its own for each time the run goes on; TensorBoard reads them as one run."""
    return _TensorBoard(start)
