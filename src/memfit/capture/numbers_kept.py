"""Numbers that autograd keeps: `x * 0.5` saves the 0.5, as a tensor of 8 bytes of its own, for as long as it keeps the graph of that product.

torch calls no saved-tensor hook for a tensor that it made of a number (`SavedVariable`, "wrapped number"), and it makes them above every dispatch mode, so
the recorder sees neither. What it does see is the call with its number, and the node of autograd's graph that keeps it: a mark left on that node tells when
the node goes, and the operations of backward tell when it has run.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from memfit import dispatch
from memfit.capture.lifetimes import Lifetimes, StorageLife
from memfit.values.trace import Category

if TYPE_CHECKING:
    from torch._ops import OpOverload

# Their gradient is a product with the second argument, which is saved as the tensor that it is taken for. Calls from C++ (the scale of attention) are of
# other overloads (`mul.Scalar`), whose formula keeps the number as it is.
_SAVE_THEIR_SECOND: Final = frozenset({"aten::mul", "aten::mul_", "aten::div", "aten::div_"})
_OVERLOAD: Final = "Tensor"
_BYTES: Final[dict[type, int]] = {bool: 1, int: 8, float: 8, complex: 16}
_MARK: Final = "memfit.number"


class _Kept:
    """What is put on a node: the storage of its number."""

    def __init__(self, life: StorageLife, lifetimes: Lifetimes) -> None:
        self.life = life
        self.lifetimes = lifetimes

    def __del__(self) -> None:
        # A node that never runs frees its number when it goes; one that has run did so before.
        if self.life.death is None:
            self.life.death = self.lifetimes.now


class NumbersKept:
    """Follows the numbers of one recording.

    Args:
        lifetimes: to which their storages are added.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        # The last result whose node is to keep a number, and whether no operation has come since.
        self._made: tuple[weakref.ref[torch.Tensor], StorageLife, bool] | None = None

    def ran(self, func: OpOverload, args: tuple[Any, ...], result: Any, module: str, event: int) -> None:
        """An operation ran as this event; numbers lie in the host's memory, so those for another device do not count."""
        if (
            func._schema.name not in _SAVE_THEIR_SECOND
            or func._schema.overload_name != _OVERLOAD
            or type(args[1]) not in _BYTES
            or not dispatch.wants_gradient(args[0])
            or result.device.type != "cpu"
        ):
            return
        if self._made is not None:
            self._made[1].death = self._made[1].birth
        # The kernel's own workspace includes the number while the kernel runs; from the next event on the node keeps it.
        life = self._lifetimes.add_bytes(_BYTES[type(args[1])], Category.OTHER, module, event + 1)
        self._made = (weakref.ref(result), life, True)

    def mark(self) -> None:
        """Called before the next operation: by now the result has its node, or is gone with it."""
        if self._made is None:
            return
        reference, life, first = self._made
        self._made = None
        result = reference()
        # Of a view that was written in place autograd makes the node anew when asked, under a lock, running operations that come here: asking again would wait
        # for ever. Its number is not counted.
        node: Any = None if result is None or result._is_view() else result.grad_fn
        if node is None and first and result is not None and not result._is_view():
            # To make the node of a nested tensor autograd asks for its sizes, by an operation of its own.
            self._made = (reference, life, False)
        elif node is None:
            life.death = life.birth
        else:
            node.metadata[_MARK] = _Kept(life, self._lifetimes)

    def ran_in(self, node: Any, event: int) -> None:
        """An operation of backward ran as this event in a node of the graph, which lets go of its number when it is done, unless the graph is retained."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return
        kept = (
            node.metadata.get(_MARK)
            if node is not None and not isinstance(node, torch.autograd.function.FunctionCtx)
            else None
        )
        if kept is not None:
            kept.life.death = event
