"""Parts of a model that are not trained: which ones patterns match, and freezing them temporarily or permanently.

A frozen parameter gets no gradient and no optimizer state; below the lowest trained parameter there is no backward, so autograd saves nothing
there. That is torch's own `requires_grad_(False)`, and the numbers are those it gives: frozen modules stay in the mode they are in (dropout drops,
batch norm goes on counting).

A pattern is matched, as `fnmatch` does, against the whole path of each module and parameter from the model's root: "embeddings",
"encoder.layer.[0-3]", "*.bias". `*` matches dots too, so "*.embeddings" is found at any depth. What lies inside a module that matches is frozen with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.errors import InputError
from memfit.techniques.freezing import FrozenPart


def frozen_parts(model: nn.Module, patterns: Sequence[str]) -> tuple[FrozenPart, ...]:
    """What the patterns mean in this model, in the model's order; a parameter that is used in two places counts in the first.

    Raises:
        InputError: a pattern that matches no parameter, or patterns that leave nothing to train.
    """
    _check(model, patterns)
    owners = dict(_owners(model, patterns))
    frozen = {id(p) for p in owners.values()}
    if not any(p.requires_grad and id(p) not in frozen for p in model.parameters()):
        raise InputError(
            f"freeze={_written(patterns)} leaves no parameter to train: name fewer modules, or use the model without an optimizer"
        )
    counted: set[int] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in owners.items():
        if id(parameter) not in counted:
            counted.add(id(parameter))
            found.setdefault(_part_of(name, patterns), []).append(parameter)
    return tuple(
        FrozenPart(path, sum(p.numel() for p in held), sum(p.numel() * p.element_size() for p in held))
        for path, held in found.items()
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze what the patterns match, permanently, and free the gradients of its parameters.

    Raises:
        InputError: as for `frozen_parts`.
    """
    if patterns:
        frozen_parts(model, patterns)
    for _, parameter in _owners(model, patterns):
        parameter.requires_grad_(False)
        parameter.grad = None


@contextmanager
def frozen(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Freeze what the patterns mean inside the block; afterwards every parameter is as it was.

    Raises:
        InputError: as for `frozen_parts`.
    """
    if patterns:
        frozen_parts(model, patterns)
    before = [(p, p.requires_grad) for _, p in _owners(model, patterns)]
    for parameter, _ in before:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)


def _owners(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every name of every parameter that a pattern means; one that is tied is frozen wherever it is used."""
    # Asked of nn.Module: a model's own method may not know the argument (losses of torchrl).
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        if any(_means(pattern, name) for pattern in patterns):
            yield name, parameter


def _leading(name: str) -> Iterator[str]:
    """The paths of the modules around a parameter, the outermost first, and its own."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _means(pattern: str, name: str) -> bool:
    return any(fnmatchcase(path, pattern) for path in _leading(name))


def _part_of(name: str, patterns: Sequence[str]) -> str:
    """The outermost module around a parameter that a pattern matches; its own name where only that does."""
    return next(path for path in _leading(name) if any(fnmatchcase(path, pattern) for pattern in patterns))


def _check(model: nn.Module, patterns: Sequence[str]) -> None:
    if isinstance(patterns, str):
        raise InputError(f"freeze={patterns!r} is one pattern: give a list of them, freeze=[{patterns!r}]")
    names = [name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"freeze={pattern!r} is no pattern: write paths of modules, such as freeze=['embeddings']")
        if any(_means(pattern, name) for name in names):
            continue
        paths = [path for path, _ in model.named_modules() if path]
        if any(fnmatchcase(path, pattern) for path in paths):
            raise InputError(
                f"freeze={pattern!r} matches modules that hold no parameters, so it freezes nothing: leave it out, or name the module around them"
            )
        places = [*dict.fromkeys(path for name in names for path in _leading(name))]
        deeper = [path for path in places if fnmatchcase(path, f"*.{pattern}")]
        near = list(dict.fromkeys([*deeper[:3], *get_close_matches(pattern, places, n=3, cutoff=0.0)]))[:3]
        raise InputError(
            f"freeze={pattern!r} matches no module or parameter of this model; the nearest are {', '.join(near)}. "
            "A pattern is matched against the whole path from the model's root"
        )


def _written(patterns: Sequence[str]) -> str:
    return "[" + ", ".join(repr(pattern) for pattern in patterns) + "]"


# -- gradients forced through a frozen part ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Forced:
    """Where gradients are asked for though nothing below is trained.

    Attributes:
        outputs: modules whose output is made to ask for them, by a hook or in their own forward.
        inputs: modules that are handed a tensor which asks for them, made to by no module (the batch, or code between modules).
    """

    outputs: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)


def _asking(*values: object) -> list[torch.Tensor]:
    """Tensors that ask for a gradient though no operation before them did."""
    tensors = (t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter))
    return [t for t in tensors if t.requires_grad and t.is_leaf]


def _among(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


@contextmanager
def watching(model: nn.Module) -> Iterator[Forced]:
    """Note where a forward inside the block is made to ask for gradients while nothing below is trained.

    Hugging Face's `enable_input_require_grads` does so with a hook on the embeddings, and guides to adapters with `output.requires_grad_(True)`:
    re-entrant checkpointing needs it. Backward then runs through the whole frozen part, which holds all that it saves, for a gradient nobody reads.
    """
    found = Forced()
    seen: list[torch.Tensor] = []

    def hooks(path: str) -> tuple[Any, Any]:
        def before(_module: nn.Module, args: object, kwargs: object) -> None:
            for tensor in _asking(args, kwargs):
                if not _among(tensor, seen):
                    seen.append(tensor)
                    found.inputs.append(path)

        def after(_module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
            for tensor in _asking(output):
                if not _among(tensor, seen):  # a module may hand on what it was given, or what one inside it returned
                    seen.append(tensor)
                    found.outputs.append(path)

        return before, after

    handles = []
    for path, module in model.named_modules():
        if path:
            before, after = hooks(path)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield found
    finally:
        seen.clear()
        for handle in handles:
            handle.remove()


@contextmanager
def unforced(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Take back, inside the block, that outputs of these modules ask for gradients of their own accord (`Forced.outputs`).

    A hook of ours runs after the user's and clears the flag of the very tensor, so no operation is added. The tensor has no history, so no gradient
    of a parameter came through it. What could still differ is what code makes of the flag (re-entrant checkpointing, kernels chosen by it); so the
    paths come from a plan, which names them only where the step was seen to run the same forward and to give gradients to the same parameters.
    """

    def take_back(_module: nn.Module, args: object, kwargs: object, output: object) -> None:
        given = _asking(args, kwargs)
        for tensor in _asking(output):
            if not _among(tensor, given):
                tensor.requires_grad_(False)

    handles = [model.get_submodule(path).register_forward_hook(take_back, with_kwargs=True) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
