"""Moves runs from state to state: has each planned, starts what fits in its turn, and tells how it ended. The only one that has the runner.

What it does is written into the runner's store first, then into the service's; both are read again after a crash, and joined by the names of parts: a run is
neither lost nor started twice. What was asked of a run (cancel, pause) is in the store until it has happened. Of several hosts that share a store each moves
the runs that it has (`memfit.service.hosts`): it claims a run before it plans or starts it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Final

from memfit.errors import InputError, PlanFileError
from memfit.runner import End, Runner, RunRequest
from memfit.runner.detached import MACHINE_LOST, NO_ROOM, DetachedRunner
from memfit.runner.machines import accounts_of
from memfit.service import executors, launching
from memfit.service.hosts import MOVED, Host, last_of
from memfit.service.plan_answers import answer, read_plan
from memfit.service.planned import Planned
from memfit.service.progress import LogFollower, Progress
from memfit.service.queue import Occupied, Queued, Turn, in_order, turns
from memfit.service.settings import ServiceSettings
from memfit.service.shares import Shares
from memfit.service.states import CANCELLED, DONE, FAILED, PAUSED, PLANNED, REFUSED, RUNNING, WAITING
from memfit.service.store import ServiceStore, StoredRun
from memfit.units import format_bytes

_log = logging.getLogger("memfit.service")
_LOOK_SECONDS: Final = 0.5  # between looks at logs
_GOES_ON: Final = ("asked", "lease", MACHINE_LOST, NO_ROOM)  # why a run was stopped that may go on from a snapshot
_OVERDUE_SECONDS: Final = 5.0  # that a run which has taken longer than predicted is thought to take still


@dataclass(frozen=True, slots=True)
class View:
    """How things stand, for whoever asks; made anew, never changed.

    Attributes:
        turns: of waiting runs, by number.
        progress: of running ones, by number.
        remaining: seconds that they will still take, by number.
        devices: of their ranks, by number.
        used: bytes promised on each device and tier.
        made: seconds since 1970; 0 before the first look.
        error: why the last look failed; "" where it did not.
    """

    turns: Mapping[int, Turn] = field(default_factory=dict)
    progress: Mapping[int, Progress] = field(default_factory=dict)
    remaining: Mapping[int, float] = field(default_factory=dict)
    devices: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    made: float = 0.0
    error: str = ""

    def knows(self, number: int) -> bool:
        """Whether it tells anything of a run."""
        return number in self.turns or number in self.progress or number in self.remaining


class Dispatcher:
    """One host's; of a folder, or of a host's part of one, there is one at a time.

    Raises:
        InputError: another process has the folder, or its store cannot be used.
    """

    def __init__(self, settings: ServiceSettings, store: ServiceStore) -> None:
        self.settings, self.store = settings, store
        self.planner: Runner
        self.runner: Runner | DetachedRunner
        self.planner, self.runner = executors.opened(settings)  # one and the same without a cluster
        self.host = Host(store, settings) if settings.host else None
        self.draining = False
        self.forgotten: SimpleQueue[str] = SimpleQueue()  # names of parts whose files are gone
        self.view = View()
        self._followers: dict[int, LogFollower] = {}
        self._told: set[str] = set()  # names of parts that were sent their end signal
        self._looked = 0.0
        self._shares = Shares(store)
        try:
            if self.host is not None:
                self.host.begin()
            self._end_not_ours()
        except BaseException:
            self.close()
            raise

    def _end_not_ours(self) -> None:
        """What runs of runs that the store does not know, as it is a copy from before they were submitted, or that other hosts have by now."""
        for runner, name in [(each, name) for each in self._runners for name in (*each.running, *each.waiting)]:
            number, _, part = name.partition("-")
            try:
                run = self.store.run(int(number))
            except KeyError:
                _log.error("%s is of no run that the store knows, and is ended", name)
                runner.stop(name)
                continue
            ours = {"planning": "plan", "waiting": str(run.part + 1), "running": str(run.part)}.get(run.state)
            if self.host is not None and (run.host, ours) != (self.host.name, part):
                _log.error("%s is not of this host any more, and is ended", name)
                runner.stop(name, at_once=True)

    @property
    def _runners(self) -> list[Runner | DetachedRunner]:
        return [self.runner] if self.runner is self.planner else [self.planner, self.runner]

    # ---------------------------------------------------------------------------------------------------------- the loop

    def serve(self, stopping: threading.Event) -> None:
        """Look again and again until told to stop. A look that fails (a full disk) is tried again."""
        while not stopping.is_set():
            try:
                self.look(0.2)
            except Exception as error:  # noqa: BLE001 - runs go on, whatever it was; readiness tells it
                foreseen = isinstance(error, (InputError, OSError))
                _log.error("cannot go on for now: %s", error, exc_info=None if foreseen else error)
                self.view = replace(self.view, error=str(error), made=time.time())
                stopping.wait(1.0)

    def look(self, seconds: float = 0.0) -> None:
        """Once: ends, plans, starts.

        Args:
            seconds: to wait at most for an end.

        Raises:
            InputError: a store cannot be written.
        """
        if self.host is not None:
            if self.host.taken:
                _log.error("the other hosts have had no sign of life of this one, and its runs are theirs")
                self.host.begin()
                self._end_not_ours()
            self.host.look()
        for runner in self._runners:
            runner.poll(seconds if runner is self.runner else 0.0)
        with suppress(Empty):
            while True:
                name = self.forgotten.get_nowait()
                for runner in self._runners:
                    runner.forget(name)
        live = self.store.live()
        for run in live:
            self._advance(run)
        self._start(self.store.live())

    def close(self) -> None:
        """Let go of the folder; what runs goes on."""
        for runner in self._runners:
            runner.close(stop=False)

    # -------------------------------------------------------------------------------------------------------- each state

    def _is_ours(self, run: StoredRun) -> bool:
        """Whether this host has a run; the host of a store of its own has all."""
        return run.host == self.settings.host

    def _claimed(self, run: StoredRun) -> StoredRun | None:
        """A run that nobody else has now; None where another host was first."""
        if self.host is None or self._is_ours(run):
            return run
        return replace(run, host=self.host.name) if self.host.claims(run) else None

    def _advance(self, run: StoredRun) -> None:
        if run.host and not self._is_ours(run):
            return
        match run.state:
            case "planning":
                self._plan(run)
            case "waiting" if self._is_ours(run) and self.runner.knows(launching.name_of(run.number, run.part + 1)):
                self._adopt(run)
            case "waiting" | "paused" if run.asked == "cancel":
                self._over(run, CANCELLED, "cancelled before it ran" if run.started is None else "cancelled")
            case "waiting" if run.asked == "pause":
                why = "paused while it waited"
                self.store.move(run, PAUSED, why, state=PAUSED, reason=why, asked="")
            case "running":
                self._watch(run)

    def _plan(self, run: StoredRun) -> None:
        name = launching.name_of(run.number, 0)
        known, end = self.planner.knows(name), self.planner.end_of(name)
        if run.asked:
            if known and end is None:
                self.planner.stop(name, at_once=True)
            elif run.asked == "cancel":
                self._over(run, CANCELLED, "cancelled while it was planned")
            return
        if known and self._is_ours(run):
            if end is not None:
                self._planned(run, end)
        elif not known or end is not None:
            planning = [each for each in (*self.planner.running, *self.planner.waiting) if each.endswith("-plan")]
            starts = not self.draining and (self.host is None or self.host.lives)
            if len(planning) < self.settings.planning_at_once and starts and self._claimed(run):
                self._forget(name)  # of a time before other hosts had it
                launching.write(self.settings, run)
                self.planner.submit(launching.planning(self.settings, run, self._lease))

    @property
    def _lease(self) -> str:
        return "" if self.host is None else str(self.host.lease)

    def _forget(self, name: str) -> None:
        """A part that has ended, if it is known, is to begin anew under its name."""
        if self.planner.knows(name):
            shutil.rmtree(self.planner.folder / "runs" / name, ignore_errors=True)
            self.planner.forget(name)

    def _planned(self, run: StoredRun, end: End) -> None:
        """What `memfit plan` has answered."""
        if end.kind == "stopped" and end.reason == "lease":
            self._forget(launching.name_of(run.number, 0))  # and it is planned anew
            return
        answered = answer(self.planner.stdout(launching.name_of(run.number, 0)))
        if end.kind != "done":
            why = answered.get("message") or f"planning ended: {end.text}"
            self._over(run, REFUSED, str(why), refusal={**answered, "end": end.text})
            return
        try:
            plan = read_plan(self.settings, run.number)
        except (PlanFileError, InputError, OSError) as error:
            self._over(run, REFUSED, f"the plan cannot be read: {error}")
            return
        steps = answered.get("total_steps")
        counted = isinstance(steps, int) and steps < 2**53  # more has no float, and times are computed of it
        planned = Planned.of(plan, total_steps=steps if counted else None, startup_seconds=end.seconds)
        try:
            self._check_somewhere(launching.training(self.settings, run, planned, 1))
        except InputError as error:
            self._over(run, REFUSED, str(error), plan=planned.to_json())
            return
        fits = f"{format_bytes(planned.peak_bytes)} of {format_bytes(planned.budget_bytes)} at the peak"
        if run.plan_only:
            self._over(run, PLANNED, fits, plan=planned.to_json())
        else:
            self.store.move(run, WAITING, fits, state=WAITING, reason=fits, plan=planned.to_json(), host="")

    def _check_somewhere(self, request: RunRequest) -> None:
        """Check that a run fits on some host, or machine that has been here, where nothing else runs; what is told is of this host."""
        for capacity in self.host.capacities() if self.host is not None else ():
            try:
                self.settings.ledger({**self.settings.accounts, **capacity}).check(request)
            except InputError:
                continue
            return
        machines = self.settings.machines
        accounts = self.settings.accounts if machines is None else accounts_of(machines.seen)
        self.settings.ledger(accounts).check(request)

    def _adopt(self, run: StoredRun) -> None:
        """It was handed to the runner right before the service ended."""
        part = run.part + 1
        planned = Planned.from_json(run.plan or {})
        request = launching.training(self.settings, run, planned, part)
        self._running(run, request, part)

    def _running(self, run: StoredRun, request: RunRequest, part: int) -> None:
        text = "started" if run.started is None else "goes on from its last snapshot"
        text = text if self.host is None else f"{text}, on {self.host.name}"
        if self.settings.cluster is not None:
            text = f"{text}, on {', '.join(self.runner.ledger.devices(request.name)) or 'a machine of the cluster'}"
        columns = {"part": part, "reason": text, "request": request.to_json(), "started": run.started or time.time()}
        if not self.store.move(run, RUNNING, text, state=RUNNING, **columns):
            self.runner.stop(request.name, at_once=True)  # another host has it by now

    def _watch(self, run: StoredRun) -> None:
        name = launching.name_of(run.number, run.part)
        end = self.runner.end_of(name)
        if end is not None:
            self._ended(run, end)
        elif run.asked and name not in self._told:
            self._told.add(name)
            self.runner.stop(name)
        elif self.host is not None and not self.runner.knows(name) and self.host.has_been_here():
            self._wait_again(run, f"host {self.host.name} does not know it any more: it goes on from its last snapshot")

    def _ended(self, run: StoredRun, end: End) -> None:
        follower = self._followers.pop(run.number, None)
        progress = (follower or LogFollower(launching.folder_of(self.settings, run.number))).look()
        peak = max((size for size in (run.measured_peak_bytes, progress.peak_bytes) if size), default=None)
        facts: dict[str, Any] = {"run_seconds": run.run_seconds + end.seconds, "measured_peak_bytes": peak, "asked": ""}
        told = end.reason if end.kind == "stopped" and end.reason in _GOES_ON else ""
        if end.kind == "done" or (told and end.status == 0):
            self._over(run, DONE, "done", **facts)
        elif told and run.asked == "cancel":
            self._over(run, CANCELLED, f"cancelled after step {progress.step}", **facts)
        elif told and run.asked == "pause":
            why = f"paused after step {progress.step}"
            self.store.move(run, PAUSED, why, state=PAUSED, reason=why, **facts)
        elif told == MACHINE_LOST:
            self._moved(run, end.tail, **facts)
        elif told:
            self._wait_again(run, f"{self._why_ended(end)}: it goes on from its last snapshot", **facts)
        else:
            self._over(run, FAILED, end.text, **facts)

    def _why_ended(self, end: End) -> str:
        if end.reason == "asked":
            return "its process was told to end by somebody else"
        if end.reason == "lease":
            silent = "its host could give no sign of life"
            return silent if self.host is not None else "its machine has heard nothing of the service"
        return end.tail

    def _moved(self, run: StoredRun, why: str, **facts: Any) -> None:
        """It has lost its machine, and goes on with another as often as it may be started again."""
        moves = sum(event.kind == MOVED for event in self.store.events(run.number))
        if moves >= self.settings.restarts:
            self._over(run, FAILED, f"{why}; {last_of(moves + 1, 'machine')}", **facts)
        else:
            self._wait_again(run, f"{why}: it goes on from its last snapshot", kind=MOVED, **facts)

    def _wait_again(self, run: StoredRun, why: str, kind: str = WAITING, **columns: Any) -> None:
        self.store.move(run, kind, why, state=WAITING, reason=why, host="", **columns)

    def _over(self, run: StoredRun, state: str, why: str, **columns: Any) -> None:
        columns.setdefault("asked", "")
        self.store.move(run, state, why, state=state, reason=why, ended=time.time(), **columns)

    # ------------------------------------------------------------------------------------------------------------ starts

    def _start(self, live: list[StoredRun]) -> None:
        """Start what may start now; say of the rest when it may."""
        running = [run for run in live if run.state == RUNNING]
        self._follow(running)
        queue = {
            run.number: run
            for run in live
            if run.state == WAITING and not run.asked and (not run.host or self._is_ours(run))
        }
        now = time.monotonic()
        if queue or now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            found = self._turns(running, queue)
            silent = self.host is not None and not self.host.lives
            while not (self.draining or self.runner.waiting or silent):
                ready = next(
                    (number for number, turn in found.items() if turn.seconds == 0.0 and self._launch(queue[number])),
                    None,
                )
                if ready is None:
                    break
                running.append(self.store.run(ready))
                del queue[ready]
                found = self._turns(running, queue)
            self._show(running, found)

    def _launch(self, run: StoredRun) -> bool:
        """Start one, if its bytes are really free; whether it was."""
        part = run.part + 1
        request = launching.training(self.settings, run, Planned.from_json(run.plan or {}), part, self._lease)
        if not self.runner.ledger.fits(request):
            return False
        claimed = self._claimed(run)
        if claimed is None:
            return False
        self.runner.submit(request)
        self.runner.poll(0.0)
        self._running(claimed, request, part)
        return True

    def _turns(self, running: list[StoredRun], queue: Mapping[int, StoredRun]) -> dict[int, Turn]:
        if not queue:
            return {}
        occupied = [
            Occupied(request, self.runner.ledger.devices(request.name) or ("cpu",) * len(request.rank_bytes), self._remaining(run))
            for run in running
            for request in [RunRequest.from_json(run.request or {})]
            if request.name in self.runner.ledger.running
        ]  # fmt: skip
        waiting = []
        for run in queue.values():
            planned = Planned.from_json(run.plan or {})
            request = launching.training(self.settings, run, planned, run.part + 1)
            waiting.append(Queued(request, max(planned.seconds(), 1.0), run.owner, run.priority))
        ordered = in_order(waiting, self._shares.had(running))
        laid_out = turns(self.settings.accounts, occupied, ordered, ledger=self.settings.ledger)
        return {int(turn.name.partition("-")[0]): turn for turn in laid_out}

    def _remaining(self, run: StoredRun) -> float:
        """Seconds that a running run will still take: as its own steps tell, and as predicted before the first."""
        planned = Planned.from_json(run.plan or {})
        progress = self._followers[run.number].progress if run.number in self._followers else Progress()
        if progress.step_seconds is not None and planned.total_steps is not None:
            return max(_OVERDUE_SECONDS, (planned.total_steps - progress.step) * progress.step_seconds)
        return max(_OVERDUE_SECONDS, planned.seconds() - (time.time() - (run.started or time.time())))

    # -------------------------------------------------------------------------------------------------------------- view

    def _follow(self, running: list[StoredRun]) -> None:
        numbers = {run.number for run in running}
        for number in [each for each in self._followers if each not in numbers]:
            del self._followers[number]  # it has ended on another host
        for run in running:
            follower = self._followers.setdefault(
                run.number, LogFollower(launching.folder_of(self.settings, run.number))
            )
            peak = follower.look().peak_bytes
            if peak is not None and peak > (run.measured_peak_bytes or 0) and self._is_ours(run):
                self.store.measured(run.number, peak)

    def _show(self, running: list[StoredRun], found: Mapping[int, Turn]) -> None:
        self.view = View(
            turns=found,
            progress={run.number: self._followers[run.number].progress for run in running if run.number in self._followers},
            remaining={run.number: self._remaining(run) for run in running},
            devices={run.number: self.runner.ledger.devices(launching.name_of(run.number, run.part)) for run in running},
            used={name: self.runner.ledger.used(name) for name in self.settings.capacity},
            made=time.time(),
        )  # fmt: skip
