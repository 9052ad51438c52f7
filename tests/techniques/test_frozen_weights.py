"""Frozen linear weights in 4 bits: predicted is measured, and results are those of a loop written by hand over the same layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit import api
from memfit.planning import planning_of
from memfit.techniques.choices import Choices
from memfit.techniques.choices import convert as convert_with
from memfit.techniques.frozen_weights import NO_KERNELS, four_bit

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
FOUR_BITS = {"frozen_weights": "4bit"}


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the base layer, and a little more."""
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapted(blocks: int = 2, dropout: float = 0.1) -> nn.Sequential:
    """Low-rank layers and what lies between them; in train mode, from seed 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [LowRank(WIDTH, 3 * WIDTH), nn.GELU(), nn.Dropout(dropout), LowRank(3 * WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def rows(count: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


def planned(model: nn.Module, fraction: float, **fixed: Any) -> memfit.Plan:
    """A plan with 4-bit weights, this fraction of the way from the smallest to all that can be kept."""
    fixed = {"micro_batches": 1, **FOUR_BITS, **fixed}
    most = memfit.plan(model, rows(), small.squared_error, 1 << 50, small.adamw, fixed=fixed)
    search = planning_of(most)
    assert search is not None
    smallest, largest = search.smallest()[0], search.plain_peak()
    return api.replan(most, round(smallest + fraction * (largest - smallest)))


def by_hand(model: nn.Module, steps: int = 3, micro_batches: int = 1, precision: str = "full") -> list[float]:
    """Losses of plain steps over a model whose layers are converted here."""
    four_bit.convert(model)
    optimizer = small.adamw(p for p in model.parameters() if p.requires_grad)
    losses = []
    for _ in range(steps):
        total = 0.0
        for part in zip(*(t.chunk(micro_batches) for t in rows()), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = small.squared_error(model, part)
            (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / micro_batches
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.alternate(0)
@pytest.mark.parametrize(
    ("fraction", "precision"),
    [(1.0, "full"), (1.0, "bf16"), (0.5, "full"), (0.5, "bf16"), (0.0, "full"), (0.0, "bf16")],
)
def test_bytes_are_the_predicted_ones_and_results_those_of_a_loop_by_hand(fraction: float, precision: str) -> None:
    model, reference = adapted(), adapted()
    plan = planned(model, fraction, precision=precision)
    assert plan.choices.frozen_weights == "4bit"
    engine = memfit.apply(plan, model)
    torch.manual_seed(3)
    records = [engine.step(rows(), meter=True) for _ in range(3)]
    after = torch.get_rng_state()
    peak = plan.prediction.peak_bytes
    # Under autocast a recomputed loss may hold a few scalars less than predicted.
    assert peak - (16 if precision == "bf16" else 0) <= records[-1].peak_bytes <= peak <= plan.budget_bytes
    assert all(record.divergences == () for record in records)
    torch.manual_seed(3)
    assert [record.loss for record in records] == by_hand(reference, precision=precision)
    assert torch.equal(torch.get_rng_state(), after)
    assert small.same(small.state_of(model), small.state_of(reference))


def trace_of(plan: memfit.Plan) -> Any:
    planning = planning_of(plan)
    assert planning is not None
    return planning.source.trace_of(plan.choices)  # type: ignore[union-attr]


def test_a_product_with_a_packed_weight_may_run_again() -> None:
    packed = [o for o in trace_of(planned(adapted(1), 1.0)).operations if o.name.startswith("bitsandbytes.")]
    assert {o.name.split(".")[1] for o in packed} == {"gemm_4bit", "dequantize_blockwise", "dequantize_4bit"}
    assert all(o.rerunnable for o in packed)


def test_seven_eighths_of_the_frozen_weights_are_saved() -> None:
    ask = (adapted(1), rows(), small.squared_error, 1 << 50, small.adamw)
    full, packed = (memfit.plan(*ask, fixed={"micro_batches": 1, "frozen_weights": f}) for f in ("full", "4bit"))
    frozen = sum(m.base.weight.nbytes for m in adapted(1) if isinstance(m, LowRank))
    saved = trace_of(full).bytes_of("parameter") - trace_of(packed).bytes_of("parameter")
    assert saved == frozen * 7 // 8


def test_the_planner_takes_it_where_it_is_allowed_and_needed() -> None:
    sample, model = (rows(4)), adapted()
    ask = (model, sample, small.squared_error)
    forbidden = memfit.plan(*ask, 1 << 50, small.adamw)
    least = memfit.smallest_budget(forbidden)
    with pytest.raises(memfit.InfeasibleError):
        memfit.replan(forbidden, round(0.6 * least))
    plan = memfit.plan(*ask, round(0.6 * least), small.adamw, allow=["4bit"])
    assert plan.choices.frozen_weights == "4bit"
    assert type(model[0].base) is nn.Linear, "planning leaves the model as it was"  # type: ignore[union-attr]
    assert "frozen linear weights in 4 bits" in plan.explain()


def test_freeze_names_layers() -> None:
    model = small.chain(2)
    fixed = {"micro_batches": 1, **FOUR_BITS}
    plan = memfit.plan(
        model, small.rows(), small.squared_error, 1 << 50, small.adamw, freeze=["0", "4.weight"], fixed=fixed
    )
    engine = memfit.apply(plan, model)
    kinds = [type(module).__name__ for module in model]
    assert [kinds[i] for i in (0, 2, 4, 6)] == ["FourBitLinear", "Linear", "FourBitLinear", "Linear"]
    assert model[4].bias.requires_grad
    engine.step(small.rows())
    assert engine.step(small.rows(), meter=True).peak_bytes == plan.prediction.peak_bytes


def test_two_micro_batches() -> None:
    model, reference = adapted(dropout=0.0), adapted(dropout=0.0)
    plan = planned(model, 0.3, micro_batches=2)
    engine = memfit.apply(plan, model)
    records = [engine.step(rows(), meter=True) for _ in range(3)]
    assert records[-1].peak_bytes == plan.prediction.peak_bytes
    assert [record.loss for record in records] == pytest.approx(by_hand(reference, micro_batches=2), rel=1e-6)


@pytest.mark.parametrize("fixed", [{"state_format": "8bit"}, {"update": "in_backward"}], ids=str)
def test_with_other_techniques(fixed: dict[str, str]) -> None:
    model = adapted()
    plan = planned(model, 0.2, **fixed)
    engine = memfit.apply(plan, model)
    peaks = [engine.step(rows(), meter=True).peak_bytes for _ in range(3)]
    assert peaks[-1] == plan.prediction.peak_bytes


def test_a_saved_plan_is_applied_and_applied_again(tmp_path: Path) -> None:
    model = adapted()
    plan = planned(model, 0.5)
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    first = memfit.apply(loaded, model, small.squared_error, small.adamw)
    first.step(rows())
    again = memfit.apply(loaded, model, small.squared_error, small.adamw)
    again.step(rows())
    assert again.step(rows(), meter=True).peak_bytes == plan.prediction.peak_bytes
    fresh = memfit.plan(model, rows(), small.squared_error, plan.budget_bytes, small.adamw, fixed=FOUR_BITS)
    third = memfit.apply(fresh, model, small.squared_error, small.adamw)
    third.step(rows())
    assert third.step(rows(), meter=True).peak_bytes == fresh.prediction.peak_bytes


def test_a_plan_with_full_weights_is_not_for_a_converted_model() -> None:
    model = adapted()
    full = memfit.plan(model, rows(), small.squared_error, 1 << 50, small.adamw)
    four_bit.convert(model)
    with pytest.raises(memfit.PlanFileError):
        memfit.apply(full, model)


def test_an_engine_plans_again_for_another_batch() -> None:
    model = adapted()
    engine = memfit.apply(planned(model, 0.5), model)
    engine.step(rows())
    engine.step(rows(40))
    record = engine.step(rows(40))
    assert record.divergences == ()
    assert engine.plan.choices.frozen_weights == "4bit"


def test_a_checkpoint_is_read_again() -> None:
    model, other = adapted(), adapted()
    memfit.apply(planned(model, 1.0), model).step(rows())
    saved = model.state_dict()
    assert not any("scales_code" in name for name in saved)
    four_bit.convert(other)
    other.load_state_dict(saved)
    model.eval(), other.eval()
    assert torch.equal(model(rows()[0]), other(rows()[0]))


# -- the layer ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (30, 14), (15, 7)], ids=str)
def test_a_layer_is_that_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(*shape, dtype=dtype).requires_grad_(False)
    theirs = bitsandbytes.nn.Linear4bit(*shape, compute_dtype=dtype, quant_type="nf4")
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to("cpu")
    mine = four_bit.FourBitLinear(linear)
    x = torch.randn(3, 5, shape[0], dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [layer(i) for layer, i in zip((mine, theirs), inputs, strict=True)]
    assert torch.equal(*results)
    for result in results:
        result.sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    error = (mine.full_weight() - linear.weight).float().norm() / linear.weight.float().norm()
    assert error < 0.12


def test_what_is_no_plain_frozen_layer_of_its_own_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, WIDTH)
            self.mine, self.scaled, self.hooked = nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 50)
            self.head.weight = self.words.weight
            self.trained = nn.Linear(WIDTH, WIDTH)

    model = Tied().requires_grad_(False)
    model.trained.requires_grad_(True)
    model.hooked.register_forward_hook(lambda *_: None)
    assert four_bit.convertible(model) == ["mine"]
    four_bit.convert(model)
    layer = model.mine
    four_bit.convert(model)
    assert model.mine is layer
    assert isinstance(layer, four_bit.FourBitLinear)


# -- what cannot be ----------------------------------------------------------------------------------------------------------


def _decorated(function: Any) -> Any:
    def called(*given: Any) -> Any:
        return function(*given)

    return called


class ReadsWeights(nn.Module):
    """A block that reads weights of its layers in several ways, beside calling them."""

    def __init__(self) -> None:
        super().__init__()
        names = "product", "dtype", "decorated", "within", "called", "device"
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
        self.product, self.dtype, self.decorated, self.within, self.called, self.device = self.layers.values()
        del self.layers
        self.requires_grad_(False)
        assert self.called.weight is not None  # a constructor may read what it makes

    @_decorated
    def shifted(self, x: Tensor) -> Any:
        """By a weight that a decorated method reads."""
        return x @ self.decorated.weight.T

    def forward(self, x: Any) -> Any:
        """Through all layers."""
        x = self.dtype(x.to(self.dtype.weight.dtype)) @ self.product.weight
        x = self.device(x.to(self.device.weight.device))
        return self.called(self.shifted(x)) * max(self.within.weight.mean() for _ in range(2))


class ReadsMore(ReadsWeights):
    """A subclass reads what its base does."""


@pytest.mark.parametrize("kind", [ReadsWeights, ReadsMore])
def test_layers_whose_weights_the_model_reads_itself_stay_as_they_are(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 1))
    assert four_bit.convertible(model) == ["1.called", "1.device"]
    four_bit.convert(model)
    assert model(torch.randn(4, WIDTH)).isfinite().all()


def test_where_nothing_is_frozen_it_is_refused() -> None:
    ask = (small.chain(2), small.rows(), small.squared_error, 1 << 50, small.adamw)
    with pytest.raises(memfit.InputError, match="no linear layer of the model has a frozen weight"):
        memfit.plan(*ask, fixed=FOUR_BITS)
    plan = memfit.plan(*ask, allow=["4bit"])
    assert any("no linear layer" in reason for reason in plan.rejected)


def test_without_bitsandbytes_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bit, "has_kernels", lambda: False)
    with pytest.raises(memfit.InputError, match=r"pip install 'memfit\[bnb\]'"):
        memfit.plan(adapted(), rows(), small.squared_error, 1 << 50, small.adamw, fixed=FOUR_BITS)
    with pytest.raises(memfit.InputError) as caught:
        convert_with(Choices(frozen_weights="4bit"), adapted())
    assert NO_KERNELS in str(caught.value)


def test_not_with_streamed_layers() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(LowRank(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = functional.gelu(block(x))
            return x

    with pytest.raises(memfit.InputError, match="streamed layers are offloaded with their weights in full precision"):
        memfit.plan(
            Blocks(),
            rows(),
            small.squared_error,
            1 << 50,
            small.adamw,
            host_budget="1GiB",
            fixed={"streamed": "blocks", **FOUR_BITS},
        )


# -- PEFT --------------------------------------------------------------------------------------------------------------------


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False))

    model, reference = build(), build()
    plan = planned(model, 0.3)
    engine = memfit.apply(plan, model)
    records = [engine.step(rows(), meter=True) for _ in range(3)]
    assert sum(isinstance(module, four_bit.FourBitLinear) for module in model.modules()) == 2
    # A product with a Python number keeps that number in 8 bytes, with full weights too, and PEFT has such products.
    assert records[-1].peak_bytes == pytest.approx(plan.prediction.peak_bytes, abs=16)
    assert [record.loss for record in records] == by_hand(reference)


class BesideLinear4bit(nn.Module):
    """A frozen layer of bitsandbytes with an adapter beside it, as PEFT has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = nn.Linear(width, width)
        self.base = bitsandbytes.nn.Linear4bit(width, width, compute_dtype=torch.float32, quant_type="nf4")
        self.base.load_state_dict({"weight": linear.weight.data, "bias": linear.bias.data})
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def with_linear_4bit() -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (BesideLinear4bit(128), nn.GELU())]
    return nn.Sequential(*layers).to("cpu")  # where bitsandbytes packs the weights


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_layers_of_bitsandbytes_own_are_trained_as_they_are_and_their_scales_counted(fraction: float) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))

    def square(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    plan = memfit.plan(with_linear_4bit(), x, square, "1GiB", fixed={"micro_batches": 1})
    least, most = memfit.smallest_budget(plan), plan.prediction.peak_bytes
    plan = memfit.replan(plan, round(least + fraction * (most - least)))
    model, other = with_linear_4bit(), with_linear_4bit()
    engine = memfit.apply(plan, model, square, lambda parameters: torch.optim.AdamW(parameters, fused=True))
    optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], fused=True)
    losses = []
    for _ in range(2):
        record = engine.step(x, meter=True)
        loss = square(other, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((record.loss, float(loss.detach())))
    assert all(one == two for one, two in losses)
    assert record.peak_bytes == plan.prediction.peak_bytes
    assert isinstance(model[0].base.weight, bitsandbytes.nn.Params4bit)  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


QUIET = """
import torch
import memfit
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
model[0].requires_grad_(False)
memfit.plan(model, torch.ones(4, 64), lambda model, x: model(x).mean(), "1GiB", "AdamW", fixed={"micro_batches": 1})
"""


@pytest.mark.slow
def test_planning_beside_frozen_weights_says_nothing_of_kernels_that_bitsandbytes_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    assert "gemm" not in done.stderr + done.stdout


@pytest.mark.slow
def test_planning_beside_frozen_weights_leaves_the_checks_of_distributions() -> None:
    """Else a model that makes distributions runs other operations after planning than before it."""
    checked = f"{QUIET}\nassert torch.distributions.Normal(0.0, 1.0)._validate_args"
    subprocess.run([sys.executable, "-c", checked], check=True)
