"""Fits the constants of `memfit.hardware.efficiency` to the published figures, and says what they would be without one of the GPUs.

Coordinate descent on the logarithms of the constants. A GPU with many rows counts as the root of their number; an operation timed alone as 0.3 of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from work import Works, operation_seconds, step_seconds

START = {
    "bandwidth": 0.8,
    "product_depth": 256.0,
    "convolution": 0.6,
    "convolution_tf32": 0.4,
    "grouped": 0.3,
    "group_channels": 16.0,
    "overlap": 1.5,
    "power": 0.5,
    **dict.fromkeys(("volta", "data_center_ampere", "ampere", "ada", "hopper"), 2.5),
}
"""Where every fit begins, so that one without a GPU knows nothing of it."""
ROUNDS = 25
OPERATION_WEIGHT = 0.3
FIRST_STEP = 0.2  # of a logarithm
LEAST = {"overlap": 1.0}
MOST = {"power": 1.0, "bandwidth": 1.0, "convolution": 1.0, "convolution_tf32": 1.0, "grouped": 1.0}


def merged(works: Works) -> Works:
    """The same seconds from fewer operations: those of traffic are linear in its bytes, so their mean stands for all."""
    traffic = [(work, number) for work, number, _ in works if not work.flops]
    number = sum(number for _, number in traffic)
    mean = sum(work.moved_bytes * number for work, number in traffic) / max(number, 1)
    return [*(w for w in works if w[0].flops), (replace(traffic[0][0], moved_bytes=mean), number, None)]


def fitted(
    steps: Sequence[tuple[Mapping[str, Any], Works]],
    operations: Sequence[Mapping[str, Any]],
) -> Any:
    """The constants for which the sum of absolute errors, as logarithms, is least.

    Args:
        steps: rows with what their operations do.
        operations: rows of single operations.
    """
    from memfit.hardware.efficiency import FITTED

    rows = Counter(row["device"] for row, _ in steps)
    steps = [(row, merged(works)) for row, works in steps]

    def loss(of: Any) -> float:
        whole = sum(
            abs(math.log(step_seconds(works, row["device"], of) / row["seconds"])) / math.sqrt(rows[row["device"]])
            for row, works in steps
        )
        single = sum(abs(math.log(a / b)) for a, b in (operation_seconds(row, of) for row in operations))
        return float(whole + OPERATION_WEIGHT * single)

    best: Any = replace(FITTED, **START)
    least = loss(best)
    sizes = dict.fromkeys(START, FIRST_STEP)
    for _ in range(ROUNDS):
        for name in START:
            for sign in (1, -1):
                value = getattr(best, name) * math.exp(sign * sizes[name])
                tried = replace(best, **{name: min(MOST.get(name, math.inf), max(LEAST.get(name, 0.0), value))})
                if (found := loss(tried)) < least:
                    best, least = tried, found
                    sizes[name] *= 1.3
                    break
            else:
                sizes[name] /= 2
    return best
