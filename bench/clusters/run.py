"""Clusters that are not here: predicted bytes and seconds beside published ones, and of 8 to 4,096 GPUs and 8 to 405 billion parameters.

python bench/clusters/run.py [states] [steps] [grid]    # results of parts that are not named are kept
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

QUESTION = "clusters"
GIB = 1 << 30
NODE = 8
Row = dict[str, Any]
GRID = {"llama3-8b": (8, 64, 512, 4096), "llama3-70b": (64, 512, 4096), "llama3-405b": (512, 4096)}
WORDS = {"none": "nothing is rebuilt", "blocks": "every block is rebuilt"}


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


def predictions(model: str, batch: int, tokens: int, devices: Any, gpu: str) -> list[Row]:
    """Of a step under ZeRO 3 and bf16 autocast, with nothing rebuilt and with every block."""
    from dataclasses import asdict

    from shapes import llama

    from memfit.clusters import predict_cluster

    built, sample = llama(model, batch, tokens)
    found = predict_cluster(built, sample, devices=devices, optimizer=adamw, precision="bf16", device=gpu)
    return [asdict(each) for each in found]


def of_states() -> list[Row]:
    """Bytes of parameters, gradients and optimizer state on each device, for as many parameters as the paper's."""
    from shapes import gpt

    from memfit.clusters import predict_cluster

    rows = []
    for row in asked("states"):
        model, sample = gpt(4096, 36, 128)
        parameters = sum(p.numel() for p in model.parameters())
        topology = f"{row['devices'] // NODE}x{NODE}xa100"
        (found,) = predict_cluster(
            model, sample, devices=topology, optimizer=adamw, way=row["way"], recompute=("none",)
        )
        predicted = found.state_bytes * row["parameters"] / parameters / 1e9
        rows.append({**row, "kind": "state", "predicted_gb": predicted, "exact": found.exact})
        print(row["name"], predicted, row["gb"], found.exact, file=sys.stderr, flush=True)
    return rows


def of_steps() -> list[Row]:
    """Tokens a second on each GPU, and bytes."""
    rows = []
    for row in asked("steps"):
        devices = cluster(row["gpus"], row["of"])
        found = predictions(row["model"], row["batch"], row["tokens"], devices, row["of"]["gpu"])
        rows.append({**row, "kind": "step", "predicted": found})
        print(row["name"], found, file=sys.stderr, flush=True)
    return rows


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
            row["name"],
            f"{row['gb']:.1f} GB",
            f"{row['predicted_gb']:.1f} GB",
            f"{100 * (row['predicted_gb'] / row['gb'] - 1):+.0f} %",
            "yes" if row["exact"] else "no",
        ]
        for row in rows
    ]
    return f"{told(rows[0]['of'])}\n\n" + measuring.table(
        ["64 devices", "published", "predicted", "difference", "exact"], lines
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    parts, errors = [], []
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]
        lines = []
        for row in mine:
            for found in row["predicted"]:
                if row["kept"] not in {"selective", found["recompute"]}:
                    continue
                serial, overlapped = speeds(row, found)
                sure = row["kept"] != "selective"
                if sure:
                    errors.append(abs(overlapped / row["speed"] - 1))
                lines.append(
                    [
                        row["name"],
                        f"{row['speed']:,}",
                        WORDS[found["recompute"]],
                        f"{serial:,.0f} ({100 * (serial / row['speed'] - 1):+.0f} %)",
                        f"{overlapped:,.0f} ({100 * (overlapped / row['speed'] - 1):+.0f} %)",
                        f"{row['gib']:.1f} GiB" if "gib" in row else "",
                        f"{found['peak_bytes'] / GIB:.1f} GiB",
                    ]
                )
        heads = [
            "run",
            "published",
            "predicted with",
            "nothing overlapped",
            "overlapped",
            "published peak",
            "predicted peak",
        ]
        parts.append(f"{told(mine[0]['of'])}\n\n" + measuring.table(heads, lines))
    summary = (
        f"Tokens a second on each GPU; predictions are *estimated*. Where the run keeps what the prediction does, the overlapped figures are off by "
        f"{100 * statistics.median(errors):.0f} % at the median, {100 * max(errors):.0f} % at most."
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
    makers = {"states": of_states, "steps": of_steps, "grid": of_grid}
    wanted = [name for name in makers if name in sys.argv[1:]] or list(makers)
    rows: list[Row] = [
        row for row in measuring.kept(QUESTION) if f"{row['kind']}s" not in wanted and row["kind"] not in wanted
    ]
    for name in wanted:
        rows += makers[name]()
        order = ("state", "step", "grid")
        rows.sort(key=lambda row: order.index(row["kind"]))
        measuring.keep(QUESTION, measuring.machine(), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
