"""What a rank does in the comparison with DeepSpeed on several ranks: DeepSpeed's own training of a configuration, and memfit's."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import nn

from integrations.deepspeed import trained
from memfit.integrations.deepspeed.training import from_deepspeed


def _own(rank: int, ranks: int) -> list[Any]:
    """This rank's part of each batch."""
    return [(x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in trained.batches()]


def by_deepspeed(rank: int, ranks: int, configs: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Of each configuration this rank's losses, and the rates."""
    warnings.simplefilter("ignore")
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    # Compiled at first use, for several ranks on one machine; gloo does it without.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    import deepspeed

    found = []
    for config in configs:
        model = trained.build()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        parts = engine.gradient_accumulation_steps()
        losses, rates = [], []
        for inputs, targets in _own(rank, ranks):
            rates.append(float(engine.optimizer.param_groups[0]["lr"]))
            own = []
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                loss = trained.loss_of(engine(x), y)
                engine.backward(loss)
                engine.step()
                own.append(loss.item())
            losses.append(sum(each / parts for each in own))
        found.append({"losses": losses, "rates": rates})
        engine.destroy()
    torch.distributed.destroy_process_group()
    return found


Trained = tuple[list[float], list[float], list[int], list[int], str]


def by_memfit(rank: int, ranks: int, configs: list[dict[str, Any]]) -> list[Trained]:
    """Of each configuration losses of the whole batch, rates, peaks of this rank from the second step on, those predicted of all, and the choices."""
    found: list[Trained] = []
    for config in configs:
        own = _own(rank, ranks)
        engine = from_deepspeed(config).fit(trained.build(), own[0], _loss, 1 << 40)
        assert engine.optimizer is not None
        losses, rates, peaks = [], [], []
        for batch in own:
            rates.append(float(engine.optimizer.param_groups[0]["lr"]))
            record = engine.step(batch, meter=True)
            losses.append(record.loss)
            peaks.append(record.peak_bytes or 0)
        predicted = [figures.peak_bytes for figures in engine.plan.prediction.ranks]
        how = f"{engine.plan.choices.sharding} {engine.plan.choices.state_place}"
        found.append((losses, rates, peaks[1:], predicted, how))
        assert engine.sharded is not None
        engine.sharded.close()
    torch.distributed.destroy_process_group()
    return found


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return trained.loss_of(model(batch[0]), batch[1])
