"""The pages of figures are what the benchmarks wrote, and every question can be asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
