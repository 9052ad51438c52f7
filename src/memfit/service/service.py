"""What can be asked of the service, as functions: REST, the command line and the tests are views of these. None of them waits for a run."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Final

import yaml

from memfit.errors import InputError
from memfit.runner import RunRequest
from memfit.service import exports, launching
from memfit.service.dispatcher import Dispatcher
from memfit.service.own_folder import files_inside, open_inside
from memfit.service.plan_answers import MOST_PLAN_BYTES
from memfit.service.refusals import DrainingError, NotAllowedError, NotKnownError, NotNowError, Refusal, TooLargeError
from memfit.service.settings import ServiceSettings
from memfit.service.states import LIVE, OVER, PAUSED, PLANNING, RUNNING, WAITING
from memfit.service.store import Event, ServiceStore, StoredRun
from memfit.service.submission import checked
from memfit.service.tokens import Caller, Tokens
from memfit.service.uploads import Upload, unpack
from memfit.units import format_bytes
from memfit.values.plan import Plan

_STRIP_SECONDS: Final = 1800.0  # of the past that the strip of a device shows
_KEY: Final = re.compile(r"[\x21-\x7e]{1,128}")
_MOST_NAME: Final = 80
_COLUMNS: Final = tuple(each.name for each in fields(StoredRun))


@dataclass(frozen=True, slots=True)
class Submission:
    """What somebody sends.

    Attributes:
        config: content of a run file.
        name: to call it by; "" for its number.
        code: digest of uploaded code; None without.
        priority: higher goes first; above 0 is for admins.
        plan_only: find out whether it fits, and run nothing.
        key: the same submission under the same key, sent twice, is one run; None for none.
    """

    config: Mapping[str, Any]
    name: str = ""
    code: str | None = None
    priority: int = 0
    plan_only: bool = False
    key: str | None = None


class Service:
    """One service: its store, its tokens, and what its dispatcher shows."""

    def __init__(self, settings: ServiceSettings, store: ServiceStore, dispatcher: Dispatcher) -> None:
        self.settings, self.store, self.dispatcher = settings, store, dispatcher
        self.tokens = Tokens(store)

    # ----------------------------------------------------------------------------------------------------------- submit

    def upload(self, caller: Caller, archive: Path) -> Upload:
        """Take code: a zip archive of a folder.

        Raises:
            Refusal, TooLargeError: see `memfit.service.uploads`.
            NotAllowedError: they may not submit.
        """
        caller.check_submits()
        with archive.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        ((sent,),) = self.store.read("SELECT COUNT(*) FROM uploads WHERE owner=?", (caller.name,))
        known = self._has_uploaded(caller.name, digest)
        if sent >= self.settings.uploads and not known:
            raise TooLargeError(f"{caller.name} has sent {sent} folders of code, and {self.settings.uploads} are kept")
        folder = launching.code_of(self.settings, digest)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = unpack(archive, folder, self.settings.upload)
        with self.store.writing() as connection:
            connection.execute(
                "INSERT INTO uploads (digest, owner, bytes, files, made) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (digest, caller.name, found.bytes, found.files, time.time()),
            )
        return found

    def submit(self, caller: Caller, sent: Submission) -> tuple[StoredRun, bool]:
        """Have a run planned and, where it fits, run.

        Returns:
            The run, and whether it is new: under a key that is known it is the one from before.

        Raises:
            ConfigError, Refusal: the run file cannot be meant, or may not be run here.
            NotAllowedError: they may not submit, or not with this priority.
            NotNowError: the key is known, and was for something else; or the service is about to end.
            TooLargeError: they have too many runs that are not over.
        """
        digest = self.check_submission(caller, sent)
        if sent.key is not None and (before := self.store.by_key(caller.name, sent.key)) is not None:
            return self._same(before, digest), False
        config = checked(sent.config, self.code_folder(caller, sent.code), self.everywhere)
        ((live,),) = self.store.read(
            f"SELECT COUNT(*) FROM runs WHERE owner=? AND state IN ({', '.join('?' * len(LIVE))})",  # noqa: S608 - marks alone
            (caller.name, *LIVE),
        )
        if live >= self.settings.live_runs:
            raise TooLargeError(
                f"{caller.name} has {live} runs that are not over, and {self.settings.live_runs} are taken"
            )
        columns = {
            "owner": caller.name,
            "name": sent.name,
            "key": sent.key,
            "digest": digest,
            "config": config,
            "code": sent.code,
        }
        try:
            return self.store.add({**columns, "priority": sent.priority, "plan_only": int(sent.plan_only)}), True
        except Exception:
            # Sent twice at the same moment: the other one was first.
            before = None if sent.key is None else self.store.by_key(caller.name, sent.key)
            if before is None:
                raise
            return self._same(before, digest), False

    @property
    def everywhere(self) -> ServiceSettings:
        """The settings, with the most bytes that any of the hosts has on each device and tier."""
        host = self.dispatcher.host
        if host is None:
            return self.settings
        capacity: dict[str, int] = {}
        for each in host.capacities():
            capacity |= {name: max(size, capacity.get(name, 0)) for name, size in each.items()}
        return replace(self.settings, capacity=capacity)

    def check_submission(self, caller: Caller, sent: Submission) -> str:
        """What holds of a run and of a study: who submits, under which name, key and priority; a digest of what was sent.

        Raises:
            NotAllowedError, NotNowError, Refusal: as for `submit`.
        """
        caller.check_submits()
        if self.dispatcher.draining:
            raise DrainingError("the service takes no runs now: it is being drained, or about to end")
        self._check_quota(caller.name)
        if sent.priority > 0 and caller.role != "admin":
            raise NotAllowedError(f"priority {sent.priority}: above 0 is for admins")
        if not -100 <= sent.priority <= 100:
            raise Refusal(f"priority {sent.priority}: it is from -100 to 100")
        if sent.key is not None and not _KEY.fullmatch(sent.key):
            raise Refusal("an idempotency key has 1 to 128 visible ASCII characters")
        if len(sent.name) > _MOST_NAME or not (sent.name.isprintable() or not sent.name):
            raise Refusal(f"a name has at most {_MOST_NAME} printable characters")
        told = {**asdict(sent), "config": sent.config, "key": None}
        try:
            content = json.dumps(told, sort_keys=True, default=str, allow_nan=False)
        except ValueError:
            raise Refusal("the run file holds NaN or an infinity, for which JSON has no word: leave it out") from None
        return hashlib.sha256(content.encode()).hexdigest()

    def _check_quota(self, owner: str) -> None:
        quota = self.settings.owner_disk_bytes
        if quota is None or (used := self.store.disk_by_owner().get(owner, 0)) < quota:
            return
        raise TooLargeError(
            f"the files of {owner}'s runs take {format_bytes(used)}, and {format_bytes(quota)} are allowed: remove some (memfit runs N --remove)"
        )

    def drain(self, caller: Caller, *, on: bool) -> int:
        """Take and start nothing new, or do so again; what runs goes on.

        Returns:
            How many runs run.

        Raises:
            NotAllowedError: they are no admin.
        """
        if caller.role != "admin":
            raise NotAllowedError("to drain the service is for admins")
        self.dispatcher.draining = on
        return self.store.numbers_by_state().get(RUNNING, 0)

    @staticmethod
    def _same(before: StoredRun, digest: str) -> StoredRun:
        if before.digest != digest:
            raise NotNowError(
                f"this idempotency key belongs to run {before.number}, which is another one: use a new key"
            )
        return before

    def code_folder(self, caller: Caller, digest: str | None) -> Path | None:
        """Where uploaded code is; None where none is named.

        Raises:
            NotKnownError: they have not sent it.
        """
        if digest is None:
            return None
        folder = launching.code_of(self.settings, digest) if re.fullmatch(r"[0-9a-f]{64}", digest) else None
        if folder is None or not self._has_uploaded(caller.name, digest) or not folder.is_dir():
            raise NotKnownError(f"there is no uploaded code {digest[:80]!r}: send the folder first")
        return folder

    def _has_uploaded(self, owner: str, digest: str) -> bool:
        return bool(self.store.read("SELECT 1 FROM uploads WHERE owner=? AND digest=?", (owner, digest)))

    # -------------------------------------------------------------------------------------------------------------- ask

    def run(self, caller: Caller, number: int) -> StoredRun:
        """One run.

        Raises:
            NotKnownError: there is none, or they may not see it.
        """
        return StoredRun.of_row(self.row(caller, number))

    def row(self, caller: Caller, number: int) -> Any:
        """One run, as the store has it.

        Raises:
            NotKnownError: as for `run`.
        """
        try:
            found = self.store.row(number)
        except (KeyError, OverflowError):
            raise NotKnownError(f"there is no run {number}") from None
        if caller.sees not in {None, found["owner"]}:
            raise NotKnownError(f"there is no run {number}")
        return found

    def runs(
        self, caller: Caller, states: Sequence[str] = (), before: int | None = None, limit: int = 100
    ) -> list[StoredRun]:
        """Runs, the newest first, as many as they may see.

        Raises:
            Refusal: there is no such state.
        """
        return [StoredRun.of_row(row) for row in self.rows(caller, states, before, limit)]

    def rows(
        self, caller: Caller, states: Sequence[str] = (), before: int | None = None, limit: int = 100
    ) -> list[Any]:
        """The same, as the store has them.

        Raises:
            Refusal: as for `runs`.
        """
        unknown = [state for state in states if state not in (*LIVE, *OVER)]
        if unknown:
            raise Refusal(f"there is no state {unknown[0]!r}; there are {', '.join((*LIVE, *OVER))}")
        return self.store.newest("runs", caller.sees, states, before, limit)

    def events(self, caller: Caller, number: int, after: int = 0) -> list[Event]:
        """What happened to a run, with reasons.

        Raises:
            NotKnownError: as for `run`.
        """
        return self.store.events(self.run(caller, number).number, after)

    def words(self, caller: Caller, number: int) -> str:
        """The plan in words; why there is none, where there is none.

        Raises:
            NotKnownError: as for `run`.
        """
        run = self.run(caller, number)
        if run.plan is None:
            return run.reason if run.state != PLANNING else "It is being planned."
        try:
            with open_inside(self.folder(run), "plan.json") as stream:
                content = stream.read(MOST_PLAN_BYTES + 1)  # the run may have written it anew
            return Plan.from_json(json.loads(content)).explain() if len(content) <= MOST_PLAN_BYTES else run.reason
        except (InputError, ValueError, OSError, RecursionError):
            return run.reason

    def exported(self, caller: Caller, number: int, kind: str, image: str = "") -> str:
        """A run for another scheduler, with the bytes of its plan: a batch script of Slurm, or a TrainJob as YAML.

        Raises:
            NotKnownError: as for `run`.
            NotNowError: it has no plan.
            Refusal: there is no such kind, or a TrainJob without an image.
        """
        run = self.run(caller, number)
        if kind not in exports.KINDS:
            raise Refusal(f"there is no export {kind!r}; there are {', '.join(exports.KINDS)}")
        if run.plan is None:
            raise NotNowError(f"run {number} is {run.state} and has no plan: what it takes is not known")
        name, needs = run.name or f"memfit-run-{number}", exports.Needs.of(run.plan)
        if kind == "slurm":
            return exports.slurm(run.config, name, needs)
        if not image:
            raise Refusal("a TrainJob needs an image: that of a container with memfit, and the run's code and data")
        return str(yaml.safe_dump(exports.train_job(run.config, name, needs, image), sort_keys=False))

    def output(self, caller: Caller, number: int, *, errors: bool = True) -> Path:
        """The file with what a run prints: to standard error, where progress goes, or to standard output.

        Raises:
            NotKnownError: as for `run`.
        """
        run = self.run(caller, number)
        folder = launching.output_of(self.settings, launching.name_of(run.number, run.part))
        return folder / ("stderr" if errors else "stdout")

    def artifacts(self, caller: Caller, number: int) -> Iterator[tuple[str, int]]:
        """Files that a run has written, with their bytes.

        Raises:
            NotKnownError: as for `run`.
        """
        return files_inside(self.folder(self.run(caller, number)), "out")

    def artifact(self, caller: Caller, number: int, name: str) -> IO[bytes]:
        """One of them, open.

        Raises:
            NotKnownError: as for `run`; or there is no such file.
        """
        folder = self.folder(self.run(caller, number))
        if not folder.is_dir() or name.startswith("/"):
            raise NotKnownError(f"there is no file {name!r}")
        return open_inside(folder, f"out/{name}")

    def folder(self, run: StoredRun) -> Path:
        """Where all of a run is."""
        return launching.folder_of(self.settings, run.number)

    # ----------------------------------------------------------------------------------------------------------- change

    def cancel(self, caller: Caller, number: int) -> StoredRun:
        """Have a run end for good; one that is over stays as it is.

        Raises:
            NotKnownError, NotAllowedError: they may not see it, or not change it.
        """
        run = self._changeable(caller, number)
        if run.state in OVER or run.asked == "cancel":
            return run
        self.store.change(number, "cancel", f"asked by {caller.name}", if_still={"ended": None}, asked="cancel")
        return self.store.run(number)

    def pause(self, caller: Caller, number: int) -> StoredRun:
        """Have a run stop with a snapshot and give its bytes back.

        Raises:
            NotKnownError, NotAllowedError: as for `cancel`.
            NotNowError: it is over, or is not planned yet.
        """
        run = self._changeable(caller, number)
        if run.state == PAUSED or run.asked == "pause":
            return run
        still = {"ended": None, "asked": ""}
        if run.state not in {WAITING, RUNNING} or not self.store.change(
            number, "pause", f"asked by {caller.name}", if_still=still, asked="pause"
        ):
            raise NotNowError(f"run {number} is {self.store.run(number).state}: what waits or runs can be paused")
        return self.store.run(number)

    def resume(self, caller: Caller, number: int) -> StoredRun:
        """Put a paused run back into the queue; it goes on from its last snapshot.

        Raises:
            NotKnownError, NotAllowedError: as for `cancel`.
            NotNowError: it is not paused.
            TooLargeError: its owner has too much on the disk.
        """
        run = self._changeable(caller, number)
        self._check_quota(run.owner)
        why = f"resumed by {caller.name}"
        paused = run.state == PAUSED
        if not (paused and self.store.move(run, WAITING, why, state=WAITING, reason=why, asked="", host="")):
            raise NotNowError(f"run {number} is {self.store.run(number).state}: what is paused can be resumed")
        return self.store.run(number)

    def _changeable(self, caller: Caller, number: int) -> StoredRun:
        run = self.run(caller, number)
        if not caller.may_change(run.owner):
            raise NotAllowedError(f"run {number} is of {run.owner}, and this token may not change it")
        return run

    # ------------------------------------------------------------------------------------------------------------- view

    def described(self, run: StoredRun) -> dict[str, Any]:
        """A run as plain data, with how it stands now."""
        return self.described_columns({name: getattr(run, name) for name in _COLUMNS})

    def described_columns(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """The same of the columns of its row; of those that hold JSON, `plan` and `refusal` are read."""
        view, number = self.dispatcher.view, run["number"]
        turn, progress = view.turns.get(number), view.progress.get(number)
        waits = run["state"] == WAITING and turn is not None
        expected = view.made + turn.seconds if waits and turn is not None and turn.seconds is not None else None
        remaining = view.remaining.get(number) if run["state"] == RUNNING else None
        return {
            "run": number,
            "name": run["name"] or f"run {number}",
            "owner": run["owner"],
            "state": run["state"],
            "asked": run["asked"],
            "reason": turn.reason
            if waits and turn is not None and turn.reason
            else run["reason"] or "whether it fits is being found out",
            "priority": run["priority"],
            "plan_only": bool(run["plan_only"]),
            "submitted": run["submitted"],
            "started": run["started"],
            "ended": run["ended"],
            "expected_start": expected,
            "expected_end": None if remaining is None else view.made + remaining,
            "plan": run["plan"],
            "refusal": run["refusal"],
            "measured_peak_bytes": run["measured_peak_bytes"],
            "step": None if progress is None else progress.step,
            "loss": None if progress is None else progress.loss,
            "parts": run["part"],
            "host": run["host"],
            "study": run["study"],
            "disk_bytes": run["disk_bytes"],
            "removed": run["removed"],
            "kept_until": self._kept_until(run["ended"], run["removed"]),
        }

    def _kept_until(self, ended: float | None, removed: float | None) -> float | None:
        days = self.settings.keep_days
        return None if days is None or ended is None or removed is not None else ended + days * 86400

    def devices(self, caller: Caller) -> list[dict[str, Any]]:
        """Each device and tier, with the runs on it over time: those that ended of late, those that run, those that wait for their turn.

        Runs that the caller may not see have no name and no number.
        """
        view, now = self.dispatcher.view, time.time()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.settings.capacity}
        for run in [*self.store.ended_since(now - _STRIP_SECONDS), *self.store.live()]:
            if run.state != WAITING and run.host != self.settings.host:
                continue  # its devices are another host's
            plan = run.plan or {}
            seen = caller.sees in {None, run.owner}
            turn = view.turns.get(run.number)
            if run.state == WAITING:
                if turn is None or turn.seconds is None:
                    continue
                begin, devices = now + turn.seconds, turn.devices
                end = begin + turn.lasts
            elif run.started is not None and run.state != PAUSED:
                begin, devices = run.started, view.devices.get(run.number, ())
                end = run.ended or now + view.remaining.get(run.number, 0.0)
            else:
                continue
            ranks = plan.get("rank_bytes", [])
            tiers = self.settings.ledger.named(RunRequest("", (), peak_bytes=plan.get("tiers", {})), devices).peak_bytes
            used: dict[str, int] = {name: size for name, size in tiers.items() if name in found}
            for name, size in zip(devices or _devices_of(run), ranks, strict=False):
                used[name] = used.get(name, 0) + size
            for name, size in used.items():
                if name in found:
                    shown = {
                        "run": run.number if seen else None,
                        "name": (run.name or f"run {run.number}") if seen else "somebody's",
                    }
                    measured = run.measured_peak_bytes if seen and len(ranks) == 1 else None
                    found[name].append(
                        {
                            **shown,
                            "state": run.state,
                            "from": begin,
                            "to": end,
                            "bytes": size,
                            "measured_bytes": measured,
                        }
                    )
        return [
            {"name": name, "capacity_bytes": size, "used_bytes": view.used.get(name, 0), "runs": found[name]}
            for name, size in self.settings.capacity.items()
        ]


def _devices_of(run: StoredRun) -> tuple[str, ...]:
    """Where a run that is over was, as far as its plan says it."""
    plan = run.plan or {}
    kind, ranks = plan.get("device", "cpu"), plan.get("rank_bytes", [])
    return ("cpu",) * len(ranks) if kind == "cpu" else tuple(f"{kind}:{number}" for number in range(len(ranks)))
