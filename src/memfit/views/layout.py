"""Two arrangements of every picture: for a screen as wide as a desk's, and for a phone.

A picture that is merely scaled down to a phone has letters of five pixels, and one that keeps its size is cut. So each is laid out twice, and the page
shows the one that there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a picture has its plot, in pixels.

    Attributes:
        width: of the picture.
        left, right: of the plot.
        narrow: what the lines and marks mean stands below the plot instead of to its right, and ticks are fewer.
    """

    width: float
    left: float
    right: float
    narrow: bool = False


WIDE: Final = Layout(960, 84, 742)  # to the right of the plot stand the names of the lines
# With the margins of the page and the figure it fills 390 pixels, the width of most phones.
NARROW: Final = Layout(340, 60, 330, narrow=True)
