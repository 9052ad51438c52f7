"""What is remembered of an operation's result is what the fake mode would work out, for every call that the memory answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from memfit import dispatch
from memfit.capture import constants, known_results
from memfit.capture.capture import capture
from memfit.capture.known_results import run_fake
from memfit.capture.source import StepSource
from memfit.errors import CaptureError
from memfit.techniques.choices import Choices
from models import CASES, case
from sweeps import at_night

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
NAMES = {each.name for each in CASES if not each.slow}
QUICK = {"gpt_dropout", "amp_gpt", "bert_eager_bf16", "llama", "resnet", "lstm", "views", "moe_like"}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_results, "_KNOWN", {})


def geometry(tree: Any, inputs: list[Tensor]) -> list[Any]:
    """Of each tensor of a result: all that can be seen of it, and in which argument's storage it lies."""
    if not isinstance(tree, Tensor):
        return [geometry(each, inputs) for each in tree] if isinstance(tree, (list, tuple)) else [tree]
    places = [n for n, t in enumerate(inputs) if dispatch.storage_key(t) == dispatch.storage_key(tree)]
    same = [n for n, t in enumerate(inputs) if t is tree]
    shape = (tuple(tree.shape), tuple(tree.stride()), tree.storage_offset(), tree.untyped_storage().nbytes())
    return [type(tree), tree.dtype, tree.device, tree.layout, tree.requires_grad, *shape, places, same]


class Compared(dispatch.DispatchMode):
    """Runs every operation in both ways; `answered` has those that were known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answered: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in dispatch.tensors_in((args, kwargs)) if dispatch.has_storage(t)]
        if not dispatch.is_operation(func) or not any(isinstance(t, FakeTensor) for t in inputs):
            return func(*args, **kwargs)
        made, known_results._made = known_results._made, self._told(func, known_results._made)
        try:
            result = run_fake(func, args, kwargs)
        finally:
            known_results._made = made
        assert type(result) is type(again := func(*args, **kwargs)), func
        assert geometry(result, inputs) == geometry(again, inputs), func
        return result

    def _told(self, func: Any, made: Callable[..., Any]) -> Callable[..., Any]:
        def told(*given: Any) -> Any:
            self.answered.append(str(func))
            return made(*given)

        return told


def twice(step: Callable[[Tensor], object], *shape: int) -> Compared:
    """Run a function of a fake tensor again, when all its calls are known."""
    with FakeTensorMode(), Compared() as mode:
        x = torch.empty(*shape)
        step(x)
        mode.answered.clear()
        step(x)
    return mode


def test_results_of_one_call_and_of_another_one_are_told_apart() -> None:
    """By all that decides about them: sizes given as floats, ints that are no floats, flags, offsets, dtypes."""
    resized = torch.ops.aten.upsample_nearest2d.vec
    images = twice(lambda x: [resized(x, None, [2.0, 2.0]), resized(x, None, [3.0, 3.0])], 1, 2, 4, 4)
    assert "aten.upsample_nearest2d.default" in images.answered
    numbers = twice(
        lambda x: [x + 1, x + 1.0, x.long() + 1, x.long() + 1.0, x.long() + True, x.sum(0), x.sum(0, keepdim=True)],
        3,
        4,
    )
    assert numbers.answered.count("aten.add.Tensor") == 5
    views = twice(lambda x: [x[1:], x[2:], x[1:].t(), x[1:][1:].unflatten(1, (2, 2)), x.unbind(), x.split(3)], 6, 4)
    assert {"aten.slice.Tensor", "aten.t.default", "aten.unbind.int"} <= set(views.answered)
    written = twice(lambda x: [x.add_(1), x.mul_(2), x.copy_(x + 1), torch.add(x, x, out=torch.empty(4))], 4)
    assert "aten.add_.Tensor" in written.answered
    made = twice(lambda x: [torch.zeros_like(x), x.to(torch.bfloat16), F.layer_norm(x, (4,)), x.max(0), x @ x], 4, 4)
    assert {"aten.native_layer_norm.default", "aten.max.dim"} <= set(made.answered)


def test_a_layer_norms_gradient_is_laid_out_as_its_kernel_does_it() -> None:
    """Torch's fake kernel follows the gradient that it is given: what reads it next then copied it, in predictions alone."""

    def backward(make: Callable[..., Tensor]) -> tuple[Any, ...]:
        gradient = make(2, 48, 64).transpose(1, 2)
        return gradient, make(2, 64, 48), [48], make(2, 64, 1), make(2, 64, 1), make(48), make(48), [True, True, True]

    operation = torch.ops.aten.native_layer_norm_backward.default
    kernels = operation(*backward(torch.randn))
    with FakeTensorMode():
        for _ in range(2):  # worked out, and remembered
            fakes = run_fake(operation, backward(torch.empty), {})
            assert [each.stride() for each in fakes] == [each.stride() for each in kernels]


def test_the_default_dtype_decides_too() -> None:
    with FakeTensorMode(), Compared():
        whole = torch.empty(3, dtype=torch.long)
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                assert (whole / 2).dtype is dtype
            finally:
                torch.set_default_dtype(torch.float32)


def test_what_more_than_shapes_decides_is_asked_each_time() -> None:
    """Numbers by themselves and tensors of no dimension promote types in two ways; a real tensor that is written stays what it is."""
    real, number = torch.ones(4), torch.tensor(2.0)
    with FakeTensorMode(allow_non_fake_inputs=True), Compared() as mode:
        x = torch.empty(4, dtype=torch.long)
        for _ in range(2):
            torch.ops.aten.add(x, number)
            torch.ops.aten.mul_(real, x)
            torch.view_as_real(torch.empty(3, dtype=torch.complex64))
    assert not mode.answered
    assert torch.equal(real, torch.ones(4))


def test_real_tensors_count_by_their_shapes_beside_fake_ones() -> None:
    rows, column, flags = torch.ones(4, 3), torch.ones(4, 1), torch.ones(4, 3, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True), Compared() as mode:
        x = torch.empty(4, 3)
        for other in (rows, column, column.double(), flags, rows.t().contiguous().t()):
            for _ in range(2):
                torch.ops.aten.mul(x, other)
                torch.ops.aten.mul(other, x)
        torch.ops.aten._foreach_add_([x, torch.empty(2)], [rows, torch.ones(2)])
        torch.ops.aten._foreach_add_([x, torch.empty(2)], [rows, torch.ones(2)])
    assert mode.answered == ["aten.mul.Tensor"] * 10 + ["aten._foreach_add_.List"]


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", at_night(sorted(NAMES), NAMES - QUICK))
def test_traces_are_the_same_with_the_memory_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace() -> Any:
        torch.manual_seed(0)
        model, sample, loss_fn = case(name).build()
        source = StepSource(model, sample, loss_fn, lambda p: torch.optim.AdamW(p, lr=1e-3))
        try:
            return capture(source, Choices()).trace
        except CaptureError as error:
            return str(error)

    def asked_each_time(func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    first, again = trace(), trace()
    monkeypatch.setattr(constants, "run_fake", asked_each_time)
    assert first == again == trace()
