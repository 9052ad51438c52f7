"""What holds for every test: fixed seeds, and Hypothesis without clocks or chance."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import pytest_randomly
import torch
from hypothesis import settings

import sweeps
from defined_costs import defined_costs

# Derandomised, so that a red test is red again on the next run; no deadline, because a shared machine may pause.
settings.register_profile("memfit", derandomize=True, deadline=None)
settings.load_profile("memfit")


# DeepSpeed offers pytest-randomly a seeder: each process would import DeepSpeed before its first test, and torch would be seeded anew (by three stack traces,
# where there is no GPU) around each test, the last time after `seeded`. Python's and numpy's generators are seeded as ever.
pytest_randomly.entrypoint_reseeds = []

# A run in the background may have been started with Ctrl-C ignored; tests of interrupts send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny kernels on several threads spend their time waiting for each other, ten times as long on a shared machine.
torch.set_num_threads(1)

MANY_MODULES = 50  # imported by tests: then they are settled, too
_settled_modules = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(sweeps.OPTION, type=int, metavar="SEED", help="Of a sweep over seeds, run this one alone.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweeps.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps.alternate(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:
        importlib.import_module("torch._dynamo")
        _settle()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is not None and len(sys.modules) > _settled_modules + MANY_MODULES:
        _settle()


def _settle() -> None:
    """No collection looks again at what is there: modules and collected tests are most of all objects, and a full collection of them takes half a second."""
    global _settled_modules  # noqa: PLW0603 - of the process, as the collector is
    gc.collect()
    gc.freeze()
    _settled_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same generator state, in whatever order the tests run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seconds_of_operations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Defined for all tests but those of what is measured."""
    with nullcontext() if request.node.get_closest_marker("measured_seconds") else defined_costs():
        yield


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs and temporary files go into folders of this run: what a user's cache holds must not change a test, nor the other way round."""
    with pytest.MonkeyPatch.context() as patch:
        # Of all workers: what gloo takes is measured for seconds.
        shared = tmp_path_factory.getbasetemp()
        shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
        patch.setenv("MEMFIT_CACHE_DIR", str(shared / "cache"))
        # Some tests look at what is left behind there, and others run at the same time.
        temporary = str(tmp_path_factory.mktemp("temporary"))
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", temporary)
        yield


@pytest.fixture
def short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning looks at fewer forwards than it would, so that a path which comes after some steps is new to it."""
    monkeypatch.setattr("memfit.capture.draws.COUNTED_FORWARDS", 2)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for kernels: tiny models are faster so, and sums come in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
