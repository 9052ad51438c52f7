"""Paths that come in training first, on one rank alone or on several: a step is begun anew by those that take one while the others wait for its gradients."""

from __future__ import annotations

import pytest

import memfit
import small
from models.paths import sample
from sharding import new_paths, steps
from sharding.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(way: str, micro_batches: int, share: float = 0.85) -> memfit.Plan:
    """At this share of the plain peak that planning knows, for two ranks."""
    fixed = {"sharding": way, "micro_batches": micro_batches}
    own = steps.part_of(sample(), 0, 2)
    most = memfit.plan(new_paths.built(), own, new_paths.penalised, 1 << 40, small.adamw, devices=2, fixed=fixed)
    return memfit.replan(most, round(share * most.prediction.plain_peak_bytes))


def test_a_parameter_without_a_gradient_is_told() -> None:
    """The rank went on to messages of its own, in which others did not meet it, or torch spoke of it in the next step."""
    for rank, (_, raised) in enumerate(on_ranks(2, new_paths.left_out, planned("data", 1).to_json())):
        assert raised.startswith(f"on rank {rank} a parameter gets no gradient in this step (blocks.3.norm.weight, ")
