"""Told before it runs: predicted against measured peaks, over models, optimizers and budgets, memfit beside what others estimate for the plain step.

python bench/predict/run.py [--models gpt,vit] [--missing] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from rivals import asking

QUESTION = "predict"
PATIENCE_SECONDS = 180  # for one estimate; some walk over all storages at every operation
SHARES = (1.0, 0.5, 0.0)  # of the way from the smallest plan to plain; 1.0 is plain itself
QUICK_OPTIMIZERS = ("SGD", "AdamW, fused")

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ask(name: str, *, quick: bool) -> list[Row]:
    """All rows of one model."""
    from rivals.arrangement import Rival, peak_of
    from rivals.optimizers import OPTIMIZERS
    from rivals.subjects import subjects

    (subject,) = subjects(name)
    subject = subject.with_batch(
        max(2, subject.batch // 4)
    )  # what is asked does not depend on it, and steps are quicker
    rows: list[Row] = []
    silent: dict[str, str] = {}  # who gave no answer in time, and to what
    for optimizer, factory in OPTIMIZERS.items():
        if quick and optimizer not in QUICK_OPTIMIZERS:
            continue
        plain = Rival(subject, optimizer=factory)
        plain.step()
        measured = peak_of(plain)
        del plain
        say(f"{optimizer}: plain {measured / 2**20:.1f} MiB")
        found = [*_ours(subject, factory), *_others(subject, optimizer, silent)]
        rows += [
            {"model": subject.name, "words": subject.words, "optimizer": optimizer, "plain_peak_bytes": measured, **row}
            for row in found
        ]
    return rows


def _ours(subject: Any, factory: Any) -> list[Row]:
    from rivals.arrangement import first_gradients, peak_of
    from rivals.ours import Ours

    begin = time.perf_counter()
    ours = Ours(subject, factory)
    base = ours.base("recompute only")
    seconds = time.perf_counter() - begin
    largest, smallest = base.prediction.plain_peak_bytes, ours.smallest("recompute only")
    rows = []
    for share in SHARES:
        made = base if share == 1.0 else ours.plan("recompute only", round(smallest + (largest - smallest) * share))[0]
        assert made is not None
        planned = ours.arranged(made)
        first_gradients(planned)
        rows.append(
            {
                "who": "memfit",
                "share": share,
                "budget_bytes": made.budget_bytes,
                "predicted_bytes": made.prediction.peak_bytes,
                "measured_bytes": peak_of(planned),
                "seconds": seconds,
                "divergences": sorted(planned.divergences),
            }
        )
        say(f"  memfit, {share}: off by {rows[-1]['measured_bytes'] - rows[-1]['predicted_bytes']} bytes")
    return rows


def _others(subject: Any, optimizer: str, silent: dict[str, str]) -> list[Row]:
    from rivals import discovery

    rows = []
    for each in discovery.modules("predict.estimators", Path(__file__).resolve().parent / "estimators"):
        row: Row = {"who": each.NAME, "covers": each.COVERS, "note": each.NOTE, "version": discovery.version(each)}
        begin = time.perf_counter()
        row["reason"] = discovery.absent(each)
        if row["reason"] is None and each.NAME in silent:
            row["reason"] = silent[each.NAME]
        elif row["reason"] is None:
            kind, answer = _estimated(each.__name__, subject, optimizer)
            if kind == "bytes":
                row["predicted_bytes"] = answer
            else:
                row["reason"] = answer
            if kind == "silent":
                silent[each.NAME] = f"{answer} with {optimizer}, not asked again"
        row["seconds"] = time.perf_counter() - begin
        rows.append(row)
        say(f"  {each.NAME}: {row.get('predicted_bytes', row['reason'])}")
    return rows


def _estimated(module: str, subject: Any, optimizer: str) -> tuple[str, Any]:
    """("bytes", estimate), ("none", why there is none) or ("silent", how long nothing was heard): from a process of its own, which can be ended anywhere."""
    spawning = multiprocessing.get_context("spawn")
    hears, tells = spawning.Pipe(duplex=False)
    child = spawning.Process(target=_estimate, args=(tells, module, subject.name, subject.batch, optimizer))
    child.start()
    tells.close()
    try:
        if not hears.poll(PATIENCE_SECONDS):
            return "silent", f"no answer in {PATIENCE_SECONDS // 60} minutes"
        kind, answer = hears.recv()
    except EOFError:
        child.join()
        return "none", f"its process ends with status {child.exitcode}"
    finally:
        child.kill()
        child.join()
    return str(kind), answer


def _estimate(tells: Connection, module: str, name: str, batch: int, optimizer: str) -> None:
    import torch
    from predict.estimators import NotEstimated
    from rivals.subjects import subjects

    measuring.with_tests_models()
    torch.set_num_threads(1)
    (subject,) = subjects(name)
    try:
        answer = "bytes", importlib.import_module(module).estimate(subject.with_batch(batch), optimizer)
    except NotEstimated as reason:
        answer = "none", str(reason)
    except Exception as error:  # noqa: BLE001, an estimator that fails is a finding, not an end
        answer = "none", f"fails: {type(error).__name__}: {error}".splitlines()[0][:160]
    tells.send(answer)


# ------------------------------------------------------------------------------------------------------------- the page


def _error(predicted: int, measured: int) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


def _exactly(predicted: int, measured: int) -> str:
    """To the byte where it matters: an error below a tenth of a percent in bytes."""
    off = predicted - measured
    if off == 0:
        return "0 bytes"
    return f"{off:+,} bytes" if abs(off) < measured / 1000 else f"{100 * off / measured:+.2f} %"


def table(rows: Rows) -> str:
    """As Markdown: memfit over models, optimizers and budgets; then everyone on the plain step."""
    parts = ["### memfit, predicted minus measured", "", _ours_table(rows), ""]
    parts += ["### The plain step, everyone", "", "Estimate over measured peak, less one.", "", _plain_table(rows), ""]
    parts += ["### Who estimates what", "", _who_table(rows)]
    return "\n".join(parts)


def _ours_table(rows: Rows) -> str:
    mine = [row for row in rows if row["who"] == "memfit"]
    off = [abs(row["predicted_bytes"] - row["measured_bytes"]) for row in mine]
    above = sum(row["measured_bytes"] > row["budget_bytes"] for row in mine)
    words = f"{len(mine)} predictions, {sum(not o for o in off)} exact, {above} peaks above their budget.\n\n"
    body = [
        [model, optimizer, *(_exactly(row["predicted_bytes"], row["measured_bytes"]) for row in group)]
        for (model, optimizer), group in groupby(mine, key=lambda row: (row["model"], row["optimizer"]))
    ]
    return words + measuring.table(["model", "optimizer", "plain", "half way", "smallest"], body)


def _plain_table(rows: Rows) -> str:
    others = list(dict.fromkeys(row["who"] for row in rows if row["who"] != "memfit"))
    body = []
    for (model, optimizer), grouped in groupby(rows, key=lambda row: (row["model"], row["optimizer"])):
        group = list(grouped)
        measured = group[0]["plain_peak_bytes"]
        cells = [model, optimizer, f"{measured / 2**20:.1f}"]
        plain = next(row for row in group if row["who"] == "memfit" and row["share"] == 1.0)
        cells.append(_error(plain["predicted_bytes"], measured))
        for who in others:
            row = next((row for row in group if row["who"] == who), None)
            known = row is not None and row.get("predicted_bytes") is not None
            cells.append(_error(row["predicted_bytes"], measured) if row is not None and known else "")
        body.append(cells)
    return measuring.table(["model", "optimizer", "measured, MiB", "memfit", *others], body)


def _who_table(rows: Rows) -> str:
    body = []
    for who in dict.fromkeys(row["who"] for row in rows if row["who"] != "memfit"):
        group = [row for row in rows if row["who"] == who]
        reasons: dict[str, list[str]] = {}
        for row in group:
            if row["reason"]:
                reasons.setdefault(row["reason"], []).append(row["model"])
        missing = "; ".join(f"{reason} ({', '.join(dict.fromkeys(names))})" for reason, names in reasons.items())
        version = f" {group[0]['version']}" if group[0]["version"] else ""
        body.append([f"{who}{version}", group[0]["covers"], group[0]["note"], missing.replace("|", "/")])
    return measuring.table(["estimator", "meant to hold", "note", "no figure"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.main(QUESTION, Path(__file__), parser, ask, table)


if __name__ == "__main__":
    main()
