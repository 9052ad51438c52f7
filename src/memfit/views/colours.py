"""Which colour means what, in every picture.

The bands are from the palette that people with any of the common colour blindnesses tell apart. Source: Okabe and Ito
2008, "Color Universal Design", https://jfly.uni-koeln.de/color/. Ours leaves out their yellow and black, which are hard
to see on white and beside text, and adds two greys.
"""

from __future__ import annotations

from typing import Final

from memfit.values.trace import Category, Phase

BANDS: Final[dict[str, tuple[str, str]]] = {  # from the bottom of the stack: what stays throughout the step comes first
    Category.PARAMETER: ("parameters", "#0072B2"),
    Category.BUFFER: ("buffers", "#999999"),
    Category.OPTIMIZER_STATE: ("optimizer state", "#56B4E9"),
    Category.GRADIENT: ("gradients", "#E69F00"),
    Category.BATCH: ("batch", "#D55E00"),
    Category.ACTIVATION: ("activations", "#009E73"),
    Category.TEMPORARY: ("temporaries", "#CC79A7"),
    Category.OTHER: ("other", "#C9CDD2"),
}
UNKNOWN_BAND: Final = "#E3E6EA"  # a category that a later version wrote

PHASES: Final[dict[str, tuple[str, str]]] = {  # background, and strip above it
    Phase.FORWARD: ("#F3F7FB", "#B9D3EA"),
    Phase.BACKWARD: ("#FBF6EE", "#EBD3A6"),
    Phase.CLIP: ("#F8F1F6", "#DFC0D4"),
    Phase.OPTIMIZER: ("#F0F7F3", "#B5D9C8"),
}
UNKNOWN_PHASE: Final = ("#F6F7F8", "#D5D9DE")

BUDGET: Final = "#B42318"
PREDICTED: Final = "#0B5FA5"
MEASURED: Final = "#1f2328"
PLAIN: Final = "#57606a"
