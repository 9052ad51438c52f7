"""Mixed precision is PyTorch's own: bit-equal to its autocast and gradient scaler, predicted to the byte, and told where it is slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit import api, batches
from memfit.capture.confirmation import trustworthy
from memfit.capture.source import StepSource
from memfit.errors import NonFiniteLossError
from memfit.planning import planning_of
from memfit.step.program import StepProgram
from memfit.techniques.autocast.precision import FORMATS, MOST_SKIPPED, Scaling
from memfit.techniques.choices import Choices
from memfit.units import format_bytes
from memfit.values.report import Report
from models import case
from models.outcome import same

pytestmark = pytest.mark.usefixtures("one_thread")

FRACTIONS = (1.0, 0.6, 0.3, 0.0)
# Relative difference of the loss from full precision, a few roundings of 8 and 11 bits; gradients: twenty times that.
TOLERANCES = {"bf16": 2e-2, "fp16": 2e-3}
MODELS = ("gpt", "gpt_tied", "gpt_dropout", "bert_sdpa", "frozen", "resnet", "checkpointed")


def foreach(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that knows nothing of scalers, other than the fused one."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def plans(
    model: nn.Module, sample: Any, loss_fn: Any, precision: str, optimizer: Any = small.adamw, **fixed: Any
) -> Any:
    named = {"micro_batches": 1, "precision": precision, **fixed}
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, optimizer, fixed=named, clip_norm=1.0)
    search = planning_of(plain)
    smallest, largest = search.smallest()[0], search.plain_peak()
    return [api.replan(plain, round(smallest + f * (largest - smallest))) for f in FRACTIONS]


def reference_loop(
    model: nn.Module,
    sample: Any,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    precision: str,
    steps: int,
    parts: int = 1,
) -> list[float]:
    """The loop that torch's documentation gives for autocast, `GradScaler` and clipping."""
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in batches.split(sample, batches.micro_batch_sizes(batches.size(sample), parts)):
            with torch.autocast("cpu", FORMATS[precision]):
                loss = batches.loss_of(model, part, loss_fn)
            scaler.scale(loss / parts).backward()
            total += loss.item() / parts
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return losses


@pytest.mark.alternate(1)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("optimizer", [small.adamw, foreach])
@pytest.mark.parametrize("parts", [1, 2])
def test_steps_are_bit_equal_to_torchs_own_loop(precision: str, optimizer: Any, parts: int) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return small.squared_error(model, batch) * 5000  # so that the first scales of fp16 overflow

    sample = small.rows(64)
    models = [small.chain(3, dropout=0.1) for _ in range(3)]
    made = memfit.plan(
        models[0],
        sample,
        loss_fn,
        1 << 50,
        optimizer,
        clip_norm=1.0,
        fixed={"micro_batches": parts, "precision": precision},
    )
    search = planning_of(made)
    tight = api.replan(made, search.smallest()[0])
    assert not tight.script.plain
    reference = optimizer(models[0].parameters())
    torch.manual_seed(3)
    losses = reference_loop(models[0], sample, loss_fn, reference, precision, 8, parts)
    for model, plan in zip(models[1:], (made, tight), strict=True):
        engine = memfit.apply(plan, model)
        torch.manual_seed(3)
        records = [engine.step(sample) for _ in range(8)]
        assert [r.loss for r in records] == pytest.approx(losses, rel=1e-6 if parts > 1 else 0)
        assert small.same(small.state_of(model, engine.optimizer), small.state_of(models[0], reference))
        assert any(r.skipped for r in records) is (precision == "fp16")
        assert not records[-1].skipped
        assert all(r.divergences == () for r in records)


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name not in {"gpt", "frozen"} else ()) for name in MODELS],
)
def test_numbers_and_peak_are_as_promised_at_every_budget(name: str) -> None:
    model, sample, loss_fn = case(name).build()
    model_state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in zip((*model.parameters(), *model.buffers()), model_state, strict=True):
                tensor.copy_(value)

    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = batches.loss_of(model, sample, loss_fn)
    loss.backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    put_back()
    for made in plans(model, sample, loss_fn, "bf16"):
        engine = memfit.apply(made, model)
        torch.manual_seed(7)
        with engine.forward() as follower:
            found = batches.loss_of(model, sample, loss_fn)
        found.backward()
        assert follower is None or follower.divergence is None
        assert same(found.detach(), loss.detach())
        assert all(same(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
        model.zero_grad()
        put_back()
        for meter in (False, True):
            record = engine.step(sample, meter=meter)
            put_back()
        assert record.peak_bytes == pytest.approx(made.prediction.peak_bytes, rel=0.005)
        assert record.peak_bytes is not None
        assert record.peak_bytes <= made.budget_bytes


@pytest.mark.alternate(0)
@pytest.mark.parametrize("precision", FORMATS)
def test_prediction_holds_to_the_byte_with_micro_batches_and_the_scaler(precision: str) -> None:
    model, sample = small.chain(4, dropout=0.1), small.rows(512)
    made = memfit.plan(
        model,
        sample,
        small.squared_error,
        1 << 50,
        small.adamw,
        clip_norm=1.0,
        fixed={"micro_batches": 4, "precision": precision},
    )
    for plan in (made, api.replan(made, memfit.smallest_budget(made))):
        engine = memfit.apply(plan, small.chain(4, dropout=0.1))
        while engine.step(sample).skipped:
            pass
        record = engine.step(sample, meter=True)
        assert not record.skipped
        assert record.peak_bytes == plan.prediction.peak_bytes


@pytest.mark.parametrize("precision", FORMATS)
def test_results_stay_within_the_stated_tolerance_of_full_precision(precision: str) -> None:
    model, sample, loss_fn = case("gpt").build()
    found = {}
    for how in ("full", precision):
        program = StepProgram(model, loss_fn, choices=Choices(precision=how))
        loss = program.forward_backward(sample)
        found[how] = float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        program.clear()
    (full_loss, full), (loss_value, gradient) = found["full"], found[precision]
    tolerance = TOLERANCES[precision]
    assert loss_value == pytest.approx(full_loss, rel=tolerance)
    assert loss_value != full_loss
    assert float((gradient - full).norm() / full.norm()) < 20 * tolerance


def test_16_bits_are_taken_only_where_they_are_allowed() -> None:
    model, sample, loss_fn = case("gpt").build()
    fixed = {"micro_batches": 1}
    allowed = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, allow=["bf16"], fixed=fixed)
    search = planning_of(allowed)
    smallest = {way.precision: search.solver(1, way).smallest().peak for way in search.bundle.candidates}
    assert smallest["bf16"] < smallest["full"]
    budget = (smallest["bf16"] + smallest["full"]) // 2
    forbidden = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, fixed=fixed)
    with pytest.raises(memfit.InfeasibleError):
        api.replan(forbidden, budget)

    tight = api.replan(allowed, budget)

    assert tight.choices.precision == "bf16"
    assert "the same numbers as PyTorch's own bf16 autocast, bit for bit" in tight.explain()
    (saving,) = tight.savings
    assert saving.technique == "bf16"
    assert saving.claimed_bytes > 0
    assert saving.predicted_bytes > 0
    assert (
        f"(the usual estimate, half of what is saved for backward, is {format_bytes(saving.claimed_bytes)})"
        in tight.explain()
    )
    assert memfit.Plan.from_json(tight.to_json()) == tight


def test_a_device_on_which_16_bits_are_slower_is_told_of() -> None:
    """Whether they are is measured, operation by operation; the sentence and the figures go together, whichever it is here."""
    model, sample, loss_fn = case("gpt").build()
    made = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, fixed={"precision": "bf16", "micro_batches": 1})
    search = planning_of(made)
    seconds = search.solver(1).trace.plain_step_seconds
    full = search.solver(1, replace(search.bundle.candidates[0], precision="full")).trace.plain_step_seconds
    assert any("bf16 is slower than full precision" in note for note in made.notes) is (seconds > full)


def test_fp16_parameters_cannot_be_scaled() -> None:
    model, sample = small.chain(1).half(), tuple(t.half() for t in small.rows(8))
    made = memfit.plan(model, sample, small.squared_error, 1 << 50, None, allow=["fp16"])
    assert made.choices.precision == "full"
    assert any("0.weight is fp16 already" in text for text in made.rejected)
    with pytest.raises(
        memfit.InputError, match="fixed precision='fp16' cannot be honoured: .*0.weight is fp16 already"
    ):
        memfit.plan(model, sample, small.squared_error, 1 << 50, None, fixed={"precision": "fp16"})


# -- the scaler ------------------------------------------------------------------------------------------------------------


def fp16_engine(loss_fn: Any = small.squared_error, model: nn.Module | None = None) -> memfit.Engine:
    model = model or small.chain(2, batch_norm=True, dropout=0.1)
    made = memfit.plan(
        model, small.rows(32), loss_fn, 1 << 50, small.adamw, fixed={"precision": "fp16", "micro_batches": 1}
    )
    return memfit.apply(made, model)


def test_a_skipped_step_says_so_and_moves_no_parameter() -> None:
    engine = fp16_engine(lambda m, b: small.squared_error(m, b) * 5000)
    assert engine.scaling is not None
    before = [p.detach().clone() for p in engine.model.parameters()]
    scale = engine.scaling.scaler.get_scale()

    record = engine.step(small.rows(32))

    assert record.skipped
    assert small.same(before, [p.detach() for p in engine.model.parameters()])
    assert engine.scaling.scaler.get_scale() == scale / 2
    assert engine.report().to_json()["records"][0]["skipped"] is True


def test_a_step_that_fails_puts_the_scaler_back() -> None:
    class Stop(Exception):  # noqa: N818 - no error of ours
        pass

    fail = False

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = small.squared_error(model, batch)
        if fail:
            raise Stop
        return loss

    engine, whole = fp16_engine(loss_fn), fp16_engine(loss_fn)
    for each in (engine, whole):
        torch.manual_seed(1)
        each.step(small.rows(32))
        if each is engine:
            fail = True
            with pytest.raises(Stop):
                each.step(small.rows(32))
            fail = False
            each.optimizer.register_step_pre_hook(
                interrupted := _Interrupt()
            )  # after unscaling, before anything is written
            with pytest.raises(KeyboardInterrupt):
                each.step(small.rows(32))
            interrupted.on = False
        each.step(small.rows(32))
    assert engine.scaling is not None
    assert whole.scaling is not None
    assert engine.scaling.state() == whole.scaling.state()
    assert small.same(small.state_of(engine.model, engine.optimizer), small.state_of(whole.model, whole.optimizer))


class _Interrupt:
    on = True

    def __call__(self, *_: Any) -> None:
        if self.on:
            raise KeyboardInterrupt


def test_an_overflow_for_ever_is_an_error_that_says_what_to_do() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(small.WIDTH, small.WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x * 1e6)  # beyond 65504
            return found

    engine = fp16_engine(model=Overflowing())
    for _ in range(MOST_SKIPPED - 1):
        assert engine.step(small.rows(32)).skipped
    before = small.state_of(engine.model, engine.optimizer)
    for _ in range(2):
        with pytest.raises(NonFiniteLossError, match=f"{MOST_SKIPPED} steps in a row were skipped.*Use bf16 or full"):
            engine.step(small.rows(32))
        assert small.same(small.state_of(engine.model, engine.optimizer), before)
    assert engine.steps == MOST_SKIPPED - 1
    report = Report.from_json(engine.report().to_json())
    assert all(r.loss != r.loss for r in report.records)  # JSON has no infinity


def test_the_rehearsal_waits_for_a_step_that_is_taken_and_puts_the_scaler_back() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return small.squared_error(model, batch) * 5000

    model = small.chain(4)
    engine = memfit.fit(
        model, small.rows(512), loss_fn, "1GiB", foreach, fixed={"precision": "fp16", "micro_batches": 1}
    )
    assert engine.rehearsal is not None
    assert engine.scaling is not None
    assert engine.rehearsal.error == pytest.approx(0, abs=0.005)
    assert engine.scaling.state() == Scaling(torch.device("cpu")).state()
    assert engine.step(small.rows(512)).skipped  # as the very first one


def test_capturing_confirms_the_autocast_forward() -> None:
    """The real forward it compares with is the one under autocast: a full one runs no casts."""
    model, sample = small.chain(2), small.rows(64)
    captured = trustworthy(StepSource(model, sample, small.squared_error, small.adamw), Choices(precision="bf16"))
    assert captured.trace.source == "fake"
    assert any("_to_copy" in operation.name for operation in captured.trace.operations)
