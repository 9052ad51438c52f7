"""What a forward may have changed that undoing a step does not put back: asked before a forward is ended half way, to be run again.

A step that fails is undone as far as a failed step has to be: buffers, numbers and words among attributes, generators, the gradient scale (`Guard`). One that
is to be run again as if nothing had happened must not leave anything else changed either: a list that grew, a tensor that was replaced or written into.
"""

from __future__ import annotations

import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from memfit.dispatch import has_storage, storage_key
from memfit.step.attributes import LARGEST_CONTAINER, OF_EVERY_MODULE, held_by, is_plain, items_of, length
from memfit.step.modules import every_module, modules_of

# Of a module, what is looked into by name and identity.
_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks"})
_CONSTANT: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device)


class Unrestored:
    """Everything besides what a `Guard` puts back, as it is when this is made; no tensor is kept alive.

    Args:
        model: whose parameters, buffers and attributes.
        loss_fn: whose modules are looked at too.
        restored: names of the buffers whose contents are put back.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, restored: Collection[str]) -> None:
        self._model = model
        self._others = [module for module in held_by(loss_fn) if module is not model]
        self._restored = restored
        self._names: dict[
            int, list[str]
        ] = {}  # of attributes to look at, by the identity of a module: those that are there and are not put back
        self._before = self._noted()
        self._storages: frozenset[int] | None = None

    def changed(self) -> bool:
        """Whether any of it is not as it was."""
        return self._before.unlike(self._noted())

    def writes(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these lies in the storage of a parameter, or of a buffer that is not put back; also where it is an alias without a version."""
        if self._storages is None:
            self._storages = frozenset(storage_key(t) for t in self._tensors() if has_storage(t))
        return any(has_storage(t) and storage_key(t) in self._storages for t in tensors)

    def _tensors(self) -> list[torch.Tensor]:
        buffers = [buffer for name, buffer in self._model.named_buffers() if name not in self._restored]
        return [*self._model.parameters(), *buffers]

    def _noted(self) -> _Words:
        words = _Words()
        own: list[torch.Tensor | None] = []  # parameters and buffers: thousands in some models, at each step
        for path, module in modules_of(self._model).items():
            if module._parameters:  # noqa: SLF001 - its own alone, and no names made up for them
                own += module._parameters.values()  # noqa: SLF001 - as above
            if module._buffers:  # noqa: SLF001 - as above
                own += _buffers(module, f"{path}." if path else "", self._restored)
            if not type(module).__module__.startswith("torch."):  # torch's own keep no such state
                self._attributes(module, words)
        for other in self._others:
            for module in other.modules():
                own += [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001 - as above
                self._attributes(module, words)
        words.tensors([tensor for tensor in own if tensor is not None])
        return words

    def _attributes(self, module: nn.Module, words: _Words) -> None:
        """What a module holds besides parameters, buffers and modules."""
        held = vars(module)
        names = self._names.get(id(module))
        if names is None:
            names = [name for name, value in held.items() if name not in OF_EVERY_MODULE and not is_plain(value)]
            self._names[id(module)] = names
        for name in names:
            words.value(name)
            words.value(held.get(name))


class HeldByModules:
    """What the modules of a model hold besides parameters, buffers and modules, as it is when this is made.

    Args:
        model: whose modules.
        loss_fn: of the modules that it uses, whole numbers are looked at, too.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model = model
        self._of_loss = [module for module in held_by(loss_fn) if module is not model]
        self._before = self._noted()
        self._numbers = self._whole_numbers()

    def changed(self) -> bool:
        """Whether any of it is not as it was: a number, a tensor replaced or written, a list that grew."""
        return self._before.unlike(self._noted())

    def counts(self) -> bool:
        """Whether a whole number is not as it was: how often something was called, perhaps."""
        return self._numbers != self._whole_numbers()

    def _noted(self) -> _Words:
        words = _Words(addresses=False)
        for name, value in self._attributes(self._model):
            words.words.append(name)
            words.value(value)
        return words

    def _whole_numbers(self) -> list[tuple[str, int]]:
        each = (self._attributes(module) for module in (self._model, *self._of_loss))
        return [(name, value) for name, value in chain.from_iterable(each) if type(value) is int]

    def _attributes(self, whole: nn.Module) -> Iterator[tuple[str, Any]]:
        for module in every_module(whole):
            if not type(module).__module__.startswith("torch."):  # torch's own keep no such state
                yield from ((name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)


class FoundByCall:
    """What a call of a module finds besides its arguments and what is in its parameters and buffers, as it is when this is made.

    Its modules, tensors, hooks, modes (train or eval) and attributes, those of torch's own modules included; which tensors are trained; and how torch is set.
    A second call has to find the same, and a forward may set any of it before a call and have it back by its end.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._noted()

    def changed(self) -> bool:
        """Whether any of it is not as it was."""
        return self._before.unlike(self._noted())

    def _noted(self) -> _Words:
        words = _Words(addresses=False)
        words.words.append(_torch_settings())
        for module in self._module.modules():
            words.words.append(module.training)
            for name, value in vars(module).items():
                if name in _TABLES:
                    words.words += [(key, id(each)) for key, each in value.items()]
                    words.words += [each.requires_grad for each in value.values() if isinstance(each, torch.Tensor)]
                elif name not in OF_EVERY_MODULE:
                    words.words.append(name)
                    words.value(value)
        return words


def _torch_settings() -> tuple[Any, ...]:
    """How torch is set where this is asked, as far as blocks of code set it for a while: which operations a call runs may depend on it."""
    attention = torch.backends.cuda
    modes = torch.overrides._get_current_function_mode_stack()  # noqa: SLF001 - torch has no public word for it
    return (
        *(id(mode) for mode in modes if not type(mode).__module__.startswith("memfit.")),
        torch.get_default_dtype(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
    )


def _buffers(module: nn.Module, path: str, restored: Collection[str]) -> list[torch.Tensor | None]:
    """A module's own, but for those of these names."""
    return [buffer for name, buffer in module._buffers.items() if path + name not in restored]  # noqa: SLF001 - as above


class _Words:
    """What there is, written down flat.

    Args:
        addresses: note where tensors lie; those of a capture on fake ones lie nowhere.

    Attributes:
        words: identities, versions, lengths and values, in order.
        alive: weak references to what the identities are of.
    """

    __slots__ = ("_addresses", "_looked_into", "alive", "words")

    def __init__(self, *, addresses: bool = True) -> None:
        self._addresses = addresses
        self.words: list[Any] = []
        self.alive: list[Callable[[], object]] = []
        self._looked_into: set[int] = set()

    def unlike(self, now: _Words) -> bool:
        """Whether something else is there now. Where what was there is still alive, no other object can have its number."""
        return self.words != now.words or any(alive() is None for alive in self.alive)

    def tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Which ones they are, where they lie, how often each was written."""
        self.words += map(id, tensors)
        if self._addresses:
            self.words += [t.data_ptr() if has_storage(t) else 0 for t in tensors]
        self.words += [0 if t.is_inference() else t._version for t in tensors]  # noqa: SLF001 - torch's only count
        self.alive += map(weakref.ref, tensors)

    def value(self, value: Any, *, inside: bool = False) -> None:
        """Anything that an attribute may be."""
        if is_plain(value):
            self.words.append(value)
        elif id(value) in self._looked_into:  # a configuration that every module holds
            self.words.append(id(value))
        elif isinstance(value, torch.Tensor):
            self.tensors((value,))
        elif isinstance(value, (list, tuple, dict, set, deque)):
            self._container(value, inside=inside)
        elif isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            self.words.append(_state(value))
        else:
            self._object(value, inside=inside)

    def _container(self, value: Any, *, inside: bool) -> None:
        self.words += (type(value), length(value))
        if id(value) in self._looked_into or length(value) > LARGEST_CONTAINER:
            return
        self._looked_into.add(id(value))
        if isinstance(value, dict):
            for key, held in value.items():
                self.words.append(key if is_plain(key) else id(key))
                self.value(held, inside=inside)
        else:
            for held in items_of(value):
                self.value(held, inside=inside)

    def _object(self, value: Any, *, inside: bool) -> None:
        self.words.append(id(value))
        try:
            self.alive.append(weakref.ref(value))
        except TypeError:
            self.alive.append(lambda kept=value: kept)  # type: ignore[misc]
        # Of objects only the first is looked into, as one may lead anywhere; modules have their own turn.
        if inside or isinstance(value, (*_CONSTANT, nn.Module)) or id(value) in self._looked_into:
            return
        self._looked_into.add(id(value))
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            for name, each in held.items():
                self.words.append(name)
                self.value(each, inside=True)


def _state(generator: Any) -> Any:
    """Of a random generator, to compare."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state())
