"""Rotor's optimum on a chain of blocks, as points that are predicted, not run.

rotor (Beaumont et al. 2019) is the known optimum among schedules that keep or drop whole blocks of a sequential model. The dynamic program of
`memfit.planner.baselines` stands in for its package, on the trace that memfit plans from, cut between the model's own blocks. The points are at least as
good as rotor's own: a block that is run again makes only what backward asks for, and blocks need not be an `nn.Sequential`. Peaks are those of memfit's replay,
head and optimizer included.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from memfit.planner.chains import CellChain
from memfit.planner.segments import Boundary


def _cuts(timeline: Any, paths: list[str]) -> list[Boundary]:
    """The boundaries after each block but the last."""
    trace = timeline.trace
    end = trace.forward_events
    last = dict.fromkeys(paths, -1)
    last_read: dict[int, int] = {}
    for event in range(end):
        if trace.events[event] < 0:
            continue
        operation = trace.operations[trace.events[event]]
        module = operation.module
        while module:
            if module in last:
                last[module] = event
            module = module.rpartition(".")[0]
        for storage in operation.reads:
            last_read[storage] = event
    managed = [(trace.storages[s].birth, last_read[s], s) for s in timeline.recipes.managed if s in last_read]
    found = []
    for event in sorted(set(last.values()) - {-1})[:-1]:
        storages = tuple(s for birth, read, s in managed if birth <= event < read)
        found.append(Boundary(event, storages, sum(trace.storages[s].bytes for s in storages)))
    return found


def points(solver: Any, paths: list[str], most: int = 12) -> list[tuple[int, float]]:
    """(peak bytes, extra seconds) of rotor schedules from the least memory up, those that no other is better than in both.

    Args:
        solver: memfit's, of the whole batch.
        paths: module paths of the blocks.
        most: schedules looked at.
    """
    timeline = solver.timeline
    cells = CellChain(timeline, _cuts(timeline, paths))
    table = cells.table(int(1.2 * (solver.plain.peak - cells.base_bytes)))
    amounts = table.amounts()
    steps = max(1, len(amounts) // most)
    found = []
    for amount in {*amounts[::steps], amounts[-1]}:
        evaluation = timeline.evaluate(cells.recomputations(table.operations(amount)))
        found.append((evaluation.peak_bytes, evaluation.extra_seconds))
    found.sort()
    best: list[tuple[int, float]] = []
    for size, seconds in found:
        if not best or seconds < best[-1][1]:
            best.append((size, seconds))
    return best


def at(found: list[tuple[int, float]], size: int) -> float | None:
    """Extra seconds of the fastest point of so many bytes; None where none is that small."""
    place = bisect_left([peak for peak, _ in found], size + 1)
    return found[place - 1][1] if place else None
