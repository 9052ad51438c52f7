"""A service's store in PostgreSQL, in a schema of its own, so that the database may be that of `memfit tune` as well.

SQLAlchemy keeps a few connections open and notices those that are gone; what is asked goes to the driver as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.service.database import Connection, Cursor, Database, StoreError
from memfit.service.tables import FORMAT, TABLES, UPGRADES, of_postgresql
from memfit.tune.study_store import shown

SCHEMA: Final = "memfit_service"
_LOCK: Final = 0x6D656D666974_73  # PostgreSQL's locks have numbers; "memfits" in ASCII
_CONNECTIONS: Final = 8
# A server that is gone, and a host that has gone away in the middle of writing, are noticed within seconds: leases are renewed through these connections.
_ARGUMENTS: Final = {
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "application_name": "memfit serve",
    "options": f"-c search_path={SCHEMA} -c statement_timeout=15000 -c idle_in_transaction_session_timeout=10000",
}


class PostgresqlDatabase(Database):
    """One database, which several hosts may have open.

    Args:
        url: "postgresql://user@host/database"; what it leaves out (a password before all) comes from PostgreSQL's own variables and `~/.pgpass`.

    Raises:
        InputError: it is no URL of PostgreSQL, a driver is missing, or what it holds is of another version.
        StoreError: it cannot be reached or written.
    """

    def __init__(self, url: str) -> None:
        try:
            import psycopg2
            import psycopg2.extras
            import sqlalchemy
        except ImportError as error:
            raise InputError(
                f"the store {shown(url)} needs a driver that is missing: pip install 'memfit[postgresql]'"
            ) from error
        try:
            told = sqlalchemy.engine.make_url(url)
        except sqlalchemy.exc.ArgumentError:
            told = None
        if told is None or told.drivername not in {"postgresql", "postgresql+psycopg2"}:
            raise InputError(
                f"the store {shown(url)} is no PostgreSQL database: write postgresql://user@host/database, or leave --store out for a file"
            )
        self._shown = shown(url)
        self._cursor = psycopg2.extras.DictCursor
        self._errors = (psycopg2.Error, sqlalchemy.exc.SQLAlchemyError)
        self._engine = sqlalchemy.create_engine(
            told.set(drivername="postgresql+psycopg2"), pool_size=_CONNECTIONS, max_overflow=0, pool_pre_ping=True,
            isolation_level="AUTOCOMMIT", connect_args=_ARGUMENTS,
        )  # fmt: skip
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        with self.writing() as connection:
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
            connection.execute("CREATE TABLE IF NOT EXISTS format (version BIGINT NOT NULL)")
            row = connection.execute("SELECT version FROM format").fetchone()
            found = FORMAT if row is None else row[0]
            if found != FORMAT and found not in UPGRADES:
                raise InputError(
                    f"the store {self._shown} is of version {found} and this memfit reads {FORMAT}: use the memfit that wrote it, or another database"
                )
            for version in range(found, FORMAT):
                for statement in UPGRADES[version]:
                    connection.execute(of_postgresql(statement))
            connection.execute(of_postgresql(TABLES))
            connection.execute("DELETE FROM format")
            connection.execute("INSERT INTO format (version) VALUES (?)", (FORMAT,))

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A cursor of a connection that goes back into the pool, or away where it has failed."""
        connection = None
        try:
            connection = self._engine.raw_connection()
            with connection.cursor(cursor_factory=self._cursor) as cursor:
                yield cursor
        except self._errors as error:
            import psycopg2

            if connection is not None:
                connection.invalidate()
            if isinstance(error, psycopg2.IntegrityError):
                raise
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise StoreError(
                f"the store {self._shown} cannot be used: {reason[0]}; what it holds is intact, and memfit goes on when this is mended"
            ) from error
        finally:
            if connection is not None:
                connection.close()

    def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """As in `Database`."""
        with self._connected() as cursor:
            return _Marked(cursor).execute(query, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """As in `Database`."""
        with self._connected() as cursor:
            cursor.execute("BEGIN")
            try:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                yield _Marked(cursor)
            except self._errors:
                raise  # and the connection goes away, with what it has begun
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
            cursor.execute("COMMIT")

    def backup(self, file: Path) -> None:
        """As in `Database`."""
        raise InputError(
            f"the store {self._shown} is copied by PostgreSQL's own tools: pg_dump --schema={SCHEMA} --file={file}"
        )

    def give_no_number_again(self, numbers: Mapping[str, int]) -> None:
        """As in `Database`."""
        with self.writing() as connection:
            for table, known in numbers.items():
                sequence = f"pg_get_serial_sequence('{table}', 'number')"
                last = f"COALESCE(pg_sequence_last_value({sequence}::regclass), 0)"
                connection.execute(f"SELECT setval({sequence}, ?) WHERE {last}<?", (known, known))

    def close(self) -> None:
        """As in `Database`."""
        self._engine.dispose()


class _Marked:
    """A cursor that takes `?` for values."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Cursor:
        self._cursor.execute(_driver(query), tuple(values) or None)
        found: Cursor = self._cursor
        return found

    def executemany(self, query: str, rows: Iterable[Sequence[Any]], /) -> Any:
        return self._cursor.executemany(_driver(query), rows)


def _driver(query: str) -> str:
    return query.replace("?", "%s")  # no query of ours has a percent sign
