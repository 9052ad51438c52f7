"""What the modules of a model hold as plain attributes (flags, counts, caches), which forward may set: noted and put back.

A flag often says what is in a buffer (how far a table of positions is filled): whoever puts back the one has to put back the other.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, Final

from torch import nn

_CONTAINERS: Final = (list, dict, set, deque, OrderedDict, defaultdict)
_VALUES: Final = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH: Final = frozenset(nn.Module().__dict__)


class Attributes:
    """The attributes that a model's modules have now, besides those that every module has.

    Args:
        model: whose.
        only_values: note numbers, strings and None alone. What refers to tensors would keep them in memory after forward has replaced them.
    """

    def __init__(self, model: nn.Module, *, only_values: bool = False) -> None:
        self._only_values = only_values
        self._held = [
            (
                module,
                {
                    name: value
                    for name, value in module.__dict__.items()
                    if name not in _OF_TORCH and (not only_values or type(value) in _VALUES)
                },
            )
            for module in model.modules()
        ]
        self._containers: list[tuple[Any, Any]] = [
            (value, value.copy()) for _, held in self._held for value in held.values() if type(value) in _CONTAINERS
        ]

    def put_back(self) -> None:
        """Have the modules hold what they held, in the same lists, mappings and sets."""
        for container, contents in self._containers:
            container.clear()
            container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)
        for module, held in self._held:
            for name, value in list(module.__dict__.items()):
                if name not in _OF_TORCH and name not in held and (not self._only_values or type(value) in _VALUES):
                    del module.__dict__[name]
            module.__dict__.update(held)
