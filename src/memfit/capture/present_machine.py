"""This computer as a Machine: the device's name, and its rates, measured in about a tenth of a second."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from memfit.hardware.machine import Machine
from memfit.step.generators import forked_generators


def device_name(device: torch.device) -> str:
    """Name of a present device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@lru_cache(maxsize=4)
def present_machine(device: torch.device) -> Machine:
    """This computer's device with quickly measured rates (about a tenth of a second)."""

    def best(function: Callable[[], object], repeats: int = 3) -> float:
        times = []
        for _ in range(repeats):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        return min(times)

    n = 512 if device.type == "cpu" else 4096
    with forked_generators(device):
        a = torch.rand(n, n, device=device)
        source = torch.rand((1 << 23) if device.type == "cpu" else (1 << 27), device=device)
    target = torch.empty_like(source)
    flops = 2 * n**3 / best(lambda: a @ a)
    half = a.to(torch.bfloat16)
    half_flops = 2 * n**3 / best(lambda: half @ half)
    bandwidth = 2 * source.numel() * 4 / best(lambda: target.copy_(source))
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    return Machine(
        device_name(device),
        device.type,
        int(memory),
        flops,
        half_flops,
        bandwidth,
        launch_seconds=5e-6,
        allocation_bytes=512 if device.type == "cuda" else 1,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        measured=True,
    )
