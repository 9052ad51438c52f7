"""Saved tensors in files, by hooks of autograd: what PyTorch's tutorial on such hooks shows (pytorch.org, "Hooks for autograd saved tensors")."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memfit import batches
from memfit.storage.folders import offload_folder
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

NAME = "hooks that save to disk"
PACKAGE = INSTALL = None
NOTE = "Each saved tensor is a file of its own, written and read while computing waits; small ones stay."
SMALL_ELEMENTS = 1000  # the tutorial's


def obstacle(_subject: Subject) -> str | None:
    return None


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return [("everything", _arrange)]


class _File:
    """A tensor in a file, which goes with it."""

    def __init__(self, tensor: Tensor) -> None:
        with tempfile.NamedTemporaryFile(dir=offload_folder(), delete=False) as file:
            torch.save(tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor, file)
        self.path = Path(file.name)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def _pack(tensor: Tensor) -> Tensor | _File:
    # Parameters are there anyway; a file of each would only cost.
    return tensor if tensor.numel() < SMALL_ELEMENTS or tensor.is_leaf else _File(tensor)


def _unpack(packed: Tensor | _File) -> Tensor:
    return torch.load(packed.path) if isinstance(packed, _File) else packed


def _arrange(_subject: Subject, built: Built) -> Loss:
    def loss() -> Tensor:
        with saved_tensors_hooks(_pack, _unpack):
            return batches.loss_of(*built)

    return loss
