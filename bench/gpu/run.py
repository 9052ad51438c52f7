"""The questions of the other benches, for one CUDA GPU: is it exact, is the prediction true, how does it stand beside rivals, what does following a plan cost?

    PYTHONPATH=src python bench/gpu/run.py --out DIR            # at most 9 minutes; a second call goes on where the first one stopped
    PYTHONPATH=src python bench/gpu/run.py --out DIR --tiny     # the same on small models, on a CPU too: does the script itself work?

Needs PyTorch 2.11 or newer, NumPy, networkx and transformers. Each question writes DIR/QUESTION.jsonl; a file that ends with a line {"done": true} is not asked
again. The models are written here or built from configurations, so nothing is fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
import torch
from overhead.chain import chain_and_batch, engines_between, plainly, planned
from torch import nn

import memfit
from memfit.meter import metered
from memfit.step.program import state_tensors

measuring.with_tests_models()

WHOLE_SECONDS = 530.0
GIB = 1 << 30


class Clock:
    """How much of the time allowed is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


class Setting:
    """Where and how large.

    Attributes:
        device: "cuda", or "cpu" to try the script.
        tiny: small models.
    """

    def __init__(self, *, tiny: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tiny = tiny

    def about(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "memfit": memfit.__version__,
            "tiny": self.tiny,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }

    def fresh(self) -> None:
        """Nothing of the row before is left on the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def timed(self, step: Callable[[], object], repeats: int) -> float:
        """Median seconds of a step; on a GPU until the device is done."""
        times = []
        for _ in range(repeats):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


# -- models ----------------------------------------------------------------------------------------------------------------


def bert(setting: Setting, batch: int, tokens: int) -> tuple[nn.Module, Any]:
    """BERT-large by its true shapes (336 million parameters), dropout 0.1, fp32 weights."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, int] = (
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
        if setting.tiny
        else {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = BertForSequenceClassification(BertConfig(**sizes))
        sample = {
            "input_ids": torch.randint(0, 30522, (batch, tokens)),
            "attention_mask": torch.ones(batch, tokens, dtype=torch.long),
            "labels": torch.randint(0, 2, (batch,)),
        }
    return model.train(), sample


def llama(setting: Setting, batch: int, tokens: int) -> tuple[nn.Module, Any]:
    """Llama-style with a billion parameters (16 layers, hidden 2048, vocabulary 32,000), bf16 weights on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, int] = (
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 512,
        }
        if setting.tiny
        else {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 32000,
        }
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
        ids = torch.randint(0, sizes["vocab_size"], (batch, tokens))
    if setting.device.type == "cuda":
        model = model.to(torch.bfloat16)
    return model.train(), {"input_ids": ids, "labels": ids}


class ConvNet(nn.Module):
    """Convolutions with batch norm and in-place ReLU, with skips: cuDNN's workspace is what the fake capture does not see."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu_(block(x) + x)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def images(setting: Setting) -> tuple[nn.Module, Any, Any]:
    width, blocks, batch, side = (8, 3, 4, 16) if setting.tiny else (64, 12, 64, 64)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = ConvNet(width, blocks)
        sample = (torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,)))
    return model.train(), sample, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])


# -- questions: each yields rows --------------------------------------------------------------------------------------------


def exactness(setting: Setting, clock: Clock) -> Iterator[dict[str, Any]]:
    """Loss, gradients and buffers bit-equal to plain at budgets from plain to the smallest; plain against itself first."""
    from models.outcome import outcome_of, plans_between

    size = (4, 32) if setting.tiny else (8, 128)
    for name, built in (
        ("bert", lambda: (*bert(setting, *size), None)),
        ("convnet", lambda: images(setting)),
        ("llama", lambda: (*llama(setting, 2, size[1]), None)),
    ):
        if clock.left < 40:
            return
        setting.fresh()
        model, sample, loss_fn = built()
        # cuDNN and atomics may pick other orders of addition from run to run: then nothing can be bit-equal, plain to plain included.
        outcome_of(model, sample, loss_fn)
        reference = outcome_of(model, sample, loss_fn)
        repeats = reference.differs(outcome_of(model, sample, loss_fn)) is None
        shares = (0.75, 0.4, 0.0)
        for share, made in zip(shares, plans_between(model, sample, loss_fn, adamw, shares), strict=True):
            found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn))
            yield {
                "model": name,
                "share": share,
                "plain_repeats": repeats,
                "equal": reference.differs(found) is None,
                "reruns": made.script.reruns,
            }
        del model, sample, reference, found, made


def predict(setting: Setting, clock: Clock) -> Iterator[dict[str, Any]]:
    """Predicted peak against the allocator's: allocated and reserved, in a step with AdamW."""
    size = (4, 32) if setting.tiny else (16, 128)
    for name, built in (
        ("bert", lambda: (*bert(setting, *size), None)),
        ("convnet", lambda: images(setting)),
        ("llama", lambda: (*llama(setting, 2, size[1] * 4), None)),
    ):
        if clock.left < 40:
            return
        setting.fresh()
        model, sample, loss_fn = built()
        begin = time.perf_counter()
        plain = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 1})
        planning = time.perf_counter() - begin
        high, low = plain.prediction.plain_peak_bytes, plain.runtime.search.smallest()[0]
        for share in (1.0, 0.5, 0.0):
            made = memfit.replan(plain, round(low + share * (high - low)))
            row = planned_row(setting, made, model, sample)
            yield {
                "model": name,
                "share": share,
                "planning_seconds": planning,
                "predicted_seconds": made.prediction.step_seconds,
                "error": row["predicted_bytes"] / row["allocated_bytes"] - 1,
                **row,
            }
            del made
        del model, sample, plain


def planned_row(setting: Setting, made: memfit.Plan, model: nn.Module, sample: Any) -> dict[str, Any]:
    """Peak and seconds of a step under a plan of this process."""
    setting.fresh()
    engine = memfit.apply(made, model)
    engine.step(sample)
    engine.step(sample)
    record = engine.step(sample, meter=True)
    return {
        "budget_bytes": made.budget_bytes,
        "predicted_bytes": made.prediction.peak_bytes,
        "allocated_bytes": record.peak_bytes,
        "departures": list(record.departures),
        "seconds": setting.timed(partial(engine.step, sample), 5),
    }


def plain_row(setting: Setting, model: nn.Module, sample: Any, arrange: Any, repeats: int = 5) -> dict[str, Any]:
    """Peak and seconds of a plain step under some arrangement of torch's or transformers'."""
    optimizer = adamw(model.parameters())

    def step() -> None:
        with arrange():
            loss = model(**sample).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    setting.fresh()
    present = [*model.parameters(), *model.buffers(), *sample.values(), *state_tensors(optimizer)]
    with metered(present, setting.device) as reading:
        step()
    return {
        "allocated_bytes": reading.peak_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "seconds": setting.timed(step, repeats),
    }


def rivals(
    setting: Setting, clock: Clock, build: Callable[[], tuple[nn.Module, Any]], name: str
) -> Iterator[dict[str, Any]]:
    """One model on the frontier: plain, transformers' recompute, save_on_cpu, and memfit at each of their peaks and below."""
    out: dict[str, dict[str, Any]] = {}
    for rival in ("plain", "gradient_checkpointing", "save_on_cpu"):
        if clock.left < 45:
            return
        setting.fresh()
        model, sample = build()
        arrange: Any = contextlib.nullcontext
        if rival == "gradient_checkpointing":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if rival == "save_on_cpu":
            pinned = setting.device.type == "cuda"
            arrange = lambda p=pinned: torch.autograd.graph.save_on_cpu(pin_memory=p)  # noqa: E731
        try:
            out[rival] = plain_row(setting, model, sample, arrange)
        except torch.OutOfMemoryError:
            out[rival] = {"out_of_memory": True}
        yield {"model": name, "row": rival, **out[rival]}
        del model, sample
    setting.fresh()
    model, sample = build()
    plain = memfit.plan(model, sample, None, 1 << 50, adamw, fixed={"micro_batches": 1})
    low = plain.runtime.search.smallest()[0]
    high = plain.prediction.plain_peak_bytes
    wanted = {f"{share:.2f} of plain": round(high * share) for share in (0.8, 0.65, 0.5, 0.35)} | {"the smallest": low}
    for rival in ("gradient_checkpointing", "save_on_cpu"):
        if "allocated_bytes" in out.get(rival, {}):
            wanted[f"the peak of {rival}"] = out[rival]["allocated_bytes"]
    for what, budget in wanted.items():
        if clock.left < 15:
            return
        if budget < low:
            yield {
                "model": name,
                "row": f"memfit at {what}",
                "smallest_bytes": low,
                "budget_bytes": budget,
                "fits": False,
            }
            continue
        made = memfit.replan(plain, budget)
        yield {
            "model": name,
            "row": f"memfit at {what}",
            **planned_row(setting, made, model, sample),
            "predicted_slowdown": made.prediction.slowdown,
            "gap": made.gap,
            "reruns": made.script.reruns,
        }
        del made


def frontier_bert(setting: Setting, clock: Clock) -> Iterator[dict[str, Any]]:
    """BERT-large, batch 32, 128 tokens."""
    size = (4, 32) if setting.tiny else (32, 128)
    yield from rivals(setting, clock, lambda: bert(setting, *size), "bert")


def frontier_llama(setting: Setting, clock: Clock) -> Iterator[dict[str, Any]]:
    """A billion parameters, batch 4, 2048 tokens."""
    size = (2, 32) if setting.tiny else (4, 2048)
    yield from rivals(setting, clock, lambda: llama(setting, *size), "llama")


def largest_batch(setting: Setting, clock: Clock) -> Iterator[dict[str, Any]]:
    """The largest batch of BERT-large at 128 tokens in 24 GiB, whole batch, under a limit that the allocator enforces."""
    limit = 24 * GIB if not setting.tiny else 64 << 20
    tokens = 128 if not setting.tiny else 32
    if setting.device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def plain_runs(batch: int, *, recompute: bool) -> bool:
        setting.fresh()
        model, sample = bert(setting, batch, tokens)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
            if clock.left < 20 or not plain_runs(batch, recompute=recompute):
                break
            best = batch
        yield {"row": name, "batch": best, "limit_bytes": limit}
    for slowdown in (1.12, 1.20, None):
        best_row: dict[str, Any] | None = None
        for batch in (64, 128, 192, 256, 384, 512, 768, 1024):
            if clock.left < 25:
                break
            setting.fresh()
            model, sample = bert(setting, batch, tokens)
            room = int(limit * 0.94)  # the rest is for blocks that do not fit together
            try:
                made = memfit.plan(model, sample, None, room, adamw, fixed={"micro_batches": 1})
            except memfit.InfeasibleError:
                break
            if slowdown is not None and made.prediction.slowdown > slowdown:
                break
            engine = memfit.apply(made, model)
            try:
                engine.step(sample)
                record = engine.step(sample, meter=True)
            except torch.OutOfMemoryError:
                best_row = best_row or {"row": "memfit", "batch": 0}
                best_row["out_of_memory_at"] = batch
                break
            best_row = {
                "row": "memfit",
                "slowdown_allowed": slowdown,
                "batch": batch,
                "predicted_slowdown": made.prediction.slowdown,
                "predicted_bytes": made.prediction.peak_bytes,
                "allocated_bytes": record.peak_bytes,
            }
            del engine, made, model, sample
        if best_row is not None:
            yield best_row
    if setting.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def overhead(setting: Setting, clock: Clock) -> Iterator[dict[str, Any]]:
    """Host time added to each forward operation, on tensors so small that the device waits for the host."""
    del clock
    with setting.device:
        model, batch = chain_and_batch()
    shares = (0.9, 0.5, 0.0)
    operations, engines = engines_between(model, batch, shares)
    plain = plainly(model, batch)
    for share, engine in zip(shares, engines, strict=True):
        under_plan = planned(engine, batch)
        for run in (plain, under_plan):
            setting.timed(run, 5)
        base, here = setting.timed(plain, 50), setting.timed(under_plan, 50)
        yield {
            "share": share,
            "operations": operations,
            "reruns": engine.plan.script.reruns,
            "plain_seconds": base,
            "seconds": here,
            "added_microseconds_per_operation": 1e6 * (here - base) / operations,
        }


QUESTIONS: dict[str, Callable[[Setting, Clock], Iterator[dict[str, Any]]]] = {
    "exactness": exactness,
    "predict": predict,
    "frontier_bert": frontier_bert,
    "frontier_llama": frontier_llama,
    "largest_batch": largest_batch,
    "overhead": overhead,
}


def finished(path: Path) -> bool:
    """Whether a question was asked to its end."""
    return path.exists() and '"done": true' in path.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=list(QUESTIONS), action="append", help="ask this one (may be given again)")
    parser.add_argument("--tiny", action="store_true", help="small models: does the script work?")
    parser.add_argument("--seconds", type=float, default=WHOLE_SECONDS, help="stop before this many seconds")
    arguments = parser.parse_args()
    setting, clock = Setting(tiny=arguments.tiny), Clock(arguments.seconds)
    if setting.device.type == "cpu" and not arguments.tiny:
        parser.error("no CUDA device here; --tiny tries the script on a CPU")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or QUESTIONS:
        path = arguments.out / f"{name}.jsonl"
        if finished(path):
            print(f"{name}: done before", flush=True)
            continue
        if clock.left < 30:
            print(f"{name}: no time left; call again to go on", flush=True)
            continue
        begin = time.perf_counter()
        with path.open("w") as file:
            file.write(json.dumps({"bench": f"gpu/{name}", "machine": setting.about()}) + "\n")
            try:
                for row in QUESTIONS[name](setting, clock):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    print(name, json.dumps(row), flush=True)
                file.write(json.dumps({"done": True, "seconds": time.perf_counter() - begin}) + "\n")
            except Exception as error:  # noqa: BLE001 - one question that fails must not take the others along
                file.write(json.dumps({"failed": f"{type(error).__name__}: {error}"[:2000]}) + "\n")
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
        setting.fresh()


if __name__ == "__main__":
    main()
