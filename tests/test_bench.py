"""The pages of figures are what the benchmarks wrote, and every question can be asked."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.hardware.machine import known_machine
from memfit.techniques.choices import BASELINE
from memfit.views.drawing import Polygon
from memfit.views.layout import NARROW, WIDE
from views.paper import crossing, inside

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module("run")
    for name in set(sys.modules) - before:  # "run" is no name to leave lying about
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_pages_say_what_the_results_say(bench: Any) -> None:
    for path, text in bench.pages().items():
        assert path.read_text() == text, f"{path} is not what bench/run.py --pages writes"


def test_charts_stay_on_their_paper_and_texts_apart(bench: Any) -> None:
    """A name may stand above a row on a phone, a value behind it: neither on another text."""
    for question in bench.pictures.OF:
        for name, picture in bench.charts_of(question, bench.measuring.kept(question)).items():
            for layout in (WIDE, NARROW):
                assert inside(picture(layout)), (name, layout)
                assert crossing(picture(layout)) == [], (name, layout)
            assert picture(WIDE).label.endswith("."), "the chart in a sentence"


def test_every_chart_is_on_a_page_in_both_layouts_and_none_is_left_over(bench: Any) -> None:
    page = (BENCH.parent / "docs" / "figures.md").read_text()
    there = {path.name for path in bench.PICTURES.glob("*")}

    assert there == {path.name for path in bench.drawn()}
    assert there == set(re.findall(r'(?:src|srcset)="pictures/figures/([^"]+)"', page))


def test_runs_in_a_chart_are_as_high_as_all_that_run_together(bench: Any) -> None:
    """Two beside each other reach the sum of their bytes, and what is above the budget is red."""
    charts = bench.charts
    axis = charts.Axis(0, 100, [(0, "0"), (100, "100")], "")
    runs = [charts.Run(0, 60, 40), charts.Run(40, 100, 30)]
    drawing = charts.stacked_runs(charts.Head("", "", "."), [("", runs)], axis, axis, 50, WIDE)
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Polygon)]
    pixel = 120 / 100  # of a byte, in a panel of 120 pixels
    bottom = max(y for shape in boxes for _, y in shape.points)
    tops = {shape.fill: round((bottom - min(y for _, y in shape.points)) / pixel) for shape in boxes}

    assert tops[charts.RED] == 70
    assert {
        round(max(y for _, y in s.points) - min(y for _, y in s.points)) for s in boxes if s.fill == charts.RED
    } == {24}
    assert tops[charts.LAYERS[0]] == 40


def test_ways_to_start_runs_are_told_in_one_order_however_their_rows_are_kept(bench: Any) -> None:
    """A way that is measured anew is kept last; what is told of memfit must not be told of another."""
    rows = bench.measuring.kept("tune")
    pictures = [bench.charts_of("tune", some)["tune-packing"](WIDE) for some in (rows, rows[::-1])]
    packed = next(row for row in rows if row["part"] == "own runs" and "packed" in row["way"])

    assert pictures[0] == pictures[1]
    assert f"packed by memfit in {packed['seconds'] / 60:.1f} minutes" in pictures[0].label


def test_every_question_has_its_folder_and_no_folder_is_forgotten(bench: Any) -> None:
    folders = {path.parent.name for path in BENCH.glob("*/run.py")} - {"gpu"}
    assert folders == set(bench.QUESTIONS)
    for question in bench.QUESTIONS:
        module = bench.module_of(question)
        assert module.__doc__
        assert callable(module.main)
        assert callable(module.table)


def test_published_seconds_are_predicted_as_a_plan_predicts_them(bench: Any) -> None:
    from memfit.capture.trace_source import TraceSource

    module = bench.module_of("published_seconds")
    steps, _ = module.published()
    row = next(row for row in steps if row["model"] == "resnet18") | {"device": "v100"}
    (works,) = module.captured([row])
    work, networks = importlib.import_module("work"), importlib.import_module("networks")
    optimizer = work.optimizer_of(row["optimizer"])
    model, sample, loss = networks.built(row["model"], row["batch"])
    source = TraceSource(model, sample, loss, optimizer, device="v100")
    planned = source.trace_of(BASELINE.but(precision="fp16")).plain_step_seconds
    assert work.step_seconds(works, "v100") == pytest.approx(planned)


def test_every_published_second_has_its_source_date_and_versions(bench: Any) -> None:
    steps, operations = bench.module_of("published_seconds").published()
    assert len({row["device"] for row in steps}) >= 6
    for row in steps + operations:
        assert known_machine(row["device"])
        assert row["url"].startswith("https://")
        assert all(row[name] for name in ("words", "date", "versions", "card"))
    assert len({(row["source"], row["name"]) for row in steps}) == len(steps)
