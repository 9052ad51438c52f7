"""memfit beside others on a GPU: recomputing and offloading of activations, optimizers with less state."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu.rows import plain_row, planned_row, room_below
from gpu.setting import Setting, adamw, bert, llama
from torch import nn

import memfit
from memfit.optimizers.chunked import ChunkedOptimizer


class Absent(Exception):  # noqa: N818 - an answer, not an error
    """A rival is not here; the message says why."""


Around = Callable[[], contextlib.AbstractContextManager[object]]


def _nothing(_setting: Setting, _model: Any) -> Around:
    return contextlib.nullcontext


def recompute_layers(model: Any) -> None:
    """Transformers' own recomputation of all layers, by the name it has in the version that is here."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def _checkpointing(_setting: Setting, model: Any) -> Around:
    recompute_layers(model)
    return contextlib.nullcontext


def _save_on_cpu(setting: Setting, _model: Any) -> Around:
    pinned = setting.device.type == "cuda"
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)


def _offloaded_checkpointing(setting: Setting, model: Any) -> Around:
    """Transformers' own where it has it (5.23), else the same: layers recomputed, what goes into each in host memory."""
    if setting.device.type != "cuda":
        raise Absent("on a CPU what it keeps lies where it would go")
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None and "offload" in inspect.signature(enable).parameters:
        enable(offload=True)
        return contextlib.nullcontext
    recompute_layers(model)
    # Hooks entered outside of a checkpoint see what goes into it, and nothing of its inside.
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)


def _offload_activations(package: str) -> Callable[[Setting, Any], Around]:
    def arrange(setting: Setting, model: Any) -> Around:
        try:
            if package == "trl":
                from trl.models.activation_offloading import get_act_offloading_ctx_manager as made
            else:
                from torchtune.training._activation_offloading import get_act_offloading_ctx_manager as made
        except ImportError as error:
            raise Absent(f"{package} is not installed ({error})") from error
        if setting.device.type != "cuda":
            raise Absent("it moves activations off an accelerator")
        more = {} if package == "trl" else {"enable_activation_offloading": True}
        around = made(model, **more)
        return lambda: around

    return arrange


RIVALS: dict[str, Callable[[Setting, Any], Around]] = {
    "plain": _nothing,
    "gradient_checkpointing": _checkpointing,
    "save_on_cpu": _save_on_cpu,
    "offloaded_checkpointing": _offloaded_checkpointing,
    "trl_offload_activations": _offload_activations("trl"),
    "torchtune_offload_activations": _offload_activations("torchtune"),
}
"""`RIVALS[name](setting, model)` changes the model as its users would, and gives what forward runs inside of; raises `Absent`."""


def rivals(setting: Setting, build: Callable[[], tuple[nn.Module, Any]], name: str) -> Iterator[dict[str, Any]]:
    """One model on the frontier: plain, recompute and offloading of others, and memfit (recomputing and swapping) at each of their peaks and below."""
    out: dict[str, dict[str, Any]] = {}
    for rival, arrange in RIVALS.items():
        setting.fresh()
        model, sample = build()
        try:
            out[rival] = plain_row(setting, model, sample, arrange(setting, model))
        except torch.OutOfMemoryError:
            out[rival] = {"out_of_memory": True}
        except Absent as reason:
            out[rival] = {"not_run": str(reason)}
        yield {"model": name, "row": rival, **out[rival]}
        del model, sample
    setting.fresh()
    model, sample = build()
    plain = memfit.plan(
        model, sample, None, 1 << 50, adamw, fixed={"micro_batches": 1}, host_budget=room_below(setting)
    )
    low = memfit.smallest_budget(plain)
    high = plain.prediction.plain_peak_bytes
    wanted = {
        f"the peak of {r}": row["allocated_bytes"]
        for r, row in out.items()
        if "allocated_bytes" in row and r != "plain"
    }
    wanted = {"plain": high, **wanted, **{f"{share:.2f} of plain": round(high * share) for share in (0.65, 0.35)}}
    wanted["the smallest"] = low
    for what, budget in wanted.items():
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
            "recomputations": made.script.recomputations,
            "swapped_bytes": sum(swap.bytes for swap in made.script.swaps.values()),
        }
        del made


def frontier_bert(setting: Setting) -> Iterator[dict[str, Any]]:
    """BERT-large, batch 32, 128 tokens."""
    size = (4, 32) if setting.tiny else (32, 128)
    yield from rivals(setting, lambda: bert(setting, *size), "bert")


def frontier_llama(setting: Setting) -> Iterator[dict[str, Any]]:
    """A billion parameters, batch 4, 2048 tokens."""
    size = (2, 32) if setting.tiny else (4, 2048)
    yield from rivals(setting, lambda: llama(setting, *size), "llama")


OPTIMIZERS_BESIDE = (
    "fused",
    "8-bit",
    "bitsandbytes 8-bit",
    "torchao 8-bit",
    "torchao CPUOffloadOptimizer",
    "state on the host",
)


def optimizers(setting: Setting) -> Iterator[dict[str, Any]]:
    """Seconds of an update and bytes of a whole step, two of BERT-large's layers and its embedding: 32 bits, 8 bits, state on the host, and others' of each."""
    for name in OPTIMIZERS_BESIDE:
        setting.fresh()
        model, sample = bert(setting, 2, 32, layers=2)
        try:
            make = _optimizer_named(setting, name)
            yield {"optimizer": name, **plain_row(setting, model, sample, contextlib.nullcontext, make=make)}
        except Absent as reason:
            yield {"optimizer": name, "not_run": str(reason)}
        except (RuntimeError, AssertionError, ValueError) as error:  # a rival that fails is a finding
            yield {"optimizer": name, "failed": f"{type(error).__name__}: {error}"[:500]}
        del model, sample


def _optimizer_named(setting: Setting, name: str) -> Any:
    if name == "fused":
        return adamw
    if name == "8-bit":
        return lambda parameters: memfit.AdamW8bit(parameters, lr=1e-5)
    if name == "state on the host":
        if setting.device.type == "cpu":
            raise Absent("on a CPU the host's memory is the device's")
        return lambda parameters: ChunkedOptimizer(adamw(parameters), state_place="host")
    package = name.split(maxsplit=1)[0]
    try:
        if package == "bitsandbytes":
            from bitsandbytes.optim.adamw import AdamW8bit as Made
        elif name == "torchao 8-bit":
            from torchao.optim import AdamW8bit as Made  # type: ignore[no-redef]
        else:
            from torchao.optim import CPUOffloadOptimizer as Made  # type: ignore[no-redef]
    except ImportError as error:
        raise Absent(f"{package} is not installed ({error})") from error
    more = {"optimizer_class": torch.optim.AdamW} if name.endswith("CPUOffloadOptimizer") else {}
    return lambda parameters: Made(list(parameters), lr=1e-5, **more)
