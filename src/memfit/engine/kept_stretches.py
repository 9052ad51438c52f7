"""Stretches of forward in which the plan drops nothing run as in plain PyTorch: the follower is off from where a call of a module begins to where one ends.

A dispatch mode takes some microseconds for each operation that it sees, and saved-tensor hooks for each tensor. What runs in such a stretch is not compared
with the plan; the first forward under a plan, and each `CONFIRMED_EVERY`-th after it, is followed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

CONFIRMED_EVERY: Final = 64

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
End = tuple[nn.Module, int]
"""Where a stretch ends: with so many calls of a module."""


class KeptStretches:
    """Takes a dispatch mode and saved-tensor hooks off between the begin of one module's call and the end of another's.

    Args:
        mode: the dispatch mode.
        hooks: the saved-tensor hooks.
        begins: asked where a module's call begins: where the stretch that begins with it ends, None where the mode is to stay on.
        ends: told where that stretch has ended.
    """

    def __init__(
        self,
        mode: TorchDispatchMode,
        hooks: Hooks,
        begins: Callable[[nn.Module], End | None],
        ends: Callable[[], None],
    ) -> None:
        self._mode, self._hooks = mode, hooks
        self._begins, self._ends = begins, ends
        self._last: nn.Module | None = None  # whose call ends the stretch that runs
        self._calls = 0  # of it that are still to end
        self._below: tuple[Any, Any] = (None, None)  # mode and hooks that are on in the stretch

    @contextmanager
    def off_during(self, ends_of: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
        """Forward runs inside, with the mode and the hooks on.

        Args:
            ends_of: the modules that each stretch begins and ends with.
        """
        pairs = list(ends_of)
        handles = []
        for module in {id(first): first for first, _ in pairs}.values():
            handles.append(module.register_forward_pre_hook(self._before))
        for module in {id(last): last for _, last in pairs}.values():
            handles.append(module.register_forward_hook(self._after, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._last is not None:  # forward went another way, or was interrupted: torch calls no hook then
                self._on()

    def _before(self, module: nn.Module, _args: object) -> None:
        if self._last is not None or _present() != (self._mode, self._hooks):  # what lies on top cannot be taken off
            return
        end = self._begins(module)
        if end is not None:
            self._last, self._calls = end
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._mode.__exit__(None, None, None)
            self._below = _present()

    def _after(self, module: nn.Module, _args: object, _output: object) -> None:
        if module is not self._last or not torch.is_grad_enabled():  # calls without gradients are not counted
            return
        self._calls -= 1
        if self._calls == 0 and _present() == self._below:  # else something of the user's has been put on since
            self._on()
            self._ends()

    def _on(self) -> None:
        self._last = None
        self._mode.__enter__()
        torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)


def _present() -> tuple[Any, Any]:
    """The dispatch mode and the saved-tensor hooks that are on top."""
    return _get_current_dispatch_mode(), torch._C._autograd._top_saved_tensors_default_hooks(True)
