"""Techniques alone, in pairs and in random sets: predicted against measured peaks, claimed against true savings, numbers against plain PyTorch's.

python bench/techniques/run.py [--sets 20]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from memfit.planning import planning_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()

MODEL = "bert_sdpa"
STEPS = 3
SHARE = 0.6  # budget over the plain peak, where activations are dropped or swapped
PLENTY = 1 << 50

Row = dict[str, Any]


@dataclass(frozen=True)
class Technique:
    """How to ask for one: arguments of `memfit.plan`, whether it needs a tight budget, whether it changes results."""

    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    tight: bool = False
    changes: bool = False


TECHNIQUES = (
    Technique("accumulation", {"micro_batches": 2}, changes=True),
    Technique("freezing", more={"freeze": ["bert.embeddings", "bert.encoder.layer.0"]}, changes=True),
    Technique("bf16", {"precision": "bf16"}, changes=True),
    Technique("fp16", {"precision": "fp16"}, changes=True),
    Technique("8-bit state", {"state_format": "8bit"}, changes=True),
    Technique("bf16 parameters", {"parameters": "bf16"}, changes=True),
    Technique(
        "4-bit frozen weights",
        {"frozen_weights": "4bit"},
        {"freeze": ["bert.embeddings", "bert.encoder.layer.0"]},
        changes=True,
    ),
    Technique("state on disk", {"state_place": "disk"}),
    Technique("update in backward", {"update": "in_backward"}),
    Technique("streaming", {"streamed": "bert.encoder.layer"}),
    Technique("recompute", tight=True),
    Technique("swap", more={"host_budget": "1GiB"}, tight=True),
)


def apart(chosen: Sequence[Technique]) -> bool:
    """Whether no two of a set are values of one choice (two precisions)."""
    names = [name for technique in chosen for name in technique.fixed]
    return len(names) == len(set(names))


def asked(chosen: Sequence[Technique]) -> dict[str, Any]:
    """Arguments of `memfit.plan` for a set of techniques."""
    fixed: dict[str, Any] = {"micro_batches": 1}
    more: dict[str, Any] = {}
    for technique in chosen:
        fixed |= technique.fixed
        more |= technique.more
    return {**more, "fixed": fixed}


def trained(chosen: Sequence[Technique]) -> tuple[Any, Any, int]:
    """The plan of a set, the model after a few steps, and the measured peak of the last of them."""
    import torch

    import memfit
    from models import case

    model, sample, loss_fn = case(MODEL).build()
    plan = memfit.plan(model, sample, loss_fn, PLENTY, adamw, **asked(chosen))
    if any(technique.tight for technique in chosen):
        # Of what lasts nothing can be dropped: the share is of what is above it.
        smallest = memfit.smallest_budget(plan)
        plain = plan.prediction.peak_bytes
        plan = memfit.replan(plan, max(smallest, round(SHARE * plain)))
    engine = memfit.apply(plan, model)
    torch.manual_seed(5)
    for _ in range(STEPS - 1):
        engine.step(sample)
    measured = engine.step(sample, meter=True).peak_bytes
    assert measured is not None
    with engine.gathered():
        parameters = [p.detach().clone() for p in model.parameters()]
    return plan, parameters, measured


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def plainly() -> list[Any]:
    """Parameters after as many steps of a plain loop."""
    import torch

    from memfit import batches
    from models import case

    model, sample, loss_fn = case(MODEL).build()
    optimizer = adamw(model.parameters())
    torch.manual_seed(5)
    for _ in range(STEPS):
        batches.loss_of(model, sample, loss_fn).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def row_of(chosen: Sequence[Technique], references: dict[tuple[str, ...], Any], kind: str) -> Row:
    """What came of a set."""
    import torch

    import memfit

    row: Row = {"kind": kind, "techniques": [t.name for t in chosen]}
    print(" + ".join(row["techniques"]), file=sys.stderr, flush=True)
    changing = tuple(t for t in chosen if t.changes)
    key = tuple(t.name for t in changing)
    try:
        plan, parameters, measured = trained(chosen)
        if key not in references:
            references[key] = trained(changing)[1] if changing else plainly()
    except (memfit.InputError, memfit.InfeasibleError) as error:
        return {**row, "refused": str(error)}
    row["plain_bytes"] = plan.prediction.plain_peak_bytes
    row["predicted_bytes"], row["measured_bytes"] = plan.prediction.peak_bytes, measured
    row["equal"] = all(torch.equal(a, b) for a, b in zip(parameters, references[key], strict=True))
    row["swapped_bytes"] = sum(plan.script.lower_bytes.values())
    return row


def claims() -> Row:
    """What is commonly claimed for each technique, in bytes, of this model."""
    import memfit
    from models import case

    model, sample, loss_fn = case(MODEL).build()
    plan = memfit.plan(model, sample, loss_fn, PLENTY, adamw, fixed={"micro_batches": 1})
    trace = planning_of(plan).solver(1).trace
    of: dict[str, int] = {}
    for storage in trace.storages:
        of[storage.category] = of.get(storage.category, 0) + storage.bytes
    saved = 0
    for s in planning_of(plan).solver(1).recipes.saved:
        saved += trace.storages[s].bytes
    frozen = sum(
        p.numel() * 4 * 3
        for name, p in model.named_parameters()
        if name.startswith(("bert.embeddings", "bert.encoder.layer.0"))
    )
    linear = sum(
        p.nbytes for name, p in model.named_parameters() if name.startswith("bert.encoder.layer.0") and p.dim() == 2
    )
    layers = sum(p.numel() * 4 * 4 for name, p in model.named_parameters() if name.startswith("bert.encoder.layer"))
    return {
        "kind": "claims",
        "plain_bytes": plan.prediction.plain_peak_bytes,
        "claims": {
            "accumulation": ["half of what is saved for backward, with two parts", saved // 2],
            "freezing": ["gradients and state of what is frozen", frozen],
            "bf16": ["half of what is saved for backward", saved // 2],
            "fp16": ["half of what is saved for backward", saved // 2],
            "8-bit state": ["three quarters of the optimizer's state", of["optimizer_state"] * 3 // 4],
            "bf16 parameters": [
                "half of parameters, gradients and optimizer state",
                sum(of[name] for name in ("parameter", "gradient", "optimizer_state")) // 2,
            ],
            "4-bit frozen weights": [
                "gradients and state of what is frozen, and 7/8 of its linear weights",
                frozen + linear * 7 // 8,
            ],
            "state on disk": ["the optimizer's state", of["optimizer_state"]],
            "update in backward": ["all gradients", of["gradient"]],
            "streaming": ["parameters, gradients and state of the layers", layers],
            "recompute": ["what the budget asks for", None],
            "swap": ["what the budget asks for", None],
        },
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    sets = [r for r in rows if r["kind"] in {"pair", "set"} and "refused" not in r]
    count = {kind: sum(r["kind"] == kind for r in sets) for kind in ("pair", "set")}
    return "\n\n".join(
        [
            f"Plain peak: {_mib(_about(rows)['plain_bytes'])} MiB.",
            _alone(rows, [technique.name for technique in TECHNIQUES]),
            f"{count['pair']} pairs and {count['set']} random sets of three or four: {_worst(sets)}",
            measuring.table(
                ["together", "predicted, MiB", "measured, MiB", "error", "numbers"],
                [
                    [
                        " + ".join(r["techniques"]),
                        _mib(r["predicted_bytes"]),
                        _mib(r["measured_bytes"]),
                        _error(r),
                        "equal" if r["equal"] else "**differ**",
                    ]
                    for r in sets
                ],
            ),
            *_refused(rows),
        ]
    )


PAGES = {
    "4-bit-weights": ("4-bit frozen weights",),
    "8-bit-state": ("8-bit state",),
    "accumulation": ("accumulation",),
    "activation-offloading": ("swap",),
    "bf16-parameters": ("bf16 parameters",),
    "freezing": ("freezing",),
    "mixed-precision": ("bf16", "fp16"),
    "optimizer-state-offloading": ("state on disk",),
    "recompute": ("recompute",),
    "streaming": ("streaming",),
    "update-in-backward": ("update in backward",),
}
"""Page of docs/techniques -> what the technique is called here."""


def excerpt(rows: Sequence[Mapping[str, Any]], page: str) -> str:
    """Of the technique that a page is about: alone, and what came of it together with others."""
    names = PAGES.get(page, ())
    if not names:
        return ""
    own = [r for r in rows if r["kind"] in {"pair", "set"} and set(names) & set(r["techniques"])]
    sets = [r for r in own if "refused" not in r]
    parts = [
        (
            f"A small BERT with dropout and AdamW; plain peak: {_mib(_about(rows)['plain_bytes'])} MiB. *Claimed* is what is commonly said of the "
            "technique. *Results*: the parameters after three steps, compared bit for bit."
        ),
        _alone(rows, names),
        (
            f"Together with other techniques, {len(sets)} sets: {_worst(sets)} "
            "[All sets, what results are compared with, and why some differ](../figures.md#techniques-alone-and-together)."
        ),
    ]
    return "\n\n".join([*parts, *_refused(own)])


def _about(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next(r for r in rows if r["kind"] == "claims")


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def _error(row: Mapping[str, Any]) -> str:
    return f"{100 * (row['measured_bytes'] / row['predicted_bytes'] - 1):+.4f} %"


def _alone(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Each technique by itself, beside what is claimed for it."""
    about = _about(rows)
    cells = []
    for row in rows:
        if row["kind"] != "alone" or "refused" in row or row["techniques"][0] not in names:
            continue
        claim, claimed = about["claims"][row["techniques"][0]]
        cells.append(
            [
                row["techniques"][0],
                _mib(row["predicted_bytes"]),
                _mib(row["measured_bytes"]),
                _error(row),
                _mib(about["plain_bytes"] - row["measured_bytes"]),
                "" if claimed is None else _mib(claimed),
                claim,
                "equal" if row["equal"] else "**differ**",
            ]
        )
    heads = [
        "technique",
        "predicted, MiB",
        "measured, MiB",
        "error",
        "saves, MiB",
        "claimed, MiB",
        "the claim",
        "numbers",
    ]
    return measuring.table(heads, cells)


def _worst(sets: Sequence[Mapping[str, Any]]) -> str:
    """How far predictions were off at most, and where numbers differ."""
    worst = max((abs(r["measured_bytes"] / r["predicted_bytes"] - 1) for r in sets), default=0.0)
    unequal = [" + ".join(r["techniques"]) for r in sets if not r["equal"]]
    numbers = "equal in all." if not unequal else f"differ in {', '.join(unequal)}."
    return f"prediction off by {100 * worst:.4f} % at most; numbers {numbers}"


def _refused(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [[" + ".join(r["techniques"]), _why(r["refused"]).replace("|", "/")] for r in rows if "refused" in r]
    return ["Refused:", measuring.table(["together", "why"], cells)] if cells else []


def _why(message: str) -> str:
    """The reason alone: a message names what was fixed, then the techniques that exclude each other."""
    _, found, rest = message.partition(" cannot be honoured: ")
    return rest.partition(": ")[2] if found else message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=20, help="random sets of three or four that can stand together")
    wanted = parser.parse_args().sets
    references: dict[tuple[str, ...], Any] = {}
    rows = [claims()]
    rows += [row_of([t], references, "alone") for t in TECHNIQUES]
    print(f"{len(TECHNIQUES)} alone", flush=True)
    rows += [row_of(pair, references, "pair") for pair in combinations(TECHNIQUES, 2) if apart(pair)]
    print("all pairs", flush=True)
    draw = random.Random(0)
    found, tried = 0, 0
    while found < wanted and tried < 20 * wanted:
        tried += 1
        chosen = sorted(draw.sample(range(len(TECHNIQUES)), draw.choice((3, 4))))
        if not apart([TECHNIQUES[i] for i in chosen]):
            continue
        row = row_of([TECHNIQUES[i] for i in chosen], references, "set")
        if "refused" not in row and row["techniques"] not in [r["techniques"] for r in rows if r["kind"] == "set"]:
            rows.append(row)
            found += 1
    measuring.keep("techniques", measuring.machine(), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
