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
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from memfit import dispatch
from memfit.capture.capture import Captured, forked_generators
from memfit.capture.recorder import GENERATOR_STATE, CallSpec, Layout, Layouts, TensorSpec, layout_of
from memfit.meter import profiled, spans_and_changes
from memfit.storage.folders import cache_folder
from memfit.values.machine import Machine
from memfit.values.trace import BEFORE_STEP, Category, Storage, Trace, digest

# Operations with more input than this are not run alone but estimated from this device's measured rates.
LARGEST_INPUT_BYTES: Final = 1 << 30
# What is smaller may lie in the caches when it is read, or not: what came just before does, what was saved in forward does not. So operations that touch less
# are timed both ways, and the mean is taken. Timed warm alone, small micro-batches looked up to a sixth faster than they are.
CACHE_BYTES: Final = 64 << 20
COUNTS_SECONDS: Final = 20e-6  # shorter operations are all overhead
LARGEST_SHARED_BYTES: Final = 256 << 20  # calls that read more get memory of their own
MEASURE_SECONDS: Final = 0.004  # each kind is repeated until about this long has been measured
MOST_REPEATS: Final = 7
VERY_LONG_SECONDS: Final = 0.5  # operations this long are run once: what a first run sets up is small beside them
READING_COUNTS: Final = 0.1  # what spends less of its time on reaching memory is timed with warm caches alone
# Operations this long are timed under the profiler, whose few microseconds do not count beside them.
PROFILED_SECONDS: Final = 0.001
FORMAT: Final = 6


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
        layouts: of the tensors it returns, as in `CallSpec`; None when not measured.
        measured: run on the device, not estimated.
    """

    seconds: float
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] | None = None
    layouts: Layouts | None = None
    measured: bool = True


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
            for key, (seconds, workspace, made, layouts, measured) in json.loads(self.path.read_text()).items():
                self._costs[key] = Cost(
                    seconds,
                    workspace,
                    None if made is None else tuple(made),
                    None
                    if layouts is None
                    else tuple(None if each is None else (each[0], tuple(each[1])) for each in layouts),
                    measured,
                )

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
            self._sweep = None  # the table lives as long as its plans do
            for key, call in missing.items():
                cost = found.get(key)
                self._costs[digest(key)] = cost or Cost(estimated_seconds(call, machine), measured=False)
            self._write()
        return {key: self._costs[digest(key)] for key in calls}

    def _write(self) -> None:
        # The cache is a convenience: a read-only or full disk must not stop a plan.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            rows = {k: astuple(c) for k, c in self._costs.items()}
            temporary.write_text(json.dumps(rows))
            temporary.replace(self.path)

    def _on_cpu(
        self, missing: dict[str, CallSpec], calls: dict[str, CallSpec], tell: Callable[[int], None]
    ) -> dict[str, Cost]:
        """Bytes from a profiled run of each; seconds from the same session for what is long, from unprofiled runs for what is short."""
        names: dict[str, str] = {}
        found: dict[str, Cost] = {}
        short: dict[str, CallSpec] = {}

        def look(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            tell(len(names))
            name = f"memfit.cost.{len(names)}"
            names[name] = key
            times: list[float] = []
            made: tuple[int, ...] = ()
            layouts: Layouts = ()
            # The first run may set things up that stay (the span of a name that counts is its last), and its time with it.
            while len(times) < 2 and not (times and times[0] >= VERY_LONG_SECONDS):
                begin = clock()
                with torch.profiler.record_function(name):
                    result = _run(call, args, kwargs)
                times.append(clock() - begin)
                made, layouts = _made(result, args, kwargs)
                del result
            if min(times) >= PROFILED_SECONDS:
                found[key] = Cost(self._seconds(call, args, kwargs, made, times), 0, made, layouts)
            else:
                found[key] = Cost(0.0, 0, made, layouts)
                short[key] = call

        def time_it(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            seconds = self._seconds(call, args, kwargs, found[key].made_bytes or (), [])
            found[key] = replace(found[key], seconds=seconds)
            del short[key]

        clock = _clock()
        shared = Filled(self.device)
        with profiled() as profile:
            self._each(missing, calls, shared, look)
        self._each(dict(short), calls, shared, time_it)
        workspaces = {
            names[name]: _held_within(changes)
            for name, changes in spans_and_changes(profile, "memfit.cost.").items()
            if name in names
        }
        return {
            key: replace(cost, workspace_bytes=workspaces.get(key, 0))
            for key, cost in found.items()
            if key not in short
        }

    def _on_cuda(
        self, missing: dict[str, CallSpec], calls: dict[str, CallSpec], tell: Callable[[int], None]
    ) -> dict[str, Cost]:
        found: dict[str, Cost] = {}

        def look(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            tell(len(found))
            _run(call, args, kwargs)
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            result = _run(call, args, kwargs)
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - before
            kept = torch.cuda.memory_allocated(self.device) - before
            made, layouts = _made(result, args, kwargs)
            del result
            seconds = self._repeated(call, args, kwargs, [])
            found[key] = Cost(seconds, max(0, peak - max(0, kept)), made, layouts)

        self._each(missing, calls, Filled(self.device), look)
        return found

    def _each(
        self,
        wanted: dict[str, CallSpec],
        calls: dict[str, CallSpec],
        shared: Filled,
        look: Callable[[str, CallSpec, Any, Any], None],
    ) -> None:
        """Hand each call to `look` with made-up arguments; one that is too large for that or refuses them is left out, and estimated in the end."""
        for key, call in wanted.items():
            if input_bytes(call) > LARGEST_INPUT_BYTES:
                continue
            with suppress(Exception):
                args, kwargs = _arguments(call, calls, self.device, shared)
                look(key, call, args, kwargs)
                del args, kwargs

    def _seconds(self, call: CallSpec, args: Any, kwargs: Any, made: Iterable[int], times: list[float]) -> float:
        """Seconds of one run on the CPU: the mean of warm and cold caches where they can matter; `times` are of warm runs made already."""
        warm = self._repeated(call, args, kwargs, times)
        touched = input_bytes(call) + sum(made)
        if touched > CACHE_BYTES or warm < COUNTS_SECONDS:
            return warm
        reading = present_machine(self.device).roofline_seconds(0.0, touched, half=False)
        if reading < READING_COUNTS * warm:
            return warm
        return (warm + max(warm, self._after_others(call, args, kwargs))) / 2

    def _repeated(self, call: CallSpec, args: Any, kwargs: Any, times: list[float]) -> float:
        """The least of several runs, those of `times` included: what else the machine does can only add."""
        times = list(times)
        while not times or (
            times[0] < VERY_LONG_SECONDS
            and len(times) < MOST_REPEATS
            and (len(times) < 2 or sum(times) < MEASURE_SECONDS)
        ):
            times.append(self._once(call, args, kwargs))
        return min(times)

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


def _held_within(changes: Iterable[int]) -> int:
    """Bytes allocated at once beyond what stays, from the changes of one run."""
    total = peak = 0
    for change in changes:
        total += change
        peak = max(peak, total)
    return max(0, peak - max(0, total))


def _clock() -> Callable[[], float]:
    """Time of this thread alone where it does all the work, so that what else the machine does counts less."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


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


def _made(result: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], Layouts]:
    """Bytes of the storages a run made, and the layouts of the tensors it returned that lie in them."""
    there = dispatch.storages_of(dispatch.tensors_in((args, kwargs)))
    sizes: dict[int, int] = {}
    layouts: list[Layout | None] = []
    for tensor in dispatch.tensors_in(result):
        new = dispatch.has_storage(tensor) and dispatch.storage_key(tensor) not in there
        layouts.append(layout_of(tensor) if new else None)
        if new:
            sizes[dispatch.storage_key(tensor)] = tensor.untyped_storage().nbytes()
    return tuple(sizes.values()), tuple(layouts)


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
    from memfit.values.machine import BANDWIDTH_EFFICIENCY, MATRIX_EFFICIENCY

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
    drawn = [list(sizes) for sizes in trace.drawn_bytes]
    operations = []
    notes = list(trace.notes)
    for op in trace.operations:
        if op.name == GENERATOR_STATE:
            operations.append(op)
            continue
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
                for sizes in drawn:
                    sizes[s] = max(sizes[s], size)
                note = f"{op.name} returns more memory than its fake kernel shows; measured bytes are used"
                if note not in notes:
                    notes.append(note)
    if allocation_bytes > 1:
        storages = [replace(s, bytes=-(-s.bytes // allocation_bytes) * allocation_bytes) for s in storages]
        drawn = [[-(-size // allocation_bytes) * allocation_bytes for size in sizes] for sizes in drawn]
    if beside_bytes:
        storages.append(Storage(beside_bytes, Category.OTHER, "", BEFORE_STEP, len(trace.events)))
        for sizes in drawn:
            sizes.append(beside_bytes)
    return replace(
        trace,
        operations=tuple(operations),
        storages=tuple(storages),
        seconds_are=seconds_are,
        device=device,
        notes=tuple(notes),
        drawn_bytes=tuple(map(tuple, drawn)),
    )


def wrong_layouts(captured: Captured, costs: dict[str, Cost]) -> dict[str, Layouts]:
    """Calls of a fake capture whose real kernels lay out their results otherwise, with the real layouts.

    Which kernel comes next, and what it takes, depends on the layout; the strides of dimensions of size 1 count too (`suggest_memory_format`), and so do
    dtypes (batch norm of 16 bits keeps its statistics in 32, whatever its fake kernel says).
    """
    if captured.trace.source != "fake":
        return {}
    found: dict[str, Layouts] = {}
    for key, call in captured.calls.items():
        real = costs[key].layouts
        if real is not None and len(real) == len(call.layouts) and real != call.layouts:
            found[key] = real
    return found


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
    return {key: Cost(estimated_seconds(call, machine), measured=False) for key, call in calls.items()}
