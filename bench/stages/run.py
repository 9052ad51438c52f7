"""Cuts into stages: published pipelines beside what cut and schedule predict; and unequal models and devices, against cuts of equal parameters.

python bench/stages/run.py [gpipe_transformer] [torchgpipe] [torchgpipe_amoebanet] [sizes] [unequal]    # results of parts that are not named are kept
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

QUESTION = "stages"
GIB = 1 << 30

Row = dict[str, Any]
# Cards that are not in memfit's table, from their data sheet: fp32 FLOP/s, bytes/s, of the link too (PCIe 3 x16).
P40 = {"fp32_flops": 11.8e12, "bandwidth": 346e9, "gib": 24, "link": 12e9}


def asked() -> list[Row]:
    """The published figures, each with what its source says of all of them."""
    data = json.loads((FOLDER / "published.json").read_text())
    return [{**data["sources"][row["source"]], **row} for row in data["rows"]]


def p40() -> Any:
    """The card of torchgpipe's figures."""
    from memfit.hardware.machine import known_machine

    like = known_machine("t4")  # of the generation after; what a data sheet does not tell is as there
    return replace(
        like,
        name="p40",
        memory_bytes=int(P40["gib"] * GIB),
        fp32_flops=P40["fp32_flops"],
        tensor_flops=P40["fp32_flops"],
        bandwidth=P40["bandwidth"],
        watts=250.0,
        capability=(6, 1),
    )


def chain_of(model: Any, sample: Any, loss_fn: Any, machine: Any, optimizer: Any = None) -> Any:
    """The parts of a model on the meta device, with seconds estimated for a card."""
    from memfit.capture.capture import capture
    from memfit.capture.costs import with_costs
    from memfit.capture.roofline import estimated_costs
    from memfit.capture.source import StepSource
    from memfit.pipelining.undivided import chain_of as chain_of_trace

    captured = capture(StepSource(model, sample, loss_fn, optimizer))
    costs = estimated_costs(captured.calls, machine)
    trace = with_costs(captured, costs, seconds_are="estimated", device=machine.name, allocation_bytes=512)
    return chain_of_trace(model, sample, loss_fn, trace)[1]


def resnet(samples: int, depths: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """A bottleneck ResNet on the meta device, with a batch and its loss."""
    import torch
    import transformers

    config = transformers.ResNetConfig(depths=list(depths), num_labels=1000)
    with torch.device("meta"):
        model = transformers.ResNetForImageClassification(config)
        sample = {
            "pixel_values": torch.empty(samples, 3, 224, 224),
            "labels": torch.empty(samples, dtype=torch.int64),
        }
    return model, sample, lambda m, b: m(pixel_values=b["pixel_values"]).logits.float().square().mean()


def language_model(samples: int, length: int, words: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """A GPT-2 on the meta device: with many words, its embedding holds more parameters than several blocks, and its head computes more."""
    import torch
    import transformers

    config = transformers.GPT2Config(
        vocab_size=words,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        n_positions=length,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(samples, length, dtype=torch.int64)
    return model, {"input_ids": ids}, lambda m, b: m(**b).logits.float().logsumexp(-1).mean()


def of_torchgpipe() -> list[Row]:
    """ResNet-101 and a U-Net as torchgpipe timed them: forward is run again for all micro-batches but the last."""
    import torch
    from unet import unet

    machine, rows = p40(), []
    timed = {"torchgpipe": (118, lambda samples: resnet(samples, (3, 4, 23, 3))), "torchgpipe_unet": (40, unet)}
    chains = {}
    for row in (row for row in asked() if row["source"] in timed):
        alone, build = timed[row["source"]]
        size = row["batch"] // row["micro_batches"]
        for samples in (alone, size):
            if (row["source"], samples) not in chains:
                model, sample, loss_fn = build(samples)
                found = chain_of(model, sample, loss_fn, machine, lambda p: torch.optim.SGD(p, lr=0.1))
                chains[row["source"], samples] = found
        plain = chains[row["source"], alone].stage(0, len(chains[row["source"], alone].parts))
        baseline = alone / (plain.forward_seconds + plain.backward_seconds + plain.update_seconds)
        parts = chains[row["source"], size]
        again = (row["micro_batches"] - 1) / row["micro_batches"]
        found = pipelined(parts, row["stages"], row["micro_batches"], again)
        speed = size * row["micro_batches"] / found.step_seconds
        rows.append({**row, "kind": "published", "predicted": speed / baseline, "bubble": found.bubble})
        print(row["name"], rows[-1]["predicted"], row["ratio"], file=sys.stderr, flush=True)
    return rows


def of_amoebanet() -> list[Row]:
    """AmoebaNet-D (18, 256) as torchgpipe timed it, against two stages with one micro-batch; with one, forward is run again for that, too."""
    import torch
    from amoebanet import amoebanet

    machine = p40()
    chains: dict[int, Any] = {}
    speeds: dict[str, float] = {}
    rows = [row for row in asked() if row["source"] == "torchgpipe_amoebanet"]
    for row in rows:
        size = row["batch"] // row["micro_batches"]
        if size not in chains:
            model, sample, loss_fn = amoebanet(size, 18, 256)
            chains[size] = chain_of(model, sample, loss_fn, machine, torch.optim.RMSprop)
        again = 1.0 if row["micro_batches"] == 1 else (row["micro_batches"] - 1) / row["micro_batches"]
        found = pipelined(chains[size], row["stages"], row["micro_batches"], again)
        speeds[row["name"]] = row["batch"] / found.step_seconds
        row["bubble"] = found.bubble
        print(row["name"], speeds[row["name"]], row["ratio"], file=sys.stderr, flush=True)
    first = speeds[rows[0]["name"]]
    return [{**row, "kind": "published", "predicted": speeds[row["name"]] / first} for row in rows]


def pipelined(parts: Any, number: int, micro_batches: int, again: float) -> Any:
    """The cut into so many stages under GPipe, on the cards of torchgpipe's figures; this share of forward is run again in backward."""
    from memfit.hardware.topology import PeerLink
    from memfit.planner.cutting import cut
    from memfit.values.stages import Line, Recompute, Schedule, StageDevice

    menus = {
        (first, end): (Recompute(0, 0, again * sum(p.forward_seconds for p in parts.parts[first:end])),)
        for first in range(len(parts.parts))
        for end in range(first + 1, len(parts.parts) + 1)
    }
    peers = tuple(PeerLink(a, a + 1, P40["link"]) for a in range(number - 1))
    line = Line((StageDevice(1 << 50),) * number, peers)
    return cut(replace(parts, menus=menus), line, micro_batches, Schedule.GPIPE, stages=number)


def of_sizes() -> list[Row]:
    """Parameters of the models that torchgpipe trained, and what they, their gradients and the optimizer's state take."""
    from amoebanet import amoebanet
    from unet import unet

    build = {"AmoebaNet-D": amoebanet, "U-Net": unet}
    copies = {"AmoebaNet-D": 3, "U-Net": 2}  # RMSprop keeps one number for each parameter, SGD none
    rows = []
    for row in json.loads((FOLDER / "published.json").read_text())["sizes"]:
        model, _, _ = build[row["model"]](1, *row["size"])
        count = sum(p.numel() for p in model.parameters())
        stored = sum(p.nbytes for p in model.parameters()) * copies[row["model"]]
        rows.append({**row, "kind": "size", "counted": count, "state_bytes": stored})
    return rows


def of_gpipe() -> list[Row]:
    """48 equal layers, forward run again in backward: a batch in M micro-batches on K accelerators, against one micro-batch on two."""
    from memfit.planner.cutting import cut
    from memfit.values.stages import Line, Part, Parts, Recompute, Schedule, StageDevice

    def seconds(stages: int, micro_batches: int) -> float:
        layer = 1.0 / micro_batches
        parts = Parts(tuple(Part(str(i), layer, 2 * layer) for i in range(48)))
        menus = {(a, b): (Recompute(0, 0, (b - a) * layer),) for a in range(48) for b in range(a + 1, 49)}
        line = Line((StageDevice(1),) * stages)
        return cut(replace(parts, menus=menus), line, micro_batches, Schedule.GPIPE, stages=stages).step_seconds

    rows = []
    for row in (row for row in asked() if row["source"] == "gpipe_transformer"):
        ratio = seconds(2, 1) / seconds(row["stages"], row["micro_batches"])
        rows.append({**row, "kind": "published", "predicted": ratio})
    return rows


def of_unequal() -> list[Row]:
    """Step seconds of the cut against those of equal parameters, estimated for cards of the table."""
    import torch

    from memfit.hardware.machine import known_machine
    from memfit.hardware.topology import PeerLink, Topology
    from memfit.planner.baselines.equal_parameters import equal_parameter_ends
    from memfit.planner.cut_costs import cost_of
    from memfit.planner.cutting import cut
    from memfit.values.stages import Line, Schedule

    models = {
        "ResNet-50, 16 images": resnet(16, (3, 4, 6, 3)),
        "GPT-2, 12 layers, 50,257 words, 4 x 512": language_model(4, 512, 50257, 768, 12),
        "GPT-2, 24 layers, 200,000 words, 2 x 512": language_model(2, 512, 200_000, 1024, 24),
    }
    lines = {
        "4 x a100": ["a100"] * 4,
        "2 x a100, 2 x t4": ["a100", "a100", "t4", "t4"],
        "t4, v100, a10, a100": ["t4", "v100", "a10", "a100"],
    }
    number, rows = 16, []
    for name, (model, sample, loss_fn) in models.items():
        chains: dict[str, Any] = {}
        for words, cards in lines.items():
            machines = tuple(known_machine(card) for card in cards)
            if cards[0] not in chains:
                chains[cards[0]] = chain_of(
                    model, sample, loss_fn, machines[0], lambda p: torch.optim.AdamW(p, fused=True)
                )
            parts = replace(chains[cards[0]], recompute=True)
            peers = tuple(PeerLink(a, b, 12e9, 1e-5) for a in range(4) for b in range(a + 1, 4))
            line = Line.of(Topology(machines, (), peers))
            for schedule in (Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD):
                by_hand = cost_of(parts, line, equal_parameter_ends(parts, 4), number, schedule)
                given = cut(parts, line, number, schedule, stages=4)
                ordered = cut(parts, line, number, schedule, stages=4, any_order=True)
                slow = [
                    f"{card} {made / GIB:.1f} GiB"
                    for card, made in zip(cards, by_hand.peak_bytes, strict=True)
                    if made > known_machine(card).memory_bytes
                ]
                rows.append(
                    {
                        "kind": "unequal",
                        "name": name,
                        "line": words,
                        "schedule": str(schedule),
                        "by_hand": by_hand.step_seconds,
                        "cut": given.step_seconds,
                        "any_order": ordered.step_seconds,
                        "bound": given.bound_seconds,
                        "stages": [stage.end - stage.first for stage in given.stages],
                        "bubble": given.bubble,
                        "by_hand_bubble": by_hand.bubble,
                        "too_large": slow,
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _sizes(rows: Sequence[Mapping[str, Any]]) -> str:
    off = max((abs(row["counted"] / row["parameters"] - 1) for row in rows), default=0.0)
    return (
        "[torchgpipe, memory benchmarks of AmoebaNet-D (L, D) and of a U-Net (B, C) (Kim et al. 2020, arXiv:2004.09910)]"
        "(https://torchgpipe.readthedocs.io/en/stable/benchmarks.html), 2020. The models are built here from their description; the numbers of parameters are "
        f"off by {100 * off:.2f} % at most, which is how far the published ones are rounded. State is that of parameters, gradients and RMSprop (AmoebaNet-D) "
        "or SGD without momentum (U-Net).\n\n"
        + measuring.table(
            [
                "model",
                "parameters, published",
                "counted",
                "state, published",
                "counted",
                "in all with activations, published",
            ],
            [
                [
                    f"{row['model']} ({row['size'][0]}, {row['size'][1]}), {row['name']}",
                    row["told"],
                    f"{row['counted']:,}",
                    f"{row['state_gib']:.2f} GiB" if "state_gib" in row else "",
                    f"{row['state_bytes'] / GIB:.2f} GiB",
                    f"{row['gib']:.2f} GiB" if "gib" in row else "",
                ]
                for row in rows
            ],
        )
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    published = [row for row in rows if row["kind"] == "published"]
    errors = {
        source: [abs(row["predicted"] / row["ratio"] - 1) for row in published if row["source"] == source]
        for source in dict.fromkeys(row["source"] for row in published)
    }
    parts = []
    for source, found in errors.items():
        mine = [row for row in published if row["source"] == source]
        sure = "" if mine[0]["confirmed"] else " These figures are second-hand: they were not read in the paper."
        parts += [
            f"### {source}",
            (
                f"[{mine[0]['words']}]({mine[0]['url']}), {mine[0]['date']}; {mine[0]['card']}, {mine[0]['versions']}.{sure} "
                f"Median error {100 * statistics.median(found):.0f} %, largest {100 * max(found):.0f} %; predictions are *estimated*."
            ),
            measuring.table(
                ["run", "published", "predicted", "error", "(K-1)/(M+K-1)"],
                [
                    [
                        row["name"],
                        f"{row['ratio']:.2f}x",
                        f"{row['predicted']:.2f}x",
                        f"{100 * (row['predicted'] / row['ratio'] - 1):+.0f} %",
                        f"{100 * (row['stages'] - 1) / (row['micro_batches'] + row['stages'] - 1):.0f} %",
                    ]
                    for row in mine
                ],
            ),
        ]
    parts += ["### Published sizes", _sizes([row for row in rows if row["kind"] == "size"])]
    unequal = [row for row in rows if row["kind"] == "unequal"]
    ratios = [row["by_hand"] / row["cut"] for row in unequal]
    parts += [
        "### Unequal models, unequal devices",
        (
            "Step seconds, *estimated* from data sheets, 16 micro-batches, links of 12 GB/s; devices in the order told, and in the best order. "
            f"Cuts of equal parameters take {min(ratios):.2f} to {max(ratios):.2f} times as long."
        ),
        measuring.table(
            [
                "model",
                "devices",
                "schedule",
                "equal parameters",
                "cut",
                "ratio",
                "any order",
                "bubble",
                "parts per stage",
                "proved within",
            ],
            [
                [
                    row["name"],
                    row["line"],
                    row.get("schedule", "1f1b"),
                    f"{1000 * row['by_hand']:.0f} ms ({100 * row['by_hand_bubble']:.0f} % waiting)",
                    f"{1000 * row['cut']:.0f} ms",
                    f"{row['by_hand'] / row['cut']:.2f}",
                    f"{1000 * row['any_order']:.0f} ms",
                    f"{100 * row['bubble']:.0f} %",
                    ", ".join(map(str, row["stages"])),
                    f"{100 * (row['cut'] / row['bound'] - 1):.1f} %",
                ]
                for row in unequal
            ],
        ),
    ]
    return "\n\n".join(parts)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    makers = {
        "gpipe_transformer": of_gpipe,
        "torchgpipe": of_torchgpipe,
        "torchgpipe_amoebanet": of_amoebanet,
        "sizes": of_sizes,
        "unequal": of_unequal,
    }
    kinds = {"torchgpipe_unet": "torchgpipe", "size": "sizes"}
    wanted = [name for name in makers if name in sys.argv[1:]] or list(makers)
    rows: list[Row] = []
    for name, make in makers.items():
        if name in wanted:
            rows += make()
        else:
            kept = [(row, row.get("source", row["kind"])) for row in measuring.kept(QUESTION)]
            rows += [row for row, kind in kept if kinds.get(kind, kind) == name]
    measuring.keep(QUESTION, measuring.machine(), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
