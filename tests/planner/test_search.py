"""The choice of micro-batches around the plans, what is turned down and why, and what is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.traces import Writer, drawn, network

from memfit.errors import InfeasibleError
from memfit.planner.search import Search
from memfit.plans import KEPT
from memfit.trace import Category, Trace

SAMPLES = 16


def sized(parts: int, *, layers: int = 6, overhead: float = 0.05) -> Trace:
    """A chain whose activations shrink with the parts, with a fixed cost for each part."""
    size, seconds = 960 // parts, 1.0 / parts + overhead
    w = Writer()
    weight = w.before(500)
    x = w.before(size, Category.BATCH)
    saves = []
    for number in range(layers):
        saves.append(w.save(x))
        h = w.one((x, weight), 3 * size, seconds=seconds, module=f"layer.{number}")
        saves.append(w.save(h))
        x = w.one((h,), size, seconds=seconds / 4, module=f"layer.{number}")
    w.backward()
    gradient = w.one((x,), size, seconds=0.0)
    for save in reversed(saves):
        gradient = w.one((gradient, w.unpack(save)), size, seconds=seconds)
    w.update()
    w.run((gradient,), writes=(weight,), seconds=0.1)
    return replace(w.trace(), micro_batches=parts, micro_batch_size=-(-SAMPLES // parts))


def search(*, fixed: int | None = None, splits: bool = True, extra: int = 0, overhead: float = 0.05) -> Search:
    asked: list[int] = []

    def trace_of(parts: int) -> Trace:
        assert parts not in asked, "captured twice"
        asked.append(parts)
        return sized(parts, overhead=overhead)

    how = ("samples", "") if splits else (None, "batch norm sees the whole batch")
    made = Search(trace_of, SAMPLES, lambda: how, fixed, extra, "2.x", None)
    made.asked = asked  # type: ignore[attr-defined]
    return made


@pytest.fixture(autouse=True)
def attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test note on a Search what it asked for."""
    monkeypatch.setattr(Search, "__slots__", (), raising=False)


def test_placeholder() -> None:
    """Replaced below."""
