"""Whether a service loses a run or runs one twice when it, its watchers and its runs are killed at random moments: counts, in `results.jsonl`.

Runs take milliseconds (`tests/service/cheap_program.py`); all else is the service's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measuring

TESTS = Path(__file__).resolve().parent.parent.parent / "tests"


def killed(runs: int, seed: int, pause: float) -> dict[str, Any]:
    """What `tests/service/killing.py` tells."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "service.killing", folder, str(runs), str(seed), str(pause)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(found: dict[str, Any], seed: int, pause: float) -> dict[str, Any]:
    """Counts."""
    counts = {name: len(found[name]) for name in ("lost", "twice", "unexplained")}
    return {**found, **counts, "seed": seed, "pause": pause}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between two kills, on the mean (0.4)")
    parser.add_argument("--told", metavar="FILE", type=Path, help="keep what `service.killing` has told before")
    arguments = parser.parse_args()
    found = (
        json.loads(arguments.told.read_text())
        if arguments.told
        else killed(arguments.runs, arguments.seed, arguments.pause)
    )
    print({name: found[name] for name in ("kills", "states", "lost", "twice", "together", "unexplained")})
    measuring.keep_part(
        "service", "kills", measuring.machine(), [row(found, arguments.seed, arguments.pause)], lambda _: True
    )


if __name__ == "__main__":
    main()
