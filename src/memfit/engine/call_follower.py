"""Follow scripts of single calls through a forward that may leave out, repeat or exchange calls.

Each call of a module that has a script is followed by a `Follower` of its own, from its first operation to its last, whatever ran before it. What runs outside
of such calls is kept as plain PyTorch keeps it. A call that runs other operations than its script has diverged, and no other call with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from memfit import dispatch
from memfit.engine.called_modules import CallCounts
from memfit.engine.compiled import CompiledScript
from memfit.engine.follower import Follower, kept_by_autograd, unpack
from memfit.engine.new_paths import PathWatch
from memfit.engine.size_watch import SizeWatch


class CallFollower(dispatch.DispatchMode):
    """The dispatch mode, saved-tensor hooks and module hooks of one forward.

    Args:
        compiled: the scripts of the calls.
        model: whose modules they name.
        retain: backward may run more than once.
        watch: told of divergences, and of what is written between calls; it may end the forward.
        sizes: told what forward makes, where values decide how much.
        device: type of the device that trains.

    Attributes:
        divergence: of the first call that diverged, or that the forward is longer than any that is known; None where neither is so.
    """

    def __init__(
        self,
        compiled: CompiledScript,
        model: nn.Module,
        *,
        retain: bool = False,
        watch: PathWatch | None = None,
        sizes: SizeWatch | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._retain, self._watch, self._sizes, self._device = retain, watch, sizes, device
        self._operations, self._most = 0, compiled.script.most_operations
        self._longer: str | None = None
        self._scripts = compiled.calls
        self._paths = _FollowedPaths(model, self)
        self._numbers: Counter[str] = Counter()
        self._most_calls = compiled.script.most_calls
        self._calls = CallCounts(self._most_calls)
        self._inside: Follower | None = None
        self._depth = 0
        self._module = ""
        self._done: list[Follower] = []

    @contextmanager
    def following(self) -> Iterator[CallFollower]:
        """Run forward and loss inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack), self._paths, self:
            yield self
        if self._inside is not None:  # the forward ended inside a call: an exception that the user's code caught
            self._leave()
        if self._sizes is not None:
            self._too_large(self._sizes.ended())

    def entered(self, module: str, depth: int) -> None:
        """A module of the model begins."""
        self._leave_if_done()
        if not torch.is_grad_enabled():
            return
        longer = self._calls.begins(module)
        if longer is not None and self._longer is None:
            self._longer = longer
            self._diverged(longer)
        if module not in self._scripts:
            return
        number = self._numbers[module]
        self._numbers[module] += 1
        if self._inside is not None:
            return
        scripts = self._scripts[module]
        # In a call that a known path makes, nothing is dropped where it has no script; one that none makes drops as much as the last that has one.
        known = number < self._most_calls.get(module, max(scripts) + 1)
        compiled = scripts.get(number) if known else scripts[max(scripts)]
        if compiled is not None:
            self._depth, self._module = depth, module
            self._inside = Follower(compiled, retain=self._retain, diverged=self._diverged, device=self._device)

    def _diverged(self, why: str) -> None:
        if self._watch is not None:
            self._watch.diverged(f"in {self._module}: {why}" if self._module else why)

    def _count(self, func: OpOverload) -> None:
        """Notice a forward that is longer than every path that is known: what it runs besides is kept, wherever that is."""
        self._operations += 1
        if self._operations > self._most and self._longer is None:
            self._longer = f"operation {self._most} is {func}, and the longest path that is known has ended"
            self._diverged(self._longer)

    def _leave_if_done(self) -> None:
        """A script may be of what a call begins with alone."""
        if self._inside is not None and self._inside.exhausted:
            self._leave()

    def left(self, depth: int) -> None:
        """A module ends."""
        if self._inside is not None and depth == self._depth:
            self._leave()

    def _leave(self) -> None:
        assert self._inside is not None
        self._inside.finish()
        if self._inside.divergence is not None:
            self._inside.divergence = f"in {self._module}: {self._inside.divergence}"
        self._done.append(self._inside)
        self._inside, self._module = None, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._leave_if_done()
        if self._most and dispatch.is_operation(func):
            self._count(func)
        if self._watch is not None and self._inside is None and func._schema.is_mutable:
            self._watch.unplanned_write(dispatch.written(func, args, kwargs or {}))
        if self._done:
            # What an earlier call keeps may be written now, though on the path that was planned for it is not: then a copy of its contents is kept.
            for tensor in dispatch.written(func, args, kwargs or {}):
                if tensor.layout is torch.strided:
                    for follower in self._done:
                        follower.tape.storages.preserve(tensor.untyped_storage())
        if self._inside is not None:
            return self._told(func, self._inside.__torch_dispatch__(func, types, args, kwargs))
        return self._told(func, func(*args, **kwargs) if kwargs else func(*args))

    def _told(self, func: OpOverload, result: Any) -> Any:
        """The result of an operation, of whose size is told what watches sizes."""
        if self._sizes is not None and dispatch.is_operation(func):
            self._too_large(self._sizes.ran(func, result))
        return result

    def _too_large(self, why: str | None) -> None:
        """What forward makes, or runs, may be more than fits."""
        if why is not None:
            self._sizes = None
            if self._watch is not None:
                self._watch.diverged(why)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._leave_if_done()
        return kept_by_autograd(tensor) if self._inside is None else self._inside.pack(tensor)

    # -- what became of it ---------------------------------------------------------------------------------------------------

    @property
    def divergence(self) -> str | None:
        """Where and why the first call that diverged did."""
        found = next((follower.divergence for follower in self._done if follower.divergence is not None), None)
        return found if found is not None else self._longer

    @property
    def recomputations(self) -> int:
        """Operations run again so far."""
        return sum(follower.tape.recomputations for follower in self._done)

    def end(self) -> None:
        """Nothing will be asked for any more."""
        for follower in self._done:
            follower.tape.end()


class _FollowedPaths(dispatch.ModulePaths):
    """Tells a follower which module begins and ends."""

    def __init__(self, model: nn.Module, follower: CallFollower) -> None:
        super().__init__(model)
        self._follower = follower

    def _enter(self, module: nn.Module, args: object) -> None:
        super()._enter(module, args)
        if id(module) in self._names:
            self._follower.entered(self.current, self.depth)

    def _leave(self, module: nn.Module, args: object, *kwargs_and_output: object) -> None:
        if id(module) in self._names:
            self._follower.left(self.depth)
        super()._leave(module, args, *kwargs_and_output)
