"""What the host takes to launch a step: models of `absent` with so few samples that the GPU waits, beside what their operations take to launch alone."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from gpu.absent import PLAIN_STEPS, PlainStep
from gpu.rows import whole_step
from gpu.setting import Setting, adamw

from memfit import batches
from memfit.capture.arguments import run
from memfit.capture.cost_table import CostTable
from memfit.capture.host_time import has_kernel
from memfit.capture.timing import KernelTimer
from memfit.capture.trace_source import TraceSource
from memfit.step.program import StepProgram
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Phase, Trace

ROWS = 2
REPEATS = 8
RUNS = 6


def host(setting: Setting) -> Iterator[dict[str, Any]]:
    """Host seconds of forward, backward and update; operations, and the seconds that launching them alone takes."""
    yield copies(setting)
    launches = Launches()
    mode = CostTable(setting.device).host_time().mode
    with launches:
        for each in PLAIN_STEPS[:2] if setting.tiny else PLAIN_STEPS:
            setting.fresh()
            try:
                yield {"step": each.name, "mode_seconds": mode, **_row(setting, each, launches)}
            except Exception as error:  # noqa: BLE001 - a model that fails is a finding
                yield {"step": each.name, "failed": f"{error}"[:300], "at": traceback.format_exc()[-1500:]}


class Launches:
    """While it is entered, what calls take the host is timed beside what they take the GPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._keys: dict[int, str] = {}
        self._measure: Any = KernelTimer.measure
        self._device_seconds: Any = KernelTimer._device_seconds

    def __enter__(self) -> None:
        def measure(timer: Any, wanted: Any, progress: Any) -> Any:
            self._keys |= {id(call): key for key, call in wanted.items()}
            return self._measure(timer, wanted, progress)

        def device_seconds(timer: Any, call: Any, args: Any, kwargs: Any, *, cold: bool) -> float:
            if not cold and id(call) in self._keys:
                times = []
                for _ in range(RUNS):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    result = run(call, args, kwargs)
                    times.append(time.perf_counter() - begin)
                    del result
                self.seconds[self._keys[id(call)]] = median(times)
            return float(self._device_seconds(timer, call, args, kwargs, cold=cold))

        setattr(KernelTimer, "measure", measure)  # noqa: B010
        setattr(KernelTimer, "_device_seconds", device_seconds)  # noqa: B010

    def __exit__(self, *_: object) -> None:
        setattr(KernelTimer, "measure", self._measure)  # noqa: B010
        setattr(KernelTimer, "_device_seconds", self._device_seconds)  # noqa: B010


def _row(setting: Setting, each: PlainStep, launches: Launches) -> dict[str, Any]:
    model, sample, loss_fn = each.build(setting)
    sample = batches.map_tensors(lambda t: t[:ROWS].clone(), sample)
    source = TraceSource(model, sample, loss_fn, adamw, device=None)
    trace = source.trace_of(BASELINE.but(precision=each.precision))
    modules = [0]
    hooks = [m.register_forward_pre_hook(lambda *_: modules.__setitem__(0, modules[0] + 1)) for m in model.modules()]
    optimizer = adamw(model.parameters())
    program = StepProgram(model, loss_fn, optimizer, choices=BASELINE.but(precision=each.precision))
    step = whole_step(program, sample)
    step()
    called = modules[0]
    for hook in hooks:
        hook.remove()
    step()
    parts: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, part: Callable[[], Any]) -> Any:
        _wait(setting)
        begin = time.perf_counter()
        found = part()
        parts[name].append(time.perf_counter() - begin)
        _wait(setting)
        parts[f"{name}_waited"].append(time.perf_counter() - begin)
        return found

    for _ in range(REPEATS):
        loss = timed("forward", partial(program.loss, sample))
        timed("backward", loss.backward)
        timed("update", program.update)
        program.clear()
    whole = setting.timed(step, REPEATS)
    return {
        "rows": ROWS,
        "modules": called,
        "whole_seconds": whole,
        **{name: median(times) for name, times in parts.items()},
        **_of_operations(trace, launches),
    }


def _of_operations(trace: Trace, launches: Launches) -> dict[str, Any]:
    told: dict[str, Any] = {}
    by_name: dict[str, list[float]] = defaultdict(list)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        mine = [o for o in trace.operations if o.phase is phase]
        known = [launches.seconds[o.key] * o.times for o in mine if o.key in launches.seconds]
        told[f"{phase.value}_operations"] = len(mine)
        told[f"{phase.value}_kernels"] = sum(map(has_kernel, mine))
        told[f"{phase.value}_unknown"] = len(mine) - len(known)
        told[f"{phase.value}_launching"] = sum(known)
        told[f"{phase.value}_kernel_seconds"] = sum(o.seconds for o in mine)
        told[f"{phase.value}_wanted"] = sum(o.wanted for o in mine)
        for o in mine:
            if o.key in launches.seconds:
                by_name[f"{phase.value} {o.name}"].append(1e6 * launches.seconds[o.key])
    told["saves"] = len(trace.saves)
    told["by_name"] = {
        name: [len(times), round(median(times), 1)]
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]
    }
    return told


def copies(setting: Setting) -> dict[str, Any]:
    """What a copy to pinned memory and back takes the host, with the events and streams that activation offloading has."""
    if setting.device.type != "cuda":
        return {"copies": "not on a CPU"}
    told: dict[str, Any] = {}
    for mib in (1, 16):
        there = torch.zeros(mib << 20, dtype=torch.uint8, device=setting.device)
        down = torch.empty_like(there, device="cpu", pin_memory=True)
        stream, event = torch.cuda.Stream(), torch.cuda.Event()

        def once(
            there: torch.Tensor = there, down: torch.Tensor = down, stream: Any = stream, event: Any = event
        ) -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                down.copy_(there, non_blocking=True)
                event.record(stream)

        def alone(there: torch.Tensor = there, down: torch.Tensor = down) -> None:
            down.copy_(there, non_blocking=True)

        def back(
            there: torch.Tensor = there, down: torch.Tensor = down, stream: Any = stream, event: Any = event
        ) -> None:
            with torch.cuda.stream(stream):
                there.copy_(down, non_blocking=True)
                event.record(stream)

        for name, part in (("down", once), ("down alone", alone), ("up", back)):
            times = []
            for _ in range(30):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                part()
                times.append(time.perf_counter() - begin)
            told[f"{name}, {mib} MiB"] = median(times)
        begin = time.perf_counter()
        for _ in range(20):
            torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
        told[f"pinned anew, {mib} MiB"] = (time.perf_counter() - begin) / 20
    return {"copies": told}


def _wait(setting: Setting) -> None:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
