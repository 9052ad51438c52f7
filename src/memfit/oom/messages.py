"""Out-of-memory messages, as PyTorch, its libraries and the system write them.

The wording of each allocator is its own and has changed over the years, so each has a pattern of its own here, the ones that tell most first. Where a
log holds several, the last of the kind that tells most is taken: what came before it was survived.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from memfit.oom.failure import CONTEXT_BYTES, Failure
from memfit.oom.stacks import stage, traceback_before, where

# torch writes two digits behind the point, "0 bytes" and "512 bytes". Its GB (old versions, MPS) are 1024 MB of 1024 KB too.
_SIZE: Final = r"(?P<{0}>\d+(?:\.\d+)?\s*(?:[KMGTPE]i?B|B|bytes?))"
_NOTHING: Final = 20  # a twentieth of a device may be the driver's own
_POWERS: Final = {letter: power for power, letter in enumerate("KMGTPE", start=1)}


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*(\w+)", text)
    assert match is not None
    unit = match[2]
    return int(float(match[1]) * 1024 ** _POWERS.get(unit[0], 0))


def _pattern(text: str) -> re.Pattern[str]:
    """Named sizes stand as {name}; any white space will do between words, since logs break lines."""
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
_NOW: Final = _pattern(
    _DEVICE
    + r" Tried to allocate {wanted}\. GPU (?P<index>\d+) has a total capacit(?:y|ty) of {total} of which {free} is free\."
    + rf"(?P<processes>(?: {_IN_USE})*)"
    + r"(?: {allowed} allowed;)?"
    + r"(?: Of the allocated memory {allocated} is allocated by PyTorch,"
    + r"(?: with {private} allocated in private pools \([^)]*\),)? and {unallocated} is reserved by PyTorch but unallocated)?"
)
_PROCESS: Final = _pattern(r"(?P<who>this process|Process \d+) has {size}")

# Until 2.0: "(GPU 0; 7.93 GiB total capacity; 130.35 MiB already allocated; 47.06 MiB free; 188.00 MiB reserved in total by PyTorch)"
_BEFORE: Final = _pattern(
    r"(?P<kind>CUDA|HIP) out of memory\. Tried to allocate {wanted} \(GPU (?P<index>\d+); {total} total capacity; {allocated} already allocated; {free} free;"
    r"(?: {allowed} allowed;)? (?:{reserved} reserved in total by PyTorch|{cached} cached)"
)

# PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync
_ASYNC: Final = _pattern(
    r"Allocation on device (?P<index>\d+) would exceed allowed memory\. \(out of memory\) Currently allocated : {allocated} Requested : {wanted} "
    r"Device limit : {total} Free \(according to CUDA\)\s*: {free}(?: PyTorch limit \(set by user-supplied memory fraction\) : {allowed})?"
)

_MPS: Final = _pattern(
    r"MPS backend out of memory \(MPS allocated: {allocated}, other allocations: {beside}, max allowed: {total}\)\. Tried to allocate {wanted}"
)

_WITHOUT_NUMBERS: Final = re.compile(
    r"(?P<kind>CUDA|HIP|XPU|MPS)(?: backend| error:| driver error:)? out of memory|(?P<error>cudaErrorMemoryAllocation)"
)
_LIBRARY: Final = re.compile(
    r"(?P<name>CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS|MIOPEN)_(?:STATUS_)?(?:STATUS_)?ALLOC_FAILED"
)

_HOST: Final = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<wanted>\d+) bytes"
)
_NUMPY: Final = _pattern(r"Unable to allocate {wanted} for an array")
_ERRNO: Final = re.compile(r"\[Errno 12\] Cannot allocate memory|std::bad_alloc|^MemoryError\b", re.MULTILINE)

# The kernel's own words, in kilobytes of 1024: "Out of memory: Killed process 42 (python) total-vm:...kB, anon-rss:5021kB, file-rss:..."
_KERNEL: Final = re.compile(
    r"(?:Out of memory|out of memory|oom-kill|oom_kill)[^\n]*?[Kk]ill(?:ed)? process (?P<pid>\d+)[^\n]*?anon-rss:(?P<rss>\d+)kB"
)
_KILLED: Final = re.compile(
    r"^[^\w\n]{0,20}(?:\S+: line \d+:\s*\d+ )?Killed\b[^\n]*$|OOMKilled|oom-kill|oom_kill|killed by signal: Killed|died with <?Signals\.SIGKILL"
    r"|[Ee]xit(?:ed)?(?: with)?(?:[ _]?(?:status|code))*\W{0,4}(?:137|-9)\b|returncode[= ]*(?:137|-9)\b|SIGKILL|[Ss]ignal 9\b",
    re.MULTILINE,
)


def _of_device(match: re.Match[str]) -> Failure:
    """What all messages with numbers of a GPU have in common."""
    return Failure(
        "message",
        device=f"{match.groupdict().get('kind', 'CUDA').lower()}:{match['index']}",
        wanted_bytes=_group(match, "wanted"),
        total_bytes=_group(match, "total"),
        free_bytes=_group(match, "free"),
        allocated_bytes=_group(match, "allocated"),
        allowed_bytes=_group(match, "allowed"),
    )


def _now(match: re.Match[str]) -> Failure:
    mine = others = None
    unnamed: list[int] = []
    for process in _PROCESS.finditer(match["processes"]):
        size = _bytes(process["size"]) or 0
        if process["who"] == "this process":
            mine = size
        else:
            unnamed.append(size)
    allocated, unallocated = _group(match, "allocated"), _group(match, "unallocated")
    reserved = _sum(allocated, unallocated)
    if mine is None and unnamed and reserved is not None and max(unnamed) >= reserved:
        # In a container the driver's number of this process is not the one it knows itself by.
        mine = max(unnamed)
        unnamed.remove(mine)
    total, free = _group(match, "total"), _group(match, "free")
    if mine is not None and total is not None and free is not None:
        # Processes of other containers may not be listed at all; what nobody lists and is not free, the driver keeps or they hold.
        others = max(sum(unnamed), total - free - mine)
        others = others if others > total // _NOTHING or unnamed else 0
    elif unnamed:
        others = sum(unnamed)
    private = _group(match, "private")
    return replace(
        _of_device(match), unallocated_bytes=unallocated, private_bytes=private, process_bytes=mine, other_bytes=others
    )


def _before(match: re.Match[str]) -> Failure:
    allocated, reserved = _group(match, "allocated"), _group(match, "reserved")
    unallocated = _group(match, "cached")  # what is cached beside what is allocated
    if reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    total, free = _group(match, "total"), _group(match, "free")
    others = None
    if None not in (total, free, allocated, unallocated):
        # These versions do not tell processes apart; what is neither free nor the allocator's is theirs, but for this one's context.
        others = (total or 0) - (free or 0) - (allocated or 0) - (unallocated or 0) - CONTEXT_BYTES
        others = others if others > (total or 0) // _NOTHING else 0
    return replace(_of_device(match), unallocated_bytes=unallocated, other_bytes=others)


def _mps(match: re.Match[str]) -> Failure:
    allocated, beside, total = (_group(match, name) or 0 for name in ("allocated", "beside", "total"))
    return Failure(
        "message",
        device="mps",
        wanted_bytes=_group(match, "wanted"),
        total_bytes=total,
        free_bytes=max(0, total - allocated - beside),
        allocated_bytes=allocated,
        unallocated_bytes=0,
        process_bytes=allocated + beside,
    )


def _without_numbers(match: re.Match[str]) -> Failure:
    return Failure("message", device=(match["kind"] or "cuda").lower())


def _library(match: re.Match[str]) -> Failure:
    return Failure("message", device="hip" if match["name"] in {"HIPBLAS", "MIOPEN"} else "cuda", kind="library")


def _host(match: re.Match[str]) -> Failure:
    return Failure("message", device="host", wanted_bytes=int(match["wanted"]))


def _numpy(match: re.Match[str]) -> Failure:
    return Failure("message", device="host", wanted_bytes=_group(match, "wanted"))


def _errno(_: re.Match[str]) -> Failure:
    return Failure("message", device="host")


def _kernel(match: re.Match[str]) -> Failure:
    return Failure("message", device="host", kind="killed", process_bytes=1024 * int(match["rss"]))


def _killed(_: re.Match[str]) -> Failure:
    return Failure("message", device="host", kind="killed")


# Those that tell most come first. What the system says of a killed process is asked last: a launcher kills the others when one fails.
_KINDS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Failure]], ...]] = (
    (_NOW, _now),
    (_BEFORE, _before),
    (_ASYNC, _of_device),
    (_MPS, _mps),
    (_HOST, _host),
    (_NUMPY, _numpy),
    (_WITHOUT_NUMBERS, _without_numbers),
    (_LIBRARY, _library),
    (_KERNEL, _kernel),
    (_ERRNO, _errno),
    (_KILLED, _killed),
)


def find(text: str) -> Failure | None:
    """What a text tells of running out of memory; None when it does not."""
    for pattern, made in _KINDS:
        matches = list(pattern.finditer(text))
        if not matches:
            continue
        frames = traceback_before(text, matches[-1].start())
        failure = made(matches[-1])
        return _with(failure, matches[-1].group(), stage(frames), where(frames), len(matches))
    return None


def _with(failure: Failure, evidence: str, part: str, place: str, times: int) -> Failure:
    return replace(failure, evidence=" ".join(evidence.split()), stage=part, where=place, times=times)
