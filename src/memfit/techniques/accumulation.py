"""Accumulation: the batch is run in several micro-batches, whose gradients add up to the batch's; the optimizer steps once.

How many there are is searched (`planner.search`), how their losses are weighted is measured (`capture.splitting`); so it has a field of its own in `Choices`
and is not in the list of techniques.
"""

from __future__ import annotations

from typing import Any

from memfit.techniques.technique import Offer, StepFacts, Subject, Technique


class Accumulation(Technique):
    """Setting: the number of micro-batches; 1 for the whole batch at once."""

    name = "micro_batches"
    baseline = 1
    page = "techniques/accumulation.md"
    reorders = True

    def words(self, setting: int) -> str:
        """As in: 4 micro-batches."""
        return f"{setting} micro-batch{'es' if setting > 1 else ''}"

    def claim(self, without: StepFacts, used: StepFacts, setting: int) -> tuple[int, str]:
        """All but one micro-batch's share of the activations."""
        del used
        return without.activation_bytes * (setting - 1) // setting, "all that forward makes, divided by their number"

    def offer(self, subject: Subject) -> Offer:
        """Nothing: numbers are searched, not listed."""
        del subject
        return Offer()

    def check(self, setting: Any) -> None:
        """Left to the search, which knows how many samples there are."""


ACCUMULATION = Accumulation()
