"""Where the questions for a GPU are asked: the device, the time that is left, and the models."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memfit


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

    @property
    def batch_device(self) -> torch.device:
        """Where a sample lies: beside the model, or on the CPU where the model has no memory."""
        return torch.device("cpu") if self.device.type == "meta" else self.device

    def on_meta(self) -> Setting:
        """The same sizes, models on the meta device."""
        other = Setting(tiny=self.tiny)
        other.device = torch.device("meta")
        return other

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
        """Seconds of one of some steps: on a CPU the median, on a GPU the mean of steps in a row, as in training the host goes on before the GPU is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                step()
            torch.cuda.synchronize()
            return (time.perf_counter() - begin) / repeats
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def bert(setting: Setting, batch: int, tokens: int, layers: int = 24) -> tuple[nn.Module, Any]:
    """BERT-large by its true shapes (336 million parameters with all 24 layers), dropout 0.1, fp32 weights."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, int] = (
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 500,
        }
        if setting.tiny
        else {
            "vocab_size": 30522,
            "hidden_size": 1024,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        }
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = BertForSequenceClassification(BertConfig(**sizes))
    with setting.batch_device:
        sample = {
            "input_ids": torch.randint(0, sizes["vocab_size"], (batch, tokens)),
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
    with setting.batch_device:
        ids = torch.randint(0, sizes["vocab_size"], (batch, tokens))
    if setting.device.type != "cpu":
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
