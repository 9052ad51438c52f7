"""A run reads what it needs, writes its own folder, and reaches nothing else of the computer or the service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.service import confine

pytestmark = pytest.mark.skipif(not confine.available(), reason="this kernel has no Landlock of version 4 or newer")
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/opt", "/proc", "/etc/ld.so.cache", sys.prefix, sys.base_prefix]


def confined(folder: Path, code: str, *, tcp: bool = False) -> str:
    told = json.dumps({"read": SYSTEM, "write": [str(folder), "/dev/null"], "tcp": tcp})
    command = [sys.executable, "-I", "-S", confine.__file__, told, sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def test_its_own_folder_is_written_and_read(own: Path) -> None:
    assert confined(own, "open('file', 'w').write('x'); print(open('file').read())") == "x"


@pytest.mark.parametrize(
    "code",
    [
        "open('../secret').read()",
        "open('../new', 'w')",
        "import os; os.listdir('..')",
        "import os; os.symlink('../secret', 'link'); open('link').read()",
        "import os; os.rename('../secret', 'mine')",
        "open('/etc/shadow').read()",
    ],
)
def test_what_is_outside_is_neither_read_nor_written(own: Path, code: str) -> None:
    assert "PermissionError" in confined(own, code)
    assert sorted(os.listdir(own.parent)) == ["own", "secret"]


def test_another_process_is_neither_read_nor_killed(own: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={"TOKEN": "secret"}
    ) as other:
        assert "PermissionError" in confined(own, f"open('/proc/{other.pid}/environ').read()")
        if confine.version() >= 6:
            assert "PermissionError" in confined(own, f"import os; os.kill({other.pid}, 9)")
            assert other.poll() is None
        other.communicate(b"\n")


def test_no_connection_is_made_but_where_ranks_need_them(own: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); print('connected')"
        assert "PermissionError" in confined(own, code)
        assert confined(own, code, tcp=True) == "connected"


def test_it_cannot_be_taken_off_again(own: Path) -> None:
    code = "import subprocess, sys; print(subprocess.run(['cat', '../secret'], capture_output=True, text=True).stderr)"
    assert "Permission denied" in confined(own, code)
