"""Planning as a pure function of a bundle: without torch in another process, the same whatever was planned before; and where a plan comes from."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
import small
from memfit.errors import CaptureError, InfeasibleError, InputError, PlanFileError
from memfit.hardware.machine import Link, Machine
from memfit.hardware.topology import PeerLink, Topology
from memfit.planning import Planning, changed, planning_of
from memfit.techniques.choices import Choices
from memfit.values.bundle import FORMAT_VERSION, Refusal, TraceBundle
from memfit.values.request import Request, TierBudget
from memfit.values.trace import FORMAT_VERSION as TRACE_FORMAT

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(**named: Any) -> TraceBundle:
    return memfit.record(small.chain(1), small.rows(2), small.squared_error, small.adamw, **named)


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch was asked for")

sys.meta_path.insert(0, NoTorch())
import json
import memfit

bundle = memfit.TraceBundle.load(sys.argv[1])
smallest = memfit.smallest_budget(bundle)
plans = [memfit.replan(bundle, int(budget)).to_json() for budget in sys.argv[2:]]
assert "torch" not in sys.modules
print(json.dumps([smallest, plans]))
"""


def test_whoever_holds_a_bundle_plans_as_the_model_does_without_torch(tmp_path: Path) -> None:
    model, sample = small.chain(2), small.rows(2)
    asked: dict[str, Any] = {"allow": ["8bit"], "freeze": ["0"]}
    memfit.record(model, sample, small.squared_error, small.adamw, **asked).save(tmp_path / "bundle")
    first = memfit.plan(model, sample, small.squared_error, "1GiB", small.adamw, **asked)
    smallest, largest = memfit.smallest_budget(first), first.prediction.plain_peak_bytes
    budgets = [smallest, (smallest + largest) // 2, largest]
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "bundle"), *map(str, budgets)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told, plans = json.loads(ran.stdout)
    assert told == smallest
    direct = [memfit.replan(first, budget).to_json() for budget in budgets]
    assert plans == json.loads(json.dumps(direct))


def test_a_bundle_is_read_as_it_was_written(tmp_path: Path) -> None:
    bundle = recorded(host_budget="64MiB", allow=["bf16"], clip_norm=1.0)
    refused = bundle.with_refusal(Choices(precision="fp16", micro_batches=2), Refusal("CaptureError", "no kernel"))
    for each in (bundle, refused):
        each.save(tmp_path / "bundle")
        assert TraceBundle.load(tmp_path / "bundle") == each
    assert bundle.trace.choices == Choices(1, 2)
    assert len({choices.micro_batches for choices in bundle.traces}) > 1
    assert {choices.precision for choices in bundle.traces} == {"full", "bf16"}


def test_other_files_are_refused_with_the_version_and_the_way_on(tmp_path: Path) -> None:
    bundle = recorded(micro_batches=1)
    path = tmp_path / "file"
    bundle.trace.save(path)
    with pytest.raises(
        PlanFileError, match=rf"a single trace of format {TRACE_FORMAT}, .* memfit\.record\(\.\.\.\)\.save"
    ):
        TraceBundle.load(path)
    bundle.save(path)
    with pytest.raises(PlanFileError, match=r"memfit\.TraceBundle\.load"):
        memfit.Trace.load(path)
    for altered, told in (
        (
            {"format_version": FORMAT_VERSION + 1},
            r"has format 2, this memfit reads 1: capture it again with memfit\.record",
        ),
        ({"samples": "many"}, "this trace bundle is damaged"),
        ({"memfit": "plan"}, "this is not a trace bundle"),
    ):
        data = {**bundle.to_json(), **altered}
        data.pop("operations", None)
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
        with pytest.raises(PlanFileError, match=told):
            TraceBundle.load(path)


def test_what_is_not_in_a_bundle_is_rejected_by_that_reason() -> None:
    bundle = recorded(fixed={"micro_batches": 1}, allow=["8bit"])
    packed = Choices(state_format="8bit")
    lacking = replace(bundle, traces={c: t for c, t in bundle.traces.items() if c != packed})
    made = memfit.replan(lacking, "1GiB")
    assert "8-bit optimizer state: not captured in this bundle" in made.rejected
    with pytest.raises(InputError, match="was not captured in this bundle: record it again"):
        memfit.replan(replace(bundle, traces={}), "1GiB")


def test_a_refusal_in_a_bundle_is_told_as_it_was_met() -> None:
    bundle = recorded(fixed={"micro_batches": 1}, allow=["8bit"])
    packed, refusal = Choices(state_format="8bit"), Refusal("CaptureError", "no kernel for it")
    lacking = replace(bundle, traces={c: t for c, t in bundle.traces.items() if c != packed})
    made = memfit.replan(lacking.with_refusal(packed, refusal), "1GiB")
    assert "8-bit optimizer state: no kernel for it" in made.rejected
    with pytest.raises(CaptureError, match="no kernel for it"):
        memfit.replan(replace(bundle, traces={}).with_refusal(Choices(), refusal), "1GiB")


def test_candidates_do_not_depend_on_the_budgets_before() -> None:
    bundle = recorded(allow=["8bit", "in_backward"])
    least, plain = Planning(bundle).smallest()[0], Planning(bundle).plain_peak()
    budgets = [plain, (least + plain) // 2, least, (3 * least + plain) // 4]
    alone = [Planning(bundle).plan(budget) for budget in budgets]
    for order in (budgets, budgets[::-1]):
        shared = Planning(bundle)
        shared.smallest()
        together = {budget: shared.plan(budget) for budget in order}
        assert [together[budget].rejected for budget in budgets] == [plan.rejected for plan in alone]
        assert [together[budget].choices for budget in budgets] == [plan.choices for plan in alone]


def test_a_plan_remembers_where_it_comes_from_as_long_as_it_lives() -> None:
    made = memfit.plan(small.chain(1), small.rows(4), small.squared_error, "1GiB", small.adamw)
    origin = planning_of(made)
    assert origin is not None
    assert planning_of(memfit.replan(made, "1GiB")) is origin
    assert planning_of(changed(made, notes=("one more",))) is origin
    copy = replace(made, notes=("one more",))
    assert planning_of(copy) is None
    with pytest.raises(InputError, match="is a changed copy, and carries no trace"):
        memfit.replan(copy, "1GiB")
    with pytest.raises(InputError, match=r"memfit\.record"):
        memfit.smallest_budget(memfit.Plan.from_json(made.to_json()))


def test_the_smallest_budget_will_do_and_a_byte_less_does_not() -> None:
    bundle = recorded()
    size = memfit.smallest_budget(bundle)
    assert memfit.replan(bundle, size).budget_bytes == size
    with pytest.raises(memfit.InfeasibleError) as caught:
        memfit.replan(bundle, size - 1)
    assert caught.value.minimum_bytes == size


def test_streamed_layers_hold_less_in_more_micro_batches_where_a_layer_holds_most() -> None:
    """Their updates are among the events of all micro-batches: what is there beside them is no less for any batch."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)))
    sample = torch.randn(2, 256, 8), torch.randn(2, 256, 8)
    asked: dict[str, Any] = {"host_budget": "1MiB", "fixed": {"streamed": "."}}
    made = memfit.plan(model, sample, small.squared_error, "1GiB", small.adamw, **asked)
    least = memfit.smallest_budget(made)
    assert memfit.replan(made, least).choices.micro_batches == 2
    with pytest.raises(InfeasibleError):
        memfit.replan(made, least - 1)


def test_a_request_holds_budgets_as_given_and_in_bytes() -> None:
    totals = {"device": 1000, "host": 2000, "disk": 3000}
    made = Request.of(
        totals.__getitem__,
        budget="80%",
        host_budget=0,
        disk_budget="10%",
        allow=["bf16"],
        fixed={"micro_batches": 2, "sharding": None},
    )
    assert made.fixed == {"micro_batches": 2}  # None, as `--set fit.fixed.sharding=` gives it, leaves a choice open
    assert made.budget == TierBudget("80%", 800)
    assert made.host_budget == TierBudget(0, 0)
    assert made.disk_budget == TierBudget("10%", 300)
    assert made.micro_batches == 2
    assert made.fixing(micro_batches=4).leaving_open("micro_batches") == made.leaving_open("micro_batches")
    assert Request.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_topology_of_several_devices_is_the_same_value() -> None:
    card = Machine("card", "cuda", 1 << 30, 1e12, 1e12, 1e11)
    host, disk = Link("host", 1e10, 1e10), Link("disk", 1e9, 1e9)
    single = Topology.single(card, (host, disk))
    assert single.link_to("disk") == disk
    assert Topology.single(card, (disk,)).link_to("host") == disk  # right below a CPU is the disk
    pair = Topology((card, card), ((host,), (host,)), (PeerLink(0, 1, 1e10, 1e-6),))
    for each in (single, pair):
        assert Topology.from_json(json.loads(json.dumps(each.to_json()))) == each
    assert pair.peers[0].seconds(10**10) == pytest.approx(1 + 1e-6)
