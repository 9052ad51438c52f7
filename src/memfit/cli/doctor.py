"""`memfit doctor`: what this computer offers to a plan, and what is missing."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from memfit import __version__
from memfit.cli.answer import Answer
from memfit.units import format_bytes

_EXTRAS: Final = {"transformers": ("transformers", "safetensors"), "pictures": ("matplotlib",)}
_MATRIX: Final = 1024
_COPY_BYTES: Final = 128 * 2**20
_DISK_BYTES: Final = 64 * 2**20


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "doctor", parents=[shared], help="say what this computer offers, and what is missing", description=__doc__
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> Answer:
    """Look, measure for a moment, and say."""
    data: dict[str, Any] = {
        "verb": "doctor",
        "versions": {"memfit": __version__, "python": platform.python_version(), "torch": version("torch")},
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "extras": {name: all(version(each) for each in needed) for name, needed in _EXTRAS.items()},
        "tiers": [*devices(), host(), disk()],
        "known_devices": known(),
    }
    return Answer(data, described(data))


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Its name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host() -> dict[str, Any]:
    """The host's memory, with its limit when the process runs in a container, and how fast it is."""
    total, free = _memory()
    limit, used = _control_group()
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - used)
    return {"name": "cpu", "total_bytes": total, "free_bytes": max(0, free), **_rates("cpu")}


def _memory() -> tuple[int, int]:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
            return 0, 0
        total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, free


def _control_group() -> tuple[int | None, int]:
    """Limit and use of this process's control group (version 2, then 1)."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((root / limit).read_text()), int((root / used).read_text())
        except (OSError, ValueError):  # "max" is no limit
            continue
    return None, 0


def disk() -> dict[str, Any]:
    """The disk under the working folder, where snapshots and swapped storages go, and how fast it takes them."""
    usage = shutil.disk_usage(Path.cwd())
    tier: dict[str, Any] = {
        "name": "disk",
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "write_bytes_per_second": None,
    }
    if usage.free < 4 * _DISK_BYTES:
        return tier
    block = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as file:
            start = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            tier["write_bytes_per_second"] = len(block) / (time.perf_counter() - start)
    except OSError:  # a folder that cannot be written to has no rate
        pass
    return tier


def devices() -> list[dict[str, Any]]:
    """The GPUs torch can use."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "model": torch.cuda.get_device_name(index),
                "total_bytes": total,
                "free_bytes": free,
                **_rates(f"cuda:{index}"),
            }
        )
    return found


def _rates(device: str) -> dict[str, float]:
    """FLOP/s of an fp32 matrix product and bytes/s of a copy, read and written; the best of a few, no benchmark."""
    import torch

    def best(action: Any) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            action()
            if device != "cpu":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    size = _MATRIX if device == "cpu" else 4 * _MATRIX
    matrix = torch.ones(size, size, device=device)
    product = torch.empty_like(matrix)
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.ones_like(source)
    return {
        "fp32_flops": 2 * size**3 / best(lambda: torch.mm(matrix, matrix, out=product)),
        "bytes_per_second": 2 * _COPY_BYTES / best(lambda: target.copy_(source)),
    }


def known() -> list[dict[str, Any]]:
    """GPUs that can be planned for without having one."""
    from memfit.machine import KNOWN

    return [asdict(machine) for machine in KNOWN]


def described(data: dict[str, Any]) -> str:
    """The same for a person."""
    versions = data["versions"]
    lines = [
        f"memfit {versions['memfit']}, torch {versions['torch']}, Python {versions['python']}, {data['platform']}",
        f"Processor: {data['processor']}, {data['cores']} cores",
    ]
    for tier in data["tiers"]:
        name = f"{tier['name']} ({tier['model']})" if "model" in tier else tier["name"]
        line = f"{name}: {format_bytes(tier['free_bytes'])} free of {format_bytes(tier['total_bytes'])}"
        if tier.get("fp32_flops"):
            line += f", {tier['fp32_flops'] / 1e9:,.0f} GFLOP/s (fp32), {tier['bytes_per_second'] / 1e9:.1f} GB/s"
        if tier.get("write_bytes_per_second"):
            line += f", writes {tier['write_bytes_per_second'] / 1e9:.2f} GB/s"
        lines.append(line)
    if not any(tier["name"].startswith("cuda") for tier in data["tiers"]):
        lines.append("GPU: torch sees none; budgets count the CPU's memory")
    for name, there in data["extras"].items():
        lines.append(f"Extra {name}: {'installed' if there else f'missing (pip install memfit[{name}])'}")
    lines.append("Known for --device: " + ", ".join(machine["name"] for machine in data["known_devices"]))
    return "\n".join(lines)
