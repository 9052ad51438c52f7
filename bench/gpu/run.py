"""The questions of the other benches, for one CUDA GPU.

Is it exact, is the prediction true, how does it stand beside rivals, what does following a plan cost, how much of the copying hides behind computing?

    PYTHONPATH=src python bench/gpu/run.py --out DIR            # at most 9 minutes; a second call asks what the first one had no time for
    PYTHONPATH=src python bench/gpu/run.py --out DIR --tiny     # the same on small models, on a CPU too: does the script itself work?

Needs PyTorch 2.11 or newer, NumPy, networkx and transformers; trl, torchtune, torchao and bitsandbytes are asked where they are installed. Each question
writes DIR/QUESTION.jsonl. It has a number of seconds; what it has found by then is kept. A file that ends with a line {"done": true} is not asked again;
questions that were cut short are, after all others, with the time that is left. The models are written here or built from configurations: nothing is fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
import torch
from gpu.absent import absent
from gpu.alone import streaming, swap, techniques
from gpu.asking import Question, answer, turns
from gpu.beside import frontier_bert, frontier_llama, optimizers, recompute_layers
from gpu.cases import calls, programs
from gpu.failing import failing
from gpu.host import host
from gpu.packages import packages
from gpu.padding import padding
from gpu.ranks import ranks
from gpu.recurrent import recurrent
from gpu.rows import plain_row, planned_row
from gpu.setting import Clock, Setting, adamw, bert, images, llama
from gpu.table import table
from overhead.chain import chain_and_batch, engines_between, plainly, planned

import memfit
from memfit.capture.cost_table import CostTable

measuring.with_tests_models()

WHOLE_SECONDS = 530.0

MOST_LATE = 5.0  # what a question takes until it hears that its time is over

GIB = 1 << 30


def exactness(setting: Setting) -> Iterator[dict[str, Any]]:
    """Loss, gradients and buffers bit-equal to plain at budgets from plain to the smallest; plain against itself first."""
    from models.outcome import outcome_of, plans_between

    size = (4, 32) if setting.tiny else (8, 128)
    for name, built in (
        ("bert", lambda: (*bert(setting, *size), None)),
        ("convnet", lambda: images(setting)),
        ("llama", lambda: (*llama(setting, 2, size[1]), None)),
    ):
        setting.fresh()
        model, sample, loss_fn = built()
        # cuDNN and atomics may pick other orders of addition from run to run: then nothing can be bit-equal, plain to plain included.
        outcome_of(model, sample, loss_fn)
        reference = outcome_of(model, sample, loss_fn)
        repeats = reference.differs(outcome_of(model, sample, loss_fn)) is None
        shares = (0.75, 0.4, 0.0)
        plans = plans_between(model, sample, loss_fn, adamw, shares, streamed="")
        for share, made in zip(shares, plans, strict=True):
            found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn))
            yield {
                "model": name,
                "share": share,
                "plain_repeats": repeats,
                "equal": reference.differs(found) is None,
                "recomputations": made.script.recomputations,
            }
        del model, sample, reference, found, made


def predict(setting: Setting) -> Iterator[dict[str, Any]]:
    """Predicted peak against the allocator's: allocated and reserved, in a step with AdamW."""
    size = (4, 32) if setting.tiny else (16, 128)
    for name, built in (
        ("bert", lambda: (*bert(setting, *size), None)),
        ("convnet", lambda: images(setting)),
        ("llama", lambda: (*llama(setting, 2, size[1] * 4), None)),
    ):
        setting.fresh()
        model, sample, loss_fn = built()
        begin = time.perf_counter()
        plain = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 1})
        planning = time.perf_counter() - begin
        high, low = plain.prediction.plain_peak_bytes, memfit.smallest_budget(plain)
        for share in (1.0, 0.5, 0.0):
            made = memfit.replan(plain, round(low + share * (high - low)))
            row = planned_row(setting, made, model, sample)
            yield {
                "model": name,
                "share": share,
                "planning_seconds": planning,
                "error": row["predicted_bytes"] / row["allocated_bytes"] - 1,
                **row,
            }
            del made
        del model, sample, plain


def largest_batch(setting: Setting) -> Iterator[dict[str, Any]]:
    """The largest batch of BERT-large at 128 tokens in 24 GiB, whole batch, under a limit that the allocator enforces; memfit's with what each costs."""
    limit = 24 * GIB if not setting.tiny else 64 << 20
    tokens = 128 if not setting.tiny else 32
    if setting.device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        yield from _batches_within(setting, limit, tokens)
    finally:
        if setting.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def _batches_within(setting: Setting, limit: int, tokens: int) -> Iterator[dict[str, Any]]:
    def plain_runs(batch: int, *, recompute: bool) -> bool:
        setting.fresh()
        model, sample = bert(setting, batch, tokens)
        if recompute:
            recompute_layers(model)
        try:
            return bool(
                plain_row(setting, model, sample, contextlib.nullcontext, repeats=1)["allocated_bytes"] <= limit
            )
        except torch.OutOfMemoryError:
            return False
        finally:
            del model, sample

    for name, recompute in (("plain", False), ("gradient_checkpointing", True)):
        best = 0
        for batch in (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
            if not plain_runs(batch, recompute=recompute):
                break
            best = batch
        yield {"row": name, "batch": best, "limit_bytes": limit}
    for batch in (128, 512, 768, 1024, 1536):  # planning takes longer than the steps
        setting.fresh()
        model, sample = bert(setting, batch, tokens)
        room = int(limit * 0.94)  # the rest is for blocks that do not fit together
        try:
            made = memfit.plan(model, sample, None, room, adamw, fixed={"micro_batches": 1})
        except memfit.InfeasibleError:
            return
        engine = memfit.apply(made, model)
        row = {
            "row": "memfit",
            "batch": batch,
            "predicted_slowdown": made.prediction.slowdown,
            "predicted_bytes": made.prediction.peak_bytes,
        }
        try:
            engine.step(sample)
            yield {**row, "allocated_bytes": engine.step(sample, meter=True).peak_bytes}
        except torch.OutOfMemoryError:
            yield {**row, "out_of_memory": True}
            return
        del engine, made, model, sample


def overhead(setting: Setting) -> Iterator[dict[str, Any]]:
    """Host time added to each forward operation, on tensors so small that the device waits for the host."""
    with setting.device:
        model, batch = chain_and_batch()
    shares = (0.9, 0.5, 0.0)
    operations, engines = engines_between(model, batch, shares)
    plain = plainly(model, batch)
    mode_seconds = CostTable(setting.device).host_time().mode
    for share, engine in zip(shares, engines, strict=True):
        under_plan = planned(engine, batch)
        for run in (plain, under_plan):
            setting.timed(run, 5)
        base, here = setting.timed(plain, 50), setting.timed(under_plan, 50)
        yield {
            "share": share,
            "operations": operations,
            "recomputations": engine.plan.script.recomputations,
            "plain_seconds": base,
            "seconds": here,
            "mode_seconds": mode_seconds,  # of a dispatch mode that does nothing, by which predictions go
            "added_microseconds_per_operation": 1e6 * (here - base) / operations,
        }


__all__ = ["QUESTIONS", "table"]

QUESTIONS: dict[str, Question] = {
    "exactness": Question(exactness, 40),
    "failing": Question(failing, 5),
    "programs": Question(programs, 60),
    "calls": Question(calls, 60),
    "recurrent": Question(recurrent, 50),
    "ranks": Question(ranks, 60),
    "padding": Question(padding, 35),
    "packages": Question(packages, 100),
    "predict": Question(predict, 60),
    "absent": Question(absent, 90),
    "techniques": Question(techniques, 60),
    "swap": Question(swap, 45),
    "streaming": Question(streaming, 30),
    "frontier_bert": Question(frontier_bert, 45),
    "frontier_llama": Question(frontier_llama, 100),
    "largest_batch": Question(largest_batch, 130),
    "optimizers": Question(optimizers, 10),
    "overhead": Question(overhead, 20),
    "host": Question(host, 55),
}


def import_all() -> None:
    """What the questions need: one that runs out of time in an import would leave half of a module for those after it."""
    for model in ("bert", "gpt2", "llama", "t5"):
        importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    importlib.import_module("memfit.api")
    faulthandler.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=list(QUESTIONS), action="append", help="ask this one (may be given again)")
    parser.add_argument("--tiny", action="store_true", help="small models: does the script work?")
    parser.add_argument("--seconds", type=float, default=WHOLE_SECONDS, help="for all questions together")
    arguments = parser.parse_args()
    setting, clock = Setting(tiny=arguments.tiny), Clock(arguments.seconds)
    if setting.device.type == "cpu" and not arguments.tiny:
        parser.error("no CUDA device here; --tiny tries the script on a CPU")
    arguments.out.mkdir(parents=True, exist_ok=True)
    import_all()
    asked = turns(arguments.only or QUESTIONS, arguments.out)
    share = min(1.0, arguments.seconds / sum(QUESTIONS[name].seconds for name, _ in asked)) if asked else 1.0
    for name, again in asked:
        question = QUESTIONS[name]
        if clock.left < MOST_LATE:
            print(f"{name}: no time left; call again to go on", flush=True)
            continue
        seconds = clock.left if again else min(share * question.seconds, clock.left)
        answer(name, question, setting, arguments.out / f"{name}.jsonl", seconds)
        setting.fresh()


if __name__ == "__main__":
    main()
