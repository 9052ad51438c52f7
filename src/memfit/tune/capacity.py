"""How many bytes all trials of a search share, and how many one of them may take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError
from memfit.tune.search import Search
from memfit.units import parse_bytes


def capacity_of(search: Search) -> dict[str, int]:
    """Bytes of the device that all trials share, by its name; empty where nothing is said of a command's bytes.

    Raises:
        ConfigError: what is needed for the account is missing.
    """
    config = search.config
    device = config.device if search.is_command else _device_of(search.run)
    whole = _device_bytes(device)
    if config.budget is not None:
        return {device: parse_bytes(config.budget, total_bytes=whole)}
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
    number = 1 if config.at_once == "auto" else config.at_once
    return {device: number * parse_bytes(each, total_bytes=whole)}


def budget_of(search: Search, values: Mapping[str, Any], capacity: Mapping[str, int]) -> int:
    """Bytes that the trial with these values may take: its own budget, or that of all."""
    shared = next(iter(capacity.values()), 0)
    given = (search.run_with(values).get("fit") or {}).get("budget")
    if given is None:
        return shared
    return min(shared, parse_bytes(given, total_bytes=_device_bytes(_device_of(search.run))))


def _device_of(run: Mapping[str, Any]) -> str:
    device = str((run.get("fit") or {}).get("device", "auto"))
    if device == "auto":
        return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
    return "cuda:0" if device == "cuda" else device


def _device_bytes(device: str) -> int | None:
    """All bytes of a device, of which a budget may be a share; None where that is not known here."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else None
