"""Runs in other people's dashboards: TensorBoard, MLflow, Weights & Biases, trackio.

`log.jsonl` is always written and holds everything; a tracker is a copy of it where people compare runs. One file for each library, all behind `Tracker`,
which sees that none of them can end a training.
"""

from memfit.trackers.base import KINDS, Tracker, check, tracker

__all__ = ["KINDS", "Tracker", "check", "tracker"]
