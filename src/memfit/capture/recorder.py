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
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit import dispatch
from memfit.trace import BEFORE_STEP, Category, Operation, Phase, Save, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@dataclass(slots=True)
class CallSpec:
    """One call to time: the operation with its arguments, tensors replaced by `TensorSpec`."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made_bytes: tuple[int, ...] = ()
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

    In a fake run, operations on tensors that are all real (the batch and what is computed from it alone) are really run, so that branches on their
    values are taken as in training.
    """

    def __init__(self, paths: dispatch.ModulePaths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths = paths
        self.phase = Phase.FORWARD
        self.events: list[int] = []
        self.operations: list[Operation] = []
        self.storages: list[_Storage] = []
        self.saves: list[_Save] = []
        self.calls: dict[str, CallSpec] = {}
        self.notes: dict[str, None] = {}
        self.recording = True
        self._making_stand_in = False
        self.overwritten = False  # something autograd saved was written before backward read it
        self._last_write: dict[int, int] = {}
        self._node: object = None
        self._read_under_node: set[int] = set()
        self._made_under_node: set[int] = set()
        self._packed: dict[int, weakref.ref[_StandIn]] = {}
        self._now = BEFORE_STEP
        self._ids: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._copies: dict[int, weakref.ref[_Contents]] = {}
        self._backward_module = ""

    # -- storages ------------------------------------------------------------------------------------------------------------

    def register(self, tensors: Iterable[torch.Tensor], category: Category, module: str = "") -> None:
        """Note storages that are there before the step; the first category given to a storage stays."""
        for tensor in tensors:
            if dispatch.has_storage(tensor) and dispatch.storage_key(tensor) not in self._ids:
                self._add(tensor, category, module, BEFORE_STEP)

    def recategorise(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Change the category of storages already known."""
        for tensor in tensors:
            sid = self._ids.get(dispatch.storage_key(tensor))
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
        self._ids[key] = sid

        def died(_: object, key: int = key, sid: int = sid) -> None:
            self._ids.pop(key, None)
            self._references.pop(key, None)
            self.storages[sid].death = self._now

        self._references[key] = weakref.ref(storage, died)

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
        if not self.recording or not dispatch.is_operation(func):
            return _run(func, list(dispatch.tensors_in((args, kwargs))), args, kwargs)
        inputs = [*dispatch.tensors_in(args), *dispatch.tensors_in(kwargs)]
        if not all(dispatch.has_storage(t) for t in inputs):
            self.notes[f"{func} takes a tensor that has no plain storage (sparse or opaque); it is kept"] = None
            inputs = [t for t in inputs if dispatch.has_storage(t)]
        target = self._updated_in_place(func, args, kwargs) if self.phase is Phase.BACKWARD else None
        reads = tuple(self.storage_id(t) for t in inputs)
        writes = tuple(
            dict.fromkeys(self.storage_id(t) for t in dispatch.written(func, args, kwargs) if dispatch.has_storage(t))
        )
        key, call = self._describe(func, args, kwargs)
        random = dispatch.is_random(func, args, kwargs)
        rerunnable = dispatch.is_rerunnable(func, args, kwargs)
        event = len(self.events)
        index = len(self.operations)
        self.events.append(index)
        result = _run(func, inputs, args, kwargs)
        self._now = event
        made: list[int] = []
        outputs: list[int] = []
        category = Category.ACTIVATION if self.phase is Phase.FORWARD else Category.TEMPORARY
        for out in dispatch.tensors_in(result):
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
            else:
                outputs.append(len(made))
                made.append(self._add(out, category, self.module, event))
        for s in writes:
            self._last_write[s] = event
        self._read_under_node.update(reads)
        self._made_under_node.update(made)
        if key not in self.calls:
            call.made_bytes = tuple(self.storages[s].bytes for s in made)
            call.written = bool(writes)
            self.calls[key] = call
        self.operations.append(
            Operation(
                str(func),
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
            )
        )
        return result

    def _updated_in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The storage that this result replaces when no dispatch mode is on.

        Autograd adds gradients up in place, and some backward formulas scatter into fresh zeros in place, but do neither while a mode watches
        (`isTensorSubclassLike` in ATen). The step to be predicted runs its backward without a mode. A storage is replaced when nobody else holds it.
        """
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node = node
            self._read_under_node.clear()
            self._made_under_node.clear()
        if func is torch.ops.aten.add.Tensor:
            if kwargs or len(args) != 2 or not all(isinstance(a, torch.Tensor) for a in args):
                return None
            old, new = args
            if old.shape != new.shape or old.dtype != new.dtype:
                return None
            known = self._ids.get(dispatch.storage_key(old))
            if known is None or known in self._read_under_node or known in self._made_under_node:
                return None  # the node's own arithmetic
            for candidate in (old, new):
                sid = self._ids.get(dispatch.storage_key(candidate))
                if sid is not None and _held_once(candidate):
                    return sid
            return None
        if func in _SCATTERS_INTO_ZEROS and isinstance(args[0], torch.Tensor):
            sid = self._ids.get(dispatch.storage_key(args[0]))
            if sid in self._made_under_node and _held_once(args[0]):
                return sid
        return None

    def _inherit(self, tensor: torch.Tensor, sid: int) -> None:
        for key, known in list(self._ids.items()):
            if known == sid:
                del self._ids[key]
                self._references.pop(key, None)  # its death no longer counts
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
            kept = _StandIn(save, tensor if tensor.is_leaf else tensor.detach())
            kept.packed_after = len(self.events) - 1
            return kept
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
        save = self.saves[stand_in.save]
        stand_in.packed_after = len(self.events) - 1

        def freed(_: object) -> None:
            save.freed = self._now

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
        self._ids[key] = save.storage

        def released(_: object) -> None:
            self._ids.pop(key, None)
            self._references.pop(key, None)
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


_SCATTERS_INTO_ZEROS: Final = frozenset(
    {
        torch.ops.aten.index_put.default,
        torch.ops.aten._index_put_impl.default,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.value,
        torch.ops.aten.index_add.default,
        torch.ops.aten.index_fill.int_Scalar,
        torch.ops.aten.masked_fill.Scalar,
        torch.ops.aten.masked_scatter.default,
    }
)


def _held_once(tensor: torch.Tensor) -> bool:
    """Whether only the caller of the dispatched operation holds this tensor and its storage."""
    # Counted inside __torch_dispatch__: one owner below, the arguments above (4 for the tensor), the storage's wrapper made here.
    owners = tensor._use_count()  # type: ignore[attr-defined]
    return owners <= 4 and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2


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
