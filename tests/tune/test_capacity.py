"""The bytes that trials share: of which devices and tiers, from what a search file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memfit.errors import ConfigError
from memfit.tune.capacity import budget_of, capacity_of, largest_device, ranks_of
from tune import searches

KIB, MIB = 1 << 10, 1 << 20


def toy(folder: Path, fit: dict[str, Any] | None = None, **search: Any) -> Any:
    return searches.toy(folder, {"optim.lr": [0.1, 0.2]}, fit, **search)


@pytest.mark.parametrize(
    ("fit", "search", "capacity"),
    [
        ({}, {}, {"cpu": 400 * KIB}),
        ({}, {"at_once": 3}, {"cpu": 1200 * KIB}),
        ({}, {"at_once": 3, "budget": "1MiB"}, {"cpu": MIB}),
        ({"devices": 2}, {"at_once": 2}, {"cpu": 1600 * KIB}),  # four ranks in one memory
        (
            {"devices": "2x1GiB@50GB/s"},
            {"at_once": 3, "devices": 3},
            dict.fromkeys(("cpu:0", "cpu:1", "cpu:2"), 800 * KIB),
        ),
        ({"device": "cuda"}, {"devices": 2, "budget": "8GiB"}, {"cuda:0": 8 << 30, "cuda:1": 8 << 30}),
        ({"device": "cuda:1"}, {"budget": "8GiB"}, {"cuda:1": 8 << 30}),
        ({"device": "cuda"}, {"devices": {"cuda:0": "2MiB", "cuda:3": MIB}}, {"cuda:0": 2 * MIB, "cuda:3": MIB}),
        ({"disk_budget": "2MiB"}, {"at_once": 2}, {"cpu": 800 * KIB, "disk": 4 * MIB}),
        ({"disk_budget": "2MiB"}, {"disk_budget": "3MiB"}, {"cpu": 400 * KIB, "disk": 3 * MIB}),
    ],
)
def test_what_trials_share(
    tmp_path: Path, fit: dict[str, Any], search: dict[str, Any], capacity: dict[str, int]
) -> None:
    assert capacity_of(toy(tmp_path, fit, **search)) == capacity


@pytest.mark.parametrize(
    ("fit", "search", "message"),
    [
        ({}, {"devices": {"cuda:0": "1GiB"}}, "search.devices: cuda:0 is no cpu, and trials run on cpu: name devices of that kind"),
        ({}, {"devices": {"cpu:0": "much"}}, "search.devices.cpu:0 is no number of bytes"),
        ({}, {"devices": {}}, "search.devices names none: give a number, or bytes by the names of devices"),
        ({}, {"devices": {"cpu:0": "1GiB"}, "budget": "1GiB"}, "search.budget and the bytes in search.devices say the same twice"),
        ({}, {"devices": 0}, "search.devices: 0 is less than 1"),
        ({}, {"ranks": 2}, "search.ranks goes with search.command: a run of memfit has as many as fit.devices names"),
        ({}, {"cluster": "auto", "budget": "1GiB"}, "search.budget and search.cluster: the bytes of a cluster are what its machines have told"),
        ({}, {"cluster": "auto", "devices": 2}, "search.cluster: on a cluster a trial has one device"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_said(
    tmp_path: Path, fit: dict[str, Any], search: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        capacity_of(toy(tmp_path, fit, **search))


def test_a_trial_may_take_no_more_than_the_largest_device(tmp_path: Path) -> None:
    search = toy(tmp_path, {"device": "cuda", "budget": "1GiB"})
    capacity = {"cuda:0": 2 * MIB, "cuda:1": 3 * MIB, "host": 1 << 40}
    assert largest_device(capacity) == budget_of(search, {}, capacity) == 3 * MIB
    assert budget_of(search, {"fit.budget": "1MiB"}, capacity) == MIB
    assert (largest_device({}), largest_device({"host:ab": 5})) == (None, None)


def test_ranks_are_counted_from_the_devices(tmp_path: Path) -> None:
    assert [ranks_of(toy(tmp_path, {"devices": named})) for named in (None, 4, "2x8xh100", "4x24GiB")] == [1, 4, 16, 4]
    assert ranks_of(searches.command(tmp_path, ranks=3)) == 3
