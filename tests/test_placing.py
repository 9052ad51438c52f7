"""Model parallelism in one process: numbers with several names of the one CPU, and where tensors are with fake ones of two GPUs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
import small
from memfit.capture.part_calls import find_part_calls
from memfit.errors import BudgetError, InfeasibleError, InputError
from memfit.parallel.placement import device_of_parts, placed
from memfit.placing import best_ends
from memfit.values.stages import Part, Parts, Shared
from models import build_gpt

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = {"cpu": "64MiB", "cpu:0": "64MiB"}
THREE = {**TWO, "cpu:1": "64MiB"}


class Skipping(nn.Module):
    """Between its parts it adds to what an earlier stage has left, in place, and its last part shares the weight of its first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight
        self.seen: list[str] = []
        self.written = 0

    def forward(self, x: Tensor) -> Tensor:
        kept = self.layers[0](x) * 2
        x = kept.tanh()
        for layer in self.layers[1:5]:
            x = layer(x).tanh()
            kept.add_(x)
            x = x + kept
            self.seen.append(str(x.device))
        self.written = kept._version
        found: Tensor = self.layers[5](x)
        return found


def gpt() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return build_gpt(layers=4, hidden=32, heads=2, batch=4, tokens=16, vocab=40)


def skipping() -> tuple[nn.Module, Any, Any]:
    return Skipping(), small.rows(8), small.squared_error


@pytest.mark.parametrize("build", [gpt, skipping])
@pytest.mark.parametrize("devices", [TWO, THREE])
def test_a_placed_model_trains_as_on_one_device(build: Callable[[], Any], devices: dict[str, str]) -> None:
    model, sample, loss_fn = build()
    alone = copy.deepcopy(model)
    with memfit.place(model, sample, loss_fn, devices, small.adamw) as placement:
        assert [stage.device for stage in placement.stages] == list(devices)
        ran = []
        for each in (model, alone):
            optimizer = small.adamw(each.parameters())
            losses = []
            for _ in range(3):
                loss = loss_fn(each, sample)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            ran.append(losses)
    assert ran[0] == ran[1]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert "forward" not in vars(model)


def test_what_shares_a_weight_is_on_one_device_and_told_there() -> None:
    model, sample, loss_fn = skipping()
    with memfit.place(model, sample, loss_fn, TWO, None) as placement:
        first, second = placement.stages
        loss_fn(model, sample)
    assert first.parts[-1] == "layers.5"
    assert second.parts[0].endswith(" to layers.4")
    assert "layers.5" in str(placement).splitlines()[0]


def test_what_runs_between_parts_finds_its_tensors_on_one_device() -> None:
    """PyTorch refuses a sum of tensors on two GPUs. What is written in place stays where it is."""
    model, sample, loss_fn = skipping()
    calls = find_part_calls(model, sample, loss_fn, [f"layers.{number}" for number in range(6)])
    gpus = "cuda:0", "cuda:1"
    with FakeTensorMode(), torch.no_grad():
        model = Skipping()
        for path, device in device_of_parts(model, calls, (3, 6), gpus).items():
            for name, parameter in model.get_submodule(path).named_parameters():
                setattr(model.get_submodule(path), name, nn.Parameter(torch.empty(parameter.shape, device=device)))
        model.layers[5].weight = model.layers[0].weight
        with placed(model, calls, (3, 6), gpus):
            found = model(torch.empty(8, 32, device="cuda:0"))
    assert model.seen == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert model.written == 4
    assert str(found.device) == "cuda:0"


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_device_holds_the_least_share_that_any_cut_gives(seed: int) -> None:
    random = Random(seed)
    number, count = random.randint(4, 9), random.randint(2, 4)
    parts = tuple(
        Part(
            *(str(n), 0.0, 0.0),
            state_bytes=random.randint(1, 100),
            kept_bytes=random.randint(1, 100),
            working_bytes=random.randint(1, 100),
            boundary_bytes=random.randint(1, 100),
            cut_after="no" if random.random() < 0.2 else "",
        )
        for n in range(number)
    )
    tied = (Shared("tied", 50, (0, number - 1)),) if seed % 2 else ()
    beside, budgets = random.randint(0, 100), [random.randint(50, 400) for _ in range(count)]

    def held(first: int, end: int) -> int:
        """Moment by moment of backward, with half of the state as gradients."""
        state = [part.state_bytes for part in parts]
        kept, working = [part.kept_bytes for part in parts], [part.working_bytes for part in parts]
        if tied:
            state[0] += state[-1] + 50
            kept[0] += kept[-1]
            working[0] = max(working[0], working[-1])
            state[-1] = kept[-1] = working[-1] = 0
        gradients = [round(0.5 * size) for size in state]
        moments = [
            sum(state[first:end]) - sum(gradients[first:n]) + sum(kept[first : n + 1]) + working[n]
            for n in range(first, end)
        ]
        return max(moments) + (beside if first == 0 else parts[first - 1].boundary_bytes)

    allowed = [n + 1 for n in range(number - 1) if not parts[n].cut_after]
    shares = {
        (*cut, number): max(
            held(*each) / budget for each, budget in zip(pairwise((0, *cut, number)), budgets, strict=True)
        )
        for cut in combinations(allowed, count - 1)
    }
    if not shares:
        with pytest.raises(InputError, match="name fewer of them"):
            best_ends(Parts(parts, tied), beside, 0.5, budgets)
        return
    ends, sizes = best_ends(Parts(parts, tied), beside, 0.5, budgets)
    assert sizes == tuple(held(*each) for each in pairwise((0, *ends)))
    assert shares[ends] == min(shares.values())


def test_what_cannot_be_placed_is_told_and_nothing_is_moved() -> None:
    model, sample, loss_fn = gpt()
    with pytest.raises(InfeasibleError, match=r"cpu(:0)? would hold about .* and may hold 100 KiB") as caught:
        memfit.place(model, sample, loss_fn, {"cpu": "100KiB", "cpu:0": "100KiB"})
    assert (caught.value.minimum_bytes or 0) > caught.value.budget_bytes == 100 << 10
    assert {str(p.device) for p in model.parameters()} == {"cpu"}
    for devices, error, told in [
        ({"cpu": "1GiB"}, InputError, "at least two are needed"),
        (["cpu", "cpu:0"], InputError, "each with its bytes"),
        ({"cpu": "1GiB", "gpu:0": "1GiB"}, InputError, "'gpu:0' is no name of a device"),
        ({"cpu": "1GiB", "cuda:99": "1GiB"}, InputError, "there is no cuda:99 here"),
        ({"cpu": "much", "cpu:0": "1GiB"}, BudgetError, "much"),
    ]:
        with pytest.raises(error, match=told):
            memfit.place(model, sample, loss_fn, devices)  # type: ignore[arg-type]  # the list
    with memfit.place(model, sample, loss_fn, TWO), pytest.raises(InputError, match="close that placement first"):
        memfit.place(model, sample, loss_fn, TWO)
    with pytest.raises(InputError, match="meta device"):
        memfit.place(gpt()[0].to("meta"), sample, loss_fn, TWO)
