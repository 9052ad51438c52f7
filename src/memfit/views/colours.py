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

SURFACE: Final = "#ffffff"
INK: Final = "#1f2328"
QUIET: Final = "#57606a"  # 6.4 to 1 on white, so that small print stays readable.
GRID: Final = "#e3e6ea"
BUDGET: Final = "#B42318"
PREDICTED: Final = "#0B5FA5"
MEASURED: Final = INK
PLAIN: Final = QUIET
FRONTIER: Final = "#3D5A73"
BOUND: Final = "#8A5A00"
MEASURED_AREA: Final = "#E3E6EA"

# What each colour becomes on a dark screen, where the page is shown on one. Bands keep theirs: they tell themselves apart on either ground, and one
# colour per category is what the words refer to.
DARK: Final[dict[str, str]] = {
    SURFACE: "#161b22",
    INK: "#e6edf3",
    QUIET: "#9aa4af",
    GRID: "#30363d",
    BUDGET: "#ff8f87",
    PREDICTED: "#6cb2ff",
    FRONTIER: "#a9c7de",
    BOUND: "#dfae55",
    MEASURED_AREA: "#2d343d",
    PHASES[Phase.FORWARD][0]: "#18222d",
    PHASES[Phase.FORWARD][1]: "#2f4d6b",
    PHASES[Phase.BACKWARD][0]: "#231f18",
    PHASES[Phase.BACKWARD][1]: "#6b5427",
    PHASES[Phase.CLIP][0]: "#231b21",
    PHASES[Phase.CLIP][1]: "#6b3f59",
    PHASES[Phase.OPTIMIZER][0]: "#18241e",
    PHASES[Phase.OPTIMIZER][1]: "#2c5c45",
    UNKNOWN_PHASE[0]: "#1b1f24",
    UNKNOWN_PHASE[1]: "#3a4149",
}
