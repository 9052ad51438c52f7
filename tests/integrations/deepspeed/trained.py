"""A small training that DeepSpeed itself runs, in a process of its own: python trained.py CONFIGURATIONS (JSON); prints the losses of each."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 6
ROWS, WIDTH = 128, 32


def build() -> nn.Sequential:
    """Twelve layers, from seed 0."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def batches() -> list[tuple[Tensor, Tensor]]:
    """One for each step, always the same; there is something to learn, so that a step that is not taken shows."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    inputs = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]
    return [(each, each @ truth) for each in inputs]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same function on both sides."""
    return nn.functional.mse_loss(outputs.float(), targets)


def trained(config: dict[str, Any]) -> dict[str, list[float]]:
    """Losses of the micro-batches of each step, and the rates that each step was taken with, by DeepSpeed."""
    import deepspeed

    model = build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = next(engine.module.parameters()).dtype  # DeepSpeed casts the model, and leaves the inputs to the caller
    losses, rates = [], []
    parts = engine.gradient_accumulation_steps()
    for inputs, targets in batches():
        rates.append(engine.optimizer.param_groups[0]["lr"])
        own = []
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            loss = loss_of(engine(x.to(dtype)), y)
            engine.backward(loss)
            engine.step()
            own.append(loss.item())
        losses.append(sum(each / parts for each in own))
    return {"losses": losses, "rates": [float(rate) for rate in rates]}


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**one, "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    # Compiled at first use, for several ranks on one machine. By its name: `deepspeed.comm.torch` is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # DeepSpeed turns fp16 down on a CPU without instructions for it, where torch runs it all the same.
    accelerator: Any = type(import_module("deepspeed.accelerator").get_accelerator())
    accelerator.is_fp16_supported = lambda _: True
    accelerator.supported_dtypes = lambda _: [torch.float, torch.bfloat16, torch.float16]
    found = [trained(config) for config in json.loads(sys.argv[1])]
    print("\nLOSSES " + json.dumps(found))  # noqa: T201 - what it is for; DeepSpeed prints, too
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
