"""The trace of a deep model made of those of shallow ones is the trace that a capture of it gives."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.deeper import BLOCKS, deeper
from memfit.capture.trace_source import TraceSource
from memfit.clusters import shortened
from memfit.estimating.few_blocks import FewBlocksSource, alike_blocks
from memfit.step.program import default_optimizer
from memfit.techniques.choices import BASELINE, Choices
from memfit.values.trace import Phase, Trace

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]
DEPTH = 17


class Block(nn.Module):
    """A block with a residual, which knows its number; `kind` makes one of them another."""

    def __init__(self, number: int, kind: str = "") -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.norm = nn.LayerNorm(16)
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for layer in self.inner[:2]:
            y = self.drop(torch.relu(layer(y)))
        y = y * self.inner[2](x)
        return x + (y.sin() if self.kind else y)


class Deep(nn.Module):
    """Blocks in a list, between what is there once; `mixed` hands the results of all blocks to the head."""

    def __init__(self, depth: int = DEPTH, other: int | None = None, *, mixed: bool = False) -> None:
        super().__init__()
        self.config: Any = None
        self.mixed = mixed
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(n, "sin" if n == other else "") for n in range(depth))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        found = [x := block(x) for block in self.blocks]
        if self.mixed:
            x = torch.stack(found).mean(0)
        return self.head(x)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the next token, roughly."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


SAMPLE = torch.zeros(4, 6, dtype=torch.long)


def capture(model: nn.Module, choices: Choices, kind: type[TraceSource] = TraceSource) -> Trace:
    """The step on a GPU that is not here."""
    return kind(model, SAMPLE, loss, default_optimizer, None, "rtx4090").trace_of(choices)


def same(found: Trace, captured: Trace) -> None:
    """Everything agrees; of the update's operations, what they take."""
    for each in fields(Trace):
        if each.name != "operations":
            assert getattr(found, each.name) == getattr(captured, each.name), each.name
    once = (Phase.CLIP, Phase.OPTIMIZER)
    for a, b in zip(found.operations, captured.operations, strict=True):
        if a.phase in once:
            assert a.seconds == pytest.approx(b.seconds, rel=1e-9)
            assert replace(a, seconds=b.seconds, key=b.key) == b
        else:
            assert a == b


@pytest.mark.alternate(0)
@pytest.mark.parametrize(
    "choices",
    [BASELINE, BASELINE.but(precision="bf16"), BASELINE.but(frozen=("embedding", "blocks.0*"))],
    ids=["plain", "bf16", "frozen"],
)
def test_it_is_the_trace_of_the_whole_model(choices: Choices) -> None:
    with torch.device("meta"):
        model = Deep()
    same(capture(model, choices, FewBlocksSource), capture(model, choices))


def test_no_whole_model_is_captured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Deep()
    depths: list[int] = []
    before = TraceSource.captured

    def noted(source: TraceSource, choices: Choices) -> Trace:
        depths.append(len(model.blocks))
        return before(source, choices)

    monkeypatch.setattr(TraceSource, "captured", noted)
    capture(model, BASELINE, FewBlocksSource)
    assert depths == list(BLOCKS)


@pytest.mark.alternate(0)
@pytest.mark.parametrize("depth", [DEPTH, 40])
def test_adapters_and_weights_in_four_bits(depth: int) -> None:
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = peft.get_peft_model(
            Deep(depth).to(torch.bfloat16), peft.LoraConfig(r=2, target_modules=["inner.0", "inner.1", "inner.2"])
        ).train()
    choices = Choices(frozen_weights="4bit")
    same(capture(model, choices, FewBlocksSource), capture(model, choices))


def test_blocks_whose_results_are_all_used_at_the_end_are_captured_as_a_whole() -> None:
    with torch.device("meta"):
        model = Deep(mixed=True)
    same(capture(model, BASELINE, FewBlocksSource), capture(model, BASELINE))


@pytest.mark.parametrize("other", [7, DEPTH - 1])
def test_blocks_that_are_not_alike_are_told_apart(other: int) -> None:
    with torch.device("meta"):
        model = Deep(other=other)
    assert not alike_blocks(model)
    same(capture(model, BASELINE, FewBlocksSource), capture(model, BASELINE))


def test_a_list_of_the_configuration_that_tells_blocks_apart_counts() -> None:
    with torch.device("meta"):
        model = Deep()
    assert len(alike_blocks(model)) == DEPTH
    model.config = type("Config", (), {})()
    model.config.layer_types = ["full"] * DEPTH
    assert len(alike_blocks(model)) == DEPTH
    model.config.layer_types[9] = "sliding"
    assert not alike_blocks(model)


def test_traces_that_do_not_grow_alike_tell_nothing() -> None:
    with torch.device("meta"):
        model = Deep(other=5)
    traces = []
    for count in BLOCKS:
        with shortened(model, count, [f"blocks.{n}" for n in range(DEPTH)]):
            traces.append(capture(model, BASELINE))
    assert deeper(traces, DEPTH) is None
