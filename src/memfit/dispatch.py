"""What the dispatcher shows: which calls count as operations, which tensors and storages they touch, which they write.

Capture counts operations in fake runs and the engine counts them in real ones; both must count alike, so the rules live here, below both.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Self

import torch
from torch._ops import OpOverload
from torch.nn.modules import module as _hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

try:  # what tells torch.compile to leave a function alone
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    _NEVER_COMPILED: Any = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
except ImportError:  # another torch
    _NEVER_COMPILED = None

aten = torch.ops.aten

# `detach` is called a different number of times on fake and on real tensors, and never allocates.
IGNORED: Final = frozenset({"aten::detach", "aten::lift_fresh", "aten::alias", "aten::is_pinned"})

# Batch norm's running statistics are written without saying so in the schema: operation -> positions of (training flag, written arguments).
BATCH_NORMS: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "aten::native_batch_norm": (5, (3, 4)),
    "aten::_native_batch_norm_legit": (5, (3, 4)),
    "aten::cudnn_batch_norm": (5, (3, 4)),
    "aten::miopen_batch_norm": (5, (3, 4)),
}
_ALWAYS_TRAINING_BATCH_NORMS: Final[Mapping[str, tuple[int, ...]]] = {"aten::_batch_norm_with_update": (3, 4)}

# Libraries whose operations are known to be functions of their inputs (and the default generator, where tagged).
_KNOWN_LIBRARIES: Final = frozenset({"aten", "prims", "mkldnn", "torchvision", "quantized"})

# Recurrent layers in one kernel: dropout between them draws from a buffer of the library's own and moves it on, which no generator's state puts back. The
# buffer is filled in the first call after the generator's seed or state was set, by a number from the generator.
OWN_RANDOM_STATE: Final = frozenset({"aten::_cudnn_rnn", "aten::miopen_rnn", "memfit::cudnn_rnn"})
SETS_UP: Final[Mapping[str, frozenset[str]]] = {
    "aten::_cudnn_rnn": frozenset(
        {"aten::empty", "aten::random_", "aten::_local_scalar_dense", "aten::_cudnn_init_dropout_state"}
    )
}

# Arguments with which an operation that may draw draws nothing where they are zero or false.
_NOT_RANDOM_IF_ZERO: Final = frozenset({"dropout_p", "dropout", "train"})

# Operations that look inside storages, resize them or make new aliases in ways that cannot be run again.
_NEVER_AGAIN: Final = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::record_stream",
        "aten::_pin_memory",
        "aten::lift",
    }
)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` torch calls as it is.

    Torch wraps that of every mode, so that torch.compile looks neither into it nor into what it calls. Here the function itself is marked so, which saves
    the wrapper: a fifth of what handing an operation to Python and back takes.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        handler = cls.__dict__.get("__torch_dispatch__")
        if handler is not None and _NEVER_COMPILED is not None:
            set_code_exec_strategy(handler.__code__, _NEVER_COMPILED)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return _NEVER_COMPILED is None


@cache
def is_operation(func: OpOverload) -> bool:
    """Whether a dispatched call counts: not a query (device, size), not a bare alias."""
    name = func._schema.name  # noqa: SLF001
    if name.startswith(("prim::", "profiler::")) or name in IGNORED:
        return False
    return not (name.startswith("aten::sym_") or name in {"aten::is_contiguous", "aten::is_strides_like_format"})


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Tensors among an operation's arguments or results, in order; operations nest at most lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a plain strided view of one storage (not sparse, nested or opaque, nor the zeros without bytes of forward-mode derivatives)."""
    return (
        tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_mkldnn and not tensor._is_zerotensor()  # noqa: SLF001 - torch has no public word for it
    )


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written; 0 of one made in inference mode, whose writes nobody counts."""
    try:
        return tensor._version  # noqa: SLF001 - the count of writes has no public name
    except RuntimeError:  # asked beforehand, thousands of tensors in each step would take twice as long
        return 0


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether the tensor is made of others: indices and values, or the values and sizes of a strided nested one."""
    return bool(_parts_of(tensor))


def laid_in(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors with a storage each, in which all of a tensor's bytes lie: itself, or what a sparse one or a wrapper is made of; none of an opaque one."""
    # Nested ones are wrappers, and torchao's 8-bit state, which says that it is as large as in 32 bits.
    if is_traceable_wrapper_subclass(tensor):
        inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        # A sharded one names its mesh, too.
        return tuple(storage for part in inside if isinstance(part, torch.Tensor) for storage in laid_in(part))
    if has_storage(tensor):
        return (tensor,)
    with torch.no_grad(), _disable_current_modes():  # a fake mode would show other storages
        parts = tuple(getattr(tensor, name)() for name in _parts_of(tensor))
    return tuple(part for part in parts if has_storage(part) and part.device == tensor.device)


def _parts_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """Methods that give what a sparse tensor, or a nested one that is no wrapper, lies in."""
    nested = tensor.layout is torch.strided and tensor.is_nested
    return _NESTED_PARTS if nested else _SPARSE_PARTS.get(tensor.layout, ())


# The sizes are on the CPU, whatever the device of the values.
_NESTED_PARTS: Final = ("values", "_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")
_SPARSE_PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage while it lives; addresses are reused after its death."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((t, n) for n, t in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# Whether an argument, or an item of a list among them, needs a gradient; one call into C, since the engine asks it for each operation.
wants_gradient = torch._C._any_requires_grad  # noqa: SLF001


@cache
def _written_positions(func: OpOverload) -> tuple[tuple[int, ...], tuple[str, ...]]:
    positions: list[int] = []
    names: list[str] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions.append(index)
            names.append(argument.name)
    return tuple(positions), tuple(names)


def batch_norm_statistics(func: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the running statistics that this call updates; empty for anything but a training batch norm."""
    name = func._schema.name  # noqa: SLF001
    if name in BATCH_NORMS:
        flag, positions = BATCH_NORMS[name]
        return positions if len(args) > flag and args[flag] else ()
    return _ALWAYS_TRAINING_BATCH_NORMS.get(name, ())


def written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensor arguments the call changes in place, batch norm's statistics left out (the engine handles those)."""
    positions, names = _written_positions(func)
    if not positions:
        return []
    statistics = batch_norm_statistics(func, args)
    out: list[torch.Tensor] = []
    for position, name in zip(positions, names, strict=True):
        if position in statistics:
            continue
        value = args[position] if position < len(args) else kwargs.get(name)
        out.extend(tensors_in(value))
    return out


def is_random(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws from the default generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.name in _NOT_RANDOM_IF_ZERO:
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            if isinstance(value, (bool, int, float)) and not value:
                return False
    return True


def sets_up(func: OpOverload, following: OpOverload) -> bool:
    """Whether a call, where the next one of a step is `following`, sets up what that one draws from: no step has it that finds it set up."""
    return func._schema.name in SETS_UP.get(following._schema.name, ())  # noqa: SLF001


def is_sized_by_values(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the results are as large as values of the arguments decide: nonzero and its like, indices of booleans, and what is packed by lengths."""
    if func is aten._pack_padded_sequence.default:  # noqa: SLF001 - torch forgets its tag
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    return func is not aten.index.Tensor or any(t.dtype in MASKS for t in tensors_in(args[1]))


MASKS: Final = frozenset({torch.bool, torch.uint8})


def is_rerunnable(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, known: Container[str] = ()
) -> bool:
    """Whether a second call on the same inputs gives the same bits and does nothing else.

    Args:
        func, args, kwargs: the call.
        known: names of operations, "library::name", that are known to; of libraries not known here none other is trusted.
    """
    name = func._schema.name  # noqa: SLF001
    if name in _NEVER_AGAIN or not (name.split("::")[0] in _KNOWN_LIBRARIES or name in known):
        return False
    if name in OWN_RANDOM_STATE and is_random(func, args, kwargs):
        return False
    if kwargs.get("generator") is not None:
        return False  # the user's own generator; its state is not ours to rewind
    inputs = list(tensors_in(args)) + list(tensors_in(kwargs))
    # Of a sparse tensor there is no one storage to hold until it runs again.
    return all(type(t) in _PLAIN_TYPES or _is_fake(t) for t in inputs) and not any(
        not has_storage(t) or t.is_conj() or t.is_neg() for t in inputs
    )


_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"


class ForwardLeftError(Exception):
    """Leaves a forward on purpose where a call of a module has ended: torch tells hooks of modules, which are always called, that the calls have failed.

    Args:
        module: whose call has ended.
        kwargs, result: of that call; such hooks are told of neither.
    """

    def __init__(self, module: torch.nn.Module, kwargs: Mapping[str, Any], result: object) -> None:
        super().__init__()
        self.module, self.kwargs, self.result = module, kwargs, result


class ModulePaths:
    """Follows which module is running, by global forward hooks that live as long as the `with` block.

    Attributes:
        position: called where a module begins and ends; None for nothing. What it returns, where that is not None, is noted in `calls`.
        found: called with a module whose call begins; what it returns is noted in `calls`, too. None for nothing.
        passed: called with the arguments and with the result of a call when it has ended; what it returns is noted in `calls`, too.
        calls: of each call of a module of the model, in the order in which they began: the module's path, the position at its begin and at its end, how
            deep it is in others, what was passed in and out, and what it found. Calls without gradients are left out: nothing is saved in them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.position: Callable[[], tuple[int, int] | None] | None = None
        self.found: Callable[[torch.nn.Module], Any] | None = None
        self.passed: Callable[[object], Any] | None = None
        self.calls: list[list[Any]] = []
        self._running = threading.local()  # micro-batches of a streamed step run in threads
        self._handles: list[Any] = []

    @property
    def _stack(self) -> list[str]:
        try:
            stack: list[str] = self._running.stack
        except AttributeError:
            stack = self._running.stack = []
        return stack

    @property
    def current(self) -> str:
        """Path of the innermost running module of the model; "" outside."""
        return self._stack[-1] if self._stack else ""

    @property
    def depth(self) -> int:
        """How many modules are running, one inside the other."""
        return len(self._stack)

    def __enter__(self) -> Self:
        self._handles = [
            _hooks.register_module_forward_pre_hook(self._enter),
            _hooks.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._running = threading.local()

    def _enter(self, module: torch.nn.Module, _args: object) -> None:
        name = self._names.get(id(module))
        self._stack.append(self.current if name is None else name)
        if name is not None and self.position is not None and torch.is_grad_enabled():
            position = self.position()
            found = self.found(module) if self.found is not None and position is not None else None
            self.calls.append([name, position, None, len(self._stack), None, None, found])

    def _leave(self, module: torch.nn.Module, args: object, *kwargs_and_output: object) -> None:
        if self.position is not None and id(module) in self._names:
            depth = len(self._stack)
            for call in reversed(self.calls):
                if call[2] is None and call[3] == depth:
                    call[2] = self.position()
                    # A call that has failed is told of without its keyword arguments.
                    error = sys.exception()
                    if isinstance(error, ForwardLeftError) and error.module is module:
                        kwargs_and_output = error.kwargs, error.result
                    if self.passed is not None and len(kwargs_and_output) == 2:
                        kwargs, output = kwargs_and_output
                        call[4], call[5] = self.passed((args, kwargs)), self.passed(output)
                    break
        if self._stack:
            self._stack.pop()


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Distinct storages under the tensors, by key."""
    return {storage_key(part): part.untyped_storage() for t in tensors for part in laid_in(t)}
