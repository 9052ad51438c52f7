"""Several short samples in one row, none of which sees another.

As in transformers' DataCollatorWithFlattening, the positions of a row begin again at 0 with each sample, and a row has no attention mask: from the positions
transformers makes one in which a token attends within its own sample alone. That takes two things that are seen to here.

* No cache of keys and values: where one is there, transformers does not look at the positions, and samples see each other without a word. Batches say
  `use_cache=False` to models that have one.
* Two samples at least in every row, of which one may be the padding: where each row of a micro-batch is a single sample, transformers leaves the mask out, and
  the step takes another path with other bytes. So one sample alone leaves the last place of its row free.

Whether a model keeps samples apart is not believed but tried (`check`).
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from memfit import batches as batching
from memfit.batches import IGNORED_LABEL, LossFunction
from memfit.errors import ConfigError
from memfit.train.evaluate import undisturbed
from memfit.train.text import TokenSamples

_TRIED: Final = 16  # tokens of a row in which a model is tried
_CALIBRATED: Final = 0.1  # of what a token changes where it may be seen; what it changes where it may not is rounding


def rows_of(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Which samples share a row: the longest first, each into the fullest row that still has space (best-fit decreasing).

    Args:
        lengths: of the samples, each from 1 to `width`.
        width: tokens in a row.

    Returns:
        The numbers of the samples of each row, in the order of the data.
    """
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # tokens free -> rows that have as many
    spaces: list[int] = []  # the keys, sorted
    for sample in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[sample]
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        else:
            space, row = width, len(rows)
            rows.append([])
        rows[row].append(sample)
        left = space - length
        if left:
            if left not in with_space:
                bisect.insort(spaces, left)
                with_space[left] = []
            with_space[left].append(row)
    return sorted(sorted(row) for row in rows)


class PackedSamples:
    """Rows of samples; see `memfit.train.data.Samples`.

    Args:
        samples: for causal-lm, each shorter than a row.
        width: tokens in a row.
        constants: that each batch has besides (`constants_for`).

    Attributes:
        filled: the share of all places that hold a token of a sample.
    """

    def __init__(self, samples: TokenSamples, width: int, constants: Mapping[str, Any]) -> None:
        self._samples, self._width, self._constants = samples, width, dict(constants)
        self._rows = rows_of(samples.lengths, width)
        self.filled = sum(samples.lengths) / (len(self._rows) * width) if self._rows else 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int], epoch: int) -> dict[str, Any]:  # noqa: ARG002 - nothing is drawn
        """input_ids, position_ids and labels, each of shape (rows, width); the first token of a sample is predicted from nothing, so it has no label."""
        shape = (len(indices), self._width)
        ids = np.full(shape, self._samples.pad, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for place, row in enumerate(indices):
            start = 0
            for sample in self._rows[row]:
                tokens, learnt = self._samples.tokens(sample)
                end = start + len(tokens)
                ids[place, start:end] = tokens
                positions[place, start:end] = np.arange(len(tokens))
                labels[place, start + 1 : end] = (
                    tokens[1:] if learnt is None else np.where(learnt, tokens, IGNORED_LABEL)[1:]
                )
                start = end
            positions[place, start:] = np.arange(self._width - start)  # the padding is a sample of its own
        made = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {**{name: torch.from_numpy(array) for name, array in made.items()}, **self._constants}


def constants_for(model: torch.nn.Module, loss_fn: LossFunction | None) -> dict[str, Any]:
    """What batches of packed samples have besides tensors, for a model.

    Raises:
        ConfigError: its forward takes no positions.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's own method
    taken = inspect.signature(inner.forward).parameters
    if loss_fn is None and "position_ids" not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        raise ConfigError(
            f"data.packing: the forward of {type(inner).__name__} takes no position_ids, by which samples in one row are kept apart: leave data.packing out"
        )
    return {"use_cache": False} if "use_cache" in taken else {}


def check(model: torch.nn.Module, loss_fn: LossFunction | None, batch: Mapping[str, Any], device: torch.device) -> None:
    """Try whether the model keeps samples of one row apart: the loss of one must not change with the tokens of another.

    Args:
        model: with its weights; its modes and all generators are as before.
        loss_fn: as for training.
        batch: of packed samples.
        device: of the model.

    Raises:
        ConfigError: they are not kept apart.
    """
    count = min(_TRIED, batch["input_ids"].shape[1]) // 2 * 2
    half = count // 2
    ids = batch["input_ids"][:1, :count].repeat(2, 1)  # two rows: some kernels keep samples apart in one row alone
    others = ids.clone()
    others[:, :half] = (others[:, :half] + 1) % (int(ids.max()) + 1)
    labels = ids.clone()
    labels[:, : half + 1] = IGNORED_LABEL
    apart = torch.arange(half).repeat(2).expand(2, -1)
    constants = {name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)}

    def loss(tokens: torch.Tensor, positions: torch.Tensor) -> float:
        made = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        made = batching.map_tensors(lambda tensor: tensor.to(device), made)
        return float(batching.loss_without_gradients(model, {**made, **constants}, loss_fn))

    with undisturbed(model):
        changed = abs(loss(ids, apart) - loss(others, apart))
        if not changed:
            return
        # Experts, for one, add up in another order once other tokens are routed with them. What is no more than that is told by what a seen token changes.
        together = torch.arange(count).expand(2, -1)
        seen = abs(loss(ids, together) - loss(others, together))
    if changed > _CALIBRATED * seen:
        raise ConfigError(
            f"data.packing: in {type(model).__name__} samples in one row see each other, for the loss of one changes with the tokens of another "
            f"(by {changed:.2g}): leave data.packing out"
        )
