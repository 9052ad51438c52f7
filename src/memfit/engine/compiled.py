"""A script with its operation names resolved, laid out by the number of an operation in forward: what is looked up while a forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import nn
from torch._ops import OpOverload

from memfit.engine.kept_stretches import CONFIRMED_EVERY
from memfit.values.script import Script, shared_beginning


class CompiledScript:
    """A script, ready to be followed.

    Attributes:
        script: what was compiled.
        functions: of each operation of forward; None for one that is not installed.
        count: operations of forward.
        outputs: of each operation, the storages of the plan that it makes: (output, storage, bytes).
        recorded: of each operation that runs again, the storages that its arguments are in; None for the others.
        leaving: by operation, the storages whose copy to another tier begins after it.
        gone: by operation, the storages that are on the other tier alone from it on.
        acts: whether anything is to be done at an operation but to run it.
        states_ending: (step, position among its runs) -> operations whose generator states nothing needs afterwards.
        calls: by module and number of the call, where the script is one of calls.
        recipe_of: by storage, the operations that make it again.
        kept_stretches: stretches in which nothing is dropped, by the operation that they begin with.
        first: the script of a first forward that builds something, and what modules hold before it; None where none does.
        offloads: whether the script, or that of another branch, copies anything to a lower tier.
        parting: of each branch, by operation, the functions by which others go on there, each with the number of that branch.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.functions: list[OpOverload | None] = [_resolve(name) for name in script.operations]
        self.count = len(self.functions)
        self.outputs: list[tuple[tuple[int, int, int], ...]] = [script.makes.get(i, ()) for i in range(self.count)]
        self.recorded: list[tuple[int, ...] | None] = [script.recorded.get(i) for i in range(self.count)]
        self.leaving: dict[int, list[int]] = {}
        self.gone: dict[int, list[int]] = {}
        for number, place in script.swaps.items():
            self.leaving.setdefault(place.begin, []).append(number)
            self.gone.setdefault(place.gone_by, []).append(number)
        self.acts = [
            bool(o) or r is not None or i in self.leaving or i in self.gone or i in script.writes or i == script.decided
            for i, (o, r) in enumerate(zip(self.outputs, self.recorded, strict=True))
        ]
        self.makes = dict(script.makes)
        # Generator states go right after the recipe that needs them last.
        last: dict[int, tuple[int, int]] = {}
        for number, step in enumerate(script.steps):
            for position, run in enumerate(step.runs):
                last.update((operation, (number, position)) for operation in run if operation in script.random)
        self.states_ending: dict[tuple[int, int], list[int]] = {}
        for operation, where in last.items():
            self.states_ending.setdefault(where, []).append(operation)
        self.calls: dict[str, dict[int, CompiledScript]] = {}
        for call in script.calls:
            self.calls.setdefault(call.module, {})[call.number] = CompiledScript(call.script)
        self.kept_stretches = {stretch.operations[0]: stretch for stretch in script.kept_stretches}
        self._since_followed: int | None = None  # forwards; None where the last one differed, or none has run
        self._modules: tuple[nn.Module, dict[int, tuple[nn.Module, nn.Module]]] | None = None
        self.first = None if script.first is None else (CompiledScript(script.first.script), script.first.before)
        self._others = tuple(map(CompiledScript, script.branches))
        self.offloads: bool = bool(script.swaps) or any(other.offloads for other in self._others)
        self.parting = _parting(self.branches)
        self.recipe_of: dict[int, tuple[int, ...]] = {}
        for step in script.steps:
            for run in step.runs:
                for operation in run:
                    for _, storage, _ in script.makes.get(operation, ()):
                        self.recipe_of[storage] = run

    @property
    def branches(self) -> tuple[CompiledScript, ...]:
        """Of the paths that forward takes one of, this one first."""
        return (self, *self._others)  # not an attribute: a cycle would keep the model until Python looks for cycles

    @property
    def confirmed(self) -> bool:
        """Whether the next forward need not be followed as a whole."""
        return self._since_followed is not None and self._since_followed < CONFIRMED_EVERY

    def ran(self, *, followed: bool, as_planned: bool) -> None:
        """A forward has run: followed as a whole or not, as planned or not."""
        if not as_planned:
            self._since_followed = None
        elif followed:
            self._since_followed = 0
        elif self._since_followed is not None:
            self._since_followed += 1

    def follow_always(self, begin: int) -> None:
        """Leave out the stretch that begins with this operation."""
        self.kept_stretches.pop(begin, None)

    def modules_of(self, model: nn.Module) -> dict[int, tuple[nn.Module, nn.Module]]:
        """The modules that `kept_stretches` begin and end with, by the first operation."""
        if self._modules is None or self._modules[0] is not model:
            named = dict(model.named_modules())
            self._modules = (
                model,
                {
                    at: (named[stretch.begins], named[stretch.ends])
                    for at, stretch in self.kept_stretches.items()
                    if stretch.begins in named and stretch.ends in named
                },
            )
        return self._modules[1]


def _resolve(name: str) -> OpOverload | None:
    parts = name.split(".")
    if len(parts) != 3:
        return None
    packet = getattr(getattr(torch.ops, parts[0], None), parts[1], None)
    return getattr(packet, parts[2], None)


def _parting(branches: Sequence[CompiledScript]) -> list[dict[int, dict[OpOverload, int]]]:
    out: list[dict[int, dict[OpOverload, int]]] = [{} for _ in branches]
    for (n, one), (m, other) in permutations(enumerate(branches), 2):
        at = shared_beginning(one.script.operations, other.script.operations)
        function = other.functions[at]
        if function is not None:
            out[n].setdefault(at, {}).setdefault(function, m)
    return out
