"""Views that autograd makes anew once they, or what they are a part of, have been written in place.

Of a plain tensor it makes them by their strides, below every mode. Of a fake one, as of every tensor that has a `__torch_dispatch__`, it runs the operations
that made the view (`VariableHooks::grad_fn` of torch/csrc/autograd/variable.cpp), which modes see. So the forward of `y = x.new_empty(4, 8); y[:, :4] = a`
has one operation more on fake tensors than in training; and where the view is read afterwards, backward makes other gradients, too (that of a view by its
strides is a new tensor, that of a reshaped one is not).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit import dispatch

if TYPE_CHECKING:
    from torch._ops import OpOverload

# Of functions that write their first argument: add_, but not __add__; y[0] = x, y += x.
_IN_PLACE: Final = re.compile(
    r".*[^_]_|__setitem__|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


class ViewsMadeAnew(TorchFunctionMode):
    """While it is on, autograd has of fake tensors what it has of real ones, and this tells which operations are its own.

    What it would make anew of the arguments of a call is made before it, and the call is given a view by strides. A call that writes a view does so in the
    last operation of its own, so the views of that storage which follow until it returns are autograd's. What `Function.apply` is given is not known, as no
    mode is told of it: there the operations stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: set[int] = set()  # storages of which the running call has written a view
        self._making = self._made = False
        # Views that were made anew, each with one by its strides, or with None until it is read.
        self._by_strides: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run it on what a real step would give it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__":
            # By it autograd takes the hooks off a view while it makes that anew: to look at the view then would wait for ever.
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                first = args[:1] if _IN_PLACE.fullmatch(name) else ()
                self._look_at(first)
                args = (*first, *self._as_on_real(args[len(first) :]))
                kwargs = {key: self._as_on_real(value) for key, value in kwargs.items()}
        before, self._written = self._written, set()
        try:
            return func(*args, **kwargs)
        finally:
            self._written = before

    def _as_on_real(self, tree: Any) -> Any:
        """The arguments, each view that was made anew as a view by strides."""
        if isinstance(tree, torch.Tensor):
            return self._read(tree)
        if type(tree) in (list, tuple):
            return type(tree)(map(self._as_on_real, tree))
        return tree

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        self._look_at((tensor,))
        if tensor not in self._by_strides or tensor._base is None or not tensor.requires_grad:
            return tensor
        if self._by_strides[tensor] is None:
            self._making = True
            by_strides = tensor._base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            self._making = False
            self._by_strides[tensor] = by_strides
        found: torch.Tensor = self._by_strides[tensor]
        return found

    def _look_at(self, tensors: Sequence[Any]) -> None:
        """Have autograd make anew now what it would while it runs what comes."""
        for tensor in dispatch.tensors_in(tensors):
            if tensor.requires_grad and tensor._is_view():
                self._making, self._made = True, False
                with suppress(RuntimeError):  # what autograd refuses it refuses in the call, in its own words
                    tensor.grad_fn  # noqa: B018 - looks whether the view is as autograd knows it
                self._making = False
                if self._made:
                    self._by_strides[tensor] = None

    def made_by_autograd(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation, which is about to run, is autograd's. Each has to be asked about once."""
        if self._making:
            self._made = True
            return True
        if not torch.is_grad_enabled():
            return False
        for tensor in dispatch.written(func, args, kwargs):
            if dispatch.has_storage(tensor) and tensor._is_view():
                self._written.add(dispatch.storage_key(tensor))
                self._by_strides[tensor] = None
        return bool(self._written) and func.is_view and dispatch.storage_key(args[0]) in self._written
