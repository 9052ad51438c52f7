"""Kernels that write where no operation says so, as Triton's and numpy's do: kept and never run again, or refused, and never other numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit.capture.unseen_writes import UnseenWrites
from memfit.errors import InputError
from memfit.hardware.machine import Link
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planning import planning_of

WIDTH, ROWS = 64, 640


class Doubled(torch.autograd.Function):
    """Twice its input, written by numpy into a tensor that torch made empty."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        made = torch.empty_like(x)
        made.numpy()[...] = x.detach().numpy() * 2
        return made

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + gradient


class DoubledAfter(Doubled):
    """The same, and then an operation of torch's own writes into it as well."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        made = torch.empty_like(x)
        made.numpy()[...] = x.detach().numpy()
        return made.add_(x)


class DoubledInPlace(Doubled):
    """Written over what an operation of torch's own has made."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        made = x + 0.0
        made.numpy()[...] *= 2
        return made


@torch.library.custom_op("memfit_tests::twice_into", mutates_args=("made",))
def twice_into(x: Tensor, made: Tensor) -> None:
    """What the refusal advises: the same as an operation of torch's."""
    made.numpy()[...] = x.detach().numpy() * 2


class DoubledByOperation(Doubled):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        made = x + 0.0
        twice_into(x, made)
        return made


class Network(nn.Module):
    """A wide middle of which all could be dropped, if each operation could run again."""

    def __init__(self, kernel: type[torch.autograd.Function]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = kernel
        self.first, self.middle, self.last = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.kernel.apply(self.first(x))  # type: ignore[no-untyped-call]
        result: Tensor = self.last(self.middle(functional.gelu(h.sin())))
        return result


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def dropping(kernel: type[torch.autograd.Function]) -> memfit.Plan:
    """A plan that drops whatever may be dropped before the last layer."""
    return memfit.recompute(Network(kernel), rows(), squares, small.adamw, keep=["middle"])


def losses_by_hand(kernel: type[torch.autograd.Function]) -> list[float]:
    model, losses = Network(kernel), []
    optimizer = small.adamw(model.parameters())
    for _ in range(3):
        loss = squares(model, rows())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kernel", [Doubled, DoubledAfter, DoubledByOperation])
def test_what_an_unseen_kernel_has_filled_is_kept_and_trains_to_the_bit(kernel: type[torch.autograd.Function]) -> None:
    plan = dropping(kernel)
    engine = memfit.apply(plan, Network(kernel), squares)
    records = [engine.step(rows(), meter=True) for _ in range(3)]

    assert records[-1].recomputations > 0
    assert [record.loss for record in records] == losses_by_hand(kernel)
    assert [record.peak_bytes for record in records[1:]] == [plan.prediction.peak_bytes] * 2


def test_what_such_a_kernel_writes_over_values_is_refused() -> None:
    with pytest.raises(InputError, match=r"something writes into a tensor in forward .*torch.library.custom_op"):
        dropping(DoubledInPlace)


MADE = torch.ops.aten.add.Tensor


def exchanged(x: Tensor, elements: int) -> None:
    x.copy_(torch.cat([x[elements:], x[:elements]]))


@pytest.mark.parametrize(
    "write",
    [lambda x: x[-1:].add_(1.0), lambda x: exchanged(x, 1), lambda x: exchanged(x, len(x) // 2)],
    ids=["one number", "turned", "halves exchanged"],
)
@pytest.mark.parametrize("elements", [2, 10, 1 << 19, (1 << 20) + 3])
def test_any_write_is_seen_in_a_tensor_of_any_size(elements: int, write: Callable[[Tensor], None]) -> None:
    watch, x = UnseenWrites(), torch.arange(elements, dtype=torch.float32)
    watch.made(MADE, x, 0)
    watch.read(x, 0, "")
    write(x)
    with pytest.raises(InputError, match="something writes into a tensor in head where"):
        watch.read(x, 0, "head")


def test_what_backward_has_written_into_may_be_read_by_the_next_forward() -> None:
    watch, x = UnseenWrites(), torch.ones(8)
    watch.made(MADE, x, 0)
    x.mul_(2)
    watch.forget([0])
    watch.read(x, 0, "")


def test_tensors_without_bytes_are_left_alone() -> None:
    watch, x = UnseenWrites(), torch.ones(8, device="meta")
    watch.made(MADE, x, 0)
    watch.read(x, 0, "")


def test_what_is_filled_unseen_is_not_copied_away_before_it_is_whole() -> None:
    plan = memfit.plan(Network(Doubled), rows(), squares, "1GiB", fixed={"micro_batches": 1})
    recipes = Recipes(planning_of(plan).solver(1).trace, Link("disk", 1e9, 1e9, 1e-4, least_bytes=1))
    offloaded = {storage: ways[1] for storage, ways in recipes.reloads_of.items() if storage in recipes.saved}
    script = compile_script(recipes, recomputations_for(recipes, (), offloaded=offloaded))
    engine = memfit.apply(replace(plan, script=script), Network(Doubled), squares, small.adamw)

    assert len(script.swaps) == 4  # what GELU, two layers and the square read; not what the kernel has filled
    assert [engine.step(rows()).loss for _ in range(3)] == losses_by_hand(Doubled)


def test_a_kernel_of_triton_trains_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is installed, its interpreter runs a kernel on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
    kernel = triton_kernel(triton)

    plan = dropping(kernel)
    engine = memfit.apply(plan, Network(kernel), squares)

    assert [engine.step(rows()).loss for _ in range(2)] == losses_by_hand(kernel)[:2]


def triton_kernel(triton: Any) -> type[torch.autograd.Function]:
    tl = triton.language
    globals()["tl"] = tl  # where Triton looks for the names in a kernel

    @triton.jit  # type: ignore[untyped-decorator]
    def twice(source: Any, target: Any, count: Any, block: tl.constexpr) -> None:  # type: ignore[name-defined]
        places = tl.program_id(0) * block + tl.arange(0, block)
        inside = places < count
        tl.store(target + places, tl.load(source + places, mask=inside) * 2, mask=inside)

    class ByTriton(Doubled):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            made = torch.empty_like(x)
            grid: Callable[..., None] = twice[(triton.cdiv(x.numel(), 4096),)]
            grid(x, made, x.numel(), 4096)
            return made

    return ByTriton
