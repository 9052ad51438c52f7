"""Whether a batch can be split into micro-batches: on a few real samples, its gradient is compared with the weighted sum of the micro-batches' gradients.

Layers that see the whole batch (batch norm) and losses that compare samples (contrastive) do not split; a mean over unmasked tokens splits by token counts,
not by samples. None of this is guessed from names of layers: the gradients decide.

They are compared at parameters a little off the model's own. Where a model starts, what mixes samples may be zero still: a student that is its teacher, the
divergence from a reference model by which KTO moves its loss.

Where rounding hides the answer (an ill-conditioned program that splits, a batch norm of little effect, 16-bit operations), the comparison is repeated in
float64: there, what splits agrees far more closely, and what does not differs as before. That costs more, so it is done only in doubt, and not for large
models, which are not copied.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.index_bounds import indices_checked
from memfit.capture.isolation import batch_kept, lent, parameters_kept
from memfit.capture.samples import rows_of, shortened
from memfit.dispatch import DispatchMode
from memfit.step.device import device_of
from memfit.step.generators import forked_generators

SAMPLES: Final = 4
# Above this many parameters a comparison takes seconds, and a copy in float64 gigabytes.
SAMPLES_OF_LARGE_MODELS: Final = 2
# So many times as many are looked at where the gradient of the first ones is zero (a dead ReLU).
MORE_SAMPLES: Final = (1, 8, 64)
LARGE_MODEL_PARAMETERS: Final = 50_000_000
# How far parameters are off, those of so many elements: a share of each element, and so much where one is zero.
OFF: Final = 0.01
PARAMETERS_OFF: Final = 1_000_000
# Differences of gradients, relative to the gradient's norm.
# Rounding and no more: in fp32 most models show 1e-7 to 1e-6; in float64 all that split show far less.
TOLERANCE: Final = 3e-6
DOUBTFUL: Final = 0.1  # below this it may be rounding (ill-conditioned in fp32, 16-bit operations): float64 decides
# Where float64 cannot decide:
FP32_TOLERANCE: Final = 1e-5  # what accumulation promises in fp32
LOW_PRECISION_TOLERANCE: Final = 3e-2  # where 16-bit operations run; wrong weights are off by tenths

_WIDER: Final = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True, slots=True)
class Splitting:
    """What the comparison found.

    Attributes:
        weights: how the micro-batches' losses are weighted, one of `batches.weightings`; None when the batch does not split.
        error: relative difference of the gradients with these weights, or with the best ones tried; in float64 where that decided.
        reason: why the batch does not split.
    """

    weights: str | None
    error: float
    reason: str = ""


class _Deterministic(DispatchMode):
    """Makes random operations deterministic, so that gradients can be compared; notes whether 16-bit operations run.

    Attributes:
        low_precision: 16-bit operations ran.
        moved: names of the parameters that are not trained and that forward wrote.
        cleared: forward or loss changed the gradients that were there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.low_precision = False
        self.moved: dict[str, None] = {}
        self.cleared = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name == "aten::native_dropout":
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            for index, argument in enumerate(func._schema.arguments):
                if argument.name == "dropout_p":
                    args = (*args[:index], 0.0, *args[index + 1 :]) if index < len(args) else args
                    kwargs.pop("dropout_p", None)
            if name.endswith("_") and args:
                return args[0].fill_(0.5)
            if "scaled_dot_product" not in name and "rnn" not in name:
                result = func(*args, **kwargs)
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    return torch.full_like(result, 0.5)
                return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.low_precision = True
        return result


class _InFloat64(DispatchMode):
    """Runs every operation in float64, whatever the program asks for: casts, constants, autocast, tensors a loss function closes over.

    Parameters, buffers and inputs have to be float64 already, so that autograd expects gradients of that dtype. Casts become no-ops that copy nothing;
    where the program then writes in place, autograd may refuse, and float64 cannot decide.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if func is torch.ops.aten.view.dtype:
            raise NotImplementedError("the bits of a float64 are not those of the dtype that the program views")
        by_name = {a.name: a for a in schema.arguments}
        # An argument that is written or that the result is a view of has to stay the same tensor.
        args = [v if a.alias_info else _widened(v) for v, a in zip(args, schema.arguments, strict=False)]
        kwargs = {n: v if by_name[n].alias_info else _widened(v) for n, v in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        return result if any(r.alias_info for r in schema.returns) else _widened(result)


def _widened(value: Any) -> Any:
    """The same in float64: tensors, dtypes, lists and tuples of them."""
    if isinstance(value, torch.Tensor):
        return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return type(value)(_widened(v) for v in value) if type(value) in (list, tuple) else value


def find_splitting(model: nn.Module, sample: Batch, loss_fn: LossFunction | None) -> Splitting:
    """Whether the gradients of micro-batches add up to the gradient of the batch, and with which weights.

    The model's parameters, buffers and gradients and the random generators are left as they were.
    """
    total = batches.size(sample)
    found = _found(model, _beside_others(sample) if total == 1 else sample, loss_fn)
    counted = next(name for name, tensor in batches.named_leaves(sample).items() if tensor.dim() > 0)
    container, _, place = counted.rpartition(".")
    if found.weights is None and container and place.isdigit():
        where = f"samples are counted along the first dimension of {counted!r} ({total} of them), and a list with a tensor for each sample is not divided"
        return replace(found, reason=f"{found.reason}; {where}")
    return found


def _beside_others(sample: Batch) -> Batch:
    """A single sample, as a rank may have it, and others: a batch norm does not tell two alike from one. There are not as many as some constant has rows."""
    lengths = {tensor.shape[0] for tensor in batches.leaves(sample) if tensor.dim() > 0}
    count = next(number for number in itertools.count(2) if number not in lengths)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not batches.counts_samples(tensor, count):
            return tensor
        first, others = tensor[:1], tensor[1:]
        if tensor.is_floating_point():
            return torch.cat([first, others / 2])
        return torch.cat([first, others.roll(1, 1)]) if tensor.dim() > 1 else tensor

    return batches.map_tensors(changed, batches.repeated(sample, count))


def _found(model: nn.Module, sample: Batch, loss_fn: LossFunction | None) -> Splitting:
    short = shortened(sample) if _is_large(model) else None
    if short is not None:
        with suppress(Exception):  # a model that takes one length only gets its samples at full length
            return _compare(model, short, loss_fn)
    try:
        return _compare(model, sample, loss_fn)
    except Exception as error:  # noqa: BLE001 - the step itself has run before, so it is fewer samples that the model does not take
        return _failed(error)


def _failed(error: Exception) -> Splitting:
    why = f"{type(error).__name__}: {error}"
    return Splitting(None, float("inf"), f"a part of the batch cannot be run alone ({why})")


def _is_large(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) >= LARGE_MODEL_PARAMETERS


def _compare(model: nn.Module, sample: Batch, loss_fn: LossFunction | None) -> Splitting:
    """On a few samples; on more, where their gradient is zero. What splits is looked at the other way off, too: what mixes samples may be cut off at zero."""
    first, total = SAMPLES_OF_LARGE_MODELS if _is_large(model) else SAMPLES, batches.size(sample)
    for count in (min(times * first, total) for times in MORE_SAMPLES):
        found = _compare_on(count, model, sample, loss_fn, OFF)
        if found is not None and found.weights is not None:
            other = _compare_on(count, model, sample, loss_fn, -OFF)
            return other if other is not None and other.weights is None and math.isfinite(other.error) else found
        if found is not None:
            return found
        if count == total:
            break
    return Splitting(None, float("nan"), f"the gradient of {count} samples is 0.0, so nothing can be compared")


def _compare_on(
    count: int, model: nn.Module, sample: Batch, loss_fn: LossFunction | None, off: float
) -> Splitting | None:
    """On the first samples; None where their gradient is zero."""
    unmasked = rows_of(sample, count)
    few = _with_masked_labels(unmasked)
    mode = _Deterministic()
    with forked_generators(), indices_checked(device_of(model)), warnings.catch_warnings():
        # Of one sample there is no standard deviation, which no step of the user's asks for.
        warnings.simplefilter("ignore")
        few, off, whole = _first_that_runs(model, [few, unmasked], loss_fn, mode, off)
        if mode.moved:
            # A momentum encoder starts as a copy of what it follows, so that its first moves change nothing that a comparison could see.
            which = ", ".join(list(mode.moved)[:3]) + (", ..." if len(mode.moved) > 3 else "")
            return Splitting(
                None,
                float("inf"),
                f"forward itself writes {len(mode.moved)} parameters that are not trained ({which}), and with micro-batches would do so several times a step",
            )
        if mode.cleared:
            return Splitting(
                None,
                float("inf"),
                "forward or loss itself changes gradients of parameters (zero_grad, or a backward of its own), and with micro-batches would change those of "
                "earlier ones: torch.autograd.grad takes gradients and leaves parameters alone",
            )
        # Of the few samples something may have their number by chance, such as class weights.
        whole_leaves = batches.undivided(batches.signature(sample))
        micro_batches = batches.split(few, [count - 1, 1], whole_leaves)
        try:
            of_each = _gradients(model, micro_batches, loss_fn, mode, off)
        except Exception as error:  # noqa: BLE001 - e.g. batch norm over one value
            return _failed(error)
        norm = _norm_of(whole)
        if norm == 0:
            return None
        if not math.isfinite(norm):
            return Splitting(None, float("nan"), f"the gradient of a few samples is {norm}, so nothing can be compared")
        differences = _differences(few, micro_batches, whole, of_each)
        del whole, of_each
        tolerance = TOLERANCE
        if TOLERANCE <= min(differences.values()) < DOUBTFUL:
            exact = None if _is_large(model) else _differences_in_float64(model, few, micro_batches, loss_fn, off)
            if exact is not None:
                differences = exact
            else:
                tolerance = LOW_PRECISION_TOLERANCE if mode.low_precision else FP32_TOLERANCE
        masked = any(one is not other for one, other in zip(batches.leaves(few), batches.leaves(unmasked), strict=True))
        only_masked = (
            masked
            and min(differences.values()) >= tolerance
            and _adds_up(model, unmasked, whole_leaves, loss_fn, mode, off)
        )
    for weighting, difference in differences.items():
        if difference < tolerance:
            return Splitting(weighting, difference)
    best = min(differences.values())
    if math.isnan(best):
        why = "gradients of a few samples are not finite: the loss takes a standard deviation over the batch, say, which one sample has none of"
        return Splitting(None, best, why)
    if only_masked:
        why = (
            f"where labels are masked ({batches.IGNORED_LABEL}), gradients of micro-batches do not add up to the batch's: one term of the loss is averaged "
            "over labels that are not masked, and another one over samples, so no weight of a micro-batch is right for both"
        )
        return Splitting(None, best, why)
    return Splitting(
        None,
        best,
        f"gradients of micro-batches do not add up to the batch's (relative difference {best:.2g} with the best weights): "
        "a layer or the loss mixes the samples of a batch, as batch norm, mixup and contrastive losses do, the loss averages over labels and leaves some out "
        f"by another number than {batches.IGNORED_LABEL} (ignore_index=0), or forward writes what the next forward reads",
    )


def _first_that_runs(
    model: nn.Module, samples: Sequence[Batch], loss_fn: LossFunction | None, mode: _Deterministic, off: float
) -> tuple[Batch, float, list[torch.Tensor]]:
    """The first of these samples that the model takes (masked labels it may not), how far its parameters are off there, or may not be, and its gradients."""
    *others, last = [(sample, far) for far in (off, 0.0) for sample in samples]
    for sample, far in others:
        with suppress(Exception):
            (whole,) = _gradients(model, [sample], loss_fn, mode, far)
            if math.isfinite(_norm_of(whole)):
                return sample, far, whole
    (whole,) = _gradients(model, [last[0]], loss_fn, mode)
    return *last, whole


def _adds_up(
    model: nn.Module,
    few: Batch,
    whole_leaves: frozenset[str],
    loss_fn: LossFunction | None,
    mode: _Deterministic,
    off: float,
) -> bool:
    """Whether the gradients of these samples are those of all but one and of the last, weighted in some way."""
    micro_batches = batches.split(few, [batches.size(few) - 1, 1], whole_leaves)
    (whole,) = _gradients(model, [few], loss_fn, mode, off)
    of_each = _gradients(model, micro_batches, loss_fn, mode, off)
    return min(_differences(few, micro_batches, whole, of_each).values()) < FP32_TOLERANCE


def _gradients(
    model: nn.Module,
    micro_batches: list[Batch],
    loss_fn: LossFunction | None,
    mode: _Deterministic,
    off: float = 0.0,
    *,
    in_float64: bool = False,
) -> list[list[torch.Tensor]]:
    """Of each micro-batch, gradients of the parameters that are compared, always the same ones in the same order; with these so far off.

    They run one after the other, as in training: a later one sees what an earlier one has written (a momentum encoder, a codebook, a queue of keys), and
    where that matters its gradient differs.
    """

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()

    def float64_copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True)

    widening = _InFloat64() if in_float64 else nullcontext()  # type: ignore[no-untyped-call]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with parameters_kept(model, loss_fn) as written:
        _put_off(model, off)
        with lent(model, float64_copy if in_float64 else own, loss_fn), mode, widening:
            compared = _smallest([p for p in model.parameters() if p.requires_grad], LARGE_MODEL_PARAMETERS)
            gradients = []
            for micro_batch in micro_batches:
                given = batches.map_tensors(float64_copy, micro_batch) if in_float64 else micro_batch
                with batch_kept(given):
                    with _gradients_there(compared, mode):
                        loss = batches.loss_of(model, given, loss_fn)
                    found = _gradients_of(loss, compared, model)
                    del loss
                gradients.append([_dense(p, g) for p, g in zip(compared, found, strict=True)])
                del found
            mode.moved.update(dict.fromkeys(name for name in written() if name not in trained))
            return gradients


def _put_off(model: nn.Module, off: float) -> None:
    """Move the smallest parameters by a share of each element, drawn the same way each time; inside `parameters_kept`, which puts them back."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in _smallest([p for p in model.parameters() if p.requires_grad], PARAMETERS_OFF) if off else []:
            drawn = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter)
            parameter.add_(drawn * torch.where(parameter == 0, 1, parameter.abs()), alpha=off)


@contextmanager
def _gradients_there(parameters: Sequence[nn.Parameter], mode: _Deterministic) -> Iterator[None]:
    """Inside, parameters have gradients, as those of earlier micro-batches would be; noted is whether they are touched, as by a loss that clears them."""
    given = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    versions = [gradient._version for gradient in given]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient
    try:
        yield
        mode.cleared |= any(
            parameter.grad is not gradient or gradient._version != version
            for parameter, gradient, version in zip(parameters, given, versions, strict=True)
        )
    finally:
        for parameter in parameters:
            parameter.grad = None


def _gradients_of(
    loss: torch.Tensor, compared: Sequence[nn.Parameter], model: nn.Module
) -> Sequence[torch.Tensor | None]:
    """Of these parameters of the model, of which none has one before or afterwards."""
    # Checkpoints of that kind run a backward of their own, in which gradients are only added to parameters.
    reentrant = any(node.name() == "CheckpointFunctionBackward" for node in _nodes(loss))
    # Nothing that updates parameters as their gradients come may be set off.
    if not reentrant or any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()):
        return torch.autograd.grad(loss, compared, allow_unused=True)
    loss.backward()
    found = [parameter.grad for parameter in compared]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """All nodes of a graph of autograd."""
    seen = {loss.grad_fn}
    to_come = [loss.grad_fn] if loss.grad_fn is not None else []
    while to_come:
        node = to_come.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                to_come.append(following)


def _dense(parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _differences_in_float64(
    model: nn.Module, few: Batch, micro_batches: list[Batch], loss_fn: LossFunction | None, off: float
) -> dict[str, float] | None:
    """The same without fp32's rounding; None where the program does not run in float64, or its gradient is not finite there."""
    mode = _Deterministic()
    try:
        (whole,) = _gradients(model, [few], loss_fn, mode, off, in_float64=True)
        differences = _differences(
            few, micro_batches, whole, _gradients(model, micro_batches, loss_fn, mode, off, in_float64=True)
        )
    except Exception:  # noqa: BLE001 - kernels for one dtype only, tensors that the dispatcher does not see
        return None
    return differences if all(math.isfinite(d) for d in differences.values()) else None


def _differences(
    few: Batch, micro_batches: list[Batch], whole: list[torch.Tensor], of_each: list[list[torch.Tensor]]
) -> dict[str, float]:
    """Relative difference of the batch's gradient and the sum of the micro-batches' gradients, by weighting."""
    norm = _norm_of(whole)
    differences: dict[str, float] = {}
    for weighting in batches.weightings(few):
        shares = batches.shares(micro_batches, weighting)
        if shares is None:
            continue
        squared = 0.0
        for index, g in enumerate(whole):
            dtype = torch.promote_types(g.dtype, torch.float32)
            added = sum(share * gradients[index].to(dtype) for share, gradients in zip(shares, of_each, strict=True))
            squared += _norm(g.to(dtype) - added) ** 2
        differences[weighting] = squared**0.5 / norm if norm else float("inf")
    return differences


def _smallest(trainable: list[nn.Parameter], elements: int) -> list[nn.Parameter]:
    """All parameters, or of a model with more elements the smallest ones, which every layer has (norms, biases).

    A layer that sees the whole batch changes the gradients of all layers before it, so their large matrices are not needed to notice.
    """
    chosen: list[nn.Parameter] = []
    total = 0
    for parameter in sorted(trainable, key=lambda p: p.numel()):
        total += parameter.numel()
        if total > elements and chosen:
            break
        chosen.append(parameter)
    return chosen


def _norm_of(gradients: Sequence[torch.Tensor]) -> float:
    return float(sum(_norm(g) ** 2 for g in gradients) ** 0.5)


def _norm(tensor: torch.Tensor) -> float:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return float(torch.linalg.vector_norm(real, dtype=torch.float64 if real.numel() < 1 << 20 else None))


_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def _with_masked_labels(batch: Batch) -> Batch:
    """The batch with half of the labels of one sample masked, the first ones, so that token counts differ between samples.

    Of the first labels of all samples the last one alone counts. Where none did (prompts are masked), a loss that shifts its labels would look like one that
    does not, whose micro-batches count for other shares once a first label counts.

    A tensor is taken for labels if it has integers and a second dimension and is not an input: not one of the usual names, and not the first tensor, unless
    that is called a label. Where this is wrong, the model fails on the masked values, and the samples are compared as they are.
    """
    first = next(iter(batches.named_leaves(batch)))

    def masked(path: Any, value: Any) -> Any:
        name = batches.leaf_name(path)
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.int64
            and value.dim() > 1
            and value.shape[1] > 3
            and (name != first or "label" in name)
            and name not in _INPUTS
        ):
            changed = value.clone()
            counting = value != batches.IGNORED_LABEL
            others = counting[:, 1:].flatten(1).any(1)
            others[-1] = False
            changed[others, 0] = batches.IGNORED_LABEL
            if counting.any() and not counting[-1, 0].any():
                changed[-1, 0] = value[counting][0]
            places = (changed[0] != batches.IGNORED_LABEL).reshape(value.shape[1], -1).any(1).nonzero().flatten()
            changed[0, places[: len(places) // 2]] = batches.IGNORED_LABEL
            return changed
        return value

    return batches.map_leaves(masked, batch)
