"""The store of a study, in Optuna's own schema, so that its dashboard and every other tool opens it.

SQLite by default: of the stores that need no server it alone has heartbeats and survives a full disk. Its tables are made once, under a lock: workers that race
for an empty database fail in making them (known since optuna#1092).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memfit.errors import ConfigError, InputError
from memfit.runner.file_lock import locked
from memfit.train import durable
from memfit.tune.sampling import pruner_of, quietly, sampler_of
from memfit.tune.search import Search

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial

DESCRIBED: Final = "memfit:search"  # the study's attribute that says what is searched
IDENTITY: Final = "memfit:id"  # and one that no other study has, whatever its name
OWNER: Final = "study.json"  # in a folder of trials: whose they are
NAME: Final = "study.sqlite"
MISSED_BEATS: Final = 3  # after which a trial's process is taken for dead
_LOCK_SECONDS: Final = 120.0  # making tables takes seconds, on a slow disk some more
_ADVISORY_LOCK: Final = 0x6D656D666974  # PostgreSQL's locks have numbers; "memfit" in ASCII


def url_of(search: Search) -> str:
    """The store as SQLAlchemy names it."""
    store = search.config.store
    if store is not None and "://" in store:
        return store
    file = search.out / NAME if store is None else Path(search.folder, Path(store).expanduser()).resolve()
    return f"sqlite:///{file}"


def shown(url: str) -> str:
    """The store without its password."""
    scheme, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}://{login.partition(':')[0]}{at}{place}"


def open_study(search: Search) -> Study:
    """The study of a search, made where it is not there yet.

    Raises:
        InputError: the store is damaged, cannot be reached or written, or is of another version of Optuna; Optuna is missing.
        ConfigError: the store has a study of this name that searches something else.
    """
    try:
        import optuna
    except ImportError as error:
        raise InputError("memfit tune needs Optuna: pip install 'memfit[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = url_of(search)
    file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _lock_of(file).touch()
        except OSError as error:
            raise InputError(
                f"cannot write to the folder {file.parent} ({error.strerror or error}): name another one in search.out or search.store"
            ) from error
    with store_errors(url), _alone(url, file):
        if file is not None:
            _check(file)
        storage = _storage(url, search)
        known = [each.study_name for each in optuna.get_all_study_summaries(storage)]
        begun = len(optuna.load_study(study_name=search.name, storage=storage).trials) if search.name in known else 0
        study = optuna.create_study(
            study_name=search.name,
            storage=storage,
            sampler=sampler_of(search, _seed(search.config.seed, begun)),
            pruner=pruner_of(search),
            load_if_exists=True,
            directions=[each.direction for each in search.config.objectives] if search.name not in known else None,
        )
        _compare(study, search, url)
        if IDENTITY not in study.user_attrs:
            _begin(study, search, known)
            study.set_user_attr(IDENTITY, uuid.uuid4().hex)
    return study


def own_folder(search: Search, study: Study) -> None:
    """Check that the folder for trials holds this study's, and write down that it does: runs have names by the numbers of trials, which every study has.

    Raises:
        ConfigError: they are another study's.
        InputError: the folder cannot be written.
    """
    file = search.out / OWNER
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        owner = {}
    runs = search.out / "runner" / "runs"
    earlier = not owner and not study.trials and runs.is_dir() and any(runs.iterdir())
    if earlier or owner.get("id", study.user_attrs[IDENTITY]) != study.user_attrs[IDENTITY]:
        raise ConfigError(
            f"search.out: {search.out} holds the trials of another study{f' ({name})' if (name := owner.get('study')) else ''}: "
            "give this search a folder of its own, or remove that one"
        )
    try:
        durable.rewrite(file, json.dumps({"study": search.name, "id": study.user_attrs[IDENTITY]}) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror or error}; free space, then start again") from error


def _seed(seed: int, begun: int) -> int:
    """A study that goes on would draw the same values again from the same seed."""
    return seed if not begun else int.from_bytes(hashlib.sha256(f"{seed} {begun}".encode()).digest()[:4])


def _storage(url: str, search: Search) -> RDBStorage:
    from optuna.storages import RDBStorage

    beat = search.config.heartbeat
    with quietly():
        storage = RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True},
            heartbeat_interval=beat,
            grace_period=MISSED_BEATS * beat,
            heartbeat_stale_trial_callback=queued_again,
        )
    weakref.finalize(storage, storage.engine.dispose)  # Optuna leaves its connections open
    return storage


def queued_again(study: Study, trial: FrozenTrial) -> None:
    """A trial whose process is gone without a word is tried once more, with the same values."""
    if "memfit:again" not in trial.user_attrs and trial.params:
        study.enqueue_trial(trial.params, user_attrs={"memfit:again": trial.number})


def _begin(study: Study, search: Search, known: list[str]) -> None:
    """What the sampler is to know, and what is to be tried first."""
    import optuna

    for name in search.config.warm_start:
        if name not in known:
            raise ConfigError(
                f"search.warm_start: the store has no study {name!r}; there are: {', '.join(known) or 'none'}"
            )
        distributions = {key: each.distribution() for key, each in search.space.items()}
        for trial in optuna.load_study(study_name=name, storage=study._storage).trials:  # noqa: SLF001 - the same store
            if trial.state == optuna.trial.TrialState.COMPLETE and trial.distributions == distributions:
                study.add_trial(
                    optuna.trial.create_trial(
                        params=trial.params,
                        distributions=distributions,
                        values=trial.values,
                        user_attrs={"memfit:from": name},
                    )
                )
    for values in search.config.start:
        study.enqueue_trial({key: search.space[key].label(value, "search.start") for key, value in values.items()})


def _compare(study: Study, search: Search, url: str) -> None:
    described = search.described()
    found = study.user_attrs.get(DESCRIBED)
    if found is None and not study.trials:
        study.set_user_attr(DESCRIBED, described)
        return
    there = found or {}
    different = [name for name in described if json.loads(json.dumps(described[name])) != there.get(name)]
    if different:
        raise ConfigError(
            f"the store {shown(url)} has a study {search.name!r} that searches something else ({', '.join(different)} differ): "
            "give search.study another name, or take another store"
        )


def _lock_of(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")


def _check(file: Path) -> None:
    """SQLite's own check; what a killed process has left half written it takes back, as it is made for.

    Raises:
        InputError: the file is damaged, or no database.
    """
    if not file.exists() or not file.stat().st_size:
        return
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as connection:
            (said,) = connection.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.OperationalError:
        raise  # a full disk, or another process at work: not the file's fault
    except sqlite3.DatabaseError as error:
        said = str(error)
    if said != "ok":
        raise InputError(
            f"{file} is damaged ({said.splitlines()[0]}): put a copy back, or move it away to begin anew; it was left as it is"
        )


@contextmanager
def _alone(url: str, file: Path | None) -> Iterator[None]:
    """Nobody else makes tables or studies meanwhile."""
    if file is not None:
        with _lock_of(file).open("w") as lock:
            if not locked(lock.fileno(), _LOCK_SECONDS):
                raise InputError(
                    f"another process has been making its study in {file} for {_LOCK_SECONDS:.0f} s: if it is halted, let it go on or end it, then start again"
                )
            yield
        return
    if not url.startswith("postgresql"):
        yield
        return
    import sqlalchemy

    engine = sqlalchemy.create_engine(url)
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:number)"), {"number": _ADVISORY_LOCK})
            try:
                yield
            finally:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(:number)"), {"number": _ADVISORY_LOCK})
    finally:
        engine.dispose()


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """What goes wrong in a store, in a sentence.

    Raises:
        InputError: a full disk, a server that is not there, another version.
    """
    import optuna
    import sqlalchemy

    try:
        yield
    except RuntimeError as error:
        if "version" not in str(error):
            raise
        raise InputError(
            f"the store {shown(url)} was written by another version of Optuna: `optuna storage upgrade --storage {shown(url)}`, or take another store"
        ) from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError, sqlite3.Error) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise InputError(
            f"the store {shown(url)} cannot be used: {reason}; what it holds is intact, and the same command goes on when this is mended"
        ) from error
    except sqlalchemy.exc.ArgumentError as error:
        raise InputError(
            f"search.store: {shown(url)} is no store: name a file, or a database such as postgresql+psycopg2://user@host/database"
        ) from error
    except ImportError as error:
        raise InputError(
            f"the store {shown(url)} needs a driver that is missing; that of PostgreSQL: pip install 'memfit[postgresql]'"
        ) from error


def beat(study: Study, trials: Iterable[int]) -> None:
    """A sign of life of each of these trials, by their ids in the store."""
    storage: Any = study._storage  # noqa: SLF001 - Optuna beats from its own loop, which is not used here
    for trial in trials:
        storage.record_heartbeat(trial)
