"""`memfit doctor`: the hardware and packages that plans can use, and what is missing; with `--oom`, why a program ran out of memory."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from memfit import __version__
from memfit.cli import extras
from memfit.cli.answer import Answer
from memfit.errors import InputError
from memfit.hardware.cores import cores
from memfit.progress import Progress
from memfit.units import format_bytes, format_seconds

_MATRIX: Final = 1024
_LONG_ENOUGH: Final = 0.5  # seconds of one rate
_COPY_BYTES: Final = 128 * 2**20
_DISK_BYTES: Final = 64 * 2**20


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser = verbs.add_parser(
        "doctor", parents=[shared], help="say what this computer offers, and what is missing", description=__doc__
    )
    parser.add_argument(
        "--oom",
        metavar="FILE",
        type=Path,
        help="explain instead why a program ran out of memory: FILE holds its last words, or a CUDA memory snapshot",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Inspect this computer, measure for a moment, and report."""
    if arguments.oom is not None:
        return post_mortem(arguments.oom)
    from memfit.train import progress

    display = progress.display()
    try:
        return _inspected(display.stage)
    finally:
        display.close()


def _inspected(stage: Progress) -> Answer:
    """What there is; `stage` is told what is being looked at."""
    stage("loading torch", 0.0)
    import torch

    stage("measuring memory and disk", 0.2)
    data: dict[str, Any] = {
        "verb": "doctor",
        "versions": versions(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "extras": extras.extras(),
        "tiers": [*devices(), host(), disk()],
        "known_devices": known(),
    }
    stage("measuring links to lower tiers", 0.7)
    # A CPU offloads to disk only where it is what trains, but may be asked to (`fit.device: cpu`) on a computer with a GPU too.
    data["links"] = [link(tier["name"]) for tier in data["tiers"] if tier["name"] != "disk"]
    data["usable"] = usable(data)
    return Answer(data, described(data))


def post_mortem(path: Path) -> Answer:
    """Why a program ran out of memory; needs no torch."""
    from memfit import oom

    failure = oom.read(path)
    return Answer({"verb": "doctor", "oom": oom.facts(failure)}, "\n".join(oom.explain(failure)))


def versions() -> dict[str, str | None]:
    """Versions of memfit's dependencies, and of CUDA where torch was built for it."""
    import torch

    cuda = {"cuda": torch.version.cuda} if torch.version.cuda is not None else {}
    return {"memfit": __version__, "python": platform.python_version(), "torch": torch.__version__, **cuda}


def processor() -> str:
    """Its name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
    """The disk of the working folder, where snapshots are written, and its speed."""
    usage = shutil.disk_usage(Path.cwd())
    tier: dict[str, Any] = {
        "name": "disk",
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "write_bytes_per_second": None,
        "read_bytes_per_second": None,
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
            if hasattr(os, "posix_fadvise"):  # elsewhere it would be read from memory, which says nothing of the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                start = time.perf_counter()
                while file.read(2**20):
                    pass
                tier["read_bytes_per_second"] = len(block) / (time.perf_counter() - start)
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
    """FLOP/s of matrix products in 32 and 16 bits, and bytes/s of a copy, read and written; the best of a few, no benchmark."""
    import torch

    def best(action: Callable[[], object]) -> float:
        times: list[float] = []
        while len(times) < 2 or (
            len(times) < 4 and sum(times) < _LONG_ENOUGH
        ):  # the first may load what the others find
            start = time.perf_counter()
            action()
            if device != "cpu":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    def flops(dtype: torch.dtype) -> float:
        # A processor without units for 16 bits takes seconds for what others do in milliseconds: a small product tells.
        found = 0.0
        for size in (largest // 8, largest):
            matrix = torch.ones(size, size, device=device, dtype=dtype)
            product = torch.empty_like(matrix)
            if found and 2 * size**3 / found > _LONG_ENOUGH:
                break
            found = 2 * size**3 / best(lambda a=matrix, out=product: torch.mm(a, a, out=out))  # type: ignore[misc]
        return found

    largest = _MATRIX if device == "cpu" else 4 * _MATRIX
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.ones_like(source)
    return {
        "fp32_flops": flops(torch.float32),
        "bf16_flops": flops(torch.bfloat16),
        "bytes_per_second": 2 * _COPY_BYTES / best(lambda: target.copy_(source)),
    }


def link(device: str) -> dict[str, Any]:
    """The link from a device to its nearest lower tier, as plans use it: measured once and cached."""
    import torch

    from memfit.storage.folders import offload_folder
    from memfit.storage.links import nearest_link

    found: dict[str, Any] = {"device": device, "tier": "host" if device != "cpu" else "disk", "reason": None}
    if device == "cpu":
        found["folder"] = str(offload_folder())
    try:
        measured = nearest_link(torch.device(device), offload_folder())
    except (
        InputError,
        RuntimeError,
        AttributeError,
    ) as error:  # torch's own where the host cannot pin memory; no posix_fallocate
        return {**found, "reason": str(error).splitlines()[0]}
    return {
        **found,
        "down_bytes_per_second": measured.out_bandwidth,
        "up_bytes_per_second": measured.in_bandwidth,
        "latency_seconds": measured.latency_seconds,
    }


def usable(data: dict[str, Any]) -> dict[str, Any]:
    """What plans can use here: where each device offloads to, 16 bits, 8-bit optimizer state, pinned memory.

    Args:
        data: what has been found.
    """
    backends = ["memfit", *(["bitsandbytes"] if data["extras"].get("bnb", {}).get("installed") else [])]
    return {
        "swap": {each["device"]: each["tier"] for each in data["links"] if each["reason"] is None},
        "bf16_speedup": {
            tier["name"]: tier["bf16_flops"] / tier["fp32_flops"] for tier in data["tiers"] if "bf16_flops" in tier
        },
        "8bit_backends": backends,
        "pinned_memory": any(each["tier"] == "host" and each["reason"] is None for each in data["links"]),
    }


def known() -> list[dict[str, Any]]:
    """GPUs that can be planned for without having one."""
    from memfit.hardware.machine import KNOWN

    return [asdict(machine) for machine in KNOWN]


def described(data: dict[str, Any]) -> str:
    """The same as text."""
    of = data["versions"]
    cuda = f" for CUDA {of['cuda']}" if "cuda" in of else ""
    lines = [
        f"memfit {of['memfit']}, torch {of['torch']}{cuda}, Python {of['python']}, {data['platform']}",
        f"Processor: {data['processor']}, {data['cores']} cores, {data['threads']} of torch's threads",
        *(_tier(tier) for tier in data["tiers"]),
    ]
    if not any(tier["name"].startswith("cuda") for tier in data["tiers"]):
        lines.append("GPU: torch sees none; budgets count the CPU's memory")
    lines += [_link(each) for each in data["links"]]
    lines += ["Plans can use:", *(f"  {line}" for line in _usable(data))]
    lines += extras.described(data["extras"])
    lines.append("Known for --device: " + ", ".join(machine["name"] for machine in data["known_devices"]))
    return "\n".join(lines)


def _tier(tier: dict[str, Any]) -> str:
    name = f"{tier['name']} ({tier['model']})" if "model" in tier else tier["name"]
    line = f"{name}: {format_bytes(tier['free_bytes'])} free of {format_bytes(tier['total_bytes'])}"
    if tier.get("fp32_flops"):
        line += f", {tier['fp32_flops'] / 1e9:,.0f} GFLOP/s (fp32), {tier['bf16_flops'] / 1e9:,.0f} (bf16), {tier['bytes_per_second'] / 1e9:.1f} GB/s"
    for verb in ("write", "read"):
        if tier.get(f"{verb}_bytes_per_second"):
            line += f", {verb}s {tier[f'{verb}_bytes_per_second'] / 1e9:.2f} GB/s"
    return line


def _link(each: dict[str, Any]) -> str:
    below = each["tier"] + (f" ({each['folder']})" if "folder" in each else "")
    if each["reason"] is not None:
        return f"Link {each['device']} to {below}: none ({each['reason']})"
    return (
        f"Link {each['device']} to {below}: {each['down_bytes_per_second'] / 1e9:.2f} GB/s down, {each['up_bytes_per_second'] / 1e9:.2f} GB/s up, "
        f"{format_seconds(each['latency_seconds'])} each; measured once and kept"
    )


def _usable(data: dict[str, Any]) -> list[str]:
    found = data["usable"]
    lines = ["micro-batches, recomputing: everywhere"]
    lines += [f"activation offloading: from {device} to {tier}" for device, tier in found["swap"].items()]
    for device, speedup in found["bf16_speedup"].items():
        verdict = (
            f"{speedup:.1f} times the speed of fp32"
            if speedup >= 1
            else f"slower here, {speedup:.2f} times the speed of fp32"
        )
        lines.append(f"bf16 (when allowed) on {device}: {verdict} in matrix products")
    lines.append(f"8-bit optimizer state (when allowed): kernels of {' and '.join(found['8bit_backends'])}")
    lines.append(f"pinned memory: {'yes' if found['pinned_memory'] else 'no, torch sees no GPU that could use it'}")
    return lines
