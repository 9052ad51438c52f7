"""Run each distinct call alone on the device: how long it takes, what it allocates meanwhile, what it returns.

Fake tensors know what an operation returns, not what it allocates meanwhile (a convolution's reordered weights) nor what some kernels put into opaque
outputs (a fused RNN's workspace): the runs that are timed tell both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch

from memfit import dispatch
from memfit.capture.arguments import Filled, arguments_of, run
from memfit.capture.calls import CallSpec, ResultLayouts, TensorLayout, layout_of
from memfit.capture.costs import Cost
from memfit.capture.present_machine import present_machine
from memfit.meter import profiled, spans_and_changes

# Operations with more input than this are not run alone but estimated from this device's measured rates.
LARGEST_INPUT_BYTES: Final = 1 << 30
# What is smaller may lie in the caches when it is read, or not: what came just before does, what was saved in forward does not. So operations that touch less
# are timed both ways, and the mean is taken. Timed warm alone, small micro-batches looked up to a sixth faster than they are.
CACHE_BYTES: Final = 64 << 20
COUNTS_SECONDS: Final = 20e-6  # shorter operations are all overhead
MEASURE_SECONDS: Final = 0.004  # each kind is repeated until about this long has been measured
MOST_REPEATS: Final = 7
VERY_LONG_SECONDS: Final = 0.5  # operations this long are run once: what a first run sets up is small beside them
READING_COUNTS: Final = 0.1  # what spends less of its time on reaching memory is timed with warm caches alone
# Operations this long are timed under the profiler, whose few microseconds do not count beside them.
PROFILED_SECONDS: Final = 0.001


class KernelTimer:
    """Measures calls on a device that is here.

    Args:
        device: where to run them.
        calls: all of the step, by key: some arguments come from running another call.
    """

    def __init__(self, device: torch.device, calls: Mapping[str, CallSpec]) -> None:
        self.device = device
        self._calls = calls
        self._sweep: torch.Tensor | None = None

    def measure(self, wanted: Mapping[str, CallSpec], tell: Callable[[int], None]) -> dict[str, Cost]:
        """Costs of the calls that can be run alone: what is too large for that or refuses made-up arguments is left out.

        Args:
            wanted: calls by key.
            tell: told how many have been looked at.
        """
        return (self._on_cuda if self.device.type == "cuda" else self._on_cpu)(wanted, tell)

    def _on_cpu(self, wanted: Mapping[str, CallSpec], tell: Callable[[int], None]) -> dict[str, Cost]:
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
            layouts: ResultLayouts = ()
            # The first run may set things up that stay (the span of a name that counts is its last), and its time with it.
            while len(times) < 2 and not (times and times[0] >= VERY_LONG_SECONDS):
                begin = clock()
                with torch.profiler.record_function(name):
                    result = run(call, args, kwargs)
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
            self._each(wanted, shared, look)
        self._each(dict(short), shared, time_it)
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

    def _on_cuda(self, wanted: Mapping[str, CallSpec], tell: Callable[[int], None]) -> dict[str, Cost]:
        found: dict[str, Cost] = {}

        def look(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            tell(len(found))
            run(call, args, kwargs)
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            result = run(call, args, kwargs)
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - before
            kept = torch.cuda.memory_allocated(self.device) - before
            made, layouts = _made(result, args, kwargs)
            del result
            seconds = self._repeated(call, args, kwargs, [])
            found[key] = Cost(seconds, max(0, peak - max(0, kept)), made, layouts)

        self._each(wanted, Filled(self.device), look)
        return found

    def _each(
        self,
        wanted: Mapping[str, CallSpec],
        shared: Filled,
        look: Callable[[str, CallSpec, Any, Any], None],
    ) -> None:
        """Hand each call to `look` with made-up arguments; one that is too large for that or refuses them is left out, and estimated in the end."""
        for key, call in wanted.items():
            if call.input_bytes > LARGEST_INPUT_BYTES:
                continue
            with suppress(Exception):
                args, kwargs = arguments_of(call, self._calls, self.device, shared)
                look(key, call, args, kwargs)
                del args, kwargs

    def _seconds(self, call: CallSpec, args: Any, kwargs: Any, made: Iterable[int], times: list[float]) -> float:
        """Seconds of one run on the CPU: the mean of warm and cold caches where they can matter; `times` are of warm runs made already."""
        warm = self._repeated(call, args, kwargs, times)
        touched = call.input_bytes + sum(made)
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
            run(call, args, kwargs)
            end.record()
            torch.cuda.synchronize(self.device)
            return float(start.elapsed_time(end)) / 1e3
        clock = _clock()
        begin = clock()
        run(call, args, kwargs)
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


def _made(result: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], ResultLayouts]:
    """Bytes of the storages a run made, and the layouts of the tensors it returned that lie in them."""
    there = dispatch.storages_of(dispatch.tensors_in((args, kwargs)))
    sizes: dict[int, int] = {}
    layouts: list[TensorLayout | None] = []
    for tensor in dispatch.tensors_in(result):
        new = dispatch.has_storage(tensor) and dispatch.storage_key(tensor) not in there
        layouts.append(layout_of(tensor) if new else None)
        if new:
            sizes[dispatch.storage_key(tensor)] = tensor.untyped_storage().nbytes()
    return tuple(sizes.values()), tuple(layouts)
