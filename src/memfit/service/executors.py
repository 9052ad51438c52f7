"""What carries out the runs of a service: a runner of this computer; or, with --cluster, one of a Ray cluster's machines, beside which this computer plans."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from memfit.errors import InputError
from memfit.runner import Runner
from memfit.runner.detached import DetachedRunner
from memfit.runner.machines import Machines
from memfit.runner.store import NAME, RunStore
from memfit.service import launching
from memfit.service.settings import ServiceSettings

CLUSTER: Final = "cluster"  # folder of what is known of the runs of a cluster
_PROBE: Final = ("-c", "import memfit")


def opened(settings: ServiceSettings) -> tuple[Runner, Runner | DetachedRunner]:
    """What plans, and what trains: one and the same without a cluster.

    Raises:
        InputError: another process has the folder; runs of it are elsewhere; or the cluster cannot be used.
    """
    planning = {launching.PLANNING: settings.planning_bytes * settings.planning_at_once}
    if settings.cluster is None:
        _check_none_on_cluster(settings)
        runner = Runner(settings.own / "runner", {**settings.accounts, **planning})
        return runner, runner
    planner = Runner(settings.own / "runner", planning)
    try:
        here = _trained(planner.running + planner.waiting)
        if here:
            raise InputError(
                f"runs of {settings.folder} run on this computer ({here}): start its service without --cluster until they are over or paused"
            )
        assert isinstance(settings.capacity, Machines), "a service of a cluster has the bytes of its machines"
        return planner, DetachedRunner(
            settings.own / CLUSTER,
            settings.capacity,
            settings.cluster,
            settings.lease_seconds,
            launching.confined(settings, (sys.executable, *_PROBE), write=(), tcp=False),
            launching.passed_on(),
        )
    except BaseException:
        planner.close(stop=False)
        raise


def _check_none_on_cluster(settings: ServiceSettings) -> None:
    folder = settings.own / CLUSTER
    if not (folder / NAME).exists():
        return
    store = RunStore(folder)
    try:
        there = _trained(row.request.name for row in store.rows() if row.state != "ended")
    finally:
        store.close()
    if there:
        raise InputError(
            f"runs of {settings.folder} are on the machines of a Ray cluster ({there}): start its service with --cluster until they are over or paused"
        )


def _trained(names: Iterable[str]) -> str:
    """Numbers of the runs that these are parts of, in words; "" for none, or plans alone."""
    return ", ".join(sorted({name.partition("-")[0].lstrip("0") for name in names if not name.endswith("-plan")}))
