"""Habits of models and losses that break naive recomputation and have no case of their own: the numbers stay plain PyTorch's at every budget.

Backward run twice, gradients of gradients, exceptions, engines inside engines: see `tests/test_api_errors.py`.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import EngineError
from models.outcome import measured_peak, outcome_of, plans_between, same
from small import adamw, plan_at

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    each = [[nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Tanh()] for _ in range(count)]
    return nn.Sequential(*(layer for block in each for layer in block))


def rows() -> Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A backward inside forward, through a graph that is differentiated again (WGAN-GP)."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (gradient.norm(dim=-1) - 1).square().mean()


def input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """A backward inside forward whose result is a constant for the loss (FGSM)."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    return model((x + 0.01 * gradient.sign()).detach()).square().mean()


def users_hooks(model: nn.Module, x: Tensor) -> Tensor:
    """Hooks of the user's own inside: theirs are asked, ours are not."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        h = model(x).exp()
    return h.tanh().square().mean()


def tensor_hooks(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    h.register_hook(lambda g: g * 2)
    h = h.gelu() if hasattr(h, "gelu") else functional.gelu(h)
    h.register_hook(lambda g: g.clamp(-1, 1))
    return h.square().mean()


def inference_inside(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = model(x).abs().mean(-1, keepdim=True)
    return (model(x) * scale.clone()).square().mean()


def spectrum(model: nn.Module, x: Tensor) -> Tensor:
    """Complex numbers, conjugates, views of them as real ones."""
    h = torch.fft.rfft(model(x))
    return torch.view_as_real(h * h.conj().roll(1, 0)).tanh().square().mean()


def correlation(model: nn.Module, x: Tensor) -> Tensor:
    """Spectra multiplied with lazy conjugates, saved as they are: a bit of the tensor, not of its bytes."""
    h = model(x)
    power = torch.fft.rfft(h.tanh()) * torch.conj(torch.fft.rfft(h.sin()))
    return torch.fft.irfft(power).tanh().square().mean()


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    outer = torch.func.vmap(lambda a, b: torch.outer(a, b).tanh().sum(0))
    h = model(x)
    return outer(h, h.roll(1, 0)).square().mean()


def many_outputs(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    values, where = h.sort(dim=-1)
    top, _ = h.topk(4, dim=-1)
    left, middle, right = values.split([10, 20, WIDTH - 30], dim=-1)
    spread, mean = torch.std_mean(middle, dim=-1)
    return (
        left.exp().mean() + right.tanh().mean() + top.sigmoid().mean() + (spread * mean).mean()
    ) * where.float().mean()


def indexed(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    h = h[:, x[0] > 0].tanh()  # as many as the batch says; what dropout says would differ from step to step
    h = h[torch.randint(len(h), (300,))]
    return h.masked_fill(h < 0.1, 0.5).logsumexp(-1).mean()


def checkpointed_again(model: nn.Module, x: Tensor) -> Tensor:
    """The older checkpoint of torch, which runs forward again inside a backward of its own."""
    h = x.clone().requires_grad_()
    for block in model:  # type: ignore[attr-defined]
        h = checkpoint(block, h, use_reentrant=True)
    return h.square().mean()


def derivative(model: nn.Module, x: Tensor) -> Tensor:
    """Forward-mode differentiation: its zeros have no bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own decompositions
        value, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    return value.square().mean() + tangent.square().mean()


def made_without_gradients(model: nn.Module, x: Tensor) -> Tensor:
    """What inference mode has made counts no writes."""
    with torch.inference_mode():
        scale = x * 1.0
    return (model(x) + scale.clone() * (model(scale.clone()) + scale)).tanh().square().mean()


class Nudged(nn.Module):
    """Writes into a weight in forward, between two uses of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers(2)
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x @ self.weight.detach().clone())
        with torch.no_grad():
            self.count += 1  # type: ignore[assignment]
        return torch.tanh(h @ self.weight) * self.count


class Embedded(nn.Module):
    """A sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.inner = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.table(x.abs().mul(10).long().clamp(max=49)[:, 0])) + x


def spectral() -> nn.Module:
    model = layers()
    parametrizations.spectral_norm(model[0])  # writes its power iteration into buffers in each forward
    parametrizations.weight_norm(model[4])
    return model


def hooked() -> nn.Module:
    model = layers()
    model[4].register_full_backward_hook(lambda module, down, up: tuple(g * 0.5 for g in down))  # type: ignore[attr-defined]
    model[5].register_forward_hook(lambda module, args, out: out + 1)
    return model


Habit = tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]
HABITS: dict[str, Habit] = {
    "gradient_penalty": (layers, gradient_penalty),
    "input_gradient": (layers, input_gradient),
    "users_hooks": (layers, users_hooks),
    "tensor_hooks": (layers, tensor_hooks),
    "module_hooks": (hooked, squares),
    "inference_inside": (layers, inference_inside),
    "inference_before": (layers, made_without_gradients),
    "forward_mode": (layers, derivative),
    "spectrum": (layers, spectrum),
    "correlation": (layers, correlation),
    "mapped": (layers, mapped),
    "many_outputs": (layers, many_outputs),
    "indexed": (layers, indexed),
    "checkpoint_reentrant": (layers, checkpointed_again),
    "nudged": (Nudged, squares),
    "sparse_gradient": (Embedded, squares),
    "parametrizations": (spectral, squares),
}


def same_values(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a.to_dense(), b.to_dense()))


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", HABITS)
def test_numbers_stay_those_of_plain_torch(name: str) -> None:
    build, loss_fn = HABITS[name]
    model, x = build(), rows()
    plans = plans_between(model, x, loss_fn, fractions=(1.0, 0.5, 0.0))
    outcome_of(model, x, loss_fn)
    reference = outcome_of(model, x, loss_fn)
    for made in plans:
        found = outcome_of(model, x, loss_fn, memfit.apply(made, model, loss_fn, None))
        assert found.divergence is None
        assert same_values(found.loss, reference.loss)
        assert all(same_values(a, b) for a, b in zip(found.gradients, reference.gradients, strict=True))
        assert all(same_values(a, b) for a, b in zip(found.buffers, reference.buffers, strict=True))


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", HABITS)
def test_the_peak_is_as_predicted(name: str) -> None:
    build, loss_fn = HABITS[name]
    model, x = build(), rows()
    for made in plans_between(model, x, loss_fn, fractions=(1.0, 0.5, 0.0)):
        measured = measured_peak(made, model, x, loss_fn)
        assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.005), (
            made.budget_bytes,
            made.prediction.peak_operation,
        )


class Doubled(torch.autograd.Function):
    """A node of the user's own, whose backward is Python."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + gradient


class WithOwnNode(nn.Module):
    """Wide inside, narrow between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Doubled.apply(self.up(x))  # type: ignore[no-untyped-call]
        return x + self.down(torch.sigmoid(h))


def test_gradients_handed_out_of_a_reentrant_checkpoint_do_not_outlive_its_own_nodes() -> None:
    """What the capture held of a user's node held the leaf of the region's graph too, and the leaf its gradient, to the end of the step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(WithOwnNode() for _ in range(4))), rows()
    (made,) = plans_between(model, x, checkpointed_again, fractions=(1.0,))
    assert measured_peak(made, model, x, checkpointed_again) == made.prediction.peak_bytes


class Holding(nn.Module):
    """Tensors as plain attributes, alone and in a list; one may be another in each forward."""

    def __init__(self, *, renewed: bool) -> None:
        super().__init__()
        self.renewed = renewed
        self.inner = layers(2)
        self.table, self.tables = torch.ones(300, WIDTH), [torch.ones(500, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        if self.renewed:
            self.table = self.inner[0](x).detach()
        return self.inner(x) * self.table.mean(0) * self.tables[0].mean(0)


@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_tensors_that_modules_hold_as_attributes_count(fraction: float, *, renewed: bool) -> None:
    model, x = Holding(renewed=renewed), rows()
    (made,) = plans_between(model, x, squares, fractions=(fraction,))
    assert made.prediction.peak_bytes > 4 * WIDTH * (256 + 500)
    assert measured_peak(made, model, x, squares) == made.prediction.peak_bytes


class Cut(nn.Module):
    """The first rows of larger tables, which are held as a whole: a parameter, a buffer, an attribute; and two parameters that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers(2)
        self.weight = nn.Parameter(torch.ones(300, WIDTH)[:3])
        self.register_buffer("scale", torch.ones(500, WIDTH)[:2])
        self.table = torch.ones(700, WIDTH)[:1]
        whole = torch.ones(2, WIDTH)
        self.halves = nn.ParameterList(nn.Parameter(whole[half]) for half in range(2))

    def forward(self, x: Tensor) -> Tensor:
        between = self.weight.mean(0) * self.scale.mean(0) * self.table.mean(0)
        return self.inner(x) * between * self.halves[0] * self.halves[1]


class Tree:
    """Tensors by name, and more such trees (torchrl's losses hold parameters in one)."""

    def __init__(self, **held: Tree | Tensor) -> None:
        self.held = held

    def leaves(self, path: str = "") -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, held in self.held.items():
            found |= held.leaves(f"{path}{name}_") if isinstance(held, Tree) else {path + name: held}
        return found


class Branching(nn.Module):
    """Registers the parameters of a tree, and reads them in the tree."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tree = Tree(weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), bias=nn.Parameter(torch.zeros(WIDTH)))
        for _ in range(depth):
            self.tree = Tree(first=self.tree, weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 8))
        for name, parameter in self.tree.leaves().items():
            self.register_parameter(name, parameter)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for tensor in self.tree.leaves().values():
            x = x @ tensor if tensor.dim() == 2 else (x + tensor).tanh()
        return x


@pytest.mark.parametrize("fraction", [1.0, 0.0])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_parameters_that_are_read_in_a_tree_of_objects_are_those_of_the_model(depth: int, fraction: float) -> None:
    torch.manual_seed(0)
    model, x = Branching(depth), rows()
    (made,) = plans_between(model, x, squares, adamw, fractions=(fraction,))
    assert measured_peak(made, model, x, squares, adamw) == made.prediction.peak_bytes


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_a_part_of_a_larger_tensor_counts_with_all_of_it(fraction: float) -> None:
    model, x = Cut(), rows()
    (made,) = plans_between(model, x, squares, fractions=(fraction,))
    assert made.prediction.peak_bytes > 4 * WIDTH * (300 + 500 + 700)
    assert measured_peak(made, model, x, squares) == made.prediction.peak_bytes


@pytest.mark.parametrize("said", [True, False], ids=["said so", "not said"])
@pytest.mark.parametrize("fraction", [0.6, 0.0])
def test_gradients_of_gradients_are_right_or_refused(fraction: float, *, said: bool) -> None:
    model, x = layers(), rows()
    (made,) = plans_between(model, x, squares, fractions=(fraction,))
    engine = memfit.apply(made, model, squares, None)
    parameters = list(model.parameters())

    def twice(around: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        with around:
            loss = squares(model, x)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), parameters)

    right = twice(nullcontext())
    try:
        found = twice(engine.forward(retain_graph=said))
    except EngineError:
        if said:
            raise
        return  # what it says is looked at in tests/test_api_errors.py
    assert all(same_values(a, b) for a, b in zip(found, right, strict=True))


def test_an_exception_while_something_is_made_again_leaves_nothing_behind() -> None:
    model, x = layers(), rows()
    (made,) = plans_between(model, x, squares, fractions=(0.0,))
    engine = memfit.apply(made, model, squares, None)
    right = outcome_of(model, x, squares)
    torch.manual_seed(7)
    with engine.forward() as follower:
        loss = squares(model, x)
    assert follower is not None

    def out_of_memory(*_: object) -> Tensor:
        raise MemoryError

    operation = min(follower.tape.noted)
    _, args, kwargs = follower.tape.noted[operation]
    follower.tape.noted[operation] = (out_of_memory, args, kwargs)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        loss.backward()
    del loss
    model.zero_grad()
    assert torch.is_grad_enabled()
    assert outcome_of(model, x, squares).differs(right) is None
    assert outcome_of(model, x, squares, engine).differs(right) is None


def from_one(h: Tensor, last: nn.Module) -> Tensor:
    """Results that autograd saves instead of what they are made of; plans hold that instead of them."""
    total = last(h.tanh())
    for shift in range(5):
        total = total + (h - shift).tanh() + (h - shift).sigmoid()
    return functional.gelu(total).square().mean()


def not_made_again() -> Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(2))


def test_the_same_write_into_another_tensor_diverges() -> None:
    """Nothing runs the planned write again, and recomputations read what this step writes into instead."""
    model = layers(2)
    turn = False

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        aside, h = model[0](x), model[0](x) + not_made_again()
        loss = from_one(h, model[4])
        (h if turn else aside).add_(1.0)
        return loss + 0.01 * (h + aside).mean()

    x = rows()
    plans = plans_between(model, x, loss_of)
    turn = True
    reference = outcome_of(model, x, loss_of)
    diverged = 0
    for made in plans:
        found = outcome_of(model, x, loss_of, memfit.apply(made, model, loss_of, None))
        assert not found.differs(reference), made.budget_bytes
        diverged += found.divergence is not None
    assert diverged


def test_writing_after_forward_into_what_recomputations_read_is_said() -> None:
    """Plain PyTorch never looks at it again; a plan that holds it would."""
    model = layers(2)
    seen: list[Tensor] = []

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model[0](x) + not_made_again()
        seen.append(h.detach())
        return from_one(h, model[4])

    x = rows()
    reference = outcome_of(model, x, loss_of)
    said = 0
    for made in plans_between(model, x, loss_of):
        engine = memfit.apply(made, model, loss_of, None)
        model.zero_grad()
        with engine.forward():
            loss = loss_of(model, x)
        seen[-1].clamp_(0, 1)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "was changed in place after forward" in str(error)  # noqa: PT017
            said += 1
        else:
            assert all(same(p.grad, g) for p, g in zip(model.parameters(), reference.gradients, strict=True))
    assert said


@pytest.mark.parametrize(
    "fixed",
    [{}, {"micro_batches": 2}, {"update": "in_backward"}, {"state_format": "8bit"}, {"precision": "fp16"}],
    ids=str,
)
def test_an_engine_that_is_let_go_takes_the_optimizer_state_with_it(fixed: dict[str, Any]) -> None:
    model, x = layers(), rows()
    engine = memfit.fit(model, x, squares, "1GiB", torch.optim.AdamW, fixed=fixed)
    while engine.step(x).skipped:  # until the scale of fp16 fits
        pass
    assert engine.optimizer is not None
    held = [weakref.ref(t) for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    assert held
    gc.collect()
    gc.disable()  # another engine for the same model is made before Python looks for cycles
    try:
        del engine
        assert all(reference() is None for reference in held)
    finally:
        gc.enable()


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on what `torch.func` differentiates."""
    each = torch.func.vmap(torch.func.jacrev(model))(x[:4])
    return squares(model, x) + each.square().mean()


def ensemble(model: nn.Module, x: Tensor) -> Tensor:
    """Calls modules on tensors that stand for several."""
    made = torch.func.vmap(model, randomness="different")(x.reshape(4, -1, WIDTH))
    return made.square().mean()


def test_what_torch_runs_under_no_hooks_is_refused_in_a_sentence() -> None:
    with pytest.raises(memfit.InputError, match="uses torch.func.grad, vjp, jacrev or hessian, which PyTorch runs"):
        memfit.plan(layers(2).eval(), rows(), jacobian, 1 << 50)


class Biased(Tensor):
    """A class of tensors."""


@pytest.mark.parametrize(
    "made", [lambda: Biased(WIDTH), lambda: Biased([1.0] * WIDTH), lambda: causal_lower_right(WIDTH, WIDTH)]
)
def test_a_class_of_tensors_that_is_called_is_refused_in_a_sentence(made: Callable[[], Tensor]) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) + 0 * made().shape[0]

    with pytest.raises(memfit.InputError, match="calls a subclass of torch.Tensor to make a tensor"):
        memfit.plan(layers(2), rows(), loss_of, 1 << 50)


def test_a_class_of_tensors_that_is_not_called_is_planned_for() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * torch.ones(1).as_subclass(Biased).as_subclass(Tensor).sum()

    assert memfit.plan(layers(2), rows(), loss_of, 1 << 50).prediction.peak_bytes


@pytest.mark.slow
@pytest.mark.measured_seconds
def test_a_whole_model_that_is_mapped_over_its_samples_is_timed() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def each(model: nn.Module, x: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(lambda row: model(row).square().sum(), randomness="different")(x)
        return mapped.mean()

    plan = memfit.plan(model, torch.randn(256, 16), each, "1GiB", adamw, fixed={"micro_batches": 1})
    assert plan.prediction.step_seconds > 0


def test_modules_that_are_mapped_over_by_torch_func_train_as_in_plain_torch() -> None:
    model = layers()
    reference = outcome_of(model, rows(), ensemble)
    for plan in plans_between(model, rows(), ensemble, torch.optim.SGD, (0.5, 0.0)):
        assert reference.differs(outcome_of(model, rows(), ensemble, memfit.apply(plan, model, ensemble))) is None


def test_what_a_loss_lets_its_input_gather_goes_with_the_micro_batch() -> None:
    """The gradients that a penalty leaves in the input; the batch is larger than all else."""
    model, x = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4096, WIDTH)

    def penalty(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        given = batch[0].requires_grad_()
        made = model(given)
        (slope,) = torch.autograd.grad(made.sum(), given, create_graph=True)
        return slope.square().mean() + made.square().mean()

    plan = memfit.plan(model, (x,), penalty, 1 << 50, fixed={"micro_batches": 4})
    engine = memfit.apply(plan, model, penalty)
    engine.step((x.detach(),))
    found = engine.step((x.detach(),), meter=True).peak_bytes
    assert found is not None
    assert found <= plan.prediction.peak_bytes


def critic() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LeakyReLU(0.2), nn.Linear(2 * WIDTH, 1))


def test_two_models_that_train_against_each_other_are_as_in_plain_torch() -> None:
    """The generator's loss leaves gradients on the discriminator: zeroed before its step, as in plain loops. A rehearsal leaves none."""

    def losses(generator: nn.Module, discriminator: nn.Module) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        real = rows()

        def told_apart(model: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                made = generator(x)
            return functional.softplus(-model(real)).mean() + functional.softplus(model(made)).mean()

        def taken_for_real(model: nn.Module, x: Tensor) -> Tensor:
            return functional.softplus(-discriminator(model(x))).mean()

        return told_apart, taken_for_real

    models = layers(1), critic()
    plain = [torch.optim.Adam(model.parameters()) for model in models]
    torch.manual_seed(5)
    for _ in range(3):
        for model, optimizer, loss in zip(models[::-1], plain[::-1], losses(*models), strict=True):
            optimizer.zero_grad()
            loss(model, rows()).backward()
            optimizer.step()
    others = layers(1), critic()
    engines = [
        memfit.fit(model, rows(), loss, "1GiB", torch.optim.Adam, fixed={"micro_batches": 1})
        for model, loss in zip(others[::-1], losses(*others), strict=True)
    ]
    assert all(parameter.grad is None for model in others for parameter in model.parameters())
    torch.manual_seed(5)
    for _ in range(3):
        for engine in engines:
            engine.model.zero_grad()
            engine.step(rows())
    for model, other in zip(models, others, strict=True):
        assert all(map(torch.equal, model.parameters(), other.parameters()))


class Teacher(nn.Module):
    """Has a layer, too, that no step reads: its bytes are there all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


TEACHER = Teacher()


def taught(y: Tensor, x: Tensor) -> Tensor:
    return functional.mse_loss(y, TEACHER(x))


class Taught:
    """A loss as an object, whose other attributes (all of the data, say) are no part of a step."""

    def __init__(self) -> None:
        self.teachers = {"one": layers(2).requires_grad_(requires_grad=False)}
        self.data = torch.zeros(1 << 16)

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.compared(model(x), x)

    def compared(self, y: Tensor, x: Tensor) -> Tensor:
        return functional.mse_loss(y, self.teachers["one"](x))


TAUGHT = Taught()


@pytest.mark.parametrize(
    "held", ["closed over", "global", "default", "object", "method", "object closed over", "partial"]
)
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_what_a_loss_function_holds_is_predicted_and_measured(fraction: float, held: str) -> None:
    teacher, weights = Teacher(), torch.rand(WIDTH)

    def closing(model: nn.Module, x: Tensor) -> Tensor:
        return (weights * (model(x) - teacher(x)).square()).mean()

    def by_default(model: nn.Module, x: Tensor, teacher: nn.Module = teacher) -> Tensor:
        return functional.mse_loss(model(x), teacher(x))

    losses: dict[str, Any] = {
        "closed over": closing,
        "global": lambda model, x: taught(model(x), x),
        "default": by_default,
        "object": TAUGHT,
        "method": TAUGHT.__call__,
        "object closed over": lambda model, x: TAUGHT.compared(model(x), x),
        "partial": partial(lambda taught, model, x: taught.compared(model(x), x), TAUGHT),
    }
    plan = plan_at(fraction, layers(), rows(), losses[held])
    engine = memfit.apply(plan, layers(), losses[held], adamw)
    engine.step(rows())
    assert engine.step(rows(), meter=True).peak_bytes == plan.prediction.peak_bytes
    assert memfit.measure(layers(), rows(), losses[held], adamw).peak_bytes == plan.prediction.plain_peak_bytes


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_backward_inside_the_loss_finds_no_gradients_of_an_earlier_step(fraction: float) -> None:
    """Its peak is in that backward, where parameters get their first gradients."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        return model[-1](x + x.grad).square().mean()  # type: ignore[index]

    def build() -> nn.Module:
        return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 64))

    x = torch.randn(512, 64)
    plan = plan_at(fraction, build(), x, loss_fn)
    engine = memfit.apply(plan, build(), loss_fn, adamw)
    engine.step(x)
    assert engine.step(x, meter=True).peak_bytes == plan.prediction.peak_bytes


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(functional.gelu(self.inner(self.norm(x))))
        return y


@pytest.mark.parametrize("reads", ["nothing", "the norm"])
@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_gradients_that_a_hook_of_a_module_keeps_are_not_added_to(fraction: float, reads: str) -> None:
    """Torch keeps those of outputs until those of inputs are there: what comes by the residual and through the block is added up in memory of its own."""
    model, norms = nn.Sequential(nn.Linear(16, 16), *(Residual() for _ in range(6))), []

    def hook(_: nn.Module, __: Any, up: Any) -> None:
        if reads == "the norm":
            norms.append(float(up[0].norm()))

    for block in list(model)[1:]:
        block.register_full_backward_hook(hook)
    x = torch.randn(1024, 16)
    plan = plan_at(fraction, model, x, squares)
    engine = memfit.apply(plan, model, squares, adamw)
    engine.step(x)
    assert engine.step(x, meter=True).peak_bytes == plan.prediction.peak_bytes


class Distilled(nn.Module):
    """Hides its teacher from `parameters()`, as an attribute that is no module of its own or in a list."""

    def __init__(self, *, in_list: bool) -> None:
        super().__init__()
        self.body = layers()
        vars(self)["teacher"] = [Teacher()] if in_list else Teacher()

    def forward(self, x: Tensor) -> Tensor:
        teacher = self.teacher[0] if isinstance(self.teacher, list) else self.teacher
        return functional.mse_loss(self.body(x), teacher(x))


@pytest.mark.parametrize("held", ["in a list", "alone"])
def test_a_teacher_that_a_model_hides_is_predicted_and_measured(held: str) -> None:
    model = Distilled(in_list=held == "in a list")
    plan = plan_at(0.3, model, rows(), lambda m, x: m(x))
    engine = memfit.apply(plan, model, lambda m, x: m(x), adamw)
    engine.step(rows())
    assert engine.step(rows(), meter=True).peak_bytes == plan.prediction.peak_bytes


@pytest.mark.alternate(0)
@pytest.mark.filterwarnings("ignore:a forward differed from the plan and was ended there")
@pytest.mark.parametrize("fraction", [0.75, 0.5])
def test_layers_that_are_frozen_half_way_stay_in_the_budget(fraction: float) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))), nn.Linear(32, 4)
        )

    x = torch.randn(256, 32)
    model, plain = build(), build()
    budget = int(fraction * memfit.measure(build(), x, squares, adamw).peak_bytes)
    engine = memfit.fit(model, x, squares, budget, adamw, fixed={"micro_batches": 1})
    optimizer = adamw(plain.parameters())
    for step in range(3):
        if step == 1:
            for each in (model, plain):
                each[3:7].requires_grad_(requires_grad=False)
        with pytest.warns(UserWarning, match="6 no longer") if step == 1 else nullcontext():
            record = engine.step(x, meter=True)
        assert record.peak_bytes is not None
        assert record.peak_bytes <= budget
        assert not record.divergences
        squares(plain, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_forgotten_train_is_told_as_such_and_once() -> None:
    model = layers()
    engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed={"micro_batches": 1})
    model.eval()
    with pytest.warns(
        UserWarning, match=r"the model is in eval mode, .* call model\.train\(\) before the step"
    ) as warned:
        engine.step(rows())
    assert warned[0].filename == __file__
    engine.step(rows())
    model.train()
    engine.step(rows())


def test_layers_that_are_freed_between_steps_are_told_and_planned_for_when_fitted_again() -> None:
    model, plain = layers(), layers()
    for each in (model, plain):
        each[0].requires_grad_(requires_grad=False)
    engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed={"micro_batches": 1})
    optimizer = torch.optim.SGD(plain.parameters())

    def steps(engine: memfit.Engine) -> None:
        torch.manual_seed(5)
        engine.step(rows())
        torch.manual_seed(5)
        squares(plain, rows()).backward()
        optimizer.step()
        optimizer.zero_grad()

    steps(engine)
    for each in (model, plain):
        each[0].requires_grad_(requires_grad=True)
    before = [p.detach().clone() for p in model[0].parameters()]
    told = "2 parameters are trained from here on that were not, and 0 no longer"
    with pytest.warns(UserWarning, match=told) as warned:
        engine.step(rows())
    assert warned[0].filename == __file__
    assert all(map(torch.equal, model[0].parameters(), before))  # the optimizer was not given it
    model.load_state_dict(plain.state_dict())
    steps(memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed={"micro_batches": 1}))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def _assigned(model: nn.Module) -> None:
    model.load_state_dict(layers().state_dict(), assign=True)


def _head(model: nn.Module) -> None:
    model[-4] = nn.Linear(WIDTH, WIDTH)


def _weight(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))


@pytest.mark.parametrize(("replace", "number"), [(_assigned, 6), (_head, 2), (_weight, 1)])
@pytest.mark.parametrize("rehearsed", [True, False])
def test_parameters_that_are_replaced_are_told_as_the_optimizer_does_not_have_them(
    replace: Callable[[nn.Module], None], number: int, *, rehearsed: bool
) -> None:
    model = layers()
    fixed = {"micro_batches": 1}
    if rehearsed:
        engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed=fixed)
    else:
        engine = memfit.apply(memfit.plan(model, rows(), squares, "1GiB", torch.optim.SGD, fixed=fixed), model)
    replace(model)
    told = f"{number} parameters that the optimizer updates are not the model's any more"
    with pytest.warns(UserWarning, match=told) as warned:
        engine.step(rows())
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(rows())  # told once
        again = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed=fixed)
        before = [each.detach().clone() for each in model.parameters()]
        again.step(rows())
    assert not any(map(torch.equal, model.parameters(), before))


def _longer(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(WIDTH, WIDTH))  # type: ignore[operator]


def _adapter(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model[0].register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))  # type: ignore[index]


def _frozen(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))  # type: ignore[operator]


def _in_a_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    added = nn.Linear(WIDTH, WIDTH)
    model.append(added)  # type: ignore[operator]
    optimizer.add_param_group({"params": list(added.parameters())})


@pytest.mark.parametrize(("add", "number"), [(_longer, 2), (_adapter, 1), (_frozen, 0), (_in_a_group, 0)])
def test_parameters_that_are_added_are_told_where_the_optimizer_does_not_have_them(
    add: Callable[[nn.Module, torch.optim.Optimizer], None], number: int
) -> None:
    model = layers()
    engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed={"micro_batches": 1})
    engine.step(rows())
    assert engine.optimizer is not None
    add(model, engine.optimizer)
    for expected in ([f"{number} parameters have come to the model"] if number else [], []):  # told once
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engine.step(rows())
        assert [
            str(each.message).partition(" that the")[0] for each in warned if "have come" in str(each.message)
        ] == expected


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
@pytest.mark.parametrize("rehearsed", [True, False])
def test_parameters_that_are_converted_are_told_as_the_plan_is_for_others(
    convert: Callable[[nn.Module], nn.Module], *, rehearsed: bool
) -> None:
    def in_its_type(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x.to(next(model.parameters()).dtype))

    model = layers()
    fixed = {"micro_batches": 1}
    if rehearsed:
        engine = memfit.fit(model, rows(), in_its_type, "1GiB", torch.optim.SGD, fixed=fixed)
    else:
        plan = memfit.plan(model, rows(), in_its_type, "1GiB", torch.optim.SGD, fixed=fixed)
        engine = memfit.apply(plan, model)
    convert(model)
    for times in (1, 0):  # told once
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engine.step(rows())
        assert sum("have another type than when the plan was made" in str(each.message) for each in warned) == times


def test_parameters_that_stay_the_same_objects_are_not_told_of() -> None:
    model = layers()
    engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed={"micro_batches": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(rows())
        model.load_state_dict(layers().state_dict())
        engine.step(rows())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda engine: torch.save(engine, io.BytesIO())]
)
def test_an_engine_that_is_to_be_copied_says_what_can_be(copied: Callable[[memfit.Engine], object]) -> None:
    model = layers()
    engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD, fixed={"micro_batches": 1})
    with pytest.raises(memfit.InputError, match=r"an engine cannot be saved or copied: save model\.state_dict\(\)"):
        copied(engine)
    again = copy.deepcopy(model)
    plan = copy.deepcopy(engine.plan)
    assert memfit.apply(plan, again, squares, torch.optim.SGD).step(rows()).loss > 0


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (layers().eval(), True),  # has dropout
        (layers(), False),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval(), True),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH)).eval(), False),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval()), False),  # one layer, on purpose
    ],
)
def test_a_plan_says_that_the_model_is_in_eval_mode_where_that_makes_a_difference(
    model: nn.Module, *, told: bool
) -> None:
    plan = memfit.plan(model, rows(), squares, "1GiB", torch.optim.SGD)

    assert any("the model is in eval mode" in note for note in plan.notes) == told


def test_a_model_can_be_moved_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch exchanges tensors when it moves DTensors (as Lightning does after training under ZeRO), and none that something has a weak reference to."""
    model = layers()
    engine = memfit.fit(model, rows(), squares, "1GiB", torch.optim.SGD)
    engine.step(rows())
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.double()
    assert all(torch.equal(a.double(), b) for a, b in zip(before, model.parameters(), strict=True))


class OneStateTwice(nn.Module):
    """An LSTM whose hidden state and cell state begin as one tensor, which oneDNN copies then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, x.shape[1], 16)
        return self.lstm(x, (state, state))[0]


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_arguments_that_share_a_storage_in_backward_are_measured_so(fraction: float) -> None:
    x = torch.randn(6, 64, 16, generator=torch.Generator().manual_seed(1))
    (made,) = plans_between(OneStateTwice(), x, squares, adamw, fractions=[fraction])
    assert measured_peak(made, OneStateTwice(), x, squares, adamw) == made.prediction.peak_bytes


class TablesFromLists(nn.Module):
    """Adds numbers that Python holds: PyTorch makes a tensor of them in every forward, by no operation that a dispatch mode sees."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = [[0.1 * row] * WIDTH for row in range(count)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x) + torch.as_tensor(self.table))
        return x


@pytest.mark.parametrize("count", [1, 256], ids=["a row", "all rows"])
@pytest.mark.parametrize("fraction", [0.5, 0.0])
def test_a_constant_that_no_operation_makes_is_held_where_it_is_counted(fraction: float, count: int) -> None:
    (made,) = plans_between(TablesFromLists(count), rows(), squares, adamw, fractions=[fraction])
    assert made.script.steps
    assert measured_peak(made, TablesFromLists(count), rows(), squares, adamw) == made.prediction.peak_bytes


class TablesFromNumpy(TablesFromLists):
    """Copies a table that lies in the memory of numpy, which can be done again at any time."""

    def forward(self, x: Tensor) -> Tensor:
        table = np.array(self.table, dtype=np.float32)
        for layer in self.layers:
            x = functional.gelu(layer(x) + torch.tensor(table))
        return x


def test_a_constant_in_the_memory_of_numpy_is_copied_again() -> None:
    (made,) = plans_between(TablesFromNumpy(256), rows(), squares, adamw, fractions=[0.0])
    again = {operation for step in made.script.steps for runs in step.runs for operation in runs}
    assert any(made.script.operations[operation] == "aten._to_copy.default" for operation in again)
    assert measured_peak(made, TablesFromNumpy(256), rows(), squares, adamw) == made.prediction.peak_bytes


class SumsUp(nn.Module):
    """Adds to a tensor of numbers, beside something large that forward holds for a moment.

    Args:
        early: the tensor is made before that, and read after it; else both after it.
    """

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.layers, self.early = layers(2), early

    def forward(self, x: Tensor) -> Tensor:
        total = torch.tensor([0.0] * 100) if self.early else None
        x = self.layers(x).square()
        large = x.detach().repeat(1, 16).sum()
        if total is None:
            total = torch.tensor([0.0] * 100)
            large = large * total[0]
        return x.mean() + 0.0 * large + total.sum()


@pytest.mark.parametrize("source", ["fake", "real"])
@pytest.mark.parametrize("early", [True, False])
def test_a_tensor_of_numbers_counts_from_where_it_is_made(source: str, *, early: bool) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        if source == "real":
            float(x[0, 0].item() + next(model.parameters()).sum().item())
        loss: Tensor = model(x)
        return loss

    (made,) = plans_between(SumsUp(early=early), rows(), loss_of, torch.optim.SGD, fractions=[1.0])
    assert made.source == source
    assert measured_peak(made, SumsUp(early=early), rows(), loss_of, torch.optim.SGD) == made.prediction.peak_bytes
