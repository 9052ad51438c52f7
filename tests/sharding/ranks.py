"""A small launcher: one function in several processes that are the ranks of a gloo group, each with a time limit.

The processes are forked from an interpreter in which nothing of the tests' own process is (`forking`); they find each other through a file, not a port. None
outlives the call: what has not ended in time is killed, and so are the others when one fails.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forking

LIMIT_SECONDS = 300.0  # of a call; of one collective half of it


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
        port = free_port()
        outputs = [Path(folder, f"output.{rank}") for rank in range(ranks)]
        processes = [
            forking.process(
                *(partial(_rank, joined=joined), folder, rank, ranks, limit),
                output=output,
                environment={**os.environ, **({} if joined else as_torchrun_tells(rank, ranks, port))},
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            forking.start(processes)
            _wait(processes, limit)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        if any(process.exitcode for process in processes):
            told = "\n".join(
                f"rank {r}: exit {p.exitcode}\n{o.read_text()[-3000:]}"
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


def _rank(folder: str, rank: int, ranks: int, limit: float, *, joined: bool) -> None:
    """In a process of its own."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path(folder, "call").read_bytes())  # noqa: S301 - our own
    function, told = getattr(importlib.import_module(module), name), Path(folder, f"result.{rank}")
    if not joined:
        told.write_bytes(pickle.dumps(function(rank, *args)))
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=limit / 2)
    )
    try:
        told.write_bytes(pickle.dumps(function(rank, *args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _wait(processes: list[BaseProcess], limit: float) -> None:
    """Until all have ended, one has failed, or the time is up."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.exitcode for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            time.sleep(1.0)  # the others may have more to say
            return
        time.sleep(0.02)
