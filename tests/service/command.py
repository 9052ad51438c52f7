"""`memfit serve` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from memfit.service import confine
from memfit.service.serving import local_address


def started(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """The service of a folder, once it listens."""
    (folder / "address.json").unlink(missing_ok=True)
    unconfined = () if confine.available() else ("--unconfined",)
    command = [sys.executable, "-m", "memfit", "serve", "--folder", str(folder), "--port", "0", *unconfined, *more]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while local_address(folder) is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process
