"""A model, a sample batch and an optimizer -> a Trace of one training step.

Fake tensors first: nothing is allocated, so a model far larger than memory can be written down. Where they cannot run the model, or where a
small real run shows other operations, the real one is trusted: captured at two small micro-batches and scaled storage by storage (`confirmation`).
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from memfit import batches, dispatch
from memfit.capture.calls import ResultLayouts
from memfit.capture.captured import Captured
from memfit.capture.cuda.kernels import CudaKernels
from memfit.capture.deep_copies import copied_as_parameters
from memfit.capture.index_bounds import indices_checked
from memfit.capture.isolation import (
    batch_kept,
    hidden_kept,
    hidden_parameters,
    lent,
    parameters_kept,
    with_copied_storage,
)
from memfit.capture.known_results import KnownResults
from memfit.capture.process_group import OnFakeTensors, fake_mesh
from memfit.capture.recording import record
from memfit.capture.source import StepSource, model_digest
from memfit.capture.streamed import record_streamed
from memfit.errors import CaptureError, MemfitError
from memfit.sharding.ways import shard
from memfit.step.device import device_of
from memfit.step.generators import forked_generators
from memfit.step.held_tensors import model_tensors
from memfit.techniques.choices import BASELINE, Choices, convert, converting


def capture(
    source: StepSource,
    choices: Choices = BASELINE,
    *,
    device: torch.device | None = None,
    after: Captured | None = None,
    layouts: Mapping[str, ResultLayouts] | None = None,
) -> Captured:
    """Write down one optimizer step on fake tensors.

    Args:
        source: the step; its model may be on the meta device.
        choices: how the step is run; of several micro-batches the largest is captured.
        device: where the step is to run; the model's own device when None (the CPU for a meta model).
        after: an earlier fake capture of this model, split otherwise, whose forward was confirmed.
        layouts: as for `Recorder`.

    Raises:
        CaptureError: fake tensors cannot run this model; carries the cause.
        MemfitError: the model's loss is not a scalar, or depends on nothing trainable.
    """
    target = device or device_of(source.model)
    try:
        with ExitStack() as stack:
            stack.enter_context(_untold())
            mesh = stack.enter_context(fake_mesh(choices.sharding, target.type)) if choices.sharding else None
            source, micro_batches, cuda = stack.enter_context(on_fakes(source, choices, target))
            identity = model_digest(source.model)
            convert(choices, source.model)
            if mesh is not None:
                stack.enter_context(OnFakeTensors())
                sharded = shard(source.model, choices.sharding, mesh.get_group(), mesh, synchronised=False)
                stack.callback(sharded.close)
                captured = record(source, micro_batches, choices, layouts=layouts, sharded=sharded)
                _check_backwards(captured)
            elif choices.streamed:
                captured = _streamed(source, micro_batches, choices, layouts)
            else:
                # Of one sample an expanded parameter (a class token) is not summed: its gradient is a part of a larger storage, which no earlier capture tells.
                alone = batches.size(micro_batches[-1]) == 1
                graded = after.graded if after is not None and not alone else None
                captured = record(source, micro_batches, choices, graded=graded, layouts=layouts)
            # A plan is for the user's model, as it is before it is converted and its blocks' parameters are away.
            notes = (*captured.trace.notes, *(() if cuda is None else (cuda.in_words,)))
            identity = _identity(identity, captured, choices)
            return replace(captured, trace=replace(captured.trace, model=identity, notes=notes))
    except MemfitError:
        raise
    except Exception as error:
        known = _of_an_engine(str(error)) if choices.sharding else None
        if known is not None:
            raise known from error
        raise CaptureError(
            f"fake tensors cannot run this model ({type(error).__name__}: {_first_line(error)}{_line_that_reads(error)})"
        ) from error


@contextmanager
def on_fakes(
    source: StepSource, choices: Choices, target: torch.device
) -> Iterator[tuple[StepSource, list[batches.Batch], CudaKernels | None]]:
    """The model's tensors are fake inside the block, and it and the generators are as before afterwards.

    Args:
        source: the step.
        choices: how it is run.
        target: where.

    Yields:
        The source without tensors on the meta device, its micro-batches, and the kernels of a GPU that is not here.
    """
    # What has no fake kernel torch would run for real, on zeros: on a GPU that takes its memory.
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=target.type != "cuda")
    cuda = CudaKernels(source.cuda) if source.cuda is not None else None
    parts = _bytes_around(source.model)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        where = target if tensor.device.type == "meta" else tensor.device
        with mode:
            made = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=where, requires_grad=False
            )
        if id(tensor) in parts:
            made.untyped_storage().resize_(parts[id(tensor)])
        return made

    # The batch stays real: what a model computes from it alone (masks, positions, lengths, branches on them) is computed, and only
    # what meets a parameter is fake. So models that look at the values of their inputs take the way they take in training.
    sample = batches.map_tensors(lambda t: fake(t) if t.device.type == "meta" else t, source.sample)
    source = replace(source, sample=sample)
    # Split before any mode is on: micro-batches are views of the user's tensors, as in the step.
    micro_batches = source.micro_batches(choices.micro_batches)
    cuda_kernels = nullcontext() if cuda is None else cuda.on()
    with (
        indices_checked(target),  # what is computed from a part of the batch alone runs for real
        torch.autograd.set_detect_anomaly(False),  # it reads gradients, and fake ones have no values
        forked_generators(),
        batch_kept(source.sample),
        hidden_kept(source.model, source.loss_fn),
        lent(source.model, fake, source.loss_fn),
        copied_as_parameters(),
        mode,
        KnownResults(),
        cuda_kernels,
    ):
        yield source, micro_batches, cuda


def _bytes_around(model: torch.nn.Module) -> dict[int, int]:
    """Of the model's tensors that are a part of a larger one (the first rows of a table), in which nothing else of the model lies: its bytes, by identity."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers(), *model_tensors(model)) if dispatch.has_storage(t)}
    tensors = Counter(map(dispatch.storage_key, held.values()))
    return {
        name: tensor.untyped_storage().nbytes()
        for name, tensor in held.items()
        if tensors[dispatch.storage_key(tensor)] == 1 and tensor.untyped_storage().nbytes() > tensor.nbytes
    }


def _of_an_engine(said: str) -> CaptureError | None:
    """What it means that one of torch's engines for several ranks says of a model which it cannot train; None for anything else."""
    if "got mixed torch.Tensor and DTensor" in said:
        return CaptureError(
            "the loss calls a part of the model, or uses a parameter, outside of the model's own forward, where fully_shard gathers nothing: call it in "
            "forward, or train data parallel or with ZeRO 1"
        )
    if "FSDP expects uniform original parameter dtype" in said:
        return CaptureError(
            "parameters that are trained have several types, and fully_shard gathers them together: give them one type, or train data parallel or with ZeRO 1"
        )
    return None


def _check_backwards(captured: Captured) -> None:
    """Raise CaptureError where a gradient that forward takes is differentiated again, under an engine that frees parameters after each backward."""
    trace = captured.trace
    asked = ({event < trace.forward_events for event, _ in save.unpacks} for save in trace.saves)
    if trace.gathered and any(len(when) == 2 for when in asked):
        raise CaptureError(
            "forward takes a gradient that is differentiated again, and fully_shard frees parameters after each backward: train data parallel or with ZeRO 1"
        )


@contextmanager
def _untold() -> Iterator[None]:
    """Torch logs a traceback of its own where a fake kernel fails; what came of it is told by whoever captures."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def capture_real(source: StepSource, choices: Choices = BASELINE) -> Captured:
    """Write down one optimizer step on real tensors; parameters, buffers and generators are left as they were."""
    copied: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) in (torch.Tensor, nn.Parameter) and dispatch.has_storage(tensor):
            # Parameters that share a storage share it again: cuDNN reads all weights of a recurrent layer through the storage of the first.
            return with_copied_storage(tensor.detach(), copied)
        fresh = torch.empty_strided(
            tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=tensor.device
        )
        return fresh.copy_(tensor.detach())

    micro_batches = source.micro_batches(choices.micro_batches)
    identity = model_digest(source.model)
    hidden = hidden_parameters(source.model, source.loss_fn)  # those of the model are lent
    with (
        forked_generators(),
        batch_kept(source.sample),
        parameters_kept(source.model, source.loss_fn) if hidden else nullcontext(),
        lent(source.model, copy, source.loss_fn),
    ):
        convert(choices, source.model)
        captured = record(source, micro_batches, choices, tensors="real")
    return replace(captured, trace=replace(captured.trace, model=_identity(identity, captured, choices)))


def _identity(before: str, captured: Captured, choices: Choices) -> str:
    """The digest of the model, and that of the model after its first forward where that makes buffers; see `model_digest`."""
    after = captured.trace.model
    changed = choices.streamed or converting(choices) or after == before
    return before if changed else f"{before}/{after}"


def _streamed(
    source: StepSource,
    micro_batches: list[batches.Batch],
    choices: Choices,
    layouts: Mapping[str, ResultLayouts] | None,
) -> Captured:
    where = str(device_of(source.model))  # before the blocks' parameters go
    trace, recorder = record_streamed(source, micro_batches, choices, layouts)
    return Captured(replace(trace, device=where), recorder.calls, recorder.overwritten, views_anew=source.views_anew)


def _line_that_reads(error: BaseException) -> str:
    """Where values of a tensor were asked for, outside of torch and memfit."""
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return ""
    theirs = Path(torch.__file__).parent, Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(folder) for folder in theirs)]
    return f", in {Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line}" if own else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
