"""The runner of several machines: Ray decides where a run goes, by its predicted bytes; what is known of runs, and which are tried again, is as on one.

Each machine tells Ray its bytes when it joins, `ray start --resources='{"memfit_cuda_MiB": 24576}'`; a run asks for its predicted peak of them. On the machine
an actor of Ray starts the same guard as the runner of one machine does, and hands on what the run prints. When a machine is lost its runs are, and are started
again elsewhere as often as they may; when this process dies Ray ends the actors, and their guards the runs. Nothing here places or queues anything.
Source: https://docs.ray.io/en/latest/ray-core/scheduling/resources.html (custom resources)
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.runner.cores import THREADS
from memfit.runner.ends import End, classified
from memfit.runner.ledger import Ledger
from memfit.runner.machines import check_one_machine, check_ranks
from memfit.runner.node_watch import NodeWatch
from memfit.runner.request import RunRequest
from memfit.runner.runs import Runs
from memfit.runner.store import Row

NAMESPACE: Final = "memfit"  # of actors: what one process leaves, the next finds
RESOURCE: Final = "memfit_{}_MiB"
_KINDS: Final = ("cpu", "cuda", "host", "disk")
_MIB: Final = 1 << 20
_LOOK_SECONDS: Final = 0.2
_UNBEGUN_SECONDS: Final = 120.0  # for which Ray may hand a run to a machine that is lost already, before it has noticed


class ClusterLedger(Ledger):
    """The bytes of each machine, as Ray knows them: an account for whoever asks, in which nothing is placed."""

    def __init__(self, nodes: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__({f"{kind}:{node}": size for node, sizes in nodes.items() for kind, size in sizes.items()})
        self.nodes = nodes

    def check(self, request: RunRequest) -> None:
        """As on one machine: one of the machines has to hold all of it.

        Raises:
            InputError: none does; or the run has several ranks.
        """
        check_ranks(request)
        check_one_machine(request.name, self.wanted(request), self.nodes)

    def wanted(self, request: RunRequest) -> dict[str, int]:
        """Bytes by kind of device or tier, in whole MiB; without lower tiers that no machine has told of."""
        sizes: dict[str, int] = {request.device: sum(request.rank_bytes)} if request.rank_bytes else {}
        for name, size in request.peak_bytes.items():
            kind = name.partition(":")[0]
            sizes[kind] = sizes.get(kind, 0) + size
        told = {kind for each in self.nodes.values() for kind in each}
        return {
            kind: math.ceil(size / _MIB) * _MIB
            for kind, size in sizes.items()
            if size and (kind in told or kind not in {"host", "disk"})
        }


@dataclass(slots=True)
class _Remote:
    """An attempt that Ray was asked to run.

    Attributes:
        node: where it runs; "" while Ray looks for room.
        answer: what was asked last: its beginning, then how it stands.
        sizes: bytes of output and of error output that are here.
    """

    request: RunRequest
    number: int
    folder: Path
    actor: Any
    answer: Any
    node: str = ""
    sizes: tuple[int, int] = (0, 0)


class ClusterRunner(Runs):
    """Starts, watches, limits and ends runs on the machines of a Ray cluster.

    Args:
        folder: for what is known of the runs, and their output; one runner at a time.
        address: of the cluster, as `ray.init` takes it: "auto" for the one that this machine belongs to.
        at_once: runs at one time; None for as many as fit.

    Raises:
        InputError: as for `RunStore`; Ray is missing, or there is no such cluster, or none of its machines has told its bytes.
    """

    def __init__(self, folder: str | Path, address: str = "auto", at_once: int | None = None) -> None:
        self._ray = connected(address)
        self._address = address
        nodes = self._nodes()
        if not nodes:
            raise nothing_told(address)
        super().__init__(folder, ClusterLedger(nodes))
        self._at_once = at_once
        self._remote: dict[str, _Remote] = {}
        self._unbegun: dict[str, float] = {}  # when Ray first failed to begin a run
        for row in self._store.rows():
            self._found_again(row)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of runs that have not started: those that Ray has no room for yet, too."""
        return (*(name for name, each in self._remote.items() if not each.node), *self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        """Names of runs that run."""
        return tuple(name for name, each in self._remote.items() if each.node)

    def _stop_begun(self, name: str, *, at_once: bool) -> None:
        if name in self._remote and not self._remote[name].node:
            remote = self._remote.pop(name)
            self._ray.kill(remote.actor)
            self._finish(remote.request, End("stopped", reason="asked", attempts=remote.number))
        elif name in self._remote:
            self._remote[name].actor.stop.remote(at_once=at_once)

    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:
        """As in `Runs`."""
        deadline = time.monotonic() + seconds
        while True:
            self._start()
            self._look()
            left = deadline - time.monotonic()
            if self._news or left <= 0:
                return self._told()
            time.sleep(min(_LOOK_SECONDS, left))

    def close(self) -> None:
        """End what runs, at once, and let go of the folder; what ran is begun again by the next runner of the folder."""
        for remote in self._remote.values():
            self._ray.kill(remote.actor)
        self._remote.clear()
        self._store.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _nodes(self) -> dict[str, Mapping[str, int]]:
        """Bytes by kind, of each machine that is there."""
        nodes = {node["NodeID"][:8]: told_bytes(node) for node in self._ray.nodes() if node["Alive"]}
        return {name: told for name, told in nodes.items() if told}

    def _start(self) -> None:
        """Hand everything to Ray that may run at a time: it finds the machine, and waits where there is none."""
        for request in list(self._waiting.values()):
            if self._at_once is not None and len(self._remote) >= self._at_once:
                return
            if self._attempts[request.name] and not self._is_gone(request.name):
                continue
            wanted = self._whole_machine(request) if request.alone else self.ledger_of_cluster.wanted(request)
            number, folder, spec = self._begun(request, ())
            actor = (
                self._ray.remote(NodeWatch)
                .options(
                    name=self._actor_name(request.name),
                    namespace=NAMESPACE,
                    num_cpus=0,
                    resources={RESOURCE.format(kind): size // _MIB for kind, size in wanted.items()},
                    max_restarts=0,
                    # Else Ray hides the GPUs of an actor that asks for none of them by Ray's own count.
                    runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}} if "cuda" in wanted else None,
                )
                .remote()
            )
            begun = actor.begin.remote(spec, sys.executable, os.environ.get(THREADS))
            self._remote[request.name] = _Remote(request, number, folder, actor, begun)

    @property
    def ledger_of_cluster(self) -> ClusterLedger:
        """The account, as what it is here."""
        assert isinstance(self.ledger, ClusterLedger)
        return self.ledger

    def _whole_machine(self, request: RunRequest) -> dict[str, int]:
        """All bytes of the smallest machine that holds a run."""
        wanted = self.ledger_of_cluster.wanted(request)
        fitting = [
            {kind: each.get(kind, 0) for kind in wanted}
            for each in self._nodes().values()
            if all(size <= each.get(kind, 0) for kind, size in wanted.items())
        ]
        return min(fitting, key=lambda each: sum(each.values()), default=wanted)

    def _actor_name(self, name: str) -> str:
        return f"{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}/{name}"

    def _look(self) -> None:
        answers = {remote.answer: name for name, remote in self._remote.items()}
        if not answers:
            return
        ready, _ = self._ray.wait(list(answers), num_returns=len(answers), timeout=0)
        for each in ready:
            self._answered(self._remote[answers[each]])

    def _answered(self, remote: _Remote) -> None:
        name = remote.request.name
        try:
            said = self._ray.get(remote.answer)
        except self._ray.exceptions.RayError as error:
            del self._remote[name]
            now = time.monotonic()
            if not remote.node and now - self._unbegun.setdefault(name, now) < _UNBEGUN_SECONDS:
                self._wait(
                    remote.request, self._faults.get(name, 0)
                )  # no attempt of the run's: nothing of it has begun
                return
            reason = str(error).strip().splitlines()[0] if not remote.node else f"the machine {remote.node} was lost"
            self._over(remote, End("lost", reason=reason[:300], attempts=remote.number))
            return
        if not remote.node:
            remote.node = said
            self._unbegun.pop(name, None)
            self._account(remote)
        else:
            for stream, text in zip(("stdout", "stderr"), said["output"], strict=True):
                with (remote.folder / stream).open("ab") as file:
                    file.write(text)
            remote.sizes = (remote.sizes[0] + len(said["output"][0]), remote.sizes[1] + len(said["output"][1]))
            if said["over"] and not any(said["output"]):
                del self._remote[name]
                self._ray.kill(remote.actor)
                lost = End("lost", reason="the process that watched it was killed", attempts=remote.number)
                end = said["end"]
                self._over(remote, lost if end is None else classified(end, remote.folder / "stderr", remote.number))
                return
        remote.answer = remote.actor.look.remote(*remote.sizes)

    def _account(self, remote: _Remote) -> None:
        """What runs where, in the account; a machine that came later is in it from now on."""
        nodes = self._nodes()
        if nodes != self.ledger_of_cluster.nodes:
            promised = {name: each for name, each in self._remote.items() if each.node and each is not remote}
            self.ledger = ClusterLedger(nodes)
            for each in promised.values():
                self._account(each)
        wanted = self.ledger_of_cluster.wanted(remote.request)
        named = {f"{kind}:{remote.node}": size for kind, size in wanted.items()}
        self.ledger.promise(replace(remote.request, rank_bytes=(), peak_bytes=named), ())

    def _over(self, remote: _Remote, end: End) -> None:
        if not self._again(remote.request, end):
            self._finish(remote.request, end)

    def _found_again(self, row: Row) -> None:
        """What an earlier runner has left: its actors end with it, and what ran begins again once they have."""
        if not self._is_recalled(row):
            self._again(row.request, End("stopped", reason="runner died", attempts=row.attempt))

    def _is_gone(self, name: str) -> bool:
        """Whether nothing of an earlier attempt is left, which is ended here; before that another would be a second one."""
        try:
            self._ray.kill(self._ray.get_actor(self._actor_name(name), namespace=NAMESPACE))
        except ValueError:  # there is no such actor, or no longer
            return True
        return False


def told_bytes(node: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by kind of device or tier that a machine, one of `ray.nodes()`, told when it joined; empty where it told none."""
    told = {kind: int(node["Resources"].get(RESOURCE.format(kind), 0)) * _MIB for kind in _KINDS}
    return {kind: size for kind, size in told.items() if size}


def nothing_told(address: str) -> InputError:
    """No machine of a cluster has told any."""
    return InputError(
        f"no machine of the Ray cluster {address!r} has told its bytes: ray start --resources='{{\"{RESOURCE.format('cuda')}\": 24576}}' on each, or "
        f"{RESOURCE.format('cpu')}"
    )


def connected(address: str) -> Any:
    """Ray, connected to a cluster.

    Raises:
        InputError: Ray is missing, or there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError("a cluster needs Ray: pip install 'memfit[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"there is no Ray cluster at {address!r} ({reason}): start one, `ray start --head`, or give its address"
            ) from error
    return ray
