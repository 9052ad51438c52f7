"""Plain steps on this GPU beside what memfit predicts for them: with the GPU here, and for one of its name as if it were absent (`device=`, a meta model)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.rows import measured_step, whole_step
from gpu.setting import Setting, adamw, bert, llama
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from memfit.capture.host_time import has_kernel
from memfit.capture.trace_source import TraceSource
from memfit.hardware.machine import known_machine
from memfit.planner.caching_allocator import allocator_bytes
from memfit.planner.timeline import Timeline
from memfit.step.program import StepProgram
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Phase

STAND_IN = "h100"  # predicted for where the script is tried without a GPU

Parts = tuple[nn.Module, Any, Any]


@dataclass(frozen=True)
class PlainStep:
    """One model's step as PyTorch runs it.

    Attributes:
        name: for the row.
        build: model, sample and loss function on the setting's device.
        precision: of autocast.
    """

    name: str
    build: Callable[[Setting], Parts]
    precision: str = "full"


def _bert(batch: int, setting: Setting) -> Parts:
    return *bert(setting, *((2, 32) if setting.tiny else (batch, 128))), None


def _llama(setting: Setting) -> Parts:
    return *llama(setting, 2, 32 if setting.tiny else 2048), None


def _gpt2(setting: Setting) -> Parts:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500}
    batch, tokens = (2, 32) if setting.tiny else (8, 1024)
    with torch.device(setting.device):
        model = GPT2LMHeadModel(GPT2Config(**(small if setting.tiny else {}), use_cache=False)).train()
    ids = torch.randint(0, 500, (batch, tokens), device=setting.batch_device)
    return model, {"input_ids": ids, "labels": ids}, None


def _t5(setting: Setting) -> Parts:
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 64, "d_ff": 128, "num_layers": 2, "vocab_size": 500}
    batch, tokens = (2, 32) if setting.tiny else (16, 256)
    with torch.device(setting.device):
        config = T5Config(**(small if setting.tiny else {}), use_cache=False, decoder_start_token_id=0)
        model = T5ForConditionalGeneration(config).train()
    ids = torch.randint(1, 500, (batch, tokens), device=setting.batch_device)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, None


def _images(name: str, batch: int, layout: torch.memory_format, setting: Setting) -> Parts:
    folder = str(Path(__file__).resolve().parent.parent / "published_seconds")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from networks import IMAGE_MODELS

    batch = 2 if setting.tiny else batch
    with torch.device(setting.device):
        model = IMAGE_MODELS[name]().train().to(memory_format=layout)
    image = torch.randn(batch, 3, 224, 224, device=setting.batch_device).contiguous(memory_format=layout)
    labels = torch.randint(0, 1000, (batch,), device=setting.batch_device)
    return model, (image, labels), lambda m, b: F.cross_entropy(m(b[0]), b[1])


class Language(nn.Module):
    """Words by an LSTM of two layers, whose kernel is cuDNN's."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(ids))[0])
        return out


def _lstm(setting: Setting) -> Parts:
    words, width, batch, tokens = (500, 32, 2, 16) if setting.tiny else (10000, 1024, 64, 128)
    with torch.device(setting.device):
        model = Language(words, width).train()
    ids = torch.randint(0, words, (batch, tokens), device=setting.batch_device)
    return model, ids, lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten())


CHANNELS_LAST = torch.channels_last
PLAIN_STEPS = (
    PlainStep("BERT-large, 16 x 128, fp32", partial(_bert, 16)),
    PlainStep("BERT-large, 32 x 128, bf16 autocast", partial(_bert, 32), "bf16"),
    PlainStep("Llama of 1 billion, 2 x 2048, bf16", _llama),
    PlainStep("GPT-2, 8 x 1024, fp32", _gpt2),
    PlainStep("GPT-2, 8 x 1024, bf16 autocast", _gpt2, "bf16"),
    PlainStep("T5-small, 16 x 256, fp32", _t5),
    PlainStep("ViT-base, 64, fp32", partial(_images, "vit_base", 64, torch.contiguous_format)),
    PlainStep("ViT-base, 64, bf16 autocast", partial(_images, "vit_base", 64, torch.contiguous_format), "bf16"),
    PlainStep("ResNet-50, 64, fp32", partial(_images, "resnet50", 64, torch.contiguous_format)),
    PlainStep("ResNet-50, 128, bf16 autocast, channels last", partial(_images, "resnet50", 128, CHANNELS_LAST), "bf16"),
    PlainStep("VGG-16 with batch norm, 32, fp32", partial(_images, "vgg16_bn", 32, torch.contiguous_format)),
    PlainStep("MobileNetV2, 64, fp32", partial(_images, "mobilenetv2", 64, torch.contiguous_format)),
    PlainStep("MLP-Mixer, 64, bf16 autocast", partial(_images, "mixer_base", 64, torch.contiguous_format), "bf16"),
    PlainStep("LSTM, 64 x 128, width 1024, fp32", _lstm),
)


def absent(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measured peak, reserve and seconds of each plain step, and both predictions."""
    name = STAND_IN if setting.device.type == "cpu" else torch.cuda.get_device_name()
    machine = known_machine(name).name
    for each in PLAIN_STEPS[:2] if setting.tiny else PLAIN_STEPS:
        setting.fresh()
        row = {"step": each.name, **_measured(setting, each)}
        setting.fresh()
        row |= {f"absent_{key}": value for key, value in predicted(setting.on_meta(), each, machine).items()}
        setting.fresh()
        row |= {f"present_{key}": value for key, value in predicted(setting, each, None).items()}
        for which in ("absent", "present"):
            row[f"{which}_error"] = row[f"{which}_bytes"] / row["allocated_bytes"] - 1
            row[f"{which}_seconds_error"] = row[f"{which}_seconds"] / row["seconds"] - 1
        yield row


def _measured(setting: Setting, each: PlainStep) -> dict[str, Any]:
    model, sample, loss_fn = each.build(setting)
    optimizer = adamw(model.parameters())
    program = StepProgram(model, loss_fn, optimizer, choices=BASELINE.but(precision=each.precision))
    return measured_step(setting, whole_step(program, sample), model, sample, optimizer)


def predicted(setting: Setting, each: PlainStep, device: str | None) -> dict[str, Any]:
    """Bytes and seconds of a plain step on this device; None for that of the setting."""
    begin = time.perf_counter()
    model, sample, loss_fn = each.build(setting)
    trace = TraceSource(model, sample, loss_fn, adamw, device=device).trace_of(BASELINE.but(precision=each.precision))
    timeline = Timeline(trace)
    found = allocator_bytes(timeline, {})
    return {
        "bytes": timeline.plain().peak_bytes,
        "reserved": found.reserved,
        "allocated": found.allocated,
        "kernel_seconds": sum(operation.seconds for operation in trace.operations),
        "seconds": trace.plain_step_seconds,
        # Of forward and backward, which the host has to launch one by one.
        "operations": sum(o.phase is not Phase.OPTIMIZER for o in trace.operations),
        "kernels": sum(o.phase is not Phase.OPTIMIZER and has_kernel(o) for o in trace.operations),
        "captured_on": trace.source,
        "notes": list(trace.notes),
        "took_seconds": time.perf_counter() - begin,
    }
