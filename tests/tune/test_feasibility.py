"""What is said before the first trial: nothing fits, nothing can be planned, nothing may take what it was promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InfeasibleError, InputError
from memfit.tune.feasibility import check_feasible
from memfit.tune.plans import Fit
from tune import searches

WIDTHS = {"model.args.width": [32, 64, 256]}
WRONG = "model.python: toy.py has no function 'biuld'"


def check(folder: Path, answer: Callable[[int], Fit]) -> list[int]:
    """The widths that were planned, each with this answer."""
    asked = []

    def planned(values: dict[str, Any], _: Path) -> Fit:
        asked.append(values["model.args.width"])
        return answer(asked[-1])

    check_feasible(searches.toy(folder, WIDTHS), {"cpu": 400 << 10}, planned)
    return asked


def test_one_that_fits_is_enough(tmp_path: Path) -> None:
    asked = check(tmp_path, lambda width: Fit(fits=width == 64))
    assert asked[-1] == 64
    assert len(asked) == len(set(asked))


def test_where_nothing_fits_the_smallest_that_would_is_named(tmp_path: Path) -> None:
    told = (
        r"nothing in search.space fits .* the smallest that would is 500 KiB \(512000 bytes\), with model.args.width=32"
    )
    with pytest.raises(InfeasibleError, match=told) as caught:
        check(tmp_path, lambda width: Fit(fits=False, minimum_bytes=width * 16000))
    assert caught.value.minimum_bytes == 512000
    with pytest.raises(InfeasibleError, match="no budget was found that would do"):
        check(tmp_path, lambda _: Fit(fits=False))


def combinations(folder: Path, space: dict[str, Any]) -> list[dict[str, Any]]:
    """What is planned of a space in which nothing fits."""
    asked: list[dict[str, Any]] = []

    def planned(values: dict[str, Any], _: Path) -> Fit:
        asked.append(values)
        inside = values["model.args.width"] == 32 and values.get("fit.global_batch", 8) == 8  # no end of either
        return Fit(fits=False, minimum_bytes=1 << (20 if inside else 30))

    check_feasible(searches.toy(folder, space), {"cpu": 400 << 10}, planned)
    return asked


def test_what_is_not_all_that_could_be_tried_refuses_nothing(tmp_path: Path) -> None:
    assert len(combinations(tmp_path, {"model.args.width": list(range(8, 21))})) == 12
    space = {"model.args.width": [64, 32, 128], "fit.global_batch": [32, 8, 16, 24, 40]}
    assert len(combinations(tmp_path, space)) == 12
    with pytest.raises(InfeasibleError, match="the smallest that would is 1.00 MiB"):
        combinations(tmp_path, {**space, "fit.global_batch": [32, 8, 16]})


def test_what_changes_no_plan_is_not_tried(tmp_path: Path) -> None:
    space = {"optim.lr": [0.1, 0.2], "train.seed": {"low": 0, "high": 9}, "fit.budget": ["300KiB", "400KiB", 102400]}
    asked: list[Any] = []

    def planned(values: dict[str, Any], _: Path) -> Fit:
        asked.append(values)
        return Fit(fits=False, minimum_bytes=1024)

    told = r"no trial was started: the smallest that would is 1.00 KiB \(1024 bytes\), with model.args.width=32$"
    with pytest.raises(InfeasibleError, match=told):
        check_feasible(searches.toy(tmp_path, {**space, **WIDTHS}), {"cpu": 400 << 10}, planned)
    assert [each["model.args.width"] for each in asked] == [32, 256, 64]
    assert {each["fit.budget"] for each in asked} == {"400KiB"}


def test_what_is_wrong_with_every_trial_is_said_once_and_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no trial could be planned, so none was started: {WRONG}"):
        check(tmp_path, lambda _: Fit(fits=False, error="ConfigError", message=WRONG))


def test_what_is_wrong_with_some_is_left_to_the_trials(tmp_path: Path) -> None:
    assert len(check(tmp_path, lambda width: Fit(fits=False, error="ValueError", message=f"width {width}"))) == 3
    assert (
        len(check(tmp_path, lambda width: Fit(fits=False, error="ValueError" if width == 64 else "", message=WRONG)))
        == 3
    )
