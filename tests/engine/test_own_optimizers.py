"""Optimizers of other people: they put new tensors in place of their state, keep more than tensors in it, and do more in some updates than in others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain as chain_of
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memfit
from memfit.errors import EngineError
from memfit.meter import metered
from small import chain, rows, squared_error

pytestmark = pytest.mark.usefixtures("one_thread")

Parameters = Iterable[nn.Parameter]


class Renewing(torch.optim.Optimizer):
    """A moving average that is a new tensor after each update, as in Shampoo's factors.

    Args:
        parameters: to update.
        kept: puts the average into a state.
        read: finds it there.
    """

    def __init__(
        self,
        parameters: Parameters,
        kept: Callable[[Tensor], Any] = lambda x: x,
        read: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.kept, self.read = kept, read
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = self.read(state["average"]) if state else torch.zeros_like(parameter)
                state["average"] = self.kept(average * 0.9 + parameter.grad * 0.1)
                del average
                if self.fails:
                    raise MemoryError("no room for the next one")
                parameter.sub_(group["lr"] * self.read(state["average"]))


WAYS_TO_KEEP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda x: x, lambda x: x),
    "a view": (lambda x: x[None], lambda x: x[0]),
    "a list": (lambda x: [x, 3], lambda x: x[0]),
    "a dictionary": (lambda x: {"of it": (x,)}, lambda x: x["of it"][0]),
}


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("way", WAYS_TO_KEEP)
def test_state_that_is_replaced_is_let_go_of_in_the_update(way: str, micro_batches: int) -> None:
    """It stayed until the update's end, so the step held all of the old state beside the new one."""

    def optimizer(parameters: Parameters) -> torch.optim.Optimizer:
        return Renewing(parameters, *WAYS_TO_KEEP[way])

    batch = rows(8)  # so few that the update holds most
    model = chain()
    made = memfit.plan(model, batch, squared_error, 1 << 40, optimizer, fixed={"micro_batches": micro_batches})
    engine = memfit.apply(made, model, squared_error, optimizer)
    peaks = [engine.step(batch, meter=True).peak_bytes for _ in range(3)]
    assert max(peak or 0 for peak in peaks) == made.prediction.peak_bytes


def test_an_update_that_has_replaced_state_alone_has_begun() -> None:
    batch, model = rows(8), chain()
    made = memfit.plan(model, batch, squared_error, 1 << 40, Renewing)
    engine = memfit.apply(made, model, squared_error, Renewing)
    engine.step(batch)
    assert isinstance(engine.optimizer, Renewing)
    engine.optimizer.fails = True
    with pytest.raises(EngineError, match="failed half way"):
        engine.step(batch)


class Counting(torch.optim.Optimizer):
    """Keeps a count beside the states of parameters, and of each parameter the last gradients in a queue and their mean in float64 in a list."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.state["steps"] = 0  # type: ignore[index, assignment]
        self.state["of all"] = {"norm": torch.zeros(3)}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.state["steps"] += 1  # type: ignore[index, operator]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["last"], state["mean"] = deque(maxlen=2), [torch.zeros_like(parameter, dtype=torch.float64)]
                state["last"].append(parameter.grad.clone())
                state["mean"][0] += parameter.grad
                self.state["of all"]["norm"] += parameter.grad.norm()  # type: ignore[index]
                parameter.sub_(group["lr"] * (sum(state["last"]) + state["mean"][0] / self.state["steps"]))  # type: ignore[index]


def test_a_rehearsal_leaves_whatever_an_optimizer_keeps_as_it_was() -> None:
    batch = rows(8)
    optimizers: list[Any] = []
    models: list[nn.Module] = []
    for rehearses in (False, True):
        models.append(chain())
        optimizers.append(Counting(models[-1].parameters()))
        for step in range(6):
            if rehearses and step in {0, 3}:  # before the first update there is the count alone
                memfit.fit(models[-1], batch, squared_error, "1GiB", optimizers[-1])
            squared_error(models[-1], batch).backward()  # type: ignore[no-untyped-call]
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    plain, ours = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert ours.keys() == plain.keys()
    for key, state in plain.items():
        (a, structure), (b, other) = pytree.tree_flatten(state), pytree.tree_flatten(ours[key])
        assert structure == other  # the queue with its length
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b, strict=True))
        assert [getattr(x, "dtype", None) for x in a] == [getattr(y, "dtype", None) for y in b]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert "memfit-rehearsal-" not in Path("/proc/self/maps").read_text(encoding="utf-8")


class Decomposing(torch.optim.Optimizer):
    """Takes the singular vectors of each gradient now and then, in the first update first, as GaLore does.

    Args:
        parameters: to update.
        every: so many updates.
    """

    def __init__(self, parameters: Parameters, every: int = 200) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.every = every

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                state["step"] = state.get("step", -1) + 1
                if gradient.dim() == 2 and state["step"] % self.every == 0:
                    left, sizes, right = torch.linalg.svd(gradient.double())
                    state["left"] = left[:, :4].float().contiguous()
                    del left, sizes, right
                parameter.sub_(
                    group["lr"] * (state["left"] @ (state["left"].T @ gradient) if "left" in state else gradient)
                )


def test_a_first_update_that_takes_more_than_the_next_is_measured_by_fit() -> None:
    batch, whole = rows(8), {"micro_batches": 1}
    plan = memfit.plan(chain(), batch, squared_error, 1 << 40, Decomposing)
    engine = memfit.apply(plan, chain(), squared_error, Decomposing)
    first, second = (engine.step(batch, meter=True).peak_bytes or 0 for _ in range(2))
    assert first > second == plan.prediction.peak_bytes
    with pytest.raises(memfit.InfeasibleError, match="the rehearsal measured a peak of") as told:
        memfit.fit(chain(), batch, squared_error, second, Decomposing, fixed=whole)
    assert told.value.minimum_bytes is not None
    assert first <= told.value.minimum_bytes <= 1.01 * first
    engine = memfit.fit(chain(), batch, squared_error, told.value.minimum_bytes, Decomposing, fixed=whole)
    assert engine.rehearsal is not None
    assert engine.rehearsal.measured_peak_bytes == first
    assert engine.step(batch, meter=True).peak_bytes == first


class Factor:
    """An object in the state, as pytorch_optimizer's Shampoo has it."""

    def __init__(self, size: int) -> None:
        self.statistics = [torch.zeros(size, size)]


LR = 0.01


class EachAlone(torch.optim.Optimizer):
    """Updates one parameter after the other, by `update`."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter])

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class WithObjects(EachAlone):
    """Keeps statistics in an object, and the last gradients in a queue whose first alone is read."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["factor"] = Factor(len(parameter))
            state["last"] = deque((torch.zeros_like(parameter) for _ in range(3)), maxlen=3)
        state["last"].append(gradient.clone())
        rows_of = gradient.reshape(len(parameter), -1)
        state["factor"].statistics[0].addmm_(rows_of, rows_of.T)
        parameter.sub_(LR * state["last"][0])


def of_each(tensors_of: Callable[[Any], Iterable[Tensor]]) -> Callable[[Any], Iterable[Tensor]]:
    """Of an optimizer's state of each parameter."""
    return lambda optimizer: (tensor for each in optimizer.state.values() for tensor in tensors_of(each))


def check_counted(kind: Any, samples: int, tensors_of: Callable[[Any], Iterable[Tensor]]) -> None:
    """The peak with this optimizer is predicted, and that of plain PyTorch; so are the parameters. `tensors_of` gives what the optimizer keeps."""
    batch, model = rows(samples), chain()
    optimizer = kind(model.parameters())
    made = memfit.plan(model, batch, squared_error, 1 << 40, kind, fixed={"micro_batches": 1})
    for _ in range(2):
        squared_error(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with metered(chain_of(model.parameters(), batch, tensors_of(optimizer))) as plain:
        loss = squared_error(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    fitted = chain()
    engine = memfit.apply(made, fitted, squared_error, kind)
    peaks = [engine.step(batch, meter=True).peak_bytes for _ in range(3)]
    assert peaks[-1] == made.prediction.peak_bytes == plain.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fitted.parameters(), strict=True))


@pytest.mark.parametrize("samples", [8, 512])
def test_state_in_objects_and_queues_counts(samples: int) -> None:
    check_counted(WithObjects, samples, of_each(lambda state: (*state["last"], *state["factor"].statistics)))


class Narrow(Tensor):
    """Says that it is of float32 and keeps float16, as torchao's 8-bit state does with codes and scales."""

    @staticmethod
    def __new__(cls: type[Narrow], kept: Tensor) -> Narrow:  # noqa: PYI034 - of this class
        made: Narrow = Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Narrow:
        return cls(inner["kept"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types
        if func is torch.ops.aten.copy_.default:
            args[0].kept.copy_(args[1])
            return args[0]
        args, kwargs = pytree.tree_map_only(Narrow, lambda x: x.kept.float(), (args, kwargs or {}))
        return func(*args, **kwargs)


class WithNarrowState(EachAlone):
    """A moving average in a class of tensors that wraps another."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["average"] = Narrow(torch.zeros_like(parameter, dtype=torch.float16))
        average = torch.lerp(state["average"], gradient, 0.1)
        state["average"].copy_(average)
        parameter.sub_(average, alpha=LR)


@pytest.mark.parametrize("samples", [8, 512])
def test_state_that_wraps_other_tensors_counts_as_these(samples: int) -> None:
    check_counted(WithNarrowState, samples, of_each(lambda state: (state["average"].kept,)))


class Several(torch.optim.Optimizer):
    """Steps two optimizers that it holds in a list, and goes half of the way back to earlier weights (Zhang et al., 2019)."""

    def __init__(self, parameters: Parameters | Iterable[dict[str, Any]]) -> None:
        held = [p for each in parameters for p in (each["params"] if isinstance(each, dict) else [each])]
        super().__init__(held, {})
        self.steps = [torch.optim.Adam(held[::2], 1e-3), torch.optim.SGD(held[1::2], 1e-2, momentum=0.9)]
        self.slow = {"weights": [parameter.detach().clone() for parameter in held]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for each in self.steps:
            each.step()
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow["weights"], strict=True):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)

    def kept(self) -> list[Tensor]:
        inner = [tensor for each in self.steps for state in each.state.values() for tensor in state.values()]
        return [*self.slow["weights"], *(tensor for tensor in inner if tensor is not None)]


@pytest.mark.parametrize("samples", [8, 512])
def test_what_an_optimizer_keeps_in_its_attributes_counts(samples: int) -> None:
    check_counted(Several, samples, Several.kept)


class Seldom(Several):
    """Goes back to earlier weights in its tenth step, which no test comes to."""

    steps_taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps_taken += 1
        if self.steps_taken % 10 == 0:
            super().step(closure)
            return
        for each in self.steps:
            each.step()


@pytest.mark.parametrize("samples", [8, 512])
def test_weights_that_an_update_does_not_touch_count(samples: int) -> None:
    """They were missing from the prediction."""
    check_counted(Seldom, samples, Seldom.kept)


class Averaged:
    """Weights averaged over steps, in an object of one's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.weights[name].lerp_(parameter, 0.1)


def with_hooks(model: nn.Module) -> tuple[Any, Callable[[], list[Any]]]:
    """An optimizer whose hooks move a schedule on, count, and average weights in two ways; and what these have come to."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=40)
    averaged, own, counts = torch.optim.swa_utils.AveragedModel(model), Averaged(model), [0]

    def before(*_: Any) -> None:
        counts[0] += 1

    def after(*_: Any) -> None:
        schedule.step()
        own.update()
        averaged.update_parameters(model)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer, lambda: [
        *schedule.get_last_lr(),
        schedule.last_epoch,
        counts[0],
        *averaged.state_dict().values(),
        *own.weights.values(),
    ]


def with_optimizers(model: nn.Module) -> tuple[Any, Callable[[], list[Any]]]:
    """An optimizer that steps others, one of them in an optimizer that it holds."""
    optimizer = Several(model.parameters())
    outer = Several(model.parameters())
    outer.steps = [optimizer]  # type: ignore[list-item]
    return outer, lambda: [*optimizer.kept(), *outer.slow["weights"]]


@pytest.mark.parametrize("made", [with_hooks, with_optimizers])
def test_what_hooks_and_inner_optimizers_keep_is_put_back_after_a_rehearsal(
    made: Callable[[nn.Module], tuple[Any, Callable[[], list[Any]]]],
) -> None:
    """It was two steps ahead of the parameters, so training went another way than plain PyTorch."""
    batch = rows(8)
    ends = []
    for rehearses in (False, True):
        model = chain()
        optimizer, kept = made(model)
        for step in range(5):
            if rehearses and step in {0, 3}:
                memfit.fit(model, batch, squared_error, "1GiB", optimizer)
            squared_error(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            model.zero_grad()
        ends.append([*kept(), *model.parameters()])
    assert len(ends[0]) == len(ends[1])
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*ends, strict=True))


def averaging(model: nn.Module) -> tuple[Callable[[Parameters], torch.optim.Optimizer], Callable[[], list[Tensor]]]:
    """Makes optimizers whose hook averages the weights, in two ways that are there before any of them; and the averages."""
    averaged, own = torch.optim.swa_utils.AveragedModel(model), Averaged(model)

    def after(*_: Any) -> None:
        averaged.update_parameters(model)
        own.update()

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, 1e-2, fused=True)
        made.register_step_post_hook(after)
        return made

    return make, lambda: [*averaged.state_dict().values(), *own.weights.values()]


@pytest.mark.parametrize("samples", [8, 512])
def test_averages_in_hooks_are_left_by_planning_and_counted(samples: int) -> None:
    """Captures went on with them, on fake tensors, too, and the meter left them out."""
    batch, model, fitted = rows(samples), chain(), chain()
    make, kept = averaging(model)
    plain = make(model.parameters())
    for _ in range(3):
        squared_error(model, batch).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
    make, ours = averaging(fitted)
    engine = memfit.fit(fitted, batch, squared_error, "1GiB", make, fixed={"micro_batches": 1})
    peaks = [engine.step(batch, meter=True).peak_bytes for _ in range(3)]
    both = zip([*kept(), *model.parameters()], [*ours(), *fitted.parameters()], strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    assert peaks[1:] == [engine.plan.prediction.peak_bytes] * 2
    assert engine.plan.prediction.peak_bytes > 2 * sum(tensor.nbytes for tensor in kept())


def test_an_optimizer_that_the_loss_steps_is_left_by_planning_and_counted() -> None:
    """A rehearsal went on with its state, and the meter left it out."""
    batch, ends, peaks = rows(8), [], []
    for planned in (False, True):
        model, other = chain(), chain(1)
        stepped = torch.optim.Adam(other.parameters(), 1e-2)

        def loss(
            generator: nn.Module, batch: Any, other: nn.Module = other, stepped: torch.optim.Optimizer = stepped
        ) -> Tensor:
            made = generator(batch[0])
            stepped.zero_grad()
            (other(made.detach()) - batch[1]).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
            return other(made).square().mean()

        if planned:
            engine = memfit.fit(model, batch, loss, "1GiB", fixed={"micro_batches": 1})
            peaks = [engine.step(batch, meter=True).peak_bytes for _ in range(3)]
            assert peaks[1:] == [engine.plan.prediction.peak_bytes] * 2
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for _ in range(3):
                loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                model.zero_grad()
        state = [tensor for each in stepped.state.values() for tensor in each.values()]
        ends.append([*state, *other.parameters(), *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
