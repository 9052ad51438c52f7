"""Each architecture in a process of its own, with an end to its time and its memory, so that none can hang or fell the zoo."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from . import techniques
from .comparing import grouped
from .judging import CLASSES, Verdict, judged

MEMORY_BYTES = 12 << 30  # of addresses, which torch takes more of than of memory


def prepare() -> None:
    """Import what every process needs, once, and plan for a first model: those that follow are forks of this one and find torch's caches filled.

    On a torch that sees a GPU, backward starts threads, and a process that has them cannot be forked; on the CPU it runs in the caller's.
    """
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import torch._dynamo
    import transformers

    import memfit.api

    assert memfit.api
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    judged("bert", ["BertForMaskedLM"])


def verdict_of(name: str, known: list[str], seconds: float, tried: str) -> Verdict:
    """One architecture, judged in a fork."""
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(name, known, tried, reading, writing)
    os.close(writing)
    received = b""
    late = False
    while True:
        left = started + seconds - time.monotonic()
        ready = select.select([reading], [], [], max(0.0, left))[0]
        if not ready:
            late = True
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        received += part
    os.close(reading)
    _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in received.decode().splitlines() if line.endswith("}")]
    known_so_far = [Verdict(**line) for line in lines if "kind" in line]
    if known_so_far and "kind" in lines[-1] and not late and status == 0:
        return known_so_far[-1]
    stage = next((line["stage"] for line in reversed(lines) if "stage" in line), "start")
    end = f"more than {seconds:.0f} s" if late else f"the process died with status {status}"
    if known_so_far:  # it was with a technique
        technique, _, doing = stage.partition(": ")
        ended = techniques.Applied(technique, "wrong", f"{end} while {doing}")
        known_so_far[-1].techniques.append(ended.row())
        return known_so_far[-1]
    kind = "not built" if stage in {"start", "building", "plain"} else "wrong"
    return Verdict(name, kind, f"{end} while {stage}", seconds=round(time.monotonic() - started, 2))


def _child(name: str, known: list[str], tried: str, reading: int, writing: int) -> None:
    try:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)

        def tell(stage: str) -> None:
            os.write(writing, (json.dumps({"stage": stage}) + "\n").encode())

        def halfway(verdict: Verdict) -> None:
            os.write(writing, (json.dumps(verdict.row()) + "\n").encode())

        halfway(judged(name, known, tell, tried=tried, halfway=halfway))
    finally:
        os._exit(0)


def swept(chosen: Iterable[tuple[str, list[str]]], seconds: float, tried: str) -> Iterator[Verdict]:
    """The verdicts, one after the other; `tried` as for `judged`."""
    for name, known in chosen:
        yield verdict_of(name, known, seconds, tried)


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Counts by class, then the reasons of each class with their counts."""
    rows = list(rows)
    counts = Counter(row["kind"] for row in rows)
    lines = [f"{len(rows)} architectures: " + ", ".join(f"{counts[kind]} {kind}" for kind in CLASSES if counts[kind])]
    for kind in CLASSES:
        reasons = Counter(grouped(row["reason"]) for row in rows if row["kind"] == kind and row["reason"])
        lines += [f"  {kind}: {count} x {reason}" for reason, count in reasons.most_common()]
    tried = [row for each in rows for row in each["techniques"]]
    for technique in techniques.TECHNIQUES:
        own = [row for row in tried if row["technique"] == technique.name]
        counts = Counter(row["kind"] for row in own)
        if own:
            told = ", ".join(f"{counts[kind]} {kind}" for kind in techniques.CLASSES if counts[kind])
            lines.append(f"{technique.name}: {told}")
    return "\n".join(lines)


def show(text: str) -> None:
    """Print at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
