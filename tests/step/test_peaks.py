"""Predicted is measured, for optimizer state in 8 bits or in a file and updates inside backward: alone, together, and at the smallest budget."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
import small
from memfit import api
from memfit.optimizers.chunked import CHUNK
from memfit.optimizers.lion import Lion
from memfit.techniques.choices import Choices, in_words
from models import build_gpt, case
from step import ways
from sweeps import by_turns

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = [
    Choices(state_format=form, state_place=place, update=update)
    for form in ("32bit", "8bit")
    for place in ("device", "disk")
    for update in ("after", "in_backward")
]


def wide() -> Any:
    """Few tokens in a wide model: the peak is in the update or right before it, its workspace included."""
    return build_gpt(layers=2, hidden=256, heads=4, batch=1, tokens=16, vocab=2000)


def check(way: Choices, build: Callable[[], Any], optimizer: Any = small.adamw, *, smallest: bool = False) -> int:
    """The predicted peak of the plain plan, after it, or the smallest plan's, has been measured."""
    model, sample, loss_fn = build()
    plain = ways.planned(way, model, sample, loss_fn, optimizer, fixed={"micro_batches": 1})
    plan = api.replan(plain, memfit.smallest_budget(plain)) if smallest else plain
    measured = ways.peak_of(plan, build()[0], sample, loss_fn)
    assert measured == pytest.approx(plan.prediction.peak_bytes, rel=0.005), plan.prediction.peak_operation
    assert measured <= plan.budget_bytes
    return plain.prediction.peak_bytes


def named(way: Any) -> str:
    return (in_words(way) or "plain") if isinstance(way, Choices) else way.__name__


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "way", [pytest.param(w, id=named(w), marks=pytest.mark.slow if len(w.techniques) > 1 else ()) for w in WAYS]
)
def test_the_predicted_peak_is_the_measured_one(way: Choices) -> None:
    check(way, case("gpt").build)


@pytest.mark.alternate(0)
@pytest.mark.parametrize(("way", "optimizer"), by_turns(WAYS, [small.adamw, foreach]), ids=named)
def test_the_first_step_makes_its_state_in_the_room_of_later_ones(way: Choices, optimizer: Any) -> None:
    model, sample = small.chain(3), small.rows(64)
    plan = ways.planned(way, model, sample, small.squared_error, optimizer, fixed={"micro_batches": 1})
    plan = api.replan(plan, memfit.smallest_budget(plan))
    engine = memfit.apply(plan, model)
    first, _, third = (engine.step(sample, meter=True).peak_bytes or 0 for _ in range(3))
    assert first <= third == pytest.approx(plan.prediction.peak_bytes, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("smallest", [False, True], ids=["plain", "smallest"])
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("name", ["gpt", "bert_eager"])
def test_the_smallest_budget_is_kept_too(name: str, way: Choices, smallest: bool) -> None:  # noqa: FBT001 - a parameter of the test
    check(way, case(name).build, smallest=smallest)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), Lion], ids=["sgd", "lion"])
def test_where_the_update_is_the_peak_its_workspace_counts(optimizer: Any, way: Choices) -> None:
    check(way, wide, optimizer)


@pytest.mark.slow  # each technique has its own in the quick run
def test_each_technique_saves_what_it_claims() -> None:
    """With AdamW: of 8 bytes of state a parameter 2 are left, or none; of gradients, those of what is in work."""
    weighed = [way for way in WAYS if way.state_format == "32bit" or len(way.techniques) == 1]
    peaks = {named(way): check(way, wide) for way in weighed}
    sizes = [p.numel() for p in wide()[0].parameters()]
    count, workspace = sum(sizes), 3 * 4 * CHUNK["cpu"] * 1.5
    plain, disk, inside = peaks["plain"], "optimizer state on the disk", "update inside backward"
    assert plain - peaks["8-bit optimizer state"] >= (8 - 2.1) * count - workspace
    assert plain - peaks[disk] >= 8 * count - workspace
    assert plain - peaks[inside] >= 4 * (count - 2 * max(sizes))
    assert plain - peaks[f"{disk}, {inside}"] >= 12 * count - workspace - 4 * 2 * max(sizes)


HARD_LIMIT = """
import resource
import torch
from torch import nn
from memfit.optimizers.chunked import ChunkedOptimizer
torch.set_num_threads(1)
weights = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(16)]  # 64 MiB, and 128 MiB of state
def step(optimizer, own):
    for p in own:
        p.grad = torch.full_like(p, 0.5)  # 64 MiB
    optimizer.step()
    for p in own:
        p.grad = None
small = [nn.Parameter(torch.zeros(1 << 10))]
step(ChunkedOptimizer(torch.optim.AdamW(small, fused=True), state_place="disk"), small)  # what libraries take once
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (112 << 20), size + (112 << 20)))
optimizer = ChunkedOptimizer(torch.optim.AdamW(weights, fused=True), state_place="disk")
for _ in range(3):
    step(optimizer, weights)
print(float(weights[-1].detach().sum()))
del optimizer
step(torch.optim.AdamW(weights, fused=True), weights)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the limit is set from what the process has, which Linux tells here"
)
def test_state_on_the_disk_is_not_in_memory(tmp_path: Path) -> None:
    """Under a limit of the system on all memory of the process, where state on the device does not fit."""
    ran = subprocess.run(
        [sys.executable, "-c", HARD_LIMIT],
        env={**os.environ, "TMPDIR": str(tmp_path), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert float(ran.stdout or "nan") < 0, ran.stderr
    assert ran.returncode != 0
    assert "alloc" in ran.stderr
