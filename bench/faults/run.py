"""Whether anything is lost when a run is killed, interrupted, out of disk, or its snapshot damaged, at drawn moments: tries, and what was lost.

All faults for a run that only drops; kills and full disks once more for each technique that moves, packs or leaves out what a snapshot has to hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
import torch

measuring.with_tests_models()

from faults import series  # noqa: E402 - the line above says where it is
from faults.runs import TECHNIQUES, Tally, Workplace, prepare  # noqa: E402 - as above


def damaged(place: Workplace, tries: int, draw: Random) -> Tally:
    return series.damaged(place, tries, draw, resumed=tries // 10)


SERIES = {
    "kill": series.killed,
    "interrupt": series.interrupted,
    "full": series.full_disk,
    "limit": series.too_large,
    "damage": damaged,
    "below": series.full_below,
}
PLAINLY = ("kill", "interrupt", "full", "limit", "damage")


def asked(place: Workplace, technique: str) -> tuple[str, ...]:
    """The faults for a technique: a disk that fills up matters to what lies on it."""
    if technique == "plain":
        return PLAINLY
    return ("kill", "full", "below") if "below" in place.moments else ("kill",)


def tries_of(fault: str, technique: str, tries: int) -> int:
    """Techniques get a third of the tries each."""
    if technique != "plain":
        return max(1, tries // 3)
    return tries * (10 if fault == "damage" else 1)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    cells = [
        [row["technique"], row["fault"], *(str(row[name]) for name in ("tried", "faults", "survived", "lost"))]
        for row in rows
    ]
    heads = ["technique", "fault", "tries", "faults", "survived", "lost"]
    return f"Seed {rows[0]['seed']}.\n\n" + measuring.table(heads, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tries",
        type=int,
        default=50,
        help="of each fault; ten times as many damaged bytes, a third for each technique",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(SERIES), action="append", help="leaves the kept results alone")
    parser.add_argument("--technique", choices=list(TECHNIQUES), action="append", help="leaves the kept results alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, technique in enumerate(arguments.technique or TECHNIQUES):
            place = prepare(Path(folder) / f"faults-{number}", technique)
            for name in asked(place, technique):
                if arguments.only is not None and name not in arguments.only:
                    continue
                began = time.perf_counter()
                tally = SERIES[name](place, tries_of(name, technique, arguments.tries), Random(arguments.seed))
                wrong = tally.lost or []
                lost += len(wrong)
                rows.append(
                    {
                        "technique": technique,
                        "fault": tally.fault,
                        "seed": arguments.seed,
                        "tried": tally.tried,
                        "faults": tally.faults,
                        "survived": tally.survived,
                        "lost": len(wrong),
                        "seconds": round(time.perf_counter() - began, 1),
                    }
                )
                told = f"{tally.tried} tried, {tally.faults} faults, {tally.survived} survived, {len(wrong)} lost"
                print(f"{technique}, {tally.fault}: {told}", flush=True)
                for line in wrong:
                    print(f"  lost: {line}", flush=True)
    if arguments.only is None and arguments.technique is None:
        measuring.keep("faults", measuring.machine(), rows)
    print(table(rows))
    if lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
