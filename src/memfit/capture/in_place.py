"""Which operations of backward run in place when no dispatch mode is active.

Autograd adds gradients up in place, and some backward formulas write into their own fresh tensors, but do neither while a dispatch mode watches
(`isTensorSubclassLike` in ATen). The step to be predicted runs its backward without a mode, so the recorder books the kernel that runs then.
"""

from __future__ import annotations

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


class UnwatchedBackward:
    """Knows, node by node of autograd's graph, what the present node has read, made and unpacked."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._node: Any = None
        self._read: set[int] = set()
        self._made: set[int] = set()
        self._unpacked: set[int] = set()  # saves that the node still holds
        self._holds = False  # whether it ever held any

    def enter_node(self) -> bool:
        """Forget the previous node if another one runs now; returns whether that one's formula depends on a dispatch mode being active."""
        node = torch._C._current_autograd_node()
        if node is self._node:
            return False
        self._node = node
        self._read.clear()
        self._made.clear()
        self._unpacked.clear()
        self._holds = False
        return node is not None and node.name().startswith(_FORMULA_BY_VALUES)

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

    def in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
        """The operation that runs instead, on the first argument in place, when no dispatch mode is on; None where it is the same."""
        if not args or not isinstance(args[0], torch.Tensor) or not dispatch.has_storage(args[0]):
            return None
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
            if not done and (known in self._read or known in self._made):
                return None
            return torch.ops.aten.add_.Tensor if dispatch.is_dense(old) and _held_once(old) else None
        if known not in self._made or isinstance(self._node, torch.autograd.function.FunctionCtx):
            return None
        instead = _WRITES_INTO_ITS_OWN.get(func)
        if instead is None and self._node is not None and self._node.name().startswith("BinaryCrossEntropy"):
            instead = _WRITES_IN_CROSS_ENTROPY.get(func)
        # Only the formula can hold what it made, perhaps more than once on the way; no other tensor may share its storage.
        return instead if instead is not None and _storage_held_once(args[0]) else None


def _held_once(tensor: torch.Tensor) -> bool:
    """Whether only the caller of the dispatched operation holds this tensor and its storage."""
    # Counted inside __torch_dispatch__: one owner below, the arguments above (4 for the tensor), the storage's wrapper made here.
    owners = tensor._use_count()  # type: ignore[attr-defined]
    return owners <= 4 and _storage_held_once(tensor)


def _storage_held_once(tensor: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
