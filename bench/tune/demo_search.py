"""The search on the demo's task (examples/search/testaments.yaml), to its end; its best setting beside the demo's own, judged by chapters that no trial saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import measuring

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "examples" / "search" / "testaments.yaml"
DEMO_PASSAGES: Final = 26 * 80  # steps of the demo, and its batch
SETTINGS: Final = ("the demo's", "the best of the search")


def measured(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each trial, then one for each setting as it was in the search, and one for each setting and seed with as many passages as the demo.

    The search goes on where it was stopped. Nothing is trained twice: what is in its folder is judged as it is.
    """
    from memfit.tune import load_search, run
    from memfit.tune.live import display

    search = load_search(FILE)
    began = time.perf_counter()
    shown = display()
    try:
        found = run(search, shown)
    finally:
        shown.close()
    print(f"searched for {time.perf_counter() - began:.0f} s in this call", flush=True)
    rows: list[dict[str, Any]] = [
        {
            "part": "demo search",
            "trial": row.number,
            "state": row.state,
            "accuracy": row.values[0] if row.values else None,
            **{name: row.params.get(name) for name in search.space},
            "peak_bytes": row.peak_bytes,
            "seconds": row.seconds,
            "why": row.why,
        }
        for row in found.rows
    ]
    best = found.best[0].number
    for name, number in zip(SETTINGS, (0, best), strict=True):
        out = search.out / "trials" / f"trial-{number:05d}" / "run"
        passages = search.run["data"]["args"]["train"]
        known = {"passages": passages, "seed": search.run["train"]["seed"]}
        rows.append({"part": "demo judged", "setting": name, "trial": number, **known, **judged(out)})
        print(json.dumps(rows[-1]), flush=True)
    from memfit.tune.results import values_of

    runs = [search.run_with(values_of(search, found.rows[number].params)) for number in (0, best)]
    for seed in seeds:
        outs = [search.out / "judged" / f"trial-{number:05d}-{DEMO_PASSAGES}-{seed}" for number in (0, best)]
        trained(runs, outs, seed)
        for name, number, out in zip(SETTINGS, (0, best), outs, strict=True):
            known = {"passages": DEMO_PASSAGES, "seed": seed}
            rows.append({"part": "demo judged", "setting": name, "trial": number, **known, **judged(out)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def trained(runs: Sequence[Mapping[str, Any]], outs: Sequence[Path], seed: int) -> None:
    """Both settings, side by side, each a `memfit train` of its own on its share of the cores; one that is there is not trained again."""
    from memfit.tune import load_search
    from memfit.tune.trials import threads_of

    environment = {**os.environ, **threads_of(load_search(FILE))}
    processes = []
    for data, out in zip(runs, outs, strict=True):
        if list(out.glob("step-*")):
            continue
        out.mkdir(parents=True, exist_ok=True)
        args = {**data["data"]["args"], "train": DEMO_PASSAGES}
        train = {**data["train"], "seed": seed, "out": str(out)}
        file = out.with_suffix(".json")
        file.write_text(json.dumps({**data, "data": {**data["data"], "args": args}, "train": train}), encoding="utf-8")
        command = [sys.executable, "-m", "memfit", "train", str(file), "--json"]
        processes.append((subprocess.Popen(command, stdout=subprocess.PIPE, env=environment), out))
    for process, out in processes:
        answer = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"training in {out} has failed with status {process.returncode}: {answer.decode()}")
        (out / "answer.json").write_bytes(answer)


def judged(out: Path) -> dict[str, Any]:
    """Accuracy of the last snapshot of a run on the demo's held-out chapters, and what the run's log says of its bytes."""
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "search")]
    import demo
    import testaments

    from memfit.train import snapshots

    model = testaments.build()
    snapshot = snapshots.latest(out, print)
    model.load_state_dict(snapshot.load("model.pt")["state"])
    return {"held_out": demo.accuracy(model, testaments.held_out()), "peak_bytes": peak_of(out)}


def peak_of(out: Path) -> int | None:
    """The measured peak of a run; None where its log has none."""
    log = out / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return max((line["peak_bytes"] for line in lines if line.get("peak_bytes")), default=None)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Both tables, as Markdown."""
    trials = [row for row in rows if row["part"] == "demo search"]
    last = [row for row in rows if row["part"] == "demo judged"]
    keys = [key for key in trials[0] if key.startswith(("optim.", "fit."))]
    cells = [
        [
            f"{row['trial']}",
            *(f"{row[key]:.2g}" if isinstance(row[key], float) else f"{row[key]}" for key in keys),
            "" if row["peak_bytes"] is None else f"{row['peak_bytes']:,}",
            "" if row["seconds"] is None else f"{row['seconds']:.0f} s",
            row["state"] if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %",
        ]
        for row in trials
    ]
    beside = [
        [
            row["setting"],
            f"{row['trial']}",
            f"{row['passages']:,}",
            f"{row['seed']}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes']:,}",
            f"{100 * row['held_out']:.1f} %",
        ]
        for row in last
    ]
    heads = [
        "setting",
        "of trial",
        "passages",
        "seed",
        "measured peak, bytes",
        "accuracy, the demo's held-out chapters",
    ]
    return "\n\n".join(
        [
            measuring.table(["trial", *keys, "predicted peak, bytes", "time", "accuracy, validation"], cells),
            measuring.table(heads, beside),
        ]
    )
