"""Which part of a training step a stack belongs to, and which of its lines is the user's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath, PureWindowsPath
from typing import NamedTuple


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    name: str

    @property
    def path(self) -> str:
        """The file with forward slashes, wherever it was written."""
        return self.file.replace("\\", "/")

    def __str__(self) -> str:
        name = PureWindowsPath(self.file).name if "\\" in self.file else PurePath(self.file).name
        return f"{name}:{self.line} in {self.name}"


# Installed packages, Python itself, and frames of C++ (which have no Python file).
_LIBRARIES = re.compile(r"(/site-packages/|/dist-packages/|/lib/python\d|^<|\.(cpp|cc|cu|h|c)$|^\?\?$|^$)|/torch/csrc/")
_BACKWARD = re.compile(r"torch/autograd/(graph|__init__|function)\.py$|torch/_tensor\.py$")
_BACKWARD_NAMES = ("backward", "_engine_run_backward", "grad")
_OPTIMIZER = re.compile(r"torch/optim/(?!lr_scheduler|swa_utils)\w+\.py$|bitsandbytes/optim/\w+\.py$")
_MOVING = frozenset({"_apply", "to", "cuda", "half", "bfloat16", "float", "load_state_dict", "convert"})


def stage(frames: Sequence[Frame]) -> str:
    """The part of the step that a stack ran in; "" when nothing says.

    Args:
        frames: the innermost first.
    """
    module = checkpointed = False
    for frame in frames:
        path = frame.path
        if (
            "torch::autograd::Engine" in frame.name
        ):  # C++ frames: backward has a thread of its own, without Python frames
            return "recomputing in backward" if module or checkpointed else "backward"
        if frame.name == "pin_memory" or path.endswith("torch/utils/data/_utils/pin_memory.py"):
            return "pinning memory"
        if _BACKWARD.search(path) and frame.name in _BACKWARD_NAMES:
            return "recomputing in backward" if module or checkpointed else "backward"
        if path.endswith("torch/utils/checkpoint.py"):
            # What checkpointing runs again it runs below an unpack hook; the first time it stands in forward.
            checkpointed = checkpointed or frame.name in {"unpack_hook", "recompute_fn"}
        if _OPTIMIZER.search(path) and not module:  # an optimizer that calls a closure has a forward inside
            return "optimizer"
        if path.endswith("torch/nn/modules/module.py"):
            if frame.name in _MOVING:
                return "moving the model"
            module = module or frame.name in {"_call_impl", "_wrapped_call_impl", "__call__"}
        if path.endswith("torch/nn/functional.py"):
            module = True
    if checkpointed:
        return "recomputing in backward"
    return "forward" if module else ""


def where(frames: Sequence[Frame]) -> str:
    """The innermost line that is not a library's; the innermost of Python when all are; "" when there is none."""
    own = [frame for frame in frames if not _LIBRARIES.search(frame.path)]
    python = [frame for frame in frames if frame.path.endswith(".py")]
    return str((own or python)[0]) if own or python else ""


_LINE = re.compile(r'^[^\w\n]{0,40}File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)
_HEAD = "Traceback (most recent call last)"


def traceback_before(text: str, position: int) -> tuple[Frame, ...]:
    """The frames of the traceback that a message at `position` ends, the innermost first; empty when there is none."""
    before = text[:position]
    start = before.rfind(_HEAD)
    if start < 0:
        return ()
    found = [Frame(m["file"], int(m["line"]), m["name"]) for m in _LINE.finditer(before, start)]
    return tuple(reversed(found))
