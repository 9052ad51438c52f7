"""The loss head of a large vocabulary, a few rows at a time: the logits of all tokens at once never exist.

With tens of thousands of classes the logits, their logarithms and their gradient are the three largest tensors of a step. Here the model is run as it is, but
what its head returns is a stand-in for the logits: it knows what they would be made of (`rows`, the hidden states, and the head's weight) and goes through what
models do with logits before the loss (views, shifts by one, casts). Cross entropy of a stand-in takes the rows in chunks: logits, loss, and at once
the gradient with respect to rows and weight, which backward then only scales. Whatever else is done with a stand-in is done with the logits, all of them, as
if it had not been there.

Sources: Hsu et al., "Liger kernel: efficient Triton kernels for LLM training", arXiv:2410.10989 (2024), for the gradient in the same pass;
`torch.nn.functional.linear_cross_entropy` (torch 2.13) is the same in one opaque operation. Ours is made of ordinary operations, which capture sees one by
one, in all versions of torch. Results differ from those of plain PyTorch by the order of additions (below 1e-5 in fp32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memfit.errors import EngineError


@contextmanager
def chunked_head(model: nn.Module, chunks: int) -> Iterator[None]:
    """Inside, what the model's head returns stands in for the logits, and cross entropy of it takes their rows in so many chunks; 1 for neither."""
    if chunks == 1:
        yield
        return
    with _HeadMode(head_weights(model), chunks):
        yield


def head_weights(model: nn.Module) -> list[Tensor]:
    """Weights that may be a head: of the linear layers and embeddings (a head may be tied to one), those with the most classes."""
    found = {
        id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)
    }
    most = max((weight.shape[0] for weight in found.values()), default=0)
    return [weight for weight in found.values() if weight.shape[0] == most]


@dataclass(frozen=True, slots=True)
class Head:
    """How logits are made.

    Attributes:
        weight: (classes, features).
        bias: (classes,), or None.
        chunks: of rows in which cross entropy is taken.
        product: dtype of the matrix product.
        autocast: whether the product is taken under autocast.
        gradient: whether autograd is on for it.
    """

    weight: Tensor
    bias: Tensor | None
    chunks: int
    product: torch.dtype
    autocast: bool
    gradient: bool


class _HeadMode(TorchFunctionMode):
    """Replaces what `linear` with one of these weights returns."""

    def __init__(self, weights: Sequence[Tensor], chunks: int) -> None:
        super().__init__()
        self.weights = {id(weight) for weight in weights}
        self.chunks = chunks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            rows, weight, bias = _arguments(*args, **(kwargs or {}))
            if id(weight) in self.weights and type(rows) is not Logits and rows.dim() > 1:
                device = rows.device.type
                autocast = torch.is_autocast_enabled(device)
                product = torch.get_autocast_dtype(device) if autocast else rows.dtype
                return Logits(
                    rows, Head(weight, bias, self.chunks, product, autocast, torch.is_grad_enabled()), product
                )
        return func(*args, **(kwargs or {}))


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: A002 - torch's name
    return input, weight, bias


class Logits(Tensor):
    """Stands in for the logits of a head, cast to a dtype.

    Args:
        rows: (..., features).
        head: what makes logits of them, (..., classes).
        dtype: of the logits.
    """

    rows: Tensor
    head: Head
    whole: Tensor | None

    def __new__(cls, rows: Tensor, head: Head, dtype: torch.dtype) -> Self:
        """A tensor without storage."""
        learns = head.gradient and any(t is not None and t.requires_grad for t in (rows, head.weight, head.bias))
        self: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - how torch makes a tensor without storage
            cls, (*rows.shape[:-1], head.weight.shape[0]), dtype=dtype, device=rows.device, requires_grad=learns
        )
        self.rows, self.head, self.whole = rows, head, None
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what can be answered without the logits; make them for all else."""
        kwargs = dict(kwargs or {})
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's own way to ask a subclass
                return func(*args, **kwargs)
        known = args[0] if args and type(args[0]) is Logits else None
        # Asked of the logits, which a product makes; the stand-in itself always is one.
        if known is not None and func == _IS_LEAF:
            return not known.requires_grad
        if known is not None and known.whole is None:
            if func is functional.cross_entropy:
                loss = _cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
            elif func in _CARRIED:
                carried = _CARRIED[func](known, *args[1:], **kwargs)
                if carried is not None:
                    return carried
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing gets below autograd as a stand-in."""
        raise EngineError(
            f"{func} was called below autograd on what stands in for the logits of a chunked loss head, where they can no longer be made: "
            'plan with fixed={"loss_chunks": 1}'
        )

    def materialised(self) -> Tensor:
        """The logits, as plain PyTorch has them."""
        if self.whole is None:
            head, device = self.head, self.rows.device.type
            with torch.set_grad_enabled(head.gradient):
                with torch.autocast(device, head.product if head.autocast else None, enabled=head.autocast):
                    found = functional.linear(self.rows, head.weight, head.bias)
                self.whole = found.to(self.dtype)
        return self.whole

    def of(self, rows: Tensor, dtype: torch.dtype | None = None) -> Logits:
        """The logits of other rows, or in another dtype."""
        return Logits(rows, self.head, dtype or self.dtype)


def _made(tree: Any) -> Any:
    """Arguments with logits in place of their stand-ins."""
    if type(tree) is Logits:
        return tree.materialised()
    if type(tree) in {tuple, list}:
        return type(tree)(_made(item) for item in tree)
    if type(tree) is dict:
        return {key: _made(item) for key, item in tree.items()}
    return tree


# -- what models do with logits before the loss: done to the rows --------------------------------------------------------------


def _shaped(known: Logits, *shape: Any, **kwargs: Any) -> Logits | None:
    """A view that leaves the classes alone."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    rest = math.prod(size for size in sizes if size != -1)
    total = math.prod(known.shape)
    sizes = tuple(total // max(rest, 1) if size == -1 else size for size in sizes)
    if sizes[-1] != known.shape[-1] or math.prod(sizes) != total:
        return None
    return known.of(known.rows.reshape(*sizes[:-1], known.rows.shape[-1]))


def _flattened(known: Logits, start_dim: int = 0, end_dim: int = -1) -> Logits | None:
    dims = known.dim()
    start, end = start_dim % dims, end_dim % dims
    return known.of(known.rows.flatten(start, end)) if start <= end < dims - 1 else None


def _indexed(known: Logits, index: Any) -> Logits | None:
    """Slices of all dimensions but the classes; or some rows, by a mask or by number."""
    leading = known.dim() - 1
    if isinstance(index, Tensor):
        by_mask = index.dtype is torch.bool
        return known.of(known.rows[index]) if not by_mask or index.dim() <= leading else None
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or type(part) in {slice, int} for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (known.dim() - len(parts) + 1), *parts[at + 1 :])
    whole = len(parts) <= leading or (len(parts) == leading + 1 and parts[-1] == slice(None))
    rows = known.rows[tuple(parts[:leading])] if whole else None
    return known.of(rows) if rows is not None and rows.dim() > 1 else None


def _cast(known: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    """To a wider dtype, in place: a narrower one would round the logits."""
    given = [*args, *kwargs.values()]
    if any(name not in {"dtype", "device"} for name in kwargs) or len(given) > 2:
        return None
    dtype = known.dtype
    for value in given:
        if isinstance(value, torch.dtype):
            dtype = value
        elif not isinstance(value, str | torch.device) or torch.device(value) != known.device:
            return None
    return known.of(known.rows, dtype) if dtype == known.dtype or dtype in _WIDER.get(known.dtype, ()) else None


def _contiguous(known: Logits) -> Logits:
    return known.of(known.rows)


_WIDER: Final = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
_CARRIED: Final[Mapping[Any, Callable[..., Logits | None]]] = {
    Tensor.view: _shaped,
    Tensor.reshape: _shaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _indexed,
    Tensor.contiguous: _contiguous,
    Tensor.to: _cast,
    Tensor.float: lambda known: _cast(known, torch.float32),
    Tensor.double: lambda known: _cast(known, torch.float64),
}
_ABOUT: Final = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__len__,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested")),
    }
)


_IS_LEAF: Final = Tensor.is_leaf.__get__  # type: ignore[attr-defined]


# -- the loss ------------------------------------------------------------------------------------------------------------------


def _cross_entropy(
    input: Logits,  # noqa: A002 - torch's name
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Cross entropy of a stand-in, as torch's; None for what it takes the logits for: class weights, probabilities, losses row by row, products in fp16.

    In fp16 gradients must be scaled before they are rounded, and here they are made before backward, which brings the scale.
    """
    plain = weight is None and size_average is None and reduce is None and reduction in {"mean", "sum"}
    fits = type(target) is not Logits and input.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not (plain and fits) or input.head.product is torch.float16:
        return None
    narrow = input.dtype in {torch.float16, torch.bfloat16}
    # Under autocast torch takes the loss in fp32.
    exact = torch.float32 if narrow and torch.is_autocast_enabled(input.device.type) else input.dtype
    found: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        input.rows,
        input.head.weight,
        input.head.bias,
        target,
        _LossSettings(
            input.head.chunks,
            ignore_index,
            label_smoothing,
            input.head.product,
            exact,
            mean=reduction == "mean",
            learns=input.requires_grad and torch.is_grad_enabled(),
        ),
    )
    return found


@dataclass(frozen=True, slots=True)
class _LossSettings:
    """How a cross entropy is taken in chunks.

    Attributes:
        chunks: into which the rows are divided.
        ignore_index, smoothing: as torch's `ignore_index` and `label_smoothing`.
        product: dtype of the matrix products.
        exact: dtype of the logarithms and of the loss.
        mean: over the rows that count; else their sum.
        learns: gradients are made.
    """

    chunks: int
    ignore_index: int
    smoothing: float
    product: torch.dtype
    exact: torch.dtype
    mean: bool
    learns: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum or mean over rows of the cross entropy of `linear(rows, weight, bias)`. Forward makes the gradients too; backward scales them, in place, once."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: _LossSettings,
    ) -> Tensor:
        ignore_index, smoothing = settings.ignore_index, settings.smoothing
        product, exact = settings.product, settings.exact
        with torch.autocast(rows.device.type, enabled=False):
            x, w = rows.to(product), weight.to(product)
            b = bias.to(product) if bias is not None else None
            wanted = [settings.learns and wants for wants in ctx.needs_input_grad[:3]]
            d_rows = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
            d_weight = torch.zeros_like(weight) if wanted[1] else None
            d_bias = torch.zeros_like(b) if wanted[2] and b is not None else None
            total = torch.zeros((), dtype=exact, device=rows.device)
            count = (target != ignore_index).sum().to(exact) if settings.mean else None
            # As many chunks for every batch, so that a smaller one runs the same operations.
            bounds = [n * x.shape[0] // settings.chunks for n in range(settings.chunks + 1)]
            for start, stop in pairwise(bounds):
                part, classes = x[start:stop], target[start:stop]
                gone = classes == ignore_index
                logs = torch.log_softmax(functional.linear(part, w, b), -1, dtype=exact)
                lost = functional.nll_loss(logs, classes, reduction="sum", ignore_index=ignore_index)
                if smoothing:
                    spread = logs.sum(-1).masked_fill_(gone, 0.0).sum()
                    lost = (1.0 - smoothing) * lost - smoothing / w.shape[0] * spread
                total += lost
                if not any(wanted):
                    continue
                # The gradient of the sum with respect to the logits: probabilities less what the target asks for.
                d_logits = logs.exp_()
                del logs
                if smoothing:
                    d_logits -= smoothing / w.shape[0]
                d_logits.scatter_(1, classes.masked_fill(gone, 0).unsqueeze(1), smoothing - 1.0, reduce="add")
                if count is not None and product is not exact:
                    d_logits /= (
                        count  # before the rounding, as in plain PyTorch: scaled afterwards it would be rounded twice
                    )
                d_logits = d_logits.to(product)
                # Ignored rows are left out of the products: those are narrow.
                if d_rows is not None:
                    into = d_rows[start:stop]
                    torch.mm(d_logits, w, out=into)
                    into.masked_fill_(gone.unsqueeze(1), 0.0)
                if d_weight is not None:
                    counted = part.masked_fill(gone.unsqueeze(1), 0.0)
                    if d_weight.dtype is product:
                        d_weight.addmm_(d_logits.t(), counted)
                    else:
                        d_weight += torch.mm(d_logits.t(), counted)
                if d_bias is not None:
                    d_bias.addmv_(d_logits.t(), (~gone).to(product))
                del d_logits
            # Not among the saved tensors: a plan could only drop them to make them all again.
            ctx.gradients = (d_rows, d_weight, d_bias)
            ctx.count = count if product is exact else None
        ctx.dtypes = (rows.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return total if count is None else total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise EngineError(
                "backward runs a second time through a chunked loss head, whose gradients are freed the first time: for that, "
                'plan with fixed={"loss_chunks": 1}'
            )
        gradients, ctx.gradients = ctx.gradients, None
        scale = scale if ctx.count is None else scale / ctx.count
        scaled = [
            g.mul_(scale).to(dtype) if g is not None else None for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None)
