"""The cost of each distinct call, and the trace with these costs: seconds, workspace, and bytes that fake kernels do not show."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from memfit import dispatch
from memfit.capture.calls import ResultLayouts
from memfit.capture.captured import Captured
from memfit.capture.engine_time import engine_time
from memfit.capture.generator_states import GENERATOR_STATE
from memfit.capture.gloo_time import core_sharing, seconds_among
from memfit.capture.host_time import BEFORE, ELSEWHERE, HostTime, touched_since
from memfit.hardware.topology import Topology
from memfit.values.trace import BEFORE_STEP, FILLS_REDUCTION, Category, Phase, Storage, Trace

# Operations in which `fully_shard` puts parameters or gradients together for a collective; besides those they read what they write into.
_BEFORE_COLLECTIVES: Final = ("fsdp.all_gather_copy_in", FILLS_REDUCTION)
PREPARING: Final = 5  # operations at most before a collective that are part of what an engine does for it, which begins with much Python

# Of what cold caches add to an operation, the part that it meets in a step: most of what it reads was made just before, and lies in the last cache. Found on
# one computer, from each operation of steps of GPT, ViT, BERT and T5 in one to eight micro-batches (docs/design/log.md).
COLD_SHARE: Final = 0.15


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of operation.

    Attributes:
        seconds: of one run, with warm caches on a CPU; as the timer gives them, and on disk, of a machine that does nothing else.
        workspace_bytes: allocated while it runs and freed before it returns.
        made_bytes: of the storages it returns, in order; None when not measured.
        layouts: of the tensors it returns, as in `CallSpec`; None when not measured.
        measured: run on the device, not estimated.
        slowdown: how many times longer than on a quiet computer work took while this was measured, at least (`reference_work`).
        cold_seconds: of one run that finds nothing of what it reads and writes in the caches; None where that makes no difference, or is not known.
        faults: of pages, that each run meets as it gets large blocks from the system; what they take is not in `seconds`.
    """

    seconds: float
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] | None = None
    layouts: ResultLayouts | None = None
    measured: bool = True
    slowdown: float = 1.0
    cold_seconds: float | None = None
    faults: int = 0

    @property
    def in_a_step(self) -> float:
        """Seconds of one run in a step, as far as it is known what cold caches add."""
        return (
            self.seconds
            if self.cold_seconds is None
            else self.seconds + COLD_SHARE * (self.cold_seconds - self.seconds)
        )


def with_costs(
    captured: Captured,
    costs: Mapping[str, Cost],
    *,
    seconds_are: str,
    device: str,
    allocation_bytes: int = 1,
    other_bytes: int = 0,
    network: Topology | None = None,
    host: HostTime = ELSEWHERE,
) -> Trace:
    """The trace with seconds and workspace filled in, and hidden bytes in opaque outputs put right.

    Args:
        captured: the trace and its calls.
        costs: of each call.
        seconds_are, device: for the record.
        allocation_bytes: what the device's allocator rounds up to (512 on CUDA).
        network: what collectives go over; None for an assumed one.
        host: what the computer takes beside the kernels.
        other_bytes: held on the device besides what the trace knows (libraries' workspaces, the user's other tensors).
    """
    trace = captured.trace
    storages: list[Storage] = list(trace.storages)
    drawn = [list(sizes) for sizes in trace.drawn_bytes]
    operations = []
    notes = list(trace.notes)
    together = 0  # parameters of the next collective
    fresh = 0.0  # of getting large blocks from the system
    computed = 0.0  # since the collective before
    sharing = core_sharing(network)
    lately: deque[float] = deque(maxlen=BEFORE)  # seconds of the operations right before
    emptied: deque[float] = deque(maxlen=PREPARING)  # of the caches, before each of some operations
    for op, since in zip(trace.operations, touched_since(trace), strict=True):
        factor = host.factor_after(sum(lately))
        emptied.append(host.emptied_after(sum(lately)))
        among = op.collective
        if among is not None:
            seconds = seconds_among(network, among.kind, among.bytes, among.ranks, computed=computed)
            computed = 0.0
            if network is not None and network.processes:
                around = engine_time(network.slowdown)
                seconds += sharing * around.seconds(among.kind, together, max(emptied))
            lately.append(seconds)
            operations.append(replace(op, seconds=seconds))
            together = 0
            continue
        if op.name.startswith(_BEFORE_COLLECTIVES):
            together = len(op.reads) - 1
        if op.name == GENERATOR_STATE:
            operations.append(op)
            continue
        cost = costs[op.key]
        hidden = 0
        if cost.made_bytes is not None and len(cost.made_bytes) > len(op.makes):
            # The fake kernel gives one storage twice where the real one makes two (a fused RNN's bias gradients).
            hidden = max(0, sum(cost.made_bytes) - sum(storages[s].bytes for s in op.makes))
        # Of what the caches lack for it, the cold time has its code, too.
        seconds = cost.in_a_step + (host.added_after(since, op) if cost.cold_seconds is None else 0.0)
        for_pages = cost.faults * host.fault
        seconds = sharing * (seconds + for_pages)
        if op.phase is not Phase.OPTIMIZER:
            fresh += op.times * sharing * for_pages
        workspace = 0 if captured.calls[op.key].metered else cost.workspace_bytes + hidden
        lately.append(op.times * seconds)
        computed += op.times * seconds
        operations.append(replace(op, seconds=op.times * seconds, workspace_bytes=workspace, host_factor=factor))
        if cost.made_bytes is None or trace.source != "fake" or len(cost.made_bytes) != len(op.makes):
            continue
        for s, size in zip(op.makes, cost.made_bytes, strict=True):
            if size > storages[s].bytes:
                storages[s] = replace(storages[s], bytes=size)
                for sizes in drawn:
                    sizes[s] = max(sizes[s], size)
                note = f"{op.name} allocates more on this computer than PyTorch's fake tensors tell: the plan counts the bytes that were measured"
                if note not in notes:
                    notes.append(note)
    if allocation_bytes > 1:
        storages = [replace(s, bytes=-(-s.bytes // allocation_bytes) * allocation_bytes) for s in storages]
        drawn = [[-(-size // allocation_bytes) * allocation_bytes for size in sizes] for sizes in drawn]
    if other_bytes:
        storages.append(Storage(other_bytes, Category.OTHER, "", BEFORE_STEP, len(trace.events)))
        for sizes in drawn:
            sizes.append(other_bytes)

    def priced(path: Trace) -> Trace:
        return with_costs(
            replace(captured, trace=path),
            costs,
            seconds_are=seconds_are,
            device=device,
            allocation_bytes=allocation_bytes,
            other_bytes=other_bytes,
            network=network,
            host=host,
        )

    return replace(
        trace,
        operations=tuple(operations),
        storages=tuple(storages),
        seconds_are=seconds_are,
        device=device,
        notes=tuple(notes),
        fresh_memory_seconds=fresh,
        drawn_bytes=tuple(map(tuple, drawn)),
        paths=tuple(map(priced, trace.paths)),
        first=None if trace.first is None else priced(trace.first),
    )


def other_bytes(device: torch.device, known: Iterable[torch.Tensor], met_bytes: Iterable[int]) -> int:
    """Bytes that the CUDA allocator has handed out for other things than these: cuBLAS's workspace, whatever else the process holds; 0 on a CPU.

    Args:
        device: the GPU.
        known: tensors that the trace counts.
        met_bytes: of other storages that it counts.
    """
    if device.type != "cuda":
        return 0
    storages = dispatch.storages_of(t for t in known if t.device == device).values()
    held = sum(-(-size // 512) * 512 for size in (*(s.nbytes() for s in storages), *met_bytes))
    return max(0, torch.cuda.memory_allocated(device) - held)
