"""A failure in words: what was requested, what was available, why it was not enough, what to do next."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from memfit.oom.failure import CONTEXT_BYTES, GRAPHICS, Failure
from memfit.units import format_bytes

_MIB: Final = 1 << 20
_EXPANDABLE: Final = "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF in older versions)"
_STAGES: Final = {
    "forward": "What fills up in forward is activations, kept for backward: splitting the batch, recomputing and offloading take them down.",
    "backward": "Backward holds activations, gradients and what its operations need meanwhile: splitting the batch, recomputing and offloading take them down.",
    "recomputing in backward": "A part was being recomputed whole: smaller pieces would do, which memfit picks operation by operation.",
    "optimizer": "The first update makes the optimizer's state (for Adam two numbers to each parameter): it can be offloaded, or be kept in 8 bits.",
    "moving the model": "The parameters do not fit: those of repeated layers can be kept in host memory or on disk and be streamed.",
    "pinning memory": "Page-locked memory of the host was asked for, which is limited (ulimit -l) and often rounded up; it is not the GPU that is full.",
}


def budget(failure: Failure) -> str:
    """A budget for training on the device of the failure, in the form of `--budget`: from the figures in the file, or a share of the device.

    A budget counts what the allocator holds on a GPU, so the device less other processes, and less what this one holds beside the allocator.
    """
    if failure.source == "snapshot":
        if failure.free_bytes is None or failure.reserved_bytes is None:
            return "80%"
        room = failure.reserved_bytes + failure.free_bytes
    elif failure.total_bytes is not None:
        room = failure.total_bytes - (failure.other_bytes or 0)
        if failure.device.startswith(GRAPHICS):
            room -= CONTEXT_BYTES if failure.beside_bytes is None else failure.beside_bytes
        elif failure.device == "mps":
            room -= failure.beside_bytes or 0
    else:
        return "80%"
    if failure.allowed_bytes is not None:
        room = min(room, failure.allowed_bytes)
    return f"{room // _MIB}MiB" if room >= _MIB else "80%"


def facts(failure: Failure) -> dict[str, Any]:
    """The same for a program."""
    return {
        **asdict(failure),
        "reserved_bytes": failure.reserved_bytes,
        "beside_bytes": failure.beside_bytes,
        "in_pieces": failure.in_pieces,
        "budget": budget(failure),
        "explanation": explain(failure),
    }


def explain(failure: Failure) -> list[str]:
    """Sentences for a person."""
    lines = [_asked(failure), *_there(failure), *_reasons(failure)]
    if failure.kind != "none" and failure.stage:
        lines.append(_STAGES[failure.stage])
    if failure.holders:
        lines.append("Held by tensors when the snapshot was written, by the line that made them:")
        for holder in failure.holders:
            place = (
                holder.where
                or "no line of Python recorded (backward runs in a thread without one, or recording was off)"
            )
            part = f", {holder.stage}" if holder.stage else ""
            lines.append(f"  {format_bytes(holder.bytes)} in {_count(holder.blocks, 'block')}: {place}{part}")
        if not any(holder.where for holder in failure.holders):
            lines.append(
                "To have the lines, call torch.cuda.memory._record_memory_history() at the start of the program."
            )
    return [*lines, *_next(failure)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _asked(failure: Failure) -> str:
    place = f" on {failure.device}" if failure.device else ""
    if failure.device == "host":
        place = " in the computer's main memory"
    when = f" during {failure.stage}" if failure.stage else ""
    when += f" ({failure.where})" if failure.where else ""
    if failure.kind == "none":
        return f"No failed allocation is in the snapshot; this is what was held{place} when it was written."
    if failure.kind == "killed":
        held = "" if failure.process_bytes is None else f", when it held {format_bytes(failure.process_bytes)}"
        return (
            f"The system ended the process{held}: {failure.evidence!r}. Nearly always the computer, or the container, was out of main memory; "
            "the kernel's log (dmesg) or the container's status says for sure."
        )
    if failure.kind == "library":
        return (
            f"A library got no memory{place}{when}: {failure.evidence!r}. Its handles and workspaces come from what PyTorch's allocator leaves free, "
            "so the device was full; some versions say the same of a wrong index or label on the GPU (CUDA_LAUNCH_BLOCKING=1 tells)."
        )
    if failure.wanted_bytes is None:
        return f"Memory ran out{place}{when}; the message names no numbers."
    again = f" It is the last of {failure.times} such failures." if failure.times > 1 else ""
    return f"Asked for {format_bytes(failure.wanted_bytes)}{place}{when}.{again}"


def _there(failure: Failure) -> list[str]:
    parts = []
    if failure.total_bytes is not None:
        size = "most that may be used" if failure.device == "mps" else "device"
        parts.append(f"{size} {format_bytes(failure.total_bytes)}")
    if failure.free_bytes is not None:
        parts.append(f"free {format_bytes(failure.free_bytes)}")
    if failure.allocated_bytes is not None:
        private = (
            f" (of these {format_bytes(failure.private_bytes)} in private pools, as of CUDA graphs)"
            if failure.private_bytes
            else ""
        )
        parts.append(f"in tensors {format_bytes(failure.allocated_bytes)}{private}")
    if failure.unallocated_bytes is not None and failure.device != "mps":
        largest = (
            ""
            if failure.largest_gap_bytes is None
            else f", the largest piece {format_bytes(failure.largest_gap_bytes)}"
        )
        parts.append(f"reserved by PyTorch and in no tensor {format_bytes(failure.unallocated_bytes)}{largest}")
    if failure.beside_bytes:
        what = "other allocations" if failure.device == "mps" else "CUDA context and libraries"
        parts.append(f"{what} {format_bytes(failure.beside_bytes)}")
    if failure.other_bytes:
        parts.append(f"other processes {format_bytes(failure.other_bytes)}")
    if failure.allowed_bytes is not None:
        parts.append(f"limit set for this process {format_bytes(failure.allowed_bytes)}")
    lines = [f"Memory then: {', '.join(parts)}."] if parts else []
    if failure.freed_after_bytes:
        lines.append(
            f"Between the failure and the snapshot {format_bytes(failure.freed_after_bytes)} were freed, so at the failure as much more was held."
        )
    return lines


def _reasons(failure: Failure) -> list[str]:
    wanted, free, total = failure.wanted_bytes, failure.free_bytes, failure.total_bytes
    if failure.kind != "allocation" or wanted is None:
        return []
    lines = []
    if total is not None and wanted > total:
        text = (
            f"This one tensor is larger than all of the device by {format_bytes(wanted - total)}: nothing that is freed makes room for it. Look at "
            "its shape in the line named: an attention matrix, logits over a whole vocabulary, or a size that is a mistake."
        )
        return [text]
    if free is None:
        return []
    if failure.other_bytes:
        enough = ", enough for this" if free < wanted <= free + failure.other_bytes else ""
        lines.append(
            f"Other processes hold {format_bytes(failure.other_bytes)} of this device{enough}: nvidia-smi lists them; notebooks and runs left over are often "
            "among them."
        )
    lines += _pieces(failure, wanted, free)
    if failure.allowed_bytes is not None and failure.reserved_bytes is not None and wanted <= free:
        lines.append(
            "The device had room; the limit set for this process (set_per_process_memory_fraction) did not allow it."
        )
    elif wanted <= free and failure.device != "mps":
        lines.append(
            "As much was free when the message was written: another process or thread gave it back in between, or the driver could not map it in one piece."
        )
    return lines


def _pieces(failure: Failure, wanted: int, free: int) -> list[str]:
    """What fragmentation has to do with it: advice against it only where it can help."""
    spare = failure.unallocated_bytes
    if spare is None or not failure.device.startswith(GRAPHICS) or wanted <= free:
        return []
    if not failure.in_pieces:
        return [
            f"Fragmentation is not the reason: with all that is reserved and in no tensor, {format_bytes(wanted - free - spare)} would still be missing."
        ]
    if failure.expandable:
        text = (
            f"{format_bytes(spare)} were reserved and in no tensor, enough together with what was free, and segments are expandable already: what is "
            "spare belongs to other streams or pools (CUDA graphs)."
        )
        return [text]
    if failure.largest_gap_bytes is not None and failure.largest_gap_bytes >= wanted:
        return [
            f"A free piece of {format_bytes(failure.largest_gap_bytes)} was there, so it belongs to another stream or was freed after the failure."
        ]
    text = (
        f"Fragmentation: {format_bytes(spare)} were reserved and in no tensor, enough together with what was free, only in pieces. Setting "
        f"{_EXPANDABLE} before the program starts lets them be joined; a budget somewhat lower leaves room as well."
    )
    return [text]


def _next(failure: Failure) -> list[str]:
    allowed = budget(failure)
    lines = []
    if failure.device == "mps" or failure.device.startswith("xpu"):
        lines.append(
            f"memfit trains on CUDA GPUs and CPUs, not on {failure.device.partition(':')[0]}; what a step takes it can say all the same."
        )
    if failure.device == "host" and failure.kind != "none":
        lines.append(
            "Count the processes: data-loader workers, ranks and pinned copies share this memory. memfit doctor says how much this computer, or "
            "its container, has."
        )
    lines += [
        "Next, see what training takes and which plan stays inside:",
        f"  memfit plan CONFIG.yaml --budget {allowed}",
        f'  memfit.fit(model, sample, loss_fn, "{allowed}", optimizer)  # in Python',
    ]
    return lines
