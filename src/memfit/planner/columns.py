"""Columns of numbers that the replay works on at once: rows of different lengths, and changes at the two ends of a span of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def add_span(changes: Any, first: int, last: int, size: int) -> None:
    """Add `size` to the events from `first` to `last`, in an array whose running sum is meant; later than all events counts as the end."""
    changes[first] += size
    changes[min(last, len(changes) - 2) + 1] -= size


class RaggedRows:
    """Lists of numbers of many rows, one after the other, so that the lists of many rows are gathered at once."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.counts = np.array([len(row) for row in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        self.values = np.array([v for row in rows for v in row], dtype=np.int64)

    def gather(self, rows: Any) -> tuple[Any, Any]:
        """The values of these rows, and for each value the position in `rows` it belongs to."""
        counts = self.counts[rows]
        owners = np.arange(len(rows)).repeat(counts)
        # Where the values of a row begin, less where they begin among those gathered.
        shifts = self.starts[rows] - (counts.cumsum() - counts)
        return self.values[shifts[owners] + np.arange(len(owners))], owners
