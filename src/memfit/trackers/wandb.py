"""Weights & Biases, offline: files below the run's folder, for `wandb sync`. Only WANDB_MODE=online sends them anywhere."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

from memfit.errors import InputError
from memfit.trackers.start import PROJECT, End, OpenRun, Start


class _WandB:
    def __init__(self, start: Start) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        if mode not in {"offline", "disabled", "dryrun"} and not wandb.login(prompt=False):
            # It would ask at the terminal, and a run in the background would wait for ever.
            raise InputError(
                f"WANDB_MODE is {mode!r} and Weights & Biases knows no key: run wandb login before, or unset WANDB_MODE"
            )
        known = start.known()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=start.name,
            notes=start.about or None,
            id=known or uuid.uuid4().hex[:8],
            resume="allow" if known else None,
            dir=str(start.folder),
            config=dict(start.settings),
            mode=mode,
            # It captures standard output otherwise, which belongs to memfit's answer.
            settings=wandb.Settings(silent=True, console="off"),
        )
        start.keep(self._run.id)
        self.look = f"wandb sync {start.folder}/wandb/offline-run-*-{self._run.id}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, end: End) -> None:
        self._run.finish(exit_code=int(end == "failed"))


def begin(start: Start) -> OpenRun:
    """A run in the project WANDB_PROJECT, or "memfit"."""
    return _WandB(start)
