"""Clusters that are not here: predicted bytes and seconds beside published ones, and of 8 to 4,096 GPUs and 8 to 405 billion parameters.

python bench/clusters/run.py [states] [steps] [grid]    # results of parts that are not named are kept
python bench/clusters/run.py steps=megatron             # of the published steps one source alone
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

QUESTION = "clusters"
GIB = 1 << 30
NODE = 8
Row = dict[str, Any]
GRID = {"llama3-8b": (8, 64, 512, 4096), "llama3-70b": (64, 512, 4096), "llama3-405b": (512, 4096)}
WORDS = {
    "none": "nothing is rebuilt",
    "selective": "attention and every second product are kept",
    "alternate": "every second block is rebuilt",
    "blocks": "every block is rebuilt",
}
STAGES = {"data": "data parallel", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}
SHAPES = {
    7.5e9: (4096, 36),
    128e9: (10240, 101),
    1e12: (25600, 127),
}  # hidden size and blocks, for about as many parameters
# Bytes of each parameter, its gradient and its optimizer state in the ZeRO paper, and here.
PAPER = {"parameters": 2, "gradients": 2, "state": 12}
OWN = {"parameters": 4, "gradients": 4, "state": 8}


def asked(kind: str) -> list[Row]:
    """The published figures of one kind, each with what its source says of all of them."""
    data = json.loads((FOLDER / "published.json").read_text())
    return [{"of": data["sources"][row["source"]], **row} for row in data[kind]]


def adamw(parameters: Any) -> Any:
    """Of every step here."""
    import torch

    return torch.optim.AdamW(parameters, fused=True)


def cluster(gpus: int, about: Mapping[str, Any]) -> Any:
    """So many GPUs in nodes of eight, as the source tells them."""
    from memfit.hardware.machine import known_machine
    from memfit.hardware.network import BETWEEN_LATENCY_SECONDS, SWITCH_LATENCY_SECONDS
    from memfit.hardware.topology import Nodes, Topology, Wire

    machine = replace(
        known_machine(about["gpu"]),
        memory_bytes=int(about["gib"] * 1e9),
        bandwidth=about["bandwidth"],
        watts=float(about["watts"]),
    )
    inside = Wire(about["inside"], SWITCH_LATENCY_SECONDS)
    between = Wire(about["between"], BETWEEN_LATENCY_SECONDS)
    return Topology((machine,) * gpus, nodes=Nodes((NODE,) * (gpus // NODE), inside, between))


def predictions(
    model: str,
    batch: int,
    tokens: int,
    devices: Any,
    gpu: str,
    recompute: Sequence[str] = ("none", "blocks"),
    way: str = "zero3",
) -> list[Row]:
    """Of a step under bf16 autocast, one for each way to rebuild."""
    from dataclasses import asdict

    from shapes import named

    from memfit.clusters import predict_cluster

    built, sample = named(model, batch, tokens)
    found = predict_cluster(
        built, sample, devices=devices, optimizer=adamw, way=way, recompute=recompute, precision="bf16", device=gpu
    )
    return [asdict(each) for each in found]


def of_states() -> list[Row]:
    """What one of 64 devices holds of parameters, gradients and optimizer state."""
    from shapes import gpt

    from memfit.clusters import predict_cluster

    built = {size: gpt(*shape, 64) for size, shape in SHAPES.items()}
    rows = []
    for row in asked("states"):
        model, sample = built[row["parameters"]]
        count = sum(p.numel() for p in model.parameters())
        devices = f"{row['devices'] // NODE}x{NODE}xa100"
        (found,) = predict_cluster(model, sample, devices=devices, optimizer=adamw, way=row["way"], recompute=("none",))
        here = (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes)
        # Of all that there is without sharding, the part that is here, in the bytes of the paper.
        paper = sum(PAPER[kind] * size / OWN[kind] for kind, size in zip(PAPER, here, strict=True))
        scale = row["parameters"] / count / 1e9
        rows.append(
            {**row, "kind": "state", "own_gb": sum(here) * scale, "predicted_gb": paper * scale, "exact": found.exact}
        )
        print(row["way"], row["parameters"], rows[-1]["predicted_gb"], row["gb"], file=sys.stderr, flush=True)
    return rows


def of_steps(sources: Sequence[str] = ()) -> list[Row]:
    """Tokens a second on each GPU, and bytes; of these sources, or of all."""
    rows = []
    asked_for: dict[tuple[Any, ...], list[Row]] = {}  # by what is captured alike
    for row in asked("steps"):
        if sources and row["source"] not in sources:
            continue
        told = {"way": "zero3", "speed": tokens_a_second(row), **row}
        alike = (told["source"], told["model"], told["batch"], told["tokens"], told["gpus"], told["way"])
        asked_for.setdefault(alike, []).append(told)
    for (_, model, batch, tokens, gpus, way), same in asked_for.items():
        about = same[0]["of"]
        ways = tuple(dict.fromkeys(row["kept"] for row in same))
        found = predictions(model, batch, tokens, cluster(gpus, about), about["gpu"], ways, way)
        rows += [{**row, "kind": "step", "predicted": found[ways.index(row["kept"])]} for row in same]
        print(model, gpus, found, file=sys.stderr, flush=True)
    return rows


def tokens_a_second(row: Mapping[str, Any]) -> float | None:
    """On each GPU, from the FLOP/s that are published: those of matrix products, forward run twice (Narayanan et al. 2021, section 5 and appendix)."""
    from shapes import GPTS

    if "teraflops" not in row:
        return None
    hidden, layers, _ = GPTS[row["model"]]
    for_a_token = 96 * layers * hidden**2 * (1 + row["tokens"] / (6 * hidden) + 51_200 / (16 * layers * hidden))
    return float(round(row["teraflops"] * 1e12 / for_a_token))


def of_grid() -> list[Row]:
    """One sequence of 8,192 tokens on each of many H100."""
    rows = []
    for model, sizes in GRID.items():
        for gpus in sizes:
            found = predictions(model, 1, 8192, f"{gpus // NODE}x{NODE}xh100@360GB/s,400GB/s", "h100")
            rows.append({"kind": "grid", "model": model, "gpus": gpus, "tokens": 8192, "predicted": found})
            print(model, gpus, found, file=sys.stderr, flush=True)
    return rows


def told(about: Mapping[str, Any]) -> str:
    """A source, in words."""
    sure = "" if about["confirmed"] else " These figures are second-hand: they were read where others quote them."
    return f"[{about['words']}]({about['url']}), {about['date']}; {about['card']}, {about['versions']}.{sure}"


def speeds(row: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens a second on a GPU, with nothing overlapped and with collectives beside computing."""
    tokens = row.get("batch", 1) * row["tokens"]
    return tokens / found["step_seconds"], tokens / found["overlapped_seconds"]


def _states(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [
            f"{row['parameters'] / 1e9:g}B" if row["parameters"] < 1e12 else f"{row['parameters'] / 1e12:g}T",
            STAGES[row["way"]],
            f"{row['gb']:,} GB",
            f"{row['predicted_gb']:,.4g} GB{'' if row['exact'] else ' (about)'}",
            f"{100 * (row['predicted_gb'] / row['gb'] - 1):+.0f} %",
            f"{row['own_gb']:,.4g} GB",
        ]
        for row in rows
    ]
    return f"{told(rows[0]['of'])}\n\n" + measuring.table(
        ["parameters", "on 64 devices", "published", "predicted", "difference", "in memfit's own bytes"], lines
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    parts, errors, peaks = [], [], []
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]
        lines = []
        for row in mine:
            found = row["predicted"]
            serial, overlapped = speeds(row, found)
            alike = not row.get("other_kernels")
            if alike:
                errors.append(abs(overlapped / row["speed"] - 1))
            if "gib" in row:
                peaks.append(found["peak_bytes"] / GIB / row["gib"] - 1)
            lines.append(
                [
                    row["name"],
                    WORDS[row["kept"]],
                    f"{row['speed']:,.0f}" if alike else "",
                    f"{serial:,.0f} ({100 * (serial / row['speed'] - 1):+.0f} %)" if alike else "",
                    f"{overlapped:,.0f} ({100 * (overlapped / row['speed'] - 1):+.0f} %)" if alike else "",
                    f"{row['gib']:.1f} GiB" if "gib" in row else "",
                    f"{found['peak_bytes'] / GIB:.1f} GiB" + (f" ({100 * peaks[-1]:+.0f} %)" if "gib" in row else ""),
                ]
            )
        heads = ["run", "", "published", "nothing overlapped", "overlapped", "published peak", "predicted peak"]
        parts.append(f"{told(mine[0]['of'])}\n\n" + measuring.table(heads, lines))
    summary = (
        f"Tokens a second on each GPU; predictions are *estimated*. The overlapped figures are off by {100 * statistics.median(errors):.0f} % at the median, "
        f"{100 * max(errors):.0f} % at most; peaks by {100 * min(peaks):+.0f} to {100 * max(peaks):+.0f} %."
    )
    return "\n\n".join([summary, *parts])


def _grid(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        for found in row["predicted"]:
            serial, overlapped = speeds(row, found)
            lines.append(
                [
                    row["model"],
                    f"{row['gpus']:,}",
                    WORDS[found["recompute"]],
                    f"{found['peak_bytes'] / GIB:.1f} GiB" + ("" if found["exact"] else " (not exact)"),
                    "yes" if found["peak_bytes"] <= 80 * GIB else "no",
                    f"{found['step_seconds']:.2f} s",
                    f"{found['overlapped_seconds']:.2f} s",
                    f"{serial:,.0f} to {overlapped:,.0f}",
                ]
            )
    heads = ["model", "H100", "", "peak of each", "fits", "step, nothing overlapped", "overlapped", "tokens/s of each"]
    return measuring.table(heads, lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    parts = {
        "state": ("Model states", _states),
        "step": ("Published steps", _steps),
        "grid": ("From 8 to 4,096 GPUs", _grid),
    }
    found = []
    for kind, (head, tell) in parts.items():
        mine = [row for row in rows if row["kind"] == kind]
        found += [f"### {head}", tell(mine)] if mine else []
    return "\n\n".join(found)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    makers: dict[str, Callable[[], list[Row]]] = {"states": of_states, "steps": of_steps, "grid": of_grid}
    sources = [word.removeprefix("steps=") for word in sys.argv[1:] if word.startswith("steps=")]
    if sources:
        makers["steps"] = partial(of_steps, sources)
    named = {word.partition("=")[0] for word in sys.argv[1:]}
    wanted = [name for name in makers if name in named] or list(makers)

    def again(row: Row) -> bool:
        if sources and row["kind"] == "step":
            return row["source"] in sources
        return f"{row['kind']}s" in wanted or row["kind"] in wanted

    rows: list[Row] = [row for row in measuring.kept(QUESTION) if not again(row)]
    order = ("state", "step", "grid")
    places = list(json.loads((FOLDER / "published.json").read_text())["sources"])
    for name in wanted:
        rows += makers[name]()
        rows.sort(key=lambda row: (order.index(row["kind"]), places.index(row.get("source", places[0]))))
        measuring.keep(QUESTION, measuring.machine(), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
