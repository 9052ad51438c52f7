"""What the backward of a product holds besides what a capture sees of it.

`prod_backward` divides by the input where that has no zero. Where it has one, it multiplies what is before and after each element, and so it does while a
dispatch mode watches, as values are not looked at then (ATen's FunctionsManual.cpp, `prod_safe_zeros_backward`). The capture shows the latter, which takes
more, but not the look at the zeros that goes with it: which elements are zero (one byte each), and how many in each product, held until the gradient is there.
With these the capture is what a step takes that has a zero, and more than what one without takes.

Of `cumprod` the formula that a mode sees holds no less than either of the others.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from memfit.capture.lifetimes import Lifetimes, StorageLife
from memfit.values.trace import Category

_OVER_ALL: Final = "ProdBackward0"
_OVER_A_DIMENSION: Final = "ProdBackward1"
_COUNT_BYTES: Final = 8  # an int64


class ProductsBackward:
    """Follows the nodes of products in one recording, and adds what they hold unseen.

    Args:
        lifetimes: to which the bytes are added.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._node: Any = None
        self._life: StorageLife | None = None
        self._largest = self._fewest = torch.Size()

    def ran(self, event: int, module: str, unpacked: torch.Size | None = None) -> None:
        """Something of backward happens as this event.

        Args:
            event: of an operation, or of the unpack of a saved tensor.
            module: whose backward it is.
            unpacked: the shape of that tensor.
        """
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._life = node, None
            if node is not None and node.name() in {_OVER_ALL, _OVER_A_DIMENSION}:
                self._life = self._lifetimes.add_bytes(0, Category.TEMPORARY, module, event)
                self._largest = self._fewest = torch.Size()
        life = self._life
        if life is None:
            return
        life.death = event
        if unpacked is not None:
            # Of input and result, in any order; a product over all has a result of one element.
            fewer = not life.bytes or unpacked.numel() < self._fewest.numel()
            self._fewest = unpacked if fewer else self._fewest
            self._largest = unpacked if unpacked.numel() >= self._largest.numel() else self._largest
            of_all = self._node.name() == _OVER_ALL
            life.bytes = _over_all(self._largest) if of_all else _over_a_dimension(self._largest, self._fewest)


def _over_a_dimension(input_shape: torch.Size, result_shape: torch.Size) -> int:
    """The mask of zeros, and their number in each product; where a product has one factor, counting copies the mask."""
    elements, products = input_shape.numel(), result_shape.numel()
    return elements + products * _COUNT_BYTES * (2 if elements == products else 1)


def _over_all(input_shape: torch.Size) -> int:
    """The position of the one zero; with more of them the gradient is zero and takes less."""
    return _COUNT_BYTES * max(len(input_shape), 1)
