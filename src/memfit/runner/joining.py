"""Which machines of a Ray cluster get runs: those that have told their bytes, see the shared folder, and can start what runs are; as they come and go."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.runner.cluster import connected, nothing_told, told_bytes
from memfit.runner.cores import CORES
from memfit.runner.detached_watch import problem

_log = logging.getLogger("memfit.runner")
_LOOK_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 60.0  # after which a machine that could not run anything is asked once more
_FIRST_SECONDS: Final = 120.0  # Ray takes some to start what asks


class Joining:
    """The machines of one cluster.

    Args:
        address: of it, as `ray.init` takes it.
        folder: that machines are to share with this computer.
        probe: a command that ends with 0 where runs can be started.
        environment: of that command.

    Raises:
        InputError: Ray is missing, or there is no such cluster.
    """

    def __init__(self, address: str, folder: Path, probe: Sequence[str], environment: Mapping[str, str]) -> None:
        self.ray = connected(address)
        self._folder, self._probe, self._environment = folder, tuple(probe), dict(environment)
        self._word = f"shared-{secrets.token_hex(8)}"
        self._asked: dict[str, Any] = {}  # by the id of a machine, as are all of these
        self._good: set[str] = set()
        self._problems: dict[str, tuple[float, str]] = {}
        self._silent: set[str] = set()  # those that have told no bytes, which was said
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._looked = -1e9
        folder.mkdir(parents=True, exist_ok=True)
        self.close()  # what one that was killed has left
        (folder / self._word).write_text(self._word, encoding="utf-8")
        self._address, self._begun = address, time.monotonic()

    def settled(self) -> bool:
        """Whether all machines that are here have answered, or one has and time is over.

        Raises:
            InputError: none has told its bytes, or none can run anything.
        """
        self.look(now=True)
        told = [each for each, node in self._nodes.items() if told_bytes(node)]
        if not told:
            raise nothing_told(self._address)
        late = time.monotonic() - self._begun > _FIRST_SECONDS
        if not self._good and (late or len(self._problems) == len(told)):
            why = next((f"{name_of(each)} {text}" for each, (_, text) in self._problems.items()), "none has answered")
            raise InputError(f"no machine of the Ray cluster {self._address!r} can start runs: {why}")
        return bool(self._good) and (late or not self._asked)

    def look(self, *, now: bool = False) -> dict[str, dict[str, int]]:
        """Bytes by kind of device and tier, and cores, of each machine that gets runs, by its name.

        Args:
            now: whether to ask Ray, however short ago it was asked.
        """
        if now or time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._nodes = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
            for each in [*self._good, *self._problems, *self._asked]:
                if each not in self._nodes:
                    self.doubt(each)
            self._hear()
            self._ask()
        return {
            name_of(each): {**told_bytes(node), CORES: max(1, int(node["Resources"].get("CPU", 1)))}
            for each, node in self._nodes.items()
            if each in self._good
        }

    def id_of(self, name: str) -> str | None:
        """Ray's id of a machine that is here; None where it is not."""
        return next((each for each in self._nodes if name_of(each) == name), None)

    def doubt(self, name: str) -> None:
        """Something went wrong on a machine: it gets nothing more until it has answered again. Its name or its id."""
        for known in (self._good, self._problems, self._asked):
            for each in [each for each in known if each == name or name_of(each) == name]:
                known.discard(each) if isinstance(known, set) else known.pop(each)

    def close(self) -> None:
        """Leave nothing in the folder."""
        for each in self._folder.glob("shared-*"):
            each.unlink(missing_ok=True)

    def _ask(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for each, node in self._nodes.items():
            if not told_bytes(node):
                if each not in self._silent:
                    self._silent.add(each)
                    why = "has told no bytes, and gets no runs: start Ray there with --resources, or leave it so"
                    _log.warning("machine %s of the cluster %s", name_of(each), why)
                continue
            failed = self._problems.get(each)
            if each in self._good or each in self._asked or (failed and time.monotonic() - failed[0] < _AGAIN_SECONDS):
                continue
            there = NodeAffinitySchedulingStrategy(each, soft=False)
            task = self.ray.remote(problem).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            answer = f"{self._word}-{name_of(each)}"
            self._asked[each] = task.remote(str(self._folder), self._word, answer, self._probe, self._environment)

    def _hear(self) -> None:
        if not self._asked:
            return
        ready, _ = self.ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for each in [each for each, answer in self._asked.items() if answer in ready]:
            answer = self._folder / f"{self._word}-{name_of(each)}"
            try:
                why = self.ray.get(self._asked.pop(each))
            except self.ray.exceptions.RayError as error:
                why = f"cannot run anything ({str(error).strip().splitlines()[0][:200]}): install memfit there as here"
            with suppress(OSError):
                answer.unlink()
            if why:
                _log.error("machine %s of the cluster gets no runs: it %s", name_of(each), why)
                self._problems[each] = (time.monotonic(), why)
            else:
                self._problems.pop(each, None)
                self._good.add(each)


def name_of(identity: str) -> str:
    """By which a machine is called: the first letters of its id."""
    return identity[:8]
