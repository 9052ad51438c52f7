"""Runs of memfit under a real budget on a CPU, hard limits on: packed by `memfit tune`, one at a time, two at a time, by Optuna's n_jobs, by Ray Tune."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measuring
import numpy as np

BUDGET = 96 << 20  # of all together
KINDS = ("mlp", "convolution", "transformer")
WIDTHS = (64, 128, 256)
BATCHES = (64, 128)
BUDGETS = ("2MiB", "16MiB", "48MiB")  # of each; the smallest is too little for most
MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    \"\"\"A sequence of 64 numbers in, one out.\"\"\"

    def __init__(self, kind, width):
        super().__init__()
        self.kind = kind
        if kind == "mlp":
            sizes = [64, 4 * width, 4 * width, 4 * width]
            self.body = nn.Sequential(*(m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.GELU())))
            self.head = nn.Linear(sizes[-1], 1)
        else:
            self.first = nn.Conv1d(1, width, 3, padding=1)
            blocks = (nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.GELU()) for _ in range(4))
            layers = (nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2))
            self.body = nn.Sequential(*(blocks if kind == "convolution" else layers))
            self.head = nn.Linear(width, 1)

    def forward(self, x, y):
        if self.kind == "mlp":
            h = self.body(x)
        elif self.kind == "convolution":
            h = self.body(self.first(x.unsqueeze(1))).mean(-1)
        else:
            h = self.body(self.first(x.unsqueeze(1)).transpose(1, 2)).mean(1)
        return (self.head(h).squeeze(-1) - y).square().mean()


def build(kind, width):
    torch.manual_seed(0)
    return Net(kind, width)
"""


@dataclass(frozen=True)
class Ran:
    """One run.

    Attributes:
        begin, end: on the clock.
        peak_bytes: measured by the run itself; 0 where it never trained.
        done: whether it has trained to its end.
        processor_seconds: of its process, where whoever started it can tell.
    """

    begin: float
    end: float
    peak_bytes: int
    done: bool
    processor_seconds: float | None = None


def written(folder: Path) -> None:
    """Models and data."""
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1024, 64)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, y=np.sin(x.sum(1)).astype(np.float32))


def cases(number: int) -> list[dict[str, Any]]:
    """Values of so many trials, as a search names them."""
    draw = random.Random(2)
    drawn = {"model.args.kind": KINDS, "model.args.width": WIDTHS, "fit.global_batch": BATCHES, "fit.budget": BUDGETS}
    return [{name: draw.choice(values) for name, values in drawn.items()} for _ in range(number)]


def base(steps: int) -> dict[str, Any]:
    """What all runs have."""
    return {
        "model": {"python": "models:build", "args": {"kind": "mlp", "width": 64}},
        "data": {"train": "train.npz"},
        "fit": {"budget": BUDGETS[-1], "global_batch": 64},
        "train": {"steps": steps, "log_every": 1},
        "report": {"html": False},
    }


def searched(folder: Path, number: int, steps: int, **told: Any) -> Any:
    """The search of all cases, in their order."""
    from memfit.tune import read_search

    space = {"model.args.kind": list(KINDS), "model.args.width": list(WIDTHS), "fit.global_batch": list(BATCHES), "fit.budget": list(BUDGETS)}  # fmt: skip
    search = {
        "space": space,
        "start": cases(number),
        "objective": "loss",
        "sampler": "random",
        "trials": number,
        "budget": BUDGET,
        **told,
    }
    return read_search({**base(steps), "search": search}, folder)


def tuned(folder: Path, number: int, steps: int, at_once: int | str) -> tuple[list[Ran], dict[str, int]]:
    """By `memfit tune`: what ran, and how many were infeasible and of these launched."""
    from memfit.tune import run

    search = searched(folder, number, steps, at_once=at_once, out=f"tune-{at_once}")
    found = run(search)
    ran = []
    for row in found.rows:
        spec = search.out / "runner" / "runs" / f"trial-{row.number:05d}" / "1" / "spec.json"
        if spec.exists():
            end = spec.with_name("end.json")
            peak = json.loads((spec.with_name("stdout")).read_text() or "{}").get("peak_bytes") or 0
            ran.append(Ran(spec.stat().st_mtime, end.stat().st_mtime, peak, row.state == "done"))
    return ran, {"infeasible": found.count("infeasible"), "launched_infeasible": len(ran) - sum(r.done for r in ran)}


def alone(folder: Path, out: Path, values: dict[str, Any], steps: int) -> Ran:
    """One `memfit train`, as any tool would start it."""
    from memfit.tune.search import put

    data = base(steps)
    for name, value in values.items():
        put(data, name, value)
    data["train"]["out"] = str(out)
    file = out.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**data, "folder": str(folder)}), encoding="utf-8")
    begin = time.time()
    done = subprocess.run([sys.executable, "-m", "memfit", "train", str(file), "--json"], cwd=folder, capture_output=True, text=True, check=False)  # fmt: skip
    answer = json.loads(done.stdout) if done.returncode == 0 else {}
    return Ran(begin, time.time(), answer.get("peak_bytes") or 0, done.returncode == 0)


def by_optuna(folder: Path, number: int, steps: int, jobs: int) -> list[Ran]:
    """Optuna's own loop in so many threads, each trial a command."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ran: list[Ran] = []
    lock = threading.Lock()
    listed = cases(number)

    def objective(trial: optuna.Trial) -> float:
        one = alone(folder, folder / f"optuna-{jobs}" / str(trial.number), listed[trial.number], steps)
        with lock:
            ran.append(one)
        return 0.0

    optuna.create_study().optimize(objective, n_trials=number, n_jobs=jobs)
    return ran


def by_ray(folder: Path, number: int, steps: int, share: float) -> list[Ran]:
    """Ray Tune, where each trial asks for a share of the device, as its users do."""
    import ray
    from ray import tune

    short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets have 107 letters at most
    os.environ |= {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(
        num_cpus=os.cpu_count(),
        resources={"device": 1},
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    listed = cases(number)
    bench = [str(each) for each in Path(__file__).resolve().parents[:2]]

    def trial(config: dict[str, Any]) -> None:
        sys.path[:0] = bench
        import own_runs

        at = config["case"]
        used = os.times()
        one = own_runs.alone(folder, folder / f"ray-{share}" / str(at), listed[at], steps)
        now = os.times()
        seconds = now.children_user + now.children_system - used.children_user - used.children_system
        # Ray fills a key "done" of its own, True for every trial that has ended.
        told = {"begin": one.begin, "end": one.end, "peak_bytes": one.peak_bytes, "trained": one.done}
        tune.report({**told, "seconds": seconds})

    try:
        asking = tune.with_resources(trial, tune.PlacementGroupFactory([{"device": share}]))
        tuner = tune.Tuner(
            asking,
            param_space={"case": tune.grid_search(list(range(number)))},
            run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0),
        )
        found = tuner.fit()
    finally:
        ray.shutdown()
    rows = [each.metrics for each in found if each.metrics and "begin" in each.metrics]
    return [Ran(row["begin"], row["end"], row["peak_bytes"], row["trained"], row["seconds"]) for row in rows]


def over(ran: Sequence[Ran]) -> tuple[float, int]:
    """Seconds in which the measured peaks of what ran came to more than the budget, and the largest sum."""
    moments = sorted({each.begin for each in ran} | {each.end for each in ran})
    seconds, most = 0.0, 0
    for begin, end in itertools.pairwise(moments):
        held = sum(each.peak_bytes for each in ran if each.begin <= begin and end <= each.end)
        most = max(most, held)
        seconds += (end - begin) * (held > BUDGET)
    return seconds, most


def turned_away(ran: Sequence[Ran]) -> int:
    """Runs that a device with these bytes has no room for: each takes its measured peak from its beginning to its end, and one that finds too little dies."""
    held: list[Ran] = []
    died = 0
    for one in sorted(ran, key=lambda each: each.begin):
        held = [each for each in held if each.end > one.begin]
        if sum(each.peak_bytes for each in held) + one.peak_bytes > BUDGET:
            died += 1
        else:
            held.append(one)
    return died


Way = Callable[[Path, int, int], tuple[list[Ran], dict[str, int]]]
WAYS: dict[str, Way] = {
    "memfit tune, packed by predicted peaks": lambda folder, number, steps: tuned(folder, number, steps, "auto"),
    "memfit tune, one at a time": lambda folder, number, steps: tuned(folder, number, steps, 1),
    "2 at a time (Optuna, n_jobs=2)": lambda folder, number, steps: (by_optuna(folder, number, steps, 2), {}),
    "Optuna, n_jobs=4": lambda folder, number, steps: (by_optuna(folder, number, steps, 4), {}),
    "Ray Tune, a quarter of the device each": lambda folder, number, steps: (by_ray(folder, number, steps, 0.25), {}),
}


def measured(number: int, steps: int, words: str = "") -> Iterator[dict[str, Any]]:
    """A row for each way whose name has these words, as soon as it has run; Ray Tune where it is installed."""
    for name, way in WAYS.items():
        if words not in name:
            continue
        if "Ray" in name and not find_spec("ray"):
            print("Ray is not installed (memfit[raytune]): its row is left out", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
            written(Path(folder))
            begin, start = time.perf_counter(), time.time()
            used = os.times()
            ran, known = way(Path(folder), number, steps)
            seconds = time.perf_counter() - begin
            now = os.times()
        seconds_over, most = over(ran)
        failed = sum(not each.done for each in ran)
        row = {
            "part": "own runs",
            "way": name,
            "trials": number,
            "steps": steps,
            "seconds": seconds,
            # Ray's trials are no children of this process and tell theirs; what Ray itself takes is not in it.
            "processor_seconds": sum(each.processor_seconds or 0.0 for each in ran)
            if "Ray" in name
            else now.children_user + now.children_system - used.children_user - used.children_system,
            "launched": len(ran),
            "done": len(ran) - failed,
            "launched_infeasible": known.get("launched_infeasible", failed),
            "over_seconds": seconds_over,
            "most_bytes": most,
            "died": turned_away(ran),
            "ran": sorted([round(each.begin - start, 2), round(each.end - start, 2), each.peak_bytes] for each in ran),
            "load": os.getloadavg()[0],
        }
        print(json.dumps(row), flush=True)
        yield row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    budget = f"{BUDGET >> 20} MiB, {rows[0]['trials']} runs of memfit of {rows[0]['steps']} steps"
    heads = [
        "total",
        "of the processor",
        "launched",
        "done",
        "ended without training",
        "no room on a device",
        "seconds over the budget",
        "most bytes at once",
        "load",
    ]
    cells = [
        [
            row["way"],
            f"{row['seconds']:.0f} s",
            f"{row['processor_seconds']:.0f} s",
            f"{row['launched']}",
            f"{row['done']}",
            f"{row['launched_infeasible']}",
            f"{row['died']}",
            f"{row['over_seconds']:.0f}",
            f"{row['most_bytes'] / 2**20:.0f} MiB",
            f"{row['load']:.0f}",
        ]
        for row in in_order(rows)
    ]
    return measuring.table([budget, *heads], cells)


def in_order(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row for each way, packed by memfit first; results are kept in the order in which they were measured last."""
    return sorted(rows, key=lambda row: list(WAYS).index(row["way"]))


def short_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a reader of other pages wants to know of it, as Markdown."""
    heads = ["time", "launched though no plan fits", "no room on a device", "time over the budget"]
    cells = [
        [
            row["way"],
            f"{row['seconds']:.0f} s",
            f"{row['launched_infeasible']}",
            f"{row['died']}",
            f"{row['over_seconds']:.0f} s",
        ]
        for row in in_order(rows)
    ]
    return measuring.table([f"{rows[0]['trials']} runs in {BUDGET >> 20} MiB", *heads], cells)
