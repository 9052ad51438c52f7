"""cuDNN's recurrent layers: the same numbers as plain PyTorch, the predicted peak, and a plan that is made before anything has run."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import measuring
import torch
from gpu.cases import generators, on_the_host, put
from gpu.setting import Setting, adamw
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import memfit

SHARES = (1.0, 0.5, 0.0)  # of the way from the smallest budget to plain


@dataclass(frozen=True)
class Layers:
    """Recurrent layers in a row, each of one kernel.

    Attributes:
        name: for the row.
        kind: "LSTM", "GRU" or "RNN".
        dropout: between the two layers in each.
        both: directions.
        packed: whether sequences of unequal lengths are packed.
    """

    name: str
    kind: str
    dropout: float = 0.0
    both: bool = False
    packed: bool = False


CASES = (
    Layers("LSTM with dropout", "LSTM", dropout=0.3),
    Layers("LSTM", "LSTM"),
    Layers("GRU, two directions", "GRU", both=True),
    Layers("RNN", "RNN"),
    Layers("packed LSTM", "LSTM", packed=True),
)


class Tagger(nn.Module):
    """Words by recurrent layers with a linear one behind each, so that there is something to run again."""

    def __init__(self, layers: Layers, words: int, width: int, count: int = 4) -> None:
        super().__init__()
        self.packed = layers.packed
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            getattr(nn, layers.kind)(
                width, width, 2, dropout=layers.dropout, bidirectional=layers.both, batch_first=True
            )
            for _ in range(count)
        )
        self.between = nn.ModuleList(nn.Linear(width * (2 if layers.both else 1), width) for _ in range(count))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer, linear in zip(self.layers, self.between, strict=True):
            if self.packed:
                given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                made = pad_packed_sequence(layer(given)[0], batch_first=True, total_length=ids.shape[1])[0]
            else:
                made = layer(x)[0]
            x = x + torch.tanh(linear(made))
        out: torch.Tensor = self.head(x)
        return out


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(*batch).flatten(0, 1), batch[0].flatten())


class DropoutState(TorchDispatchMode):
    """Finds the buffer from which cuDNN's dropout draws: what no seed sets."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default and args[-1] is not None:
            self.buffer = args[-1]
        return func(*args, **(kwargs or {}))


def recurrent(setting: Setting) -> Iterator[dict[str, Any]]:
    """Four layers of each kind, planned for before they have run; peaks at three budgets, and loss and gradients bit by bit from the same state of dropout."""
    for case in CASES:
        setting.fresh()
        try:
            yield from _rows(setting, case)
        except Exception as error:  # noqa: BLE001 - a case that fails is a finding
            yield {
                "case": case.name,
                "failed": f"{type(error).__name__}: {error}"[:500],
                "at": traceback.format_exc()[-2500:],
            }


def _rows(setting: Setting, case: Layers) -> Iterator[dict[str, Any]]:
    measuring.with_tests_models()
    from models.outcome import outcome_of, plans_between

    words, width, batch, tokens = (50, 16, 4, 8) if setting.tiny else (2000, 512, 64, 128)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = Tagger(case, words, width).train()
        ids = torch.randint(0, words, (batch, tokens))
    sample = (ids, torch.randint(1, tokens + 1, (batch,)))
    before = generators(setting)
    plans = plans_between(model, sample, _loss, adamw, SHARES, streamed="")
    kept = all(torch.equal(a, b) for a, b in zip(before, generators(setting), strict=True))
    values = on_the_host(model)
    peaks = [_peak(setting, made, model, sample, values) for made in plans]  # while nothing else is there
    state = DropoutState()
    with state, torch.no_grad():
        model(*sample)
    begun = None if state.buffer is None else state.buffer.clone()
    run = partial(outcome_of, model, sample, _loss)

    def from_the_same_state(*engine: Any) -> Any:
        if begun is not None and state.buffer is not None:
            state.buffer.copy_(begun)
        return run(*engine)

    run()
    reference = from_the_same_state()
    repeats = reference.differs(from_the_same_state())
    seeded_alone = run().differs(run())
    for share, made, peak in zip(SHARES, plans, peaks, strict=True):
        found = from_the_same_state(memfit.apply(made, model, _loss))
        yield {
            "case": case.name,
            "share": share,
            "plain_repeats": repeats is None,
            "seeds_suffice": seeded_alone is None,
            "equal": reference.differs(found) is None,
            "differs": reference.differs(found),
            "divergence": found.divergence,
            "recomputations": found.recomputations,
            "generators_kept": kept,
            "captured_on": made.source,
            "notes": list(made.notes),
            **peak,
        }


def _peak(
    setting: Setting, made: memfit.Plan, model: nn.Module, sample: Any, values: list[torch.Tensor]
) -> dict[str, Any]:
    """Of the second step; then the parameters have these values again."""
    setting.fresh()
    engine = memfit.apply(made, model, _loss)
    first, second = engine.step(sample), engine.step(sample, meter=True)
    put(model, values)
    predicted, peak = made.prediction.peak_bytes, second.peak_bytes or 0
    return {
        "predicted_bytes": predicted,
        "allocated_bytes": peak,
        "error": predicted / (peak or 1) - 1,
        "divergences": [*first.divergences, *second.divergences],
    }
