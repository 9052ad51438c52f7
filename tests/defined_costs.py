"""Seconds of operations, collectives and disks that are the same in every run of the tests.

Which plan is best depends on seconds. Those that are measured differ from run to run, and with them the plan that a test
looks at: what it drops, where it is cut, which draw is its largest. So in the tests an operation takes what a computer of
fixed rates would take for its arithmetic and its bytes. All else about it (its workspace, the sizes and layouts of its
results) is found by running it, as always. Tests of the seconds themselves are marked `measured_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from memfit.capture import cost_table, costs, gloo_time, timing, trace_source
from memfit.capture.calls import CallSpec
from memfit.capture.costs import Cost
from memfit.capture.engine_time import EngineTime
from memfit.capture.gloo_time import KINDS, GlooTime
from memfit.capture.host_time import HostTime
from memfit.capture.reference_work import ReferenceWork
from memfit.capture.roofline import estimated_seconds
from memfit.hardware.machine import Link, Machine
from memfit.pipelining import links as links_of_ranks
from memfit.storage import links

# About one core of a server.
COMPUTER = Machine("defined", "cpu", 1 << 35, 60e9, 30e9, 10e9, launch_seconds=4e-6, measured=True)
HOST = HostTime(
    (8e-6, 12e-6, 20e-6, 24e-6),
    (0.0, 1e-4, 3e-4, 2e-3),
    (0.0, 1e-6, 3e-6, 9e-6, 17e-6, 18e-6, 19e-6, 20e-6),
    (0.0, 0.0, 1e-6, 2e-6, 3e-6, 3e-6, 3e-6, 3e-6),
)
ENGINES = EngineTime({"all_gather": 4e-4, "reduce_scatter": 2e-4, "broadcast": 4e-5}, {"all_gather": 3e-5})
GLOO = GlooTime(dict.fromkeys(KINDS, 3e-4), dict.fromkeys(KINDS, 8e-10))
DISK = Link("disk", 1.5e9, 1.5e9, 1.5e-4)


@contextmanager
def defined_costs() -> Iterator[None]:
    """Inside, costs are taken from a table of their own, and have these seconds."""
    measure = timing.KernelTimer.measure

    def defined(
        self: timing.KernelTimer, wanted: Mapping[str, CallSpec], progress: Callable[[int], None]
    ) -> dict[str, Cost]:
        found = measure(self, wanted, progress)
        return {
            key: replace(cost, seconds=estimated_seconds(wanted[key], COMPUTER), slowdown=1.0)
            for key, cost in found.items()
        }

    def constant(*_: Any, **__: Any) -> float:
        return 1.0

    def host_time(_: Any) -> HostTime:
        return HOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_table, "FORMAT", "defined")
        patch.setattr(cost_table, "host_time", host_time)
        patch.setattr(trace_source, "noting_seconds", lambda *_: 0.0)
        patch.setattr(trace_source, "COUNTED", 0.0)
        patch.setattr(costs, "engine_time", ENGINES.times)
        patch.setattr(links_of_ranks, "engine_time", ENGINES.times)
        patch.setattr(gloo_time, "gloo_time", lambda _, slowdown: GLOO.times(slowdown))
        patch.setattr(links, "measured_once", lambda *_: DISK)  # folders are still looked at
        patch.setattr(timing.KernelTimer, "measure", defined)
        patch.setattr(timing.KernelTimer, "seconds_now", lambda *_: {})  # the reference work tells, as below
        patch.setattr(timing, "ROUNDS", range(1, 1))  # the runs that show bytes are enough
        patch.setattr(timing, "PROFILED_SECONDS", 0.0)
        patch.setattr(ReferenceWork, "seconds", constant)
        patch.setattr(ReferenceWork, "slowdown", constant)
        yield
