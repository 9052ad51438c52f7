"""The call on the page makes the plan again: run for real, with what it leaves open put in."""

from __future__ import annotations

import pytest

import memfit
from memfit.views.page import reproducing_call
from small import adamw, chain, rows, squared_error


@pytest.mark.parametrize("fixed", [None, {"micro_batches": 1}, {"micro_batches": 4}])
def test_the_call_on_the_page_makes_the_same_plan(fixed: dict[str, int] | None, one_thread: None) -> None:
    model, sample = chain(3), rows(64)
    plain = memfit.measure(model, sample, squared_error, adamw).peak_bytes
    assert plain is not None
    made = memfit.plan(model, sample, squared_error, plain * 9 // 10, adamw, fixed=fixed, clip_norm=1.0)

    call = reproducing_call(made)
    for name in ("loss_fn", "optimizer"):
        call = call.replace(f"{name}=...", f"{name}={name}")
    namespace = {"memfit": memfit, "model": model, "sample": sample, "loss_fn": squared_error, "optimizer": adamw}
    exec(call, namespace)  # noqa: S102 - our own text

    again = namespace["plan"]
    assert isinstance(again, memfit.Plan)
    assert (again.choices, again.script, again.budget_bytes) == (made.choices, made.script, made.budget_bytes)
    assert again.prediction.peak_bytes == made.prediction.peak_bytes


def test_techniques_are_in_the_call(one_thread: None) -> None:
    model, sample = chain(3), rows(64)
    fixed = {"state_format": "8bit", "micro_batches": 2}
    made = memfit.plan(model, sample, squared_error, "1GiB", adamw, fixed=fixed, freeze=["0"])
    call = reproducing_call(made)
    assert 'freeze=["0"]' in call
    assert '"micro_batches": 2' in call
    assert '"state_format": "8bit"' in call
    assert "host_budget" not in call
