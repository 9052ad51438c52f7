"""Parses out-of-memory messages of PyTorch, its libraries and the operating system.

Each allocator has its own wording, which has changed over the years, so each wording has a pattern here, the most informative first. The first pattern that
matches decides; of several matches in a log the last is taken, as the program survived those before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from memfit.oom.failure import CONTEXT_BYTES, Failure
from memfit.oom.stacks import stage, traceback_before, where

# torch writes sizes as "1.50 GiB" or "512 bytes". Its GB (old versions, MPS) are binary too.
_SIZE: Final = r"(?P<{0}>\d+(?:\.\d+)?\s*(?:[KMGTPE]i?B|B|bytes?))"
_DRIVER_SHARE: Final = 20  # up to a twentieth of a device may be the driver's own
_POWERS: Final = {letter: power for power, letter in enumerate("KMGTPE", start=1)}


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*(\w+)", text)
    assert match is not None
    unit = match[2]
    return int(float(match[1]) * 1024 ** _POWERS.get(unit[0], 0))


def _pattern(text: str) -> re.Pattern[str]:
    """A pattern in which {name} stands for a size, and a space for any white space, since logs break lines."""
    text = re.sub(r"\{(\w+)\}", lambda m: _SIZE.format(m[1]), text)
    return re.compile(text.replace(" ", r"\s+"))


def _group(match: re.Match[str], name: str) -> int | None:
    return _bytes(match.groupdict().get(name))


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


_DEVICE: Final = r"(?P<kind>CUDA|HIP|XPU) out of memory\."

# Since 2.1: "Including non-PyTorch memory, this process has 11.79 GiB memory in use. Process 42 has 1.2 GiB memory in use."
_IN_USE: Final = (
    r"(?:Including non-PyTorch memory, this process|Process \d+) has [\d.]+ (?:[KMGTPE]i?B|bytes) memory in use\."
)
_DEVICE_MESSAGE: Final = _pattern(
    _DEVICE
    + r" Tried to allocate {wanted}\. GPU (?P<index>\d+) has a total capacit(?:y|ty) of {total} of which {free} is free\."
    + rf"(?P<processes>(?: {_IN_USE})*)"
    + r"(?: {allowed} allowed;)?"
    + r"(?: Of the allocated memory {allocated} is allocated by PyTorch,"
    + r"(?: with {private} allocated in private pools \([^)]*\),)? and {unallocated} is reserved by PyTorch but unallocated)?"
)
_PROCESS: Final = _pattern(r"(?P<who>this process|Process \d+) has {size}")

# Until 2.0: "(GPU 0; 7.93 GiB total capacity; 130.35 MiB already allocated; 47.06 MiB free; 188.00 MiB reserved in total by PyTorch)"
_DEVICE_MESSAGE_UNTIL_2_0: Final = _pattern(
    r"(?P<kind>CUDA|HIP) out of memory\. Tried to allocate {wanted} \(GPU (?P<index>\d+); {total} total capacity; {allocated} already allocated; {free} free;"
    r"(?: {allowed} allowed;)? (?:{reserved} reserved in total by PyTorch|{cached} cached)"
)

# PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync
_ASYNC: Final = _pattern(
    r"Allocation on device (?P<index>\d+) would exceed allowed memory\. \(out of memory\) Currently allocated : {allocated} Requested : {wanted} "
    r"Device limit : {total} Free \(according to CUDA\)\s*: {free}(?: PyTorch limit \(set by user-supplied memory fraction\) : {allowed})?"
)

_MPS: Final = _pattern(
    r"MPS backend out of memory \(MPS allocated: {allocated}, other allocations: {other}, max allowed: {total}\)\. Tried to allocate {wanted}"
)

_WITHOUT_SIZES: Final = re.compile(
    r"(?P<kind>CUDA|HIP|XPU|MPS)(?: backend| error:| driver error:)? out of memory|(?P<error>cudaErrorMemoryAllocation)"
)
_LIBRARY: Final = re.compile(
    r"(?P<name>CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS|MIOPEN)_(?:STATUS_)?(?:STATUS_)?ALLOC_FAILED"
)

_HOST: Final = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<wanted>\d+) bytes"
)
_NUMPY: Final = _pattern(r"Unable to allocate {wanted} for an array")
# With no memory left for a traceback, Python 3.13 prints the name of the type among others.
_ERRNO: Final = re.compile(
    r"\[Errno 12\] Cannot allocate memory|std::bad_alloc|^MemoryError\b|(?<=^object type name: )MemoryError$",
    re.MULTILINE,
)

# The Linux kernel's log, whose kB are 1024 bytes: "Out of memory: Killed process 42 (python) total-vm:...kB, anon-rss:5021kB, file-rss:..."
_KERNEL_LOG: Final = re.compile(
    r"(?:Out of memory|out of memory|oom-kill|oom_kill)[^\n]*?[Kk]ill(?:ed)? process (?P<pid>\d+)[^\n]*?anon-rss:(?P<rss>\d+)kB"
)
_KILLED: Final = re.compile(
    r"^[^\w\n]{0,20}(?:\S+: line \d+:\s*\d+ )?Killed\b[^\n]*$|OOMKilled|oom-kill|oom_kill|killed by signal: Killed|died with <?Signals\.SIGKILL"
    r"|[Ee]xit(?:ed)?(?: with)?(?:[ _]?(?:status|code))*\W{0,4}(?:137|-9)\b|returncode[= ]*(?:137|-9)\b|SIGKILL|[Ss]ignal 9\b",
    re.MULTILINE,
)


def _of_device(match: re.Match[str]) -> Failure:
    """What all messages with sizes of a GPU have in common."""
    return Failure(
        "message",
        device=f"{match.groupdict().get('kind', 'CUDA').lower()}:{match['index']}",
        wanted_bytes=_group(match, "wanted"),
        total_bytes=_group(match, "total"),
        free_bytes=_group(match, "free"),
        allocated_bytes=_group(match, "allocated"),
        allowed_bytes=_group(match, "allowed"),
    )


def _device_message(match: re.Match[str]) -> Failure:
    own = others = None
    listed: list[int] = []
    for process in _PROCESS.finditer(match["processes"]):
        size = _bytes(process["size"]) or 0
        if process["who"] == "this process":
            own = size
        else:
            listed.append(size)
    allocated, unallocated = _group(match, "allocated"), _group(match, "unallocated")
    reserved = _sum(allocated, unallocated)
    if own is None and listed and reserved is not None and max(listed) >= reserved:
        # In a container the driver knows this process by another process id.
        own = max(listed)
        listed.remove(own)
    total, free = _group(match, "total"), _group(match, "free")
    if own is not None and total is not None and free is not None:
        # Processes of other containers may not be listed at all: memory that is neither free nor listed is theirs or the driver's.
        others = max(sum(listed), total - free - own)
        others = others if others > total // _DRIVER_SHARE or listed else 0
    elif listed:
        others = sum(listed)
    private = _group(match, "private")
    return replace(
        _of_device(match), unallocated_bytes=unallocated, private_bytes=private, process_bytes=own, other_bytes=others
    )


def _device_message_until_2_0(match: re.Match[str]) -> Failure:
    allocated, reserved = _group(match, "allocated"), _group(match, "reserved")
    unallocated = _group(match, "cached")  # cached but not allocated
    if reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    total, free = _group(match, "total"), _group(match, "free")
    others = None
    if None not in (total, free, allocated, unallocated):
        # These versions do not list processes: what is neither free nor the allocator's is other processes', but for this one's CUDA context.
        others = (total or 0) - (free or 0) - (allocated or 0) - (unallocated or 0) - CONTEXT_BYTES
        others = others if others > (total or 0) // _DRIVER_SHARE else 0
    return replace(_of_device(match), unallocated_bytes=unallocated, other_bytes=others)


def _mps(match: re.Match[str]) -> Failure:
    allocated, other, total = (_group(match, name) or 0 for name in ("allocated", "other", "total"))
    return Failure(
        "message",
        device="mps",
        wanted_bytes=_group(match, "wanted"),
        total_bytes=total,
        free_bytes=max(0, total - allocated - other),
        allocated_bytes=allocated,
        unallocated_bytes=0,
        process_bytes=allocated + other,
    )


def _without_sizes(match: re.Match[str]) -> Failure:
    return Failure("message", device=(match["kind"] or "cuda").lower())


def _library(match: re.Match[str]) -> Failure:
    return Failure("message", device="hip" if match["name"] in {"HIPBLAS", "MIOPEN"} else "cuda", kind="library")


def _host(match: re.Match[str]) -> Failure:
    return Failure("message", device="host", wanted_bytes=int(match["wanted"]))


def _numpy(match: re.Match[str]) -> Failure:
    return Failure("message", device="host", wanted_bytes=_group(match, "wanted"))


def _errno(_: re.Match[str]) -> Failure:
    return Failure("message", device="host")


def _kernel_log(match: re.Match[str]) -> Failure:
    return Failure("message", device="host", kind="killed", process_bytes=1024 * int(match["rss"]))


def _killed(_: re.Match[str]) -> Failure:
    return Failure("message", device="host", kind="killed")


# The most informative first. Killed processes come last: when one fails, a launcher kills the others.
_PATTERNS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Failure]], ...]] = (
    (_DEVICE_MESSAGE, _device_message),
    (_DEVICE_MESSAGE_UNTIL_2_0, _device_message_until_2_0),
    (_ASYNC, _of_device),
    (_MPS, _mps),
    (_HOST, _host),
    (_NUMPY, _numpy),
    (_WITHOUT_SIZES, _without_sizes),
    (_LIBRARY, _library),
    (_KERNEL_LOG, _kernel_log),
    (_ERRNO, _errno),
    (_KILLED, _killed),
)


def find(text: str) -> Failure | None:
    """The failure that a text reports; None where it reports no lack of memory."""
    for pattern, parse in _PATTERNS:
        matches = list(pattern.finditer(text))
        if not matches:
            continue
        frames = traceback_before(text, matches[-1].start())
        failure = parse(matches[-1])
        return _with(failure, matches[-1].group(), stage(frames), where(frames), len(matches))
    return None


def _with(failure: Failure, evidence: str, part: str, place: str, times: int) -> Failure:
    return replace(failure, evidence=" ".join(evidence.split()), stage=part, where=place, times=times)
