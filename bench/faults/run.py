"""Whether anything is lost when a run is killed, interrupted, out of disk, or its snapshot damaged, at drawn moments: tries, and what was lost."""

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
from faults.runs import Tally, Workplace, prepare  # noqa: E402 - as above


def damaged(place: Workplace, tries: int, draw: Random) -> Tally:
    return series.damaged(place, tries, draw, resumed=tries // 10)


SERIES = {
    "kill": series.killed,
    "interrupt": series.interrupted,
    "full": series.full_disk,
    "limit": series.too_large,
    "damage": damaged,
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    cells = [
        [row["fault"], str(row["tried"]), str(row["faults"]), str(row["survived"]), str(row["lost"])] for row in rows
    ]
    return f"Seed {rows[0]['seed']}.\n\n" + measuring.table(["fault", "tries", "faults", "survived", "lost"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=50, help="of each fault; ten times as many damaged bytes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(SERIES), action="append", help="leaves the kept results alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        place = prepare(Path(folder) / "faults")
        for name in arguments.only or SERIES:
            began = time.perf_counter()
            tries = arguments.tries * (10 if name == "damage" else 1)
            tally = SERIES[name](place, tries, Random(arguments.seed))
            wrong = tally.lost or []
            lost += len(wrong)
            rows.append(
                {
                    "fault": tally.fault,
                    "seed": arguments.seed,
                    "tried": tally.tried,
                    "faults": tally.faults,
                    "survived": tally.survived,
                    "lost": len(wrong),
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            print(
                f"{tally.fault}: {tally.tried} tried, {tally.faults} faults, {tally.survived} survived, {len(wrong)} lost",
                flush=True,
            )
            for line in wrong:
                print(f"  lost: {line}", flush=True)
    if arguments.only is None:
        measuring.keep("faults", measuring.machine(), rows)
    print(table(rows))
    if lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
