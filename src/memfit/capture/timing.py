"""Profile each distinct call alone on the device: its seconds, its workspace, the sizes and layouts of its results.

Fake tensors show an operation's results, but neither the workspace it allocates and frees (a convolution's reordered weights) nor what some kernels put into
opaque outputs (a fused RNN's reserve space). The runs that are timed show both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from memfit import dispatch
from memfit.capture.arguments import Filled, arguments_of, run
from memfit.capture.calls import CallSpec, ResultLayouts, TensorLayout, layout_of
from memfit.capture.costs import Cost
from memfit.capture.fresh_memory import KEPT, fresh_memory, page_faults
from memfit.capture.present_machine import present_machine
from memfit.capture.reference_work import STALLED, ReferenceWork, noted, typical
from memfit.meter import profiled, spans_and_changes, workspace_of
from memfit.step.freed_memory import keep_freed_memory

# Operations with larger inputs are not run alone but estimated from this device's measured rates.
LARGEST_INPUT_BYTES: Final = 1 << 30
# Smaller inputs may be in the CPU's caches when they are read (what was computed just before) or not (what forward saved). So operations that touch less than
# this are timed with warm and with cold caches. With warm ones alone, eight micro-batches looked up to a quarter faster than they are.
CACHE_BYTES: Final = 64 << 20
OVERHEAD_SECONDS: Final = 20e-6  # shorter operations are all overhead, of which `host_time` knows what cold caches add
# Reading the clock takes about a microsecond. So operations shorter than this are timed several in a row, about this long.
IN_A_ROW_SECONDS: Final = 200e-6
MEASURE_SECONDS: Final = 0.002  # each call is repeated until about this long has been measured, in each round
MOST_REPEATS: Final = 4
ROWS: Final = 3
TRIES: Final = 5  # until an operation meets no page faults, or as many as before
SETTLED: Final = 0.9  # of the faults of the run before: they come with every run
# A machine that others use is slower for moments and for seconds on end, so one call's runs right after each other say little, and its time is over that of
# the reference work. All calls are timed in turn, and those again of which half of the times differ by more than this. Medians are taken, not the shortest
# times: a call that is short and run often would look faster than one that is long.
AGREEMENT: Final = 1.1
ROUNDS: Final = range(3, 8)
VERY_LONG_SECONDS: Final = 0.5  # operations this long are run once: the setup of a first run is small in comparison
MEMORY_BOUND: Final = 0.01  # operations that spend less than this fraction of their time on memory traffic are timed with warm caches alone
# On a GPU: runs of each operation, launched while it is kept busy for about a millisecond; a cache is no larger than this.
GPU_RUNS: Final = 4
BUSY_CYCLES: Final = 2_000_000
GPU_CACHE_BYTES: Final = 128 << 20
# Operations this long are timed under the profiler: its few microseconds are negligible in them.
PROFILED_SECONDS: Final = 0.001


class KernelTimer:
    """Measures calls on a device of this machine.

    Args:
        device: where to run them.
        calls: all calls of the step, by key: some arguments are made by running another call.
        reference: tells how busy a CPU is; None not to look.
    """

    def __init__(
        self, device: torch.device, calls: Mapping[str, CallSpec], reference: ReferenceWork | None = None
    ) -> None:
        self.device = device
        self._reference = reference
        self._calls = calls
        self._cache_filler: torch.Tensor | None = None
        self._clock = processor_clock()
        self._fresh = fresh_memory(self._clock) if device.type == "cpu" else KEPT

    def measure(self, wanted: Mapping[str, CallSpec], progress: Callable[[int], None]) -> dict[str, Cost]:
        """Costs of the calls that can be run alone. Those that are too large or fail on synthetic arguments are left out.

        Args:
            wanted: calls by key.
            progress: called with the number of calls measured so far.
        """
        return (self._on_cuda if self.device.type == "cuda" else self._on_cpu)(wanted, progress)

    def _on_cpu(self, wanted: Mapping[str, CallSpec], progress: Callable[[int], None]) -> dict[str, Cost]:
        """Bytes of every call from one profiler session; seconds from the same session for long operations, without the profiler for short ones."""
        keep_freed_memory()  # as in a step
        names: dict[str, str] = {}
        found: dict[str, Cost] = {}
        timed: dict[str, _Timed] = {}

        def profile_call(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            progress(len(names))
            name = f"memfit.cost.{len(names)}"
            names[name] = key
            before = self._slowdown()
            made: tuple[int, ...] = ()
            layouts: ResultLayouts = ()

            def once() -> float:
                nonlocal made, layouts
                begin = self._clock()
                with torch.profiler.record_function(name):
                    result = run(call, args, kwargs)
                taken = self._clock() - begin
                made, layouts = self._results(result, args, kwargs)
                return taken

            # A first run may allocate what then stays, and take longer: the last span of a name counts.
            ran = self._run(once)
            if ran.seconds < VERY_LONG_SECONDS:
                ran = self._run_with_its_pages(once)
            found[key] = Cost(0.0, 0, made, layouts)
            timed[key] = _Timed(self._fresh.faults_of(made))
            if ran.seconds >= PROFILED_SECONDS:
                timed[key].add(ran, None, (before + self._slowdown()) / 2, stalled=self._stalls())

        def time_call(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            before = self._slowdown()
            touched = call.input_bytes + sum(found[key].made_bytes or ())
            # The cold run first: it fills the caches again, which a warm one would find as another operation's cold run left them.
            known = timed[key].warm
            meets_cold = bool(known) and self._meets_cold_caches(touched, typical(known))
            cold = self._cold_seconds(call, args, kwargs) if meets_cold else None
            warm = self._warm_run(call, args, kwargs)
            timed[key].add(warm, cold, (before + self._slowdown()) / 2, stalled=self._stalls())

        shared = Filled(self.device)
        with profiled() as profile:
            self._each(wanted, shared, profile_call)
        for _ in range(ROUNDS.stop - 1):
            again = {key: wanted[key] for key, each in timed.items() if not each.settled}
            self._each(again, shared, time_call)
            for key in again:
                timed[key].rounds += 1
        workspaces = {
            names[name]: workspace_of(changes)
            for name, changes in spans_and_changes(profile, "memfit.cost.").items()
            if name in names
        }
        return {key: timed[key].cost(cost, workspaces.get(key, 0)) for key, cost in found.items() if timed[key].warm}

    def seconds_now(self, calls: Mapping[str, CallSpec]) -> dict[str, float]:
        """What each of these calls takes on a CPU by now, with warm caches and whatever else the computer does; without those that cannot be run alone."""
        found: dict[str, list[float]] = {}

        def time_call(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            found.setdefault(key, []).append(self._warm_run(call, args, kwargs).seconds)

        shared = Filled(self.device)
        for _ in range(ROUNDS.start):
            self._each(calls, shared, time_call)
        return {key: typical(each) for key, each in found.items()}

    def _slowdown(self) -> float:
        """Of the computer by now."""
        return 1.0 if self._reference is None else self._reference.slowdown_beside()

    def _stalls(self) -> bool:
        """Whether threads wait for each other by now."""
        return self._reference is not None and self._reference.stalls

    def _on_cuda(self, wanted: Mapping[str, CallSpec], progress: Callable[[int], None]) -> dict[str, Cost]:
        found: dict[str, Cost] = {}

        def measure_call(key: str, call: CallSpec, args: Any, kwargs: Any) -> None:
            progress(len(found))
            run(call, args, kwargs)
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            result = run(call, args, kwargs)
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - before
            remaining = torch.cuda.memory_allocated(self.device) - before
            made, layouts = self._results(result, args, kwargs)
            del result
            warm, cold = (self._device_seconds(call, args, kwargs, cold=cold) for cold in (False, True))
            found[key] = Cost((warm + cold) / 2, max(0, peak - max(0, remaining)), made, layouts)

        self._each(wanted, Filled(self.device), measure_call)
        return found

    def _each(
        self,
        wanted: Mapping[str, CallSpec],
        shared: Filled,
        measure: Callable[[str, CallSpec, Any, Any], None],
    ) -> None:
        """Give each call to `measure` with synthetic arguments. One that is too large or fails on them is left out, and estimated later."""
        for key, call in wanted.items():
            if call.input_bytes > LARGEST_INPUT_BYTES:
                continue
            with suppress(Exception):
                args, kwargs = arguments_of(call, self._calls, self.device, shared)
                measure(key, call, args, kwargs)
                del args, kwargs

    def _results(self, result: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], ResultLayouts]:
        """Bytes on the device of the storages a run allocated, and the layouts of the tensors it returned that lie in them."""
        inputs = dispatch.storages_of(dispatch.tensors_in((args, kwargs)))
        sizes: dict[int, int] = {}
        layouts: list[TensorLayout | None] = []
        for tensor in dispatch.tensors_in(result):
            new = dispatch.has_storage(tensor) and dispatch.storage_key(tensor) not in inputs
            layouts.append(layout_of(tensor) if new else None)
            if new:
                here = tensor.device.type == self.device.type
                sizes[dispatch.storage_key(tensor)] = tensor.untyped_storage().nbytes() if here else 0
        return tuple(sizes.values()), tuple(layouts)

    def _meets_cold_caches(self, touched: int, warm: float) -> bool:
        """Whether it makes a difference to a call on the CPU, which touches so many bytes, if what it reads is in the caches."""
        if touched > CACHE_BYTES or warm < OVERHEAD_SECONDS:
            return False
        return present_machine(self.device).roofline_seconds(0.0, touched, half=False) >= MEMORY_BOUND * warm

    def _device_seconds(self, call: CallSpec, args: Any, kwargs: Any, *, cold: bool) -> float:
        """What the kernels of a call take on a GPU: the median of several runs, launched while the GPU is kept busy, so that it never waits for the host.

        Args:
            call, args, kwargs: what to run.
            cold: the GPU's cache holds other bytes before each run.
        """
        if cold and self._cache_filler is None:
            with suppress(torch.OutOfMemoryError):  # a GPU that is full already: warm caches have to do
                self._cache_filler = torch.empty(GPU_CACHE_BYTES, dtype=torch.uint8, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(GPU_RUNS)]
        torch.cuda._sleep(BUSY_CYCLES)
        for start, end in events:
            if cold and self._cache_filler is not None:
                self._cache_filler.zero_()
            start.record()
            run(call, args, kwargs)
            end.record()
        torch.cuda.synchronize(self.device)
        return median(float(start.elapsed_time(end)) / 1e3 for start, end in events)

    def _warm_run(self, call: CallSpec, args: Any, kwargs: Any) -> _Run:
        """The median of several on a CPU."""

        def once() -> float:
            return self._run_seconds(call, args, kwargs)

        ran = [self._run_with_its_pages(once)]
        while len(ran) < MOST_REPEATS and sum(each.seconds for each in ran) < MEASURE_SECONDS:
            ran.append(self._run_with_its_pages(once))
        least = min(each.seconds for each in ran)
        if least > IN_A_ROW_SECONDS / 2:
            return _Run.typical_of(ran)
        runs = max(1, int(IN_A_ROW_SECONDS / max(least, 1e-6)))
        return _Run(typical(self._run_seconds(call, args, kwargs, runs) for _ in range(ROWS)), 0)

    def _cold_seconds(self, call: CallSpec, args: Any, kwargs: Any) -> float:
        """One run with cold caches."""
        filler = self._cache_filler
        if filler is None:
            filler = self._cache_filler = torch.ones(CACHE_BYTES // 4)
        return self._run_with_its_pages(lambda: self._run_seconds(call, args, kwargs), lambda: filler.add_(0.0)).seconds

    def _run_with_its_pages(self, run: Callable[[], float], before: Callable[[], object] = lambda: None) -> _Run:
        """The first of some runs that meets no page faults, or no fewer than the one before: those of blocks which malloc gives back each time.

        A process that has just begun gets new pages for what its allocator has not held yet, which a step that is repeated does not. Getting them took up to
        twenty times as long as the operation.

        Args:
            run: returns its seconds.
            before: called before each run, untimed.
        """
        ran: list[_Run] = []
        while not ran or (ran[-1].faults and len(ran) < TRIES):
            before()
            ran.append(self._run(run))
            if len(ran) > 1 and ran[-1].faults >= SETTLED * ran[-2].faults:
                break
        return ran[-1]

    def _run(self, run: Callable[[], float]) -> _Run:
        """One run, given what returns its seconds."""
        met = page_faults()
        seconds = run()
        met = page_faults() - met
        return _Run(max(0.0, seconds - met * self._fresh.seconds), met)

    def _run_seconds(self, call: CallSpec, args: Any, kwargs: Any, runs: int = 1) -> float:
        """Seconds of one of so many runs in a row."""
        clock, func = self._clock, call.func
        # As in `run`, but with nothing of ours between the clock and the operation.
        with torch.enable_grad():
            begin = clock()
            for _ in range(runs):
                func(*args, **kwargs)
            return (clock() - begin) / runs


class _Run(NamedTuple):
    """A run of a call on a CPU.

    Attributes:
        seconds: without those of the page faults.
        faults: of pages that it met.
    """

    seconds: float
    faults: int

    @classmethod
    def typical_of(cls, ran: Sequence[_Run]) -> _Run:
        """Of several."""
        return cls(typical(each.seconds for each in ran), round(median(each.faults for each in ran)))


class _Timed:
    """What the rounds have found of one call.

    Args:
        large_faults: of pages that it meets where the large blocks that it makes come from the system.

    Attributes:
        warm, cold: seconds in warm and in cold caches, over the slowdown meanwhile.
        rounds: in which it was timed, or could not be.
    """

    def __init__(self, large_faults: int) -> None:
        self._large_faults = large_faults
        self._faults = 0
        self.warm: list[float] = []
        self.cold: list[float] = []
        self.rounds = 0
        self._long = False
        self._slowdown = inf

    def add(self, warm: _Run, cold: float | None, slowdown: float, *, stalled: bool) -> None:
        """What it took in one round, how much slower the computer was beside it, and whether threads waited for each other there."""
        self.warm.append(warm.seconds / slowdown)
        self._faults = max(self._faults, warm.faults)
        if cold is not None:
            self.cold.append(cold / slowdown)
        self._long = self._long or warm.seconds >= VERY_LONG_SECONDS
        self._slowdown = min(self._slowdown, noted(slowdown, stalls=stalled))

    @property
    def settled(self) -> bool:
        """Whether more rounds would say nothing new."""
        return self._long or (
            self.rounds + 1 >= ROUNDS.start
            and self._slowdown < STALLED  # else they may agree upon how long a thread waits
            and agree(self.warm)
            and (not self.cold or agree(self.cold))
        )

    def cost(self, cost: Cost, workspace_bytes: int) -> Cost:
        """A cost with these seconds: of warm and cold caches, as bytes may be in them or not.

        Args:
            cost: the rest of it.
            workspace_bytes: of it.
        """
        warm = typical(self.warm)
        return replace(
            cost,
            seconds=warm,
            workspace_bytes=workspace_bytes,
            slowdown=self._slowdown,
            cold_seconds=max(warm, typical(self.cold)) if self.cold else None,
            # Without any, large blocks were put into a hole in every round, as they are not in a step that fills the holes.
            faults=self._faults or self._large_faults,
        )


def agree(times: Iterable[float]) -> bool:
    """Whether the middle half of some times are about the same; there are none of what cannot be run again by itself."""
    times = sorted(times)
    middle = times[len(times) // 4 : len(times) - len(times) // 4]
    return not middle or middle[-1] <= AGREEMENT * middle[0]


def processor_clock() -> Callable[[], float]:
    """CPU time of this thread where it does all the work, so that other load on the machine counts less; else wall time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
