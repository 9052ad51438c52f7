"""`accelerate estimate-memory`: its formula, applied to the model at hand, as the command takes names on the Hub only."""

from __future__ import annotations

from predict.estimators import NotEstimated
from rivals.subjects import Subject

NAME = "accelerate estimate-memory"
PACKAGE, INSTALL = "accelerate", "accelerate==1.15.0"
NOTE = "Four times the weights."
COVERS = "weights, gradients, Adam's state; no activations"


def estimate(subject: Subject, optimizer: str) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if not optimizer.startswith("AdamW"):
        raise NotEstimated("Adam only")
    total, _ = calculate_maximum_sizes(subject.build()[0])
    return int(max(estimate_training_usage(total, "float32").values()))
