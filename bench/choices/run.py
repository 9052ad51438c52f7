"""The joint search beside random choices, with more bytes and with more allowed; and how long it takes on BERT-large.

python bench/choices/run.py [--draws 100] [--models gpt,large]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()

Row = dict[str, Any]

MODELS = ("gpt", "bert_sdpa", "unet")
SHARES = (0.6, 0.35)  # of the plain peak
EVERYTHING: Mapping[str, Any] = {"allow": ["bf16", "8bit", "in_backward"], "host_budget": "8GiB"}
ON_PURPOSE = 1.01  # as `memfit.planner.found.WORTH_MORE`
LARGE = "large"
LARGE_WORDS = "BERT-large, batch 32, 128 tokens"
LARGE_SHARES = (0.7, 0.4)


def drawn(search: Any, budget: int, draws: int) -> tuple[int, float, str]:
    """How many random choices fit, the fewest seconds of them, and what that one is."""
    from memfit.planner.solvers import doubled_up_to

    chances = [(way, number) for way in search.bundle.candidates for number in doubled_up_to(search.bundle.samples)]
    random.Random(0).shuffle(chances)
    fitting, best, words = 0, inf, ""
    for way, number in chances:
        if fitting == draws:
            break
        alone = search.restricted(way, number)  # keeps what is captured and planned already
        seconds, name = seconds_of(alone, budget)
        fitting += seconds < inf
        if seconds < best:
            best, words = seconds, name
    return fitting, best, words


def seconds_of(search: Any, budget: int) -> tuple[float, str]:
    """Of the plan for a budget, and its name; infinite where nothing fits."""
    from memfit.errors import InfeasibleError, MemfitError
    from memfit.techniques.choices import in_words

    try:
        made = search.plan(budget)
    except InfeasibleError:
        return inf, "nothing fits"
    except MemfitError as error:  # cannot be captured so
        return inf, str(error)
    words = in_words(made.choices)
    return made.prediction.step_seconds, f"{words + ', ' if words else ''}{made.choices.micro_batches} micro-batches"


def rows_of(name: str, draws: int) -> list[Row]:
    """One model at every budget."""
    from memfit.api import default_optimizer
    from memfit.capture.trace_source import TraceSource
    from models import case

    # Traces are kept: every search captures what none before it has, and times nothing again.
    source = TraceSource(*case(name).build(), default_optimizer)
    plain = measuring.planning(source).plain_peak()
    rows: list[Row] = []
    for share in SHARES:
        budget = round(plain * share)
        begin = time.process_time()
        search = measuring.planning(source, **EVERYTHING)
        chosen, words = seconds_of(search, budget)
        cpu = time.process_time() - begin
        fitting, best, other = drawn(search, budget, draws)
        rows.append(
            {
                "kind": "random",
                "model": name,
                "share": share,
                "budget_bytes": budget,
                "ways": len(search.bundle.candidates),
                "chosen": words,
                "chosen_seconds": chosen,
                "fitting": fitting,
                "best": other,
                "best_seconds": best if fitting else None,
                "without_seconds": seconds_of(measuring.planning(source), budget)[0],
                "cpu_seconds": cpu,
            }
        )
        print(table(rows[-1:]).splitlines()[2], flush=True)
    return [{**row, **{k: None for k, v in row.items() if v == inf}} for row in rows]


def large() -> Row:
    """BERT-large, everything allowed: seconds to a plan, operations timed already and not."""
    import os
    import tempfile

    from planning.run import bert_large

    import memfit

    os.environ["MEMFIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="memfit-bench-")
    model, sample, loss_fn = bert_large()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50).prediction.plain_peak_bytes
    spent = []
    for share in LARGE_SHARES:
        wall, cpu = time.perf_counter(), time.process_time()
        made = memfit.plan(model, sample, loss_fn, round(plain * share), **EVERYTHING)
        spent.append(
            {
                "share": share,
                "wall_seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
                "chosen": made.explain().splitlines()[1],
            }
        )
    return {"kind": "large", "model": LARGE, "spent": spent}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    compared = [r for r in rows if r["kind"] == "random"]
    first = measuring.table(
        ["model", "budget / plain", "ways", "chosen", "random ones that fit", "best of them", "chosen is slower by"],
        [
            [
                r["model"],
                f"{r['share']:.2f}",
                str(r["ways"]),
                r["chosen"],
                str(r["fitting"]),
                r["best"],
                f"{100 * (r['chosen_seconds'] / r['best_seconds'] - 1):+.1f} %" if r["best_seconds"] else "",
            ]
            for r in compared
        ],
    )
    slower_bytes = sum(
        one["chosen_seconds"] > other["chosen_seconds"] * ON_PURPOSE
        for one in compared
        for other in compared
        if one["model"] == other["model"]
        and one["share"] > other["share"]
        and one["chosen_seconds"]
        and other["chosen_seconds"]
    )
    slower_allowed = sum(
        r["chosen_seconds"] > r["without_seconds"] * ON_PURPOSE
        for r in compared
        if r["chosen_seconds"] and r["without_seconds"]
    )
    words = f"Slower by more than 1 % with more bytes: {slower_bytes}; with more allowed: {slower_allowed}."
    second = measuring.table(
        ["model", "budget / plain", "seconds to the plan", "CPU seconds"],
        [
            [LARGE_WORDS, f"{s['share']:.2f}", f"{s['wall_seconds']:.0f}", f"{s['cpu_seconds']:.0f}"]
            for r in rows
            if r["kind"] == "large"
            for s in r["spent"]
        ],
    )
    return "\n\n".join([first, words, second] if any(r["kind"] == "large" for r in rows) else [first, words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, help="that fit, at each budget")
    parser.add_argument(
        "--models", default=",".join((*MODELS, LARGE)), help="separated by commas; others keep what they have"
    )
    asked = parser.parse_args()
    for name in asked.models.split(","):
        new = [large()] if name == LARGE else rows_of(name, asked.draws)
        kept = [{k: v for k, v in r.items() if k not in {"bench", "machine"}} for r in measuring.kept("choices")]
        rows = [*(r for r in kept if r["model"] != name), *new]
        measuring.keep("choices", measuring.machine(), sorted(rows, key=lambda r: (*MODELS, LARGE).index(r["model"])))
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
