"""Cuts as they are written by hand: about as many bytes of parameters in each stage."""

from __future__ import annotations

from memfit.errors import InputError
from memfit.values.stages import Parts


def equal_parameter_ends(parts: Parts, stages: int) -> tuple[int, ...]:
    """Where to cut for about equal bytes of state in each stage, as is written by hand: the cut whose largest stage has least."""
    total = len(parts.parts)
    state = [[0] * (total + 1) for _ in range(total + 1)]
    for first in range(total):
        for end in range(first + 1, total + 1):
            state[first][end] = sum(part.state_bytes for part in parts.parts[first:end])
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
    for number in range(1, stages + 1):
        for end in range(number, total + 1):
            if parts.may_end(end):
                made = [
                    (max(best[number - 1, first][0], state[first][end]), (*best[number - 1, first][1], end))
                    for first in range(end)
                    if (number - 1, first) in best
                ]
                if made:
                    best[number, end] = min(made)
    if (stages, total) not in best:
        raise InputError(f"{stages} stages were asked for and the model cannot be cut into so many: ask for fewer")
    return best[stages, total][1]
