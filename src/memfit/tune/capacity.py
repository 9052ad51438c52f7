"""How many bytes all trials of a search share, on each device and tier, and how many one of them may take."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import BudgetError, ConfigError
from memfit.hardware.machine_file import SUFFIXES
from memfit.tune.search import Search
from memfit.units import parse_bytes
from memfit.values.script import TIERS


def capacity_of(search: Search) -> dict[str, int]:
    """Bytes that all trials share, by the names of devices and tiers; no device where nothing is said of a command's bytes.

    Raises:
        ConfigError: what is needed for the account is missing, or a device is of another kind than trials run on.
    """
    return {**_devices(search), **_tiers(search)}


def _devices(search: Search) -> dict[str, int]:
    config = search.config
    device = device_of(search)
    kind, _, number = device.partition(":")
    whole = _device_bytes(kind)
    if not isinstance(config.devices, int):
        for name in config.devices:
            if name.partition(":")[0] != kind:
                raise ConfigError(
                    f"search.devices: {name} is no {kind}, and trials run on {kind}: name devices of that kind"
                )
        return {name: _bytes(f"devices.{name}", size, whole) for name, size in config.devices.items()}
    named = (
        [device]
        if config.devices == 1
        else [f"{kind}:{each}" for each in range(int(number or 0), int(number or 0) + config.devices)]
    )
    if config.budget is not None:
        return dict.fromkeys(named, parse_bytes(config.budget, total_bytes=whole))
    if search.is_command:
        if config.memory is not None:
            raise ConfigError(
                "search.budget is missing: the bytes that all trials share, of which each takes search.memory"
            )
        return {}
    each = (search.run.get("fit") or {}).get("budget")
    if each is None:
        raise ConfigError(
            'search.budget is missing: the bytes that all trials share, such as "24GiB" (or fit.budget, the bytes of each)'
        )
    at_once = 1 if config.at_once == "auto" else config.at_once
    return dict.fromkeys(
        named, math.ceil(at_once * ranks_of(search) / len(named)) * parse_bytes(each, total_bytes=whole)
    )


def _tiers(search: Search) -> dict[str, int]:
    config = search.config
    found = {}
    for tier in TIERS:
        given = getattr(config, f"{tier}_budget")
        each = (search.run.get("fit") or {}).get(f"{tier}_budget")
        if given is not None:
            found[tier] = _bytes(f"{tier}_budget", given, _device_bytes("cpu") if tier == "host" else None)
        elif isinstance(each, (int, str)) and config.at_once != "auto":
            try:
                found[tier] = (
                    config.at_once
                    * ranks_of(search)
                    * parse_bytes(each, total_bytes=_device_bytes("cpu") if tier == "host" else None)
                )
            except BudgetError:
                continue  # a word, or a share of what is not known here: the plan will say
    return {name: size for name, size in found.items() if size}


def _bytes(key: str, given: Any, whole: int | None) -> int:
    try:
        return parse_bytes(given, total_bytes=whole)
    except BudgetError as error:
        raise ConfigError(f"search.{key} is no number of bytes: {error}") from None


def ranks_of(search: Search) -> int:
    """How many ranks a trial has, as far as the file says it without its space."""
    if search.is_command:
        return search.config.ranks
    devices = (search.run.get("fit") or {}).get("devices")
    if isinstance(devices, str) and not devices.lower().endswith(SUFFIXES):
        numbers = [part for part in devices.partition("@")[0].lower().split("x") if part.strip().isdecimal()]
        return math.prod(map(int, numbers))
    return devices if isinstance(devices, int) else 1


def largest_device(capacity: Mapping[str, int]) -> int | None:
    """The bytes of the largest device; None where no device is in the account."""
    return max((size for name, size in capacity.items() if name.partition(":")[0] not in TIERS), default=None)


def budget_of(search: Search, values: Mapping[str, Any], capacity: Mapping[str, int]) -> int:
    """Bytes that the trial with these values may take on a device: its own budget, or that of all."""
    shared = largest_device(capacity) or 0
    given = (search.run_with(values).get("fit") or {}).get("budget")
    if given is None:
        return shared
    return min(shared, parse_bytes(given, total_bytes=_device_bytes(device_of(search).partition(":")[0])))


def device_of(search: Search) -> str:
    """The device that trials run on, by its name: "cpu", or "cuda:0" for the first GPU."""
    if search.is_command:
        return search.config.device
    device = str((search.run.get("fit") or {}).get("device", "auto"))
    if device == "auto":
        return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
    return "cuda:0" if device == "cuda" else device


def _device_bytes(device: str) -> int | None:
    """All bytes of a device, of which a budget may be a share; None where that is not known here."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else None
