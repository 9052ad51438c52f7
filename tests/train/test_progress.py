"""Pictures and lines show the same run; neither reads what it shows as markup."""

from __future__ import annotations

import io
import re
import sys

import pytest

from memfit.train.live import RunState
from memfit.train.progress import Display, LiveDisplay, PlainDisplay, described, display
from memfit.values.report import StepRecord

RECORD = StepRecord(3, 0.25, 0.1, peak_bytes=2**20, divergences=("operation 7 is [bold]",))


def tell(shown: Display) -> None:
    shown.stage("planning [red]", 0.2)
    shown.stage("planning [red]", 0.9)
    shown.note("a note on [/tmp/x]")
    shown.begin(RunState(2, 5, 2**21, 2**22))
    shown.step(RECORD, 1e-3, log=True)
    shown.step(StepRecord(4, 0.2, 0.1), 1e-3, log=False)
    shown.close()
    shown.close()


def test_lines_are_written_for_what_is_new_and_what_is_logged() -> None:
    stream = io.StringIO()

    tell(PlainDisplay(stream))

    assert stream.getvalue().splitlines() == [
        "planning [red]",
        "a note on [/tmp/x]",
        "training, step 3 to 5; predicted peak 2.00 MiB of 4.00 MiB",
        f"step 3/5  {described(RECORD, 1e-3, 2**21)}",
    ]
    assert described(RECORD, 1e-3, 2**21).endswith(
        "peak 1.00 MiB (predicted 2.00 MiB)  not as planned: operation 7 is [bold]"
    )


def test_lines_tell_that_training_may_end_early() -> None:
    stream = io.StringIO()

    PlainDisplay(stream).begin(RunState(2, 5, 2**21, 2**22, may_end_early=True))

    assert stream.getvalue() == "training, step 3 to at most 5; predicted peak 2.00 MiB of 4.00 MiB\n"


def test_where_another_rank_holds_more_than_the_one_that_shows_it_is_told() -> None:
    """The last line of a run has the fullest rank's bytes, the lines of its steps those of rank 0."""
    stream = io.StringIO()

    PlainDisplay(stream).begin(RunState(2, 5, 2**20, 2**22, fullest_bytes=2**21))

    told = "predicted peak 1.00 MiB on rank 0 and 2.00 MiB on the fullest rank, of 4.00 MiB\n"
    assert stream.getvalue() == f"training, step 3 to 5; {told}"


def test_a_run_without_a_step_left_says_so() -> None:
    stream = io.StringIO()

    PlainDisplay(stream).begin(RunState(5, 5, 2**21, 2**22))

    assert stream.getvalue() == "all 5 steps are done: --set train.steps=... or train.epochs=... asks for more\n"


def test_a_terminal_shows_names_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")

    tell(LiveDisplay())

    shown = capsys.readouterr().err
    assert "a note on [/tmp/x]" in shown
    assert "step 4 of 5" in shown
    assert "not as planned in step 3: operation 7 is [bold]" in shown


def test_a_terminal_gets_a_picture_and_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(display(), PlainDisplay)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(display(), LiveDisplay)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_shows_how_much_is_left(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = LiveDisplay()
    shown.stage(
        "capturing a step (frozen linear weights in 4 bits, 1 micro-batch); at most 7 other ways after this one, about 2 min",
        0.1,
    )
    shown.close()
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[━╸╺]", " ", capsys.readouterr().err).split()
    assert "2" in words
    assert "min" in words
