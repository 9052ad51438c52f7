"""torch-kitsune: parameters and optimizer counted, activations from a symbolic trace or from formulas, 15 percent on top."""

from __future__ import annotations

import torch
from predict.estimators import NotEstimated
from rivals.subjects import Subject

NAME = "torch-kitsune"
PACKAGE, INSTALL = "kitsune", "torch-kitsune==0.7.0"
NOTE = "Asked for the shape of one input of floats; Hugging Face models by their name on the Hub only."
COVERS = "weights, gradients, optimizer, activations, 15 % more"

_NAMES = {"SGD": "sgd", "AdamW, foreach": "adamw", "AdamW, fused": "adamw"}


def estimate(subject: Subject, optimizer: str) -> int:
    from kitsune.predict import predict_memory

    if optimizer not in _NAMES:
        raise NotEstimated("no such optimizer")
    model, sample, _ = subject.build()
    first = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or isinstance(sample, dict):
        raise NotEstimated("models of one input of floats only")
    found = predict_memory(
        model, input_shape=tuple(first.shape[1:]), batch_size=first.shape[0], optimizer=_NAMES[optimizer]
    )
    return int(found.total_bytes)
