"""Autocast keeps the casts of weights for a second use, but not of weights that `fully_shard` gathers: they would outlive the gathered ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from memfit.capture.process_group import fake_mesh
from memfit.techniques.autocast import AUTOCAST


def test_casts_are_kept_unless_weights_are_gathered() -> None:
    model = nn.Linear(4, 4)
    with AUTOCAST.region(model, "bf16", "cpu"):
        assert torch.is_autocast_cache_enabled()
    with fake_mesh("zero3/2", "cpu") as mesh:
        fully_shard(model, mesh=mesh)
        with AUTOCAST.region(model, "bf16", "cpu"):
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_cache_enabled()
