"""What a person sees of a search: lines, a table, a page; and how metrics are read from whatever is printed."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from memfit.tune import run
from memfit.tune.live import PlainDisplay, TableDisplay, table
from memfit.tune.metrics import Metrics, MetricsFile
from memfit.tune.page import page
from memfit.tune.results import Results, TrialRow, results
from memfit.tune.tuning import Tuning
from memfit.views.document import document
from memfit.views.trials_picture import TrialPoint, trials_picture
from tune import searches


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("accuracy=0.93", {"accuracy": 0.93}),
        ("epoch 3: loss: 1e-3, val_loss=.5", {"loss": 1e-3, "val_loss": 0.5}),
        ('{"step": 3, "accuracy": 0.9, "name": "x", "ok": true}', {"accuracy": 0.9}),
        ('{"validation_loss": null}', {"validation_loss": math.nan}),
        ("loss=nan", {"loss": math.nan}),
        ("loss=-inf", {"loss": -math.inf}),
        ("{'loss': 1.5, 'grad_norm': '2.0', 'epoch': 0.5}", {"loss": 1.5, "grad_norm": 2.0}),
        ("précision=0.5 точность: 0.25", {"précision": 0.5, "точность": 0.25}),
        (f'{{"loss": 1{"0" * 400}}}', {"loss": math.inf}),
        ("no numbers here", {}),
        ("{broken", {}),
    ],
)
def test_metrics_are_read_from_what_is_printed(line: str, values: dict[str, float]) -> None:
    metrics = Metrics()
    metrics.add(line)
    found = {name: metrics.last(name) for name in metrics.values}
    assert found.keys() == values.keys()
    assert all(found[name] == pytest.approx(value, nan_ok=True) for name, value in values.items())


def test_steps_are_those_reported_or_counted() -> None:
    metrics = Metrics()
    for line in ("loss=3", "loss=2", '{"step": 7, "loss": 1}', '{"step": 7, "loss": 0.5}'):
        metrics.add(line)
    assert metrics.values["loss"] == [(0, 3.0), (1, 2.0), (7, 0.5)]
    for step in ("-1", "1e300"):  # which a study does not take
        metrics.add(f"step={step} loss=4")
    assert metrics.values["loss"][3:] == [(3, 4.0), (4, 4.0)]


def test_a_file_is_read_as_it_grows_and_as_it_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    read = MetricsFile(file)
    assert read.read().values == {}
    file.write_text("loss=1\nloss=", encoding="utf-8")
    assert read.read().values == {"loss": [(0, 1.0)]}
    file.write_text("loss=1\nloss=2\nloss=3", encoding="utf-8")
    assert read.read().values["loss"] == [(0, 1.0), (1, 2.0)]
    assert read.finished().values["loss"][-1] == (2, 3.0)
    assert MetricsFile(file).finished().values["loss"] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    file.write_text("loss=9\n", encoding="utf-8")  # a run that starts again from a snapshot
    assert read.read().values == {"loss": [(0, 9.0)]}


def test_what_has_been_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, taken = tmp_path / "log", list[str]()
    monkeypatch.setattr(Metrics, "add", lambda _, line: taken.append(line))
    read = MetricsFile(file)
    for number in range(4):
        with file.open("a") as stream:
            stream.write(f"loss={number}\n")
        read.read()
    assert taken == ["loss=0", "loss=1", "loss=2", "loss=3"]
    with file.open("r+") as stream:  # cut at a snapshot, and as long as it was before the next look
        stream.truncate(7)
        stream.seek(7)
        stream.write("loss=7\nloss=8\nloss=9\n")
    read.read()
    assert taken[4:] == ["loss=0", "loss=7", "loss=8", "loss=9"]


def test_a_search_is_shown_as_lines_as_a_table_and_as_a_page(tmp_path: Path) -> None:
    search = searches.command(tmp_path, trials=3, memory="1GiB", budget="2GiB", at_once="auto")
    tuning = Tuning(search)
    said = io.StringIO()
    shown = PlainDisplay(said)
    try:
        while True:
            shown.show(tuning, results(search, tuning.study, tuning.launched, tuning.url))
            if not tuning.step():
                break
        found = results(search, tuning.study, tuning.launched, tuning.url)
        shown.show(tuning, found)
        drawn = io.StringIO()
        Console(file=drawn, width=160).print(table(tuning, found))
    finally:
        tuning.close()
    lines = said.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines] == ["trial 0", "trial 1", "trial 2"]
    assert "3 of 3 trials, best" in lines[-1]
    assert "of 2.00 GiB in use on cpu" in lines[-1]
    assert "0 B of 2.00 GiB in use" in drawn.getvalue()
    assert drawn.getvalue().count("done") == 3
    written = page(found, {"cpu": 2 << 30})
    assert f"trial {found.best[0].number} is best: value" in written
    assert written.count("<circle") >= 3 or written.count("trial ") > 3
    again = PlainDisplay(said)
    again.show(tuning, found)
    assert said.getvalue().splitlines()[-1].startswith("going on after 3 trials in sqlite:///")


@pytest.mark.parametrize(
    ("width", "last", "without"),
    [
        (100, "2", ""),
        (60, "1.234e-05", "no room for model.args.depth"),
        (40, "99.0 MiB", "no room for time, optim.lr, model.args.depth"),
    ],
)
def test_a_table_is_as_wide_as_the_terminal_and_cuts_no_cell(
    tmp_path: Path, width: int, last: str, without: str
) -> None:
    search = searches.toy(tmp_path, {"optim.lr": {"low": 1e-5, "high": 1e-2}, "model.args.depth": [2, 4]})
    rows = tuple(
        TrialRow(n, state, (0.123456,), {"optim.lr": 1.234e-05, "model.args.depth": 2}, 99 << 20, 88.8, "")
        for n, state in enumerate(("done", "infeasible", "running"))
    )
    ledger = SimpleNamespace(capacity={"cpu": 128 << 20}, used=lambda _: 64 << 20)
    tuning: Any = SimpleNamespace(runner=SimpleNamespace(ledger=ledger))
    drawn = io.StringIO()
    Console(file=drawn, width=width).print(table(tuning, Results(search, rows, rows[:1])))
    lines = drawn.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in drawn.getvalue()
    for number, state in enumerate(("done", "infeasible", "running")):
        (line,) = [each for each in lines if each.split()[:2] == [str(number), state]]
        assert "0.123456" in line
        assert "99.0 MiB" in line
        assert line.rstrip().endswith(last)
    assert ("best 0.123456 (trial 0), 64.0 MiB of 128 MiB in use on cpu") in " ".join(each.strip() for each in lines)
    assert drawn.getvalue().replace("\n", " ").partition("no room")[2].split() == without.split()[2:]


def test_why_a_trial_failed_is_said_once_and_above_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shown in (PlainDisplay(), TableDisplay()):
        run(searches.command(tmp_path, "print('value=nan')", trials=2, out=type(shown).__name__), shown)
        shown.close()
        said = capsys.readouterr().err
        assert [said.count(f"trial {number} (") for number in (0, 1)] == [1, 1]
        assert said.count("failed: value is nan") == 2


def test_a_picture_needs_two_trials() -> None:
    points = [TrialPoint(n, (n + 1) << 20, float(n), "x 1") for n in range(3)]
    assert trials_picture(points[:1], "loss", []) is None
    drawing = trials_picture(points, "loss", [2])
    assert drawing is not None
    assert drawing.label == "3 trials: loss from 0 to 2, peaks from 1.00 MiB to 3.00 MiB."


def test_what_users_wrote_is_no_markup_on_a_page() -> None:
    assert "<b>" not in document("<b>", "<b>", "fits", [])
