"""What a service's store stands on: an SQLite file of its own, or a PostgreSQL database that several hosts share. Both are asked in the same words.

Queries are SQL that both understand, with `?` for values. Whoever writes is alone: SQLite has one writer at a time by itself, in PostgreSQL a lock sees to it,
so what is read inside `writing` is still so when what is written there is committed.
"""

from __future__ import annotations

import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from memfit.errors import InputError
from memfit.service.tables import FORMAT, TABLES, UPGRADES

NAME: Final = "service.sqlite"


class StoreError(InputError):
    """The store cannot be reached or written now; what it holds is intact, and the same can be tried again."""


class Cursor(Protocol):
    """What a query has found or done."""

    @property
    def rowcount(self) -> int:
        """Rows that were changed."""

    def fetchone(self) -> Any:
        """The next row; None after the last."""

    def fetchall(self) -> list[Any]:
        """All rows that are left."""

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """Where queries are asked."""

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Cursor:
        """Ask one."""

    def executemany(self, query: str, rows: Iterable[Sequence[Any]], /) -> Any:
        """Ask one for each row of values."""


class Database(ABC):
    """Rows have their columns by position and by name."""

    @abstractmethod
    def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query.

        Raises:
            StoreError: the database cannot be reached.
        """

    @abstractmethod
    def writing(self) -> AbstractContextManager[Connection]:
        """All of what is written inside, or nothing of it; nobody else writes meanwhile.

        Raises:
            StoreError: it cannot be written, as on a full disk; what was there before is intact.
        """

    def version(self) -> object | None:
        """Equal to what this thread got before where nobody has written since; None where telling takes as long as a query."""
        return None

    @abstractmethod
    def backup(self, file: Path) -> None:
        """Write a copy that is whole, while the service goes on.

        Raises:
            InputError: that is not memfit's to do.
        """

    @abstractmethod
    def give_no_number_again(self, numbers: Mapping[str, int]) -> None:
        """The next rows of tables get larger numbers than these, as the folders of runs that a copy does not know are still there."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


class SqliteDatabase(Database):
    """A file that is whole after any crash. Each thread has a connection of its own.

    Args:
        file: is made where it is missing.

    Raises:
        InputError: the file is damaged, or of another version.
        StoreError: it cannot be written.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._here = threading.local()
        self._writing = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        try:
            connection = self.connection
            (whole,) = connection.execute("PRAGMA quick_check").fetchone()
            if whole != "ok":
                raise sqlite3.DatabaseError(whole.splitlines()[0])
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT, *UPGRADES):
                raise InputError(
                    f"{self.file} is of version {found} and this memfit reads {FORMAT}: use the memfit that wrote it, or another folder"
                )
            for each in sorted(UPGRADES):
                if found and found <= each:
                    self._upgrade(connection, each)
            connection.executescript(TABLES)
            connection.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.OperationalError as error:
            raise self._not_written(error) from error
        except sqlite3.DatabaseError as error:
            raise InputError(
                f"{self.file} is damaged ({error}): put a copy back, or move it away to begin anew; it was left as it is"
            ) from error

    @staticmethod
    def _upgrade(connection: sqlite3.Connection, version: int) -> None:
        """From one version to the next, all of it or nothing."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in UPGRADES[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={version + 1}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _not_written(self, error: Exception) -> StoreError:
        return StoreError(
            f"cannot write {self.file}: {error}; what it held before is intact: free space, then start again"
        )

    @property
    def connection(self) -> sqlite3.Connection:
        """The one of this thread."""
        found: sqlite3.Connection | None = getattr(self._here, "connection", None)
        if found is None:
            # The last thread to go closes all of them.
            found = sqlite3.connect(self.file, isolation_level=None, timeout=30, check_same_thread=False)
            self._opened.append(found)  # before anything is read, which a damaged file refuses
            found.row_factory = sqlite3.Row
            found.execute("PRAGMA journal_mode=WAL")
            found.execute("PRAGMA synchronous=FULL")
            self._here.connection = found
        return found

    def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """As in `Database`."""
        try:
            return self.connection.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            raise StoreError(
                f"the store {self.file} cannot be used: {error}; what it holds is intact, and memfit goes on when this is mended"
            ) from error

    def version(self) -> object | None:
        """As in `Database`."""
        ((of_others,),) = self.read("PRAGMA data_version")
        return self.connection, of_others, self.connection.total_changes

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """As in `Database`."""
        connection = self.connection
        with self._writing:  # one writer at a time in this process, without waiting on SQLite's own lock
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise self._not_written(error) from error

    def backup(self, file: Path) -> None:
        """As in `Database`."""
        try:
            with closing(sqlite3.connect(file)) as copy:
                self.connection.backup(copy)
        except sqlite3.Error as error:
            raise InputError(f"cannot write the copy {file}: {error}; name another file, or free space") from error

    def give_no_number_again(self, numbers: Mapping[str, int]) -> None:
        """As in `Database`; `memfit.service.restoring` does it where a copy is put back."""

    def close(self) -> None:
        """As in `Database`."""
        for connection in self._opened:
            connection.close()
        self._opened.clear()
        self._here = threading.local()


def opened(folder: Path, url: str | None) -> Database:
    """The database of a service.

    Args:
        folder: of the service.
        url: of PostgreSQL, "postgresql://user@host/database"; None for a file in the folder.

    Raises:
        InputError: as for the databases; or it is no URL of PostgreSQL.
        StoreError: it cannot be reached or written.
    """
    if url is None:
        return SqliteDatabase(folder / NAME)
    from memfit.service.postgresql import PostgresqlDatabase

    return PostgresqlDatabase(url)
