"""One host among those that share a store: which runs are its own, how the others know that it lives, and when they may have its runs.

Runs outlive their service, so a host that says nothing may still be running them. Each therefore has a lease: the host counts a beat in the store, then writes
into a file until when its runs may go on, LEASE seconds from before the beat. The watcher of each run reads that file (`memfit.runner.guard`): it tells the
run to end when the lease is over, and half a lease later kills what is left. A host that has seen no new beat of another for two leases has its runs. Between
the last beat and that moment the other host's runs were ended, whether that host is gone, has lost the store, or has a service that is gone alone.

Nobody compares times of different computers, or asks the store for one: each host measures with its own clock, which counts since boot, sleep included,
and cannot be set. What is assumed: these clocks go equally fast, to within a quarter, and nobody halts a watcher together with the one that watches it. A host
whose runs are others' by now (`epoch`) claims nothing, and each change of a run is made only if it still has that run.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.runner import guard
from memfit.service.settings import ServiceSettings
from memfit.service.states import FAILED, PLANNING, RUNNING, WAITING
from memfit.service.store import ServiceStore, StoredRun, add_event

_log = logging.getLogger("memfit.service")
MOVED: Final = "moved"  # the event of a run whose host was silent
_BEATS: Final = 5  # in one lease
_HELD: Final = (PLANNING, WAITING, RUNNING)  # states in which a run is some host's


class Host:
    """This one.

    Args:
        store: that is shared.
        settings: of its service.
        clock: seconds, as `memfit.runner.guard.since_boot`.
    """

    def __init__(
        self, store: ServiceStore, settings: ServiceSettings, clock: Callable[[], float] = guard.since_boot
    ) -> None:
        self.store, self.settings, self.clock = store, settings, clock
        self.name = settings.host
        self.taken = False  # whether the others have its runs: `begin` makes it one of them again
        self.begun = 0.0
        self._session = secrets.token_hex(8)
        self._epoch = 0
        self._in_file = 0.0  # seconds of the lease as the file has it
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        self._looked = -1e9

    @property
    def lease(self) -> Path:
        """The file that says until when runs may go on which are started now."""
        return self.settings.own / f"lease-{self._epoch}"

    # -------------------------------------------------------------------------------------------------------- being here

    def begin(self) -> None:
        """Be one of the hosts, after a start, or after the others have taken this one for dead.

        Raises:
            StoreError: the store cannot be written.
        """
        now, capacity = self.clock(), json.dumps(self.settings.capacity)
        with self.store.writing() as connection:
            row = connection.execute("SELECT epoch, lease_seconds FROM hosts WHERE name=?", (self.name,)).fetchone()
            epoch, declared = (1, self.settings.lease_seconds) if row is None else row
            if row is None:
                connection.execute(
                    "INSERT INTO hosts (name, epoch, session, beats, lease_seconds, capacity) VALUES (?, ?, ?, 1, ?, ?)",
                    (self.name, epoch, self._session, declared, capacity),
                )
            else:
                connection.execute(
                    "UPDATE hosts SET session=?, beats=beats+1, lease_seconds=?, capacity=? WHERE name=?",
                    (self._session, max(declared, self.settings.lease_seconds), capacity, self.name),
                )
        self._epoch, self._in_file = epoch, declared
        self._write(now)
        self.taken, self.begun = False, now

    @property
    def lives(self) -> bool:
        """Whether what is started now may go on: its last sign of life is no longer ago than a lease."""
        return not (self.taken or guard.Lease(str(self.lease)).is_over())

    def beat(self) -> None:
        """Say that this host is alive, and have its runs go on for as long again.

        Raises:
            InputError: the store cannot be written; or another service has this host's name.
        """
        now = self.clock()
        # Runs go on for as long as the file says, until it is written anew: the others have to wait for the longer of the two.
        seconds = max(self._in_file, self.settings.lease_seconds)
        with self.store.writing() as connection:
            query = "UPDATE hosts SET beats=beats+1, lease_seconds=? WHERE name=? AND epoch=? AND session=?"
            kept = connection.execute(query, (seconds, *self._me)).rowcount
        if kept:
            self._write(now)
        else:
            self.check()

    def check(self) -> None:
        """See whether the others have this host's runs.

        Raises:
            StoreError: the store cannot be read.
            InputError: another service has this host's name.
        """
        rows = self.store.read("SELECT epoch, session FROM hosts WHERE name=?", (self.name,))
        if rows and tuple(rows[0]) == (self._epoch, self._session):
            return
        if rows and rows[0]["session"] != self._session:
            raise InputError(
                f"another service has begun as host {self.name!r}, and this one does nothing more: give each host a name of its own (--host-name)"
            )
        self.taken = True

    def has_been_here(self) -> bool:
        """Whether it has been here for so long that what ran under its name elsewhere has ended."""
        return self.clock() - self.begun > 2 * self.settings.lease_seconds

    def serve(self, stopping: threading.Event) -> None:
        """Beat until told to stop."""
        wait = 0.0
        while not stopping.wait(wait):
            wait = self.settings.lease_seconds / _BEATS
            try:
                if not self.taken:
                    self.beat()
            except (InputError, OSError) as error:
                _log.error("no sign of life could be given: %s", error)
                wait = min(wait, 1.0)

    @property
    def _me(self) -> tuple[str, int, str]:
        return self.name, self._epoch, self._session

    def _write(self, now: float) -> None:
        seconds = self.settings.lease_seconds
        self.lease.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guard.write_lease(str(self.lease), now + seconds, now + 1.5 * seconds)
        self._in_file = seconds

    # -------------------------------------------------------------------------------------------------- whose is what

    def claims(self, run: StoredRun) -> bool:
        """Have a run that no host has, as it was read; whether that was so."""
        return self._claims("runs", run.number, "state=? AND part=? AND asked=''", run.state, run.part)

    def claims_study(self, number: int) -> bool:
        """Have a study that no host has; whether that was so."""
        return self._claims("studies", number, "state='running'")

    def _claims(self, table: str, number: int, still: str, *values: Any) -> bool:
        with self.store.writing() as connection:
            query = (
                f"UPDATE {table} SET host=? WHERE number=? AND host='' AND {still} "  # noqa: S608 - our own words
                "AND EXISTS (SELECT 1 FROM hosts WHERE name=? AND epoch=? AND session=?)"
            )
            return bool(connection.execute(query, (self.name, number, *values, *self._me)).rowcount)

    def capacities(self) -> list[Mapping[str, int]]:
        """Bytes on each device and tier, of each host that there has been."""
        rows = self.store.read("SELECT name, capacity FROM hosts ORDER BY name")
        return [self.settings.capacity, *(json.loads(text) for name, text in rows if name != self.name)]

    # ---------------------------------------------------------------------------------------------------- the other ones

    def look(self) -> list[str]:
        """Have the runs of hosts that are silent go on elsewhere; the names of those hosts.

        Raises:
            StoreError: the store cannot be used.
            InputError: another service has this host's name.
        """
        now = self.clock()
        if now - self._looked < min(1.0, self.settings.lease_seconds / _BEATS):
            return []
        self._looked, silent = now, []
        self.check()
        if self.taken:
            return []
        query = "SELECT name, epoch, beats, lease_seconds FROM hosts WHERE name<>?"
        for name, epoch, beats, seconds in self.store.read(query, (self.name,)):
            beat, (seen, since) = (epoch, beats), self._seen.get(name, ((0, 0), 0.0))
            if beat != seen:
                # From after it was read: it may have been given at the last moment of a look that took long.
                self._seen[name] = (beat, self.clock())
            elif now - since > 2 * seconds and self._take(name, beat, seconds):
                silent.append(name)
        return silent

    def _take(self, name: str, beat: tuple[int, int], seconds: float) -> bool:
        """Take a host's runs and studies from it, if it has any, and has not beaten meanwhile."""
        held = f"host=? AND state IN ({', '.join('?' * len(_HELD))})"
        if not self.store.read(f"SELECT 1 FROM runs WHERE {held} LIMIT 1", (name, *_HELD)) and not self.store.read(  # noqa: S608 - as above
            "SELECT 1 FROM studies WHERE host=? AND state='running' LIMIT 1", (name,)
        ):
            return False
        with self.store.writing() as connection:
            query = "UPDATE hosts SET epoch=epoch+1 WHERE name=? AND epoch=? AND beats=?"
            if not connection.execute(query, (name, *beat)).rowcount:
                return False
            rows = connection.execute(f"SELECT number, state FROM runs WHERE {held}", (name, *_HELD)).fetchall()  # noqa: S608 - as above
            for number, state in rows:
                (moves,) = connection.execute(
                    "SELECT COUNT(*) FROM events WHERE run=? AND kind=?", (number, MOVED)
                ).fetchone()
                why = f"host {name} has said nothing for {2 * seconds:g} s, so what it ran has ended there"
                if state == RUNNING and moves >= self.settings.restarts:
                    why = f"{why}; {last_of(moves + 1, 'host')}"
                    change = "state=?, reason=?, asked='', ended=?"
                    values: tuple[Any, ...] = (FAILED, why, time.time())
                    kind = FAILED
                elif state == PLANNING:
                    change, values, kind = "host=''", (), MOVED
                    why = f"{why}: it is planned anew"
                else:
                    # A part that was about to start there has used its number up.
                    change = "host='', state=?, reason=?, part=part+?"
                    why = (
                        f"{why}: it waits for its turn"
                        if state == WAITING
                        else f"{why}: it goes on from its last snapshot"
                    )
                    values, kind = (WAITING, why, int(state == WAITING)), MOVED
                connection.execute(f"UPDATE runs SET {change} WHERE number=?", (*values, number))  # noqa: S608 - as above
                add_event(connection, number, kind, why)
            connection.execute("UPDATE studies SET host='' WHERE host=? AND state='running'", (name,))
        _log.error("host %s has said nothing for %g s: its %d runs go on elsewhere", name, 2 * seconds, len(rows))
        return True


def last_of(lost: int, what: str) -> str:
    """Why a run that has lost so many hosts, or machines, has failed."""
    ordinal = {1: "first", 2: "second", 3: "third"}.get(lost, f"{lost}th")
    return f"this is the {ordinal} {what} that this run has lost, and it is not started on another"
