"""Time at equal peaks: each way that people write by hand, and memfit's plan in as many bytes as that takes, in turns in the same ranks."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import measuring
import torch.distributed as dist
from sharding.arrangements import ByHand, Planned, adamw, gpt, least_of, seconds_of
from sharding.others import OTHERS

RIVALS: Final[Mapping[str, tuple[str, Callable[[], Any]]]] = {
    "FSDP2": ("zero3", lambda: ByHand(checkpoint=False)),
    "FSDP2, every block": ("zero3", lambda: ByHand(checkpoint=True)),
    **OTHERS,
}


def peak(rank: int, name: str) -> int:
    """Of one of them."""
    del rank
    return _peak(_begun(name))


def in_turns(rank: int, name: str, plan: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Peak, and processor seconds in each round, of a rival and of a plan.

    Each runs twice in its turn and the second step is timed, as in training, where the step before was one of its kind; who begins changes from round to round.
    """
    del rank
    rival = _begun(name)
    peaks = {"rival": _peak(rival)}  # before there is a plan's model, which would count as the rival's own
    planned = Planned(plan)
    planned.step()
    peaks["plan"] = least_of(planned.peak)
    gc.collect()
    gc.freeze()
    steps: list[tuple[str, Callable[[], None]]] = [("rival", rival.step), ("plan", planned.step)]
    seconds: dict[str, list[float]] = {"rival": [], "plan": []}
    for _ in range(rounds):
        for who, step in steps:
            step()
            dist.barrier()
            seconds[who].append(seconds_of(step))
        steps.reverse()
    planned.close()
    return {"peaks": peaks, "seconds": seconds}


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
        budget = max(on_ranks(ranks, peak, name, limit=limit))
        # A rival that is a pipeline has its number of micro-batches; the others have one, and a plan as many as it likes.
        fixed = {"sharding": f"1f1b/{ranks}", "micro_batches": 2 * ranks} if way == "1f1b" else {"sharding": way}
        model, sample, loss_fn = gpt()
        plan = memfit.plan(model, sample, loss_fn, budget, adamw, devices=ranks, fixed=fixed)
        tell(f"planned in the {budget} bytes of {name}: {plan.prediction.peak_bytes}")
        told = on_ranks(ranks, in_turns, name, plan.to_json(), rounds, limit=limit)
        sums = {
            who: [sum(each) for each in zip(*(t["seconds"][who] for t in told), strict=True)]
            for who in told[0]["seconds"]
        }
        low, middle, high = measuring.quartiles(a / b for a, b in zip(sums["plan"], sums["rival"], strict=True))
        found.append(
            {
                "row": "beside",
                "ranks": ranks,
                "name": name,
                "way": way,
                "rounds": rounds,
                "rival_bytes": [t["peaks"]["rival"] for t in told],
                "predicted_bytes": [figures.peak_bytes for figures in plan.prediction.ranks],
                "measured_bytes": [t["peaks"]["plan"] for t in told],
                "micro_batches": plan.choices.micro_batches,
                "rival_seconds": statistics.median(sums["rival"]) / ranks,
                "time_ratio": middle,
                "quartiles": [low, high],
            }
        )
        tell(f"{name}: {middle:.3f} ({low:.3f} to {high:.3f})")
    return found
