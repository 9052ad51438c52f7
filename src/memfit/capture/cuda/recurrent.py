"""cuDNN's recurrent layers: one kernel for all layers and steps, and the reserve that it keeps for backward.

torch has a meta kernel for `_cudnn_rnn`, which counts no reserve, and none for its backward. So the layers are operations of memfit's own here, with the
results of cuDNN's: outputs, last states, and a reserve of bytes. How many is not published; counted is what backward of the published equations needs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

# Values per step, layer, direction and hidden unit that backward reads: the activated gates, the cell and its tanh, the output handed to the next layer.
RESERVED_VALUES: Final = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 5, "lstm": 7}
NAME: Final = "memfit::cudnn_rnn"

torch.library.define(
    NAME,
    "(Tensor input, Tensor[] weights, Tensor[] states, int layers, int directions, int values, float dropout) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
torch.library.define(
    f"{NAME}_backward",
    "(Tensor gradient, Tensor input, Tensor output, Tensor reserve, Tensor[] weights, Tensor[] states) -> (Tensor, Tensor, Tensor)",
)


def reserve_bytes(cells: int, itemsize: int, values: int, dropout: float) -> int:
    """Bytes kept for backward.

    Args:
        cells: steps x samples x hidden units x layers x directions.
        itemsize: bytes of one element.
        values: of `RESERVED_VALUES`.
        dropout: between layers; with it the mask is kept too.
    """
    return cells * (values * itemsize + (1 if dropout else 0))


def _forward(
    input: Tensor,  # noqa: A002 - as the operation names it
    _weights: list[Tensor],
    states: list[Tensor],
    layers: int,
    directions: int,
    values: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = states[0].shape[-1]
    inner = states[-1].shape[-1]
    rows = input.shape[:-1]
    output = input.new_empty((*rows, hidden * directions))
    cells = rows.numel() * inner * layers * directions
    reserve = input.new_empty(reserve_bytes(cells, input.element_size(), values, dropout), dtype=torch.uint8)
    last = [torch.empty_like(state) for state in states]
    return output, last[0], last[1] if len(last) > 1 else input.new_empty(0), reserve


def _backward(
    _gradient: Tensor,
    input: Tensor,  # noqa: A002
    _output: Tensor,
    _reserve: Tensor,
    weights: list[Tensor],
    states: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    flat = input.new_empty(sum(w.numel() for w in weights))
    return torch.empty_like(input), flat, input.new_empty(sum(s.numel() for s in states))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given, weights, states, *_ = inputs
    ctx.save_for_backward(given, output[0], output[3], *weights, *states)
    ctx.counts = len(weights), len(states)
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    given, output, reserve, *rest = ctx.saved_tensors
    weights, states = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
    gradient = next((g for g in gradients[:1] if g is not None), None)
    gradient = torch.zeros_like(output) if gradient is None else gradient
    d_input, flat, d_states = torch.ops.memfit.cudnn_rnn_backward(gradient, given, output, reserve, weights, states)

    def parts(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
        return [p.view(t.shape) for p, t in zip(buffer.split([t.numel() for t in like]), like, strict=True)]

    return d_input, parts(flat, weights), parts(d_states, states), None, None, None, None


torch.library.register_fake(NAME, _forward)
torch.library.register_fake(f"{NAME}_backward", _backward)
torch.library.register_autograd(NAME, _differentiated, setup_context=_keep)


def recurrent(kind: str, arguments: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """The results of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` as cuDNN makes them; None for packed sequences."""
    if len(arguments) != 9 or not isinstance(arguments[2], (list, tuple)):
        return None
    given, states, weights, _, layers, dropout, train, both, batch_first = arguments
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    dropout = float(dropout) if train and layers > 1 else 0.0
    ordered = given.transpose(0, 1) if batch_first else given
    made = torch.ops.memfit.cudnn_rnn(
        ordered, list(weights), states, layers, 2 if both else 1, RESERVED_VALUES[kind], dropout
    )
    output = made[0].transpose(0, 1) if batch_first else made[0]
    return (output, made[1], made[2]) if kind == "lstm" else (output, made[1])
