"""Runs on one processor share its cores."""

from __future__ import annotations

import os

import pytest

from memfit.hardware.cores import cores
from memfit.runner import Ledger, RunRequest
from memfit.runner.cores import CORES, THREADS, runs_at_once, threads


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    assert cores() == 3


@pytest.mark.parametrize(
    ("number", "ranks", "fit", "wanted"),
    [(8, 1, None, 8), (8, 2, None, 4), (8, 16, None, 1), (8, 1, 3, 3), (8, 1, 20, 8), (8, 1, 0, 1), (8, 3, 5, 2)],
)
def test_runs_at_once_are_no_more_than_fit_and_no_more_than_cores(
    number: int, ranks: int, fit: int | None, wanted: int
) -> None:
    assert runs_at_once(number, ranks, fit=fit) == wanted


def test_ranks_of_runs_that_are_side_by_side_have_equal_parts_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    for number in range(1, 20):
        for at_once in range(2, 20):
            for ranks in range(1, 5):
                each = int(threads(number, at_once, ranks)[THREADS])
                assert each == 1 or each * at_once * ranks <= number < (each + 1) * at_once * ranks
    assert threads(8, 1, 4) == {}, "it has the processor to itself"
    monkeypatch.setenv(THREADS, "3")
    assert threads(8, 2) == {}, "the user has said it"


def test_cores_are_an_account_and_no_device() -> None:
    ledger = Ledger({"cpu": 100, CORES: 2})
    for name in ("a", "b"):
        request = RunRequest(name, (), peak_bytes={CORES: 1}, rank_bytes=(10,))
        assert ledger.fits(request)
        ledger.promise(request)
    assert not ledger.fits(RunRequest("c", (), peak_bytes={CORES: 1}, rank_bytes=(10,)))
    assert ledger.fits(RunRequest("d", (), rank_bytes=(10,))), "one that asks for none"
    with pytest.raises(ValueError, match="the devices here are cpu: name one of them"):
        ledger.check(RunRequest("e", (), rank_bytes=(10,), device="cuda"))
