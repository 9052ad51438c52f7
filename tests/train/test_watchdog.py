"""What makes no progress ends; what makes some does not."""

from __future__ import annotations

import threading

import pytest

from memfit.train.watchdog import STATUS, Watchdog

LONG = 60.0  # seconds in which a test that fails gives up


def test_a_block_without_progress_ends_its_process_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    over = threading.Event()

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    with Watchdog(0.01, "rank 1", end):
        assert over.wait(LONG)

    assert ended == [STATUS]
    assert capsys.readouterr().err.startswith("memfit: rank 1 has done no step, evaluation or snapshot for ")


def _failed(status: int) -> None:
    pytest.fail(f"ended with {status}")


def test_a_block_that_ends_in_time_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with Watchdog(LONG, "rank 1", _failed) as watchdog:
        watchdog.progress()
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


def test_without_a_limit_nothing_is_watched() -> None:
    before = set(threading.enumerate())
    with Watchdog(None, "rank 1", _failed):
        assert set(threading.enumerate()) == before
