"""Studies: searches whose trials are runs of the service. What can be asked of them, and the loop that goes on with each."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Final

import yaml

from memfit.errors import InfeasibleError, InputError
from memfit.service import launching
from memfit.service.own_folder import open_inside
from memfit.service.refusals import NotAllowedError, NotKnownError, NotNowError, Refusal, TooLargeError
from memfit.service.service import Service, Submission
from memfit.service.settings import ServiceSettings
from memfit.service.states import OVER
from memfit.service.stored_studies import STUDY_LIVE, STUDY_OVER, StoredStudy, StudyStore
from memfit.service.study_trials import ServiceTuning, StudyTrials, key_of
from memfit.service.submission import checked
from memfit.service.tokens import Caller
from memfit.train import durable
from memfit.tune.page import page
from memfit.tune.results import BEST_NAME, CSV_NAME, PAGE_NAME, Results, as_csv, results
from memfit.tune.sampling import pruner_of, sampler_of
from memfit.tune.search import Named, Search, read_search
from memfit.tune.space import Choices, corners
from memfit.tune.trials import name_of

_log = logging.getLogger("memfit.service")
TRIALS: Final = "trials.json"
FILES: Final = (CSV_NAME, BEST_NAME, PAGE_NAME)
_LOOK_SECONDS: Final = 0.5
_MOST_TRIALS: Final = 10_000
_MOST_OPTION: Final = 10_000  # a number among the options of a sampler: some are sizes of what it makes in memory
_CORNERS: Final = 64  # of a space, that are checked when it is submitted; every trial is when it begins
_MOST_STUDIES: Final = 20  # of one owner that are not over
# What a search file may say for one computer, and what the service decides here.
_NOT_HERE: Final = ("command", "metrics", "memory", "cluster", "store", "study", "warm_start", "out", "budget", "devices", "host_budget", "disk_budget",
                    "timeout", "silence", "grace", "heartbeat", "ranks", "device")  # fmt: skip


class Studies:
    """The studies of one service.

    Args:
        service: whose runs their trials are.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.store = StudyStore(service.store)
        self._tunings: dict[int, ServiceTuning] = {}
        self._shown: dict[int, Any] = {}

    # ------------------------------------------------------------------------------------------------------------- asked

    def submit(self, caller: Caller, sent: Submission) -> tuple[StoredStudy, bool]:
        """Have what a search file describes searched.

        Returns:
            The study, and whether it is new: under a key that is known it is the one from before.

        Raises:
            ConfigError, Refusal: the file cannot be meant, or says what the service decides.
            NotAllowedError, NotNowError, TooLargeError: as for `Service.submit`.
        """
        digest = self.service.check_submission(caller, sent)
        if sent.plan_only:
            raise Refusal("plan_only is of runs: the trials of a study are planned before they start anyway")
        if sent.key is not None and (before := self.store.by_key(caller.name, sent.key)) is not None:
            return _same(before, digest), False
        code = self.service.code_folder(caller, sent.code)
        config = checked_search(sent.config, code, self.service.everywhere)
        if len(self.store.listed(owner=caller.name, states=STUDY_LIVE, limit=_MOST_STUDIES)) >= _MOST_STUDIES:
            raise TooLargeError(f"{caller.name} has {_MOST_STUDIES} studies that are not over, as many as are taken")
        columns = {
            "owner": caller.name, "name": sent.name, "key": sent.key, "digest": digest, "config": config, "code": sent.code,
            "priority": sent.priority, "reason": "it has begun",
        }  # fmt: skip
        try:
            return self.store.add(columns), True
        except Exception:
            before = None if sent.key is None else self.store.by_key(caller.name, sent.key)
            if before is None:
                raise
            return _same(before, digest), False  # sent twice at the same moment

    def study(self, caller: Caller, number: int) -> StoredStudy:
        """One study.

        Raises:
            NotKnownError: there is none, or they may not see it.
        """
        try:
            found = self.store.study(number)
        except (KeyError, OverflowError):
            raise NotKnownError(f"there is no study {number}") from None
        if caller.sees not in {None, found.owner}:
            raise NotKnownError(f"there is no study {number}")
        return found

    def studies(
        self, caller: Caller, states: Sequence[str] = (), before: int | None = None, limit: int = 100
    ) -> list[StoredStudy]:
        """Studies, the newest first, as many as they may see.

        Raises:
            Refusal: there is no such state.
        """
        unknown = [state for state in states if state not in (*STUDY_LIVE, *STUDY_OVER)]
        if unknown:
            raise Refusal(f"there is no state {unknown[0]!r}; there are {', '.join((*STUDY_LIVE, *STUDY_OVER))}")
        return self.store.listed(owner=caller.sees, states=states, before=before, limit=limit)

    def cancel(self, caller: Caller, number: int) -> StoredStudy:
        """Have a study end, with all of its trials; one that is over stays as it is.

        Raises:
            NotKnownError, NotAllowedError: they may not see it, or not change it.
        """
        found = self.study(caller, number)
        if not caller.may_change(found.owner):
            raise NotAllowedError(f"study {number} is of {found.owner}, and this token may not change it")
        if found.state not in STUDY_OVER and not found.asked:
            self.store.change(number, asked="cancel", reason=f"to be cancelled, asked by {caller.name}")
        return self.store.study(number)

    def trials(self, caller: Caller, number: int) -> list[dict[str, Any]]:
        """The trials of a study, in their order: values, what came of each, and its run.

        Raises:
            NotKnownError: as for `study`.
        """
        found = self.study(caller, number)
        try:
            content = json.loads((self.folder(found) / TRIALS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        assert isinstance(content, list)
        return content

    def files(self, caller: Caller, number: int) -> Iterator[tuple[str, int]]:
        """What it has written so far: the trials as CSV, the best run file, a report."""
        folder = self.folder(self.study(caller, number))
        return ((name, (folder / name).stat().st_size) for name in FILES if (folder / name).is_file())

    def file(self, caller: Caller, number: int, name: str) -> IO[bytes]:
        """One of them, open.

        Raises:
            NotKnownError: as for `study`; or there is no such file.
        """
        folder = self.folder(self.study(caller, number))
        if name not in FILES or not folder.is_dir():
            raise NotKnownError(f"there is no file {name!r}")
        return open_inside(folder, name)

    def described(self, study: StoredStudy) -> dict[str, Any]:
        """A study as plain data."""
        search = study.config["search"]
        return {
            "study": study.number,
            "name": study.name or f"study {study.number}",
            "owner": study.owner,
            "state": study.state,
            "asked": study.asked,
            "reason": study.reason,
            "priority": study.priority,
            "trials_asked": search.get("trials", 20),
            "states": (study.summary or {}).get("states", {}),
            "objectives": (study.summary or {}).get("objectives", []),
            "best": (study.summary or {}).get("best", []),
            "submitted": study.submitted,
            "ended": study.ended,
        }

    def folder(self, study: StoredStudy) -> Path:
        """Where its store and results are; its trials are where runs are."""
        return self.service.settings.folder / "studies" / f"{study.number:06d}"

    # ---------------------------------------------------------------------------------------------------------- the loop

    def serve(self, stopping: threading.Event) -> None:
        """Go on with each study until told to stop."""
        while not stopping.wait(_LOOK_SECONDS):
            try:
                self.look()
            except (InputError, OSError) as error:
                _log.error("studies cannot go on for now: %s", error)
        self.close()

    def look(self) -> None:
        """Once: each study asks for trials, and is told what became of those before."""
        if self.service.dispatcher.draining:
            return
        for study in reversed(self.store.listed(owner=None, states=STUDY_LIVE, limit=10_000)):
            if not self._is_ours(study):
                self._let_go(study.number)
                continue
            try:
                self._go_on(study)
            except InfeasibleError as error:
                self._over(study, "refused", str(error))
            except (InputError, OSError) as error:
                if isinstance(error, InputError) and not str(error).startswith(("cannot write", "the store")):
                    self._over(study, "failed", str(error))
                else:
                    _log.error("study %d cannot go on for now: %s", study.number, error)
            except Exception as error:  # noqa: BLE001 - whatever a search file has made happen ends its own study alone
                _log.exception("study %d has failed", study.number)
                self._over(study, "failed", f"{type(error).__name__}: {str(error)[:300]}")

    def _is_ours(self, study: StoredStudy) -> bool:
        """Whether this host goes on with a study; of several that share a store one does."""
        host = self.service.dispatcher.host
        return host is None or study.host == host.name or (not study.host and host.claims_study(study.number))

    def _let_go(self, number: int) -> None:
        tuning = self._tunings.pop(number, None)
        if tuning is not None:
            tuning.close()
        self._shown.pop(number, None)

    def _go_on(self, study: StoredStudy) -> None:
        if study.asked == "cancel":
            self._over(study, "cancelled", "cancelled")
            return
        tuning = self._tunings.get(study.number) or self._opened(study)
        more = tuning.step(0.0)
        self._show(study, tuning)
        if not more:
            states = (self.store.study(study.number).summary or {}).get("states", {})
            told = ", ".join(f"{number} {state}" for state, number in states.items())
            self._over(study, "done", told)

    def _opened(self, study: StoredStudy) -> ServiceTuning:
        folder = self.folder(study)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        code = None if study.code is None else launching.code_of(self.service.settings, study.code)
        search = searched(study.config, code or self.service.settings.folder / "nowhere", folder, study.number)
        tuning = ServiceTuning(search, StudyTrials(self.service, study, search, folder))
        self._tunings[study.number] = tuning
        return tuning

    def _over(self, study: StoredStudy, state: str, why: str) -> None:
        for run in self.service.store.of_study(study.number):
            if run.state not in OVER and run.asked != "cancel":
                self.service.store.change(run.number, "cancel", "its study is over", asked="cancel")
        self._let_go(study.number)
        self.store.change(study.number, state=state, reason=why, asked="", ended=time.time())

    def _show(self, study: StoredStudy, tuning: ServiceTuning) -> None:
        """Write down how it stands, where that has changed."""
        found = results(tuning.search, tuning.study)
        now = [(row.number, row.state, row.values) for row in found.rows]
        if now == self._shown.get(study.number):
            return
        folder, states = self.folder(study), sorted({row.state for row in found.rows})
        runs = {run.key: run.number for run in self.service.store.of_study(study.number)}
        rows = [
            {**asdict(row), "values": _finite(row.values), "run": runs.get(key_of(study, name_of(row.number)))}
            for row in found.rows
        ]
        durable.rewrite(folder / TRIALS, json.dumps(rows))
        durable.rewrite(folder / CSV_NAME, as_csv(found))
        durable.rewrite(folder / PAGE_NAME, page(found, self.service.settings.capacity))
        if found.best:
            durable.rewrite(folder / BEST_NAME, yaml.safe_dump(_best(found), sort_keys=False))
        summary = {
            "states": {state: found.count(state) for state in states},
            "objectives": [[each.name, each.direction] for each in tuning.search.config.objectives],
            "best": [{"trial": row.number, "values": _finite(row.values), "params": row.params} for row in found.best],
        }
        told = found.rows[-1].why if found.rows and found.rows[-1].why else "trials are planned and run"
        self.store.change(study.number, summary=summary, reason=told)
        self._shown[study.number] = now

    def close(self) -> None:
        """Let go of the studies; their runs go on, and so do they with the next service of the folder."""
        for tuning in self._tunings.values():
            tuning.close()
        self._tunings.clear()


def checked_search(config: Any, code: Path | None, settings: ServiceSettings) -> dict[str, Any]:
    """A search file as it is kept: with nothing in it that a study of the service may not say.

    Args:
        config: the content of the file, sections by name.
        code: folder of the uploaded code; None without.
        settings: of the service.

    Raises:
        ConfigError: it cannot be meant.
        Refusal: it says what the service decides, or names what runs here may not read.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("search"), Mapping):
        raise Refusal("a study needs a search file: the sections of a run file, and search (docs/tuning.md)")
    if "folder" in config:
        raise Refusal("folder: the service has folders of its own; leave it out")
    told = {name: value for name, value in config["search"].items() if value is not None}
    theirs = [name for name in _NOT_HERE if name in told]
    if theirs:
        raise Refusal(
            f"search.{theirs[0]}: on a service the trials are runs of memfit, where and in what bytes the service decides; leave it out"
            f" (memfit submit --set search.{theirs[0]}=null)"
        )
    content = {**config, "search": told}
    root = code or settings.folder / "nowhere"
    search = searched(content, root, settings.folder / "studies", 0)
    _check_sizes(search)
    sampler_of(search, 0)
    pruner_of(search)
    for values in corners(search.space, _CORNERS):
        run = search.run_with(values)
        del run["folder"]
        checked(run, code, settings)
    return content


def searched(config: Mapping[str, Any], root: Path, folder: Path, number: int) -> Search:
    """The search of a study, whose trials read from a folder of code and whose results are in another."""
    search = read_search(config, root, f"study-{number}")
    return replace(search, config=replace(search.config, out=str(folder)))


def _check_sizes(search: Search) -> None:
    """What would take the service's own time or memory."""
    if search.config.trials > _MOST_TRIALS:
        raise TooLargeError(f"search.trials: {search.config.trials}, and {_MOST_TRIALS} are taken")
    for key in ("sampler", "pruner"):
        named = getattr(search.config, key)
        named = named if isinstance(named, Named) else Named(named)
        if named.name == "gp":
            raise Refusal("search.sampler: gp needs torch, which the service does not load: take tpe")
        large = [name for name, value in named.options.items() if _size(value) > _MOST_OPTION]
        if large:
            raise TooLargeError(f"search.{key}.options.{large[0]}: {_MOST_OPTION} at most on a service")
        if named.name == "grid":
            points = math.prod(
                len(each.values) if isinstance(each, Choices) else (each.high - each.low) / (each.step or 1) + 1
                for each in search.space.values()
            )
            if points > _MOST_TRIALS:
                raise TooLargeError(f"search.space has {points:.0f} points, and a grid of {_MOST_TRIALS} is taken")


def _size(value: object) -> float:
    """Of a number, which may stand in quotes; 0 of anything else."""
    try:
        return abs(float(str(value)))
    except ValueError:
        return 0.0


def _best(found: Results) -> dict[str, Any]:
    """The run file of the best trial, as it can be submitted again."""
    config = found.best_run
    train = {name: value for name, value in config.get("train", {}).items() if name != "out"}
    return {**{name: value for name, value in config.items() if name != "folder"}, "train": train}


def _finite(values: Sequence[float] | None) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values or ()]


def _same(before: StoredStudy, digest: str) -> StoredStudy:
    if before.digest != digest:
        raise NotNowError(f"this idempotency key belongs to study {before.number}, which is another one: use a new key")
    return before
