"""trackio: a database on this computer, in trackio's own folder (TRACKIO_DIR), where `trackio show` looks."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping
from contextlib import redirect_stdout

from memfit.trackers.start import PROJECT, End, OpenRun, Start, flat


class _Trackio:
    def __init__(self, start: Start) -> None:
        import trackio

        known = start.known()
        # All folders share one database, and trackio finds a run by its name: "out" would be many.
        name = known or f"{start.name}-{uuid.uuid4().hex[:8]}"
        with redirect_stdout(io.StringIO()):  # it greets there, where memfit's answer goes
            self._run = trackio.init(
                PROJECT,
                name=name,
                resume="allow" if known else "never",
                config=dict(flat(start.settings)),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        start.keep(name)
        self.look = f"trackio show --project {PROJECT}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, end: End) -> None:  # noqa: ARG002 - trackio does not show how it ended
        from trackio import context_vars

        with redirect_stdout(io.StringIO()):
            self._run.finish()
        if (
            context_vars.current_run.get() is self._run
        ):  # else it is finished once more when the process ends, and says so
            context_vars.current_run.set(None)


def begin(start: Start) -> OpenRun:
    """A run in the project "memfit"."""
    return _Trackio(start)
