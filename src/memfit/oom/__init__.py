"""What a program that ran out of memory has left, explained: the message it ended with, or a snapshot of CUDA's allocator.

Torch-free; nothing in a file is ever executed.
"""

from memfit.oom.explain import budget, explain, facts
from memfit.oom.failure import Failure, Holder
from memfit.oom.read import read

__all__ = ["Failure", "Holder", "budget", "explain", "facts", "read"]
