"""Follow a script: keep, drop and rebuild what autograd saves, in eager PyTorch, for any module.

torch's own activation checkpointing reruns whole regions named in advance, dead operations included. Here a dispatch mode follows the forward by
operation index; a saved tensor whose storage is dropped is replaced by a `Handle`; when backward asks for it, the operations it takes, and no
others, are run again, as the script says. Nothing is traced or compiled at run time, and nothing of PyTorch is patched.

What a rerun reads is noted as *storages and geometry*, never as tensors of the graph: a graph node must not come to own itself.

A swapped storage goes the same ways: its copy down begins after the operation that writes it last, is waited for where the script says, and a copy up
stands among the reruns. Bytes so follow the script alone, however fast the copies are (`swap`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit import dispatch
from memfit.engine.swap import Arena, Copy, LowerTiers
from memfit.errors import EngineError
from memfit.values.script import KEPT, Script


class Argument:
    """A tensor argument of a rerun: where its bytes are, and how they are looked at."""

    __slots__ = ("base", "conj", "dtype", "neg", "offset", "place", "shape", "storage", "stride", "version")

    def __init__(self, tensor: torch.Tensor, place: int) -> None:
        self.place = place  # number of a storage the engine knows, or -1
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.storage: torch.UntypedStorage | None = None
        self.base: torch.Tensor | None = None
        self.version = 0
        if place < 0:
            self.storage = tensor.untyped_storage()
            base = tensor._base if tensor._is_view() else tensor
            if base is not None and base.is_leaf:
                self.base, self.version = base, base._version


class Handle:
    """What autograd holds in place of a tensor whose storage the engine answers for."""

    __slots__ = ("conj", "dtype", "neg", "offset", "save", "shape", "stride", "tape")

    def __init__(self, tape: Tape, save: int, tensor: torch.Tensor) -> None:
        self.tape = tape
        self.save = save
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()


class Watched:
    """A storage held since forward, and how often it has been written, as autograd counts it.

    Below autograd a detached tensor has a count of its own; with the key above let in again it shares that of the tensor that the user has.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_WRITES)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, False)
        try:
            with torch._C._DisableTorchDispatch():
                self.alias = tensor.detach()
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, excluded)
        self.version = -1

    def settle(self) -> None:
        """From here on nobody writes."""
        self.version = self.alias._version

    def check(self) -> None:
        """Raise RuntimeError where somebody has written."""
        if self.version >= 0 and self.alias._version != self.version:
            raise _written_after(self.alias, self.version)


_COUNTS_WRITES: Final = torch._C.DispatchKey.ADInplaceOrView


def _written_after(tensor: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(tensor.shape)} needed to rebuild what backward reads was changed in place "
        f"after forward (version {tensor._version}, expected {version}): write into a copy of it (clone)"
    )


def _looked_at(seen: Argument | Handle, storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of this geometry."""
    tensor = torch.empty(0, dtype=seen.dtype, device=storage.device).set_(storage, seen.offset, seen.shape, seen.stride)
    # Lazy conjugation and negation are bits of the tensor; the bytes know nothing of them.
    if seen.conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if seen.neg else tensor


_LET_GO: Final = (
    "backward asked again for a tensor that was already let go. For a second backward through the same graph use "
    "`with engine.forward(retain_graph=True)`"
)

_wants_gradient = dispatch.wants_gradient

Noted = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


class CompiledScript:
    """A script with its operation names resolved, laid out by forward index."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.functions: list[OpOverload | None] = [_resolve(name) for name in script.operations]
        self.count = len(self.functions)
        self.outputs: list[tuple[tuple[int, int, int], ...]] = [script.makes.get(i, ()) for i in range(self.count)]
        self.recorded: list[tuple[int, ...] | None] = [script.recorded.get(i) for i in range(self.count)]
        # Storages whose copy down begins after an operation, and those that are gone by it.
        self.leaving: dict[int, list[int]] = {}
        self.gone: dict[int, list[int]] = {}
        for number, swap in script.swaps.items():
            self.leaving.setdefault(swap.begin, []).append(number)
            self.gone.setdefault(swap.gone_by, []).append(number)
        self.acts = [
            bool(o) or r is not None or i in self.leaving or i in self.gone or i in script.writes
            for i, (o, r) in enumerate(zip(self.outputs, self.recorded, strict=True))
        ]
        self.makes = dict(script.makes)
        # Generator states go right after the recipe that needs them last: (step, position among its runs) -> operations.
        last: dict[int, tuple[int, int]] = {}
        for number, step in enumerate(script.steps):
            for position, run in enumerate(step.runs):
                last.update((operation, (number, position)) for operation in run if operation in script.random)
        self.states_ending: dict[tuple[int, int], list[int]] = {}
        for operation, where in last.items():
            self.states_ending.setdefault(where, []).append(operation)
        self.recipe_of: dict[int, tuple[int, ...]] = {}
        for step in script.steps:
            for run in step.runs:
                for operation in run:
                    for _, storage, _ in script.makes.get(operation, ()):
                        self.recipe_of[storage] = run


def _resolve(name: str) -> OpOverload | None:
    parts = name.split(".")
    if len(parts) != 3:
        return None
    packet = getattr(getattr(torch.ops, parts[0], None), parts[1], None)
    return getattr(packet, parts[2], None)


class Tape:
    """State of one followed forward until its backward is done."""

    def __init__(self, compiled: CompiledScript, *, retain: bool) -> None:
        self.compiled = compiled
        self.retain = retain
        self.live: dict[int, torch.UntypedStorage] = {}
        # Weak: an address may be used again once a storage is gone, the storage itself may not.
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.number_at: dict[int, int] = {}  # by address
        self.watched: dict[int, Watched] = {}  # of what is held since forward
        self.noted: dict[int, Noted] = {}
        self.states: dict[int, tuple[torch.Tensor, torch.device]] = {}
        self.cursor = 0
        self.in_order = not retain
        self.departed = False  # forward did not run all that was planned
        self.reruns = 0
        self.lower_tiers: LowerTiers | None = None
        self.arenas: Mapping[str, Arena] | None = None  # as long as they are lent
        self.leaving: dict[int, tuple[torch.UntypedStorage, Copy]] = {}
        self.coming: dict[int, Copy] = {}
        self.below: dict[int, tuple[int, torch.device]] = {}  # what has been copied down: bytes, and from where

    # -- what is held --------------------------------------------------------------------------------------------------------

    def know(self, number: int, storage: torch.UntypedStorage) -> None:
        """Forward has made a storage of the plan."""
        self.made[number] = weakref.ref(storage)
        self.number_at[storage._cdata] = number

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of the storage below a tensor, -1 where it is none of the plan."""
        storage = tensor.untyped_storage()
        number = self.number_at.get(storage._cdata, -1)
        return number if number >= 0 and self.made[number]() is storage else -1

    def hold(self, number: int, tensor: torch.Tensor) -> None:
        """Hold what forward has made, and see when somebody writes into it after forward."""
        self.live[number] = tensor.untyped_storage()
        if not tensor.is_inference():  # nobody writes into those where gradients are wanted
            self.watched[number] = Watched(tensor)

    def settle(self) -> None:
        """Forward is over: nobody writes any more into what is held."""
        for watched in self.watched.values():
            watched.settle()

    def put(self, number: int, storage: torch.UntypedStorage) -> None:
        """Hold another storage under this number: a copy, or one made again."""
        self.live[number] = storage
        self.watched.pop(number, None)

    def release(self, number: int) -> None:
        """Hold a storage no longer."""
        self.arrive(number)
        self.live.pop(number, None)
        self.watched.pop(number, None)

    def look_at(self, number: int) -> torch.UntypedStorage:
        """What is held under this number, all there."""
        self.arrive(number)
        if number in self.watched:
            self.watched[number].check()
        return self.live[number]

    # -- swap ----------------------------------------------------------------------------------------------------------------

    def send(self, number: int) -> None:
        """Begin to copy a storage down, where it has room there; else hold it."""
        swap = self.compiled.script.swaps[number]
        storage = self.made[number]()
        assert storage is not None, "the operation that has just run wrote it"
        assert self.arenas is not None
        arena = self.arenas[swap.tier]
        if number not in self.compiled.script.held:
            self.live.pop(number, None)
            self.watched.pop(number, None)
        if 0 < storage.nbytes() <= swap.bytes and storage.device.type == arena.device_type:
            self.below[number] = storage.nbytes(), storage.device
            self.leaving[number] = storage, arena.copy_down(storage, swap.offset)
        else:
            self.put(number, storage)

    def let_go(self, number: int) -> None:
        """Wait for a copy down, and hold its storage no longer for it."""
        if number in self.leaving:
            self.leaving[number][1].wait()
            del self.leaving[number]

    def fetch(self, number: int) -> None:
        """Make room for a swapped storage, and begin to copy it up."""
        if number not in self.below:
            return  # it was held
        if self.arenas is None:
            raise EngineError(_LET_GO)
        self.let_go(number)
        self.arrive(number)
        size, device = self.below[number]
        storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self.put(number, storage)
        swap = self.compiled.script.swaps[number]
        self.coming[number] = self.arenas[swap.tier].copy_up(storage, swap.offset)

    def arrive(self, number: int) -> None:
        """Wait for a copy up."""
        copy = self.coming.pop(number, None)
        if copy is not None:
            copy.wait()

    def keep_value(self, storage: torch.UntypedStorage) -> None:
        """Hold what is in a storage now: it is about to be written into, and not by the plan."""
        for number in [n for n, (leaving, _) in self.leaving.items() if leaving is storage]:
            self.let_go(number)
        for number in [n for n, held in self.live.items() if held is storage]:
            self.put(number, storage.clone())

    def end(self) -> None:
        """Nothing will be asked for any more: give the lower tiers back."""
        if self.lower_tiers is not None:
            self.lower_tiers.give_back(self)
            self.arenas = None

    # -- backward ------------------------------------------------------------------------------------------------------------

    def materialise(self, handle: Handle) -> torch.Tensor:
        """The saved tensor, its storage made again if need be."""
        if torch._C._len_torch_dispatch_stack():
            # A backward inside forward (a gradient penalty): what is done here is not part of what the follower counts.
            with _disable_current_modes():
                return self._materialised(handle)
        return self._materialised(handle)

    def _materialised(self, handle: Handle) -> torch.Tensor:
        compiled = self.compiled
        storage_number = compiled.script.saves[handle.save]
        steps = compiled.script.steps
        if self.in_order and self.cursor < len(steps) and steps[self.cursor].save == handle.save:
            step = steps[self.cursor]
            if step.runs:
                with _rerunning():
                    for position, (run, releases) in enumerate(zip(step.runs, step.releases, strict=True)):
                        if run and run[0] < 0:
                            self.fetch(~run[0])
                        else:
                            self._run(run)
                        for storage in releases:
                            self.release(storage)
                        for operation in compiled.states_ending.get((self.cursor, position), ()):
                            self.states.pop(operation, None)
            tensor = self._view(handle, storage_number)
            for storage in step.after:
                self.release(storage)
            self.cursor += 1
            if self.cursor == len(steps):
                self.end()
            return tensor
        # Backward went another way than the captured one: from here on make what is missing and let nothing go early.
        self.in_order = False
        if storage_number not in self.live:
            with _rerunning():
                self._make(storage_number)
        return self._view(handle, storage_number)

    def _view(self, handle: Handle, number: int) -> torch.Tensor:
        if number not in self.live:
            raise EngineError(_LET_GO)
        return _looked_at(handle, self.look_at(number))

    def _make(self, number: int) -> None:
        if number in self.below:
            self.fetch(number)
            return
        recipe = self.compiled.recipe_of.get(number, ())
        if self.departed:
            # What was to be written into it later was not: it is saved as it was before.
            recipe = tuple(operation for operation in recipe if operation in self.noted)
        inside = {s for operation in recipe for _, s, _ in self.compiled.makes.get(operation, ())}
        if number not in inside or any(operation not in self.noted for operation in recipe):
            raise EngineError(_LET_GO)
        for operation in recipe:
            for place in self.compiled.recorded[operation] or ():
                if place >= 0 and place not in inside and place not in self.live:
                    self._make(place)
        self._run(recipe)

    def _run(self, recipe: tuple[int, ...]) -> None:
        for operation in recipe:
            function, args, kwargs = self.noted[operation]
            state = self.states.get(operation)
            if state is None and operation in self.compiled.script.random:
                raise EngineError(_LET_GO)  # drawing other numbers would be wrong without anyone noticing
            arguments = tuple(self._argument(a) for a in args)
            keywords = {k: self._argument(v) for k, v in kwargs.items()} if kwargs else {}
            if state is None:
                result = function(*arguments, **keywords)
            else:
                with _generator_at(*state):
                    result = function(*arguments, **keywords)
            made = self.compiled.makes.get(operation, ())
            if made:
                results = (result,) if isinstance(result, torch.Tensor) else tuple(dispatch.tensors_in(result))
                for output, number, _ in made:
                    self.arrive(number)
                    self.put(number, results[output].untyped_storage())
            self.reruns += 1

    def _argument(self, value: Any) -> Any:
        if type(value) is Argument:
            if value.place >= 0:
                storage = self.look_at(value.place)
            else:
                assert value.storage is not None
                storage = value.storage
                if value.base is not None and value.base._version != value.version:
                    raise _written_after(value.base, value.version)
            return _looked_at(value, storage)
        if type(value) in (list, tuple):
            return type(value)(self._argument(v) for v in value)
        return value


@contextmanager
def _generator_at(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Draw from an earlier state of the default generator, then go on as if nothing had happened."""
    generator = _generator(device)
    present = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(present)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
    return torch.default_generator


class _rerunning:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Reruns happen below autograd and autocast: the operations were noted there.

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


class Follower(TorchDispatchMode):
    """The dispatch mode and saved-tensor hooks of one followed forward.

    At the first operation that differs from the script the rest of the forward is kept plain; `departure` then says where.

    Args:
        compiled: what to follow.
        retain: backward may run more than once; nothing is let go early.
        lower_tiers: where to swap to, for a script that does.
    """

    def __init__(
        self, compiled: CompiledScript, *, retain: bool = False, lower_tiers: LowerTiers | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compiled = compiled
        self.tape = Tape(compiled, retain=retain)
        self.index = 0
        self.save = 0
        self.departure: str | None = None
        self._functions: list[Any] = list(compiled.functions)
        self._acts = compiled.acts
        self._count = compiled.count
        self._wanted = compiled.script.wanted
        if compiled.script.swaps:
            assert lower_tiers is not None, "an engine whose plan swaps has lower tiers"
            self.tape.lower_tiers, self.tape.arenas = lower_tiers, lower_tiers.lend(self.tape)
            if self.tape.arenas is None:
                self._depart(
                    "an earlier forward, whose backward has not run yet, still has what it swapped on the lower tier"
                )

    @contextmanager
    def following(self) -> Iterator[Follower]:
        """Run forward and loss inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), self:
            yield self
        if self.departure is None and self.index != self._count:
            self._depart(f"forward ended after {self.index} operations, the plan has {self._count}")
        if self.departure is None and self.save != len(self.compiled.script.saves):
            self._depart(f"autograd saved {self.save} tensors, the plan has {len(self.compiled.script.saves)}")
        self.tape.settle()
        for number in list(self.tape.leaving):  # after a departure
            self.tape.let_go(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        index = self.index
        if index < self._count and func is self._functions[index] and self.departure is None:
            self.index = index + 1
            if _wants_gradient(*args) is not self._wanted[index]:
                more = "no gradient" if self._wanted[index] else "a gradient"
                self._depart(f"operation {index} ({func}) needs {more} for what it reads, unlike in the plan")
                return self._unplanned(func, args, kwargs or {})
            if not self._acts[index]:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._act(index, func, args, kwargs or {})
        if self.departure is None:
            if not dispatch.is_operation(func):
                return func(*args, **kwargs) if kwargs else func(*args)
            planned = str(self._functions[index]) if index < self._count else "the end of forward"
            self._depart(f"operation {index} is {func}, the plan has {planned}")
        return self._unplanned(func, args, kwargs or {})

    def _unplanned(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is not in the plan. Reruns of what was dropped before may read what it writes into: they are left the value of now."""
        for tensor in dispatch.written(func, args, kwargs):
            if tensor.layout is torch.strided:
                self.tape.keep_value(tensor.untyped_storage())
        return func(*args, **kwargs) if kwargs else func(*args)

    def _act(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiled, tape = self.compiled, self.tape
        writes = compiled.script.writes.get(index)
        if writes is not None and writes != tuple(
            dict.fromkeys(tape.number_of(t) for t in dispatch.written(func, args, kwargs) if dispatch.has_storage(t))
        ):
            self._depart(f"operation {index} ({func}) writes into another tensor than in the plan")
            return self._unplanned(func, args, kwargs)
        places = compiled.recorded[index]
        if places is not None and not self._note(index, func, args, kwargs, places):
            self._depart(f"operation {index} ({func}) reads other tensors than in the plan")
            return self._unplanned(func, args, kwargs)
        result = func(*args, **kwargs)
        made = compiled.outputs[index]
        if made:
            results = (result,) if isinstance(result, torch.Tensor) else tuple(dispatch.tensors_in(result))
            held = compiled.script.held
            for output, number, size in made:
                if output >= len(results):
                    self._depart(f"operation {index} ({func}) gave {len(results)} tensors, the plan has more")
                    return result
                storage = results[output].untyped_storage()
                if storage.nbytes() > size >= 0:
                    self._depart(
                        f"operation {index} ({func}) made {storage.nbytes()} bytes, the plan has {size}: the batch is larger than planned"
                    )
                    return result
                tape.know(number, storage)
                if number in held or number in compiled.script.swaps:
                    tape.hold(number, results[output])
        for number in compiled.leaving.get(index, ()):
            tape.send(number)
        for number in compiled.gone.get(index, ()):
            tape.let_go(number)
        return result

    def _note(
        self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], places: tuple[int, ...]
    ) -> bool:
        """Write down what a rerun would read; false where it is not what the plan says."""
        made = self.tape.made
        position = 0
        as_planned = True

        def noted(value: Any) -> Any:
            nonlocal position, as_planned
            if isinstance(value, torch.Tensor):
                place = places[position] if position < len(places) else -1
                position += 1
                if place >= 0:
                    known = made.get(place)
                    if known is None or known() is not value.untyped_storage():
                        as_planned = False
                return Argument(value, place)
            if type(value) in (list, tuple):
                return type(value)(noted(v) for v in value)
            return value

        noted_args = [noted(a) for a in args]
        noted_kwargs = {k: noted(v) for k, v in kwargs.items()} if kwargs else kwargs
        if not as_planned:
            return False
        for statistics in dispatch.batch_norm_statistics(func, args):
            noted_args[statistics] = None  # a rerun must not update the running statistics a second time
        self.tape.noted[index] = (func, tuple(noted_args), noted_kwargs)
        if index in self.compiled.script.random:
            device = next((t.device for t in dispatch.tensors_in((args, kwargs))), torch.device("cpu"))
            if kwargs.get("device") is not None:
                device = torch.device(kwargs["device"])
            self.tape.states[index] = (_generator(device).get_state(), device)
        return True

    def _depart(self, why: str) -> None:
        self.departure = why
        self.tape.in_order = False
        self.tape.departed = True

    def _pack(self, tensor: torch.Tensor) -> Any:
        save = self.save
        self.save = save + 1
        if self.departure is None:
            saves = self.compiled.script.saves
            if save >= len(saves):
                self._depart(f"autograd saved more than the {len(saves)} tensors of the plan")
            else:
                number = saves[save]
                if number != KEPT:
                    known = self.tape.made.get(number)
                    if known is not None and tensor.layout is torch.strided and known() is tensor.untyped_storage():
                        return Handle(self.tape, save, tensor)
                    self._depart(f"save {save} is not the tensor of the plan")
        # With hooks on, autograd leaves the check for writes between forward and backward to them.
        if tensor.is_leaf:
            return tensor, tensor._version
        if type(tensor) is not torch.Tensor:
            return tensor.detach(), tensor._version
        with torch._C._DisableTorchDispatch():  # else this very mode would be asked, in Python
            return tensor.detach(), tensor._version


def _unpack(packed: Any) -> torch.Tensor:
    if type(packed) is Handle:
        return packed.tape.materialise(packed)
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    found: torch.Tensor = tensor
    return found
