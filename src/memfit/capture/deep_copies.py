"""Deep copies of parameters, as `copy.deepcopy(model)` in a loss makes them (meta-learning).

Of a real parameter `nn.Parameter.__deepcopy__` copies the data. A fake one is of another class, so torch would take it for a tensor and copy it with the
gradient it asks for: another operation, and no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def copied_as_parameters() -> Iterator[None]:
    """Inside, deep copies of fake parameters are parameters, made by the operations that make those of real ones."""

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call, no-any-return]
        if id(tensor) not in memo:
            memo[id(tensor)] = nn.Parameter(
                tensor.data.clone(memory_format=torch.preserve_format), tensor.requires_grad
            )
        made: torch.Tensor = memo[id(tensor)]
        return made

    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__
