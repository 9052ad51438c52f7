"""Find the repeated blocks of a model: what can be moved to the lower tier and back, one block at a time.

Nothing is declared. Blocks are siblings of one class: the entries of a `ModuleList` or `Sequential`, or children with equal parameter shapes anywhere.
That they really run one after the other is checked while they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from memfit.errors import InputError
from memfit.techniques.layer_streaming import MODEL_ITSELF
from memfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class Blocks:
    """Siblings of one class, in the order in which they are registered.

    Attributes:
        path: of the module that holds them; MODEL_ITSELF for the model.
        paths: of each block.
        own_bytes: of their parameters, those they share with anything else left out.
    """

    path: str
    paths: tuple[str, ...]
    own_bytes: int


def repeated_blocks(model: nn.Module) -> tuple[Blocks, ...]:
    """Every family of repeated blocks, those with the most parameter bytes first; blocks within blocks are families of their own.

    A list of modules is none: it is never called.
    """
    homes = parameter_homes(model)
    found: list[Blocks] = []
    for path, parent in model.named_modules():
        families: dict[object, list[str]] = {}
        for name, child in parent.named_children():
            shapes = tuple(tuple(p.shape) for p in child.parameters())
            if not shapes or type(child).forward is nn.Module.forward:
                continue
            kind = type(child) if isinstance(parent, nn.ModuleList) else (type(child), shapes)
            families.setdefault(kind, []).append(f"{path}.{name}" if path else name)
        for paths in families.values():
            if len(paths) > 1:
                own = sum(
                    p.numel() * p.element_size()
                    for block in paths
                    for p in model.get_submodule(block).parameters()
                    if own_to(homes[id(p)], block)
                )
                if own:
                    found.append(Blocks(path or MODEL_ITSELF, tuple(paths), own))
    return tuple(sorted(found, key=lambda b: -b.own_bytes))


def blocks_at(model: nn.Module, path: str | None = None) -> Blocks:
    """The family of blocks under this path, or the largest of all when None.

    Raises:
        InputError: there is none.
    """
    found = repeated_blocks(model)
    chosen = found if path is None else tuple(b for b in found if b.path == path)
    if chosen:
        return chosen[0]
    where = "anywhere in this model" if path is None else f"under {path!r}"
    there = ", ".join(f"{b.path!r} ({len(b.paths)} of {format_bytes(b.own_bytes)} together)" for b in found[:5])
    raise InputError(
        f"no repeated block was found {where}: layer streaming needs two or more siblings of one class with parameters of their own. "
        + (f"There are blocks under {there}" if there else "Plan without streaming")
    )


def parameter_homes(model: nn.Module) -> dict[int, list[str]]:
    """Of each parameter, by identity, the paths of all modules that hold it directly."""
    homes: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), []).append(path)
    return homes


def own_parameters(model: nn.Module, paths: Iterable[str]) -> dict[str, list[nn.Parameter]]:
    """Of each block, the parameters that belong to it alone, each once."""
    homes = parameter_homes(model)
    return {
        path: [p for p in dict.fromkeys(model.get_submodule(path).parameters()) if own_to(homes[id(p)], path)]
        for path in paths
    }


def own_to(homes: list[str], block: str) -> bool:
    """Whether a parameter with these homes belongs to this block alone."""
    return all(home == block or home.startswith(f"{block}.") for home in homes)
