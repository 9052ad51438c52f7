"""Run the user's model without side effects: generators are restored, and the model's tensors are replaced for the time of the run.

Fake tensors allocate nothing; private copies leave the user's own untouched.

`torch.func.functional_call` does this for one call of one module; a step also holds closures over the model and an optimizer over its parameters, so the
tensors are exchanged inside the modules and put back at the end, together with every attribute that forward may have set.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.batches import Batch, leaves
from memfit.dispatch import DispatchMode, has_storage, storage_key, written
from memfit.step.absent import Absent
from memfit.step.attributes import Attributes, Container, besides_modules, held_by, items_of
from memfit.storage.raw_bytes import flat_storage

# Tensors outside of modules' own attributes are copied up to this size; larger ones are no state of a model, as a rule, but data.
LARGEST_PRIVATE_BYTES: Final = 256 << 20


@contextmanager
def lent(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], loss_fn: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Replace every parameter, buffer and tensor attribute of the model by `make(tensor)` inside the block.

    One tensor used in several places (tied weights) stays one tensor. Everything is put back at exit, attributes set meanwhile included (`Attributes`), those
    of modules that the loss function closes over too, and what is in its lists, dictionaries and objects.

    Tensors further down (in a dictionary of caches, in an object, in a criterion) are private copies with their values, as caches are constants; parameters
    of modules that the model has not registered (a teacher in a list) stay, without their gradients.
    """
    made: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []

    lists: dict[int, list[Any]] = {}  # a list of tensors that several modules share stays one list

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Absent):  # another stage of a pipeline has it
            return tensor
        if id(tensor) not in made:
            keep.append(tensor)
            fresh = make(tensor)
            if isinstance(tensor, nn.Parameter) and fresh is not tensor:
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                # What libraries hang on their parameters (bitsandbytes the scales of a packed weight) is read through the one that is lent, too.
                vars(fresh).update(vars(tensor))
            made[id(tensor)] = fresh
        return made[id(tensor)]

    copied: dict[int, torch.UntypedStorage] = {}

    def private(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in made:
            return made[id(tensor)]
        return tensor if isinstance(tensor, nn.Parameter) else _with_private_storage(tensor, copied)

    own = list(model.modules())
    before, besides = Attributes([*own, *held_by(loss_fn)]), besides_modules(loss_fn)
    mine = {id(module) for module in own}
    others = [p for m in before.modules if id(m) not in mine for p in m._parameters.values() if p is not None]
    gradients = [(parameter, parameter.grad) for parameter in others]
    tables = {id(table) for m in own for table in (m.__dict__, m._parameters, m._buffers)}
    try:
        for parameter in others:
            parameter.grad = None
        for module in own:
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = exchanged(tensor)  # type: ignore[assignment]
            for name, value in list(module.__dict__.items()):
                replaced = _exchange(value, exchanged, lists)
                if replaced is not value:
                    module.__dict__[name] = replaced
        for container in before.containers:
            if id(container) not in tables:
                _exchange_in(container, private)
        yield
    finally:
        before.put_back()
        besides.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _exchange_in(container: Container, private: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if isinstance(container, set):
        return
    for place, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        if isinstance(value, torch.Tensor) or (
            type(value) is tuple and any(isinstance(v, torch.Tensor) for v in value)
        ):
            replaced = _exchange(value, private, {})
            if replaced is not value:
                container[place] = replaced


def _with_private_storage(tensor: torch.Tensor, copied: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A tensor like this one on a copy of its storage, which others that shared it share again; what has no plain storage, or is large, stays."""
    if (
        not has_storage(tensor)
        or tensor.device.type == "meta"
        or type(tensor) is not torch.Tensor
        or tensor.grad_fn is not None
        or tensor.untyped_storage().nbytes() > LARGEST_PRIVATE_BYTES
    ):
        return tensor
    return with_copied_storage(tensor, copied)


def with_copied_storage(tensor: torch.Tensor, copied: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A tensor like this one on a copy of its storage, which is written into `copied` for others that share it."""
    key = storage_key(tensor)
    if key not in copied:
        copied[key] = flat_storage(tensor.untyped_storage()).clone().untyped_storage()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    fresh.set_(copied[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    return fresh.requires_grad_(tensor.requires_grad)


def hidden_parameters(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[tuple[str, nn.Parameter]]:
    """Parameters of modules that the model has not registered (a teacher in a list) or that the loss function holds; each with its path."""
    own = set(model.modules())
    found = {id(p): ("", p) for p in model.parameters()}
    number = len(found)
    for module in Attributes([*own, *held_by(loss_fn)]).modules:  # what is held before what is in it
        if module not in own:
            for path, parameter in module.named_parameters(type(module).__name__):
                found.setdefault(id(parameter), (path, parameter))
    return list(found.values())[number:]


def hidden_to_copy(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[nn.Parameter]:
    """Those of `hidden_parameters` that are copied before they may be written: none where they are more than `LARGEST_PRIVATE_BYTES`, a teacher that rests."""
    hidden = [p for _, p in hidden_parameters(model, loss_fn) if p.device.type != "meta" and has_storage(p)]
    return hidden if sum(p.numel() * p.element_size() for p in hidden) <= LARGEST_PRIVATE_BYTES else []


@contextmanager
def hidden_kept(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """What a forward on fake tensors writes into `hidden_to_copy`, which stay real, is undone at exit. The copies are in the host's memory, as the batch's."""
    hidden = hidden_to_copy(model, loss_fn)
    before = [(p, p.detach(), p._version, p.detach().to("cpu", copy=True)) for p in hidden]
    try:
        yield
    finally:
        for parameter, alias, version, contents in before:
            if storage_key(parameter) != storage_key(alias):
                parameter.data = alias
            if not torch.equal(alias.cpu(), contents):  # writes past autograd (`.data`) change no version
                alias.copy_(contents)
            if parameter._version != version:
                torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))


@contextmanager
def functions_kept(functions: Sequence[Callable[..., Any]], model: nn.Module) -> Iterator[None]:
    """What functions change besides the model is undone at exit: modules and objects that they hold, with their tensors (averages of weights, schedules).

    Args:
        functions: the hooks of an optimizer, called while it steps what is lent.
        model: not looked at.
    """
    if not functions:
        yield
        return
    own = set(model.modules())
    modules = [each for function in functions for each in held_by(function) if each not in own]
    noted = [Attributes(modules), *map(besides_modules, functions)]
    mine = {id(t) for t in (*model.parameters(), *model.buffers())}
    found = {
        id(value): value
        for each in noted
        for container in each.containers
        for value in items_of(container)
        if isinstance(value, torch.Tensor) and id(value) not in mine and _is_kept(value)
    }
    with _disable_current_modes():  # real ones stay real among fake ones, and so do their copies
        before = [(t, t.detach(), t._version, t.detach().to("cpu", copy=True)) for t in found.values()]
    try:
        yield
    finally:
        with _disable_current_modes(), torch.no_grad():
            for tensor, alias, version, contents in before:
                if tensor.untyped_storage().data_ptr() != alias.untyped_storage().data_ptr():
                    tensor.data = alias
                alias.copy_(contents)
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
            for each in noted:
                each.put_back()


def _is_kept(tensor: torch.Tensor) -> bool:
    """Whether it is small enough to be copied, and has values."""
    real = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta" and has_storage(tensor)
    return real and not tensor.is_inference() and tensor.untyped_storage().nbytes() <= LARGEST_PRIVATE_BYTES


@contextmanager
def parameters_kept(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Iterator[Callable[[], list[str]]]:
    """What a real forward writes into parameters (a momentum encoder's average, `p.data = ...`) is undone at exit, versions included; and what it freezes.

    Only what is written is copied, at its first write: a copy of all parameters may be more than there is memory for. Those of `hidden_parameters` are kept,
    too.

    Yields:
        A function that names the parameters written so far.
    """
    named = [*model.named_parameters(), *hidden_parameters(model, loss_fn)]
    before = [(parameter, parameter.detach(), parameter._version) for _, parameter in named]
    trained = [(parameter, parameter.requires_grad) for _, parameter in named]
    gradients = [(parameter, parameter.grad) for parameter, _, _ in before]
    watch = _CopiesAtWrite(storage_key(alias) for _, alias, _ in before if has_storage(alias))
    for parameter, _ in gradients:
        parameter.grad = None  # a forward that runs a backward of its own adds to gradients
    names = [name for name, _ in named]

    def written_so_far() -> list[str]:
        there = [(name, p, alias) for name, (p, alias, _) in zip(names, before, strict=True) if has_storage(alias)]
        return [n for n, p, a in there if storage_key(p) != storage_key(a) or storage_key(a) in watch.contents]

    try:
        with watch:
            yield written_so_far
    finally:
        for parameter, alias, version in before:
            if not has_storage(alias):
                continue
            if storage_key(parameter) != storage_key(alias):
                parameter.data = alias
            contents = watch.contents.get(storage_key(alias))
            if contents is not None:
                flat_storage(alias.untyped_storage()).copy_(contents)
            if parameter._version != version:
                torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))
        for parameter, wanted in trained:
            parameter.requires_grad_(wanted)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def batch_kept(batch: Batch) -> Iterator[None]:
    """What forwards do to the tensors of a batch is undone at exit: what is written (Whisper's masks), versions, what asks for gradients, and these.

    Each is copied first, whatever comes: a capture computes what is real beneath all modes, where nothing sees a first write. Copies are in the host's memory,
    as the bytes of a GPU may be measured meanwhile.
    """
    before = [
        (
            leaf,
            _version(leaf),
            leaf.detach().to("cpu", copy=True),
            leaf.requires_grad,
            leaf.grad if leaf.is_leaf else None,
        )
        for leaf in leaves(batch)
        if leaf.device.type != "meta" and has_storage(leaf)
    ]
    try:
        yield
    finally:
        for leaf, version, contents, wanted, gradient in before:
            if version is None:  # of an inference tensor nobody counts writes
                with torch.inference_mode():
                    leaf.copy_(contents)
                continue
            if leaf._version != version:
                leaf.detach().copy_(contents)
                torch._C._autograd._unsafe_set_version_counter((leaf,), (version,))
            if leaf.is_leaf:
                leaf.requires_grad_(wanted)
                leaf.grad = gradient


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class _CopiesAtWrite(DispatchMode):
    """Copies the bytes of storages before an operation first writes into them.

    Attributes:
        contents: by storage, the bytes that were in it.
        present: those that are on.
    """

    present: ClassVar[list[_CopiesAtWrite]] = []

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = set(storages)
        self.contents: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Self:
        self.present.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: object) -> None:
        self.present.remove(self)
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def look(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation is about to run."""
        for tensor in written(func, args, kwargs):
            key = storage_key(tensor) if has_storage(tensor) else None
            if key is not None and key in self._storages and key not in self.contents:
                self.contents[key] = flat_storage(tensor.untyped_storage()).clone()


def before_unseen(func: Any, args: Any, kwargs: Any) -> None:
    """An operation is about to run below all modes: what it writes is copied as if they saw it."""
    for watch in _CopiesAtWrite.present:
        watch.look(func, args, kwargs)


def _exchange(value: Any, exchanged: Callable[[torch.Tensor], torch.Tensor], lists: dict[int, list[Any]]) -> Any:
    """A value with its tensors exchanged.

    Args:
        value: a tensor, or a list or tuple of some; anything else stays.
        exchanged: what each tensor becomes.
        lists: what lists have become so far, by the identity of the old one; added to.
    """
    if isinstance(value, torch.Tensor):
        return exchanged(value)
    if type(value) is list and (
        any(isinstance(v, torch.Tensor) for v in value)
        # torch.nn.RNNBase keeps its weights once more, in lists, and weak references to them by which it sees that they are others: it lays them out anew then.
        or any(type(v) in (list, tuple, weakref.ref) for v in value)
    ):
        if id(value) not in lists:
            lists[id(value)] = [_exchange(v, exchanged, lists) for v in value]
        return lists[id(value)]
    if type(value) is tuple and any(isinstance(v, torch.Tensor) for v in value):
        return tuple(_exchange(v, exchanged, lists) for v in value)
    meant = value() if type(value) is weakref.ref else None
    return weakref.ref(exchanged(meant)) if isinstance(meant, torch.Tensor) else value
