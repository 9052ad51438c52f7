"""The pages of figures are what the benchmarks wrote, and every question can be asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.hardware.machine import known_machine
from memfit.techniques.choices import BASELINE

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
    row = next(row for row in steps if row["model"] == "resnet18") | {"batch": 2, "device": "v100"}
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
