"""Largest batches and deepest networks in a card's memory, beside what was published: BERT on 31 GiB, the 1000-layer ResNet, VGG-16, a BERT of 100 layers.

python bench/seeds/run.py [--only bert_large_128] [--missing]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()

CARD = "v100"
GIB = 1 << 30
BERT_BYTES = 31 * GIB
LIMITS = (0.12, 0.20, inf)  # extra time a step
CLOSE = 1.02  # largest batches are found to this factor
PLENTY = 1 << 50

Row = dict[str, Any]


def adam(parameters: Any) -> Any:
    import torch

    return torch.optim.Adam(parameters, fused=True)


@dataclass(frozen=True)
class Bert:
    """A shape of BERT, and what was published for it: (batch plain, batch recomputed, extra time); 0 where nothing was."""

    name: str
    hidden: int
    layers: int
    tokens: int
    published: tuple[int, int, float]

    def build(self, batch: int, *, recompute: bool = False) -> tuple[Any, Any, None]:
        """Model on the meta device, sample, no loss function: the model's own."""
        import torch
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            intermediate_size=4 * self.hidden,
            attn_implementation="eager",
            num_labels=3,
        )
        with torch.device("meta"):
            model = BertForSequenceClassification(config).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sample = {
            "input_ids": torch.randint(1, config.vocab_size, (batch, self.tokens)),
            "attention_mask": torch.ones(batch, self.tokens, dtype=torch.long),
            "labels": torch.zeros(batch, dtype=torch.long),
        }
        return model, sample, None


BERTS = (
    Bert("bert_large_128", 1024, 24, 128, (93, 562, 0.29)),
    Bert("bert_base_128", 768, 12, 128, (273, 1390, 0.0)),
    Bert("bert_large_512", 1024, 24, 512, (14, 56, 0.437)),
    Bert("bert_base_512", 768, 12, 512, (42, 145, 0.463)),
)


def predicted(built: tuple[Any, Any, Any], budget: int) -> Any:
    """The plan of one batch in these bytes; None where nothing fits."""
    import memfit

    try:
        return memfit.plan(*built, budget, adam, fixed={"micro_batches": 1}, device=CARD)
    except memfit.InfeasibleError:
        return None


def largest(fits: Callable[[int], bool], known: int) -> int:
    """The largest batch that fits, to a factor of CLOSE; `known` fits."""
    low, high = known, known * 2
    while fits(high):
        low, high = high, high * 2
    while high > max(low * CLOSE, low + 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def bert_row(bert: Bert) -> Row:
    """Largest batches of one shape."""
    plain_peaks: dict[tuple[int, bool], tuple[int, float]] = {}

    def plain(batch: int, *, recompute: bool = False) -> tuple[int, float]:
        if (batch, recompute) not in plain_peaks:
            made = predicted(bert.build(batch, recompute=recompute), PLENTY)
            plain_peaks[batch, recompute] = made.prediction.plain_peak_bytes, made.prediction.plain_step_seconds
        return plain_peaks[batch, recompute]

    begin = time.perf_counter()
    first = largest(lambda b: plain(b)[0] <= BERT_BYTES, 1)
    layers = largest(lambda b: plain(b, recompute=True)[0] <= BERT_BYTES, first)
    slowdowns: dict[int, float] = {}

    def slowdown(batch: int) -> float:
        if batch not in slowdowns:
            made = predicted(bert.build(batch), BERT_BYTES)
            slowdowns[batch] = inf if made is None else made.prediction.slowdown - 1
            print(f"  {bert.name}: batch {batch}, {100 * slowdowns[batch]:+.1f} %", file=sys.stderr, flush=True)
        return slowdowns[batch]

    def within(limit: float) -> Callable[[int], bool]:
        return lambda batch: slowdown(batch) <= limit and slowdown(batch) < inf

    found = []
    known = first
    for limit in LIMITS:
        known = largest(within(limit), known)
        found.append(
            {
                "limit": None if limit == inf else limit,
                "batch": known,
                "extra": slowdown(known) if known > first else 0.0,
            }
        )
    return {
        "kind": "batch",
        "name": bert.name,
        "budget_bytes": BERT_BYTES,
        "plain": first,
        "layers": layers,
        "layers_extra": plain(layers, recompute=True)[1] / plain(layers)[1] - 1,
        "memfit": found,
        "at_layers": slowdown(layers),
        "published": bert.published,
        "seconds": time.perf_counter() - begin,
    }


@dataclass(frozen=True)
class Network:
    """One network and batch, and what was published: bytes plain, bytes in less, extra time there (0: not told)."""

    name: str
    words: str
    build: Callable[[], tuple[Any, Any, Any]]
    published: tuple[float, float, float]
    budget: int


def _resnet1000() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    from models.built import cross_entropy
    from models.convolution import Bottleneck

    with torch.device("meta"):
        blocks: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inner = 64
        for stage, count in enumerate((5, 37, 286, 5)):  # 333 bottlenecks of three convolutions
            outer = 256 * 2**stage
            for number in range(count):
                blocks.append(Bottleneck(inner, outer, 2 if stage and not number else 1))
                inner = outer
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000)).train()
    return model, (torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)), cross_entropy


def _vgg16() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    from models.built import cross_entropy

    with torch.device("meta"):
        layers: list[nn.Module] = []
        inner = 3
        for outer, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(inplace=True)]
                inner = outer
            layers.append(nn.MaxPool2d(2))
        head = (
            nn.Linear(512 * 49, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
        )
        model = nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, 1000)).train()
    return model, (torch.zeros(256, 3, 224, 224), torch.zeros(256, dtype=torch.long)), cross_entropy


def _bert100() -> tuple[Any, Any, Any]:
    return Bert("", 1024, 100, 128, (0, 0, 0)).build(32)


NETWORKS = (
    Network(
        "resnet1000",
        "ResNet of 1000 layers (333 bottlenecks), batch 32 at 224",
        _resnet1000,
        (48e9, 7e9, 0.30),
        7 * 10**9,
    ),
    Network("vgg16", "VGG-16, batch 256 at 224", _vgg16, (28e9, 12e9, 0.18), 12 * 10**9),
    Network(
        "bert100", "BERT of 100 layers, hidden size 1024, 4096 tokens (32 x 128)", _bert100, (0, 32e9, 0), 32 * 10**9
    ),
)


def network_row(network: Network) -> Row:
    """Bytes plain, at the published extra time, and seconds in the published bytes."""
    import memfit

    begin = time.perf_counter()
    plain = memfit.plan(*network.build(), PLENTY, adam, fixed={"micro_batches": 1}, device=CARD)
    peak, smallest = plain.prediction.plain_peak_bytes, plain.runtime.search.smallest()[0]
    limit = network.published[2] or 0.12
    low, high = smallest, peak
    if memfit.replan(plain, smallest).prediction.slowdown - 1 <= limit:
        high = smallest
    while high > low * CLOSE:
        middle = (low + high) // 2
        low, high = (low, middle) if memfit.replan(plain, middle).prediction.slowdown - 1 <= limit else (middle, high)
    extra = memfit.replan(plain, network.budget).prediction.slowdown - 1 if network.budget >= smallest else None
    return {
        "kind": "network",
        "name": network.name,
        "words": network.words,
        "plain_bytes": peak,
        "smallest_bytes": smallest,
        "smallest_extra": memfit.replan(plain, smallest).prediction.slowdown - 1,
        "limit": limit,
        "limit_bytes": high,
        "budget_bytes": network.budget,
        "budget_extra": extra,
        "published": network.published,
        "seconds": time.perf_counter() - begin,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    berts = [r for r in rows if r["kind"] == "batch"]
    networks = [r for r in rows if r["kind"] == "network"]

    def ours(row: Mapping[str, Any], number: int) -> str:
        found = row["memfit"][number]
        return f"{found['batch']} ({found['batch'] / row['plain']:.1f}x, {100 * found['extra']:+.0f} %)"

    def paddle(row: Mapping[str, Any]) -> str:
        before, after, extra = row["published"]
        return f"{before} to {after} ({after / before:.1f}x{f', {100 * extra:+.0f} %' if extra else ''})"

    def gb(size: float) -> str:
        return f"{size / 1e9:.1f} GB"

    first = measuring.table(
        [
            "model, tokens",
            "plain",
            "per-layer recompute",
            "memfit, +12 %",
            "memfit, +20 %",
            "memfit, any",
            "memfit at per-layer recompute's batch",
            "Paddle published",
        ],
        [
            [
                r["name"],
                str(r["plain"]),
                f"{r['layers']} ({r['layers'] / r['plain']:.1f}x, {100 * r['layers_extra']:+.0f} %)",
                *(ours(r, i) for i in range(3)),
                f"{100 * r['at_layers']:+.0f} %",
                paddle(r),
            ]
            for r in berts
        ],
    )
    second = measuring.table(
        ["network", "plain", "memfit", "memfit's smallest", "in the published bytes", "published"],
        [
            [
                r["words"],
                gb(r["plain_bytes"]),
                f"{gb(r['limit_bytes'])} at {100 * r['limit']:+.0f} %",
                f"{gb(r['smallest_bytes'])} at {100 * r['smallest_extra']:+.0f} %",
                f"{gb(r['budget_bytes'])}: "
                + ("does not fit" if r["budget_extra"] is None else f"{100 * r['budget_extra']:+.0f} %"),
                (f"{gb(r['published'][0])} to " if r["published"][0] else "")
                + gb(r["published"][1])
                + (f" at {100 * r['published'][2]:+.0f} %" if r["published"][2] else ""),
            ]
            for r in networks
        ],
    )
    return "\n\n".join(part for part, some in ((first, berts), (second, networks)) if some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one of the names")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    asked = parser.parse_args()
    todo: dict[str, Callable[[], Row]] = {b.name: lambda b=b: bert_row(b) for b in BERTS}
    todo |= {n.name: lambda n=n: network_row(n) for n in NETWORKS}
    rows = {r["name"]: r for r in measuring.kept("seeds")} if asked.missing or asked.only else {}
    for name, ask in todo.items():
        if (asked.only and name != asked.only) or (asked.missing and name in rows):
            continue
        rows[name] = ask()
        print(table([rows[name]]), flush=True)
        ordered = [rows[n] for n in todo if n in rows]
        measuring.keep(
            "seeds",
            measuring.machine(),
            [{k: v for k, v in r.items() if k not in {"bench", "machine"}} for r in ordered],
        )


if __name__ == "__main__":
    main()
