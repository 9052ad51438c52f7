"""A question that is asked model by model: each in a process of its own, its rows merged with those of the others, so that a broken run can go on."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring

QUICK_ROUNDS = 2


def main(
    question: str,
    script: Path,
    parser: argparse.ArgumentParser,
    ask: Callable[..., list[dict[str, Any]]],
    table: Callable[[Sequence[Mapping[str, Any]]], str],
    *,
    by_computer: bool = False,
) -> None:
    """Read the command line and ask.

    Args:
        question: folder of the results.
        script: the question's run.py, which is started once for each model.
        parser: with the question's own options, which `ask` is given by name; with --quick, `rounds` is small.
        ask: `ask(model, quick=..., ...)` gives the rows of one model.
        table: the rows as Markdown.
        by_computer: the rows of other computers are kept.
    """
    own = {action.dest for action in parser._actions} - {"help"}
    parser.add_argument("--models", help="only these, separated by commas")
    parser.add_argument("--missing", action="store_true", help="only models that have no results yet")
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few settings; results are shown, not kept"
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # where the process of one model leaves its rows
    arguments = parser.parse_args()
    measuring.with_tests_models()
    if arguments.into is not None:
        measuring.steady_allocator()
        # Operations are timed afresh: figures must not rest on what a busy machine left in the cache.
        os.environ["MEMFIT_CACHE_DIR"] = str(arguments.into.parent)
        import torch

        torch.set_num_threads(1)
        more = {name: getattr(arguments, name) for name in own}
        if arguments.quick and "rounds" in more:
            more["rounds"] = QUICK_ROUNDS
        rows = ask(arguments.models, quick=arguments.quick, **more)
        about = measuring.machine()
        arguments.into.write_text("".join(json.dumps({"machine": about, **row}) + "\n" for row in rows))
        return
    from rivals.subjects import subjects

    names = [subject.name for subject in subjects(arguments.models, quick=arguments.quick)]
    here = measuring.machine()["device"] if by_computer else ""

    def replaceable(row: Mapping[str, Any]) -> bool:
        return not by_computer or row["machine"]["device"] == here

    if arguments.missing:
        asked = {row["model"] for row in measuring.kept(question) if replaceable(row)}
        names = [name for name in names if name not in asked]
    shown = []
    failed = []
    for name in names:
        print(f"-- {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
            into = Path(folder) / "rows.jsonl"
            command = [sys.executable, str(script), "--models", name, "--into", str(into)]
            command += ["--quick"] if arguments.quick else []
            for option in own:
                command += [f"--{option}", str(getattr(arguments, option))]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
                continue
            rows = [json.loads(line) for line in into.read_text().splitlines()]
        shown += rows
        if not arguments.quick:
            others = [row for row in measuring.kept(question) if row["model"] != name or not replaceable(row)]
            measuring.keep(question, {}, _in_order(others + rows))
    if shown:
        print(table(shown))
    if failed:
        raise SystemExit(
            f"failed: {', '.join(failed)}; the others' results are kept, ask again with --models {','.join(failed)}"
        )


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Models in the order in which they are listed, whenever they were asked."""
    from rivals.subjects import SUBJECTS

    order = {subject.name: place for place, subject in enumerate(SUBJECTS)}
    return sorted(rows, key=lambda row: order.get(row["model"], len(order)))
