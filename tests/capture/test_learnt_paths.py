"""What is known of a step after a look at another path of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memfit.capture.capture import capture
from memfit.capture.learnt_paths import same_sizes, with_seen, writes_for_good
from memfit.capture.source import StepSource
from memfit.dispatch import is_rerunnable
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Moved(nn.Module):
    """On one path it moves a buffer, on the other it does not; it may move a parameter, too."""

    mean: Tensor

    def __init__(self, *, moves: bool, parameter: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.moves, self.parameter = moves, parameter

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to the same shape."""
        y: Tensor = self.layer(x)
        if self.moves:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        if self.parameter:
            self.layer.bias.data.mul_(0.5)
        return y - self.mean


def trace_of(model: nn.Module) -> Trace:
    source = StepSource(model, torch.randn(4, 8), lambda m, x: m(x).square().mean())
    return capture(source, BASELINE).trace


def test_copies_of_buffers_that_one_path_writes_are_there_on_all() -> None:
    still, moving = trace_of(Moved(moves=False)), trace_of(Moved(moves=True))
    joined = with_seen(still, moving)
    assert len(joined.paths) == 1
    for path in (joined, *joined.paths):
        assert path.changed_buffers == ("mean",)
        assert path.changed_buffer_bytes == moving.changed_buffer_bytes > still.changed_buffer_bytes
    assert sum(same_sizes(path, still) for path in (joined, *joined.paths)) == 0
    assert sum(same_sizes(path, moving) for path in (joined, *joined.paths)) == 1


def test_a_capture_that_shows_nothing_new_changes_nothing() -> None:
    known = trace_of(Moved(moves=True))
    assert with_seen(known, trace_of(Moved(moves=True))) is known


@pytest.mark.parametrize("parameter", [True, False])
def test_a_forward_that_writes_into_a_parameter_cannot_be_undone(*, parameter: bool) -> None:
    assert writes_for_good(trace_of(Moved(moves=True, parameter=parameter))) is parameter


def test_what_reads_a_sparse_tensor_is_not_run_again() -> None:
    sparse = torch.eye(3).to_sparse()
    assert not is_rerunnable(torch.ops.aten._values.default, (sparse,), {})
    assert is_rerunnable(torch.ops.aten.sin.default, (torch.eye(3),), {})
