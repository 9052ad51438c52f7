"""The ways to share a step out among devices, as lines of a table: bytes and seconds of each."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.clusters import ClusterPrediction

RECOMPUTED = {
    "none": "nothing",
    "selective": "blocks but attention and every second product",
    "alternate": "every second block",
    "blocks": "every block",
}


ABOUT = "~ is about: blocks do not add up alike there (ZeRO 1 deals out whole parameters, data parallelism sends them in buckets)."
WIDTH = 94


def table(found: Sequence[ClusterPrediction], budget_bytes: int, columns: int = WIDTH) -> list[str]:
    """Its lines, with a last one about figures that are not exact.

    Args:
        found: steps to compare.
        budget_bytes: of each device.
        columns: of the terminal; where the table is wider, each row is a sentence.
    """
    head = f"{'shared out':<10}  {'recomputed':<45}  {'peak of each':>12}  {'fits':<4}  seconds of a step"
    lines = [] if columns < WIDTH else [head]
    for each in found:
        peak = format_bytes(each.peak_bytes) if each.exact else f"~{format_bytes(each.peak_bytes)}"
        fits = "yes" if each.peak_bytes <= budget_bytes else "no"
        seconds = f"{format_seconds(each.overlapped_seconds)} to {format_seconds(each.step_seconds)}"
        if columns < WIDTH:
            row = f"{each.way}, {RECOMPUTED[each.recompute]} recomputed: {peak}, {'fits' if fits == 'yes' else 'does not fit'}, {seconds}"
            lines += textwrap.wrap(row, columns, subsequent_indent="  ", break_on_hyphens=False)
        else:
            lines.append(f"{each.way:<10}  {RECOMPUTED[each.recompute]:<45}  {peak:>12}  {fits:<4}  {seconds}")
    if not all(each.exact for each in found):
        lines += [
            "",
            *textwrap.wrap(ABOUT, max(columns, 20), break_on_hyphens=False),
        ]
    return lines
