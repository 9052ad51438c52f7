"""A small launcher: one function in several processes that are the ranks of a gloo group, each with a time limit.

The processes are new interpreters, so that nothing of the tests' own process is in them; they find each other through a file, not a port. None outlives the
call: what has not ended in time is killed, and so are the others when one fails.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300.0  # of a call; of one collective half of it
TESTS = Path(__file__).parents[1]

_RANK = """
import datetime, importlib, pickle, sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[5])
import torch
import torch.distributed as dist
folder, rank, ranks, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)
with open(f"{folder}/call", "rb") as file:
    module, name, args = pickle.load(file)
function = getattr(importlib.import_module(module), name)
if sys.argv[6] == "alone":
    with open(f"{folder}/result.{rank}", "wb") as file:
        pickle.dump(function(rank, *args), file)
else:
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=datetime.timedelta(seconds=limit / 2))
    try:
        result = function(rank, *args)
        with open(f"{folder}/result.{rank}", "wb") as file:
            pickle.dump(result, file)
        dist.barrier()
    finally:
        dist.destroy_process_group()
"""


class RankError(AssertionError):
    """A rank failed or did not end in time; carries what the ranks wrote."""


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS, joined: bool = True
) -> list[Any]:
    """What `function(rank, *args)` returns on each of so many ranks.

    Args:
        ranks: how many.
        function: of a module of the tests.
        args: anything that can be pickled.
        limit: seconds after which all are killed.
        joined: they are in a group already; else they are told what torchrun tells its processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        command = [sys.executable, "-c", _RANK, folder]
        port = free_port()
        outputs = [Path(folder, f"output.{rank}") for rank in range(ranks)]
        processes = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as file:
                    own = [*command, str(rank), str(ranks), str(limit), str(TESTS), "joined" if joined else "alone"]
                    there = {**environment, **({} if joined else as_torchrun_tells(rank, ranks, port))}
                    processes.append(subprocess.Popen(own, stdout=file, stderr=subprocess.STDOUT, env=there))
            _wait(processes, limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            told = "\n".join(
                f"rank {r}: exit {p.returncode}\n{o.read_text()[-3000:]}"
                for r, (p, o) in enumerate(zip(processes, outputs, strict=True))
            )
            raise RankError(told)
        return [pickle.loads(Path(folder, f"result.{rank}").read_bytes()) for rank in range(ranks)]  # noqa: S301 - our own


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def as_torchrun_tells(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a process of torchrun."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in told.items()}


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Until all have ended, one has failed, or the time is up."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            time.sleep(1.0)  # the others may have more to say
            return
        time.sleep(0.02)
