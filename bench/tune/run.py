"""Many trials on one device: packed by their predicted peaks, beside a fixed number at a time; and what a search costs beside plain Optuna."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import demo_search
import measuring
import own_runs

from memfit.errors import InfeasibleError, InputError
from memfit.runner import Ledger, Runner, RunRequest

CAPACITY = 24 << 30
SHARES = (1.0, 0.8, 0.6, 0.5, 0.4)  # of what plain takes, as budgets
STEPS = (200, 2000)  # of a trial, drawn
BUDGET = 600 << 20  # of the commands that really take memory
SIZES = (30, 300)  # MiB of each
TRIALS = 30
QUADRATIC = "import sys; x, y = map(float, sys.argv[1:]); print(f'value={(x - 1) ** 2 + (y + 2) ** 2!r}')"


@dataclass(frozen=True)
class Planned:
    """A trial with a plan."""

    name: str
    peak_bytes: int
    seconds: float


def planned_trials() -> tuple[list[Planned], int]:
    """Thirty trials, and how many more were infeasible: known by planning alone."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    import memfit

    models = {
        "BERT-base": BertConfig(),
        "BERT-large": BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        ),
    }
    combinations = [
        ("BERT-base", 32, 128),
        ("BERT-base", 64, 128),
        ("BERT-base", 16, 512),
        ("BERT-large", 16, 128),
        ("BERT-large", 48, 128),
        ("BERT-large", 8, 512),
    ]
    draw = random.Random(0)
    trials, infeasible = [], 0
    for name, batch, tokens in combinations:
        with torch.device("meta"):
            model = BertForSequenceClassification(models[name])
            sample = {
                "input_ids": torch.zeros(batch, tokens, dtype=torch.long),
                "attention_mask": torch.ones(batch, tokens, dtype=torch.long),
                "labels": torch.zeros(batch, dtype=torch.long),
            }
        plain = memfit.plan(model, sample, None, 1 << 50, device="rtx4090", fixed={"micro_batches": 1}, host_budget=0)
        for share in SHARES:
            budget = min(CAPACITY, int(share * plain.prediction.plain_peak_bytes))
            try:
                plan = memfit.replan(plain, budget)
            except InfeasibleError:
                infeasible += 1
                plan = memfit.replan(plain, memfit.smallest_budget(plain))
            steps = draw.randint(*STEPS)
            trials.append(
                Planned(
                    f"{name} {batch}x{tokens} {share}",
                    plan.prediction.peak_bytes,
                    steps * plan.prediction.step_seconds,
                )
            )
        print(f"{name}, batch {batch}, {tokens} tokens: planned", flush=True)
    draw.shuffle(trials)
    return trials, infeasible


def simulated(
    trials: Sequence[Planned], admitted: Callable[[list[Planned], list[Planned]], list[Planned]], *, shared: bool
) -> dict[str, Any]:
    """What happens on a clock that is simulated.

    Args:
        trials: in the order in which they come.
        admitted: which of those that wait start beside those that run.
        shared: whether each of n that run gets an n-th of the device.
    """
    waiting = list(trials)
    running: dict[Planned, float] = {}  # seconds that are left
    clock, used, died = 0.0, 0.0, 0
    ends = []
    while waiting or running:
        for trial in admitted(waiting, list(running)):
            waiting.remove(trial)
            if sum(each.peak_bytes for each in running) + trial.peak_bytes > CAPACITY:
                died += 1  # it gets no memory in its first step
            else:
                running[trial] = trial.seconds
        if not running:
            continue
        speed = 1 / len(running) if shared else 1.0
        passed = min(running.values()) / speed
        clock += passed
        used += passed * sum(each.peak_bytes for each in running)
        running = {each: left - passed * speed for each, left in running.items()}
        for each in [each for each, left in running.items() if left <= 1e-9]:
            del running[each]
            ends.append(clock)
    return {
        "seconds": clock,
        "mean_end_seconds": sum(ends) / max(1, len(ends)),
        "died": died,
        "done": len(ends),
        "idle": 1 - used / (clock * CAPACITY),
    }


def at_most(number: int) -> Callable[[list[Planned], list[Planned]], list[Planned]]:
    """A fixed number at a time, whatever they take."""
    return lambda waiting, running: waiting[: number - len(running)]


def packed() -> Callable[[list[Planned], list[Planned]], list[Planned]]:
    """By predicted peaks: the very rules of the runner."""
    ledger = Ledger({"cuda:0": CAPACITY})

    def admitted(waiting: list[Planned], running: list[Planned]) -> list[Planned]:
        names = {each.name for each in running}
        for name in ledger.running:
            if name not in names:
                ledger.give_back(name)
        requests = [RunRequest(each.name, (), peak_bytes={"cuda:0": each.peak_bytes}) for each in waiting]
        chosen = {request.name for request in ledger.admitted(requests)}
        return [each for each in waiting if each.name in chosen]

    return admitted


def packing() -> list[dict[str, Any]]:
    trials, infeasible = planned_trials()
    largest = max(trial.peak_bytes for trial in trials)
    ways: list[tuple[str, Callable[[], Callable[[list[Planned], list[Planned]], list[Planned]]]]] = [
        ("one at a time", lambda: at_most(1)),
        (
            f"{CAPACITY // largest} at a time, as the largest needs",
            lambda: at_most(max(1, CAPACITY // largest)),
        ),
        ("2 at a time (half a GPU each)", lambda: at_most(2)),
        ("4 at a time (n_jobs=4, a quarter each)", lambda: at_most(4)),
        ("packed by predicted peaks", packed),
    ]
    rows = []
    for name, way in ways:
        alone = simulated(trials, way(), shared=False)
        shared = simulated(trials, way(), shared=True)
        rows.append(
            {
                "part": "packing",
                "way": name,
                **alone,
                "shared_seconds": shared["seconds"],
                "shared_died": shared["died"],
                "infeasible": infeasible,
                "largest_bytes": largest,
                "smallest_bytes": min(trial.peak_bytes for trial in trials),
            }
        )
    return rows


def taking(mib: int) -> tuple[str, ...]:
    """A command that takes so much memory for half a second."""
    code = f"import time; x = bytearray({mib} << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(0.5)"
    return (sys.executable, "-I", "-S", "-c", code)


def resident(pid: int) -> int:
    """Bytes in memory of a guard's child."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) * 4096 for each in children)
    except (OSError, IndexError):
        return 0


def really(way: str, at_once: int | None, *, told: bool) -> dict[str, Any]:
    """Thirty commands under a budget, and five that could never fit.

    Args:
        way: its name.
        at_once: commands at a time.
        told: whether the runner is told what each takes.
    """
    draw = random.Random(1)
    sizes = [draw.randint(*SIZES) for _ in range(TRIALS)]
    refused, over, looks = 0, 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder,
        Runner(Path(folder, "runner"), {"cpu": BUDGET}, at_once) as runner,
    ):
        begin = time.perf_counter()
        for number, size in enumerate(sizes + [700] * 5):
            taken = (size + 16) << 20  # the interpreter itself takes about 10 MiB
            try:
                runner.submit(
                    RunRequest(
                        f"run-{number}",
                        taking(size),
                        peak_bytes={"cpu": taken} if told else {},
                        memory_limit_bytes=taken if told else None,
                    )
                )
            except InputError:
                refused += 1
        ends = []
        while runner.waiting or runner.running:
            ends += runner.poll(0.01)
            looks += 1
            over += sum(resident(each.pid) for each in runner._running.values()) > BUDGET
        seconds = time.perf_counter() - begin
    done = sum(end.kind == "done" for _, end in ends)
    return {"part": "real", "way": way, "seconds": seconds, "done": done, "over": over, "looks": looks, "refused": refused, "launched": len(ends)}  # fmt: skip


def processor_seconds() -> float:
    """Of this process and all that have ended below it."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def overhead() -> list[dict[str, Any]]:
    """Seconds for each trial."""
    import optuna

    from memfit.tune import read_search, run

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    words = [sys.executable, "-I", "-S", "-c", QUADRATIC]
    rows = []

    def inside(trial: optuna.Trial) -> float:
        x, y = (trial.suggest_float(name, -5.0, 5.0) for name in "xy")
        return float((x - 1) ** 2 + (y + 2) ** 2)

    def started(trial: optuna.Trial) -> float:
        values = [repr(trial.suggest_float(name, -5.0, 5.0)) for name in "xy"]
        done = subprocess.run([*words, *values], capture_output=True, text=True, check=True)
        return float(done.stdout.partition("=")[2])

    for name, objective in (
        ("Optuna, objective in the same process", inside),
        ("Optuna, a command for each trial", started),
    ):
        with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
            study = optuna.create_study(
                storage=f"sqlite:///{folder}/study.sqlite", sampler=optuna.samplers.TPESampler(seed=0)
            )
            begin, used = time.perf_counter(), processor_seconds()
            study.optimize(objective, n_trials=TRIALS)
            rows.append(
                {
                    "part": "overhead",
                    "way": name,
                    "seconds": (time.perf_counter() - begin) / TRIALS,
                    "processor_seconds": (processor_seconds() - used) / TRIALS,
                    "best": study.best_value,
                }
            )
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        space = {name: {"low": -5.0, "high": 5.0} for name in "xy"}
        search = {
            "space": space,
            "command": [*words, "{x}", "{y}"],
            "objective": "value",
            "trials": TRIALS,
            "out": folder,
        }
        read = read_search({"search": search}, folder)
        begin, used = time.perf_counter(), processor_seconds()
        found = run(read)
        assert found.best[0].values
        rows.append(
            {
                "part": "overhead",
                "way": "memfit tune",
                "seconds": (time.perf_counter() - begin) / TRIALS,
                "processor_seconds": (processor_seconds() - used) / TRIALS,
                "best": found.best[0].values[0],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    parts = {name: [row for row in rows if row["part"] == name] for name in ("packing", "real", "overhead", "own runs")}
    searched = [row for row in rows if row["part"].startswith("demo ")]
    first = parts["packing"]
    one = first[0]["seconds"]
    heads = ["total, no slowdown", "of one at a time", "total, device shared", "mean time to an end", "died", "done"]
    told = (
        f"30 trials of {first[0]['smallest_bytes'] / 2**30:.1f} to {first[0]['largest_bytes'] / 2**30:.1f} GiB; {first[0]['infeasible']} of the budgets "
        "that were asked for fit no plan, which planning says before anything starts (the smallest plan takes their place)."
    )
    return "\n\n".join(
        [
            told,
            measuring.table(
                ["24 GiB, simulated clock", *heads, "bytes idle"],
                [
                    [
                        row["way"],
                        f"{row['seconds'] / 60:.0f} min",
                        f"{row['seconds'] / one:.2f}",
                        f"{row['shared_seconds'] / 60:.0f} min",
                        f"{row['mean_end_seconds'] / 60:.0f} min",
                        f"{row['died']}",
                        f"{row['done']}",
                        f"{100 * row['idle']:.0f} %",
                    ]
                    for row in first
                ],
            ),
            measuring.table(
                ["600 MiB, real processes", "total", "done", "looks over the budget", "launched of 5 that cannot fit"],
                [
                    [
                        row["way"],
                        f"{row['seconds']:.1f} s",
                        f"{row['done']}",
                        f"{row['over']} of {row['looks']}",
                        f"{row['launched'] - TRIALS}",
                    ]
                    for row in parts["real"]
                ],
            ),
            measuring.table(
                ["30 trials, SQLite", "seconds a trial", "of the processor", "best value"],
                [[row["way"], f"{row['seconds']:.2f}", f"{row['processor_seconds']:.2f}", f"{row['best']:.6f}"] for row in parts["overhead"]],
            ),
            *([own_runs.table(parts["own runs"])] if parts["own runs"] else []),
            *([demo_search.table(searched)] if searched else []),
        ]
    )  # fmt: skip


def kept_beside(rows: Sequence[dict[str, Any]], stays: Callable[[dict[str, Any]], bool]) -> None:
    """Keep these rows, and of those that are kept already the ones that stay."""
    before = [row for row in measuring.kept("tune") if stays(row)]
    measuring.keep("tune", measuring.machine(), [*before, *rows])


def _of_another_way(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return (row["part"], row["way"]) != (other["part"], other.get("way"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--overhead", action="store_true", help="ask the third question alone, and keep the answers to the others"
    )
    parser.add_argument(
        "--own-runs", action="store_true", help="ask the fourth question alone, and keep the answers to the others"
    )
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help="of the fourth question (30); others than 30 are not kept"
    )
    parser.add_argument("--steps", type=int, default=10, help="of each of its runs (10)")
    parser.add_argument("--way", default="", help="ask the fourth question of the ways whose names have these words")
    parser.add_argument(
        "--demo-search", action="store_true", help="ask the fifth question alone, and keep the answers to the others"
    )
    parser.add_argument(
        "--demo-loop",
        action="store_true",
        help="train both settings of the fifth question, as the kept rows have them, in the demo's own loop",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="of the fifth question: with how many seeds both settings are trained (1: that of the search)",
    )
    arguments = parser.parse_args()
    if arguments.demo_loop:
        searched = [row for row in measuring.kept("tune") if row["part"] == "demo search"]
        found = demo_search.in_the_demos_loop(searched, range(arguments.seeds))
        kept_beside(found, lambda row: row["part"] != demo_search.LOOP)
        return
    if arguments.demo_search:
        found = demo_search.measured(range(arguments.seeds))
        print(demo_search.table(found), flush=True)
        kept_beside(found, lambda row: not row["part"].startswith("demo "))
        return
    if arguments.own_runs:
        for row in own_runs.measured(arguments.trials, arguments.steps, arguments.way):
            if arguments.trials == TRIALS:  # kept as it comes: all ways together take a quarter of an hour
                kept_beside([row], partial(_of_another_way, row))
        return
    rows = overhead()
    if arguments.overhead:
        kept_beside(rows, lambda row: row["part"] != "overhead")
        return
    rows += [
        really("one at a time", 1, told=False),
        really("4 at a time", 4, told=False),
        really("packed by what each is promised", None, told=True),
    ]
    rows = [
        *packing(),
        *rows,
        *own_runs.measured(TRIALS, arguments.steps),
        *demo_search.measured(range(arguments.seeds)),
    ]
    print(table(rows), flush=True)
    measuring.keep("tune", measuring.machine(), rows)


if __name__ == "__main__":
    main()
