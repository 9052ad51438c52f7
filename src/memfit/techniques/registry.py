"""The list of techniques that a step can be run with, in the order in which they are told. A new technique is one file and one line here.

What has no setting of its own is not in it: the number of micro-batches (`accumulation`), and what a plan does about each saved tensor (`recompute`,
`activation_offload`).
"""

from __future__ import annotations

from typing import Final

from memfit.techniques.autocast import AUTOCAST
from memfit.techniques.bf16_parameters import BF16_PARAMETERS
from memfit.techniques.chunked_loss import CHUNKED_LOSS
from memfit.techniques.eight_bit_state import EIGHT_BIT_STATE
from memfit.techniques.freezing import FREEZING
from memfit.techniques.frozen_weights import FROZEN_WEIGHTS
from memfit.techniques.layer_streaming import LAYER_STREAMING
from memfit.techniques.optimizer_offload import OPTIMIZER_OFFLOAD
from memfit.techniques.sharding import SHARDING
from memfit.techniques.technique import Technique
from memfit.techniques.update_in_backward import UPDATE_IN_BACKWARD

TECHNIQUES: Final[tuple[Technique, ...]] = (
    AUTOCAST,
    BF16_PARAMETERS,
    EIGHT_BIT_STATE,
    OPTIMIZER_OFFLOAD,
    UPDATE_IN_BACKWARD,
    FREEZING,
    FROZEN_WEIGHTS,
    CHUNKED_LOSS,
    LAYER_STREAMING,
    SHARDING,
)

BY_NAME: Final = {technique.name: technique for technique in TECHNIQUES}
# What changes results, or leaves no gradients to look at after a step, is weighed only where the user names it.
ALLOWED: Final = {
    word: (technique.name, setting) for technique in TECHNIQUES for word, setting in technique.allow.items()
}
REPEATABLE: Final = frozenset(name for technique in TECHNIQUES for name in technique.repeatable)
