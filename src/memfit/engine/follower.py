"""Follow a script through an eager forward of any module: keep, drop or offload what autograd saves.

A dispatch mode counts the operations of forward and compares each with the script; saved-tensor hooks give autograd a `Handle` for each tensor whose
storage the plan drops. At the first operation that differs, a *divergence*, the rest of the forward keeps what autograd saves, as plain PyTorch does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from memfit import dispatch
from memfit.engine.activation_offloading import LowerTiers
from memfit.engine.compiled import CompiledScript
from memfit.engine.geometry import Argument, Handle
from memfit.engine.kept_stretches import End, KeptStretches
from memfit.engine.repeated_calls import CallsToRepeat, DroppedTensor
from memfit.engine.size_watch import SizeWatch
from memfit.engine.tape import Tape
from memfit.step import generators
from memfit.step.modules import every_module
from memfit.values.script import KEPT

_wants_gradient = dispatch.wants_gradient


class _Noting:
    """Arguments of one operation, noted for its recomputations. No inner function that calls itself: such a one is a cycle, and keeps what it closes over.

    Attributes:
        as_planned: whether each tensor argument so far is in the storage that the plan says.
    """

    __slots__ = ("_inputs", "_places", "_position", "_storages", "as_planned")

    def __init__(self, tape: Tape, inputs: frozenset[int], places: tuple[int, ...]) -> None:
        self.as_planned = True
        self._storages, self._inputs, self._places = tape.storages, inputs, places
        self._position = 0

    def noted(self, value: Any) -> Any:
        """An argument with every tensor in it replaced by an `Argument`."""
        if isinstance(value, torch.Tensor):
            place = self._places[self._position] if self._position < len(self._places) else -1
            self._position += 1
            if place >= 0:
                made = self._storages.made
                known = made.get(place)
                if known is None and place in self._inputs:
                    self._storages.know(place, value.untyped_storage())
                    self._storages.keep(place, value)
                    known = made[place]
                if known is None or known() is not value.untyped_storage():
                    self.as_planned = False
            return Argument(value, place)
        if type(value) in (list, tuple):
            return type(value)(self.noted(v) for v in value)
        return value


class _OpenSave:
    """A saved tensor of which it is known only at the next operation whether the engine answers for it: which of several branches forward takes.

    Attributes:
        handle: for the engine.
        held: what autograd holds: the tensor itself, until it is known.
    """

    __slots__ = ("handle", "held")

    def __init__(self, handle: Handle, kept: tuple[torch.Tensor, int]) -> None:
        self.handle = handle
        self.held: Handle | tuple[torch.Tensor, int] = kept

    def answered_for(self, known: weakref.ref[torch.UntypedStorage] | None) -> bool:
        """The engine answers for it; False where it does not lie in the storage of the plan."""
        assert isinstance(self.held, tuple), "not answered for yet"
        tensor, _ = self.held
        if known is None or tensor.layout is not torch.strided or known() is not tensor.untyped_storage():
            return False
        self.held = self.handle
        return True


class Follower(dispatch.DispatchMode):
    """The dispatch mode and saved-tensor hooks of one followed forward.

    Args:
        compiled: what to follow; the first of the branches where there are several.
        retain: backward may run more than once, so no tensor is freed early.
        lower_tiers: where to offload to, for a script that does.
        model: whose calls tell where a stretch begins or ends in which nothing is dropped; None to follow everything.
        diverged: called with where and why the forward differs, before anything that is not planned runs; it may raise.
        sizes: told what forward makes, where values decide how much; `diverged` hears of too much.
        everything: is followed, stretches in which nothing is dropped as well: another path that is known may differ within them.
        device: type of the device that trains.

    Attributes:
        tape: what backward goes by.
        divergence: where and why the forward differed from the script; None where it did not.
        unfollowed: operations of forward that ran while the follower was off.
    """

    def __init__(
        self,
        compiled: CompiledScript,
        *,
        retain: bool = False,
        lower_tiers: LowerTiers | None = None,
        model: nn.Module | None = None,
        diverged: Callable[[str], None] | None = None,
        sizes: SizeWatch | None = None,
        everything: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compiled = compiled
        self.tape = Tape(compiled, retain=retain, lower_tiers=lower_tiers)
        self.index = 0
        self.save = 0
        self.divergence: str | None = None
        self.unfollowed = 0
        self._model = model
        self._stretch = -1  # the operation with which the one begins that is rehearsed
        self._everything = everything
        self._device = device
        self._retain = retain
        self._repeated: CallsToRepeat | None = None
        self._diverged: Callable[[str], None] | None = None
        self._functions: list[Any] = list(compiled.functions)
        self._sizes = sizes
        self._acts = compiled.acts
        if sizes is not None:
            self._acts = [acts or sizes.watches(index) for index, acts in enumerate(compiled.acts)]
        self._count = compiled.count
        self._wanted = compiled.script.wanted
        self._all = compiled  # with its branches
        self._parting = compiled.parting[0]
        self._open: list[_OpenSave] = []
        if compiled.offloads and self.tape.storages.arenas is None:
            self._diverge(
                "an earlier forward, whose backward has not run yet, still has offloaded activations on the lower tier"
            )
        self._diverged = diverged

    @contextmanager
    def following(self) -> Iterator[Follower]:
        """Run forward and loss inside."""
        hooks = (self.pack, unpack)
        branches = self._all.branches
        with torch.autograd.graph.saved_tensors_hooks(*hooks), self, self._repeating():
            if self._model is None or self._everything or not any(branch.kept_stretches for branch in branches):
                yield self
            else:
                model = self._model
                stretches = KeptStretches(
                    self,
                    hooks,
                    lambda module: self._kept_from(module, model),
                    self._stretch_ends,
                    self._stretch_differs,
                    lambda: not self.compiled.confirmed,
                )
                everything = {id(module) for module in every_module(model)}
                first = {id(first) for branch in branches for first, _ in branch.modules_of(model).values()}
                with stretches.off_during(everything, first):
                    yield self
        self.finish()

    def _repeating(self) -> AbstractContextManager[None]:
        """What drops the saves of the calls that are made again as a whole: of the path that forward takes, once that is known."""
        branches = self._all.branches
        modules = [path for each in branches for calls in each.script.repeated_calls for path, _ in calls.modules]
        if not modules or self._model is None:
            return nullcontext()
        hooks = (kept_by_autograd, unpack)
        self._repeated = CallsToRepeat(
            modules, self._model, hooks, self._repeated_ended, self._diverge, retain=self._retain
        )
        if len(branches) == 1:
            self._repeated.repeat(self.compiled.script.repeated_calls)
        return self._repeated.during()

    def _repeated_ended(self, saved: int) -> None:
        """A call that is to be made again has ended, in which autograd has saved so many tensors."""
        self.save += saved

    def _kept_from(self, module: nn.Module, model: nn.Module) -> End | None:
        """Where the stretch ends in which the plan drops nothing and that begins with a module's call; None where none does."""
        stretch = self.compiled.kept_stretches.get(self.index)
        first, last = self.compiled.modules_of(model).get(self.index, (None, None))
        if (
            stretch is None
            or last is None
            or first is not module
            or self.save != stretch.saves[0]
            or self.divergence is not None
            or not torch.is_grad_enabled()
            or (self._sizes is not None and self._sizes.watched_between(*stretch.operations))
        ):
            return None
        if self.compiled.confirmed:
            self.tape.storages.not_followed()
        else:
            self._stretch = self.index
        return End(last, stretch.calls, stretch.begun)

    def _stretch_ends(self) -> None:
        """A stretch has run: unfollowed, or rehearsed in a forward that is followed as a whole."""
        if self.compiled.confirmed:
            stretch = self.compiled.kept_stretches[self.index]
            self.unfollowed += stretch.operations[1] - stretch.operations[0]
            self.index, self.save = stretch.operations[1], stretch.saves[1]
            return
        stretch = self.compiled.kept_stretches[self._stretch]
        if (self.index, self.save) != (stretch.operations[1], stretch.saves[1]):
            self._stretch_differs("it ends elsewhere")

    def _stretch_differs(self, why: str) -> None:
        """A stretch does not run from where to where the plan has it. One that is rehearsed will be followed."""
        if self.compiled.confirmed:
            self._diverge(why)
        elif self.divergence is None:
            self.compiled.follow_always(self._stretch)

    def finish(self) -> None:
        """What was followed has ended: see that nothing of it is missing, and that nobody writes into what is kept."""
        if self.divergence is None and self.index != self._count:
            self._diverge(f"forward ended after {self.index} operations, the plan has {self._count}")
        if self.divergence is None and self.save != len(self.compiled.script.saves):
            self._diverge(f"autograd saved {self.save} tensors, the plan has {len(self.compiled.script.saves)}")
        if self._sizes is not None and self.divergence is None:
            self._too_large(self._sizes.ended())
        self._open.clear()
        self.tape.storages.forward_ends()
        self.compiled.ran(followed=not self.unfollowed, as_planned=self.divergence is None)

    @property
    def exhausted(self) -> bool:
        """Whether all operations and saves of the script have come, as planned."""
        return self.index == self._count and self.save == len(self.compiled.script.saves) and self.divergence is None

    @property
    def recomputations(self) -> int:
        """Operations run again so far."""
        return self.tape.recomputations + (self._repeated.recomputations if self._repeated is not None else 0)

    def end(self) -> None:
        """Nothing will be asked for any more."""
        self.tape.end()

    # -- operations ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        index = self.index
        if index < self._count and func is self._functions[index] and self.divergence is None:
            self.index = index + 1
            if _wants_gradient(*args) is not self._wanted[index]:
                more = "no gradient" if self._wanted[index] else "a gradient"
                self._diverge(f"operation {index} ({func}) needs {more} for what it reads, unlike in the plan")
                return self._unplanned(func, args, kwargs or {})
            if not self._acts[index]:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._act(index, func, args, kwargs or {})
        if self.divergence is None:
            branch = self._parting.get(index, {}).get(func)
            if branch is not None:
                self._follow(branch)
                return self.__torch_dispatch__(func, types, args, kwargs)
            following = self._functions[index] if index < self._count else None
            if not dispatch.is_operation(func) or (following is not None and dispatch.sets_up(func, following)):
                return func(*args, **kwargs) if kwargs else func(*args)
            planned = str(self._functions[index]) if index < self._count else "the end of forward"
            self._diverge(f"operation {index} is {func}, the plan has {planned}")
        return self._unplanned(func, args, kwargs or {})

    def _follow(self, branch: int) -> None:
        """Forward takes the path of another branch from here on."""
        self._parting = self._all.parting[branch]
        self.compiled = compiled = self._all.branches[branch]
        self.tape.follow(compiled)
        self._functions, self._acts = list(compiled.functions), compiled.acts
        self._count, self._wanted = compiled.count, compiled.script.wanted

    def _is_decided(self) -> None:
        """No other branch can be the one that is taken: what is held for others alone goes, and what autograd has just saved is answered for as planned."""
        script, storages = self.compiled.script, self.tape.storages
        for number in script.released:
            storages.release(number)
        for save in self._open:
            number = script.saves[save.handle.save] if save.handle.save < len(script.saves) else KEPT
            if number != KEPT and not save.answered_for(storages.made.get(number)):
                self._diverge(f"save {save.handle.save} is not the tensor of the plan")
        self._open.clear()
        if self._repeated is not None:
            self._repeated.repeat(script.repeated_calls)

    def _diverge(self, why: str) -> None:
        self.divergence = why
        self.tape.diverge()
        if self._diverged is not None:
            self._diverged(why)

    def _too_large(self, why: str | None) -> None:
        """What forward makes is as planned and larger than fits; it is followed on where it cannot be ended."""
        if why is not None:
            self._sizes = None
            if self._diverged is not None:
                self._diverged(why)

    def _unplanned(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that is not in the plan. Later recomputations may read a storage that it writes into: a copy of the present contents is kept."""
        for tensor in dispatch.written(func, args, kwargs):
            if tensor.layout is torch.strided:
                self.tape.storages.preserve(tensor.untyped_storage())
        return func(*args, **kwargs) if kwargs else func(*args)

    def _act(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the plan and do what the script says of it."""
        compiled, storages = self.compiled, self.tape.storages
        if index == compiled.script.decided:
            self._is_decided()
            if self.divergence is not None:
                return self._unplanned(func, args, kwargs)
        writes = compiled.script.writes.get(index)
        if writes is not None and writes != tuple(
            dict.fromkeys(
                storages.number_of(t) for t in dispatch.written(func, args, kwargs) if dispatch.has_storage(t)
            )
        ):
            self._diverge(f"operation {index} ({func}) writes into another tensor than in the plan")
            return self._unplanned(func, args, kwargs)
        places = compiled.recorded[index]
        if places is not None and not self._note(index, func, args, kwargs, places):
            self._diverge(f"operation {index} ({func}) reads other tensors than in the plan")
            return self._unplanned(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._sizes is not None:
            self._too_large(self._sizes.ran(func, result, index))
        if writes:
            storages.written(writes)
        made = compiled.outputs[index]
        if made:
            script = compiled.script
            results = (result,) if isinstance(result, torch.Tensor) else tuple(dispatch.tensors_in(result))
            for output, number, size in made:
                if output >= len(results):
                    self._diverge(f"operation {index} ({func}) gave {len(results)} tensors, the plan has more")
                    return result
                storage = results[output].untyped_storage()
                # A plan counts the bytes of its device alone: what a step on a GPU makes on the CPU is none in it.
                if storage.nbytes() > size >= 0 and (size or storage.device.type == self._device):
                    self._diverge(
                        f"operation {index} ({func}) made {storage.nbytes()} bytes, the plan has {size}: the batch is larger than planned"
                    )
                    return result
                storages.know(number, storage)
                if number in script.held or number in script.swaps:
                    storages.keep(number, results[output])
        for number in compiled.leaving.get(index, ()):
            storages.begin_leaving(number)
        for number in compiled.gone.get(index, ()):
            storages.finish_leaving(number)
        return result

    def _note(
        self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], places: tuple[int, ...]
    ) -> bool:
        """Note the arguments that a recomputation would read; False where they are not those of the plan."""
        noting = _Noting(self.tape, self.compiled.script.inputs, places)
        noted_args = [noting.noted(a) for a in args]
        noted_kwargs = {k: noting.noted(v) for k, v in kwargs.items()} if kwargs else kwargs
        if not noting.as_planned:
            return False
        for statistics in dispatch.batch_norm_statistics(func, args):
            noted_args[statistics] = None  # a recomputation must not update the running statistics a second time
        self.tape.noted[index] = (func, tuple(noted_args), noted_kwargs)
        if index in self.compiled.script.random:
            device = next((t.device for t in dispatch.tensors_in((args, kwargs))), torch.device("cpu"))
            if kwargs.get("device") is not None:
                device = torch.device(kwargs["device"])
            self.tape.states[index] = (generators.of_device(device).get_state(), device)
        return True

    # -- what autograd saves -------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to hold in place of a tensor that it saves."""
        if not dispatch.has_storage(tensor):  # sparse or nested: no plan counts it among what is saved
            return kept_by_autograd(tensor)
        save = self.save
        self.save = save + 1
        if self.divergence is None:
            if self.index in self._parting:
                # For the operation before, or already for the next, which another branch may have otherwise.
                self._open.append(_OpenSave(Handle(self.tape, save, tensor), kept_by_autograd(tensor)))
                return self._open[-1]
            saves = self.compiled.script.saves
            if save >= len(saves):
                self._diverge(f"autograd saved more than the {len(saves)} tensors of the plan")
            else:
                number = saves[save]
                if number != KEPT:
                    known = self.tape.storages.made.get(number)
                    if known is not None and tensor.layout is torch.strided and known() is tensor.untyped_storage():
                        return Handle(self.tape, save, tensor)
                    self._diverge(f"save {save} is not the tensor of the plan")
        return kept_by_autograd(tensor)


def kept_by_autograd(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A saved tensor that autograd keeps itself. With hooks on, autograd leaves the check for writes between forward and backward to them."""
    if tensor.is_leaf:
        return tensor, tensor._version
    if type(tensor) is not torch.Tensor:
        return tensor.detach(), tensor._version
    with torch._C._DisableTorchDispatch():  # else the mode that is on would be asked, in Python
        return tensor.detach(), tensor._version


def unpack(packed: Any) -> torch.Tensor:
    """The tensor that autograd saved."""
    if type(packed) is _OpenSave:
        packed = packed.held
    if type(packed) is Handle:
        return packed.tape.saved_tensor(packed)
    if type(packed) is DroppedTensor:
        return packed.saved_tensor()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    found: torch.Tensor = tensor
    return found
