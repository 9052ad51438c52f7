"""Puts a copy of a service's store back, while no service of the folder runs.

A copy is from before what has happened since. Numbers that were given since are not given again, so that nobody's run gets the files or the process of
another; runs that the store does not know any more are ended by the next service, with a line in its log.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from memfit.errors import InputError
from memfit.runner.store import RunStore
from memfit.service.database import NAME
from memfit.service.tables import FORMAT

_LEFT_BY_SQLITE: Final = ("-wal", "-shm")


def restore(folder: Path, copy: Path) -> Path | None:
    """Put a copy back.

    Args:
        folder: of the service.
        copy: as `ServiceStore.backup` has written it.

    Returns:
        Where the store that was there is now; None where there was none.

    Raises:
        InputError: a service of the folder runs, the copy is none that can be read, or it cannot be written.
    """
    _check(copy)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    RunStore(folder / "runner").close()  # raises where a service has it
    file, waiting = folder / NAME, folder / f"{NAME}.partial"
    try:
        waiting.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(waiting)) as target,
        ):
            source.backup(target)
            for table, numbers in (("runs", folder / "runs"), ("studies", folder / "studies")):
                _give_no_number_again(target, table, numbers)
        waiting.chmod(0o600)
        before = None
        if file.exists():
            with closing(sqlite3.connect(file)) as there:
                there.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            before = folder / f"{NAME}.before-{time.time_ns()}"
            file.rename(before)
        for end in _LEFT_BY_SQLITE:
            file.with_name(f"{NAME}{end}").unlink(missing_ok=True)
        waiting.rename(file)
    except (OSError, sqlite3.Error) as error:
        raise InputError(
            f"cannot write {file}: {error}; what it held before is intact: free space, then start again"
        ) from error
    return before


def _check(copy: Path) -> None:
    try:
        with closing(sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro", uri=True)) as source:
            (whole,) = source.execute("PRAGMA quick_check").fetchone()
            (version,) = source.execute("PRAGMA user_version").fetchone()
            tables = {name for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    except sqlite3.Error as error:
        raise InputError(f"{copy} is no copy of a service's store ({error}): nothing was changed") from error
    if whole != "ok" or "runs" not in tables or not 1 <= version <= FORMAT:
        raise InputError(f"{copy} is no copy of a service's store that this memfit reads: nothing was changed")


def _give_no_number_again(target: sqlite3.Connection, table: str, folder: Path) -> None:
    known = max((int(each.name) for each in folder.glob("[0-9]*") if each.name.isdecimal()), default=0)
    if not target.execute("SELECT 1 FROM sqlite_master WHERE name=?", (table,)).fetchone():
        return
    row = target.execute("SELECT seq FROM sqlite_sequence WHERE name=?", (table,)).fetchone()
    if row is None:
        target.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, known))
    elif row[0] < known:
        target.execute("UPDATE sqlite_sequence SET seq=? WHERE name=?", (known, table))
    target.commit()
