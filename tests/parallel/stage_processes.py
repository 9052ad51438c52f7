"""Run a function in several gloo processes on this machine, each with a time limit; none is left behind.

Processes find each other through a file, not a port, so nothing can be taken, and leave what they return in files. What a rank raises is raised here.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forking

LIMIT_SECONDS = 180.0


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    limit_seconds: float = LIMIT_SECONDS,
    together: bool = True,
) -> list[Any]:
    """`function(*args)` in `world` processes with a process group; what each rank returns, in the order of ranks.

    Args:
        function: of a module.
        world: number of ranks.
        args: of it.
        limit_seconds: for all of it.
        together: the ranks meet once more at the end.

    Raises:
        AssertionError: a rank raised, ended, or did not end in time.
    """
    deadline = time.monotonic() + limit_seconds
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            forking.process(partial(_rank, together=together), function, rank, world, folder, args)
            for rank in range(world)
        ]
        forking.start(ranks)
        try:
            failed: list[int] = []
            while not failed and any(process.is_alive() for process in ranks):
                assert time.monotonic() < deadline, f"ranks of {function.__name__} did not end in {limit_seconds} s"
                time.sleep(0.05)
                failed = [r for r, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        finally:
            for process in ranks:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()
        for rank in failed or range(world):
            said = Path(folder, f"{rank}.txt")
            assert not said.exists(), f"rank {rank} raised:\n{said.read_text()}"
            assert Path(folder, f"{rank}.pt").exists(), f"rank {rank} ended without a result"
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _rank(
    function: Callable[..., Any], rank: int, world: int, folder: str, args: tuple[Any, ...], *, together: bool
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        result = function(*args)
        if together:
            dist.barrier()
        torch.save(result, Path(folder, f"{rank}.pt"))
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        raise
