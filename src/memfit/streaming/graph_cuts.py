"""Cut autograd's graph at the blocks of a model, so that each can be run without a graph now and with one later.

In forward a block is *passed*: it runs without a graph, what it was given is kept, and what it returns becomes the start of the graph that follows. In
backward, once all gradients of what it returned are there, it is *returned through*: run again with a graph, on the same inputs, random numbers and autocast.
`torch.utils.checkpoint` does so inside autograd's own backward, one micro-batch after the other; here the caller says when, so that all micro-batches go
through one block while its parameters are there.

Gradients are bit-equal to those of the whole graph. Where a tensor is read by a block and by others, what the others gave is put first into autograd's sum,
as it would be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memfit.dispatch import version_of
from memfit.errors import EngineError
from memfit.step import generators
from memfit.step.autocast import AutocastState
from memfit.step.fingerprint import fingerprint
from memfit.step.process_generators import outside_torch

# What can be handed to a block a second time as it was: nothing that a call could have changed.
_UNCHANGING: Final = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type, type(None))


class Taker(Protocol):
    """What is given gradients at a cut."""

    def take(self, grads: tuple[Tensor | None, ...]) -> None:
        """Gradients of the tensors at the cut, None for those that got none."""


class _Gate(torch.autograd.Function):
    """Tensors on one side of a cut: the same values, with a node that hands their gradients to a taker."""

    @staticmethod
    def forward(ctx: Any, taker: Taker, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors, without what they came from."""
        ctx.taker = taker
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Nothing flows further."""
        ctx.taker.take(grads)
        return (None,) * (len(grads) + 2)


@dataclass(slots=True)
class _Received:
    grads: tuple[Tensor | None, ...] = ()

    def take(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = grads


@dataclass(slots=True)
class Pass:
    """What one micro-batch knows of its way through the blocks.

    Attributes:
        device: whose generator and autocast are replayed.
        calls: of the blocks, in order.
    """

    device: torch.device
    calls: list[Call] = field(default_factory=list)
    _first: dict[int, int] = field(
        default_factory=dict
    )  # tensor, by identity -> number of the first call that reads it
    _waiting: dict[int, Tensor] = field(default_factory=dict)  # its gradient so far, until that call is done

    def through(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Pass one block: what it returns, without the graph behind it.

        Args:
            name: of the block, for errors.
            module: the block.
            forward: its own.
            args, kwargs: that the model calls it with.

        Raises:
            EngineError: the call is of a kind that cannot be made again.
        """
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_UNCHANGING)):
                raise EngineError(
                    f"{name} is called with an object of type {type(leaf).__name__}, which a second call might find changed, so it cannot be streamed: "
                    "call the blocks with tensors and plain values (a cache of keys and values is switched off by use_cache=False), or plan without streaming"
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        trained = (*module.parameters(), *tensors)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in trained)
        call = Call(self, len(self.calls), name, module, forward, leaves, structure, wanted=wanted)
        call.versions = _versions(tensors)
        drawn = outside_torch()
        buffers = dict(module.named_buffers())
        written = _versions(buffers.values())
        # A cast that autocast keeps past its block would outlive the parameter.
        with torch.no_grad(), call.autocast.entered(cache=False):
            output = forward(*args, **kwargs)
        if call.versions != _versions(tensors):
            raise EngineError(
                f"{name} changes a tensor that it is given in place, so it cannot be run a second time and cannot be streamed: plan without streaming"
            )
        after = dict(module.named_buffers())
        for (buffer, before), version in zip(buffers.items(), written, strict=True):
            if wanted and (after.get(buffer) is not before or _versions([before]) != [version]):
                raise EngineError(
                    f"{name} writes its buffer {buffer!r} in forward, which would happen twice, so it cannot be streamed: plan without streaming"
                )
        self.calls.append(call)
        if not wanted:
            call.leaves = []  # it is not called again
            return output
        if drawn != outside_torch():
            raise EngineError(
                f"{name} draws random numbers of Python's or numpy's, others when it is run a second time, so it cannot be streamed: plan without streaming"
            )
        call.found = _found(module)
        for t in tensors:
            if t.requires_grad:  # the call keeps it, so its identity is its own
                self._first.setdefault(id(t), call.number)
        return call.returned(output)

    def finished(self) -> None:
        """All calls have been returned through: nothing may be left that was to be handed on."""
        assert not self._waiting, "the first reader of a tensor hands its gradient on"

    def gradient_so_far(self, tensor: Tensor) -> Tensor | None:
        """What later readers of a block's input have given; it is taken out."""
        source = _source(tensor)
        if source is None:
            return self._waiting.pop(id(tensor), None)
        found = source.grads[tensor.output_nr]
        source.grads[tensor.output_nr] = None
        return found

    def hand_on(self, tensor: Tensor, grad: Tensor, call: Call) -> None:
        """The gradient of a block's input, from all who read it but those before `call`."""
        source = _source(tensor)
        if source is not None:
            source.grads[tensor.output_nr] = grad
        elif self._first[id(tensor)] < call.number:
            self._waiting[id(tensor)] = grad
        else:
            try:
                torch.autograd.backward([tensor], [grad])
            except RuntimeError as error:
                if "second time" not in str(error):
                    raise
                raise EngineError(
                    f"what the model computes before {call.name} is read by that block and by later parts beside it, each with a backward of its own, "
                    "so these blocks cannot be streamed: plan without streaming, or stream others"
                ) from error


@dataclass(slots=True)
class Call:
    """One call of one block, to be made again in backward.

    Attributes:
        number: of the block in its order.
        wanted: whether backward goes through it.
        grads: of each tensor that it returned into the graph.
    """

    way: Pass
    number: int
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    wanted: bool
    autocast: AutocastState = field(init=False)
    states: generators.States = field(init=False)
    grads: list[Tensor | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of these tensors among the leaves of what it returned
    versions: list[int] = field(default_factory=list)  # of the tensors among the leaves
    done: bool = False
    found: Any = None  # in the module when the call had ended

    def __post_init__(self) -> None:
        self.autocast = AutocastState.present(self.way.device)
        self.states = generators.taken(self.way.device) if self.wanted else ()

    def returned(self, output: Any) -> Any:
        """What the block returned, as the start of the graph that follows; what was handed through is left as it was."""
        leaves, structure = pytree.tree_flatten(output)
        own = {id(leaf) for leaf in self.leaves}
        self.places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and id(leaf) not in own
        ]
        self.grads = [None] * len(self.places)
        starts = self._gate(self, [leaves[i] for i in self.places])
        for place, start in zip(self.places, starts, strict=True):
            leaves[place] = start
        return pytree.tree_unflatten(leaves, structure)

    def take(self, grads: tuple[Tensor | None, ...]) -> None:
        """Gradients of what the block returned, from one part of the graph behind it."""
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            assert not self.done, "all that reads a block's output comes before the block in backward"
            known = self.grads[i]
            self.grads[i] = grad if known is None else known + grad

    def return_through(self, around_forward: AbstractContextManager[object]) -> None:
        """Run the block again with a graph, and backward through that; parameters accumulate their gradients as ever.

        Args:
            around_forward: entered for the second forward.
        """
        grads, self.grads, self.done = self.grads, [], True
        leaves, self.leaves = self.leaves, []
        if all(grad is None for grad in grads):
            return
        if self.versions != _versions(leaf for leaf in leaves if isinstance(leaf, Tensor)):
            raise EngineError(
                f"the model changed a tensor in place that it had given to {self.name}, which is to be run a second time on it, so it cannot be streamed: "
                "plan without streaming"
            )
        if self.found != _found(self.module):
            raise EngineError(
                f"{self.name} would find something else when it is run a second time (an attribute, its mode, what is trained), since the model sets it for a "
                "while in forward, so it cannot be streamed: plan without streaming"
            )
        inputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}.values())
        received = _Received()
        after = generators.taken(self.way.device)
        with torch.enable_grad(), around_forward:
            inside = self._gate(received, [t.detach() for t in inputs])
            instead = {id(t): new for t, new in zip(inputs, inside, strict=True)}
            args, kwargs = pytree.tree_unflatten([instead.get(id(leaf), leaf) for leaf in leaves], self.structure)
            generators.put_back(self.states, self.way.device)
            try:
                with self.autocast.entered():
                    output = self.forward(*args, **kwargs)
            finally:
                generators.put_back(after, self.way.device)
        made = pytree.tree_leaves(output)
        roots: list[tuple[Tensor, Tensor]] = [
            (made[place], grad)
            for place, grad in zip(self.places, grads, strict=True)
            if grad is not None and made[place].requires_grad
        ]
        for outside, new in zip(inputs, inside, strict=True):
            if (so_far := self.way.gradient_so_far(outside)) is not None:
                roots.append((new, so_far))
        del made, output, args, kwargs, instead, inside, leaves, grads
        if roots:
            tensors, seeds = zip(*roots, strict=True)
            del roots
            torch.autograd.backward(tensors, seeds)
            del tensors, seeds
        for position, tensor in enumerate(inputs):
            grad = received.grads[position] if received.grads else None
            if grad is not None:
                self.way.hand_on(tensor, grad, self)

    def _gate(self, taker: Taker, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        if not tensors:
            return ()
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
        found: tuple[Tensor, ...] = _Gate.apply(taker, anchor, *tensors)  # type: ignore[no-untyped-call]
        return found


def _found(module: nn.Module) -> Any:
    """What a call finds in a module, in a few words: of what it keeps there itself (a table, its last scores) the form alone."""
    words = fingerprint(module)
    words.pop(".forward", None)  # is taken over in the first call
    return words, [each.training for each in module.modules()]


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [version_of(t) for t in tensors]


def _source(tensor: Tensor) -> Call | None:
    """The call that returned this very tensor."""
    taker = getattr(tensor.grad_fn, "taker", None)
    return taker if isinstance(taker, Call) else None
