"""Several ranks of one run: the devices that a configuration names for them, and what they do not do yet."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from memfit.capture.trace_source import machine_of
from memfit.devices import several_devices, share_of
from memfit.errors import ConfigError
from memfit.hardware.machine import Machine, is_machine
from memfit.hardware.machine_file import SUFFIXES, named_devices
from memfit.hardware.topology import Topology
from memfit.ranks import check_plan, place
from memfit.techniques.sharding import is_pipeline
from memfit.train.assemble import Assembly
from memfit.train.config import Config
from memfit.units import format_bytes
from memfit.values.plan import Plan


def devices(config: Config, assembly: Assembly, device: str | None = None) -> Topology | None:
    """The devices that a configuration names; None where it is for one.

    Args:
        config: of the run.
        assembly: what it describes.
        device: as for `memfit.plan`.

    Raises:
        InputError: they cannot be read, or the budget is a share of unequal ones.
        ConfigError: the budget is more than a device has.
    """
    if config.fit.devices is None:
        return None
    found = several_devices(devices_named(config), machine_of(assembly.model, device))
    if config.fit.budget is None:
        return found
    each = max(machine.memory_bytes for machine in found.devices)
    asked = share_of(found, config.fit.budget)
    if asked > each:
        raise ConfigError(
            f"fit.budget: {format_bytes(asked)} is more than the {format_bytes(each)} that each of the {len(found.devices)} devices has: lower it, or name "
            "larger devices"
        )
    return found


def here(config: Config, plan: Plan | None) -> tuple[Config, tuple[int, int] | None]:
    """The configuration as this process has it, and its rank and the number of ranks; None where it is alone.

    Args:
        config: of the run; without `fit.devices` its devices are as many as there are ranks.
        plan: to follow; None where one is made.

    Raises:
        ConfigError: the devices are others than the ranks; or something is asked for that several ranks do not do yet.
        InputError: the plan is for another number of ranks.
    """
    there = place()
    named = config.fit.devices
    if there is None:
        if named is not None:
            number = number_of(config)
            raise ConfigError(
                f"fit.devices: {named!r} names {number} devices, and this process is alone: memfit train --nproc {number}, or start it with torchrun "
                f"--nproc-per-node {number}"
            )
        return config, None
    check(config, there[1])
    if plan is not None:
        check_plan(plan, there[1])
    return of_ranks(config, there[1]), there


def of_ranks(config: Config, number: int) -> Config:
    """With devices: as many as there are ranks, where it names none."""
    return config if config.fit.devices is not None else replace(config, fit=replace(config.fit, devices=number))


def check(config: Config, ranks: int) -> None:
    """Check that a configuration can be trained on so many ranks.

    Raises:
        ConfigError: its devices are others, or it asks for what several ranks do not do yet.
    """
    named = config.fit.devices
    if named is not None and number_of(config) != ranks:
        raise ConfigError(
            f"fit.devices: {named!r} names {number_of(config)} devices, and the run has {ranks} ranks: make them equal"
        )
    if config.report.frontier:
        raise ConfigError("report.frontier: a frontier is of one device, and this run has several ranks: leave it out")


def number_of(config: Config) -> int:
    """The ranks that a configuration is for; 1 for one device."""
    return 1 if config.fit.devices is None else len(named_devices(devices_named(config), _ANY).devices)


def devices_named(config: Config) -> str | int | Path:
    """The devices as the configuration names them; a machine file is looked for beside the configuration, then where the command was given."""
    devices = config.fit.devices
    assert devices is not None, "whoever asks has several"
    if isinstance(devices, str) and devices.lower().endswith(SUFFIXES):
        beside = Path(config.folder, devices)
        return beside if beside.exists() else Path(devices)
    return devices


def elsewhere(config: Config) -> str | None:
    """The GPU that its devices are, by the name in the table of machines; None where they are such as this computer's.

    With `fit.device: 4090` alone that is the one, wherever the run is planned.
    """
    if config.fit.devices is None:
        name = str(config.fit.device)
        return name if is_machine(name) else None
    return named_devices(devices_named(config), _ANY).devices[0].name or None


def for_number(config: Config, number: int) -> Config:
    """With so many of its devices; without any, and without a way to share the step out, where it is one."""
    devices = config.fit.devices
    if number == 1:
        fixed = {name: value for name, value in config.fit.fixed.items() if name != "sharding"}
        return replace(config, fit=replace(config.fit, devices=None, fixed=fixed))
    if isinstance(devices, str) and devices.lower().endswith(SUFFIXES):
        raise ConfigError(
            f"fit.devices: the machine file {devices} names {number_of(config)} devices, and the run goes on with {number}: name those that are left, "
            "--set fit.devices=..."
        )
    fixed = dict(config.fit.fixed)
    if number != number_of(config) and is_pipeline(str(fixed.get("sharding", ""))):
        fixed["sharding"] = str(fixed["sharding"]).partition("/")[0]  # the stages that were fixed are for other ranks
    # "2x8xh100@360GB/s,400GB/s": what is left need not fill nodes, so of the links those between nodes count.
    form = re.fullmatch(r"(?:\s*\d+\s*x)+([^@]*)(@.*)?", str(devices))
    rates = (form[2] or "").removeprefix("@").split(",") if form else []
    fewer = f"{number}x{form[1]}" + (f"@{rates[-1].strip()}" if rates[-1] else "") if form else number
    return replace(config, fit=replace(config.fit, devices=fewer, fixed=fixed))


def restarted() -> bool:
    """Whether torchrun has started this process again, after a rank of the run had failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in {"", "0"}


_ANY: Final = Machine("", "cpu", 1, 1.0, 1.0, 1.0)  # where only the number of devices matters


def one_device(config: Config, what: str) -> None:
    """Check that a configuration is for one device.

    Raises:
        ConfigError: it names several.
    """
    if config.fit.devices is not None:
        raise ConfigError(
            f"fit.devices: {what} is of one device, and {config.fit.devices!r} names several: leave fit.devices out"
        )
