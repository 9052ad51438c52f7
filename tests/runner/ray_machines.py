"""A real Ray cluster of several machines on this computer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MIB = 1 << 20


@contextmanager
def cluster_of_a_head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without bytes of its own; machines are added by the test."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", short)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * MIB})
    ray.init(address=made.address, namespace="memfit", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(short, ignore_errors=True)


def machine(cluster: Any, mib: int, cores: int = 1) -> Any:
    """One more machine, once it is there."""
    node = cluster.add_node(num_cpus=cores, object_store_memory=80 * MIB, resources={"memfit_cpu_MiB": mib})
    cluster.wait_for_nodes()
    return node
