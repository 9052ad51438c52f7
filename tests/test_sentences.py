"""Sentences of `explain()` are made from the numbers that they tell, and are true of every plan that they are written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
import small
from memfit.capture.present_machine import present_machine
from memfit.errors import InputError
from memfit.integrations.deepspeed import write
from memfit.units import format_bytes
from memfit.values.prediction import Saving
from models import case

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(budget: int | str = 1 << 40, **named: Any) -> memfit.Plan:
    torch.manual_seed(0)
    model, sample, loss_fn = case("gpt").build()
    fixed = {"micro_batches": 1, **named.pop("fixed", {})}
    return memfit.plan(model, sample, loss_fn, budget, small.adamw, fixed=fixed, **named)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_streamed_layers_are_told_with_the_bytes_they_take_on_their_tier(clip_norm: float | None) -> None:
    plan = planned(fixed={"streamed": "blocks"}, clip_norm=clip_norm)
    model, _, _ = case("gpt").build()
    weights = sum(p.nbytes for p in model.get_submodule("blocks").parameters())
    state = 2 * sum(p.nbytes for p in model.parameters())
    (use,) = plan.prediction.tiers
    assert use.layer_bytes == weights * (1 if clip_norm is None else 2)
    assert use.state_bytes == pytest.approx(state, rel=0.01)  # AdamW's two moments, and its step counts
    told = plan.explain()
    assert f"Needs {format_bytes(use.all_bytes)} of disk besides: {format_bytes(use.layer_bytes)} of layers, " in told
    assert "the step runs as PyTorch runs it" not in told
    assert "with layers of blocks streamed and nothing dropped" in told
    assert memfit.Plan.from_json(plan.to_json()) == plan


def test_offloaded_state_is_told_with_its_bytes() -> None:
    plan = planned(fixed={"state_place": "disk"})
    (use,) = plan.prediction.tiers
    assert (use.bytes, use.layer_bytes) == (0, 0)
    state = format_bytes(use.state_bytes)
    assert f"Needs {state} of disk besides: {state} of optimizer state." in plan.explain()
    assert use.copy_seconds == plan.prediction.copy_seconds > 0


def test_only_the_plain_step_runs_as_pytorch_runs_it() -> None:
    assert "the step runs as PyTorch runs it" in planned().explain()
    split = planned(fixed={"micro_batches": 2}).explain()
    assert "the step runs as PyTorch runs it" not in split
    assert "Nothing that backward needs is dropped and recomputed, and no activations are offloaded." in split
    assert "that the step takes with 2 micro-batches and nothing dropped" in split
    assert "that plain PyTorch would take" in planned().explain()


def test_what_adds_to_the_peak_is_not_said_to_take_off_it() -> None:
    plan = planned()
    saving = Saving("a technique", 1 << 20, -(970 << 20), "", 0.5)
    told = replace(plan, savings=(saving,)).explain()
    assert "a technique: adds 970 MiB to the peak before anything is dropped" in told
    assert "takes -" not in told


ELSEWHERE = {
    "room for all": {"budget": "24GiB"},
    "state on the host": {"budget": "24GiB", "fixed": {"state_place": "host"}},
    "state on the disk": {
        "budget": "24GiB",
        "fixed": {"state_place": "disk"},
        "host_budget": "1GiB",
        "disk_budget": "1GiB",
    },
    "layers streamed": {"budget": "24GiB", "fixed": {"streamed": "blocks"}},
    "too little": {"budget": "1MiB"},
    "too little, nothing offloaded": {"budget": "1MiB", "host_budget": 0},
}


@pytest.mark.alternate(1)
# Where something could be offloaded, ways out are searched longest; the other case stands for it by day.
@pytest.mark.parametrize(
    "named",
    [
        pytest.param(value, id=name, marks=pytest.mark.slow if name == "too little" else ())
        for name, value in ELSEWHERE.items()
    ],
)
def test_a_plan_for_a_gpu_that_is_not_here_says_nothing_of_the_cpu_that_is(named: dict[str, Any]) -> None:
    try:
        plan = planned(device="rtx4090", **named)
    except memfit.InfeasibleError as error:
        told = f"{error} {error.remedies}"
    else:
        told = plan.explain()
        assert (plan.device, plan.device_kind) == ("rtx4090", "cuda")
        assert memfit.Plan.from_json(plan.to_json()).device_kind == "cuda"
    assert "CPU" not in told
    assert present_machine(torch.device("cpu")).name not in told


def test_state_in_host_memory_is_planned_for_a_gpu_that_is_not_here_as_on_one() -> None:
    """What a device holds of state that is elsewhere are the buffers of one chunk, wherever that is; the link is another."""
    host, disk = (
        planned(
            device="rtx4090",
            host_budget="1GiB",
            disk_budget="1GiB",
            fixed={"state_place": place, "streamed": "", "loss_chunks": 1},
        )
        for place in ("host", "disk")
    )
    assert (host.choices.state_place, host.prediction.peak_bytes) == ("host", disk.prediction.peak_bytes)
    (use,) = host.prediction.tiers
    assert (use.tier, use.state_bytes) == ("host", disk.prediction.tiers[0].state_bytes)
    assert "of host memory besides" in host.explain()
    with pytest.raises(InputError, match="the device is the CPU"):
        planned(fixed={"state_place": "host"})


def test_a_plan_is_written_for_deepspeed_as_one_for_its_own_kind_of_device() -> None:
    streamed = {"streamed": "blocks"}
    here, there = planned(fixed=streamed), planned(fixed=streamed, device="rtx4090")
    assert (here.device_kind, there.device_kind) == ("cpu", "cuda")
    below = write(here, nvme_path="/disk").content["zero_optimization"]["offload_param"]
    assert below == {"device": "nvme", "nvme_path": "/disk"}
    assert write(there).content["zero_optimization"]["offload_param"] == {"device": "cpu"}
