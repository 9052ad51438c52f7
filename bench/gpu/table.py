"""What was measured on a GPU, as Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measuring

MIB = 1 << 20
Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Of each question that has rows."""
    parts = []
    for name, told in SECTIONS.items():
        mine = [row for row in rows if row["part"] == name]
        if mine:
            parts.append(told(mine) + _elsewhere(mine, rows[0]))
    return "\n\n".join(parts)


def _elsewhere(mine: Sequence[Row], first: Row) -> str:
    """On which GPU and day, where that is another GPU than the page says."""
    about = {(row["machine"]["device"], row["machine"]["date"]) for row in mine}
    others = sorted(each for each in about if each[0] != first["machine"]["device"])
    return "\n\n" + "; ".join(f"{device}, {date}" for device, date in others) + "." if others else ""


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _off(predicted: float, measured: float, digits: int = 2) -> str:
    return f"{100 * (predicted / measured - 1):+.{digits}f} %"


def programs(rows: Sequence[Row]) -> str:
    """One paragraph."""
    found = [row for row in rows if "share" in row]
    failed = sorted({row["case"] for row in rows if "failed" in row})
    errors = sorted(abs(row["predicted_bytes"] / row["allocated_bytes"] - 1) for row in found)
    apart = [row["allocated_bytes"] - row["predicted_bytes"] for row in found]
    to_the_byte = sum(abs(each) <= 512 for each in apart)
    kept = all(row["generators_kept"] for row in found)
    models, repeated = len({row["case"] for row in found}), sum(row["plain_repeats"] for row in found)
    more = sum(each > 512 for each in apart)
    told = [
        f"{models} models, {len(found)} steps at three budgets each (small ones, a few MiB beside cuBLAS's 64).",
        f"With deterministic kernels {sum(row['equal'] for row in found)} of {repeated} give plain PyTorch's loss, gradients and buffers bit by bit;",
        f"{sum(bool(row['divergences']) for row in found)} left their plan. Predicted peaks: {to_the_byte} within the 512 bytes of one block,",
        f"median error {100 * statistics.median(errors):.3f} %, largest {100 * errors[-1]:.1f} %; {more} hold more than predicted, by at most",
        f"{_mib(max(apart))}: the allocator does not split a block where less than 1 MiB would be left of it.",
        f"Generators were {'as before' if kept else 'NOT as before'} after planning.",
        *([f"Not run: {', '.join(failed)}."] if failed else []),
    ]
    return "### The tests' models\n\n" + " ".join(told)


def _apart(rows: Sequence[Row]) -> str:
    """Predicted and measured peaks of these rows, in a sentence; nothing where none was measured."""
    found = [row for row in rows if "allocated_bytes" in row]
    if not found:
        return ""
    apart = [row["allocated_bytes"] - row["predicted_bytes"] for row in found]
    return (
        f" Predicted peaks: {sum(abs(each) <= 512 for each in apart)} of {len(found)} within the 512 bytes of one block; "
        f"at most {_mib(max(apart))} more was held than predicted."
    )


def calls(rows: Sequence[Row]) -> str:
    """One paragraph."""
    found = [row for row in rows if "equal" in row]
    left = sum(bool(row["divergences"]) for row in found)
    failed = sorted({row["case"] for row in rows if "failed" in row})
    return (
        "### Unusual calls\n\n"
        f"{len({row['case'] for row in found})} programs that are unusual by how modules are called (by the loss, several times, inside each other, under "
        "hooks, checkpoints and handled errors), four steps at five budgets each, with deterministic kernels: "
        f"{sum(row['equal'] for row in found)} of {len(found)} give plain PyTorch's losses and parameters bit by bit; {left} left their plan."
        + _apart(found)
        + (f" Not run: {', '.join(failed)}." if failed else "")
    )


def padding(rows: Sequence[Row]) -> str:
    """One table."""
    return (
        "### Batches with and without padding in turn\n\n"
        "Planned for from a batch of which one row has padding; six steps. *Equal*: losses and parameters, bit by bit, where plain PyTorch repeats itself.\n\n"
        + measuring.table(
            ["model", "budget, from the smallest to plain", "largest peak", "predicted", "left the plan", "equal"],
            [
                [
                    row["case"],
                    f"{row['share']:.1f}",
                    _mib(row["allocated_bytes"]),
                    _off(row["predicted_bytes"], row["allocated_bytes"]),
                    str(len(row["divergences"])),
                    ("yes" if row["equal"] else "no") if row["plain_repeats"] else "plain does not repeat",
                ]
                for row in rows
                if "share" in row
            ],
        )
    )


def packages(rows: Sequence[Row]) -> str:
    """One paragraph and one table."""
    ran = [row for row in rows if "budgets" in row]
    tried = [each for row in ran for each in row["budgets"].values()]
    repeated = [each for row in ran if row["plain_repeats"] for each in row["budgets"].values()]
    kinds = Counter(row.get("kind", "failed") for row in rows)
    return (
        "### Programs of other people\n\n"
        f"Those of [bench/programs](../programs/README.md), {sum(each['steps'] for each in tried):,} steps: "
        f"{', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}. "
        f"Steps with another loss, where plain PyTorch repeats itself: {sum(each['different_losses'] for each in repeated)}. "
        f"Steps above the budget by more than the allocator's blocks (1 MiB each): {sum(_far_above(each) for each in tried)}.\n\n"
        + measuring.table(
            ["program", "what became of it", "reason"],
            [
                [
                    row["case"],
                    row.get("kind", "failed"),
                    str(row.get("reason", row.get("failed", "")))[:200].replace("\n", " "),
                ]
                for row in rows
                if row.get("kind") != "trained"
            ],
        )
    )


def _far_above(tried: Row) -> int:
    return tried["above_budget"] if tried["largest_bytes"] - tried["budget_bytes"] > 2 * MIB else 0


def host(rows: Sequence[Row]) -> str:
    """One table."""
    found = [row for row in rows if "forward" in row]

    def counted(row: Row, what: str) -> int:
        return int(row[f"forward_{what}"] + row[f"backward_{what}"])

    return (
        "### What the host takes\n\n"
        "Forward and backward of the models of the table of plain steps with two samples, so that the GPU waits. *Launching*: each operation alone. "
        "*Of a mode*: seconds over kernels, and over what a dispatch mode that does nothing takes "
        f"({1e6 * found[0]['mode_seconds']:.1f} µs), which is what the prediction goes by.\n\n"
        + measuring.table(
            ["step", "host", "kernels", "launching", "of a mode"],
            [
                [
                    row["step"],
                    _ms(row["forward"] + row["backward"]),
                    str(counted(row, "kernels")),
                    _ms(_launching(row)),
                    f"{(row['forward'] + row['backward']) / counted(row, 'kernels') / row['mode_seconds']:.1f}",
                ]
                for row in found
                if row["forward_kernel_seconds"] + row["backward_kernel_seconds"] < row["forward"] + row["backward"]
            ],
        )
    )


def _launching(row: Row) -> float:
    """Of launching forward and backward, operation by operation."""
    return float(row["forward_launching"] + row["backward_launching"])


def ranks(rows: Sequence[Row]) -> str:
    """One table."""
    failed = [row["way"] for row in rows if "failed" in row]
    return (
        "### Two ranks that share the GPU, through gloo\n\n"
        + measuring.table(
            ["way", "third loss", "of one device", "peaks", "held beyond the prediction"],
            [
                [
                    row["way"],
                    f"{row['losses'][-1]:.7f}",
                    f"{row['alone'][-1]:.7f}",
                    ", ".join(map(_mib, row["allocated_bytes"])),
                    ", ".join(
                        f"{have - said:,} B"
                        for have, said in zip(row["allocated_bytes"], row["predicted_bytes"], strict=True)
                    ),
                ]
                for row in rows
                if "losses" in row
            ],
        )
        + (f"\n\nNot run: {', '.join(failed)}." if failed else "")
    )


def recurrent(rows: Sequence[Row]) -> str:
    """One paragraph."""
    found = [row for row in rows if "equal" in row]
    left = sum(row["divergence"] is not None for row in found)
    failed = [f"{row['case']} ({row['failed'].partition(', so')[0]})" for row in rows if "failed" in row]
    return (
        "### Recurrent layers of cuDNN\n\n"
        f"{', '.join(dict.fromkeys(row['case'] for row in found))}: four layers, 64 x 128, width 512, at three budgets each; "
        f"{sum(row['equal'] for row in found)} of {len(found)} give plain PyTorch's loss and gradients bit by bit; {left} left their plan."
        + _apart(found)
        + (f" Refused: {'; '.join(failed)}." if failed else "")
    )


def largest_batch(rows: Sequence[Row]) -> str:
    """One table."""
    return "### The largest batch of BERT-large, 128 tokens, in 24 GiB\n\n" + measuring.table(
        ["row", "batch", "peak", "predicted slowdown"],
        [
            [
                row["row"],
                str(row["batch"]),
                _mib(row["allocated_bytes"]) if "allocated_bytes" in row else "",
                f"{row['predicted_slowdown']:.2f}" if "predicted_slowdown" in row else "",
            ]
            for row in rows
            if "batch" in row and "out_of_memory" not in row
        ],
    )


def plain_steps(rows: Sequence[Row]) -> str:
    """One table."""
    return (
        "### Plain steps, predicted with the GPU here and without it\n\n"
        "*Absent*: from a model on the meta device and the GPU's name, on a computer without one. Seconds of kernels alone: where the host takes longer than "
        "the GPU (BERT-large under autocast), the step does too.\n\n"
        + measuring.table(
            ["step", "measured", "predicted", "absent", "measured", "kernels, predicted", "kernels, absent"],
            [
                [
                    row["step"],
                    _mib(row["allocated_bytes"]),
                    _off(row["present_bytes"], row["allocated_bytes"], 3),
                    _off(row["absent_bytes"], row["allocated_bytes"]),
                    _ms(row["seconds"]),
                    _ms(row.get("present_kernel_seconds", row["present_seconds"])),
                    _ms(row.get("absent_kernel_seconds", row["absent_seconds"])),
                ]
                for row in rows
            ],
        )
    )


def exactness(rows: Sequence[Row]) -> str:
    """One paragraph."""
    told = []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        equal = sum(row["equal"] for row in mine)
        alone = (
            "" if all(row["plain_repeats"] for row in mine) else ", where plain PyTorch does not repeat itself either"
        )
        told.append(f"{name} {equal} of {len(mine)}{alone}")
    return (
        "### Larger models\n\n"
        "With PyTorch's default kernels, steps at three budgets that give plain PyTorch's loss, gradients and buffers bit by bit "
        f"(BERT-large, 8 x 128; convolutions with batch norm; a Llama of a billion, 2 x 128): {'; '.join(told)}."
    )


def techniques(rows: Sequence[Row]) -> str:
    """One table."""
    return (
        "### Techniques, six of BERT-large's layers\n\n"
        "Results after three steps beside PyTorch's own.\n\n"
        + measuring.table(
            ["technique", "results", "peak", "predicted", "step", "predicted"],
            [
                [
                    row["technique"],
                    "equal" if row["equal"] else f"differ by {row['difference']:.0e}",
                    _mib(row["allocated_bytes"]),
                    _off(row["predicted_bytes"], row["allocated_bytes"]),
                    _ms(row["seconds"]),
                    _ms(row["predicted_seconds"]),
                ]
                for row in rows
                if "equal" in row
            ],
        )
    )


def frontier(name: str) -> Callable[[Sequence[Row]], str]:
    """One table, of this model."""

    def told(rows: Sequence[Row]) -> str:
        plain = next(row["seconds"] for row in rows if row["row"] == "plain")
        return f"### {name} beside others\n\n" + measuring.table(
            ["row", "peak", "predicted", "step", "of plain", "predicted", "offloaded"],
            [
                [
                    row["row"],
                    _mib(row["allocated_bytes"]),
                    _off(row["predicted_bytes"], row["allocated_bytes"]) if "predicted_bytes" in row else "",
                    _ms(row["seconds"]),
                    f"{row['seconds'] / plain:.2f}",
                    _ms(row["predicted_seconds"]) if "predicted_seconds" in row else "",
                    _mib(row["swapped_bytes"]) if row.get("swapped_bytes") else "",
                ]
                for row in rows
                if "seconds" in row
            ],
        )

    return told


def swap(rows: Sequence[Row]) -> str:
    """One table."""
    return (
        "### Activation offloading, twelve of BERT-large's layers\n\n"
        "*Hidden*: of the copying time, the part in which a kernel ran.\n\n"
        + measuring.table(
            ["candidates", "peak", "predicted", "step", "predicted", "offloaded", "hidden", "planned"],
            [
                [
                    row["ways"],
                    _mib(row["allocated_bytes"]),
                    _off(row["predicted_bytes"], row["allocated_bytes"]),
                    _ms(row["seconds"]),
                    _ms(row["predicted_seconds"]),
                    _mib(row["swapped_bytes"]),
                    f"{100 * row['hidden']:.0f} %" if row["swapped_bytes"] else "",
                    f"{100 * row['planned_hidden']:.0f} %" if "planned_hidden" in row else "",
                ]
                for row in rows
            ],
        )
    )


def streaming(rows: Sequence[Row]) -> str:
    """One table."""
    return "### Layer streaming, six of BERT-large's layers at growing batches\n\n" + measuring.table(
        ["batch", "peak", "predicted", "step", "copies", "hidden"],
        [
            [
                f"{row['batch']} x 128",
                _mib(row["allocated_bytes"]),
                _off(row["predicted_bytes"], row["allocated_bytes"]),
                _ms(row["seconds"]),
                _ms(row["copies_down_seconds"] + row["copies_up_seconds"]),
                f"{100 * row['hidden']:.0f} %",
            ]
            for row in rows
        ],
    )


def optimizers(rows: Sequence[Row]) -> str:
    """One table."""
    return "### Updates, two of BERT-large's layers and its embedding\n\n" + measuring.table(
        ["AdamW", "peak of a step", "update"],
        [
            [row["optimizer"], _mib(row["allocated_bytes"]), _ms(row["update_seconds"])]
            for row in rows
            if "update_seconds" in row
        ],
    )


def overhead(rows: Sequence[Row]) -> str:
    """One table."""
    return (
        "### Host time\n\n"
        f"{rows[0]['operations']} forward operations on tensors of a few elements, so that the GPU waits for the host: what a plan adds to each, its "
        "recomputations included.\n\n"
        + measuring.table(
            [
                "budget, from the smallest to plain",
                "plain",
                "under the plan",
                "recomputations",
                "added per forward operation",
            ],
            [
                [
                    f"{row['share']:.1f}",
                    _ms(row["plain_seconds"]),
                    _ms(row["seconds"]),
                    str(row["recomputations"]),
                    f"{row['added_microseconds_per_operation']:.1f} µs",
                ]
                for row in rows
            ],
        )
    )


def failing(rows: Sequence[Row]) -> str:
    """One paragraph."""
    read = {row["file"]: row["read"] for row in rows if "file" in row}
    there = next(row["there"] for row in rows if "file" in row)
    words = ", ".join(f"{_mib(each['allocated_bytes'])} from the {kind}" for kind, each in read.items())
    return (
        "### Out of memory\n\n"
        f"`memfit doctor --oom` on this allocator's own message (.txt) and snapshot (.pickle): in tensors {words}; there were "
        f"{_mib(there['allocated_bytes'])}. The snapshot names the stage: {read['.pickle']['stage'] or 'none'}."
    )


SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "programs": programs,
    "calls": calls,
    "recurrent": recurrent,
    "ranks": ranks,
    "padding": padding,
    "packages": packages,
    "exactness": exactness,
    "absent": plain_steps,
    "techniques": techniques,
    "frontier_bert": frontier("BERT-large, batch 32, 128 tokens,"),
    "frontier_llama": frontier("A Llama-style model of a billion parameters"),
    "largest_batch": largest_batch,
    "swap": swap,
    "streaming": streaming,
    "optimizers": optimizers,
    "overhead": overhead,
    "host": host,
    "failing": failing,
}
"""By the name of a question, what tells its rows; the others have none."""
