"""What a model makes in its first forward: buffers and caches do not estrange it from its plan, parameters are asked for before planning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.errors import InputError, PlanFileError
from memfit.values.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, TOKENS = 16, 24


class Rotary(nn.Module):
    """Tables of cosines, registered when the first batch tells how long they have to be (Su et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            angles = torch.arange(x.shape[1])[:, None] / 10.0 ** (torch.arange(WIDTH) / WIDTH)
            self.register_buffer("table", angles.cos(), persistent=False)
        h: Tensor = self.outer((self.inner(x) * self.table).tanh())
        return h


class LateMask(nn.Module):
    """A buffer that is None at first."""

    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], x.shape[1]).tril()
        return torch.tanh(self.mask @ self.inner(x))


class CachedMask(nn.Module):
    """Masks in a dictionary, by length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        mask = self.masks.setdefault(x.shape[1], torch.ones(x.shape[1], x.shape[1]).tril())
        return torch.tanh(mask @ self.inner(x))


class Lengthened(nn.Module):
    """A kernel of a state space that is made longer once, when a longer sequence comes (Gu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH, TOKENS // 4))

    def forward(self, x: Tensor) -> Tensor:
        missing = x.shape[1] - self.kernel.shape[1]
        if missing > 0:
            self.kernel = nn.Parameter(torch.cat([self.kernel.detach(), torch.zeros(WIDTH, missing)], 1))
        length = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=length) * torch.fft.rfft(self.kernel, n=length)
        return torch.fft.irfft(spectrum, n=length)[..., : x.shape[1]].transpose(1, 2)


class Stored(nn.Module):
    """Its parameter is held by a store beside it, which has it put back where the module has another (Pyro's)."""

    store: ClassVar[dict[str, nn.Parameter]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.store["scale"] = self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not self.store["scale"]:
            self.scale = self.store["scale"]
        return torch.tanh(self.inner(x) * self.scale)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, TOKENS, WIDTH, generator=generator), torch.randn(8, TOKENS, WIDTH, generator=generator)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def trained(model: nn.Module) -> list[float]:
    optimizer, losses = small.adamw(model.parameters()), []
    for _ in range(3):
        loss = small.squared_error(model, batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [Rotary, LateMask, CachedMask])
def test_a_plan_is_for_the_model_before_and_after_its_first_forward(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = built(build)
    made = memfit.plan(model, batch(), small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    made = memfit.replan(made, memfit.smallest_budget(made))
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    expected = trained(built(build))
    for plan, looked_at in ((made, True), (loaded, True), (loaded, False)):
        model = built(build)
        if looked_at:
            with torch.no_grad():
                model(batch()[0])
        engine = memfit.apply(plan, model, small.squared_error, small.adamw)
        records = [engine.step(batch(), meter=step == 2) for step in range(3)]
        assert [record.loss for record in records] == expected
        assert records[-1].peak_bytes == made.prediction.peak_bytes
        memfit.apply(plan, model, small.squared_error, small.adamw)  # and again


def test_a_plan_is_for_no_other_model() -> None:
    made = memfit.plan(built(Rotary), batch(), small.squared_error, 1 << 50, small.adamw)
    other = built(Rotary)
    other.register_buffer("another", torch.zeros(3))
    with pytest.raises(PlanFileError, match="the plan is for a model with digest"):
        memfit.apply(made, other, small.squared_error, small.adamw)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("build", [Lengthened, lazy])
def test_parameters_that_the_first_forward_makes_are_asked_for(build: Callable[[], nn.Module]) -> None:
    model = built(build)
    with pytest.raises(InputError, match="run one forward on a batch"):
        memfit.plan(model, batch(), small.squared_error, 1 << 50, small.adamw)
    with torch.no_grad():
        model(batch()[0])
    made = memfit.plan(model, batch(), small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    engine = memfit.apply(made, model, small.squared_error, small.adamw)
    engine.step(batch())
    assert engine.step(batch(), meter=True).peak_bytes == made.prediction.peak_bytes


class Packed(nn.Module):
    """A frozen weight that the first forward lays out for the processor's own kernels, as bitsandbytes does in eval mode on some."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=not frozen)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.packed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            self.weight.data, self.packed = self.weight.data.reshape(-1, 1), True
        h: Tensor = self.inner(x @ self.weight.reshape(WIDTH, WIDTH))
        return h


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_get_another_shape_in_the_first_forward_are_asked_for_before_planning(*, frozen: bool) -> None:
    model, sample = Packed(frozen=frozen), torch.randn(8, WIDTH)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"first forward gives 1 of its parameters another shape \(weight\)"):
        memfit.fit(model, sample, loss_fn, "1MiB", small.adamw)
    assert model.weight.shape == (WIDTH, WIDTH)
    with torch.no_grad():
        model(sample)
    assert memfit.fit(model, sample, loss_fn, "1MiB", small.adamw).step(sample).loss > 0


def test_parameters_that_a_store_puts_back_are_asked_to_be_held_by_the_model() -> None:
    model = built(Stored)
    model(batch()[0])
    with pytest.raises(InputError, match=r"makes 1 of its parameters \(scale\).* have the model itself hold them"):
        memfit.plan(model, batch(), small.squared_error, 1 << 40)
    assert dict(model.named_parameters())["scale"] is Stored.store["scale"]
