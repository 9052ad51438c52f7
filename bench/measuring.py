"""How the benchmarks measure, and how they keep what they measured.

Timings of a step depend on what the allocator did before: freed memory goes back to the system, and the next step pays for getting it again, page by page. So
`steady_allocator` starts the process anew with an allocator that keeps what it has, which leaves the computing alone to be compared; times are processor time,
in turns, as ratios within a round.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
_KEEPING: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def with_tests_models() -> None:
    """Let the benches use the models that the tests use."""
    sys.path.insert(0, str(FOLDER.parent / "tests"))


def steady_allocator() -> None:
    """Start this process anew, with an allocator that never hands memory back; nothing where that is so already."""
    if any(os.environ.get(name) != value for name, value in _KEEPING.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **_KEEPING})  # noqa: S606


def planning(source: Any, **arguments: Any) -> Any:
    """What makes the plans for a `TraceSource`, which several requests may share; arguments as for `memfit.frontier`."""
    from memfit.lower_tiers import requested
    from memfit.offers import planning_for

    return planning_for(source, requested(source.model, device=source.device, clip_norm=source.clip_norm, **arguments))


def machine(**more: Any) -> dict[str, Any]:
    """What the figures were taken on, and with which versions."""
    import torch

    from memfit.capture.present_machine import device_name

    versions = {}
    for package in ("torch", "transformers", "memfit"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **versions,
        **more,
    }


def in_words(about: Mapping[str, Any]) -> str:
    """The machine on one line."""
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "memfit") if name in about)
    if "cuda" in about:
        return f"{about['device']}, {versions}, CUDA {about['cuda']}, Python {about['python']}, {about['date']}"
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    return (
        f"{about['device']}, {about['cores']} cores, {threads}, {versions}, Python {about['python']}, {about['date']}"
    )


def in_turns(
    rows: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    tell: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.process_time,
    after_its_like: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each row in each round, the processor's or another clock's; in a round every row has its turn, in an order that shifts from round to round.

    What is there before is left out of garbage collection: planning leaves many objects, and looking through them would be in the time of whoever allocates.

    Args:
        rows: what runs, by name.
        rounds: how many.
        tell: told of each round.
        clock: of seconds.
        after_its_like: each row runs twice in its turn, and the second run is timed: as in training, where the caches are as a step of its kind has left them.
    """
    gc.collect()
    gc.freeze()
    names = list(rows)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if after_its_like:
                rows[name]()
            begin = clock()
            rows[name]()
            times[name].append(clock() - begin)
        if tell is not None:
            tell(f"round {number + 1} of {rounds}")
    return times


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[len(ordered) // 2], ordered[(3 * len(ordered)) // 4]


def keep(question: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write results.jsonl of a question: one line a row, each with the machine."""
    path = FOLDER / question / "results.jsonl"
    path.write_text("".join(json.dumps({"bench": question, "machine": about, **row}) + "\n" for row in rows))
    return path


def keep_part(
    question: str,
    part: str,
    about: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    replaced: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Put rows of one part of a question in the place of those that were asked again."""
    before = [row for row in kept(question) if row.get("part") != part or not replaced(row)]
    new = [{"bench": question, "machine": about, **row, "part": part} for row in rows]
    both = sorted([*before, *new], key=lambda row: str(row["part"]), reverse=True)
    (FOLDER / question / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))


def kept(question: str) -> list[dict[str, Any]]:
    """What was written; empty where the question was not asked yet."""
    path = FOLDER / question / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_computer(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each computer, by its name, in the order in which they are kept."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["machine"]["device"], []).append(row)
    return found


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
