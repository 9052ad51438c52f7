"""A store on a PostgreSQL server, started here from the system's package where there is one."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.errors import ConfigError
from memfit.tune import run
from tune import searches
from tune.test_tuning import check_race

FOUND = shutil.which("initdb") or next((str(each) for each in Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="PostgreSQL is not installed (Debian: apt-get install postgresql)"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server's URL."""
    assert FOUND is not None
    programs = Path(FOUND).resolve().parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path("/tmp") / f"memfit-postgresql-{port}"  # noqa: S108 - the path of its socket must be short, and another user's
    folder.mkdir()
    user = None
    if os.getuid() == 0:  # it refuses to run as root
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
    as_user = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid}

    def called(program: str, *arguments: object) -> None:
        subprocess.run(
            [programs / program, *map(str, arguments)], check=True, capture_output=True, cwd=folder, **as_user
        )  # type: ignore[call-overload]

    data = folder / "data"
    called("initdb", "-D", data, "-U", "me", "--auth=trust", "-E", "UTF8", "--no-sync")
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
    called("pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start")
    try:
        yield f"postgresql+psycopg2://me@127.0.0.1:{port}/postgres"
    finally:
        called("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_workers_that_race_for_an_empty_database_share_its_trials(tmp_path: Path, server: str) -> None:
    study = check_race(tmp_path, server)
    assert len({trial.user_attrs["memfit:worker"] for trial in study.trials}) > 1


def test_studies_of_other_searches_are_told_apart_there_too(tmp_path: Path, server: str) -> None:
    found = run(searches.command(tmp_path, trials=2, store=server, study="first"))
    assert found.count("done") == 2
    with pytest.raises(ConfigError, match="has a study 'first' that searches something else"):
        run(searches.command(tmp_path, space={"x": [1, 2], "y": [1]}, store=server, study="first", out="other"))
