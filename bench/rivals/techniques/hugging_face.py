"""Hugging Face's activation checkpointing (`gradient_checkpointing_enable` until v6): all layers, or every second or third, recomputed."""

from __future__ import annotations

from memfit import batches
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

NAME = "HF activation checkpointing"
PACKAGE, INSTALL = "transformers", "transformers"
NOTE = "Formerly `gradient_checkpointing_enable`. Its `offload` moves what it keeps to the host, which is where a model on the CPU has it."


def obstacle(subject: Subject) -> str | None:
    return None if subject.hugging_face else "not a Hugging Face model"


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return [("all layers", _every(1)), ("every second layer", _every(2)), ("every third layer", _every(3))]


def _every(number: int) -> Arrange:
    def arrange(_subject: Subject, built: Built) -> Loss:
        built[0].activation_checkpointing_enable(every_n_layers=number)
        return lambda: batches.loss_of(*built)

    return arrange
