"""What holds for every test: fixed seeds, and Hypothesis without clocks or chance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Derandomised, so that a red test is red again on the next run; no deadline, because a shared machine may pause.
settings.register_profile("memfit", derandomize=True, deadline=None)
settings.load_profile("memfit")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same generator state, in whatever order the tests run."""
    torch.manual_seed(0)
