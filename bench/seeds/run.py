"""Largest batches and deepest networks in a card's memory, beside what was published: BERT on 31 GiB, the 1000-layer ResNet, VGG-16, a BERT of 100 layers.

python bench/seeds/run.py [--only bert_large_128] [--missing]
python bench/seeds/run.py --only bert_base_128 --batch 1092   (extra time of one batch alone, and the bound; nothing is kept)
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
CLOSE = 1.03  # largest batches are found to this factor
HOST: Mapping[str, str | int] = {"recompute": 0, "recompute and swap": "256GiB"}  # of the host's memory, to swap to
ACTIVATIONS_ONLY = {"micro_batches": 1, "state_place": "device", "streamed": ""}

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


def extras_of(search: Any, budget: int) -> tuple[float, float]:
    """Extra time of the plan in these bytes, and the least that any plan in them takes; infinite where nothing fits."""
    import memfit

    try:
        found = search.plan(budget).prediction
    except memfit.InfeasibleError:
        return inf, inf
    return float(found.slowdown) - 1, float(found.bound_seconds / found.plain_step_seconds) - 1


def slowdown_of(search: Any, budget: int) -> float:
    """Extra time of the plan in these bytes; infinite where nothing fits."""
    return extras_of(search, budget)[0]


def largest(extra: Callable[[int], float], limit: float, known: int) -> int:
    """The largest batch that takes at most so much extra time, to a factor of CLOSE; `known` does."""
    low, high = known, known * 2
    while extra(high) <= limit and extra(high) < inf:
        low, high = high, high * 2
    while high > max(low * CLOSE, low + 1):
        below, above = extra(low), extra(high)
        share = 0.5
        if below < limit < above < inf:  # along the line between the two, but not so near to one that nothing is learnt
            share = min(0.9, max(0.1, (limit - below) / (above - below)))
        middle = min(high - 1, max(low + 1, round(low + share * (high - low))))
        low, high = (middle, high) if extra(middle) <= limit and extra(middle) < inf else (low, middle)
    return low


def print_batch(bert: Bert, batch: int) -> None:
    """Extra time of one batch, recomputing alone and with a host to swap to."""
    from memfit.capture.trace_source import TraceSource

    source = TraceSource(*bert.build(batch), adam, device=CARD)
    for way, below in HOST.items():
        search = measuring.planning(source, host_budget=below, fixed=ACTIVATIONS_ONLY)
        extra, bound = extras_of(search, BERT_BYTES)
        print(f"{bert.name}, batch {batch}, {way}: {100 * extra:+.1f} %, bound {100 * bound:+.1f} %", flush=True)


def bert_row(bert: Bert) -> Row:
    """Largest batches of one shape."""
    from memfit.capture.trace_source import TraceSource

    begin = time.perf_counter()
    sources: dict[tuple[int, bool], TraceSource] = {}
    extras: dict[tuple[str, int], float] = {}

    def search(batch: int, below: str | int = 0, *, recompute: bool = False) -> Any:
        if (batch, recompute) not in sources:
            sources[batch, recompute] = TraceSource(*bert.build(batch, recompute=recompute), adam, device=CARD)
        return measuring.planning(sources[batch, recompute], host_budget=below, fixed=ACTIVATIONS_ONLY)

    def plainly(batch: int, *, recompute: bool = False) -> float:
        return 0.0 if search(batch, recompute=recompute).plain_peak() <= BERT_BYTES else inf

    def extra(batch: int, way: str) -> float:
        if (way, batch) not in extras:
            extras[way, batch] = slowdown_of(search(batch, HOST[way]), BERT_BYTES)
            print(
                f"  {bert.name}, {way}: batch {batch}, {100 * extras[way, batch]:+.1f} %", file=sys.stderr, flush=True
            )
        return extras[way, batch]

    first = largest(plainly, 0.0, 1)
    layers = largest(lambda batch: plainly(batch, recompute=True), 0.0, first)
    found = {}
    for way in HOST:
        batch = first
        found[way] = []
        for limit in LIMITS:
            batch = largest(lambda b, way=way: extra(b, way), limit, batch)  # type: ignore[misc]
            found[way].append({"batch": batch, "extra": extra(batch, way) if batch > first else 0.0})
    plain_seconds = search(layers).solver(1).trace.plain_step_seconds
    return {
        "kind": "batch",
        "name": bert.name,
        "budget_bytes": BERT_BYTES,
        "plain": first,
        "layers": layers,
        "layers_extra": search(layers, recompute=True).solver(1).trace.plain_step_seconds / plain_seconds - 1,
        "memfit": found,
        "at_layers": {way: extra(layers, way) for way in HOST},
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
    from memfit.capture.trace_source import TraceSource

    begin = time.perf_counter()
    source = TraceSource(*network.build(), adam, device=CARD)
    limit = network.published[2] or 0.12
    ways = {}
    for way, below in HOST.items():
        search = measuring.planning(source, host_budget=below, fixed=ACTIVATIONS_ONLY)
        smallest = search.smallest()[0]
        low, high = smallest, search.plain_peak()
        if slowdown_of(search, smallest) <= limit:
            high = smallest
        while high > low * CLOSE:
            middle = (low + high) // 2
            low, high = (low, middle) if slowdown_of(search, middle) <= limit else (middle, high)
        ways[way] = {
            "smallest_bytes": smallest,
            "smallest_extra": slowdown_of(search, smallest),
            "limit_bytes": high,
            "budget_extra": slowdown_of(search, network.budget) if network.budget >= smallest else None,
        }
        print(f"  {network.name}, {way}: {ways[way]}", file=sys.stderr, flush=True)
    return {
        "kind": "network",
        "name": network.name,
        "words": network.words,
        "plain_bytes": search.plain_peak(),
        "limit": limit,
        "memfit": ways,
        "budget_bytes": network.budget,
        "published": network.published,
        "seconds": time.perf_counter() - begin,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    berts = [r for r in rows if r["kind"] == "batch"]
    networks = [r for r in rows if r["kind"] == "network"]

    def ours(row: Mapping[str, Any], way: str, number: int) -> str:
        found = row["memfit"][way][number]
        return f"{found['batch']} ({found['batch'] / row['plain']:.1f}x, {100 * found['extra']:+.0f} %)"

    def paddle(row: Mapping[str, Any]) -> str:
        before, after, extra = row["published"]
        return f"{before} to {after} ({after / before:.1f}x{f', {100 * extra:+.0f} %' if extra else ''})"

    def gb(size: float) -> str:
        return f"{size / 1e9:.1f} GB"

    def made(row: Mapping[str, Any]) -> str:
        return str(row["machine"]["date"]) if "machine" in row else "now"

    first = measuring.table(
        [
            "model, tokens",
            "plain",
            "per-layer recompute",
            "memfit",
            "+12 %",
            "+20 %",
            "any",
            "at per-layer recompute's batch",
            "Paddle published",
            "made",
        ],
        [
            [
                r["name"],
                str(r["plain"]),
                f"{r['layers']} ({r['layers'] / r['plain']:.1f}x, {100 * r['layers_extra']:+.0f} %)",
                way,
                *(ours(r, way, i) for i in range(len(LIMITS))),
                f"{100 * r['at_layers'][way]:+.0f} %",
                paddle(r),
                made(r),
            ]
            for r in berts
            for way in r["memfit"]
        ],
    )
    second = measuring.table(
        [
            "network",
            "plain",
            "memfit",
            "bytes at so much extra time",
            "smallest",
            "in the published bytes",
            "published",
            "made",
        ],
        [
            [
                r["words"],
                gb(r["plain_bytes"]),
                way,
                f"{gb(m['limit_bytes'])} at {100 * r['limit']:+.0f} %",
                f"{gb(m['smallest_bytes'])} at {100 * m['smallest_extra']:+.0f} %",
                f"{gb(r['budget_bytes'])}: "
                + ("does not fit" if m["budget_extra"] is None else f"{100 * m['budget_extra']:+.0f} %"),
                (f"{gb(r['published'][0])} to " if r["published"][0] else "")
                + gb(r["published"][1])
                + (f" at {100 * r['published'][2]:+.0f} %" if r["published"][2] else ""),
                made(r),
            ]
            for r in networks
            for way, m in r["memfit"].items()
        ],
    )
    return "\n\n".join(part for part, some in ((first, berts), (second, networks)) if some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one of the names")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument("--batch", type=int, help="of the BERT that --only names: how much slower this one batch is")
    asked = parser.parse_args()
    if asked.batch:
        bert = next((b for b in BERTS if b.name == asked.only), None)
        if bert is None:
            parser.error(f"--batch needs --only with one of {', '.join(b.name for b in BERTS)}")
        print_batch(bert, asked.batch)
        return
    todo: dict[str, Callable[[], Row]] = {b.name: lambda b=b: bert_row(b) for b in BERTS}  # type: ignore[misc]
    todo |= {n.name: lambda n=n: network_row(n) for n in NETWORKS}  # type: ignore[misc]
    rows = {r["name"]: r for r in measuring.kept("seeds")} if asked.missing or asked.only else {}
    for name, ask in todo.items():
        if (asked.only and name != asked.only) or (asked.missing and name in rows):
            continue
        rows[name] = ask()
        print(table([rows[name]]), flush=True)
        ordered = [rows[n] for n in todo if n in rows]
        # A row that was there keeps the machine, and the date, that it is of.
        kept = [{k: v for k, v in r.items() if k != "bench"} for r in ordered]
        measuring.keep("seeds", measuring.machine(), kept)


if __name__ == "__main__":
    main()
