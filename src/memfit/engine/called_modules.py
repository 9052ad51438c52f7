"""How often each module is called in a forward: more calls than on any path that is known are a longer path, told without a look at single operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules import module as _hooks

from memfit.step.modules import modules_of
from memfit.values.script import Script


class CallCounts:
    """Of one forward.

    Args:
        most: calls of each module on the known path that has most of them; empty where they are not known.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most = most
        self._left = dict(most)  # below zero: a call too many has been told

    def begins(self, module: str) -> str | None:
        """A module's call begins, with gradients; why no path that is known has it, None where one has."""
        if not self._most:
            return None
        left = self._left.get(module, 0)
        if left < 0:
            return None
        self._left[module] = left - 1
        if left:
            return None
        return (
            f"{module or 'the model'} is called more often than on any path that is known ({self._most.get(module, 0)})"
        )


class UnfollowedForward:
    """A forward under a plan that drops nothing: it runs as in plain PyTorch, and only calls of modules are counted, and what each keeps.

    Args:
        script: of the plan, which says how many there are and what they keep.
        model: whose modules.
        diverged: told of a call that no known path has; it may raise.

    Attributes:
        divergence: where it took another path and ran on; None where it did not.
        recomputations: none.
    """

    def __init__(self, script: Script, model: nn.Module, diverged: Callable[[str], None]) -> None:
        self._counts = CallCounts(script.most_calls)
        kept = script.call_bytes
        # Thousands of calls a step in some models, so each looks up one thing.
        self._known = {id(module): (name, kept.get(name, 0)) for name, module in modules_of(model).items()}
        self._left = script.most_call_bytes
        self._diverged = diverged
        self.divergence: str | None = None
        self.recomputations = 0

    @contextmanager
    def following(self) -> Iterator[UnfollowedForward]:
        """Run forward and loss inside."""
        handle = _hooks.register_module_forward_pre_hook(self._before)
        try:
            yield self
        finally:
            handle.remove()

    def _before(self, module: nn.Module, _args: object) -> None:
        known = self._known.get(id(module))
        if known is None or self.divergence is not None or not torch.is_grad_enabled():
            return
        name, kept = known
        self._left -= kept
        why = self._counts.begins(name)
        if why is None and self._left < 0:
            why = "calls of modules so far keep more than on any path that is known"
        if why is not None:
            self.divergence = why
            self._diverged(why)

    def end(self) -> None:
        """Nothing is held."""
