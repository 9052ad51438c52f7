"""The picture of a run in the terminal: complete, and never wider than the terminal."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from memfit.train.live import RunState, bar, lines, sparkline
from memfit.values.report import StepRecord

GIB = 2**30


def running(*, peak: int | None, seconds: float = 60.0) -> RunState:
    """A run that went on after step 100 and is at step 120 of 300."""
    times = iter((0.0, *[seconds] * 50))
    state = RunState(100, 300, int(7.68 * GIB), 8 * GIB, clock=lambda: next(times))
    for step in range(101, 121):
        metered = peak if step == 101 else None
        state.take(StepRecord(step, 3 - step / 100, 0.75, peak_bytes=metered, divergences=("a" * 80,)), 3e-4)
    return state


def texts(state: RunState, width: int) -> list[str]:
    return [line.plain for line in lines(state, width)]


@pytest.mark.parametrize("width", [20, 30, 40, 80, 200])
@pytest.mark.parametrize("peak", [None, 7 * GIB, 9 * GIB])
def test_no_line_is_wider_than_the_terminal(width: int, peak: int | None) -> None:
    assert max(map(cell_len, texts(running(peak=peak), width))) <= width


def test_at_forty_columns_all_is_there() -> None:
    shown = texts(running(peak=int(7.7 * GIB)), 40)

    assert shown[0].startswith("step 120 of 300")
    assert shown[0].endswith("9 min 00 s left")  # 20 steps in 60 s, 180 to go
    assert shown[2].startswith("peak 7.70 GiB of 8.00 GiB")
    assert shown[2].endswith("96 %")
    assert shown[4] == "predicted 7.68 GiB"
    assert shown[5].startswith("loss 1.8000")
    assert shown[5].endswith("lr 0.0003")
    assert shown[6][0] == "█"
    assert shown[6][-1] == "▁"
    assert len(shown[6]) == 20
    assert shown[8].endswith("…")


def test_where_training_may_end_early_the_time_left_is_at_most_so_much() -> None:
    state = running(peak=None)
    state.may_end_early = True

    assert texts(state, 80)[0].endswith("at most 9 min 00 s left")


def test_before_a_metered_step_the_peak_is_called_predicted() -> None:
    assert texts(running(peak=None), 80)[2].startswith("predicted peak 7.68 GiB of 8.00 GiB")
    assert not [line for line in texts(running(peak=None), 80) if line.startswith("peak")]


def test_more_than_the_budget_is_said_and_red() -> None:
    over = lines(running(peak=9 * GIB), 80)

    assert over[2].plain.endswith("over by 1.00 GiB")
    assert over[3].style == "red"
    assert "░" not in over[3].plain


def test_before_the_first_step_nothing_is_made_up() -> None:
    shown = texts(RunState(0, 10, GIB, 2 * GIB), 40)

    assert len(shown) == 4
    assert "left" not in shown[0]


def test_a_bar_is_full_only_at_the_end() -> None:
    assert bar(0.999, 40).count("░") == 1
    assert bar(1, 40) == "█" * 40
    assert bar(1e-6, 40)[0] == "█"
    assert bar(0, 4) == "░░░░"
    assert bar(float("nan"), 4) == "░░░░"


def test_a_line_of_losses_falls_where_they_fall() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([4.0, 2.0, 3.0, 1.0], 2) == "█▁"
    assert sparkline([1.0, float("nan"), 1.0], 10) == "▁▁"
    assert sparkline([float("inf")], 10) == ""
