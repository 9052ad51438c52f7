"""Language models whose forward asks whether there is padding, on batches with and without it in turn: losses and parameters bit by bit, and peaks.

On a GPU the answer is waited for, and other kernels may compute attention with a mask than without one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu.cases import on_the_host, put, repeatable
from gpu.setting import Setting, adamw, bert, llama
from torch import nn

import memfit

SHARES = (0.6, 0.0)  # of the way from the smallest budget to plain
STEPS = 6


def _gpt2(setting: Setting, batch: int, tokens: int) -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500} if setting.tiny else {"n_layer": 6}
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)).train()
        ids = torch.randint(0, 500, (batch, tokens))
    return model, {"input_ids": ids, "labels": ids}


def _t5(setting: Setting, batch: int, tokens: int) -> tuple[nn.Module, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "vocab_size": 500} if setting.tiny else {}
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0)).train()
        ids = torch.randint(1, 500, (batch, tokens))
    return model, {"input_ids": ids, "labels": ids}


BUILDERS: dict[str, Callable[[Setting, int, int], tuple[nn.Module, Any]]] = {
    "BERT, six layers": partial(bert, layers=6),
    "GPT-2, six layers": _gpt2,
    "T5-small": _t5,
    "Llama of 1 billion": llama,
}


def padding(setting: Setting) -> Iterator[dict[str, Any]]:
    """Each model planned for from a sample of which one row has padding; every other batch has none."""
    for name, build in BUILDERS.items():
        setting.fresh()
        try:
            yield from _rows(setting, name, build)
        except Exception as error:  # noqa: BLE001 - a model that fails is a finding
            yield {
                "case": name,
                "failed": f"{type(error).__name__}: {error}"[:500],
                "at": traceback.format_exc()[-2500:],
            }


def _rows(setting: Setting, name: str, build: Callable[[Setting, int, int], tuple[nn.Module, Any]]) -> Iterator[Any]:
    repeatable()
    batch, tokens = (4, 32) if setting.tiny else (8, 256)
    model, sample = build(setting, batch, tokens)
    whole = {**sample, "attention_mask": torch.ones_like(sample["input_ids"])}
    padded = {**sample, "attention_mask": whole["attention_mask"].clone()}
    padded["attention_mask"][0, tokens // 2 :] = 0
    turns = [padded if step % 2 else whole for step in range(STEPS)]
    initial = on_the_host(model)

    def trained(step: Callable[[Any], float]) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(7)
        losses = [step(each) for each in turns]
        found = on_the_host(model)
        put(model, initial)
        return losses, found

    def by_hand() -> tuple[list[float], list[torch.Tensor]]:
        optimizer = adamw(model.parameters())

        def step(given: Any) -> float:
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return trained(step)

    def same(a: Any, b: Any) -> bool:
        return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))

    by_hand()
    reference = by_hand()
    repeats = same(reference, by_hand())
    base = memfit.plan(model, padded, None, 1 << 50, adamw, fixed={"micro_batches": 1, "streamed": ""}, host_budget=0)
    smallest, largest = memfit.smallest_budget(base), base.prediction.peak_bytes
    for share in SHARES:
        made = memfit.replan(base, smallest + int((largest - smallest) * share))
        engine = memfit.apply(made, model, None, adamw)
        setting.fresh()
        found = trained(lambda given, engine=engine: float(engine.step(given, meter=True).loss))  # type: ignore[misc]
        yield {
            "case": name,
            "share": share,
            "plain_repeats": repeats,
            "equal": same(reference, found),
            "budget_bytes": made.budget_bytes,
            "predicted_bytes": made.prediction.peak_bytes,
            "allocated_bytes": max(record.peak_bytes or 0 for record in engine.records),
            "peaks": [record.peak_bytes for record in engine.records],
            "divergences": [str(each) for record in engine.records for each in record.divergences],
            "begun_anew": sum(bool(record.begun_anew) for record in engine.records),
            "recomputations": made.script.recomputations,
            "captured_on": made.source,
            "notes": list(made.notes),
        }
        del engine, made
