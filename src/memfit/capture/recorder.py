"""Record a step, operation by operation and storage by storage.

A dispatch mode sees every kernel of forward, backward and optimizer; weak references to storages tell when each is freed; saved-tensor hooks tell what
autograd saves. torch has a memory tracker too (`torch.distributed._tools.MemTracker`), which adds bytes up by module; a planner needs each storage, and when
it is freed both with and without autograd holding it.

To learn both from one run, the hooks give autograd nothing to hold. [1] At pack the tensor is replaced by a `_Placeholder` (its geometry, and in real
runs a private copy of its contents). [2] The storage is then freed as if autograd had not saved it: its transient death. [3] At unpack the backward node
gets a fresh tensor, which is recorded as the same storage. [4] The death of that fresh tensor tells when the node releases it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type

from memfit import dispatch
from memfit.capture.calls import CallSpec, ResultLayouts, TensorLayout, describe, layout_of
from memfit.capture.constants import run_recorded
from memfit.capture.cuda.attention import is_seed
from memfit.capture.cuda.recurrent import NAME as RECURRENT
from memfit.capture.cuda.rms_norm import NAME as RMS_NORM
from memfit.capture.in_place import UnwatchedBackward
from memfit.capture.known_results import DEVICE
from memfit.capture.layouts import laid_out
from memfit.capture.lifetimes import Lifetimes
from memfit.capture.numbers_kept import NumbersKept
from memfit.capture.products import ProductsBackward
from memfit.capture.resized import Resized, rerunnable_where_gathered
from memfit.capture.sparse import alias_of, is_sparse_fake, is_taken_over, run_metered, takes_or_makes_sparse
from memfit.capture.unseen_writes import UnseenWrites
from memfit.capture.views_made_anew import ViewsMadeAnew
from memfit.sharding.collectives import collective_of, workspace_bytes
from memfit.step.call_arguments import is_plain, tensors_passed
from memfit.step.other_kernels import compiled, running_compiled
from memfit.storage.raw_bytes import flat_storage
from memfit.techniques.registry import REPEATABLE
from memfit.values.trace import BEFORE_STEP, Category, Operation, Phase, Save, Storage

if TYPE_CHECKING:
    from torch._ops import OpOverload

# CUDA's kernels that have a stand-in of memfit's own, as torch has no meta kernel for them.
_REPEATABLE: Final = REPEATABLE | {RECURRENT, RMS_NORM}


@dataclass(slots=True)
class _SavedTensor:
    storage: int
    by: int
    module: str
    packed: int
    unpacks: list[list[int | None]] = field(default_factory=list)
    freed: int | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Placeholder:
    """What autograd holds in place of a saved tensor."""

    save: int
    tensor: torch.Tensor | None  # parameters and others from before the step are handed back as they are
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    contents: _Contents | None = None
    packed_after: int = -1


class Recorder(dispatch.DispatchMode):
    """Dispatch mode that records the step.

    Args:
        paths: tells which module is running.
        ranks: of the group whose collectives the step takes part in; none on one device.
        backend: of that group in training, "gloo" or "nccl".
        as_written: what is compiled runs as single operations in training, too; else a compiled function is refused.
        layouts: by call, the layouts of what real kernels return, where fake kernels are known to return others.
        views: tells what autograd runs on fake tensors alone, which is left out; None to record it.

    In a fake run, operations whose tensors are all real (the batch and what is computed from it alone) run for real, so that branches on their
    values are taken as in training.
    """

    def __init__(
        self,
        paths: dispatch.ModulePaths,
        layouts: Mapping[str, ResultLayouts] | None = None,
        ranks: tuple[int, ...] = (),
        backend: str = "",
        *,
        as_written: bool = False,
        device: str | None = None,
        views: ViewsMadeAnew | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths = paths
        self._ranks = ranks
        self._backend = backend
        self._as_written = as_written
        self._layouts = layouts or {}
        self._views = views
        self.phase = Phase.FORWARD
        self.events: list[int] = []
        self.operations: list[Operation] = []
        self.lifetimes = Lifetimes(device)
        self._resized = Resized(self.lifetimes)
        self.saves: list[_SavedTensor] = []
        self.changed: set[int] = set()  # storages written in place, running statistics included
        self.calls: dict[str, CallSpec] = {}
        self.notes: dict[str, None] = {}
        self.recording = True
        paths.position = self._position
        paths.passed = self._passed
        self.unrecorded: list[str] = []  # operations that ran while nothing was recorded
        self._making_fresh_tensor = False
        # Storages of sparse and nested results: the engine sees no result that is one of these alone, so it can hold none for another run.
        self._inside: set[int] = set()
        self.fakes_sparse = False  # fake tensors do not tell how many elements a sparse one has
        self.overwritten = False  # something autograd saved was written before backward read it
        self._last_write: dict[int, int] = {}
        # Of storages that no recorded operation made: where they were made, else where they were first read.
        self._first_met: dict[int, int] = {}
        self._of_others: set[int] = set()  # of these, the ones that lie in memory which is not torch's (`from_numpy`)
        self._lifted: set[int] = set()  # of these, the ones that torch said it had made of numbers (`torch.tensor`)
        self._unwatched = UnwatchedBackward(self.lifetimes)
        self._products = ProductsBackward(self.lifetimes)
        self._numbers = NumbersKept(self.lifetimes)
        self._unseen = UnseenWrites()
        self._packed: dict[int, weakref.ref[_Placeholder]] = {}
        self._copies: dict[int, weakref.ref[_Contents]] = {}
        self._backward_module = ""
        self._times = 1.0

    def stands_for(self, times: float) -> None:
        """From now on an operation stands for as many like it."""
        self._times = times

    def _position(self) -> tuple[int, int] | None:
        """Operations and saves of forward so far; None where forward is not being recorded."""
        return (len(self.operations), len(self.saves)) if self.recording and self.phase is Phase.FORWARD else None

    def _passed(self, passed: object) -> tuple[tuple[int, ...], bool]:
        """Storages of the tensors that are passed into or out of a call of a module, and whether there is nothing else among them but plain values."""
        tensors = [t for t in dispatch.tensors_in(passed) if is_plain(t) and dispatch.has_storage(t)]
        known = (self.lifetimes.id_of(t) for t in tensors)
        return tuple(dict.fromkeys(s for s in known if s is not None)), tensors_passed(passed) is not None

    # -- storages ------------------------------------------------------------------------------------------------------------

    def register(
        self, tensors: Iterable[torch.Tensor], category: Category, module: str = "", *, counts: bool = True
    ) -> None:
        """Add storages that exist before the step; a storage keeps its first category. Those that are not to count (on another device) get zero bytes."""
        for tensor in (part for each in tensors for part in dispatch.laid_in(each)):
            if self.lifetimes.id_of(tensor) is None:
                sid = self.lifetimes.add(tensor, category, module, BEFORE_STEP)
                self.lifetimes.storages[sid].bytes *= counts

    def register_resized(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add storages that are there before the step and take bytes only at times, as whoever owns them resizes them."""
        for tensor in tensors:
            self._resized.watch(tensor)

    def recategorise(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Change the category of storages that the step has made."""
        for tensor in tensors:
            sid = self.lifetimes.id_of(tensor) if dispatch.has_storage(tensor) else None
            if sid is not None and self.lifetimes.storages[sid].birth != BEFORE_STEP:
                self.lifetimes.storages[sid].category = category

    def made_in_step(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made the storage of a tensor."""
        sid = self.lifetimes.id_of(tensor) if dispatch.has_storage(tensor) else None
        return sid is not None and self.lifetimes.storages[sid].birth != BEFORE_STEP

    def storage_id(self, tensor: torch.Tensor) -> int:
        """Number of the tensor's storage. One not seen before was made by no recorded operation (a constant, another library) and counts as there before."""
        sid = self.lifetimes.id_of(tensor)
        if sid is None:
            sid = self.lifetimes.add(tensor, Category.OTHER, self.module, BEFORE_STEP)
            self._first_met[sid] = len(self.events)
            if not isinstance(tensor, FakeTensor) and not tensor.untyped_storage().resizable():
                self._of_others.add(sid)
        return sid

    def met_bytes(self) -> tuple[int, ...]:
        """Of each storage that was there before the step, is there after it, and was not registered."""
        storages = (self.lifetimes.storages[sid] for sid in self._first_met)
        return tuple(s.bytes for s in storages if s.birth == BEFORE_STEP and s.death is None)

    def record_state(self, state: torch.Tensor, operation: str | None) -> None:
        """Record a tensor that was made between two operations, by no kernel.

        Args:
            state: the tensor.
            operation: name of an operation to record as its maker; None for none, then it is born at the next operation.
        """
        event = len(self.events)
        made = self.lifetimes.add(state, Category.OTHER, self.module, event)
        if operation is not None:
            self.lifetimes.now = event
            self.events.append(len(self.operations))
            self.operations.append(
                Operation(operation, self.phase, self.module, (), (), (made,), 0.0, 0, False, False, "", (0,))
            )

    # -- operations ----------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> str:
        """Path of the module to which the current operation belongs."""
        return self.paths.current if self.phase is Phase.FORWARD else self._backward_module

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note what it reads, writes and makes."""
        if self.phase is Phase.OPTIMIZER and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # its class runs others in its place, on what it wraps
        with (
            torch._C.DisableTorchFunction()
        ):  # a mode for functions (`CudaKernels`) would be asked about every look at a shape
            return self._ran(func, args, kwargs)

    def _ran(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # as the fake mode would say: autograd asks it of every gradient
        kwargs = kwargs or {}
        if self._making_fresh_tensor:
            return func(*args, **kwargs)
        if self._views is not None and self._views.made_by_autograd(func, args, kwargs):
            return func(*args, **kwargs)
        is_operation = dispatch.is_operation(func)
        forward = self.phase is Phase.FORWARD
        if is_operation and forward and not self._as_written and (name := running_compiled()):
            raise compiled(f"{name}, which runs in {self.paths.current or 'the step'},")
        if not self.recording or not is_operation:
            if is_operation:
                self.unrecorded.append(str(func))
            result = run_recorded(func, list(dispatch.tensors_in((args, kwargs))), args, kwargs)
            if self.recording and func is _LIFT and dispatch.has_storage(result):
                self._lifted.add(self.storage_id(result))
            return result
        self._numbers.mark()
        self._resized.look(len(self.events))
        inputs = [*dispatch.tensors_in(args), *dispatch.tensors_in(kwargs)]
        sparse = takes_or_makes_sparse(func, inputs)
        self.fakes_sparse |= any(is_sparse_fake(t) for t in inputs)
        if not all(dispatch.has_storage(t) for t in inputs):
            if not all(map(dispatch.laid_in, inputs)):
                self.notes[f"{func} takes an opaque tensor, which has no storage to record; it is kept"] = None
            inputs = [part for t in inputs for part in dispatch.laid_in(t)]
        in_place_func = self._in_place(func, args, kwargs) if self.phase is Phase.BACKWARD else None
        target = None if in_place_func is None else self.storage_id(args[0])
        reads = tuple(self.storage_id(t) for t in inputs)
        if forward:
            for tensor, read in zip(inputs, reads, strict=True):
                self._unseen.read(tensor, read, self.module)
        writes = tuple(
            dict.fromkeys(self.storage_id(t) for t in dispatch.written(func, args, kwargs) if dispatch.has_storage(t))
        )
        self.changed.update(writes)
        for position in dispatch.batch_norm_statistics(func, args):
            if isinstance(args[position], torch.Tensor):
                self.changed.add(self.storage_id(args[position]))
        recorded_func = in_place_func or func
        among = collective_of(func, args, self._ranks) if self._ranks else None
        # What backward is handed of one storage is so many tensors here (`_unpack`), and one in the step.
        key, call = (
            describe(recorded_func, args, kwargs, self.storage_id)
            if among is None
            else (str(func), CallSpec(func, (), {}))
        )
        random = dispatch.is_random(func, args, kwargs)
        rerunnable = dispatch.is_rerunnable(func, args, kwargs, known=_REPEATABLE) and self._inside.isdisjoint(reads)
        needs_gradient = forward and dispatch.wants_gradient(*args)
        event = len(self.events)
        index = len(self.operations)
        self.events.append(index)
        if sparse:
            run = partial(run_recorded, func, inputs, args, kwargs)
            if self.phase is Phase.BACKWARD and is_taken_over(func, args):
                run = partial(alias_of, args[0])
            result, workspace = run_metered(run)
            self.lifetimes.add_bytes(workspace, Category.TEMPORARY, self.module, event).death = event
        else:
            result = run_recorded(func, inputs, args, kwargs)
        if key in self._layouts:
            result = laid_out(result, iter(self._layouts[key]))
        self.lifetimes.now = event
        made: list[int] = []
        layouts: list[TensorLayout | None] = []
        outputs: list[int] = []
        category = Category.ACTIVATION if forward else Category.TEMPORARY
        in_place = _returns_written_argument(func)
        for out in dispatch.tensors_in(result):
            layouts.append(None)
            known = self.lifetimes.id_of(out) if dispatch.has_storage(out) else None
            self.fakes_sparse |= is_sparse_fake(out)
            if in_place and dispatch.has_storage(out) and known is None:
                # A fake value was written into a real tensor (one computed from the batch alone): torch returns a fake copy, which a real step does not make.
                outputs.append(-1)
                continue
            if not dispatch.has_storage(out):
                rerunnable = False
                outputs.append(-1)
                new = [part for part in dispatch.laid_in(out) if self.lifetimes.id_of(part) is None]
                inside = [self.lifetimes.add(part, category, self.module, event) for part in new]
                self._inside.update(inside)
                made += inside
                continue
            if target is not None and known is None:
                # Without a dispatch mode the result is in the storage of the first argument.
                self.lifetimes.move(target, out)
                writes = (target,)
                outputs.append(-1)
            elif known is not None:
                outputs.append(made.index(known) if known in made else -1)
                layouts[-1] = layout_of(out) if known in made else None
            else:
                outputs.append(len(made))
                layouts[-1] = layout_of(out)
                made.append(self.lifetimes.add(out, category, self.module, event))
                if is_seed(func, out):
                    self.lifetimes.storages[made[-1]].bytes = 0
                if forward:
                    self._unseen.made(func, out, made[-1])
        for s in writes:
            self._last_write[s] = event
        if forward and writes:
            self._unseen.wrote(inputs, reads, writes)
        else:
            self._unseen.forget(writes)
        self._unwatched.ran(reads, made)
        self._numbers.ran(func, args, result, self.module, event)
        if self.phase is Phase.BACKWARD:
            self._numbers.ran_in(torch._C._current_autograd_node(), event)
            self._products.ran(event, self.module)
        if dispatch.is_sized_by_values(func, args):
            key = f"{key} -> {[self.lifetimes.storages[s].bytes for s in made]}"
        if among is None and key not in self.calls:
            call.made_bytes = tuple(self.lifetimes.storages[s].bytes for s in made)
            call.layouts = tuple(layouts)
            call.written = bool(writes)
            call.metered = sparse
            self.calls[key] = call
        self.operations.append(
            Operation(
                str(recorded_func),
                self.phase,
                self.module,
                reads,
                writes,
                tuple(made),
                0.0,
                0 if among is None else workspace_bytes(func, args, self._backend),
                random,
                rerunnable,
                key,
                tuple(outputs),
                needs_gradient,
                dispatch.is_sized_by_values(func, args),
                call.shape,
                call.same_layout,
                among,
                times=self._times,
            )
        )
        return result

    def _in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
        self._enter_node()
        return self._unwatched.in_place(func, args, kwargs)

    def _enter_node(self) -> None:
        if self._unwatched.enter_node():
            self.notes[
                f"backward of a product in {self._backward_module or 'the model'}: autograd takes one formula where the input has a zero and another one, "
                "which takes less, where it has none; the bytes of the larger are counted"
            ] = None

    # -- autograd's saved tensors --------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, where forward and loss run, the saves of autograd are recorded."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Placeholder:
        if not dispatch.has_storage(tensor) or not self.recording:
            return _Placeholder(-1, tensor.detach())
        sid = self.storage_id(tensor)
        self._unseen.read(tensor, sid, self.paths.current)
        save = len(self.saves)
        # Inputs are packed before their operation runs; outputs after it, and detached. So what has a grad_fn, or is a leaf that requires grad, is an input.
        is_input = tensor.grad_fn is not None or (tensor.is_leaf and tensor.requires_grad)
        self.saves.append(
            _SavedTensor(sid, len(self.events) - (not is_input), self.paths.current, len(self.events) - 1)
        )
        if self.lifetimes.storages[sid].birth == BEFORE_STEP:
            return self._tracked(_Placeholder(save, tensor if tensor.is_leaf else tensor.detach()))
        placeholder = self._tracked(
            _Placeholder(
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
            placeholder.contents = self._copy_of(sid, tensor)
        elif tensor.is_conj() or tensor.is_neg():
            return self._tracked(_Placeholder(save, tensor.detach()))
        return placeholder

    def _tracked(self, placeholder: _Placeholder) -> _Placeholder:
        # Autograd frees what it packed only when the node is done and its results are checked, a little after the unpacked tensor is released.
        number = placeholder.save
        save = self.saves[number]
        placeholder.packed_after = len(self.events) - 1

        def freed(_: object) -> None:
            save.freed = self.lifetimes.now
            self._unwatched.freed(number)

        self._packed[placeholder.save] = weakref.ref(placeholder, freed)
        return placeholder

    def _copy_of(self, sid: int, tensor: torch.Tensor) -> _Contents:
        reference = self._copies.get(sid)
        contents = reference() if reference is not None else None
        if contents is None:
            with _disable_current_modes():
                contents = _Contents(_clone(tensor.untyped_storage()))
            self._copies[sid] = weakref.ref(contents)
        return contents

    def _unpack(self, placeholder: _Placeholder) -> torch.Tensor:
        if placeholder.save < 0:
            assert placeholder.tensor is not None
            return placeholder.tensor
        save = self.saves[placeholder.save]
        event = len(self.events)
        self._resized.look(event)
        if self._last_write.get(save.storage, -1) > placeholder.packed_after:
            self.overwritten = True
        self.events.append(~placeholder.save)
        self.lifetimes.now = event
        self._enter_node()
        self._unwatched.unpacked(placeholder.save)
        self._backward_module = save.module
        self._products.ran(event, save.module, _shape_of(placeholder))
        if placeholder.tensor is not None:
            save.unpacks.append([event, event])
            return placeholder.tensor
        unpack: list[int | None] = [event, None]
        save.unpacks.append(unpack)
        if placeholder.contents is not None:
            with _disable_current_modes():
                storage = _clone(placeholder.contents.storage)
                tensor = torch.empty(0, dtype=placeholder.dtype, device=placeholder.device)
                tensor.set_(storage, placeholder.offset, placeholder.shape, placeholder.stride)
        else:
            self._making_fresh_tensor = True  # making it is not part of the step, and it must be fake
            tensor = _made_empty(placeholder)
            self._making_fresh_tensor = False

        def released(event: int) -> None:
            unpack[1] = event

        self.lifetimes.lend(save.storage, tensor, released)
        return tensor

    # -- the result ----------------------------------------------------------------------------------------------------------

    def tables(self) -> tuple[tuple[Operation, ...], tuple[Storage, ...], tuple[Save, ...]]:
        """What was recorded; whatever is still live outlives the step."""
        end = len(self.events)
        self._resized.look(end)
        saved = {save.storage for save in self.saves}
        storages = tuple(
            Storage(
                0 if sid in self._of_others and s.death is not None else s.bytes,
                Category.TEMPORARY if s.category is Category.ACTIVATION and sid not in saved else s.category,
                s.module,
                self._birth(sid),
                end if s.death is None else s.death,
            )
            for sid, s in enumerate(self.lifetimes.storages)
        )
        saves = tuple(
            Save(
                s.storage,
                s.by,
                tuple((int(u or 0), end if r is None else r) for u, r in s.unpacks),
                end if s.freed is None else s.freed,
                s.packed,
            )
            for s in self.saves
        )
        operations = self._unseen.kept(self.operations)
        operations = _without_rewinding(operations)
        operations = rerunnable_where_gathered(operations, self.events, saves, self._resized.spans(end))
        return operations, storages, saves

    def _birth(self, sid: int) -> int:
        """Where a storage was made, as far as that is known; a constant that stays is there before the step."""
        storage, met = self.lifetimes.storages[sid], self._first_met.get(sid)
        if storage.birth != BEFORE_STEP or storage.death is None or met is None:
            return storage.birth
        # What goes with the operation that was the first to read it was made for it (`x[0] = 3` makes a tensor of the 3).
        return met if sid in self._lifted or storage.death == met else BEFORE_STEP

    def gathered(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """As `Trace` has it."""
        spans = self._resized.spans(len(self.events))
        return tuple((handle, tuple((int(a), int(b)) for a, b in each)) for handle, each in spans.items())


_LIFT: Final = torch.ops.aten.lift_fresh.default
_OWN_RANDOM_STATE: Final = tuple(f"{name.replace('::', '.')}." for name in dispatch.OWN_RANDOM_STATE)


def _without_rewinding(operations: Sequence[Operation]) -> Sequence[Operation]:
    """The operations, of which none that draws may run again where one draws from a state of its own: to rewind the generator would set that up anew."""
    if not any(each.random and each.name.startswith(_OWN_RANDOM_STATE) for each in operations):
        return operations
    return [replace(each, rerunnable=each.rerunnable and not each.random) for each in operations]


@cache
def _returns_written_argument(func: OpOverload) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and bool(returns[0].alias_info.is_write)


def _shape_of(placeholder: _Placeholder) -> torch.Size:
    return torch.Size(placeholder.shape) if placeholder.tensor is None else placeholder.tensor.shape


def _made_empty(placeholder: _Placeholder) -> torch.Tensor:
    """A tensor of the geometry of the saved one, where in its storage it begins included."""
    shape, stride, offset = placeholder.shape, placeholder.stride, placeholder.offset
    if offset == 0:
        return torch.empty_strided(shape, stride, dtype=placeholder.dtype, device=placeholder.device)
    end = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else offset
    with torch.no_grad():
        flat = torch.empty_strided((end,), (1,), dtype=placeholder.dtype, device=placeholder.device)
        return flat.as_strided(shape, stride, offset)


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # UntypedStorage.clone copies byte by byte in Python under some modes.
    return flat_storage(storage).clone().untyped_storage()


class _Contents:
    """A private copy of a storage's bytes that can be weakly referenced."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
