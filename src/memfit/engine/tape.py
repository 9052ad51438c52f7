"""Backward of a followed forward: hand autograd what it saved, and recompute what was dropped.

torch's own activation checkpointing recomputes whole regions named in advance, dead operations included. Here the operations that a tensor takes, and
no others, run again when backward asks for it, in the order of the script. Nothing is traced or compiled at run time, and nothing of PyTorch is patched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from memfit import dispatch
from memfit.engine.activation_offloading import LowerTiers
from memfit.engine.compiled import CompiledScript
from memfit.engine.geometry import Argument, Handle, view_as, written_after
from memfit.engine.kept import FREED, KeptStorages
from memfit.errors import EngineError
from memfit.step import generators

Noted = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
"""An operation that may run again: the function, and its arguments with an `Argument` for each tensor."""


class Tape:
    """State of one followed forward until its backward is done.

    Args:
        compiled: the script.
        retain: backward may run more than once, so no tensor is freed early.
        lower_tiers: where to offload to, for a script that does.

    Attributes:
        storages: those of the plan that are kept.
        noted: what may run again, by the operation's number.
        states: generator states before operations that draw, with their device.
        diverged: forward did not run all that was planned.
        recomputations: operations run again.
    """

    def __init__(self, compiled: CompiledScript, *, retain: bool, lower_tiers: LowerTiers | None = None) -> None:
        self.compiled = compiled
        self.storages = KeptStorages(compiled, lower_tiers)
        self.noted: dict[int, Noted] = {}
        self.states: dict[int, tuple[torch.Tensor, torch.device]] = {}
        self.diverged = False
        self.recomputations = 0
        self._next_step = 0
        self._in_order = not retain

    def follow(self, compiled: CompiledScript) -> None:
        """Go by the script of another branch from here on."""
        self.compiled = compiled
        self.storages.follow(compiled)

    def diverge(self) -> None:
        """Forward diverged from the plan: from here on no tensor is freed early."""
        self._in_order = False
        self.diverged = True

    def end(self) -> None:
        """Nothing will be asked for any more."""
        self.storages.end()

    def saved_tensor(self, handle: Handle) -> torch.Tensor:
        """The tensor that autograd saved, its storage recomputed or brought back if need be.

        Raises:
            EngineError: it was freed already.
            RuntimeError: what is needed for it was written since forward.
        """
        if torch._C._len_torch_dispatch_stack():
            # A backward inside forward (a gradient penalty): what is done here is not part of what the follower counts.
            with _disable_current_modes():
                return self._saved_tensor(handle)
        return self._saved_tensor(handle)

    def _saved_tensor(self, handle: Handle) -> torch.Tensor:
        storages = self.storages
        number = self.compiled.script.saves[handle.save]
        steps = self.compiled.script.steps
        if self._in_order and self._next_step < len(steps) and steps[self._next_step].save == handle.save:
            step = steps[self._next_step]
            if step.runs:
                with _below_autograd():
                    for position, (run, releases) in enumerate(zip(step.runs, step.releases, strict=True)):
                        if run and run[0] < 0:  # brings a storage back
                            storages.begin_returning(~run[0])
                        else:
                            self._run(run)
                        for storage in releases:
                            storages.release(storage)
                        for operation in self.compiled.states_ending.get((self._next_step, position), ()):
                            self.states.pop(operation, None)
            tensor = self._view(handle, number)
            for storage in step.after:
                storages.release(storage)
            self._next_step += 1
            if self._next_step == len(steps):
                self.end()
            return tensor
        # Backward went another way than the captured one: from here on make what is missing and let nothing be freed early.
        self._in_order = False
        if number not in storages.live:
            with _below_autograd():
                self._make(number)
        return self._view(handle, number)

    def _view(self, handle: Handle, number: int) -> torch.Tensor:
        if number not in self.storages.live:
            raise EngineError(FREED)
        return view_as(handle, self.storages.read(number))

    def _make(self, number: int) -> None:
        """Recompute or reload this storage outside the script's order."""
        storages, compiled = self.storages, self.compiled
        if number in storages.offloaded:
            storages.begin_returning(number)
            return
        recipe = compiled.recipe_of.get(number, ())
        if self.diverged:
            # What was to be written into it later was not: it is saved as it was before.
            recipe = tuple(operation for operation in recipe if operation in self.noted)
        inside = {s for operation in recipe for _, s, _ in compiled.makes.get(operation, ())}
        if number not in inside or any(operation not in self.noted for operation in recipe):
            raise EngineError(FREED)
        for operation in recipe:
            for place in compiled.recorded[operation] or ():
                if place >= 0 and place not in inside and place not in storages.live:
                    self._make(place)
        self._run(recipe)

    def _run(self, recipe: tuple[int, ...]) -> None:
        storages, compiled = self.storages, self.compiled
        for operation in recipe:
            function, args, kwargs = self.noted[operation]
            state = self.states.get(operation)
            if state is None and operation in compiled.script.random:
                raise EngineError(FREED)  # drawing other numbers would be wrong without anyone noticing
            arguments = tuple(self._argument(a) for a in args)
            keywords = {k: self._argument(v) for k, v in kwargs.items()} if kwargs else {}
            if state is None:
                result = function(*arguments, **keywords)
            else:
                with generators.drawing_from(*state):
                    result = function(*arguments, **keywords)
            made = compiled.makes.get(operation, ())
            if made:
                results = (result,) if isinstance(result, torch.Tensor) else tuple(dispatch.tensors_in(result))
                for output, number, _ in made:
                    storages.finish_returning(number)
                    storages.put(number, results[output].untyped_storage())
            self.recomputations += 1

    def _argument(self, value: Any) -> Any:
        if type(value) is Argument:
            if value.place >= 0:
                return view_as(value, self.storages.read(value.place))
            assert value.storage is not None
            if value.base is not None and value.base._version != value.version:
                raise written_after(value.base, value.version)
            return view_as(value, value.storage)
        if type(value) in (list, tuple):
            return type(value)(self._argument(v) for v in value)
        return value


class _below_autograd:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Recomputation happens below autograd and autocast: the operations were noted there.

    Gradient mode stays as in forward, since some kernels (fused RNNs) return less without it; no graph is built below autograd.
    """

    __slots__ = ("_autocast", "_below", "_grad")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        self._autocast = torch._C._DisableAutocast()
        self._autocast.__enter__()
        self._below = torch._C._AutoDispatchBelowAutograd()
        self._below.__enter__()

    def __exit__(self, *_: object) -> None:
        self._below.__exit__(None, None, None)
        self._autocast.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._grad)
