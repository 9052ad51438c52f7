"""Models after published ideas: predicted to the byte, trained with the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import memfit
import small
from models import Built, research
from models.outcome import measured_peak, outcome_of, plans_between

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Where these are errors, what would warn on fake tensors is captured on real ones.
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

MODELS: dict[str, Callable[[], Built]] = {
    "attention scaled by a number": research.scaled_attention_gpt,
    "numbers that autograd keeps": research.numbers_kept,
    "numbers in a graph that is retained": research.numbers_retained,
    "numbers that autograd keeps as they are": research.numbers_not_kept,
    "aggregation over a graph": research.aggregates,
    "adjoint solver": research.adjoint_solver,
    "chosen by masks": research.chosen_by_masks,
    "learning by a copy": research.learns_by_a_copy,
    "deep supervision": research.deeply_supervised,
}


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", MODELS)
def test_predicted_to_the_byte_with_the_same_bits(name: str) -> None:
    build = MODELS[name]
    for made in plans_between(*build(), small.adamw, fractions=(1.0, 0.5, 0.0)):
        assert measured_peak(made, *build(), small.adamw) == made.prediction.peak_bytes
        model, sample, loss_fn = build()
        reference = outcome_of(model, sample, loss_fn)
        found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, small.adamw))
        assert found.divergence is None
        assert found.differs(reference) is None
