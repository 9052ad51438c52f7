"""A run for several ranks on the command line: a small model and its data as files, and the configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

MODEL = """
import os
import time

import torch
from torch import nn

class Net(nn.Module):
    seconds = 0.0  # that each forward waits, so that something can happen meanwhile

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x, y):
        time.sleep(self.seconds)
        return (self.body(x).sum(-1) - y).square().mean()

class SlowNet(Net):
    seconds = 0.05

def build():
    return Net()

def build_slow():
    return SlowNet()

def build_fuller():
    import dataclasses
    import os

    from memfit import ranks

    rehearse = ranks.rehearse

    def more(engine, sample, loader_batches=1):
        found = rehearse(engine, sample, loader_batches)
        return dataclasses.replace(found, measured_peak_bytes=found.predicted_peak_bytes + 300)

    if os.environ.get("RANK") == "1":
        ranks.rehearse = more
    return Net()

class GreedyNet(Net):
    calls = 0

    def forward(self, x, y):
        GreedyNet.calls += 1
        if GreedyNet.calls > 10 and os.environ.get("RANK") == "1":
            torch.empty(1 << 50)
        return super().forward(x, y)

def build_greedy():
    return GreedyNet()

class LoopingNet(SlowNet):
    calls = 0

    def forward(self, x, y):
        LoopingNet.calls += 1
        rank = os.environ.get("RANK")
        if LoopingNet.calls == 30 and rank in os.environ["LOOPING"].split() and not os.path.exists(f"looped-{rank}"):
            open(f"looped-{rank}", "w").close()  # once: what begins anew trains
            while True:
                sum(range(1000))
        return super().forward(x, y)

def build_looping():
    return LoopingNet()

def build_slow_on_a_disk_that_stops():
    from memfit.train import durable

    sync = durable.sync

    def stopping(file):
        while "step-000006" in str(file):  # until the process is killed, however long that takes
            time.sleep(0.05)
        sync(file)

    durable.sync = stopping
    return SlowNet()
"""

CONFIGURATION = """
model: {python: "ranks_toy:build"}
data: {train: train.npz, validation: validation.npz}
fit: {budget: 1MiB, global_batch: 8, device: cpu}
optim: {name: sgd, lr: 1e-3, fused: false}
train: {steps: 5, log_every: 1, meter_every: 2, eval_every: 3}
report: {html: false}
"""


def written(folder: Path) -> Path:
    """The configuration's file, with all that it names beside it."""
    (folder / "ranks_toy.py").write_text(MODEL, encoding="utf-8")
    random = np.random.default_rng(0)
    for name, samples in (("train", 20), ("validation", 6)):
        x = random.standard_normal((samples, 64)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=np.sin(x.sum(1)))
    path = folder / "run.yaml"
    path.write_text(CONFIGURATION, encoding="utf-8")
    return path
