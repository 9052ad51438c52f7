"""What a backend allocates for a collective is what the recorder books, and bytes on the links are those of a ring."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from memfit.capture import costs
from memfit.capture import engine_time as engine_times
from memfit.capture import gloo_time as gloo
from memfit.capture.capture import capture
from memfit.capture.costs import Cost, with_costs
from memfit.capture.engine_time import EngineTime, engine_time
from memfit.capture.gloo_time import KINDS, as_processes, gloo_time, link_of, seconds_among
from memfit.capture.host_time import HostTime
from memfit.capture.source import StepSource
from memfit.errors import EngineError
from memfit.hardware.machine import known_machine
from memfit.hardware.network import collective_seconds
from memfit.hardware.topology import PeerLink, Topology
from memfit.meter import metered
from memfit.sharding import agreement as agreement_module
from memfit.sharding.agreement import Agreement
from memfit.sharding.collectives import collective_of, workspace_bytes
from memfit.techniques.choices import Choices
from memfit.values.trace import Collective
from sharding import steps
from sharding.ranks import on_ranks

NUMBERS = 1 << 12
# The names of torch 2.13; 2.11 has others alone, which warn in 2.13.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measured(rank: int) -> dict[str, int]:
    """Bytes above the arguments at the peak of each, the least of five."""
    ranks = dist.get_world_size()
    part, whole = torch.zeros(NUMBERS), torch.zeros(NUMBERS * ranks)
    mean = partial(REDUCE_SCATTER, op=dist.ReduceOp.AVG)  # as `fully_shard` calls it
    halves, doubles = (part.bfloat16(), whole.bfloat16()), (part.double(), whole.double())
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(part),
        "broadcast": lambda: dist.broadcast(part, 0),
        "all_gather": lambda: ALL_GATHER(whole, part),
        "reduce_scatter": lambda: mean(part, whole),
        "reduce_scatter, bf16": lambda: mean(*halves),
        "reduce_scatter, fp64": lambda: REDUCE_SCATTER(*doubles),
    }
    found: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(5):
            with metered() as reading:
                call()
            found[name] = min(found.get(name, 1 << 40), reading.peak_bytes)
    return found


def test_gloo_allocates_what_is_booked_for_it() -> None:
    part, whole = torch.zeros(NUMBERS), torch.zeros(NUMBERS * 2)
    c10d = torch.ops.c10d
    booked = {
        "all_reduce": workspace_bytes(c10d.allreduce_.default, ([part],), "gloo"),
        "broadcast": workspace_bytes(c10d.broadcast_.default, ([part],), "gloo"),
        "all_gather": workspace_bytes(c10d._allgather_base_.default, (whole, part), "gloo"),
        **{
            f"reduce_scatter{named}": workspace_bytes(
                c10d._reduce_scatter_base_.default, (part.to(dtype), whole.to(dtype)), "gloo"
            )
            for named, dtype in (("", torch.float32), (", bf16", torch.bfloat16), (", fp64", torch.float64))
        },
    }
    assert on_ranks(2, measured) == [booked, booked]
    assert booked["all_gather"] == 4 * NUMBERS * 2


def gathered_and_let_go(rank: int) -> list[int]:
    """Peaks of one and of sixty gathers of which nothing is kept, twenty times: a computer that is busy may not get to gloo's thread in time."""
    ranks, kept = dist.get_world_size(), []
    for times in (1, 60) * 20:
        with metered() as reading:
            for size in range(times):
                part = torch.zeros(NUMBERS - size)  # other sizes, so that no address comes back by itself
                work = ALL_GATHER(torch.empty(part.numel() * ranks), part, async_op=True)
                assert work is not None
                work.wait()
                del part, work
        kept.append(reading.peak_bytes)
    return kept


def test_what_a_collective_lets_go_of_last_is_seen() -> None:
    for peaks in on_ranks(2, gathered_and_let_go):
        assert min(peaks[1::2]) == min(peaks[::2])


def test_a_rank_sends_its_part_of_a_ring() -> None:
    part, whole = torch.zeros(25), torch.zeros(100)
    four, c10d = (0, 1, 2, 3), torch.ops.c10d
    assert collective_of(c10d._allgather_base_.default, (whole, part), four) == Collective("all_gather", 300, four)
    assert collective_of(c10d._reduce_scatter_base_.default, (part, whole), four) == Collective(
        "reduce_scatter", 300, four
    )
    assert collective_of(c10d.allreduce_.default, ([whole],), four) == Collective("all_reduce", 600, four)
    assert collective_of(c10d.broadcast_.default, ([whole],), four) == Collective("broadcast", 400, four)
    assert collective_of(torch.ops.aten.mm.default, (whole, part), four) is None


@pytest.mark.slow
@pytest.mark.measured_seconds
def test_what_gloo_takes_counts_where_ranks_are_processes_of_this_computer() -> None:
    ranks = (0, 1)
    here = gloo_time(2, 1.0)
    assert here is not None
    assert all(seconds > 0 for seconds in here.fixed.values())
    machine = known_machine("a100")
    processes = as_processes(Topology((machine,) * 2, (), (PeerLink(0, 1, 1e9, 1e-5),)))
    assert processes.processes
    for kind in (*KINDS, "receive"):
        found = seconds_among(processes, kind, 1 << 20, ranks)
        assert found == here.seconds(kind, 1 << 20)
        assert found >= seconds_among(processes, kind, 0, ranks) > 0
    assert seconds_among(processes, "all_reduce", 99, ranks, of_many=True) == here.seconds("all_reduce of many", 99)
    told = Topology((machine,) * 2, (), (PeerLink(0, 1, 1e9, 1e-5),))
    assert seconds_among(told, "all_reduce", 1 << 20, ranks) == collective_seconds(told, "all_reduce", 1 << 20, ranks)
    assert seconds_among(processes, "all_to_all", 1 << 20, ranks) == collective_seconds(
        processes, "all_to_all", 1 << 20, ranks
    )
    (peer,) = processes.peers
    assert link_of(processes, peer).seconds(1 << 20) == pytest.approx(here.seconds("send", 1 << 20), rel=1e-6)
    assert link_of(told, peer) == peer
    slower = replace(processes, slowdown=1.5)
    assert seconds_among(slower, "send", 1 << 20, ranks) == pytest.approx(1.5 * here.seconds("send", 1 << 20))
    assert Topology.from_json(slower.to_json()) == slower


@pytest.mark.alternate(0)
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_are_timed_too(kind: str) -> None:
    """A message of 64 bytes is not three equal parts: gloo refused, and seconds were those of assumed links."""
    groups = gloo._joined(3)
    for size in gloo.SIZES:
        seconds, slowdown = gloo._seconds(groups, kind, size)
        assert abs(seconds) < 1.0
        assert slowdown > 0.5


def test_what_was_measured_beside_other_programs_is_measured_again_once_it_is_quieter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept for good: a message of eight kilobytes took 14 ms by it."""
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    now, measured = 4.0, []

    def measuring(_: int) -> gloo.GlooTime:
        measured.append(now)
        return gloo.GlooTime({"send": now}, {"send": 0.0}, slowdown=now)

    monkeypatch.setattr(gloo, "_measured", measuring)
    monkeypatch.setattr(gloo, "_computing", lambda *_: (1.0, now))
    kept = []
    for now in (4.0, 4.0, 3.5, 1.0, 1.0, 4.0):  # noqa: B007 - read by those above
        gloo_time.cache_clear()  # another process
        kept.append(gloo_time(2, 1.0).slowdown)
    gloo_time.cache_clear()
    assert kept == [4.0, 4.0, 4.0, 1.0, 1.0, 1.0]
    assert measured == [4.0, 1.0]


def test_what_was_measured_while_all_work_was_slow_is_less_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    gloo_time.cache_clear()
    engine_time.cache_clear()
    monkeypatch.setattr(gloo, "_measured", lambda _: gloo.GlooTime({"send": 3e-3}, {"send": 1.5e-9}))
    monkeypatch.setattr(engine_times, "_measured", lambda: EngineTime({"all_gather": 3e-4}, {"all_gather": 3e-5}))
    found = []
    for slowdown in (1.5, 1.0, 2.0):
        here = gloo_time(2, slowdown)
        assert here is not None
        found.append((here.seconds("send", 10**6), engine_time(slowdown).seconds("all_gather", 10)))
        gloo_time.cache_clear()  # another process
        engine_time.cache_clear()
    assert found == [pytest.approx(each) for each in ((4.5e-3, 6e-4), (3e-3, 4e-4), (6e-3, 8e-4))]


def test_a_collective_in_which_all_ranks_meet_takes_longer_after_long_computing() -> None:
    here = gloo.GlooTime(
        {"all_gather": 1e-3, "send": 1e-3},
        {"all_gather": 1e-9, "send": 1e-9},
        {"all_gather": 3e-3},
        {"all_gather": 2e-9},
        5e-3,
        25e-3,
    )
    taken = [here.seconds("all_gather", 10**6, computed) for computed in (0.0, 5e-3, 15e-3, 25e-3, 1.0)]
    assert taken == pytest.approx([2e-3, 2e-3, 3.5e-3, 5e-3, 5e-3])
    assert here.seconds("send", 10**6, 1.0) == pytest.approx(2e-3)
    wavered = replace(here, fixed_after_long={"all_gather": 5e-4}, for_a_byte_after_long={"all_gather": 1e-9})
    assert wavered.seconds("all_gather", 10**6, 1.0) == pytest.approx(2e-3)
    slower = here.times(2.0)
    assert slower.seconds("all_gather", 10**6, 30e-3) == pytest.approx(
        7e-3
    )  # what ranks compute takes twice as long, too


def test_ranks_meet_after_what_they_have_computed_since_they_met(monkeypatch: pytest.MonkeyPatch) -> None:
    here = gloo.GlooTime(
        dict.fromkeys(KINDS, 1.0),
        dict.fromkeys(KINDS, 0.0),
        dict.fromkeys(KINDS, 11.0),
        dict.fromkeys(KINDS, 0.0),
        0.0,
        1e6,
    )
    monkeypatch.setattr(gloo, "gloo_time", lambda *_: here)
    monkeypatch.setattr(costs, "engine_time", lambda _: EngineTime({}, {}))
    model, sample, loss_fn = steps.gpt()
    captured = capture(StepSource(model, sample, loss_fn, steps.adamw), Choices(sharding="zero3/2"))
    network = Topology((known_machine("a100"),) * 2, processes=True)
    trace = with_costs(
        captured,
        {call: Cost(100.0) for call in captured.calls},
        seconds_are="measured",
        device="cpu",
        network=network,
        host=HostTime.same_after_all(1e-6),
    )
    since, found = 0.0, 0
    for operation in trace.operations:
        if operation.collective is None:
            since += operation.seconds
            continue
        assert operation.seconds == pytest.approx(1.0 + 10.0 * since / 1e6)
        found += since > 0
        since = 0.0
    assert found > 3


def test_where_gloo_cannot_connect_links_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "gloo_time", lambda *_: None)
    monkeypatch.setattr(gloo, "connects", lambda: False)
    devices = Topology((known_machine("a100"),) * 2, (), (PeerLink(0, 1, 1e9, 1e-5),))
    assert as_processes(devices) == devices
    assert seconds_among(replace(devices, processes=True), "send", 10**9, (0, 1)) == pytest.approx(1 + 1e-5)


def test_what_engines_take_around_collectives_counts_where_ranks_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of four parameters is gathered twice, the rest of the model once; all are reduced once."""
    model, sample, loss_fn = steps.gpt()
    captured = capture(StepSource(model, sample, loss_fn, steps.adamw), Choices(sharding="zero3/2"))
    free = {call: Cost(0.0) for call in captured.calls}
    machine = known_machine("a100")
    nothing = HostTime.same_after_all(1e-6)

    def seconds(around: EngineTime, *, processes: bool) -> float:
        monkeypatch.setattr(costs, "engine_time", lambda _: around)
        network = Topology((machine,) * 2, (), (PeerLink(0, 1, 1e9, 1e-5),), processes=processes)
        trace = with_costs(captured, free, seconds_are="measured", device="cpu", network=network, host=nothing)
        return sum(trace.operations[code].seconds for code in trace.events if code >= 0)

    names = [name for name, _ in model.named_parameters()]
    of_blocks, of_all = sum(name.startswith("blocks.") for name in names), len(names)
    blocks = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    plain = seconds(EngineTime({}, {}), processes=True)
    for kind, times, parameters in (
        ("all_gather", 2 * blocks + 1, of_blocks + of_all),
        ("reduce_scatter", blocks + 1, of_all),
    ):
        assert seconds(EngineTime({kind: 1.0}, {}), processes=True) - plain == pytest.approx(times)
        assert seconds(EngineTime({}, {kind: 1.0}), processes=True) - plain == pytest.approx(parameters)
    assert seconds(EngineTime({"all_gather": 1.0}, {}), processes=False) < 1.0


@pytest.mark.measured_seconds
def test_what_engines_take_is_measured() -> None:
    here = engine_time(1.0)
    assert here.fixed["all_gather"] > 0
    assert all(each >= 0 for each in (*here.fixed.values(), *here.for_a_parameter.values()))
    assert here.seconds("all_gather", 3) == here.fixed["all_gather"] + 3 * here.for_a_parameter["all_gather"]
    assert here.seconds("send", 3) == 0.0
    assert here.cold >= 1.0


def test_what_engines_take_is_longer_after_long_kernels() -> None:
    around = EngineTime({"all_gather": 2e-4}, {"all_gather": 1e-5}, cold=2.0)
    assert [around.seconds("all_gather", 10, emptied) for emptied in (0.0, 0.5, 1.0)] == pytest.approx(
        [3e-4, 4.5e-4, 6e-4]
    )


def test_how_much_of_the_caches_kernels_have_emptied_goes_from_nothing_to_all() -> None:
    host = HostTime((1e-5, 2e-5, 4e-5, 5e-5), (0.0, 1e-4, 1e-3, 3e-3), (0.0,) * 8, (0.0,) * 8)
    assert [host.emptied_after(seconds) for seconds in (0.0, 1e-4, 3e-3, 1.0)] == pytest.approx([0.0, 0.25, 1.0, 1.0])
    assert HostTime.same_after_all(1e-5).emptied_after(1.0) == 0.0


def test_ranks_that_share_cores_compute_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than alone: a process that has more threads than cores by itself is slow already."""
    machine = known_machine("a100")

    def sharing(ranks: int, threads: int, cores: int, *, processes: bool = True) -> float:
        monkeypatch.setattr(gloo, "cores", lambda: cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return gloo.core_sharing(Topology((machine,) * ranks, processes=processes))

    assert sharing(2, 1, 2) == 1.0
    assert sharing(4, 1, 2) == 2.0
    assert sharing(2, 2, 2) == 2.0
    assert sharing(1, 2, 1) == 1.0
    assert sharing(2, 2, 1) == 2.0
    assert sharing(4, 1, 2, processes=False) == 1.0
    assert gloo.core_sharing(None) == 1.0


@pytest.mark.parametrize(("sends_from", "where"), [(("cpu", "meta"), "cpu"), (("meta",), "meta")])
def test_what_ranks_tell_each_other_lies_in_the_hosts_memory_where_the_group_sends_from_there(
    sends_from: tuple[str, ...], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks compute on "meta", as if on GPUs."""
    monkeypatch.setattr(Agreement, "real", True)
    group = SimpleNamespace(_device_types=[torch.device(kind) for kind in sends_from], rank=lambda: 0, size=lambda: 2)
    agreement = Agreement(cast("dist.ProcessGroup", group), torch.device("meta"))
    assert {table.device.type for table in agreement._tables} == {where}


def _told(rank: int, few: int) -> list[Any]:
    assert dist.group.WORLD is not None
    with mock.patch.object(agreement_module, "FEW_RANKS", few):
        agreement = Agreement(dist.group.WORLD, torch.device("cpu"))
    return [
        agreement.rows((rank, 2**53 - rank, 0.1)),
        agreement.counts(rank + 1, 2**40 + rank),
        agreement.total(rank + 1),
        agreement.largest(rank),
        agreement.losses(rank, finite=rank == 0),
        agreement.losses(rank, finite=True, lacking=0 if rank else None),
        agreement.first(concerned=rank == 1),
        agreement.first(concerned=False),
        str(agreement.mean(math.nan if rank else 0.0)),
        agreement.mean(rank),
    ]


@pytest.mark.parametrize("few", [1, 2])
def test_numbers_that_ranks_tell_arrive_as_they_are_as_messages_to_each_and_in_one_collective(few: int) -> None:
    rows = [[0.0, 2.0**53, 0.1], [1.0, 2.0**53 - 1, 0.1]]
    told = [rows, [[1, 2**40], [2, 2**40 + 1]], 3, 1, (0.0, (1, None)), (0.5, (1, 0)), 1, None, "nan", 0.5]
    assert on_ranks(2, _told, few) == [told] * 2


def _waiting(rank: int) -> str:
    group = dist.new_group()
    agreement = Agreement(group, torch.device("cpu"))
    _set_pg_timeout(timedelta(seconds=0.5), group)
    try:
        return str(agreement.total(1)) if rank == 0 else ""
    except EngineError as error:
        return str(error)
    finally:
        dist.barrier()


def test_a_rank_waits_for_what_others_tell_as_long_as_the_limit_that_its_group_has_by_now() -> None:
    waited, _ = on_ranks(2, _waiting)
    assert "has kept rank 0 waiting for too long" in waited
    assert "500ms" in waited
