"""What is below a device: how many bytes there are of host memory and disk, how fast the links are, and which of the tiers a request opens."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit.capture.trace_source import machine_of
from memfit.errors import InputError
from memfit.hardware.machine import Link, Machine
from memfit.hardware.topology import Topology
from memfit.storage.folders import free_bytes, offload_folder
from memfit.storage.links import link_below
from memfit.storage.staging import STAGES_BYTES
from memfit.units import format_bytes, parse_bytes
from memfit.values.request import Request

LINK_LATENCY_SECONDS: Final = 10e-6  # of a copy to a host that is not here


def requested(model: nn.Module, **arguments: Any) -> Request:
    """The request that the arguments of a public function make, for this model's device or the one that they name.

    Raises:
        InputError, BudgetError: as for `Request.of`, or no device of that name is known.
    """
    machine = machine_of(model, arguments.get("device"))
    # A function that takes a budget needs one: None is refused as whatever else is no number of bytes.
    if "budget" in arguments:
        parse_bytes(arguments["budget"], total_bytes=machine.memory_bytes)
    return Request.of(partial(capacity, machine, folder=arguments.get("folder")), **arguments)


def capacity(machine: Machine, tier: str, folder: str | Path | None = None) -> int:
    """Bytes of a tier: all of the device's and the host's memory, and what is free on the disk. Right below a CPU, as "host", is the disk."""
    if tier == "device":
        return machine.memory_bytes
    if tier == "host" and machine.kind == "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free_bytes(offload_folder(folder))


def measured_links(here: torch.device, machine: Machine, request: Request) -> tuple[Link, ...]:
    """The links down that a plan may use, the nearest first; only these are measured, as it takes a while.

    Args:
        here: the device that the model is on.
        machine: that seconds are for.
        request: what the user asked.
    """
    gpu = machine.kind == "cuda"
    place = request.fixed.get("state_place", "device")
    if not (_opens_nearest(gpu, request) or _opens_disk(request) or request.fixed.get("streamed") or place != "device"):
        return ()
    if request.device is not None:
        nearest = Link("host", machine.link_bandwidth, machine.link_bandwidth, LINK_LATENCY_SECONDS)
    else:
        nearest = link_below(here, offload_folder(request.folder))
    if not gpu or not (_opens_disk(request) or place == "disk"):
        return (nearest,)
    # Through a GPU's host passes all that goes to the disk below it; this computer's disk, also for a GPU that is not here.
    disk = link_below(torch.device("cpu"), offload_folder(request.folder))
    through_host = replace(
        disk,
        out_bandwidth=min(disk.out_bandwidth, nearest.out_bandwidth),
        in_bandwidth=min(disk.in_bandwidth, nearest.in_bandwidth),
        latency_seconds=disk.latency_seconds + nearest.latency_seconds,
    )
    return nearest, through_host


def opened(topology: Topology, request: Request) -> Link | None:
    """The link to the nearest tier that a plan may offload to with the free space there, and below it the next; None where nothing may be moved.

    A GPU's host is open by default, a machine's disk only where the user says how much of it.

    Raises:
        InputError: a budget for a tier that there is not, or too small a one.
    """
    gpu = topology.devices[0].kind == "cuda"
    if _opens_disk(request):
        return _two_opened(topology, request)
    if not _opens_nearest(gpu, request):
        return None
    nearest, given = topology.down[0][0], request.host_budget
    return nearest if given is None else replace(nearest, free_bytes=given.bytes)


def _opens_nearest(gpu: bool, request: Request) -> bool:  # noqa: FBT001 - a fact, not a switch
    return gpu if request.host_budget is None else request.host_budget.bytes > 0


def _opens_disk(request: Request) -> bool:
    return request.disk_budget is not None and request.disk_budget.bytes > 0


def check(machine: Machine, request: Request) -> None:
    """See that the budgets of lower tiers can stand together on this machine; before anything is measured.

    Raises:
        InputError: they cannot.
    """
    if not _opens_disk(request):
        return
    assert request.disk_budget is not None
    disk_budget, host_budget = request.disk_budget.given, request.host_budget
    if machine.kind != "cuda":
        raise InputError(
            f"disk_budget={disk_budget!r} is room on the disk below a GPU's host, and this plan is for a CPU, which has its disk right below it: give "
            "host_budget"
        )
    if host_budget is None:
        raise InputError(
            f"disk_budget={disk_budget!r} is room for what the host has none for, and how much the host has nobody said: give host_budget, too"
        )
    if host_budget.bytes <= STAGES_BYTES:
        raise InputError(
            f"host_budget={host_budget.given!r} does not hold the {format_bytes(STAGES_BYTES)} that copies to the disk pass through: give it more, or leave "
            "out disk_budget"
        )


def _two_opened(topology: Topology, request: Request) -> Link:
    assert request.host_budget is not None
    assert request.disk_budget is not None
    host, disk = topology.down[0]
    below = replace(disk, free_bytes=request.disk_budget.bytes)
    return replace(host, free_bytes=request.host_budget.bytes - STAGES_BYTES, below=below)
