"""One device: bytes, FLOP/s, bandwidth, the link to its nearest lower tier. A value, with a table of common GPUs for planning without having one.

Figures of the table are the makers' data sheets (dense rates, no sparsity, 16-bit products added up in fp32; memory as sold). Planning on them is marked
*estimated*: real kernels reach a part of them, by kind and size (`efficiency.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from memfit.errors import InputError

GIB: Final = 1024**3
TERA: Final = 1e12
GIGA: Final = 1e9

Capability = tuple[int, int]
"""CUDA compute capability: major and minor version."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One device.

    Attributes:
        name: as written in the table, or as the system reports it.
        kind: "cuda" or "cpu".
        memory_bytes: all of its memory.
        fp32_flops: FLOP/s of fp32, without TF32.
        tensor_flops: FLOP/s of 16-bit matrix products.
        tf32_flops: FLOP/s of TF32; 0 where there is none.
        bandwidth: of its memory, bytes/s.
        link_bandwidth: to the host, bytes/s each way.
        bf16: whether it has bf16 units.
        launch_seconds: least time of one operation.
        watts: the board's power limit; 0 where it is not known.
        peer_bandwidth: to devices of the same computer over a link of their own (NVLink), bytes/s each way; 0 where they go through the host.
        measured: the rates are what was reached here, not a data sheet's.
        allocation_bytes: granularity of its allocator.
        capability: which kernels a GPU can run; (0, 0) for what is none.
    """

    name: str
    kind: str
    memory_bytes: int
    fp32_flops: float
    tensor_flops: float
    bandwidth: float
    link_bandwidth: float = 0.0
    bf16: bool = True
    launch_seconds: float = 5e-6
    allocation_bytes: int = 1
    capability: Capability = (0, 0)
    tf32_flops: float = 0.0
    watts: float = 0.0
    measured: bool = False
    peer_bandwidth: float = 0.0

    def roofline_seconds(self, flops: float, moved_bytes: float, *, half: bool) -> float:
        """Time of an operation that computes `flops` and moves `moved_bytes` at these rates, whichever takes longer (Williams et al. 2009)."""
        rate = self.tensor_flops if half else self.fp32_flops
        compute = flops / rate if rate else 0.0
        return max(compute, moved_bytes / self.bandwidth) + self.launch_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """The link from a device to a lower memory tier: a GPU to pinned host memory, main memory to a disk, a GPU through host memory to a disk.

    Attributes:
        tier: "host" or "disk".
        out_bandwidth, in_bandwidth: bytes/s from the device to the tier, and back.
        latency_seconds: of each copy, in addition to the time for its bytes.
        free_bytes: how many bytes may be offloaded to the tier; None for no limit.
        least_bytes: smaller storages are not worth a copy.
        below: the link from the same device to the next lower tier, for what does not fit on this one; None for no such tier.
    """

    tier: str
    out_bandwidth: float
    in_bandwidth: float
    latency_seconds: float = 0.0
    free_bytes: int | None = None
    least_bytes: int = 1 << 16
    below: Link | None = None

    @property
    def chain(self) -> tuple[Link, ...]:
        """This link and those to further tiers, the nearest first."""
        return (self, *(self.below.chain if self.below is not None else ()))

    @property
    def shortened(self) -> Link | None:
        """The chain without its last tier; None where this is the last."""
        return replace(self, below=self.below.shortened) if self.below is not None else None

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Link | None:
        """Inverse of `dataclasses.asdict`; None stays None.

        Raises:
            KeyError, TypeError: these are not the fields of a link.
        """
        return None if data is None else cls(**{**data, "below": cls.from_json(data["below"])})

    def out_seconds(self, size: int) -> float:
        """Time of a copy down, alone on the link."""
        return self.latency_seconds + size / self.out_bandwidth

    def in_seconds(self, size: int) -> float:
        """Time of a copy up, alone on the link."""
        return self.latency_seconds + size / self.in_bandwidth


def _gpu(
    name: str,
    gib: float,
    fp32: float,
    tf32: float,
    tensor: float,
    gb_s: float,
    link: float,
    watts: float,
    capability: Capability,
    peer: float = 0.0,
) -> Machine:
    return Machine(
        name,
        "cuda",
        int(gib * GIB),
        fp32 * TERA,
        tensor * TERA,
        gb_s * GIGA,
        link * GIGA,
        bf16=capability >= (8, 0),
        allocation_bytes=512,
        capability=capability,
        tf32_flops=tf32 * TERA,
        watts=watts,
        peer_bandwidth=peer * GIGA,
    )


# Name, GiB; TFLOP/s in fp32, TF32, 16 bits; GB/s of memory, of the link (PCIe 3/4/5 x16 at about 80 % of the nominal rate); watts; compute capability; GB/s of
# NVLink (80 % of the nominal rate each way, of 300, 600 and 900 GB/s for both ways of a V100, an A100, and an H100 or H200 on SXM boards).
KNOWN: Final[tuple[Machine, ...]] = (
    _gpu("rtx3060", 12, 12.7, 12.7, 25.5, 360, 25, 170, (8, 6)),
    _gpu("rtx3090", 24, 35.6, 35.6, 71.0, 936, 25, 350, (8, 6)),
    _gpu("rtx3090ti", 24, 40.0, 40.0, 80.0, 1008, 25, 450, (8, 6)),
    _gpu("rtx4090", 24, 82.6, 82.6, 165.2, 1008, 25, 450, (8, 9)),
    _gpu("rtx5090", 32, 104.8, 104.8, 209.5, 1792, 52, 575, (12, 0)),
    _gpu("rtx8000", 48, 16.3, 0.0, 130.5, 672, 12, 260, (7, 5)),
    _gpu("rtx-a6000", 48, 38.7, 77.4, 154.8, 768, 25, 300, (8, 6)),
    _gpu("rtx6000-ada", 48, 91.1, 182.1, 364.2, 960, 25, 300, (8, 9)),
    _gpu("t4", 16, 8.1, 0.0, 65.0, 320, 12, 70, (7, 5)),
    _gpu("v100", 32, 15.7, 0.0, 125.0, 900, 12, 300, (7, 0), 120),
    _gpu("a100-40gb", 40, 19.5, 156.0, 312.0, 1555, 25, 400, (8, 0), 240),
    _gpu("a100-40gb-pcie", 40, 19.5, 156.0, 312.0, 1555, 25, 250, (8, 0)),
    _gpu("a100", 80, 19.5, 156.0, 312.0, 2039, 25, 400, (8, 0), 240),
    _gpu("a100-pcie", 80, 19.5, 156.0, 312.0, 1935, 25, 300, (8, 0)),
    _gpu("a10", 24, 31.2, 62.5, 125.0, 600, 25, 150, (8, 6)),
    _gpu("l4", 24, 30.3, 60.5, 121.0, 300, 25, 72, (8, 9)),
    _gpu("l40s", 48, 91.6, 183.0, 362.0, 864, 25, 350, (8, 9)),
    _gpu("h100", 80, 66.9, 494.7, 989.4, 3350, 52, 700, (9, 0), 360),
    _gpu("h100-pcie", 80, 51.2, 378.0, 756.0, 2000, 52, 350, (9, 0)),
    _gpu("h200", 141 * 1e9 / GIB, 66.9, 494.7, 989.4, 4800, 52, 700, (9, 0), 360),
)


# Words of product names and of listings that tell no two entries of the table apart.
_PASSED_OVER: Final = {
    *("nvidia", "geforce", "tesla", "quadro", "gpu", "tensor", "core", "generation", "founders", "edition"),
    *("sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7"),
}
_OF_TORCH: Final = ("cpu", "cuda", "mps", "xpu", "meta")
_SLICE: Final = re.compile(r"\bmig\b|\d+g\.\d+gb", re.IGNORECASE)  # of a GPU that is shared out: "1g.10gb"
_MEMORY: Final = re.compile(r"(\d+)(?:gi?b?)?")
_MEMORIES: Final = range(
    8, 1025
)  # what a bare number after a name may mean in GB: "a100-80"; smaller ones are part of a name


def known_machine(name: str) -> Machine:
    """The table's entry for a name as people and drivers write it: "4090", "RTX 4090 24GB", "a100-80", "NVIDIA A100-SXM4-80GB".

    Raises:
        InputError: no such entry; names the nearest ones.
    """
    if of_torch(name):
        raise InputError(
            f"device={str(name)!r} is a device of torch: move the model there (model.to({str(name)!r})) and leave device out; it takes the name of a GPU "
            'that is not in this computer, such as "rtx4090"'
        )
    if not isinstance(name, str):
        raise InputError(
            f'device={name!r} is no name of a GPU: write one, such as device="rtx4090", or leave device out for the device that the model is on'
        )
    wanted = "".join(c for c in name.lower().replace("nvidia", "").replace("geforce", "") if c.isalnum())
    by_name = {"".join(c for c in m.name if c.isalnum()): m for m in KNOWN}
    if wanted in by_name:
        return by_name[wanted]
    core, gigabytes = _core_and_memory(name)
    of_core = [m for m in KNOWN if core and _core_and_memory(m.name)[0] in (core, f"rtx{core}")]
    if of_core:
        fitting = [m for m in of_core if gigabytes in (None, round(m.memory_bytes / GIB), round(m.memory_bytes / GIGA))]
        if fitting:
            return max(fitting, key=lambda m: (gigabytes is None) * m.memory_bytes)
        have = " and ".join(f"{m.name} with {round(m.memory_bytes / GIB)} GiB" for m in of_core)
        raise InputError(
            f"no device called {name!r} is known; there is {have}: name it, and give the memory as the budget"
        )
    near = [] if _SLICE.search(name) else get_close_matches(wanted, by_name, 3, 0.5)
    known = ", ".join(m.name for m in KNOWN)
    hint = f"did you mean {' or '.join(by_name[n].name for n in near)}? " if near else ""
    if re.match(r"\s*\d+\s*x\s*\D", name, re.IGNORECASE):
        hint = f"several are devices={name!r}; "
    elif not core and gigabytes is not None:
        hint = "that is a size; "
    raise InputError(
        f"no device called {name!r} is known; {hint}known are {known}: name the one most like it (of a MIG slice, its card), and give the memory that there "
        "is as the budget"
    )


def of_torch(name: object) -> bool:
    """Whether this names a device as torch does ("cpu", "cuda:0"), and no kind of device."""
    return str(name).partition(":")[0].lower() in _OF_TORCH


def is_machine(name: str) -> bool:
    """Whether the table has an entry for a name."""
    with suppress(InputError):
        known_machine(name)
        return True
    return False


def _core_and_memory(name: str) -> tuple[str, int | None]:
    """What tells a device apart, and the gigabytes that the name ends in or holds; None where it holds none."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in _PASSED_OVER]
    gigabytes = None
    kept: list[str] = []
    for word in words:
        match = _MEMORY.fullmatch(word)
        said = match is not None and int(match[1]) in _MEMORIES
        # A bare number that begins the name, or follows "rtx", is the name: 4090, RTX 6000.
        if said and (not word.isdigit() or (kept and kept != ["rtx"])):
            assert match is not None
            gigabytes = int(match[1])
        elif word not in ("gb", "gib", "g"):
            kept.append(word)
    return "".join(kept), gigabytes
