"""Which ranks do the same: those whose steps are alike, bytes included, have one *role*. So there is one trace for each role, not for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from memfit.sharding.state_sharding import dealt_out
from memfit.techniques.sharding import way_of


def roles_of(model: nn.Module, setting: str) -> tuple[int, ...]:
    """For each rank the first one with the same role.

    Args:
        model: whole; with what is frozen, frozen.
        setting: of the choices, as "zero3/4".
    """
    way, ranks, _ = way_of(setting)
    if way == "data":
        return (0,) * ranks
    trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    shares = _partition(trained, ranks) if way == "zero1" else [_rows(trained, ranks, rank) for rank in range(ranks)]
    return tuple(shares.index(share) for share in shares)


def fullest(model: nn.Module, setting: str) -> int:
    """The rank with the most state: the one to plan for."""
    way, ranks, _ = way_of(setting)
    if way != "zero1":
        return 0  # `fully_shard` hands out rows from the first rank on
    sizes = _dealt_out(model, ranks)
    return sizes.index(max(sizes))


def most_elements(model: nn.Module, ranks: int) -> int:
    """Elements of the parameters whose state the fullest rank has under ZeRO 1."""
    return max(_dealt_out(model, ranks))


def _dealt_out(model: nn.Module, ranks: int) -> list[int]:
    trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    return [sum(map(prod, share)) for share in _partition(trained, ranks)]


def _rows(shapes: Sequence[tuple[int, ...]], ranks: int, rank: int) -> list[tuple[int, ...]]:
    """Of each parameter the shape of a rank's shard: rows in chunks of equal size, the last ones smaller or empty."""
    found = []
    for shape in shapes:
        rows = shape[0] if shape else 1  # a single number, which `fully_shard` refuses where it is captured
        chunk = -(-rows // ranks)
        found.append((max(0, min(chunk, rows - rank * chunk)), *shape[1:]))
    return found


def _partition(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[list[tuple[int, ...]]]:
    """Whole parameters, as ZeroRedundancyOptimizer deals them out."""
    (dealt,) = dealt_out([[prod(shape) for shape in shapes]], ranks)
    return [[shapes[position] for position in share] for share in dealt]
