"""torch.distributed._tools.MemTracker over two steps, on fake tensors where the model allows it: then nothing is allocated."""

from __future__ import annotations

import torch
from rivals.optimizers import OPTIMIZERS
from rivals.subjects import Subject
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from memfit import batches

NAME = "MemTracker (torch)"
PACKAGE, INSTALL = "torch.distributed._tools.mem_tracker", None
NOTE = "Private to torch, told of model, optimizer and batch; the peak of two steps. It sees what the dispatcher shows, not workspace inside kernels."
COVERS = "the whole step"


def estimate(subject: Subject, optimizer: str) -> int:
    try:
        with FakeTensorMode():
            return _peak(subject, optimizer)
    except DataDependentOutputException:
        return _peak(
            subject, optimizer
        )  # a model that looks at values cannot run on fake tensors; the tracker takes real ones too


def _peak(subject: Subject, optimizer: str) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    model, sample, loss_fn = subject.build()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, chosen, *batches.leaves(sample))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()  # of single modules; without it a second step is refused
            batches.loss_of(model, sample, loss_fn).backward()
            chosen.step()
            chosen.zero_grad()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
