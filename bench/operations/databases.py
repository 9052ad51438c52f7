"""Programs around one operation or one module each: those that PyTorch tests, on the inputs with which it tests them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from programs.program import Program, seeded
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ROWS: Final = 8
WIDTH: Final = 16
INPUTS: Final = 4  # of each operation or module, of all that PyTorch tests it with
SMALL: Final = 1e-3  # what a layer adds to inputs, so that they stay where the operation is defined

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor among the arguments of a call: the buffer that has it."""

    name: str
    moved: bool


class Moved(nn.Module):
    """The arguments of one call, of which a layer moves those that may be differentiated."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        leaves, self._shape = pytree.tree_flatten(call)
        self._leaves: list[Any] = []
        moved = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kept = _Kept(f"tensor{len(self._leaves)}", leaf.requires_grad and leaf.dtype == torch.float32)
                self.register_buffer(kept.name, leaf.detach().clone())
                moved += leaf.numel() * kept.moved
                self._leaves.append(kept)
            else:
                self._leaves.append(leaf)
        self.layer = nn.Linear(WIDTH, max(1, moved))

    def forward(self, rows: Tensor) -> Call:
        """The call's arguments for these rows."""
        more = SMALL * torch.tanh(self.layer(rows)).mean(0)
        made, at = [], 0
        for leaf in self._leaves:
            if not isinstance(leaf, _Kept):
                made.append(leaf)
                continue
            value = getattr(self, leaf.name)
            if leaf.moved:
                value = value + more[at : at + value.numel()].reshape(value.shape)
                at += value.numel()
            made.append(value)
        args, kwargs = pytree.tree_unflatten(made, self._shape)
        return args, kwargs


class Calls(nn.Module):
    """An operation or modules on some arguments, one call after the other; each reads what the one before has made."""

    def __init__(self, called: Sequence[Callable[..., Any]], calls: Sequence[Call]) -> None:
        super().__init__()
        self.called = nn.ModuleList(one for one in called if isinstance(one, nn.Module))
        self._functions = tuple(one for one in called if not isinstance(one, nn.Module))
        self.arguments = nn.ModuleList(map(Moved, calls))

    def forward(self, rows: Tensor) -> Tensor:
        """A number."""
        total = rows.new_zeros(())
        for call, moved in zip(self._functions or self.called, self.arguments, strict=True):
            args, kwargs = moved(rows + total)
            total = total + _number(call(*args, **kwargs))
        return total


def _number(result: Any) -> Tensor:
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
            dense = leaf if leaf.layout == torch.strided else leaf.to_dense()
            total = total + torch.tanh(torch.view_as_real(dense) if dense.is_complex() else dense).float().mean()
    return total


def programs() -> Iterator[Program]:
    """All of them.

    Raises:
        ModuleNotFoundError: a package that torch's own tests need is not installed.
    """
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    for info in op_db:
        if not info.supports_autograd or torch.float32 not in info.dtypes:
            continue
        name = f"{info.name} ({info.variant_test_name})" if info.variant_test_name else info.name
        yield Program("operation", name, partial(_built, partial(_of_operation, info, info.op)))
        if info.inplace_variant is not None:
            on_a_copy = partial(_in_place, info.inplace_variant)
            yield Program("in place", name, partial(_built, partial(_of_operation, info, on_a_copy)))
    for module in module_db:
        yield Program("module", module.name, partial(_built, partial(_of_module, module)))


def _in_place(function: Callable[..., Any], first: Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(first * 1.0, *args, **kwargs)


def _built(make: Callable[[], Calls]) -> tuple[Any, Any, Any]:
    model = make()
    seeded(1)
    return model.train(), torch.randn(ROWS, WIDTH), _loss_of


def _loss_of(model: nn.Module, rows: Tensor) -> Any:
    return model(rows)


def _of_operation(info: Any, function: Callable[..., Any]) -> Calls:
    found: list[Call] = [
        ((sample.input, *sample.args), sample.kwargs)
        for sample in info.sample_inputs("cpu", torch.float32, requires_grad=True)
    ]
    working = _some([call for call in found if _works([function], call)])
    return Calls([function] * len(working), working)


def _of_module(info: Any) -> Calls:
    found: list[tuple[nn.Module, Call]] = []
    for one in info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True):
        if one.forward_input is not None:
            module = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).train()
            call = (tuple(one.forward_input.args), dict(one.forward_input.kwargs))
            if _works([module], call):
                found.append((module, call))
    working = _some(found)
    return Calls([module for module, _ in working], [call for _, call in working])


def _works(called: Sequence[Callable[..., Any]], call: Call) -> bool:
    """Whether plain PyTorch gives a finite number and its gradient."""
    try:
        loss = Calls(called, [call])(torch.randn(ROWS, WIDTH))
        if loss.requires_grad and bool(loss.isfinite()):
            loss.backward()
            return True
    except Exception:  # noqa: BLE001 - inputs that raise are part of PyTorch's tests
        return False
    return False


def _some(found: Sequence[Any]) -> list[Any]:
    """From the first to the last."""
    if len(found) <= INPUTS:
        return list(found)
    return [found[round(i * (len(found) - 1) / (INPUTS - 1))] for i in range(INPUTS)]
