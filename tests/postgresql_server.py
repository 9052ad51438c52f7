"""A PostgreSQL server, started from the system's package where there is one."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOUND = shutil.which("initdb") or next((str(each) for each in Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)
needed = pytest.mark.skipif(FOUND is None, reason="PostgreSQL is not installed (Debian: apt-get install postgresql)")


@dataclass
class Server:
    """One server, on the loopback."""

    folder: Path
    port: int
    as_user: dict[str, Any]

    @property
    def url(self) -> str:
        """Of its first database."""
        return f"postgresql://me@127.0.0.1:{self.port}/postgres"

    def called(self, program: str, *arguments: object) -> None:
        """Run one of its programs, as a user who may."""
        assert FOUND is not None
        command = [str(Path(FOUND).resolve().parent / program), *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, **self.as_user)

    def start(self) -> None:
        """And wait until it answers."""
        options = (
            f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories={self.folder} -c fsync=off"
        )
        self.called("pg_ctl", "-D", self.folder / "data", "-o", options, "-l", self.folder / "log", "-w", "start")

    def stop(self) -> None:
        """As if it were killed."""
        self.called("pg_ctl", "-D", self.folder / "data", "-m", "immediate", "-w", "stop")

    def database(self, name: str) -> str:
        """URL of a new database."""
        self.called("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", "me", name)
        return self.url.removesuffix("postgres") + name


@contextmanager
def started() -> Iterator[Server]:
    """A server until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path("/tmp") / f"memfit-postgresql-{port}"  # noqa: S108 - the path of its socket must be short, and another user's
    folder.mkdir()
    as_user: dict[str, Any] = {}
    if os.getuid() == 0:  # it refuses to run as root
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = {"user": user.pw_uid, "group": user.pw_gid}
    server = Server(folder, port, as_user)
    server.called("initdb", "-D", folder / "data", "-U", "me", "--auth=trust", "-E", "UTF8", "--no-sync")
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
