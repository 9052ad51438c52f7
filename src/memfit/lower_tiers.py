"""The memory tiers below a device: bytes of host memory and disk, speed of the links, and which tiers a request allows to be used."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit.capture.trace_source import machine_of
from memfit.errors import BudgetError, InputError
from memfit.hardware.machine import Link, Machine
from memfit.hardware.topology import Topology
from memfit.step.given import check_model
from memfit.storage.folders import free_bytes, offload_folder
from memfit.storage.links import nearest_link
from memfit.storage.staging import STAGES_BYTES
from memfit.units import format_bytes, parse_bytes
from memfit.values.request import Request

MEANT_WITH_A_UNIT: Final = 256  # a bare number below it is one of GiB or MiB that lacks its unit
LINK_LATENCY_SECONDS: Final = 10e-6  # assumed for a copy between a GPU that is not in this computer and its host


def requested(model: nn.Module, *, sharers: int = 1, **arguments: Any) -> Request:
    """The request that the arguments of a public function make, for this model's device or the one that they name.

    Args:
        model: whose step is planned.
        sharers: devices of one computer that train together. Each has budgets of its own, so a share of lower tiers is one of its part of them.
        arguments: of the public function.

    Raises:
        InputError, BudgetError: as for `Request.of`, or no device of that name is known, or the model is none.
    """
    check_model(model)
    folder = arguments.get("folder")
    if folder is not None and arguments.get("device") is None:
        _check_folder(Path(folder))
    machine = machine_of(model, arguments.get("device"))
    # A function that takes a budget needs one: None is refused like anything else that is not a number of bytes.
    if "budget" in arguments:
        _check_budget(model, arguments["budget"], machine)

    def own_part(tier: str) -> int:
        there = capacity(machine, tier, arguments.get("folder"))
        return there if tier == "device" else there // sharers

    return Request.of(own_part, **arguments)


def _check_budget(model: nn.Module, given: Any, machine: Machine) -> None:
    """Refuse a budget that cannot be meant, before anything is captured for it."""
    if callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        raise InputError(
            f"budget={name} is a function: the arguments are model, sample, loss_fn, budget, optimizer, in this order"
        )
    if given is None:
        raise BudgetError('budget=None: write "8GiB", or a share of the device such as "80%", which is the default')
    try:
        budget = parse_bytes(given, total_bytes=machine.memory_bytes)
    except BudgetError:
        return  # `Request.of` reads it as well, and says which budget it is
    held = sum(p.nbytes for p in model.parameters())
    if str(given).strip().isdecimal() and budget < MEANT_WITH_A_UNIT and budget < held:
        raise BudgetError(
            f"budget={given!r} is {budget} bytes, and the model's parameters alone take {format_bytes(held)}: write the unit, "
            f'"{budget}GiB" or "{budget}MiB"'
        )


def capacity(machine: Machine, tier: str, folder: str | Path | None = None) -> int:
    """Bytes of a tier: the whole memory of device or host, or the free space of the disk. For a CPU "host" means the disk, its nearest lower tier."""
    if tier == "device":
        return machine.memory_bytes
    if tier == "host" and machine.kind == "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    where = offload_folder(folder)
    _check_folder(where)
    return free_bytes(where)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder} to offload to (lower_tier=, MEMFIT_OFFLOAD_DIR, of a DeepSpeed configuration nvme_path): make it, or name another one"
        )


def measured_links(here: torch.device, machine: Machine, request: Request) -> tuple[Link, ...]:
    """The links to lower tiers that a plan may use, the nearest first; only these are measured, since measuring takes a while.

    Args:
        here: the device that the model is on.
        machine: the device that seconds are predicted for.
        request: what the user asked.
    """
    gpu = machine.kind == "cuda"
    place = request.fixed.get("state_place", "device")
    if not (_opens_nearest(gpu, request) or _opens_disk(request) or request.fixed.get("streamed") or place != "device"):
        return ()
    if request.device is not None:
        nearest = Link("host", machine.link_bandwidth, machine.link_bandwidth, LINK_LATENCY_SECONDS)
    else:
        nearest = nearest_link(here, offload_folder(request.folder))
    if not gpu or not (_opens_disk(request) or place == "disk"):
        return (nearest,)
    # Copies between a GPU and a disk pass through host memory. For a GPU that is not in this computer, this computer's disk is assumed.
    disk = nearest_link(torch.device("cpu"), offload_folder(request.folder))
    through_host = replace(
        disk,
        out_bandwidth=min(disk.out_bandwidth, nearest.out_bandwidth),
        in_bandwidth=min(disk.in_bandwidth, nearest.in_bandwidth),
        latency_seconds=disk.latency_seconds + nearest.latency_seconds,
    )
    return nearest, through_host


def shared_out(links: tuple[Link, ...], sharers: int) -> tuple[Link, ...]:
    """The links as each of several devices of a computer has them when all copy at once: a disk is one for all, a GPU's bus its own."""
    return tuple(
        replace(link, out_bandwidth=link.out_bandwidth / sharers, in_bandwidth=link.in_bandwidth / sharers)
        if link.tier == "disk"
        else link
        for link in links
    )


def opened(topology: Topology, request: Request) -> Link | None:
    """The link to the nearest tier that a plan may offload to, with its capacity, and in `Link.below` the next one; None where nothing may be offloaded.

    Host memory may be used by default for a GPU; a disk only where the user says how much of it.

    Raises:
        InputError: a budget is for a tier that does not exist, or is too small.
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
    """Check that the budgets of lower tiers are possible on this machine, before anything is measured.

    Raises:
        InputError: they are not.
    """
    if not _opens_disk(request):
        return
    assert request.disk_budget is not None
    disk_budget, host_budget = request.disk_budget.given, request.host_budget
    if machine.kind != "cuda":
        raise InputError(
            f"disk_budget={disk_budget!r} is for the disk below a GPU's host memory, and this plan is for a CPU, whose offloading to disk host_budget "
            "limits: give host_budget instead"
        )
    if host_budget is None:
        raise InputError(
            f"disk_budget={disk_budget!r} takes what does not fit into host_budget, which was not given: give host_budget, too"
        )
    if host_budget.bytes <= STAGES_BYTES:
        raise InputError(
            f"host_budget={host_budget.given!r} is less than the {format_bytes(STAGES_BYTES)} of host memory that copies to the disk pass through: give "
            "more, or leave out disk_budget"
        )


def _two_opened(topology: Topology, request: Request) -> Link:
    assert request.host_budget is not None
    assert request.disk_budget is not None
    host, disk = topology.down[0]
    below = replace(disk, free_bytes=request.disk_budget.bytes)
    return replace(host, free_bytes=request.host_budget.bytes - STAGES_BYTES, below=below)
