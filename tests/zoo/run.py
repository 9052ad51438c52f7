"""The zoo: every architecture of the installed transformers, planned into half of its memory and compared with plain PyTorch.

python tests/zoo/run.py [--only NAME ...] [--shard 1/4] [--out FILE] [--seconds-per-model 300] [--techniques none|one|all]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Judge those asked for, print each, then the counts; ends with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="each N-th architecture, from the I-th on")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="JSON lines, one an architecture")
    parser.add_argument("--seconds-per-model", type=float, default=300.0)
    parser.add_argument(
        "--techniques",
        choices=("none", "one", "all"),
        default="one",
        help="tried on each architecture besides; one: by turns",
    )
    parser.add_argument("--missing", action="store_true", help="only what the file of --out has not")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # libraries read it when they are loaded
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S606

    from zoo.architectures import architectures
    from zoo.sweeping import prepare, show, summary, swept

    number, count = (int(part) for part in arguments.shard.split("/"))
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", "memfit")}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMFIT_CACHE_DIR"] = cache  # costs measured here are of no use to anyone else
        prepare()
        everything = architectures()
        names = arguments.only or list(everything)[number - 1 :: count]
        rows = []
        if arguments.missing and arguments.out is not None and arguments.out.exists():
            rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
            there = {row["architecture"] for row in rows}
            names = [name for name in names if name not in there]
        chosen = [(name, everything[name]) for name in names]
        for verdict in swept(chosen, arguments.seconds_per_model, arguments.techniques):
            rows.append({**verdict.row(), **versions})
            show(
                f"{verdict.architecture:32} {verdict.kind:12} {verdict.seconds:6.1f} s  {verdict.reason} {verdict.where}"
            )
            for row in verdict.techniques:
                show(
                    f"  {row['technique']:30} {row['kind']:12} {row['seconds']:6.1f} s  {row['reason']} {row['where']}"
                )
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    show(summary(rows))
    show(f"{time.monotonic() - started:.0f} s")
    tried = [row for each in rows for row in each["techniques"]]
    sys.exit(any(row["kind"] == "wrong" for row in (*rows, *tried)))


if __name__ == "__main__":
    main()
