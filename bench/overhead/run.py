"""Host time that following a plan adds to each forward operation, recomputations' own time taken away; beside it a dispatch mode that does nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
import torch
from overhead.chain import all_followed, chain_and_batch, engines_between, loss_of, plainly, planned

from memfit.capture.host_time import HandsOn

SHARES = {"a tenth dropped": 0.9, "half dropped": 0.5, "smallest": 0.0}
NOTHING, FOLLOWED = "a dispatch mode that does nothing", "all operations followed, nothing dropped"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    added = {row["row"]: row["added_microseconds_per_operation"] for row in rows}
    return (
        f"{rows[0]['operations']} forward operations, {rows[0]['rounds']} rounds, processor time. "
        f"Of the {added[FOLLOWED]:.1f} µs that an operation takes longer where it is followed, {added[NOTHING]:.1f} are PyTorch's, "
        f"which hands it to Python and back, and {added[FOLLOWED] - added[NOTHING]:.1f} the engine's own.\n\n"
        + measuring.table(
            ["arrangement", "forward and backward", "recomputations", "added per forward operation"],
            [
                [
                    row["row"],
                    f"{1e3 * row['seconds']:.2f} ms",
                    str(row["recomputations"]),
                    f"{row['added_microseconds_per_operation']:.1f} µs",
                ]
                for row in rows
            ],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, batch = chain_and_batch()
    operations, made = engines_between(model, batch, tuple(SHARES.values()))
    engines = dict(zip(SHARES, made, strict=True))

    def under_a_mode() -> None:
        with HandsOn():
            loss = loss_of(model, batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    rows: dict[str, Callable[[], None]] = {
        "plain": plainly(model, batch),
        NOTHING: under_a_mode,
        FOLLOWED: all_followed(made[0], batch),
        **{f"plan, {name}": planned(engine, batch) for name, engine in engines.items()},
    }
    for run in rows.values():
        for _ in range(5):
            run()
    times = measuring.in_turns(rows, arguments.rounds)
    # What a rerun operation costs by itself: the forward operations, timed plainly without autograd.
    bare = []
    with torch.no_grad():
        for _ in range(arguments.rounds):
            begin = time.process_time()
            loss_of(model, batch)
            bare.append(time.process_time() - begin)
    per_operation = measuring.quartiles(bare)[1] / operations
    found = []
    for name in rows:
        engine = engines.get(name.removeprefix("plan, "))
        recomputations = engine.plan.script.recomputations if engine is not None else 0
        difference = measuring.quartiles(a - b for a, b in zip(times[name], times["plain"], strict=True))[1]
        found.append(
            {
                "row": name,
                "rounds": arguments.rounds,
                "operations": operations,
                "seconds": measuring.quartiles(times[name])[1],
                "recomputations": recomputations,
                "added_microseconds_per_operation": 1e6 * (difference - recomputations * per_operation) / operations,
            }
        )
    measuring.keep("overhead", measuring.machine(), found)
    print(table(found))


if __name__ == "__main__":
    main()
