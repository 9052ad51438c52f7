"""Several devices: predicted against measured peak of every rank, DeepSpeed's estimates beside it, and plans against FSDP2 with checkpoint on every block.

python bench/sharding/run.py [--ranks 2 4] [--rounds 9]    # results of other numbers of ranks are kept
python bench/sharding/run.py --only peaks --ranks 2 4      # of data parallelism and ZeRO; the rest is kept
python bench/sharding/run.py --only pipelines --ranks 2    # peaks of ranks with stages; the rest is kept
python bench/sharding/run.py --only seconds --ranks 2 4    # predicted beside measured seconds, of one process too
python bench/sharding/run.py --only others --ranks 2   # bytes of DeepSpeed's stages and of a pipeline with equal parameters
python bench/sharding/run.py --only beside --ranks 2 --rounds 50 [--rival NAME]   # time of plans in as many bytes as each of them takes
python bench/sharding/run.py --only waiting                # how long ranks of pipelines wait for each other; the rest is kept
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()

QUESTION = "sharding"
Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
PARTS = (1, 4)
SHARES = {"plain": 1.0, "half way": 0.5, "smallest": 0.0}
PIPELINE_SHARES = {"plain": 1.0, "85 % of plain": 0.85, "smallest": 0.0}
MUCH = 1 << 50
LIMIT_SECONDS = 900.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def planned(budget: int | None = None, **fixed: Any) -> Any:
    """The plan for a rank's batch; plain where no budget is given."""
    from sharding.arrangements import adamw, gpt

    import memfit

    model, sample, loss_fn = gpt()
    return memfit.plan(model, sample, loss_fn, MUCH if budget is None else budget, adamw, fixed=fixed)


def between(plan: Any) -> Iterator[tuple[str, Any]]:
    """Plain, half way between it and the smallest, and the smallest."""
    import memfit
    from memfit.planning import replan

    smallest, largest = memfit.smallest_budget(plan), plan.prediction.peak_bytes
    for name, share in SHARES.items():
        yield name, plan if share == 1.0 else replan(plan, round(smallest + (largest - smallest) * share))


def with_estimates(rows: Rows) -> list[Row]:
    """The rows with what others say beforehand: of each way, and of what is written by hand."""
    from sharding.estimators import deepspeed, tracked

    from memfit.techniques.sharding import ONE_UNIT, WAYS

    found = []
    for row in rows:
        more: Row = {}
        if row["row"] == "peak" and row["way"] in (*WAYS, ONE_UNIT):
            plain = row["micro_batches"] == 1 and row["plan"] == "plain"
            way = row["way"].partition("+")[0]
            more["estimate_bytes"] = deepspeed(way, row["ranks"])
            more["tracked_bytes"] = tracked(way, row["ranks"]) if plain and row["way"] in WAYS else None
        elif row["row"] == "hand" and row["name"].startswith("by hand"):
            more["tracked_bytes"] = tracked("zero3", row["ranks"], checkpoint="every block" in row["name"])
        found.append({**row, **more})
        say(f"estimated: {row.get('way', row.get('name'))} {more}")
    return found


def predicted(ranks: int) -> list[Row]:
    """Every way, number of micro-batches and plan."""
    from memfit.techniques.sharding import ONE_UNIT, WAYS, setting_of
    from sharding import arrangements
    from sharding.ranks import on_ranks

    rows: list[Row] = []
    plans: list[Any] = []
    for way in (*WAYS, ONE_UNIT):
        for parts in PARTS:
            made = planned(sharding=setting_of(way, ranks), micro_batches=parts)
            for name, plan in between(made):
                plans.append(plan)
                rows.append(
                    {
                        "row": "peak",
                        "ranks": ranks,
                        "way": way,
                        "micro_batches": parts,
                        "plan": name,
                        "predicted_bytes": [figures.peak_bytes for figures in plan.prediction.ranks],
                        "estimate_bytes": None,
                    }
                )
            say(f"planned: {way}, {ranks} ranks, {parts} micro-batches")
    data = [plan.to_json() for plan in plans]
    measured = on_ranks(ranks, arrangements.peaks, data, limit=LIMIT_SECONDS)
    for number, row in enumerate(rows):
        row["measured_bytes"] = [of_rank[number]["peak_bytes"] for of_rank in measured]
    return rows


def pipelined(ranks: int) -> list[Row]:
    """Pipelines, alone and beside each other: with everything kept, and in less."""
    from sharding.arrangements import adamw, gpt

    import memfit
    from sharding import arrangements
    from sharding.ranks import on_ranks

    rows: list[Row] = []
    plans: list[Any] = []
    for setting in (
        f"1f1b/{ranks}",
        f"gpipe/{ranks}",
        f"interleaved/{ranks}",
        *([f"1f1b/{ranks // 2}x2", f"1f1b/{ranks // 2}x2+zero1"] if ranks > 2 else []),
    ):
        model, sample, loss_fn = gpt()
        fixed = {"sharding": setting, "micro_batches": 2 * ranks}
        plain = memfit.plan(model, sample, loss_fn, MUCH, adamw, devices=ranks, fixed=fixed)
        least, most = memfit.smallest_budget(plain), plain.prediction.peak_bytes
        for name, share in PIPELINE_SHARES.items():
            plan = plain if share == 1.0 else memfit.replan(plain, max(least, int(share * most)))
            plans.append(plan)
            rows.append(
                {
                    "row": "peak",
                    "ranks": ranks,
                    "way": plan.choices.sharding,
                    "micro_batches": plan.choices.micro_batches,
                    "plan": name,
                    "predicted_bytes": [figures.peak_bytes for figures in plan.prediction.ranks],
                    "estimate_bytes": None,
                }
            )
        say(f"planned: {setting}")
    measured = on_ranks(ranks, arrangements.peaks, [plan.to_json() for plan in plans], limit=LIMIT_SECONDS)
    for number, row in enumerate(rows):
        row["measured_bytes"] = [of_rank[number]["peak_bytes"] for of_rank in measured]
    return rows


def alone() -> Row:
    """One process without a group: predicted and measured."""
    from sharding import arrangements

    plan = planned(micro_batches=1)
    step = arrangements.Planned(plan.to_json())
    step.step()
    peak = arrangements.least_of(step.peak)
    return {
        "row": "peak",
        "ranks": 1,
        "way": "one process",
        "micro_batches": 1,
        "plan": "plain",
        "predicted_bytes": [plan.prediction.peak_bytes],
        "measured_bytes": [peak],
        "estimate_bytes": None,
    }


def timed(ranks: int, rounds: int) -> list[Row]:
    """Plain steps of every way, and of a pipeline: predicted seconds, and measured ones by the clock and of the processor."""
    from sharding.arrangements import adamw, gpt

    import memfit
    from memfit.techniques.sharding import ONE_UNIT, WAYS
    from sharding import arrangements
    from sharding.ranks import on_ranks

    if ranks == 1:
        plans = [planned(micro_batches=1)]
        measured = [arrangements.timed(0, [plan.to_json() for plan in plans], rounds)]
    else:
        plans = []
        for way in (*WAYS, ONE_UNIT, "1f1b"):
            model, sample, loss_fn = gpt()
            fixed = {"sharding": f"{way}/{ranks}", "micro_batches": 2 * ranks if way == "1f1b" else 1}
            plans.append(memfit.plan(model, sample, loss_fn, MUCH, adamw, devices=ranks, fixed=fixed))
            say(f"planned: {way}, {ranks} ranks")
        measured = on_ranks(ranks, arrangements.timed, [plan.to_json() for plan in plans], rounds, limit=LIMIT_SECONDS)
    return [
        {
            "row": "seconds",
            "ranks": ranks,
            "way": plan.choices.sharding.partition("/")[0] or "one process",
            "micro_batches": plan.choices.micro_batches,
            "rounds": rounds,
            "predicted_seconds": plan.prediction.step_seconds,
            # A step is over with the last rank.
            "clock_seconds": measuring.quartiles(
                max(clock for _, clock in of_ranks)
                for of_ranks in zip(*(of_rank[number] for of_rank in measured), strict=True)
            ),
            "processor_seconds": statistics.mean(
                statistics.median(used for used, _ in of_rank[number]) for of_rank in measured
            ),
        }
        for number, plan in enumerate(plans)
    ]


def against_hand(ranks: int, rounds: int) -> list[Row]:
    """Plans in the bytes that checkpoint on every block takes, the smallest plans, and the time of all in turns."""
    import memfit
    from memfit.techniques.sharding import setting_of
    from sharding import arrangements
    from sharding.ranks import on_ranks

    hand = on_ranks(ranks, arrangements.peaks_by_hand, limit=LIMIT_SECONDS)
    budget = max(of_rank["by hand, every block"] for of_rank in hand)
    plans: dict[str, Any] = {}
    for name, fixed in (("recomputation alone", {"micro_batches": 1}), ("micro-batches, too", {})):
        made = planned(sharding=setting_of("zero3", ranks), **fixed)
        least = memfit.smallest_budget(made)
        if least <= budget:
            plans[f"plan in as many bytes, {name}"] = memfit.replan(made, budget)
        plans[f"smallest plan, {name}"] = memfit.replan(made, least)
        say(f"planned against {budget} bytes by hand: {name}, smallest {least}")
    measured = on_ranks(
        ranks,
        arrangements.in_turns,
        {name: plan.to_json() for name, plan in plans.items()},
        rounds,
        limit=LIMIT_SECONDS,
    )
    found = []
    for name in measured[0]:
        ratios = [
            a / b
            for of_rank in measured
            for a, b in zip(of_rank[name]["seconds"], of_rank["by hand, every block"]["seconds"], strict=True)
        ]
        low, median, high = measuring.quartiles(ratios)
        plan = plans.get(name)
        found.append(
            {
                "row": "hand",
                "ranks": ranks,
                "name": name,
                "rounds": rounds,
                "measured_bytes": [of_rank[name]["peak_bytes"] for of_rank in measured],
                "predicted_bytes": None if plan is None else [figures.peak_bytes for figures in plan.prediction.ranks],
                "micro_batches": 1 if plan is None else plan.choices.micro_batches,
                "seconds": statistics.median(s for of_rank in measured for s in of_rank[name]["seconds"]),
                "time_ratio": median,
                "quartiles": [low, high],
            }
        )
    return found


def of_others(ranks: int) -> list[Row]:
    """Bytes of DeepSpeed's stages and of a pipeline with equal parameters."""
    from sharding import others
    from sharding.ranks import on_ranks

    return others_rows(ranks, on_ranks(ranks, others.peaks, limit=LIMIT_SECONDS))


def others_rows(ranks: int, measured: Sequence[Mapping[str, int]]) -> list[Row]:
    """What was metered on each rank, as rows."""
    from sharding import others

    return [
        {
            "row": "other",
            "ranks": ranks,
            "name": name,
            "way": way,
            "measured_bytes": [of_rank[name] for of_rank in measured],
        }
        for name, (way, _) in others.OTHERS.items()
    ]


def table(rows: Rows) -> str:
    """As Markdown."""
    from sharding.tables import page

    return page(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only",
        choices=["peaks", "pipelines", "waiting", "estimates", "seconds", "others", "beside"],
        help="the rest of the results is kept",
    )
    parser.add_argument("--rival", default="", help="of --only beside: this one alone")
    arguments = parser.parse_args()
    measuring.steady_allocator()
    import torch

    from sharding import arrangements, beside, waiting

    torch.set_num_threads(1)
    if arguments.only == "estimates":
        kept = measuring.kept(QUESTION)
        measuring.keep(QUESTION, kept[0]["machine"], with_estimates(kept))
        print(table(measuring.kept(QUESTION)))
        return
    arrangements.on_path()
    if arguments.only == "seconds":
        made = [row for ranks in (1, *arguments.ranks) for row in timed(ranks, arguments.rounds)]
        kept = [
            row
            for row in measuring.kept(QUESTION)
            if row["row"] != "seconds" or row["ranks"] not in {1, *arguments.ranks}
        ]
        measuring.keep(QUESTION, measuring.machine(), sorted([*made, *kept], key=lambda row: row["ranks"]))
        return
    if arguments.only == "others":
        made = [row for ranks in arguments.ranks for row in of_others(ranks)]
        kept = [row for row in measuring.kept(QUESTION) if row["row"] != "other" or row["ranks"] not in arguments.ranks]
        measuring.keep(QUESTION, measuring.machine(), [*kept, *made])
        return
    if arguments.only == "beside":
        for ranks in arguments.ranks:
            made = beside.rows(ranks, arguments.rounds, LIMIT_SECONDS, say, arguments.rival)
            again = {(row["ranks"], row["name"]) for row in made}
            kept = [
                row
                for row in measuring.kept(QUESTION)
                if row["row"] != "beside" or (row["ranks"], row["name"]) not in again
            ]
            measuring.keep(QUESTION, measuring.machine(), [*kept, *made])
        return
    if arguments.only == "waiting":
        kept = [row for row in measuring.kept(QUESTION) if row["row"] != "waiting"]
        measuring.keep(QUESTION, measuring.machine(), [*kept, *waiting.rows()])
        return
    if arguments.only in {"peaks", "pipelines"}:
        peaks = pipelined if arguments.only == "pipelines" else lambda ranks: with_estimates(predicted(ranks))
        made = [row for ranks in arguments.ranks for row in peaks(ranks)]
        again = {(row["ranks"], row["way"]) for row in made}
        kept = [
            row
            for row in measuring.kept(QUESTION)
            if row["row"] != "peak" or (row["ranks"], row.get("way")) not in again
        ]
        measuring.keep(QUESTION, measuring.machine(), [*made, *kept])
        return
    rows: list[Row] = [
        row for row in measuring.kept(QUESTION) if row["ranks"] not in {1, *arguments.ranks} or row["row"] == "waiting"
    ]
    rows += [alone(), *timed(1, arguments.rounds)]
    for ranks in arguments.ranks:
        for found in (
            predicted,
            partial(timed, rounds=arguments.rounds),
            partial(against_hand, rounds=arguments.rounds),
            pipelined,
            of_others,
            partial(beside.rows, rounds=max(50, arguments.rounds), limit=LIMIT_SECONDS, tell=say),
        ):
            rows += found(ranks)
            rows.sort(key=lambda row: (row["ranks"], row["row"] == "hand"))
            rows = with_estimates(rows)
            measuring.keep(QUESTION, measuring.machine(), rows)  # what is there stays if the rest is interrupted
    print(table(rows))


if __name__ == "__main__":
    main()
