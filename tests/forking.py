"""Processes for tests of several ranks and of commands: forked from one interpreter that has imported torch and memfit, and has run nothing.

To import them takes most of a short process's time. The interpreter is started when the first process is asked for, and ends with the tests' own. Nothing of
the tests is in it, so a forked process is as clean as a new one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from defined_costs import defined_costs

IMPORTED: Final = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.testing",
    "rich.console",
    "transformers.utils",
    "memfit.api",
    "memfit.ranks",
    "memfit.parallel.pipeline",
    "memfit.pipelining",
    "memfit.capture.capture",
    "memfit.cli.main",
    "memfit.train.run",
    "memfit.views",
]
# Read when torch is imported.
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "GLOO_SOCKET_IFNAME": "lo"}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTED)


def process(
    function: Callable[..., None], *args: Any, output: Path | None = None, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """A process that calls `function(*args)`; not started yet.

    Args:
        function: of a module.
        args: can be pickled.
        output: file for what it writes to standard output and standard error. None: it is written where the tests' own is.
        environment: all of it but `ENVIRONMENT`. None: this process's.
    """
    given = {**(os.environ if environment is None else environment), **ENVIRONMENT}
    return _context.Process(target=_called, args=(function, args, output, given), daemon=True)


def start(processes: list[BaseProcess]) -> None:
    """All of them."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)  # for the interpreter, which may have to be started
    try:
        for each in processes:
            each.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _called(
    function: Callable[..., None], args: tuple[Any, ...], output: Path | None, environment: Mapping[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if output is not None:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    with defined_costs():
        function(*args)
