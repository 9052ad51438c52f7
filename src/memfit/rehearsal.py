"""One real step under the meter, after which everything is as it was."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from memfit.batches import Batch
from memfit.engine.engine import Engine
from memfit.errors import SnapshotError
from memfit.values.report import Rehearsal, StepRecord


def rehearse(engine: Engine, sample: Batch, loader_batches: int = 1) -> Rehearsal:
    """One metered step (after an unmetered one that makes the optimizer's state); everything is put back from a file on disk.

    Args:
        engine: whose step it is.
        sample: the batch of a step, or one of its batches.
        loader_batches: batches like the sample that a step takes one after the other.
    """
    model, optimizer = engine.model, engine.optimizer
    # Streamed layers lie on the lower tier, which puts them back by itself.
    tensors = [*(engine.stream.resident if engine.stream is not None else model.parameters()), *model.buffers()]
    grads = [p.grad for p in model.parameters()]
    state = torch.default_generator.clone_state()
    cuda_state = torch.cuda.get_rng_state() if engine.device.type == "cuda" else None
    training = [(m, m.training) for m in model.modules()]
    scaling = engine.scaling.state() if engine.scaling is not None else None
    handle, name = tempfile.mkstemp(prefix="memfit-rehearsal-")
    os.close(handle)
    try:
        try:
            torch.save(
                {"tensors": [t.detach() for t in tensors], "optimizer": optimizer.state_dict() if optimizer else None},
                name,
            )
        except (OSError, RuntimeError) as error:
            raise SnapshotError(
                f"the rehearsal keeps a copy of the model in {Path(name).parent} and could not write it ({error}): free some disk space, set TMPDIR, or use "
                "memfit.plan and memfit.apply, which do not rehearse"
            ) from error
        fresh = optimizer is not None and not optimizer.state
        steps, records = engine.steps, list(engine.records)
        schedule, engine.schedule = engine.schedule, None
        try:
            for parameter in model.parameters():
                parameter.grad = None
            with engine.stream.undone() if engine.stream is not None else nullcontext():
                _step_taken(engine, sample, loader_batches)
                record = _step_taken(engine, sample, loader_batches, meter=True)
                reading = engine.reading
        finally:
            saved = torch.load(name, weights_only=False, mmap=True)  # our own file of a moment ago
            with torch.no_grad():
                for tensor, value in zip(tensors, saved["tensors"], strict=True):
                    tensor.copy_(value)
            if optimizer is not None:
                if fresh:
                    optimizer.state.clear()
                else:
                    optimizer.load_state_dict(saved["optimizer"])
            del saved
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            torch.default_generator.set_state(state.get_state())
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state)
            for module, mode in training:
                module.training = mode
            if engine.scaling is not None and scaling is not None:
                engine.scaling.set_state(scaling)
            engine.steps, engine.records, engine.schedule = steps, records, schedule
    finally:
        Path(name).unlink(missing_ok=True)
    curve: list[int] = []
    if reading is not None and reading.changes:
        level, levels = reading.base_bytes, []
        for change in reading.changes:
            level += change
            levels.append(level)
        stride = max(1, len(levels) // 400)
        curve = [max(levels[i : i + stride]) for i in range(0, len(levels), stride)]
    return Rehearsal(
        engine.plan_for(sample).prediction.peak_bytes,
        record.peak_bytes or 0,
        record.seconds,
        1,
        record.departures,
        tuple(curve),
    )


def _step_taken(engine: Engine, sample: Batch, loader_batches: int, *, meter: bool = False) -> StepRecord:
    """A step whose update was taken: the first ones in fp16 are skipped until the scale is low enough, and hold less."""

    def step() -> StepRecord:
        window = [sample] * loader_batches
        return engine.step(sample, meter=meter) if loader_batches == 1 else engine.accumulate(window, meter=meter)

    while (record := step()).skipped:
        pass
    return record
