"""Asks a service that is deployed what its users ask: a run that trains inside its budget, one that cannot fit, one that is sent twice.

python deploy/integration_test.py URL, with a token of the role submit in MEMFIT_SERVICE_TOKEN
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from memfit.errors import InfeasibleError, InputError
from memfit.service.client import Client

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x, y):
        return (self.body(x).squeeze(-1) - y).square().mean()
"""
READY_SECONDS = 60


def main(url: str) -> None:
    """Ask; ends with an error where an answer is not what it should be."""
    with Client(url, os.environ["MEMFIT_SERVICE_TOKEN"]) as client, tempfile.TemporaryDirectory() as folder:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                print(f"asked as {client.me()['name']}")
                break
            except InputError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        (Path(folder) / "net.py").write_text(NET, encoding="utf-8")
        x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
        np.savez(Path(folder) / "train.npz", x=x, y=x.sum(1))
        run_file: dict[str, Any] = {
            "model": {"python": "net:Net"},
            "data": {"train": "train.npz"},
            "fit": {"budget": "4MiB", "global_batch": 64, "device": "cpu"},
            "train": {"steps": 20, "log_every": 1, "meter_every": 1},
        }
        key = f"integration-{time.time_ns()}"
        run = client.submit(run_file, code=folder, name="integration test", key=key)
        again = client.submit(run_file, code=folder, name="integration test", key=key)
        assert again["run"] == run["run"], "the same key made two runs"
        done = client.wait(run["run"])
        assert done["state"] == "done", done["reason"]
        assert done["measured_peak_bytes"] <= done["plan"]["budget_bytes"], done
        print(f"run {run['run']}: {done['measured_peak_bytes']} of {done['plan']['budget_bytes']} bytes")
        small = client.submit({**run_file, "fit": {**run_file["fit"], "budget": "64KiB"}}, code=folder)
        try:
            client.wait(small["run"])
        except InfeasibleError as error:
            print(f"run {small['run']}: refused, {error.minimum_bytes} bytes would do")
        else:
            raise AssertionError("what cannot fit was not refused")


if __name__ == "__main__":
    main(sys.argv[1])
