"""One file for each way to say what a plain training step will hold, found by being there.

    NAME, PACKAGE, INSTALL, NOTE    as for the rivals in `rivals`
    COVERS                          what its figure is meant to hold, for the page
    estimate(subject, optimizer)    bytes; raises NotEstimated with the reason where it has no figure

`optimizer` is a key of `rivals.optimizers.OPTIMIZERS`.
"""

from __future__ import annotations


class NotEstimated(Exception):  # noqa: N818 - an answer, not an error
    """An estimator has no figure for this model or optimizer; the message says why."""
