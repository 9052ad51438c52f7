"""Write a step down, operation by operation and storage by storage.

A dispatch mode sees every kernel of forward, backward and optimizer; weak references on storages tell when each dies; saved-tensor hooks tell what
autograd keeps. torch has a memory tracker too (`torch.distributed._tools.MemTracker`), which adds bytes up by module; a planner needs the single
storages, with the two deaths of each: with and without autograd holding it.

To learn both from one run the hooks give autograd nothing to hold. [1] At pack the tensor is replaced by a `_StandIn` (its geometry, and for real
runs a private copy of its contents). [2] The storage then dies its transient death. [3] At unpack a fresh tensor is handed to the backward node,
under the identity of the old storage. [4] The death of that fresh tensor tells when the node lets go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit import dispatch
from memfit.values.trace import BEFORE_STEP, Category, Operation, Phase, Save, Storage

if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclass(slots=True)
class TensorSpec:
    """What is needed to make a like tensor later."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int
    place: int  # which of the operation's distinct input storages it lies in


GENERATOR_STATE: Final = "torch.get_rng_state"
"""The name of an operation that is no kernel: it is not timed."""

Layout = tuple[str, tuple[int, ...]]
"""Dtype and strides of a tensor, in elements."""
Layouts = tuple[Layout | None, ...]
"""Of each tensor that an operation returns; None for one that lies in an argument's storage."""


@dataclass(slots=True)
class CallSpec:
    """One call to time: the operation with its arguments, tensors replaced by `TensorSpec`."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made_bytes: tuple[int, ...] = ()
    layouts: Layouts = ()
    written: bool = False


@dataclass(slots=True)
class _Storage:
    bytes: int
    category: Category
    module: str
    birth: int
    death: int | None = None


@dataclass(slots=True)
class _Save:
    storage: int
    by: int
    module: str
    unpacks: list[list[int | None]] = field(default_factory=list)
    freed: int | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class _StandIn:
    """What autograd holds in place of a saved tensor."""

    save: int
    tensor: torch.Tensor | None  # parameters and other lasting tensors are handed back as they are
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    contents: _Contents | None = None
    packed_after: int = -1


class Recorder(TorchDispatchMode):
    """Dispatch mode that writes the step down.

    Args:
        paths: tells the module that is running.
        layouts: by call, how real kernels lay out what they return where the fake ones are known to do it otherwise.

    In a fake run, operations on tensors that are all real (the batch and what is computed from it alone) are really run, so that branches on their
    values are taken as in training.
    """

    def __init__(self, paths: dispatch.ModulePaths, layouts: Mapping[str, Layouts] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths = paths
        self._layouts = layouts or {}
        self.phase = Phase.FORWARD
        self.events: list[int] = []
        self.operations: list[Operation] = []
        self.storages: list[_Storage] = []
        self.saves: list[_Save] = []
        self.changed: set[int] = set()  # storages written in place, running statistics included
        self.calls: dict[str, CallSpec] = {}
        self.notes: dict[str, None] = {}
        self.recording = True
        self.unrecorded: list[str] = []  # operations that ran while nothing was recorded
        self._making_stand_in = False
        self.overwritten = False  # something autograd saved was written before backward read it
        self._last_write: dict[int, int] = {}
        self._node: object = None
        self._read_under_node: set[int] = set()
        self._made_under_node: set[int] = set()
        self._unpacked_under_node: set[int] = set()  # saves that the node still holds
        self._node_holds = False  # whether it ever held any
        self._packed: dict[int, weakref.ref[_StandIn]] = {}
        self._now = BEFORE_STEP
        self._ids: dict[int, int] = {}
        self._keys: dict[
            int, set[int]
        ] = {}  # the same the other way round: a storage handed to backward has a key of its own
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._copies: dict[int, weakref.ref[_Contents]] = {}
        self._backward_module = ""

    # -- storages ------------------------------------------------------------------------------------------------------------

    def register(
        self, tensors: Iterable[torch.Tensor], category: Category, module: str = "", *, counts: bool = True
    ) -> None:
        """Note storages that are there before the step; the first category given to a storage stays. What lies on another device counts nothing."""
        for tensor in tensors:
            if dispatch.has_storage(tensor) and dispatch.storage_key(tensor) not in self._ids:
                storage = self.storages[self._add(tensor, category, module, BEFORE_STEP)]
                storage.bytes *= counts

    def recategorise(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Change the category of storages already known."""
        for tensor in tensors:
            sid = self._ids.get(dispatch.storage_key(tensor)) if dispatch.has_storage(tensor) else None
            if sid is not None and self.storages[sid].birth != BEFORE_STEP:
                self.storages[sid].category = category

    def _add(self, tensor: torch.Tensor, category: Category, module: str, birth: int) -> int:
        storage = tensor.untyped_storage()
        sid = len(self.storages)
        self.storages.append(_Storage(storage.nbytes(), category, module, birth))
        self._follow(storage, sid)
        return sid

    def _follow(self, storage: torch.UntypedStorage, sid: int) -> None:
        key = int(storage._cdata)
        self._know(key, sid)

        def died(_: object, key: int = key, sid: int = sid) -> None:
            self._forget(key, sid)
            self.storages[sid].death = self._now

        self._references[key] = weakref.ref(storage, died)

    def _know(self, key: int, sid: int) -> None:
        self._ids[key] = sid
        self._keys.setdefault(sid, set()).add(key)

    def _forget(self, key: int, sid: int) -> None:
        self._ids.pop(key, None)
        self._references.pop(key, None)
        keys = self._keys.get(sid, set())
        keys.discard(key)
        if not keys:
            self._keys.pop(sid, None)

    def storage_id(self, tensor: torch.Tensor) -> int:
        """Number of the tensor's storage; one never seen before was made out of sight (a constant, another library)."""
        sid = self._ids.get(dispatch.storage_key(tensor))
        return self._add(tensor, Category.OTHER, self.module, BEFORE_STEP) if sid is None else sid

    # -- operations ----------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> str:
        """Path of the module to which the present operation belongs."""
        return self.paths.current if self.phase is Phase.FORWARD else self._backward_module

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note what it reads, writes and makes."""
        kwargs = kwargs or {}
        if self._making_stand_in:
            return func(*args, **kwargs)
        counts = dispatch.is_operation(func)
        if not self.recording or not counts:
            if counts:
                self.unrecorded.append(str(func))
            return _run(func, list(dispatch.tensors_in((args, kwargs))), args, kwargs)
        inputs = [*dispatch.tensors_in(args), *dispatch.tensors_in(kwargs)]
        if not all(dispatch.has_storage(t) for t in inputs):
            self.notes[f"{func} takes a tensor that has no plain storage (sparse or opaque); it is kept"] = None
            inputs = [t for t in inputs if dispatch.has_storage(t)]
        instead = self._in_place_instead(func, args, kwargs) if self.phase is Phase.BACKWARD else None
        target = None if instead is None else self.storage_id(args[0])
        reads = tuple(self.storage_id(t) for t in inputs)
        writes = tuple(
            dict.fromkeys(self.storage_id(t) for t in dispatch.written(func, args, kwargs) if dispatch.has_storage(t))
        )
        self.changed.update(writes)
        for position in dispatch.batch_norm_statistics(func, args):
            if isinstance(args[position], torch.Tensor):
                self.changed.add(self.storage_id(args[position]))
        described = instead or func
        key, call = self._describe(described, args, kwargs)
        random = dispatch.is_random(func, args, kwargs)
        rerunnable = dispatch.is_rerunnable(func, args, kwargs)
        wanted = self.phase is Phase.FORWARD and dispatch.wants_gradient(*args)
        event = len(self.events)
        index = len(self.operations)
        self.events.append(index)
        result = _run(func, inputs, args, kwargs)
        if key in self._layouts:
            result = _laid_out(result, iter(self._layouts[key]))
        self._now = event
        made: list[int] = []
        layouts: list[Layout | None] = []
        outputs: list[int] = []
        category = Category.ACTIVATION if self.phase is Phase.FORWARD else Category.TEMPORARY
        in_place = _returns_what_it_writes(func)
        for out in dispatch.tensors_in(result):
            layouts.append(None)
            if in_place and dispatch.has_storage(out) and dispatch.storage_key(out) not in self._ids:
                # A fake value written into a real tensor (one computed from the batch alone): torch returns a fake copy, the step makes none.
                outputs.append(-1)
                continue
            if not dispatch.has_storage(out):
                rerunnable = False
                continue
            if target is not None and dispatch.storage_key(out) not in self._ids:
                # Without a dispatch mode this very result lies where its first argument was.
                self._inherit(out, target)
                writes = (target,)
                outputs.append(-1)
            elif dispatch.storage_key(out) in self._ids:
                sid = self._ids[dispatch.storage_key(out)]
                outputs.append(made.index(sid) if sid in made else -1)
                layouts[-1] = layout_of(out) if sid in made else None
            else:
                outputs.append(len(made))
                layouts[-1] = layout_of(out)
                made.append(self._add(out, category, self.module, event))
        for s in writes:
            self._last_write[s] = event
        self._read_under_node.update(reads)
        self._made_under_node.update(made)
        if key not in self.calls:
            call.made_bytes = tuple(self.storages[s].bytes for s in made)
            call.layouts = tuple(layouts)
            call.written = bool(writes)
            self.calls[key] = call
        self.operations.append(
            Operation(
                str(described),
                self.phase,
                self.module,
                reads,
                writes,
                tuple(made),
                0.0,
                0,
                random,
                rerunnable,
                key,
                tuple(outputs),
                wanted,
                dispatch.is_sized_by_values(func, args),
            )
        )
        return result

    def _in_place_instead(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
        """The operation that runs instead, on the first argument in place, when no dispatch mode is on.

        Autograd adds gradients up in place, and some backward formulas write into their own fresh tensors, but do neither while a mode watches
        (`isTensorSubclassLike` in ATen). The step to be predicted runs its backward without a mode.
        """
        node = torch._C._current_autograd_node()
        self._at_node(node)
        if not args or not isinstance(args[0], torch.Tensor) or not dispatch.has_storage(args[0]):
            return None
        known = self._ids.get(dispatch.storage_key(args[0]))
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
            done = self._node_holds and not self._unpacked_under_node
            if not done and (known in self._read_under_node or known in self._made_under_node):
                return None
            return torch.ops.aten.add_.Tensor if dispatch.is_dense(old) and _held_once(old) else None
        if known not in self._made_under_node or isinstance(node, torch.autograd.function.FunctionCtx):
            return None
        instead = _WRITES_INTO_ITS_OWN.get(func)
        if instead is None and node is not None and node.name().startswith("BinaryCrossEntropy"):
            instead = _WRITES_IN_CROSS_ENTROPY.get(func)
        # Only the formula can hold what it made, perhaps more than once on the way; no other tensor may share its storage.
        return instead if instead is not None and _storage_held_once(args[0]) else None

    def _at_node(self, node: Any) -> None:
        """Forget about the node before, when another one runs now."""
        if node is not self._node:
            self._node = node
            if node is not None and node.name().startswith(_FORMULA_BY_VALUES):
                self.notes[
                    f"backward of a product in {self._backward_module or 'the model'}: autograd takes a formula by whether its input holds a zero, and another "
                    "one while it is watched, so what it holds meanwhile is not known exactly; a rehearsal measures it"
                ] = None
            self._read_under_node.clear()
            self._made_under_node.clear()
            self._unpacked_under_node.clear()
            self._node_holds = False

    def _inherit(self, tensor: torch.Tensor, sid: int) -> None:
        for key in list(self._keys.get(sid, ())):
            self._forget(key, sid)  # its death no longer counts
        self._follow(tensor.untyped_storage(), sid)

    def _describe(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, CallSpec]:
        places: dict[int, int] = {}

        def spec(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if not dispatch.has_storage(value):
                    return None
                place = places.setdefault(dispatch.storage_key(value), len(places))
                return TensorSpec(
                    tuple(value.shape),
                    tuple(value.stride()),
                    int(value.storage_offset()),
                    value.dtype,
                    value.untyped_storage().nbytes(),
                    place,
                )
            if isinstance(value, (list, tuple)):
                return (
                    type(value)(spec(item) for item in value)
                    if type(value) in (list, tuple)
                    else [spec(i) for i in value]
                )
            return value

        def name(value: Any) -> str:
            if isinstance(value, TensorSpec):
                # The offset is left out: where in its storage a tensor starts does not change what an operation costs.
                return f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride)}@{value.place}"
            if isinstance(value, (list, tuple)):
                return f"({','.join(name(item) for item in value)})"
            return "f" if isinstance(value, float) else repr(value)

        spec_args = spec(tuple(args))
        spec_kwargs = {k: spec(v) for k, v in kwargs.items()}
        words = [str(func), *(name(a) for a in spec_args), *(f"{k}={name(v)}" for k, v in sorted(spec_kwargs.items()))]
        return " ".join(words), CallSpec(func, spec_args, spec_kwargs)

    # -- autograd's saved tensors --------------------------------------------------------------------------------------------

    @contextmanager
    def seeing_generator_states(self, *, as_operations: bool = False) -> Iterator[None]:
        """Inside, generator states that Python code asks for are followed too: `torch.utils.checkpoint` keeps one for each of its regions.

        The generator allocates them itself, out of the dispatcher's sight, so the function that hands them out is replaced meanwhile.

        Args:
            as_operations: write each down as an operation of its own, so that one which is let go before the next kernel counts too. Only where nobody
                follows the operations by number, as an engine's dispatch mode would not see these.
        """
        ask = torch.get_rng_state

        def seen() -> torch.Tensor:
            state = ask()
            if self.recording:
                # Made between two operations: beside nothing that died with the earlier one, and there from the later one on if it has no event of its own.
                made = self._add(state, Category.OTHER, self.module, event := len(self.events))
                if as_operations:
                    self._now = event
                    self.events.append(len(self.operations))
                    self.operations.append(
                        Operation(
                            GENERATOR_STATE, self.phase, self.module, (), (), (made,), 0.0, 0, False, False, "", (0,)
                        )
                    )
            return state

        torch.get_rng_state = seen
        try:
            yield
        finally:
            torch.get_rng_state = ask

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Forward and loss run inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _StandIn:
        if not dispatch.has_storage(tensor) or not self.recording:
            return _StandIn(-1, tensor.detach())
        sid = self.storage_id(tensor)
        save = len(self.saves)
        # What an operation saves of its inputs is packed before it runs, of its outputs after; only inputs still know where they come from.
        upcoming = tensor.grad_fn is not None or (tensor.is_leaf and tensor.requires_grad)
        self.saves.append(_Save(sid, len(self.events) - (not upcoming), self.paths.current))
        if self.storages[sid].birth == BEFORE_STEP:
            return self._watch(_StandIn(save, tensor if tensor.is_leaf else tensor.detach()))
        stand_in = self._watch(
            _StandIn(
                save,
                None,
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()),
                tensor.dtype,
                tensor.device,
            )
        )
        if not isinstance(tensor, FakeTensor):
            stand_in.contents = self._copy_of(sid, tensor)
        elif tensor.is_conj() or tensor.is_neg():
            return self._watch(_StandIn(save, tensor.detach()))
        return stand_in

    def _watch(self, stand_in: _StandIn) -> _StandIn:
        # Autograd lets go of what it packed only when the node is done, after checking its results; what was unpacked goes a little earlier.
        number = stand_in.save
        save = self.saves[number]
        stand_in.packed_after = len(self.events) - 1

        def freed(_: object) -> None:
            save.freed = self._now
            self._unpacked_under_node.discard(number)

        self._packed[stand_in.save] = weakref.ref(stand_in, freed)
        return stand_in

    def _copy_of(self, sid: int, tensor: torch.Tensor) -> _Contents:
        reference = self._copies.get(sid)
        contents = reference() if reference is not None else None
        if contents is None:
            with _disable_current_modes():
                contents = _Contents(_clone(tensor.untyped_storage()))
            self._copies[sid] = weakref.ref(contents)
        return contents

    def _unpack(self, stand_in: _StandIn) -> torch.Tensor:
        if stand_in.save < 0:
            assert stand_in.tensor is not None
            return stand_in.tensor
        save = self.saves[stand_in.save]
        event = len(self.events)
        if self._last_write.get(save.storage, -1) > stand_in.packed_after:
            self.overwritten = True
        self.events.append(~stand_in.save)
        self._now = event
        self._at_node(torch._C._current_autograd_node())
        self._unpacked_under_node.add(stand_in.save)
        self._node_holds = True
        self._backward_module = save.module
        if stand_in.tensor is not None:
            save.unpacks.append([event, event])
            return stand_in.tensor
        unpack: list[int | None] = [event, None]
        save.unpacks.append(unpack)
        if stand_in.contents is not None:
            with _disable_current_modes():
                storage = _clone(stand_in.contents.storage)
                tensor = torch.empty(0, dtype=stand_in.dtype, device=stand_in.device)
                tensor.set_(storage, stand_in.offset, stand_in.shape, stand_in.stride)
        else:
            self._making_stand_in = True  # its making is not part of the step, and it must be fake
            tensor = torch.empty_strided(stand_in.shape, stand_in.stride, dtype=stand_in.dtype, device=stand_in.device)
            self._making_stand_in = False
        fresh = tensor.untyped_storage()
        key = int(fresh._cdata)
        sid = save.storage
        self._know(key, sid)

        def released(_: object) -> None:
            self._forget(key, sid)
            unpack[1] = self._now

        self._references[key] = weakref.ref(fresh, released)
        return tensor

    # -- the result ----------------------------------------------------------------------------------------------------------

    def tables(self) -> tuple[tuple[Operation, ...], tuple[Storage, ...], tuple[Save, ...]]:
        """What was written down, with everything still alive outliving the step."""
        end = len(self.events)
        saved = {save.storage for save in self.saves}
        storages = tuple(
            Storage(
                s.bytes,
                Category.TEMPORARY if s.category is Category.ACTIVATION and sid not in saved else s.category,
                s.module,
                s.birth,
                end if s.death is None else s.death,
            )
            for sid, s in enumerate(self.storages)
        )
        saves = tuple(
            Save(
                s.storage,
                s.by,
                tuple((int(u or 0), end if r is None else r) for u, r in s.unpacks),
                end if s.freed is None else s.freed,
            )
            for s in self.saves
        )
        return tuple(self.operations), storages, saves


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


@cache
def _returns_what_it_writes(func: OpOverload) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and bool(returns[0].alias_info.is_write)


def _held_once(tensor: torch.Tensor) -> bool:
    """Whether only the caller of the dispatched operation holds this tensor and its storage."""
    # Counted inside __torch_dispatch__: one owner below, the arguments above (4 for the tensor), the storage's wrapper made here.
    owners = tensor._use_count()  # type: ignore[attr-defined]
    return owners <= 4 and _storage_held_once(tensor)


def _storage_held_once(tensor: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2


# Results of operations that take no tensor (arange, zeros, ...) are made for real in a fake run up to this size.
LARGEST_REAL_CONSTANT_BYTES: Final = 64 << 20


def _run(func: OpOverload, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(t, FakeTensor) for t in inputs):
        return func(*args, **kwargs)
    if not inputs:
        result = func(*args, **kwargs)
        made = list(dispatch.tensors_in(result))
        if not any(isinstance(t, FakeTensor) for t in made):
            return result
        if sum(t.numel() * t.element_size() for t in made) > LARGEST_REAL_CONSTANT_BYTES:
            return result
        if any(t.device.type == "meta" for t in made):
            return result
    with _disable_current_modes():
        return func(*args, **kwargs)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Its dtype by name, and its strides."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())


def _laid_out(result: Any, layouts: Iterator[Layout | None]) -> Any:
    """Fake results of an operation with the layouts that its real kernel gives."""
    if isinstance(result, (list, tuple)):
        return type(result)(_laid_out(item, layouts) for item in result)
    if not isinstance(result, torch.Tensor):
        return result
    wanted = next(layouts)
    if wanted is None or wanted == layout_of(result) or not isinstance(result, FakeTensor):
        return result
    dtype, strides = wanted
    return torch.empty_strided(tuple(result.shape), strides, dtype=getattr(torch, dtype), device=result.device)


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # UntypedStorage.clone goes through Python a byte at a time under some modes.
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    flat.set_(storage)
    return flat.clone().untyped_storage()


class _Contents:
    """A private copy of a storage's bytes that can be weakly referenced."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
