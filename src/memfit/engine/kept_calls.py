"""Calls of modules in which the plan drops nothing run as in plain PyTorch: the follower is off from where one begins to where it ends.

A dispatch mode takes some microseconds for each operation that it sees, and saved-tensor hooks for each tensor. What runs in such a call is not compared with
the plan; the first forward under a plan, and each `CONFIRMED_EVERY`-th after it, is followed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

CONFIRMED_EVERY: Final = 64

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class KeptCalls:
    """Takes a dispatch mode and saved-tensor hooks off during calls of modules.

    Args:
        mode: the dispatch mode.
        hooks: the saved-tensor hooks.
        begins: asked where one of the modules begins; whether the mode is to be off until it ends.
        ends: told where that call has ended.
    """

    def __init__(
        self, mode: TorchDispatchMode, hooks: Hooks, begins: Callable[[nn.Module], bool], ends: Callable[[], None]
    ) -> None:
        self._mode, self._hooks = mode, hooks
        self._begins, self._ends = begins, ends
        self._running: nn.Module | None = None
        self._depth = 0  # of calls of the running module within itself

    @contextmanager
    def off_during(self, modules: Collection[nn.Module]) -> Iterator[None]:
        """Forward runs inside, with the mode and the hooks on."""
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(self._before))
            handles.append(module.register_forward_hook(self._after, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._running is not None:  # an interrupt, after which torch calls no hook
                self._on()

    def _before(self, module: nn.Module, _args: object) -> None:
        if self._running is not None:
            self._depth += module is self._running
        elif self._innermost() and self._begins(module):
            self._running = module
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._mode.__exit__(None, None, None)

    def _after(self, module: nn.Module, _args: object, _output: object) -> None:
        if module is not self._running:
            return
        if self._depth:
            self._depth -= 1
        else:
            self._on()
            self._ends()

    def _on(self) -> None:
        self._running, self._depth = None, 0
        self._mode.__enter__()
        torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)

    def _innermost(self) -> bool:
        """Whether no other mode or hooks lie on top: then they cannot be taken off."""
        return (
            _get_current_dispatch_mode() is self._mode
            and torch._C._autograd._top_saved_tensors_default_hooks(True) == self._hooks
        )
