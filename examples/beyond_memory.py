"""Train a model whose parameters, gradients and optimizer state are several times the memory the process may have.

The limit is the operating system's (RLIMIT_DATA), set after everything is imported and planned, at what the process uses then and the budget. Three
processes train the same model on the same batches:

    [1] plain     PyTorch without a limit: the losses to be reached.
    [2] plain     PyTorch under the limit: it dies.
    [3] memfit    under the same limit: layers lie in a file and come one at a time. Its losses must be those of [1], bit for bit.

The exit status is 0 when [2] dies, [3] lives, and the losses are equal; 1 else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.streaming.initialisation import filled, reset
from memfit.units import format_bytes, parse_bytes

HEADS: Final = 8
TOKENS: Final = 64
SAMPLES: Final = 4
VOCAB: Final = 512
BYTES_A_PARAMETER: Final = 16  # value, gradient and AdamW's two moments, in fp32
# The C library keeps freed memory for itself otherwise, which counts against the limit: so in all three processes.
GIVEN_BACK: Final = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Block(nn.Module):
    """Pre-norm decoder block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, hidden) to the same shape."""
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.dropout(self.out(mixed))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    """Embeddings, blocks, a norm and a head."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, hidden), nn.Embedding(TOKENS, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (samples, tokens) to logits."""
        x = self.token(ids) * 0.02 + self.position.weight * 0.02
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (SAMPLES, TOKENS), generator=generator) for _ in range(steps)]


def limit(budget_bytes: int) -> None:
    """From here on the process may have this much more writable memory of its own; asking for more fails."""
    status = Path("/proc/self/status").read_text()
    present = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (present + budget_bytes, present + budget_bytes))


def train_plainly(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of plain PyTorch; the model starts on the meta device, so that its values are made in the same order as block by block."""
    with torch.device("meta"):
        model = GPT(options.layers, options.hidden)
    data = batches(options.steps)
    if options.limited:
        limit(parse_bytes(options.budget))
    torch.manual_seed(0)
    for _ in filled(model, reset, torch.device("cpu")):
        pass
    optimizer = adamw(model.parameters())
    losses = []
    for ids in data:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def train_streamed(options: argparse.Namespace) -> dict[str, Any]:
    """Losses with the blocks in a file, under the limit."""
    with torch.device("meta"):
        model = GPT(options.layers, options.hidden)
    data = batches(options.steps)
    budget = parse_bytes(options.budget)
    plan = memfit.plan(model, data[0], loss_of, budget, adamw, fixed={"streamed": "blocks", "micro_batches": 1})
    limit(budget)
    torch.manual_seed(0)
    engine = memfit.apply(plan, model, fill=reset, lower_tier=options.folder)
    losses = [engine.step(ids).loss for ids in data]
    assert engine.stream is not None
    return {"losses": losses, "peak_bytes": plan.prediction.peak_bytes, "hiding": str(engine.stream.hiding())}


def apart(command: Sequence[str], options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """A training in processes of its own: what it found, or how it died.

    Args:
        command: of Python, to which the options are given, and `--result` with the file that what it found goes into.
        options, names: those that it gets, where they are set.
    """
    given = [
        word for name in names if (value := getattr(options, name)) is not None for word in (f"--{name}", str(value))
    ]
    with tempfile.TemporaryDirectory() as folder:
        # A file, and not what is printed: into that ranks, gloo and torchrun write at once.
        result = Path(folder, "result.json")
        given += ["--result", str(result)]
        done = subprocess.run(  # noqa: S603 - this very script
            [sys.executable, *command, *given], capture_output=True, text=True, check=False, env={**os.environ, **GIVEN_BACK, "OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
    lines = done.stderr.strip().splitlines()
    errors = [
        line for line in lines if "Error" in line and "ChildFailedError" not in line
    ]  # torchrun says more after them
    return {"died": (errors or lines or [f"signal {-done.returncode}"])[-1].strip()}


def run(options: argparse.Namespace, role: str, *, limited: bool) -> dict[str, Any]:
    """One of the three trainings."""
    command = [__file__, "--role", role, *(["--limited"] if limited else [])]
    return apart(command, options, ("layers", "hidden", "steps", "budget", "folder"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", default="128MiB")
    parser.add_argument(
        "--folder", help="for the file, on a disk with room; the system's folder for temporary files else"
    )
    parser.add_argument("--role", choices=["plain", "memfit"], help=argparse.SUPPRESS)
    parser.add_argument("--limited", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        torch.set_num_threads(1)  # sums in one order
        found = train_plainly(options) if options.role == "plain" else train_streamed(options)
        Path(options.result).write_text(json.dumps(found), encoding="utf-8")
        return 0
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(options.layers, options.hidden).parameters())
    needed, budget = parameters * BYTES_A_PARAMETER, parse_bytes(options.budget)
    print(
        f"{options.layers} layers, {parameters / 1e6:.1f} million parameters: parameters, gradients and optimizer state take {format_bytes(needed)}, "
        f"{needed / budget:.1f} times the {format_bytes(budget)} that are allowed"
    )
    free = run(options, "plain", limited=False)
    print(f"[1] plain, no limit:        {told(free)}")
    limited = run(options, "plain", limited=True)
    print(f"[2] plain, under the limit: {told(limited)}")
    streamed = run(options, "memfit", limited=True)
    print(f"[3] memfit, the same limit: {told(streamed)}")
    if "died" not in streamed:
        print(f"    predicted peak {format_bytes(streamed['peak_bytes'])}; {streamed['hiding']}")
    equal = "losses" in streamed and streamed["losses"] == free.get("losses")
    finite = all(math.isfinite(loss) for loss in free.get("losses", [math.nan]))
    held = equal and finite and "died" in limited
    print("Equal bit for bit, where plain PyTorch dies." if held else "NOT as claimed.")
    return 0 if held else 1


def told(found: dict[str, Any]) -> str:
    """In a few words."""
    return f"died ({found['died']})" if "died" in found else "losses " + " ".join(f"{x:.6f}" for x in found["losses"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
