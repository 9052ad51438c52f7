"""What a forward may change besides tensors: attributes of modules, and what hangs on them.

Counters, lists that grow, caches, lazily made tensors, generators of one's own, objects that hold any of these; of the model's modules and of those that the
loss function closes over. It is noted before something is run that training does not know of, and put back afterwards.
"""

from __future__ import annotations

import dis
import inspect
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from memfit.garbage import uncollected
from memfit.step.modules import every_module

# Of larger containers only the container is noted, not what its items hold: a data set as an attribute is no state.
LARGEST_CONTAINER: Final = 10_000
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
OF_EVERY_MODULE: Final = vars(nn.Module()).keys()  # names of attributes
_OPAQUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor, torch.dtype)
_OF_LIBRARIES: Final = ("torch.", "numpy.", "builtins.", "lightning.", "pytorch_lightning.", "transformers.")
_STEPPED: Final = "torch.optim."  # of these a step changes some: optimizers that one steps, schedules of its hook

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class Attributes:
    """The attributes of some modules as they are when this is made.

    Args:
        roots: the modules; what they hold is looked into.

    Attributes:
        modules: all that were found, those that no module has registered (a teacher in a list) included.
        containers: every mutable container that was found, the modules' own tables among them.
    """

    @uncollected()
    def __init__(self, roots: Sequence[Any]) -> None:
        self.modules: list[nn.Module] = []
        self.containers: list[Container] = []
        self._contents: list[Any] = []
        self._generators: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        # What is left to look at, and the class of the object in which it lies: of those only the first is looked into, as a trainer leads anywhere, and what
        # it holds of its own class (a tree of tensors).
        waiting: list[tuple[Any, type | None]] = [(root, None) for root in reversed(roots)]
        while waiting:
            value, inside = waiting.pop()
            waiting += self._noted(value, inside=inside)

    def _noted(self, value: Any, *, inside: type | None) -> Iterator[tuple[Any, type | None]]:
        """Note one value; yields what it holds."""
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        held: Iterable[Any] = ()
        if isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self.containers.append(value)
                self._contents.append(_items(value))
            if length(value) <= LARGEST_CONTAINER:
                held = items_of(value)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            held, inside = (vars(value),), None
        elif (generator := _generator(value)) is not None:
            self._generators.append(generator)
        elif inside not in (None, type(value)) and not isinstance(value, torch.optim.Optimizer):
            del self._seen[id(value)]  # it may be a root, too, or be met in a list
        elif not isinstance(value, _OPAQUE) and isinstance(getattr(value, "__dict__", None), dict):
            module = f"{type(value).__module__}."
            if module.startswith(_OF_LIBRARIES) and not module.startswith(_STEPPED):
                return
            held, inside = (vars(value),), type(value)
        yield from ((each, inside) for each in held)

    def put_back(self) -> None:
        """Restore what has changed."""
        for container, before in zip(self.containers, self._contents, strict=True):
            if not _same(_items(container), before):
                _fill(container, before)
        for put_back in self._generators:
            put_back()


class PlainValues:
    """Numbers, words and None among the attributes of modules: what a step that is undone puts back. Quick, and no tensor is kept alive.

    What was not there before goes, whatever it is: a tensor that a forward leaves for the loss, say.
    A flag often says what is in a buffer (how far a table is filled): whoever puts back the one has to put back the other.

    Args:
        models: whose modules; torch's own keep no such state but their mode, train or eval, which a loss may set for a part of it.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._modes = [(module, module.training) for model in models for module in every_module(model)]
        self._held = [
            (module, tuple(vars(module)), _plain_ones(vars(module)))
            for model in models
            for module in every_module(model)
            if not type(module).__module__.startswith("torch.")
        ]

    def put_back(self) -> None:
        """Restore what has changed; what was not there goes."""
        for module, names, held in self._held:
            now = vars(module)
            for name in now.keys() - OF_EVERY_MODULE - set(names):
                del now[name]
            now.update(held)
        for module, mode in self._modes:
            module.training = mode


def is_plain(value: object) -> bool:
    """Whether it is a number, a word or None. By its type: an object that is asked for its class may run code of its own, and there are thousands in a step."""
    return issubclass(type(value), PLAIN)


def _plain_ones(attributes: dict[str, Any]) -> dict[str, Any]:
    """Those of a module's attributes that are numbers, words or None."""
    return {name: value for name, value in attributes.items() if issubclass(type(value), PLAIN)}


def length(container: Container | tuple[Any, ...]) -> int:
    """Of a container; a subclass of tuple may mean something else by its length, or have none."""
    return tuple.__len__(container) if isinstance(container, tuple) else len(container)


def items_of(container: Container | tuple[Any, ...]) -> Iterable[Any]:
    """What a container holds; of a dictionary the values."""
    if isinstance(container, tuple):
        return tuple.__iter__(container)
    return container.values() if isinstance(container, dict) else container


def held_by(function: Callable[..., Any] | None) -> list[nn.Module]:
    """The modules that a function may change when it is called: itself, those it is bound to, closes over, has as defaults, or names as globals."""
    return [each for each in values_of(function) if isinstance(each, nn.Module)]


def besides_modules(function: Callable[..., Any] | None) -> Attributes:
    """What else a function may change: lists, dictionaries and objects that it closes over, is bound to, or names (metrics, a history, a trainer)."""
    return Attributes([each for each in _directly(function) if not isinstance(each, nn.Module)])


def values_of(function: Callable[..., Any] | None) -> list[Any]:
    """What a function is bound to, closes over, has as defaults, or names as globals; and what the functions among these do, those of its own module.

    Of objects among these, what is in the attributes that the function or the methods that it calls name (`self.teacher`), and of containers, what is in them.
    """
    found = _directly(function)
    code = getattr(_undecorated(getattr(function, "__func__", getattr(function, "func", function))), "__code__", None)
    names = ("__call__",) if code is None else code.co_names
    return [*found, *(inner for value in found for inner in _named_in(value, names))]


def _named_in(value: Any, names: Iterable[str]) -> list[Any]:
    """What code that names these attributes may find in an object, and what is in a container. Its other attributes may be anything (all of the data)."""
    if type(value) in (list, tuple, dict):
        return list(items_of(value)) if length(value) <= LARGEST_CONTAINER else []
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or isinstance(
        value, (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)
    ):
        return []
    found: list[Any] = []
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        method = _undecorated(getattr(type(value), name, None))
        if name in own:
            found += [own[name], *(_named_in(own[name], ()) if type(own[name]) in (list, tuple, dict) else ())]
        elif isinstance(method, types.FunctionType):
            waiting += method.__code__.co_names
    return found


def _directly(function: Callable[..., Any] | None) -> list[Any]:
    if function is None:
        return []
    if isinstance(function, types.MethodType):
        return [function.__self__, *_directly(function.__func__)]
    if isinstance(function, partial):
        return [*_directly(function.func), *function.args, *function.keywords.values()]
    if _undecorated(function) is not function:
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
        return [*(each for each in cells if each is not _undecorated(function)), *_directly(_undecorated(function))]
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        named = [function.__globals__.get(name) for name in _globals_named(function.__code__)]
        near = [each for each in (*cells, *named) if isinstance(each, types.FunctionType)]
        inner = [v for each in near if each.__globals__ is function.__globals__ for v in _held_inside(each, function)]
        return [*cells, *inner, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *named]
    return [function]


def _undecorated(function: Any) -> Any:
    """What a decorator has wrapped (`torch.no_grad()`, autocast), which names and closes over what the wrapper does not."""
    return inspect.unwrap(function) if isinstance(function, types.FunctionType) else function


@lru_cache(maxsize=1024)  # asked in every step, and to take a long function apart takes a millisecond
def _globals_named(code: types.CodeType) -> tuple[str, ...]:
    """Of the names in a function's code, which are those of attributes, too, the ones that it looks up as globals."""
    return tuple(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")


def _held_inside(inner: types.FunctionType, outer: types.FunctionType) -> list[Any]:
    """Of a function that another one closes over, which may be that other one again."""
    if inner is outer:
        return []
    cells = [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
    return [*cells, *(inner.__globals__.get(name) for name in _globals_named(inner.__code__))]


def _generator(value: Any) -> Callable[[], object] | None:
    """What puts a random generator back to its present state; None for what is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is what tells
    except ValueError:
        return False
    return True


def _items(container: Container) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _same(one: Any, other: Any) -> bool:
    """The very same items, in the same order where there is one."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(a is b and x is y for (a, x), (b, y) in zip(one.items(), other.items(), strict=True))
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


def _fill(container: Container, contents: Any) -> None:
    if isinstance(container, dict):
        # Of subclasses too (a counter's own `update` adds); but ordered ones have a list of their keys besides, which `dict.clear` leaves as it was.
        (OrderedDict if isinstance(container, OrderedDict) else dict).clear(container)
        for key, value in contents.items():
            container[key] = value
    elif isinstance(container, set):
        container.clear()
        container.update(contents)
    else:
        container.clear()
        container.extend(contents)
