"""Same numbers, true predictions: every model, from plain down to the smallest budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit
from memfit import batches
from memfit.engine.accumulation import micro_batches_of
from models import CASES, Case
from models.outcome import measured_peak, outcome_of, plans_between, same

pytestmark = pytest.mark.usefixtures("one_thread")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


# Each is like another case, and takes longer: eager attention under autocast as without and as SDPA under it, a GRU as an LSTM.
LONGER = {"bert_eager_bf16", "amp_gpt", "gru"}


def check(case: Case, fractions: tuple[float, ...]) -> None:
    model, sample, loss_fn = case.build()
    plans = plans_between(model, sample, loss_fn, adamw, fractions)
    outcome_of(model, sample, loss_fn)  # what a model builds once is built here
    reference = outcome_of(model, sample, loss_fn)
    for made in plans:
        found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
        assert found.divergence is None, (made.budget_bytes, found.divergence)
        assert found.differs(reference) is None, made.budget_bytes
        measured = measured_peak(made, model, sample, loss_fn, adamw)
        assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.005), made.prediction.peak_operation
        assert measured <= made.budget_bytes, (measured, made.budget_bytes)


def budgets() -> list[Any]:
    """Every model at one budget, the smallest or one half way, and at five budgets at night."""
    cases = [case for case in CASES if not case.slow]
    quick = [
        pytest.param(
            case,
            (0.5,) if number % 2 else (0.0,),
            id=case.name,
            marks=pytest.mark.slow if case.name in LONGER else (),
        )
        for number, case in enumerate(cases)
    ]
    night = [pytest.param(c, (1.0, 0.75, 0.5, 0.25, 0.0), id=f"{c.name}, all", marks=pytest.mark.slow) for c in cases]
    return quick + night


@pytest.mark.alternate(1)
@pytest.mark.parametrize(("case", "fractions"), budgets())
def test_every_budget_gives_plain_numbers_and_the_predicted_peak(case: Case, fractions: tuple[float, ...]) -> None:
    check(case, fractions)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.slow], ids=lambda c: c.name)
def test_long_models_give_plain_numbers_and_the_predicted_peak(case: Case) -> None:
    check(case, (1.0, 0.5, 0.0))


def test_every_habit_of_models_that_breaks_recomputation_has_a_case() -> None:
    """The list of the first issue; a case that is renamed is renamed here too."""
    asked = {
        "gpt gpt_tied gpt_dropout amp_gpt": "GPT-style, tied weights, autocast",
        "bert_eager bert_sdpa bert_eager_bf16 bert_sdpa_bf16": "Hugging Face BERT, dropout 0.1",
        "t5": "encoder and decoder",
        "resnet resnet_bottleneck": "batch norm, in-place ReLU",
        "unet unet_batchnorm": "long skips",
        "lstm gru": "fused recurrent kernels",
        "twice": "a module called twice",
        "custom_function custom_function_ctx": "custom autograd.Function",
        "residual_chain_1000": "1000 blocks",
        "frozen checkpointed input_grads": "frozen parts, torch.utils.checkpoint, enable_input_require_grads",
    }
    assert {name for names in asked for name in names.split()} <= {c.name for c in CASES}


# Without dropout, or up to how a layer is written down, these split as another case does.
ALIKE = {
    "gpt_dropout",
    "checkpointed",
    "hf_checkpointed",
    "input_grads",
    "bert_eager_bf16",
    "bert_sdpa_bf16",
    "custom_function_ctx",
    "amp_gpt",
    "gru",
}


@pytest.mark.alternate(0)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.slow if c.name in ALIKE else (), id=c.name)
        for c in CASES
        if c.splits and not c.slow
    ],
)
def test_micro_batches_add_up_to_the_whole_batch(case: Case) -> None:
    model, sample, loss_fn = case.build()
    for module in model.modules():  # parts draw other dropout masks than the whole; everything else must agree
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
    model.eval() if case.name.startswith(("bert", "t5")) else None
    made = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 3})
    whole = outcome_of(model, sample, loss_fn).gradients
    parts = micro_batches_of(made, sample)
    assert len(parts) == 3
    shares = batches.shares(parts, made.choices.weights)
    assert shares is not None
    pieces = [outcome_of(model, part, loss_fn).gradients for part in parts]
    norm = difference = 0.0
    for index, gradient in enumerate(whole):
        if gradient is None:
            assert all(same(None, piece[index]) for piece in pieces)
            continue
        added = sum(s * p[index].double() for s, p in zip(shares, pieces, strict=True))  # type: ignore[misc]
        norm += float(gradient.double().pow(2).sum())
        difference += float((gradient.double() - added).pow(2).sum())
    low_precision = "bf16" in case.name or "amp" in case.name
    assert (difference / norm) ** 0.5 < (3e-2 if low_precision else 1e-5)
