"""Seconds and hidden bytes of each distinct operation: measured once on this device, kept on disk; or estimated for a device that is not here.

BERT-large runs 5,000 operations in a step, of some hundred distinct kinds. Each kind is run alone on tensors of the right shapes and layout. Fake
tensors know what an operation returns, not what it allocates meanwhile (a convolution's reordered weights) nor what some kernels put into opaque
outputs (a fused RNN's workspace): the same runs tell both.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from memfit import dispatch
from memfit.capture.capture import Captured, forked_generators
from memfit.capture.recorder import CallSpec, TensorSpec
from memfit.machine import Machine
from memfit.meter import profiled, spans_and_changes
from memfit.trace import BEFORE_STEP, Category, Storage, Trace, digest

# Operations with more input than this are not run alone but estimated from this device's measured rates.
LARGEST_INPUT_BYTES: Final = 1 << 30
# What is smaller may lie in the caches when it is read, or not: what came just before does, what was saved in forward does not. So operations that touch less
# are timed both ways, and the mean is taken. Timed warm alone, small micro-batches looked up to a sixth faster than they are.
CACHE_BYTES: Final = 64 << 20
COUNTS_SECONDS: Final = 20e-6  # shorter operations are all overhead
LARGEST_SHARED_BYTES: Final = 256 << 20  # calls that read more get memory of their own
MEASURE_SECONDS: Final = 0.004  # each kind is repeated until about this long has been measured
MOST_REPEATS: Final = 7
LONG_SECONDS: Final = 0.03  # operations this long are run twice in all
VERY_LONG_SECONDS: Final = 0.1  # and these once: what a first run sets up is small beside them
PROFILED_SECONDS: Final = (
    0.001  # operations this long are timed under the profiler, whose few microseconds do not count beside them
)
FORMAT: Final = 4


# Backward kernels that read an opaque buffer their forward kernel wrote; on made-up bytes they crash.
FORWARD_OF: Final = {
    "aten.mkldnn_rnn_layer_backward.default": "aten.mkldnn_rnn_layer.default",
    "aten._cudnn_rnn_backward.default": "aten._cudnn_rnn.default",
    "aten.miopen_rnn_backward.default": "aten.miopen_rnn.default",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of operation.

    Attributes:
        seconds: of one run.
        workspace_bytes: allocated while it runs and freed before it returns.
        made_bytes: of the storages it returns, in order; None when not measured.
        measured: run on the device, not estimated.
    """

    seconds: float
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] | None = None
    measured: bool = True


def cache_folder() -> Path:
    """Where measured costs are kept: MEMFIT_CACHE_DIR, or memfit's folder in the user's cache."""
    base = os.environ.get("MEMFIT_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memfit"


class CostTable:
    """Costs of one device, read from and kept on disk."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.device = device
        self.name = device_name(device)
        identity = digest(self.name, torch.get_num_threads() if device.type == "cpu" else 0, torch.__version__, FORMAT)
        self.path = (folder or cache_folder()) / "costs" / f"{identity}.json"
        self._costs: dict[str, Cost] = {}
        self._sweep: torch.Tensor | None = None
        with suppress(OSError, ValueError, TypeError, AttributeError):
            for key, (seconds, workspace, made, measured) in json.loads(self.path.read_text()).items():
                self._costs[key] = Cost(seconds, workspace, None if made is None else tuple(made), measured)

    def measure(
        self, calls: dict[str, CallSpec], progress: Callable[[str, float], None] | None = None
    ) -> dict[str, Cost]:
        """Costs of all calls; those not known yet are measured now and written to disk."""
        missing = {key: call for key, call in calls.items() if digest(key) not in self._costs}
        if missing:
            machine = present_machine(self.device)

            def tell(number: int) -> None:
                if progress is not None:
                    progress("timing operations", number / len(missing))

            # Random operations are timed too: what the user's run draws must not depend on what was in the cache.
            with forked_generators():
                found = (self._on_cuda if self.device.type == "cuda" else self._on_cpu)(missing, calls, tell)
            for key, call in missing.items():
                cost = found.get(key)
                self._costs[digest(key)] = cost or Cost(estimated_seconds(call, machine), 0, None, measured=False)
            self._write()
        return {key: self._costs[digest(key)] for key in calls}

    def _write(self) -> None:
        # The cache is a convenience: a read-only or full disk must not stop a plan.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            rows = {k: [c.seconds, c.workspace_bytes, c.made_bytes, c.measured] for k, c in self._costs.items()}
            temporary.write_text(json.dumps(rows))
            temporary.replace(self.path)

    def _on_cpu(
        self, missing: dict[str, CallSpec], calls: dict[str, CallSpec], tell: Callable[[int], None]
    ) -> dict[str, Cost]:
        """Bytes from a profiled run of each; seconds from the same session for what is long, from unprofiled runs for what is short."""
        names: dict[str, str] = {}
        made: dict[str, tuple[int, ...]] = {}
        seconds: dict[str, float] = {}
        shared = Filled(self.device)
        clock = _clock()
        with profiled() as profile:
            for number, (key, call) in enumerate(missing.items()):
                tell(number)
                if input_bytes(call) > LARGEST_INPUT_BYTES:
                    continue
                try:
                    args, kwargs = _arguments(call, calls, self.device, shared)
                    times = []
                    # The first run may set things up that stay (the span of a name that counts is its last), and its time with it.
                    for _ in range(2):
                        begin = clock()
                        with torch.profiler.record_function(f"memfit.cost.{number}"):
                            result = _run(call, args, kwargs)
                        times.append(clock() - begin)
                        sizes = _made(result, args, kwargs)
                        del result
                        if times[-1] >= VERY_LONG_SECONDS:
                            break
                    if min(times) >= PROFILED_SECONDS and _touched(call, sizes) > CACHE_BYTES:
                        seconds[key] = self._repeated(call, args, kwargs, times)
                except Exception:  # noqa: BLE001, S112 - an operation that refuses made-up inputs is estimated instead
                    continue
                names[f"memfit.cost.{number}"] = key
                made[key] = sizes
                del args, kwargs
        workspaces: dict[str, int] = {}
        for name, changes in spans_and_changes(profile, "memfit.cost.").items():
            if name not in names:
                continue
            total = peak = 0
            for change in changes:
                total += change
                peak = max(peak, total)
            workspaces[names[name]] = max(0, peak - max(0, total))
        out: dict[str, Cost] = {}
        for key, sizes in made.items():
            if key not in seconds:
                try:
                    args, kwargs = _arguments(missing[key], calls, self.device, shared)
                    warm = self._repeated(missing[key], args, kwargs, [])
                    cold = warm
                    if _touched(missing[key], sizes) <= CACHE_BYTES and warm >= COUNTS_SECONDS:
                        cold = self._after_others(missing[key], args, kwargs)
                    seconds[key] = (warm + max(warm, cold)) / 2
                except Exception:  # noqa: BLE001, S112 - as above
                    continue
                del args, kwargs
            out[key] = Cost(seconds[key], workspaces.get(key, 0), sizes)
        return out

    def _on_cuda(
        self, missing: dict[str, CallSpec], calls: dict[str, CallSpec], tell: Callable[[int], None]
    ) -> dict[str, Cost]:
        out: dict[str, Cost] = {}
        shared = Filled(self.device)
        for number, (key, call) in enumerate(missing.items()):
            tell(number)
            if input_bytes(call) > LARGEST_INPUT_BYTES:
                continue
            try:
                args, kwargs = _arguments(call, calls, self.device, shared)
                _run(call, args, kwargs)
                torch.cuda.synchronize(self.device)
                before = torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
                result = _run(call, args, kwargs)
                torch.cuda.synchronize(self.device)
                peak = torch.cuda.max_memory_allocated(self.device) - before
                kept = torch.cuda.memory_allocated(self.device) - before
                sizes = _made(result, args, kwargs)
                del result
                out[key] = Cost(self._repeated(call, args, kwargs, []), max(0, peak - max(0, kept)), sizes)
                del args, kwargs
            except Exception:  # noqa: BLE001, S112 - an operation that refuses made-up inputs is estimated instead
                continue
        return out

    def _repeated(self, call: CallSpec, args: Any, kwargs: Any, times: list[float]) -> float:
        """The least of several runs, those of `times` included: what else the machine does can only add."""
        if times and min(times) >= LONG_SECONDS:
            return min(times)
        best = list(times)
        spent = 0.0
        while len(best) < MOST_REPEATS and (spent < MEASURE_SECONDS or len(best) < 2):
            best.append(self._once(call, args, kwargs))
            spent += best[-1]
        return min(best)

    def _after_others(self, call: CallSpec, args: Any, kwargs: Any) -> float:
        """The least of two runs with nothing in the caches."""
        if self._sweep is None:
            self._sweep = torch.ones(CACHE_BYTES // 4)
        times = []
        for _ in range(2):
            self._sweep.add_(0.0)
            times.append(self._once(call, args, kwargs))
        return min(times)

    def _once(self, call: CallSpec, args: Any, kwargs: Any) -> float:
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            _run(call, args, kwargs)
            end.record()
            torch.cuda.synchronize(self.device)
            return float(start.elapsed_time(end)) / 1e3
        clock = _clock()
        begin = clock()
        _run(call, args, kwargs)
        return clock() - begin


def _clock() -> Callable[[], float]:
    """Time of this thread alone where it does all the work, so that what else the machine does counts less."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _touched(call: CallSpec, made: Iterable[int]) -> int:
    return input_bytes(call) + sum(made)


def _arguments(call: CallSpec, calls: dict[str, CallSpec], device: torch.device, shared: Filled) -> tuple[Any, Any]:
    """Arguments for one run; opaque buffers come from a real run of the forward kernel."""
    forward_name = FORWARD_OF.get(str(call.func))
    if forward_name is None:
        return build(call, device, shared)
    args, kwargs = build(call, device)
    shape = _specs(call.args)[0].shape
    forward = next(c for c in calls.values() if str(c.func) == forward_name and _specs(c.args)[0].shape == shape)
    outputs = _run(forward, *build(forward, device))
    opaque = [t for t in dispatch.tensors_in(outputs) if t.dtype == torch.uint8]
    filled = tuple(opaque.pop(0) if isinstance(a, torch.Tensor) and a.dtype == torch.uint8 else a for a in args)
    return filled, kwargs


def _run(call: CallSpec, args: Any, kwargs: Any) -> Any:
    # Gradient mode stays on, as in the step (fused RNNs keep no workspace without it); the inputs ask for none.
    with torch.enable_grad():
        return call.func(*args, **kwargs)


def _made(result: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    there = dispatch.storages_of(dispatch.tensors_in((args, kwargs)))
    sizes: dict[int, int] = {}
    for tensor in dispatch.tensors_in(result):
        if dispatch.has_storage(tensor) and (key := dispatch.storage_key(tensor)) not in there:
            sizes[key] = tensor.untyped_storage().nbytes()
    return tuple(sizes.values())


def _specs(tree: Any) -> list[TensorSpec]:
    if isinstance(tree, TensorSpec):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [s for item in tree for s in _specs(item)]
    if isinstance(tree, dict):
        return [s for item in tree.values() for s in _specs(item)]
    return []


def _extent(spec: TensorSpec) -> int:
    if 0 in spec.shape:
        return 0
    return 1 + sum((n - 1) * abs(s) for n, s in zip(spec.shape, spec.stride, strict=True))


def input_bytes(call: CallSpec) -> int:
    """Bytes its tensor arguments span."""
    spans: dict[int, tuple[int, int]] = {}
    for spec in _specs((call.args, call.kwargs)):
        begin = spec.offset * spec.dtype.itemsize
        end = begin + _extent(spec) * spec.dtype.itemsize
        low, high = spans.get(spec.place, (begin, end))
        spans[spec.place] = (min(low, begin), max(high, end))
    return sum(high - low for low, high in spans.values())


class Filled:
    """Storages of filled memory that calls read in turn: getting fresh memory from the system takes longer than most operations run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def storage(self, place: int, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        """At least `count` elements, the same ones for the same place."""
        flat = self._flat.get((place, dtype))
        if flat is None or flat.numel() < count:
            flat = self._flat[place, dtype] = _filled(count, dtype, self._device)
        return flat.untyped_storage()


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    flat = torch.empty(count, dtype=dtype, device=device)
    # Random numbers would take longer to draw than most operations to run.
    return flat.fill_(0.75) if dtype.is_floating_point else flat.zero_()


def build(call: CallSpec, device: torch.device, shared: Filled | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for one run: integers zero (any index is valid), numbers 0.75.

    Args:
        call: what to run.
        device: where.
        shared: memory to take for arguments that are only read.
    """
    if call.written or input_bytes(call) > LARGEST_SHARED_BYTES:
        shared = None
    specs = _specs((call.args, call.kwargs))
    start: dict[int, int] = {}
    for spec in specs:
        position = spec.offset * spec.dtype.itemsize
        start[spec.place] = min(start.get(spec.place, position), position)
    size: dict[int, int] = {}
    kind: dict[int, torch.dtype] = {}
    for spec in specs:
        end = spec.offset * spec.dtype.itemsize - start[spec.place] + _extent(spec) * spec.dtype.itemsize
        size[spec.place] = max(size.get(spec.place, 0), end)
        kind.setdefault(spec.place, spec.dtype)
    storages: dict[int, torch.UntypedStorage] = {}
    for place, count in size.items():
        dtype = kind[place]
        elements = -(-count // dtype.itemsize)
        storages[place] = (
            shared.storage(place, dtype, elements)
            if shared is not None
            else _filled(elements, dtype, device).untyped_storage()
        )

    def made(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            offset = value.offset - start[value.place] // value.dtype.itemsize
            return torch.empty(0, dtype=value.dtype, device=device).set_(
                storages[value.place], offset, value.shape, value.stride
            )
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (list, tuple)):
            return type(value)(made(v) for v in value)
        return value

    return tuple(made(a) for a in call.args), {k: made(v) for k, v in call.kwargs.items()}


def flops_of(call: CallSpec) -> float:
    """Floating-point operations, by torch's own formulas; 0 for what is not a matrix product."""
    packet = call.func.overloadpacket
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0

    def meta(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return type(value)(meta(v) for v in value)
        return value

    try:
        args, kwargs = tuple(meta(a) for a in call.args), {k: meta(v) for k, v in call.kwargs.items() if k != "device"}
        return float(formula(*args, **kwargs, out_val=call.func(*args, **kwargs)))
    except Exception:  # noqa: BLE001 - a formula that does not know this form counts as none
        return 0.0


def estimated_seconds(call: CallSpec, machine: Machine) -> float:
    """Roofline time of a call on a machine."""
    specs = _specs((call.args, call.kwargs))
    if not call.made_bytes and not call.written:
        return 0.0  # a view
    half = any(s.dtype in (torch.bfloat16, torch.float16) for s in specs)
    moved = input_bytes(call) + sum(call.made_bytes)
    return machine.roofline_seconds(flops_of(call), moved, half=half)


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
    with torch.random.fork_rng(devices=[]):
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
    from memfit.machine import BANDWIDTH_EFFICIENCY, MATRIX_EFFICIENCY

    # Measured rates are what is reached, so the roofline's efficiencies are taken out again.
    return Machine(
        device_name(device),
        device.type,
        int(memory),
        flops / MATRIX_EFFICIENCY,
        half_flops / MATRIX_EFFICIENCY,
        bandwidth / BANDWIDTH_EFFICIENCY,
        launch_seconds=5e-6,
        allocation_bytes=512 if device.type == "cuda" else 1,
    )


def with_costs(
    captured: Captured,
    costs: dict[str, Cost],
    *,
    seconds_are: str,
    device: str,
    allocation_bytes: int = 1,
    beside_bytes: int = 0,
) -> Trace:
    """The trace with seconds and workspace filled in, and hidden bytes in opaque outputs put right.

    Args:
        captured: the trace and its calls.
        costs: of each call.
        seconds_are, device: for the record.
        allocation_bytes: what the device's allocator rounds up to (512 on CUDA).
        beside_bytes: held on the device beside what the trace knows (libraries' workspaces, the user's other tensors).
    """
    trace = captured.trace
    storages: list[Storage] = list(trace.storages)
    operations = []
    notes = list(trace.notes)
    for op in trace.operations:
        cost = costs[op.key]
        hidden = 0
        if cost.made_bytes is not None and len(cost.made_bytes) > len(op.makes):
            # The fake kernel gives one storage twice where the real one makes two (a fused RNN's bias gradients).
            hidden = max(0, sum(cost.made_bytes) - sum(storages[s].bytes for s in op.makes))
        operations.append(replace(op, seconds=cost.seconds, workspace_bytes=cost.workspace_bytes + hidden))
        if cost.made_bytes is None or trace.source != "fake" or len(cost.made_bytes) != len(op.makes):
            continue
        for s, size in zip(op.makes, cost.made_bytes, strict=True):
            if size > storages[s].bytes:
                storages[s] = replace(storages[s], bytes=size)
                note = f"{op.name} returns more memory than its fake kernel shows; measured bytes are used"
                if note not in notes:
                    notes.append(note)
    if allocation_bytes > 1:
        storages = [replace(s, bytes=-(-s.bytes // allocation_bytes) * allocation_bytes) for s in storages]
    if beside_bytes:
        storages.append(Storage(beside_bytes, Category.OTHER, "", BEFORE_STEP, len(trace.events)))
    return replace(
        trace,
        operations=tuple(operations),
        storages=tuple(storages),
        seconds_are=seconds_are,
        device=device,
        notes=tuple(notes),
    )


def beside_bytes(device: torch.device, known: Iterable[torch.Tensor]) -> int:
    """Bytes that the CUDA allocator has handed out for other things than these tensors: cuBLAS's workspace, whatever else the process holds; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    held = sum(
        -(-s.nbytes() // 512) * 512 for s in dispatch.storages_of(t for t in known if t.device == device).values()
    )
    return max(0, torch.cuda.memory_allocated(device) - held)


def estimated_costs(calls: dict[str, CallSpec], machine: Machine) -> dict[str, Cost]:
    """Roofline costs of all calls on a machine that is not here."""
    return {key: Cost(estimated_seconds(call, machine), 0, None, measured=False) for key, call in calls.items()}
