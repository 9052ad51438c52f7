"""Stretches of forward in which the plan drops nothing run as in plain PyTorch: the follower is off from where a call of a module begins to where one ends.

A dispatch mode takes some microseconds for each operation that it sees, and saved-tensor hooks for each tensor. Of what runs in such a stretch only the calls
of modules are counted; the first forward under a plan, and each `CONFIRMED_EVERY`-th after it, is followed as a whole. In that one stretches are rehearsed: one
that does not end where the plan has it (inside a checkpoint of the user's own, whose hooks are on top by then) is left out from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as _hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from memfit.dispatch import ForwardLeftError

CONFIRMED_EVERY: Final = 64

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class End:
    """Where a stretch ends, and what has run by then.

    Attributes:
        module: whose call ends it.
        calls: of it that end in the stretch.
        begun: the least and the most calls of modules that begin in it.
    """

    module: nn.Module
    calls: int
    begun: tuple[int, int]


class KeptStretches:
    """Takes a dispatch mode and saved-tensor hooks off between the begin of one module's call and the end of another's.

    Args:
        mode: the dispatch mode.
        hooks: the saved-tensor hooks.
        begins: asked where a module's call begins: where the stretch that begins with it ends, None where the mode is to stay on.
        ends: told where that stretch has ended.
        differs: told how the calls of modules in a stretch differ from the plan; the mode is on again by then.
        rehearses: whether nothing is taken off.
    """

    def __init__(
        self,
        mode: TorchDispatchMode,
        hooks: Hooks,
        begins: Callable[[nn.Module], End | None],
        ends: Callable[[], None],
        differs: Callable[[str], None],
        rehearses: Callable[[], bool],
    ) -> None:
        self._mode, self._hooks = mode, hooks
        self._begins, self._ends, self._differs = begins, ends, differs
        self._rehearses = rehearses
        self._end: End | None = None  # of the stretch that runs
        self._calls = 0  # of the last module that have ended
        self._begun = 0  # calls of modules
        self._modules: Container[int] = ()
        self._first: Container[int] = ()
        self._below: tuple[Any, Any] = (None, None)  # mode and hooks that are on in the stretch

    @contextmanager
    def off_during(self, modules: Container[int], first: Container[int]) -> Iterator[None]:
        """Forward runs inside, with the mode and the hooks on.

        Args:
            modules: ids of the model's modules.
            first: ids of those that stretches begin with.
        """
        self._modules, self._first = modules, first
        handles = [
            _hooks.register_module_forward_pre_hook(self._before),
            # Before the user's own hooks, whose operations are outside of the call in the plan. On no module: in eval mode layers of
            # nn.TransformerEncoder run other operations where one of their modules has a hook.
            _hooks.register_module_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._end is not None:  # forward went another way, or was interrupted: torch calls no hook then
                if self._rehearses():
                    self._stop("it does not end")
                else:
                    self._on()

    def _before(self, module: nn.Module, _args: object) -> None:
        if self._end is not None:
            if id(module) not in self._modules or not torch.is_grad_enabled():
                return  # calls without gradients are not counted
            self._begun += 1
            if self._begun > self._end.begun[1] and _present() == self._below:
                self._stop(f"a module is called after the {self._end.begun[1]} calls of modules that the plan has here")
            return
        if id(module) not in self._first or not torch.is_grad_enabled():
            return
        if _present() != (self._mode, self._hooks):  # what lies on top cannot be taken off
            return
        end = self._begins(module)
        if end is not None:
            self._end, self._calls, self._begun = end, 0, 1
            if not self._rehearses():
                torch._C._autograd._pop_saved_tensors_default_hooks()
                self._mode.__exit__(None, None, None)
            self._below = _present()

    def _after(self, module: nn.Module, _args: object, output: object) -> None:
        if self._end is None or module is not self._end.module or not torch.is_grad_enabled():
            return
        self._calls += 1
        if self._calls < self._end.calls or _present() != self._below:  # something of the user's has been put on since
            return
        error = sys.exception()
        if output is None and error is not None and not isinstance(error, ForwardLeftError):
            # The call has failed: torch calls the hook all the same, with nothing for its result.
            if self._rehearses():
                self._stop("its last call fails")
            else:
                self._on()
        elif self._begun < self._end.begun[0]:
            self._stop(f"{self._begun} calls of modules, the plan has {self._end.begun[0]} here")
        else:
            self._on()
            self._ends()

    def _stop(self, why: str) -> None:
        self._on()
        self._differs(why)

    def _on(self) -> None:
        self._end = None
        if not self._rehearses():
            self._mode.__enter__()
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)


def _present() -> tuple[Any, Any]:
    """The dispatch mode and the saved-tensor hooks that are on top."""
    return _get_current_dispatch_mode(), torch._C._autograd._top_saved_tensors_default_hooks(True)
