"""Which operations of backward run in place when no dispatch mode is active.

Autograd adds gradients up in place, and some backward formulas write into their own fresh tensors, but do neither while a dispatch mode watches
(`isTensorSubclassLike` in ATen). The step to be predicted runs its backward without a mode, so the recorder books the kernel that runs then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from memfit import dispatch
from memfit.capture.lifetimes import Lifetimes

if TYPE_CHECKING:
    from torch._ops import OpOverload

_aten = torch.ops.aten
# What backward formulas do in place to a tensor they just made, when no mode watches.
_WRITES_INTO_ITS_OWN: Final = {
    _aten.index_put.default: _aten.index_put_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
    _aten.put.default: _aten.put_.default,
}
_WRITES_IN_CROSS_ENTROPY: Final = {
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
}
_FORMULA_BY_VALUES: Final = ("ProdBackward", "CumprodBackward")
# Whose formulas scatter or fill out of place, watched or not.
_NEVER_IN_PLACE: Final = ("ScatterReduceBackward", "IndexReduceBackward", "CumprodBackward")

_REFERENCES: Final = 4  # to an argument of an operation where it is looked at and nothing else holds it: those of the recorder, and of the count itself


class UnwatchedBackward:
    """Knows, node by node of autograd's graph, what the present node has read, made and unpacked."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._node: Any = None
        self._read: set[int] = set()
        self._made: set[int] = set()
        self._unpacked: set[int] = set()  # saves that the node still holds
        self._holds = False  # whether it ever held any
        # Of custom functions, whose backward may run a backward of its own, after which it goes on. Held weakly: a node leads on to the leaves of its graph and
        # to their gradients, and one inside a checkpointed region is gone when the region's backward is.
        self._left: weakref.WeakKeyDictionary[Any, tuple[set[int], set[int], set[int], bool]] = (
            weakref.WeakKeyDictionary()
        )

    def enter_node(self) -> bool:
        """Forget the previous node if another one runs now; returns whether that one's formula depends on a dispatch mode being active."""
        node = torch._C._current_autograd_node()
        if node is self._node:
            return False
        if self._by_the_user:
            self._left[self._node] = (self._read, self._made, self._unpacked, self._holds)
        self._node = node
        before = self._left.pop(node, None) if self._by_the_user else None
        self._read, self._made, self._unpacked, self._holds = before or (set(), set(), set(), False)
        return _named(node, _FORMULA_BY_VALUES)

    @property
    def _by_the_user(self) -> bool:
        """Whether the present node is a custom function, whose backward is Python code: what it does out of place is so in the step."""
        return isinstance(self._node, torch.autograd.function.FunctionCtx)

    def ran(self, reads: Iterable[int], makes: Iterable[int]) -> None:
        """An operation ran, of the present node or of forward."""
        self._read.update(reads)
        self._made.update(makes)

    def unpacked(self, save: int) -> None:
        """The present node was given a tensor that it saved."""
        self._unpacked.add(save)
        self._holds = True

    def freed(self, save: int) -> None:
        """Autograd has freed a saved tensor."""
        self._unpacked.discard(save)
        for _, _, unpacked, _ in self._left.values():
            unpacked.discard(save)

    def in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
        """The operation that runs instead, on the first argument in place, when no dispatch mode is on; None where it is the same."""
        if not args or not isinstance(args[0], torch.Tensor) or not dispatch.has_storage(args[0]):
            return None
        # Torch counts all that hold a tensor in Python as one: a backward hook of a module keeps the gradient of its output, say.
        held_in_python = sys.getrefcount(args[0]) > _REFERENCES
        known = self._lifetimes.id_of(args[0])
        if known is None:
            return None
        if func is torch.ops.aten.add.Tensor:
            # Between nodes: what came first lies in the buffer of the next node, and is added to when nothing else holds it.
            if kwargs or len(args) != 2 or not isinstance(args[1], torch.Tensor):
                return None
            old, new = args
            if old.shape != new.shape or old.dtype != new.dtype or torch.is_grad_enabled():
                return None
            # A node lets go of what it saved before its results are added up; until then an addition is its own arithmetic.
            done = self._holds and not self._unpacked
            if not done and (known in self._read or known in self._made or (self._by_the_user and self._holds)):
                return None
            alone = dispatch.is_dense(old) and not held_in_python and _held_once(old)
            return torch.ops.aten.add_.Tensor if alone else None
        if known not in self._made or self._by_the_user or _named(self._node, _NEVER_IN_PLACE):
            return None
        instead = _WRITES_INTO_ITS_OWN.get(func)
        if instead is None and _named(self._node, ("BinaryCrossEntropy",)):
            instead = _WRITES_IN_CROSS_ENTROPY.get(func)
        # Only the formula can hold what it made, perhaps more than once on the way; no other tensor may share its storage.
        return instead if instead is not None and _storage_held_once(args[0]) else None


def _named(node: Any, names: tuple[str, ...]) -> bool:
    return node is not None and bool(node.name().startswith(names))


def _held_once(tensor: torch.Tensor) -> bool:
    """Whether only the caller of the dispatched operation holds this tensor and its storage."""
    # Counted inside __torch_dispatch__: one owner below, the arguments above (4 for the tensor), the storage's wrapper made here.
    owners = tensor._use_count()  # type: ignore[attr-defined]
    return owners <= 4 and _storage_held_once(tensor)


def _storage_held_once(tensor: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
