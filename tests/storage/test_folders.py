"""One setting names the folder for all that is offloaded to disk, and the disk that a plan is priced for is the one that is used."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
import small
from memfit import lower_tiers
from memfit.hardware.machine import Link, Machine
from memfit.storage import folders
from memfit.storage.folders import cache_folder, free_bytes, offload_folder

TECHNIQUES: dict[str, dict[str, Any]] = {
    "activations": {"state_place": "device", "streamed": ""},
    "layers": {"streamed": "blocks"},
    "optimizer state": {"state_place": "disk", "streamed": ""},
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (folders.SETTING, folders.FORMER_SETTING, "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(folders, "_told", set())


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_settings_count_in_their_order_and_a_folder_that_is_named_before_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offload_folder() == Path("/var/tmp")  # noqa: S108 - nothing is made there
    for setting in ("TMPDIR", folders.FORMER_SETTING, folders.SETTING):
        monkeypatch.setenv(setting, str(made(tmp_path / setting)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert offload_folder() == tmp_path / setting
    assert offload_folder(tmp_path / "named") == tmp_path / "named"
    monkeypatch.setenv(folders.SETTING, str(tmp_path / "nowhere"))
    monkeypatch.delenv(folders.FORMER_SETTING)
    assert offload_folder() == tmp_path / "TMPDIR"


def test_the_former_setting_is_heard_and_said_once_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.FORMER_SETTING, str(tmp_path))
    with pytest.warns(DeprecationWarning, match="MEMFIT_SWAP_DIR is now called MEMFIT_OFFLOAD_DIR"):
        assert offload_folder() == tmp_path
    assert offload_folder() == tmp_path


def test_the_cache_lies_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("MEMFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    assert cache_folder() == tmp_path / "theirs" / "memfit"


class Blocks(torch.nn.Module):
    """Blocks under a name, so that they can be streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(small.chain(1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Disk:
    """Notes where files are made and what is measured; the link of one folder is faster than that of all others."""

    def __init__(self, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Path] = []
        self.asked: list[Path] = []
        mkstemp = tempfile.mkstemp

        def noted(*arguments: Any, **named: Any) -> tuple[int, str]:
            if named.get("prefix", "").startswith("memfit-offload-"):
                self.made.append(Path(named["dir"]))
            return mkstemp(*arguments, **named)

        def nearest_link(device: torch.device, folder: Path) -> Link:
            self.asked.append(folder)
            speed = 3e9 if folder == fast else 1e9
            return Link("disk", speed, speed, 1e-4, least_bytes=1)

        monkeypatch.setattr(tempfile, "mkstemp", noted)
        monkeypatch.setattr("memfit.lower_tiers.nearest_link", nearest_link)


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("how", ["set", "named"])
def test_the_disk_that_is_priced_is_the_disk_that_is_used(
    technique: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(made(tmp_path / "elsewhere")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    wanted = made(tmp_path / "wanted")
    named: dict[str, Any] = {"lower_tier": wanted} if how == "named" else {}
    if how == "set":
        monkeypatch.setenv(folders.SETTING, str(wanted))
    disk = Disk(wanted, monkeypatch)
    model, sample = Blocks(), small.rows()
    fixed = {"micro_batches": 1, **TECHNIQUES[technique]}
    plain = memfit.plan(model, sample, small.squared_error, 1 << 40, small.adamw, fixed=fixed, **named)
    budget: int = 1 << 40
    if technique == "activations":
        tight: dict[str, Any] = {"host_budget": "64MiB", **named}
        roomy = memfit.plan(model, sample, small.squared_error, 1 << 40, small.adamw, fixed=fixed, **tight)
        budget = memfit.smallest_budget(roomy)
        plain = memfit.plan(model, sample, small.squared_error, budget, small.adamw, fixed=fixed, **tight)
        assert plain.script.swaps
    assert disk.asked
    assert set(disk.asked) == {wanted}
    assert plain.prediction.copy_seconds > 0
    engine = memfit.apply(plain, model, **named)
    engine.step(sample)
    assert disk.made
    assert set(disk.made) == {wanted}
    if engine.stream is not None:
        engine.stream.close()


def test_free_space_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil's own
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(9, 0, 7 if Path(folder) == tmp_path else 1))
    assert free_bytes(tmp_path) == 7
    asked: list[Any] = []

    def asking(folder: str | Path | None = None) -> Path:
        asked.append(folder)
        return tmp_path

    monkeypatch.setattr(lower_tiers, "offload_folder", asking)
    cpu = Machine("a processor", "cpu", 1, 1.0, 1.0, 1.0)
    assert lower_tiers.capacity(cpu, "host", "there") == 7
    assert asked == ["there"]
