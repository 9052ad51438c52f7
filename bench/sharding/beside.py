"""Time at equal peaks: each way that people write by hand, and memfit's plans in as many bytes as that takes, in turns in the same ranks.

Two plans: one that shares the step out in the same way, and one that may choose any.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import measuring
import torch.distributed as dist
from sharding.arrangements import ByHand, Planned, adamw, clocked, gpt, least_of, peaks
from sharding.others import OTHERS, EqualParameters

# Where a process's memory happens to lie makes its step up to a tenth faster or slower, for as long as it runs: so ranks are started anew after so many rounds.
ROUNDS_OF_A_START: Final = 5

RIVALS: Final[Mapping[str, tuple[str, Callable[[], Any]]]] = {
    "FSDP2": ("zero3", lambda: ByHand(checkpoint=False)),
    "FSDP2, every block": ("zero3", lambda: ByHand(checkpoint=True)),
    **OTHERS,
    # What a step takes besides its operations is the same for a larger model, and less of the step.
    "equal parameters, 1F1B, larger model": ("1f1b", lambda: EqualParameters(rebuilds=False, size="larger")),
    "equal parameters, 1F1B, every block, larger model": (
        "1f1b",
        lambda: EqualParameters(rebuilds=True, size="larger"),
    ),
}


def _size(name: str) -> str:
    return "larger" if name.endswith("larger model") else "small"


def peak(rank: int, name: str) -> int:
    """Of one of them."""
    del rank
    return _peak(_begun(name))


def in_turns(rank: int, name: str, plans: Mapping[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """In each round processor seconds and those by the clock, of a rival and of plans.

    Each runs twice in its turn and the second step is timed, as in training, where the step before was one of its kind; who begins changes from round to round.
    """
    del rank
    rival = _begun(name)
    planned = {which: Planned(plan, _size(name)) for which, plan in plans.items()}
    for each in planned.values():
        each.step()
        each.step()
    gc.collect()
    gc.freeze()
    steps = {"rival": rival.step, **{which: each.step for which, each in planned.items()}}
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    clock: dict[str, list[float]] = {who: [] for who in steps}
    order = list(steps)
    for _ in range(rounds):
        for who in order:
            steps[who]()
            dist.barrier()
            used, passed = clocked(steps[who])
            seconds[who].append(used)
            clock[who].append(passed)
        order.reverse()
    for each in planned.values():
        each.close()
    return {"seconds": seconds, "clock": clock}


def _begun(name: str) -> Any:
    warnings.simplefilter("ignore")  # others' deprecations
    arranged = RIVALS[name][1]()
    arranged.step()
    arranged.step()
    return arranged


def _peak(arranged: Any) -> int:
    return least_of(arranged.peak)


def rows(ranks: int, rounds: int, limit: float, tell: Callable[[str], None], only: str = "") -> list[dict[str, Any]]:
    """Of each rival, or of one: the plan in its bytes, the peaks of both, and the ratios of their seconds, of all ranks together, within a round."""
    import memfit
    from sharding.ranks import on_ranks

    found = []
    for name, (way, _) in RIVALS.items():
        if only not in {"", name}:
            continue
        rival_bytes = on_ranks(ranks, peak, name, limit=limit)
        budget = max(rival_bytes)
        # A rival that is a pipeline has its number of micro-batches; the others have one, and a plan as many as it likes.
        fixed = {"sharding": f"1f1b/{ranks}", "micro_batches": 2 * ranks} if way == "1f1b" else {"sharding": way}
        model, sample, loss_fn = gpt(_size(name))
        plans = {
            "plan": memfit.plan(model, sample, loss_fn, budget, adamw, devices=ranks, fixed=fixed),
            "free": memfit.plan(model, sample, loss_fn, budget, adamw, devices=ranks),
        }
        for which, plan in plans.items():
            tell(
                f"{which}, in the {budget} bytes of {name}: {plan.choices.sharding}, {plan.prediction.peak_bytes} bytes"
            )
        data = {which: plan.to_json() for which, plan in plans.items()}
        # Of each rank, by plan.
        measured = on_ranks(ranks, peaks, list(data.values()), _size(name), limit=limit)
        starts = [
            on_ranks(ranks, in_turns, name, data, ROUNDS_OF_A_START, limit=limit)
            for _ in range(max(1, rounds // ROUNDS_OF_A_START))
        ]
        # Of a step the processor time of all ranks; it is over with the last of them.
        sums, last = (
            {
                who: [over(each) for told in starts for each in zip(*(t[which][who] for t in told), strict=True)]
                for who in ("rival", *plans)
            }
            for which, over in (("seconds", sum), ("clock", max))
        )
        row: dict[str, Any] = {
            "row": "beside",
            "ranks": ranks,
            "name": name,
            "rounds": len(last["rival"]),
            "starts": len(starts),
            "rival_bytes": rival_bytes,
            "rival_seconds": statistics.median(sums["rival"]) / ranks,
            "rival_clock_seconds": statistics.median(last["rival"]),
        }
        for (which, plan), each in zip(plans.items(), zip(*measured, strict=True), strict=True):
            low, middle, high = measuring.quartiles(a / b for a, b in zip(sums[which], sums["rival"], strict=True))
            by_clock = measuring.quartiles(a / b for a, b in zip(last[which], last["rival"], strict=True))
            row[which] = {
                "way": plan.choices.sharding,
                "predicted_bytes": [figures.peak_bytes for figures in plan.prediction.ranks],
                "measured_bytes": [of_rank["peak_bytes"] for of_rank in each],
                "micro_batches": plan.choices.micro_batches,
                "time_ratio": middle,
                "quartiles": [low, high],
                "clock_ratio": by_clock,
            }
            tell(f"{name}, {which}: {middle:.3f} ({low:.3f} to {high:.3f}), by the clock {by_clock[1]:.3f}")
        found.append(row)
    return found
