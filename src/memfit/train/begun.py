"""A run that has begun: what its folder and its newest snapshot say of it, for whoever goes on with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memfit.errors import ConfigError, PlanFileError
from memfit.train import ranks, snapshot_folders, snapshots
from memfit.train.config import Config, from_json, load_config, override
from memfit.train.progress import Display
from memfit.train.snapshots import Snapshot
from memfit.values.plan import Plan

CONFIG_NAME: Final = "config.json"
PLAN_NAME: Final = "plan.json"


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that stopped.

    Attributes:
        out: its folder, which may have been moved.
        snapshot: to go on from; None where it stopped before its first, or where snapshots were not looked at.
        config: as it was configured, with changes.
        before: the same without them.
    """

    out: Path
    snapshot: Snapshot | None
    config: Config
    before: Config

    def planned_otherwise(self, config: Config) -> bool:
        """Whether something has changed that a plan is made for."""
        planned = [(each.fit, each.model, each.optim.name, each.deepspeed) for each in (config, self.before)]
        return planned[0] != planned[1]

    def plan(self, config: Config, display: Display) -> Plan | None:
        """The plan so far, where nothing that it was made for has changed: another one might split the batch in another way, which changes the last bits.

        Args:
            config: to go on with.
            display: told of a plan that cannot be read.
        """
        if self.planned_otherwise(config):
            return None
        try:
            if self.snapshot is not None:
                return Plan.from_json(self.snapshot.plan)
            return Plan.load(self.out / PLAN_NAME) if (self.out / PLAN_NAME).exists() else None
        except PlanFileError as error:
            display.note(f"the saved plan cannot be read ({error}); planning again")
            return None


def folder_of(path: Path) -> Path:
    """The folder of a run, by that folder or by one of its snapshots."""
    return path.resolve().parent if (path / snapshots.RECORD).exists() else path


def begun_in(path: Path, settings: Iterable[str] = (), display: Display | None = None) -> Begun:
    """The run in a folder.

    Args:
        path: folder of the run, or one of its snapshots.
        settings: changes to its configuration, such as "fit.budget=4GiB".
        display: told of snapshots that are passed over; None to look at what was configured alone, and at no snapshot's content.

    Raises:
        ConfigError: the configuration cannot be read, or be changed so.
        SnapshotError: there is nothing to go on from, or what was named is damaged.
    """
    out = folder_of(path)
    snapshot = None if display is None else _newest(path, display)
    written = snapshots.glance(path) if display is None else None if snapshot is None else snapshot.config
    return Begun(out, snapshot, *_configured(written, out, settings))


def ranks_of(path: Path) -> int:
    """The number of ranks that a run was trained on, by what is written in its folder; 1 where nothing is."""
    try:
        return ranks.number_of(begun_in(path).config)
    except (OSError, ValueError):
        return 1


def _newest(path: Path, display: Display) -> Snapshot | None:
    """The snapshot to go on from; None where the run stopped before its first."""
    if (path / snapshots.RECORD).exists():
        return snapshots.read(path)
    snapshots.sweep(path)
    if not snapshot_folders.folders(path) and (path / CONFIG_NAME).is_file():
        display.note(f"{path} holds no snapshot yet: starting from the beginning")
        return None
    return snapshots.latest(path, display.note)


def _configured(written: Mapping[str, Any] | None, out: Path, settings: Iterable[str]) -> tuple[Config, Config]:
    """The configuration of a run with changes, and as it was before them.

    Args:
        written: in a snapshot; None to read it from the run's folder.
        out: that folder, which may have been moved.
        settings: the changes.
    """
    config = load_config(out / CONFIG_NAME) if written is None else from_json(written, out)
    data = config.to_json()
    data["train"]["out"] = str(out.resolve())
    before = from_json(data, out)
    for setting in settings:
        override(data, setting)
    config = from_json(data, out)
    if config.out.resolve() != out.resolve():
        raise ConfigError(f"train.out: a run goes on in its own folder, {out}")
    return config, before
