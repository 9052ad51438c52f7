"""What the modules of a model hold as parameters, buffers and plain attributes, in a few words: enough to tell a table that is filled from one that is not.

A first forward may build what later ones find. Which of the two the next forward will be is told from these words.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from memfit.step.attributes import PLAIN

_CONTAINERS: Final = (list, dict, set, deque, OrderedDict, defaultdict)
_ABSENT: Final = object()
_OF_TORCH: Final = frozenset(nn.Module().__dict__)


def fingerprint(model: nn.Module) -> dict[str, str]:
    """What every module holds as parameters, buffers and attributes of its own, by path and name, in a few words.

    Enough to tell a table that is filled from one that is not: numbers and strings, shapes of tensors, lengths of lists, mappings and sets.
    """
    return {
        f"{path}.{name}": _in_words(value)
        for path, module in model.named_modules()
        for name, value in _held(module).items()
    }


def has_fingerprint(model: nn.Module, words: Mapping[str, str]) -> bool:
    """Whether the modules hold what these words say; what they do not name is not looked at."""
    return all(_in_words(_find(model, place)) == word for place, word in words.items())


def _held(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in module.__dict__.items() if name not in _OF_TORCH}
    return {**own, **module._parameters, **module._buffers}  # noqa: SLF001 - those that are None, too


def _find(model: nn.Module, place: str) -> Any:
    path, _, name = place.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:  # a module that is not there
        return _ABSENT
    return _held(module).get(name, _ABSENT)


def _in_words(value: Any) -> str:
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{' with gradients' if value.requires_grad else ''}"
    return f"{len(value)}" if type(value) in _CONTAINERS else "" if value is _ABSENT else type(value).__name__
