"""The runner of several machines whose runs outlive it: its ledger decides which machine gets a run, and a detached actor of Ray carries it there.

An attempt is written into the store before its actor is made, which has the attempt's name in a namespace of this runner's folder: the next runner of the
folder finds it by that name, or has another in its place on that machine, and goes on speaking to it. Whoever has the folder of an attempt first runs it
(`memfit.runner.guard.claim`), whatever is asked for how often.

A machine that nothing is heard of may still run what it has. So each run has a lease, which the words to its actor renew (`memfit.runner.detached_watch`), and
what was spoken to last two leases ago has ended there: then, and no sooner, the run is told to have lost its machine, and whoever queues runs finds another.
What Ray says about dead machines and actors ends nothing by itself. As with hosts of a service, clocks are taken to go equally fast to within a quarter.
Source: named actors and their lifetimes, https://docs.ray.io/en/latest/ray-core/actors/named-actors.html; node affinity,
https://docs.ray.io/en/latest/ray-core/scheduling/index.html
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from memfit.runner import guard
from memfit.runner.cluster import RESOURCE
from memfit.runner.cores import CORES
from memfit.runner.detached_watch import LEASE, DetachedWatch
from memfit.runner.ends import End, classified
from memfit.runner.joining import Joining
from memfit.runner.machines import MachineLedger, Machines, kind_of, machine_of
from memfit.runner.request import RunRequest
from memfit.runner.runs import Runs, read_json
from memfit.runner.store import Row

_log = logging.getLogger("memfit.runner")
MACHINE_LOST: Final = "machine lost"
"""Why a run was stopped whose machine did not let it run, or no longer; the end's `tail` says more."""
NO_ROOM: Final = "no room"
"""Why a run was stopped that was to start again, and found its bytes on no machine."""
_MIB: Final = 1 << 20
_WAIT_SECONDS: Final = 0.1
_ANEW_SECONDS: Final = 2.0  # after which an actor that was lost is made anew
_PENDING_SECONDS: Final = 60.0  # for which Ray may have no room on a machine before it is said
_CLOSE_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Attempt:
    """One that was begun and has not ended.

    Attributes:
        request, number, folder, device: of it.
        lease: seconds that it may go on after a word.
        actor: that watches it; None where one is to be found or made.
        answer: to the last word, while it is awaited.
        heard: `clock` of the answer before.
        spoken: when a word was last sent that may have renewed its lease, or when an earlier runner may have; None for never.
        due: when the next word is.
        stop: how it is to end; "" where it goes on.
        since: when it was begun, or found again.
        told: whether it was said that Ray has no room.
    """

    request: RunRequest
    number: int
    folder: Path
    device: str
    lease: float
    actor: Any = None
    answer: Any = None
    heard: float | None = None
    spoken: float | None = None
    due: float = 0.0
    stop: str = ""
    since: float = 0.0
    told: bool = False

    @property
    def name(self) -> str:
        """Of its actor."""
        return f"{self.request.name}/{self.number}"


class DetachedRunner(Runs):
    """Starts, watches, limits and ends runs on the machines of a Ray cluster, which go on without it for a lease.

    Args:
        folder: that all machines see, for what is known of the runs, and their output; one runner at a time.
        machines: their bytes, kept up to date from now on.
        address: of the cluster, as `ray.init` takes it: "auto" for the one that this computer belongs to.
        lease_seconds: that runs go on without a word.
        probe: a command that ends with 0 on machines where runs can be started.
        environment: of that command.
        clock: seconds, as `memfit.runner.guard.since_boot`.

    Raises:
        InputError: as for `RunStore` and `Joining`.
    """

    def __init__(
        self,
        folder: str | Path,
        machines: Machines,
        address: str,
        lease_seconds: float,
        probe: Sequence[str],
        environment: Mapping[str, str],
        clock: Callable[[], float] = guard.since_boot,
    ) -> None:
        super().__init__(folder, MachineLedger({}))
        self._machines, self._lease, self._clock = machines, lease_seconds, clock
        self._running: dict[str, _Attempt] = {}
        self._namespace = f"memfit-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]}"
        try:
            self._joining = Joining(address, self.folder, probe, environment)
            self._ray = self._joining.ray
            for row in self._store.rows():
                self._found_again(row)
            self._end_leaked()
            while not self._joining.settled():
                self._hear()  # runs that are there go on meanwhile
                self._speak()
                time.sleep(_WAIT_SECONDS)
            self._look_at_machines()
        except BaseException:
            self._store.close()
            raise

    @property
    def running(self) -> tuple[str, ...]:
        """Names of runs that run, or whose machine has been asked to."""
        return tuple(self._running)

    def _stop_begun(self, name: str, *, at_once: bool) -> None:
        if name in self._running:
            attempt = self._running[name]
            attempt.stop, attempt.due = "kill" if at_once or attempt.stop == "kill" else "ask", 0.0
            if attempt.spoken is None:  # nothing of it has begun, and now nothing will
                self._over(attempt, End("stopped", reason="asked", attempts=attempt.number))

    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:
        """As in `Runs`. A run that loses its machine, or finds no room after it was killed, is stopped (`MACHINE_LOST`, `NO_ROOM`)."""
        deadline = time.monotonic() + seconds
        while True:
            self._look_at_machines()
            self._start()
            self._hear()
            self._lose()
            self._speak()
            left = deadline - time.monotonic()
            if self._news or left <= 0:
                return self._told()
            time.sleep(min(_WAIT_SECONDS, left))

    def close(self, *, stop: bool = True) -> None:
        """Let go of the folder.

        Args:
            stop: end what runs, at once, for the next runner of the folder to begin it again; else it goes on for a lease, to be found again.
        """
        deadline = time.monotonic() + (_CLOSE_SECONDS if stop else 0.0)
        for attempt in self._running.values():
            attempt.stop, attempt.due = "close", 0.0
        ending = dict(self._running) if stop else {}
        while ending and time.monotonic() < deadline:
            self._speak()
            time.sleep(_WAIT_SECONDS)
            for name, attempt in list(ending.items()):
                said = self._said(attempt) if attempt.answer is not None else None
                if attempt.spoken is None or (said is not None and said["over"]):
                    self._kill(attempt)
                    del ending[name]
        self._running.clear()
        self._joining.close()
        self._store.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _look_at_machines(self) -> None:
        found = self._joining.look()
        if found != self._machines.by_machine:
            self._machines.become(found)
        self.ledger.capacity = self._machines.accounts

    def _start(self) -> None:
        for request in self.ledger.admitted(list(self._waiting.values())):
            try:
                self._launch(request)
            except BaseException:
                self.ledger.give_back(request.name)
                raise
        for name in list(self._waiting):  # others may be before it by now: whoever queues runs decides
            why = "no machine has its bytes free now"
            end = End("stopped", reason=NO_ROOM, tail=why, attempts=self._attempts[name])
            self._finish(self._waiting.pop(name), end)

    def _launch(self, request: RunRequest) -> None:
        (device,) = self.ledger.devices(request.name)
        lease = self._folder(request.name, self._attempts[request.name] + 1) / LEASE
        own = replace(request, lease=str(lease), outlives_runner=True)
        number, folder, _ = self._begun(own, (), {"devices": [device], "lease_seconds": self._lease})
        self._running[request.name] = _Attempt(request, number, folder, device, self._lease, since=self._clock())

    def _found_again(self, row: Row) -> None:
        """What an earlier runner has left: it is spoken to as if by that one, which may have spoken to it a moment ago."""
        request, name = row.request, row.request.name
        if self._is_recalled(row):
            return
        folder = self._folder(name, row.attempt)
        spec = read_json(folder / guard.SPEC) or {}
        device = next(iter(spec.get("devices", ())), f"{request.device}:")
        lease = max(self._lease, float(spec.get("lease_seconds", self._lease)))
        now = self._clock()
        attempt = _Attempt(request, row.attempt, folder, device, lease, spoken=now, since=now)
        self._running[name] = attempt
        self.ledger.promise(request, (device,))
        left = read_json(folder / guard.END)
        if left is not None:
            self._ended_now(attempt, left, earlier=True)

    def _end_leaked(self) -> None:
        """Actors of attempts that have ended, left by a runner that died before it had ended them."""
        ours = {attempt.name for attempt in self._running.values()}
        for each in self._ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == self._namespace and each["name"] not in ours:
                with suppress(ValueError, self._ray.exceptions.RayError):
                    self._ray.kill(self._ray.get_actor(each["name"], namespace=self._namespace))

    def _actor(self, attempt: _Attempt) -> Any:
        """The attempt's, which is there already, or is made on the machine that it was promised; None where that is not here."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        machine = self._joining.id_of(machine_of(attempt.device))
        with suppress(ValueError, self._ray.exceptions.RayError):
            return self._ray.get_actor(attempt.name, namespace=self._namespace)
        if machine is None:
            return None
        named = self.ledger.named(attempt.request, (attempt.device,)).peak_bytes
        sizes = {kind_of(name): size for name, size in named.items() if kind_of(name) != CORES}
        sizes[kind_of(attempt.device)] = sizes.get(kind_of(attempt.device), 0) + sum(attempt.request.rank_bytes)
        return (
            self._ray.remote(DetachedWatch)
            .options(
                name=attempt.name,
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                # The ledger has decided; Ray is told so that others who ask it for bytes of this machine do not get these.
                resources={RESOURCE.format(kind): size // _MIB for kind, size in sizes.items() if size >= _MIB},
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
                max_restarts=0,
                # Else Ray hides the GPUs of an actor that asks for none of them by Ray's own count.
                runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}} if "cuda" in sizes else None,
            )
            .remote(str(attempt.folder), inherits=attempt.request.inherits)
        )

    def _speak(self) -> None:
        """The next word to each attempt whose turn it is."""
        for attempt in list(self._running.values()):
            now = self._clock()
            if attempt.answer is not None or now < attempt.due:
                continue
            if attempt.actor is None:
                attempt.heard, attempt.due = None, now + _ANEW_SECONDS
                attempt.actor = self._actor(attempt)
                if attempt.actor is None:
                    if attempt.spoken is None:
                        self._over(
                            attempt, self._moved(attempt.number, f"machine {machine_of(attempt.device)} is gone")
                        )
                    continue
            if attempt.heard is not None:
                attempt.spoken = now
            attempt.answer = attempt.actor.look.remote(attempt.heard, attempt.lease, attempt.stop)

    def _hear(self) -> None:
        """What was answered."""
        awaited = {attempt.answer: attempt for attempt in self._running.values() if attempt.answer is not None}
        ready = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)[0] if awaited else ()
        for attempt in map(awaited.__getitem__, ready):
            first = attempt.heard is None
            said = self._said(attempt)
            if said is None:
                continue
            attempt.due = 0.0 if first else self._clock() + min(1.0, attempt.lease / 10)
            if said["over"]:
                self._ended_now(attempt, said["end"])

    def _said(self, attempt: _Attempt) -> dict[str, Any] | None:
        """An answer that is there, if need be once it is; None where the actor is lost."""
        answer, attempt.answer = attempt.answer, None
        try:
            said: dict[str, Any] = self._ray.get(answer, timeout=_CLOSE_SECONDS)
        except self._ray.exceptions.RayError as error:
            attempt.actor, attempt.due = None, self._clock() + _ANEW_SECONDS
            machine = machine_of(attempt.device)
            self._joining.doubt(machine)
            if attempt.spoken is None:
                why = f"Ray could not begin it on machine {machine} ({str(error).strip().splitlines()[0][:200]})"
                self._over(attempt, self._moved(attempt.number, why))
            return None
        attempt.heard = said["clock"]
        return said

    def _lose(self) -> None:
        """What nothing was heard of for two leases has ended where it was."""
        for attempt in list(self._running.values()):
            now, machine = self._clock(), machine_of(attempt.device)
            if attempt.spoken is None:
                if now - attempt.since > _PENDING_SECONDS and not attempt.told:
                    attempt.told = True
                    _log.warning(
                        "%s waits for Ray, which has no room on machine %s: others have it", attempt.name, machine
                    )
            elif now - attempt.spoken > 2 * attempt.lease and (attempt.actor is None or attempt.answer is not None):
                left = read_json(attempt.folder / guard.END)
                if left is not None:
                    self._ended_now(attempt, left)
                    continue
                why = f"nothing was heard of machine {machine} for {2 * attempt.lease:g} s, so what it ran has ended there"
                self._joining.doubt(machine)
                self._over(attempt, self._moved(attempt.number, why))

    def _ended_now(self, attempt: _Attempt, left: Mapping[str, Any] | None, *, earlier: bool = False) -> None:
        number = attempt.number
        lost = End("lost", reason="the process that watched it was killed", attempts=number)
        end = lost if left is None else classified(left, attempt.folder / "stderr", number)
        if self._again(attempt.request, end, earlier=earlier):
            del self._running[attempt.request.name]
            self._kill(attempt)
        else:
            self._over(attempt, end)

    def _over(self, attempt: _Attempt, end: End) -> None:
        self._finish(attempt.request, end)
        del self._running[attempt.request.name]
        self._kill(attempt)

    def _kill(self, attempt: _Attempt) -> None:
        """End the actor of an attempt that is over, if it can be reached; else it leaves by itself."""
        with suppress(ValueError, self._ray.exceptions.RayError):
            actor = attempt.actor or self._ray.get_actor(attempt.name, namespace=self._namespace)
            self._ray.kill(actor)

    @staticmethod
    def _moved(attempts: int, why: str) -> End:
        return End("stopped", reason=MACHINE_LOST, tail=why, attempts=attempts)
