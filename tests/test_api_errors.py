"""Bad input and bad luck: each is told in a sentence, by the right person's exception, and leaves everything as it was."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.errors import (
    BatchError,
    BudgetError,
    EngineError,
    InfeasibleError,
    InputError,
    NonFiniteLossError,
    PlanFileError,
    SnapshotError,
    SplitError,
)
from memfit.step.loss_value import LossValue
from memfit.units import format_bytes
from small import adamw, chain, plan_at, rows, same, squared_error, state_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch hides this warning of its own, but not where warnings are errors; then no capture would be a fake one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@cache
def tight(**named: Any) -> memfit.Plan:
    """The smallest plan for `chain(**named)`; every test trains a chain of its own with it."""
    made = plan_at(0.0, chain(**named), rows())
    assert made.script.recomputations > 5
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine_for(model: nn.Module, loss_fn: Any = squared_error, optimizer: Any = adamw, **named: Any) -> memfit.Engine:
    return memfit.apply(tight(**named), model, loss_fn, optimizer)


# -- budgets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ("lots", "'lots' is not a number of bytes"),
        ("8G", "'8G' has a unit memfit does not read"),
        (0, "0 is less than one byte"),
        ("0GiB", "'0GiB' is less than one byte"),
        (-5, "-5 is less than one byte"),
        (1.5e9, "is a float: write int"),
        (True, "True is not a number of bytes"),
        (None, 'budget=None: write "8GiB"'),
        ("120%", "'120%' is more than the device has"),
        (1 << 70, "is more bytes than can be counted"),
    ],
)
def test_a_budget_that_cannot_be_read_is_refused(budget: Any, sentence: str) -> None:
    for function in (memfit.plan, memfit.fit):
        with pytest.raises(BudgetError, match=re.escape(sentence)):
            function(chain(1), rows(8), squared_error, budget)  # type: ignore[operator]


@pytest.mark.parametrize("given", [24, "24"])
def test_a_bare_number_that_lacks_its_unit_is_told_at_once(given: Any) -> None:
    model = chain(1)
    held = format_bytes(sum(p.nbytes for p in model.parameters()))
    with pytest.raises(BudgetError, match=f"is 24 bytes, and the model's parameters alone take {held}: .*24GiB"):
        memfit.plan(model, rows(8), squared_error, given, adamw)


@pytest.mark.parametrize("function", [memfit.plan, memfit.fit])
@pytest.mark.parametrize(
    ("position", "given", "sentence"),
    [
        (0, lambda: chain(1), "the model is function: give a torch.nn.Module"),
        (
            1,
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 4))),
            r"sample is a DataLoader: give one batch of it, .*next\(iter\(loader\)\)",
        ),
        (1, np.ones((4, 4)), r"no tensor with a dimension but ndarray \(torch.from_numpy"),
        (1, [], "no tensor with a dimension: memfit needs"),
        (1, torch.ones(0, 4), "the batch holds no samples"),
        (2, "1GiB", "'1GiB' is no function: if it is the budget, name it, budget='1GiB'"),
        (2, torch.optim.AdamW, r"loss_fn is an optimizer \(AdamW\): name it, optimizer="),
        (3, adamw, "budget=adamw is a function: the arguments are model, sample, loss_fn, budget, optimizer"),
        (
            4,
            torch.optim.SGD([nn.Parameter(torch.ones(1))]),
            r"the optimizer \(SGD\) holds parameters that are not the model's",
        ),
        (4, [torch.optim.SGD, torch.optim.Adam], "optimizer holds 2 optimizers"),
        (
            4,
            {"name": "AdamW", "lr": 1e-3},
            "optimizer={'name': 'AdamW', 'lr': 0.001}: write optimizer=lambda parameters",
        ),
        (4, "adamm", "optimizer='adamm': torch.optim has none of this name; did you mean 'Adam"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_its_own_words(
    function: Any, position: int, given: Any, sentence: str
) -> None:
    arguments = [chain(1), rows(8), squared_error, "1GiB", adamw]
    arguments[position] = given
    with pytest.raises(InputError, match=sentence):
        function(*arguments)


@pytest.mark.parametrize("given", ["plan.json", chain(1), None])
def test_what_is_no_plan_cannot_be_applied(given: Any) -> None:
    with pytest.raises(InputError, match=rf"the plan is {type(given).__name__}: .*memfit.Plan.load\(path\)"):
        memfit.apply(given, chain(1), squared_error, adamw)


def test_a_loader_handed_to_a_step_is_told_to_be_one() -> None:
    with pytest.raises(BatchError, match="no tensor with a dimension but DataLoader"):
        engine_for(chain(4)).step(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 4))))


@pytest.mark.parametrize("gives", [lambda loss: {"loss": loss}, lambda loss: loss.repeat(3), lambda _: None])
def test_a_loss_function_that_gives_no_scalar_is_told_to_return_it_alone(gives: Any) -> None:
    with pytest.raises(InputError, match="return the loss alone, as one scalar tensor"):
        memfit.plan(chain(1), rows(8), lambda model, batch: gives(squared_error(model, batch)), "1GiB", adamw)


def too_little(model: nn.Module, sample: Any, **named: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, named.pop("loss_fn", squared_error), "1KiB", named.pop("optimizer", adamw), **named)
    return caught.value


@pytest.mark.parametrize(
    "fixed", [None, {"micro_batches": 1}, {"micro_batches": 4}], ids=["free", "whole", "four parts"]
)
def test_a_budget_that_is_too_small_is_told_what_would_do(fixed: Any) -> None:
    model, sample = chain(2), rows(16)
    error = too_little(model, sample, fixed=fixed)

    assert error.budget_bytes == 1024
    assert error.minimum_bytes is not None
    assert error.minimum_bytes > sum(p.nbytes for p in model.parameters())
    assert error.moment.startswith(("forward", "backward", "clip", "optimizer"))
    assert error.module in dict(model.named_modules())
    assert [remedy.kind for remedy in error.remedies] == ["budget"]  # nothing else leads to a plan in so few bytes
    text = str(error)
    assert text.startswith("1.00 KiB is too little: the smallest plan found needs ")
    assert f"({error.minimum_bytes} bytes)" in text
    assert all(remedy.text in text for remedy in error.remedies)

    made = memfit.plan(model, sample, squared_error, error.minimum_bytes, adamw, fixed=fixed)
    assert made.prediction.peak_bytes <= error.minimum_bytes
    with pytest.raises(InfeasibleError):
        memfit.replan(made, error.minimum_bytes - 1)


@pytest.mark.parametrize("optimizer", [adamw, lambda p: torch.optim.SGD(p, lr=0.1)], ids=["AdamW", "SGD"])
def test_every_way_out_works(optimizer: Any) -> None:
    model, sample = chain(2), rows(16)
    error = too_little(model, sample, fixed={"micro_batches": 1}, optimizer=optimizer)
    assert error.minimum_bytes is not None
    assert error.remedies
    for remedy in error.remedies:
        budget: Any = error.minimum_bytes - 1
        given, parts, makes = sample, 1, optimizer
        if remedy.text.startswith("budget="):
            budget = remedy.text.split('"')[1]
        elif remedy.text.startswith("fixed="):
            parts = json.loads(remedy.text.removeprefix("fixed="))["micro_batches"]
        elif remedy.text.startswith("a batch of 8 instead of 16"):
            given = rows(8)
        else:
            assert remedy.text.startswith("an optimizer without state")
            makes = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        memfit.plan(model, given, squared_error, budget, makes, fixed={"micro_batches": parts})


@pytest.mark.parametrize(
    "parts",
    [
        1,
        3,
    ],
)
def test_the_smallest_budget_is_true_when_trained(parts: int) -> None:
    model, sample, fixed = chain(2), rows(48), {"micro_batches": parts}
    error = too_little(model, sample, fixed=fixed)
    assert error.minimum_bytes is not None
    engine = memfit.fit(model, sample, squared_error, error.minimum_bytes, adamw, fixed=fixed)
    assert engine.rehearsal is not None
    assert engine.rehearsal.measured_peak_bytes <= error.minimum_bytes
    assert engine.rehearsal.rounds == 1
    engine.step(sample)


def test_one_sample_and_no_state_leave_fewer_ways_out() -> None:
    error = too_little(chain(2), rows(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert [r.text.startswith("budget=") for r in error.remedies] == [True]


# -- other arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (
            {"host_budget": 100, "fixed": {"state_place": "disk"}},
            "host_budget=100 is less than the optimizer state to be offloaded",
        ),
        (
            {"host_budget": 0, "fixed": {"state_place": "disk"}},
            "host_budget=0 is less than the optimizer state to be offloaded",
        ),
        (
            {"host_budget": 100, "fixed": {"streamed": "."}},
            "host_budget=100 is less than the layers and optimizer state to be offloaded",
        ),
        ({"host_budget": "much"}, "'much'"),
        ({"disk_budget": "1GiB"}, "and this plan is for a CPU, whose offloading to disk host_budget limits: give host"),
        ({"disk_budget": "1GiB", "host_budget": "1GiB"}, "whose offloading to disk host_budget limits: give host"),
        ({"disk_budget": "1GiB", "device": "rtx4090"}, "which was not given: give host_budget, too"),
        (
            {"disk_budget": "1GiB", "host_budget": "8MiB", "device": "rtx4090"},
            "host_budget='8MiB' is less than the 16.0 MiB of host memory that copies to the disk pass through: give more",
        ),
        (
            {"disk_budget": 100, "host_budget": "1GiB", "device": "rtx4090", "fixed": {"state_place": "disk"}},
            "disk_budget=100 is less than the optimizer state to be offloaded",
        ),
        ({"host_budget": "lots"}, "host_budget: 'lots' is not a number of bytes"),
        ({"allow": ["fp8"]}, "'fp8' is nothing that can be allowed"),
        ({"allow": None}, "allow=None is no list of words"),
        ({"freeze": None}, "freeze=None is no list of words"),
        ({"freeze": "0"}, "freeze='0' is one pattern: give a list of them"),
        ({"freeze": [0]}, "freeze=0 is no pattern"),
        ({"freeze": ["layers.0"]}, "freeze='layers.0' matches no module or parameter of this model; the nearest are 0"),
        ({"freeze": ["1"]}, "freeze='1' matches modules that hold no parameters"),
        ({"freeze": ["*"]}, "freeze=['*'] leaves no parameter to train"),
        ({"fixed": ["micro_batches"]}, "fixed=['micro_batches'] is no mapping: write names and values"),
        ({"fixed": {"layers": 3}}, "'layers' is no choice; there is 'micro_batches'"),
        ({"fixed": {"micro_batches": 0}}, "a whole number from 1 to the 16 samples"),
        ({"fixed": {"micro_batches": 17}}, "a whole number from 1 to the 16 samples"),
        ({"fixed": {"micro_batches": True}}, "a whole number from 1 to the 16 samples"),
        ({"fixed": {"micro_batches": "2"}}, "a whole number from 1 to the 16 samples"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: a positive number is needed"),
        ({"clip_norm": float("nan")}, "clip_norm=nan: a positive number is needed"),
        ({"device": "abacus"}, "no device called 'abacus' is known"),
        ({"device": "2xH100"}, "no device called '2xH100' is known; several are devices='2xH100'; known are"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(named: Any, sentence: str) -> None:
    model = chain(1)
    before = state_of(model)
    with pytest.raises(InputError, match=re.escape(sentence)):
        memfit.plan(model, rows(16), squared_error, "1GiB", adamw, **named)
    assert same(state_of(model), before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def momentless(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("named", "optimizer", "reason"),
    [
        ({"state_format": "8bit"}, momentless, "SGD without momentum keeps no state, so 8 bits would save nothing"),
        ({"state_format": "8bit"}, torch.optim.Adagrad, "Adagrad has no 8-bit state"),
        ({"state_format": "8bit"}, None, "there is no optimizer"),
        ({"state_place": "disk"}, momentless, "SGD without momentum keeps no state that could be offloaded"),
        ({"state_place": "disk"}, torch.optim.Adagrad, "the state of Adagrad stays on the device"),
        ({"state_place": "host"}, adamw, "the device is the CPU, whose memory is host memory"),
        (
            {"update": "in_backward"},
            torch.optim.LBFGS,
            "LBFGS is not known to update each parameter by itself",
        ),
        ({"update": "in_backward"}, None, "there is no optimizer"),
        ({"update": "in_backward", "precision": "fp16"}, adamw, "the gradient scaler must see all gradients before"),
        ({"streamed": "layers"}, adamw, "no repeated block was found under 'layers'"),
        ({"streamed": "."}, None, "and there is no optimizer: give one, or plan without streaming"),
        ({"streamed": ".", "state_format": "8bit"}, adamw, "streamed layers bring their own optimizer state along"),
        ({"loss_chunks": 4}, adamw, "this step takes no cross entropy of what a linear layer makes"),
    ],
)
def test_a_technique_that_cannot_be_is_named_with_the_reason(
    named: dict[str, Any], optimizer: Any, reason: str
) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        memfit.plan(chain(1), rows(16), squared_error, "1GiB", optimizer, fixed=named)


@pytest.mark.parametrize(
    ("word", "named", "optimizer", "reason"),
    [
        ("8bit", {}, momentless, "8bit: SGD without momentum keeps no state, so 8 bits would save nothing"),
        ("8bit", {}, None, "8bit: there is no optimizer"),
        ("8bit", {"streamed": "."}, adamw, "streamed layers bring their own optimizer state along, in 32 bits"),
        ("fp16", {"update": "in_backward"}, adamw, "the gradient scaler must see all gradients before"),
        ("fp16", {"streamed": "."}, adamw, "the gradient scaler must see all gradients before"),
    ],
)
def test_what_is_allowed_and_cannot_be_stands_in_the_plan(
    word: str, named: dict[str, Any], optimizer: Any, reason: str
) -> None:
    made = memfit.plan(
        chain(1), rows(16), squared_error, "1GiB", optimizer, allow=[word, word], fixed={"micro_batches": 1, **named}
    )
    assert sum(reason in text for text in made.rejected) == 1
    assert reason in made.explain()


@pytest.mark.parametrize(
    ("count", "host_budget", "reasons"),
    [
        (
            16,
            "1MiB",
            ["activation offloading: nothing that backward reads takes 64.0 KiB, and less is not worth a copy"],
        ),
        (
            2048,
            100,
            [
                "activation offloading: the tensors worth it take 256 KiB or more each, and 100 B may be used",
                "optimizer-state offloading: host_budget=100 is less than its ",
            ],
        ),
    ],
)
def test_room_below_that_is_of_no_use_is_told(count: int, host_budget: Any, reasons: list[str]) -> None:
    named: dict[str, Any] = {"host_budget": host_budget, "fixed": {"micro_batches": 1}}
    made = memfit.plan(chain(1), rows(count), squared_error, "1GiB", adamw, **named)
    error = too_little(chain(1), rows(count), **named)
    for reason in reasons:
        assert any(reason in text for text in made.rejected)
        assert reason in str(error)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_batch_that_holds_a_nested_tensor_is_refused_in_words(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    with pytest.raises(BatchError, match="holds a nested tensor, of which no samples can be taken"):
        memfit.plan(nn.Linear(4, 4), {"rows": nested, "labels": torch.ones(2)}, lambda m, b: m(b["rows"]).sum(), "1GiB")


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(BatchError, match="holds no tensor with a dimension"):
        memfit.plan(chain(1), {"n": 3}, squared_error, "1GiB")


@pytest.mark.parametrize(
    ("loss_fn", "sentence"),
    [
        (lambda m, b: m(b[0]), r"gave a tensor of shape \(16, 32\): return the loss alone, as one scalar tensor"),
        (lambda m, b: 3.0, "gave float: return the loss alone, as one scalar tensor"),
        (lambda m, b: squared_error(m, b).detach(), "does not depend on any trainable parameter"),
        (None, r"model\(\*\*sample\)\.loss gave"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss_fn: Any, sentence: str) -> None:
    model = chain(1) if loss_fn is not None else nn.Bilinear(32, 32, 4)
    with pytest.raises(InputError, match=sentence):
        memfit.plan(model, rows(16), loss_fn, "1GiB")


def _twice(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = squared_error(model, batch)
    loss.backward()
    return loss


class _Recurrent(nn.Module):
    """Goes on from its last state, whose graph it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.cell(x, self.state)
        return self.state


def test_a_graph_that_is_gone_is_told_without_the_advice_to_keep_it() -> None:
    gone = "backward came to a part of the graph that is gone: loss_fn returns the loss and leaves backward to memfit"
    with pytest.raises(InputError, match=gone):
        memfit.plan(chain(1), rows(16), _twice, "1GiB")
    shared = torch.nn.Parameter(torch.ones(2, 2))
    once = (shared @ shared).sum()
    for model, sample, loss_fn in (
        (_Recurrent(), torch.randn(3, 4), lambda m, b: m(b).square().mean()),
        (chain(1), rows(16), lambda m, b: squared_error(m, b) + once),
    ):
        with pytest.raises(InputError, match=gone):
            memfit.fit(model, sample, loss_fn, "1GiB", adamw, fixed={"micro_batches": 1})


def test_parts_of_what_does_not_split_are_refused() -> None:
    reasons = "(gradients of micro-batches do not add up|a part of the batch cannot be run alone)"
    with pytest.raises(SplitError, match=rf'fixed=\{{"micro_batches": 2\}} cannot be honoured: {reasons}'):
        memfit.plan(chain(1, batch_norm=True), rows(16), squared_error, "1GiB", fixed={"micro_batches": 2})


def test_a_model_on_meta_can_be_planned_for_but_not_trained() -> None:
    with torch.device("meta"):
        model = chain(2)
    made = memfit.plan(model, rows(64), squared_error, "1GiB", adamw)
    assert any("meta device" in note for note in made.notes)
    with pytest.raises(InputError, match="the model is on the meta device"):
        memfit.apply(made, model)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_model_that_was_moved_to_meta_is_told(*, accumulated: bool) -> None:
    model = chain(2)
    engine = memfit.fit(model, rows(64), squared_error, "1GiB", adamw, fixed={"micro_batches": 2})
    engine.step(rows(64))
    model.to("meta")
    for _ in range(2):
        with pytest.raises(InputError, match="the model was moved to the meta device, where it has no tensors"):
            engine.accumulate([rows(32), rows(32)]) if accumulated else engine.step(rows(64))


# -- the user's own errors -------------------------------------------------------------------------------------------------


class UsersError(Exception):
    """Raised by no code but these models'."""


class Faulty(nn.Module):
    """Fails in its forward, or in the backward of what it made."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner = nn.Linear(small.WIDTH, small.WIDTH)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.where == "forward":
            users_own_line()
        if self.where == "backward":
            y.register_hook(lambda _: users_own_line())
        return y


def users_own_line() -> None:
    raise UsersError("mine")


def failing_optimizer(_: Any) -> torch.optim.Optimizer:
    return users_own_line()  # type: ignore[func-returns-value, return-value]


def innermost(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].name


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "function", [memfit.plan, memfit.fit, memfit.frontier, memfit.measure], ids=lambda f: f.__name__
)
def test_an_error_of_the_model_is_the_users_own(function: Any, where: str) -> None:
    model = Faulty(where)
    before = state_of(model)
    with pytest.raises(UsersError) as caught:
        function(model, rows(16), squared_error)
    assert innermost(caught.value) == "users_own_line"
    assert caught.value.__cause__ is None
    assert same(state_of(model), before)


def test_an_error_of_the_loss_or_the_optimizer_is_the_users_own() -> None:
    with pytest.raises(UsersError) as caught:
        memfit.plan(chain(1), rows(16), lambda m, b: users_own_line(), "1GiB")  # type: ignore[arg-type, return-value]
    assert innermost(caught.value) == "users_own_line"
    with pytest.raises(UsersError) as caught:
        memfit.plan(chain(1), rows(16), squared_error, "1GiB", failing_optimizer)
    assert innermost(caught.value) == "users_own_line"


def test_a_shape_error_of_torch_comes_through_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        memfit.plan(chain(1), (torch.zeros(4, 5), torch.zeros(4, 5)), squared_error, "1GiB")
    assert type(caught.value) is RuntimeError


class WritesTooSoon(nn.Module):
    """Changes in place what exp saved for its backward: torch refuses the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(small.WIDTH, small.WIDTH)
        self.rest = chain(3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(0.1 * self.first(x))
        h.add_(1)
        y: Tensor = self.rest(h)
        return y


def test_a_model_that_torch_refuses_to_train_is_not_trained_wrongly() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared_error(WritesTooSoon(), rows()).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made = plan_at(0.5, WritesTooSoon(), rows())
        assert not made.script.plain
        memfit.apply(made, WritesTooSoon()).step(rows())


# -- batches ---------------------------------------------------------------------------------------------------------------


LARGER = r"up to \[.*\]: plan again"
OTHER = r"of another form, \[.*\] \(entries, dtypes, dimensions\): give them as the sample was"


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (rows(257), LARGER),
        ((torch.zeros(256, 33), torch.zeros(256, 32)), LARGER),
        (rows()[0], OTHER),
        ((*rows(), 3), OTHER),
        ({"x": rows()[0], "y": rows()[1]}, OTHER),
        (tuple(t.double() for t in rows()), OTHER),
        ((rows()[0], rows()[1][:, :, None]), OTHER),
    ],
    ids=["longer", "wider", "a tensor", "more", "a dict", "doubles", "more dimensions"],
)
def test_a_batch_other_than_planned_is_refused_and_nothing_changes(batch: Any, sentence: str) -> None:
    model = chain(batch_norm=True)
    engine = engine_for(model, batch_norm=True)
    engine.step(rows())
    gradients = [torch.full_like(p, 3.0) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before = state_of(model, engine.optimizer)
    with pytest.raises(BatchError, match=rf"the batch is \[.*\], the plan is for batches {sentence}"):
        engine.step(batch)
    assert same(state_of(model, engine.optimizer), before)
    assert all(p.grad is g and bool((g == 3).all()) for p, g in zip(model.parameters(), gradients, strict=True))
    assert engine.steps == len(engine.records) == 1


@pytest.mark.filterwarnings("ignore:a forward differed from the plan")
def test_a_smaller_batch_is_trained_plainly_right() -> None:
    one, other = chain(dropout=0.1), chain(dropout=0.1)
    engine, plain = engine_for(one, dropout=0.1), adamw(other.parameters())
    torch.manual_seed(1)
    engine.step(rows(100))
    torch.manual_seed(1)
    squared_error(other, rows(100)).backward()
    plain.step()
    assert same(state_of(one, engine.optimizer), state_of(other, plain))


# -- losses that are no numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "late"), [(1, False), (3, False), (1, True), (3, True)])
def test_a_loss_that_is_no_number_changes_nothing(
    parts: int,
    late: bool,  # noqa: FBT001 - a parameter
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is heard of after backward only (`late`), as on a GPU."""
    made = tight(batch_norm=True, dropout=0.1)
    named: dict[str, Any] = {"batch_norm": True, "dropout": 0.1}
    if parts > 1:  # splits only without batch norm
        named = {"dropout": 0.1}
        made = memfit.plan(chain(**named), rows(), squared_error, 1 << 40, adamw, fixed={"micro_batches": parts})
    one, other = chain(**named), chain(**named)
    engine, undisturbed = (memfit.apply(made, m, squared_error, adamw) for m in (one, other))
    torch.manual_seed(2)
    engine.step(rows())
    if late:
        monkeypatch.setattr(LossValue, "here", property(lambda _: False))
    x, y = rows()
    spoiled = y.clone()
    spoiled[-1, 0] = float("nan")  # in the last part
    before = state_of(one, engine.optimizer)
    with pytest.raises(NonFiniteLossError, match="the loss is nan"):
        engine.step((x, spoiled))
    assert same(state_of(one, engine.optimizer), before)
    assert all(p.grad is None for p in one.parameters())
    assert engine.steps == len(engine.records) == 1
    engine.step(rows())
    torch.manual_seed(2)
    for _ in range(2):
        undisturbed.step(rows())
    assert same(state_of(one, engine.optimizer), state_of(other, undisturbed.optimizer))


def test_a_part_without_labels_does_not_spoil_the_step() -> None:
    x = torch.randn(4, 8, small.WIDTH)
    labels = torch.randint(small.WIDTH, (4, 8))
    labels[0, 3:] = -100

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    model = chain(2)
    made = memfit.plan(model, {"x": x, "labels": labels}, loss_fn, 1 << 40, adamw, fixed={"micro_batches": 4})
    assert made.choices.weights == "tokens:labels"
    labels = labels.clone()
    labels[2] = -100
    whole = loss_fn(model, {"x": x, "labels": labels}).item()
    record = memfit.apply(made, model).step({"x": x, "labels": labels})
    assert record.loss == pytest.approx(whole, rel=1e-5)


def test_labels_ignored_only_in_a_later_batch_are_weighted_right() -> None:
    x, labels = torch.randn(4, 8, small.WIDTH), torch.randint(1, small.WIDTH, (4, 8))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    model = chain(1)
    made = memfit.plan(model, (x, labels), loss_fn, 1 << 40, adamw, fixed={"micro_batches": 4})
    later = labels.clone()
    later[0, 1:] = -100
    whole = loss_fn(model, (x, later)).item()
    assert memfit.apply(made, model).step((x, later)).loss == pytest.approx(whole, rel=1e-5)


# -- plan files ------------------------------------------------------------------------------------------------------------


def test_a_plan_file_for_another_model_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    tight().save(tmp_path / "plan.json")

    def never(_: Any) -> torch.optim.Optimizer:
        raise AssertionError

    with pytest.raises(PlanFileError, match="Plan again for this model"):
        memfit.apply(memfit.Plan.load(tmp_path / "plan.json"), chain(5), squared_error, never)


# -- rehearsals ------------------------------------------------------------------------------------------------------------


def fit(model: nn.Module, optimizer: Any = sgd) -> memfit.Engine:
    return memfit.fit(model, rows(), squared_error, tight(batch_norm=True, dropout=0.1).budget_bytes + 4096, optimizer)


def temporary_files() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("memfit-rehearsal-")}


def test_a_rehearsal_leaves_no_trace() -> None:
    model = chain(batch_norm=True, dropout=0.1)
    before, files = state_of(model), temporary_files()
    engine = fit(model)
    assert same(state_of(model), before)
    assert engine.rehearsal is not None
    assert engine.rehearsal.divergences == ()
    assert engine.optimizer is not None
    assert not engine.optimizer.state
    assert engine.steps == 0
    assert engine.records == []
    assert all(p.grad is None for p in model.parameters())
    assert temporary_files() == files


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(_: object, name: str) -> None:
    Path(name).write_bytes(b"half")
    raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")  # what torch makes of it


@pytest.mark.parametrize("failure", [full_disk, half_written])
def test_a_full_disk_stops_a_rehearsal_with_a_sentence(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(batch_norm=True, dropout=0.1)
    before, files = state_of(model), temporary_files()
    monkeypatch.setattr(torch, "save", failure)
    with pytest.raises(SnapshotError, match="could not write it .*free some disk space, set TMPDIR, or use"):
        fit(model)
    assert same(state_of(model), before)
    assert temporary_files() == files


@pytest.mark.parametrize("error", [UsersError, KeyboardInterrupt])
def test_a_rehearsal_that_fails_puts_everything_back(error: type[BaseException]) -> None:
    model = chain(batch_norm=True, dropout=0.1)
    before, files = state_of(model), temporary_files()
    calls = 0

    class Stops(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            nonlocal calls
            super().step(closure)
            calls += (
                torch.is_tensor(self.param_groups[0]["params"][0])
                and type(self.param_groups[0]["params"][0].data) is Tensor
            )

    made = tight(batch_norm=True, dropout=0.1)
    engine = memfit.apply(made, model, squared_error, Stops(model.parameters(), lr=0.1, momentum=0.9))
    original = engine.step

    def second_fails(batch: Any, *, meter: bool = False) -> Any:
        if meter:
            raise error
        return original(batch)

    engine.step = second_fails  # type: ignore[method-assign, assignment]
    with pytest.raises(error):
        memfit.api.rehearse(engine, rows())
    assert same(state_of(model), before)
    assert engine.optimizer is not None
    assert not engine.optimizer.state
    assert engine.steps == 0
    assert temporary_files() == files


def test_a_rehearsal_leaves_gradients_that_were_there() -> None:
    model = chain(batch_norm=True, dropout=0.1)
    squared_error(model, rows()).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    fit(model)
    assert same([p.grad for p in model.parameters() if p.grad is not None], before)


def test_a_rehearsal_works_with_any_options_of_the_optimizer() -> None:
    model = chain(batch_norm=True, dropout=0.1)
    before = state_of(model)
    fit(model, lambda parameters: torch.optim.SGD(parameters, lr=np.float64(0.1)))
    assert same(state_of(model), before)


# -- interrupts ------------------------------------------------------------------------------------------------------------


def undisturbed(steps: int, **named: Any) -> list[Tensor]:
    """State after this many steps from seed 2."""
    model = chain(**named)
    engine = engine_for(model, **named)
    torch.manual_seed(2)
    for _ in range(steps):
        engine.step(rows())
    return state_of(model, engine.optimizer)


class Stopper:
    """Fails at one moment of a step, when armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.armed = ""

    def at(self, moment: str) -> None:
        if self.armed == moment:
            raise self.error

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        half = model[:8](x)  # type: ignore[index]
        self.at("forward")
        half.register_hook(lambda _: self.at("backward"))
        loss = nn.functional.mse_loss(model[8:](half), y)  # type: ignore[index]
        self.at("loss")
        return loss


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsersError])
@pytest.mark.parametrize("moment", ["forward", "loss", "backward"])
def test_a_step_that_is_stopped_did_not_happen(moment: str, error: type[BaseException]) -> None:
    named = {"batch_norm": True, "dropout": 0.1}
    stopper, model = Stopper(error), chain(**named)  # type: ignore[arg-type]
    engine = engine_for(model, stopper.loss, **named)
    torch.manual_seed(2)
    engine.step(rows())
    before = state_of(model, engine.optimizer)
    for _ in range(2):
        stopper.armed = moment
        with pytest.raises(error):
            engine.step(rows())
        assert same(state_of(model, engine.optimizer), before)
        assert all(p.grad is None for p in model.parameters())
    stopper.armed = ""
    record = engine.step(rows())
    assert record.step == 2
    assert record.divergences == ()
    assert same(state_of(model, engine.optimizer), undisturbed(2, **named))


class Pressed(torch.optim.SGD):
    """Somebody presses Ctrl-C in the middle of its step."""

    pressed = True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.pressed:
            os.kill(os.getpid(), signal.SIGINT)
        super().step(closure)


@pytest.fixture
def default_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def after_one_step(**named: Any) -> list[Tensor]:
    model = chain(**named)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    engine_for(model, optimizer=optimizer, **named).step(rows())
    return state_of(model, optimizer)


def press_in_update(**named: Any) -> list[Tensor]:
    model = chain(**named)
    optimizer = Pressed(model.parameters(), lr=0.1)
    engine = engine_for(model, optimizer=optimizer, **named)
    torch.manual_seed(2)
    with pytest.raises(KeyboardInterrupt):
        engine.step(rows())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return state_of(model, optimizer)


def test_an_interrupt_during_the_update_waits_for_its_end(default_interrupts: None) -> None:
    assert same(press_in_update(), after_one_step())


def test_an_interrupt_during_the_update_leaves_a_whole_step(default_interrupts: None) -> None:
    named = {"batch_norm": True, "dropout": 0.1}
    assert same(press_in_update(**named), after_one_step(**named))


def test_a_step_that_ended_before_its_interrupt_counts(default_interrupts: None) -> None:
    model = chain()
    engine = engine_for(model, optimizer=Pressed(model.parameters(), lr=0.1))
    with pytest.raises(KeyboardInterrupt):
        engine.step(rows())
    assert engine.steps == len(engine.records) == 1


# -- people with their own loop --------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module, loss: Tensor, **named: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **named))


def forward(model: nn.Module, around: Any = None, loss_fn: Any = squared_error) -> Tensor:
    batch = rows()
    torch.manual_seed(4)
    with around or nullcontext() as follower:
        loss: Tensor = loss_fn(model, batch)
    assert follower is None or follower.divergence is None
    return loss


def test_backward_may_run_twice_when_it_was_said_so() -> None:
    model = chain(dropout=0.1)
    engine = engine_for(model, dropout=0.1)
    right = gradients_of(model, forward(model))
    loss = forward(model, engine.forward(retain_graph=True))
    for retain in (True, True, False):
        assert same(gradients_of(model, loss, retain_graph=retain), right)


@pytest.mark.parametrize("fraction", [0.3, 0.6])
def test_backward_run_twice_without_saying_so_is_told_what_to_say(fraction: float) -> None:
    model = chain(dropout=0.1)
    made = plan_at(fraction, model, rows())
    loss = forward(model, memfit.apply(made, model).forward())
    gradients_of(model, loss, retain_graph=True)
    with pytest.raises(EngineError, match=r"For a second backward .* use `with engine\.forward\(retain_graph=True\)`"):
        gradients_of(model, loss)


@pytest.mark.parametrize(
    "dropout",
    [
        0.0,
        0.1,
    ],
)
def test_backward_run_twice_without_saying_so_is_right_or_refused(dropout: float) -> None:
    """The smallest plan makes nearly everything again, so a second time too; then the numbers must be those of the first."""
    model = chain(dropout=dropout)
    loss = forward(model, engine_for(model, dropout=dropout).forward())
    first = gradients_of(model, loss, retain_graph=True)
    try:
        second = gradients_of(model, loss)
    except EngineError:
        return
    assert same(first, second)


def squared_gradients(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.stack([g.square().sum() for g in gradients_of(model, loss, create_graph=True)]).sum()


def test_gradients_of_gradients_are_right_when_it_was_said_so() -> None:
    model = chain()
    engine = engine_for(model)
    right = gradients_of(model, squared_gradients(model, forward(model)))
    found = gradients_of(model, squared_gradients(model, forward(model, engine.forward(retain_graph=True))))
    assert same(found, right)
    refused = []
    for share in (0.4, 0.5, 0.6, 0.7):  # a plan that drops little may have all that is asked for a second time
        engine = memfit.apply(plan_at(share, model, rows()), model)
        try:
            found = gradients_of(model, squared_gradients(model, forward(model, engine.forward())))
        except EngineError as error:
            refused.append(str(error))
        else:
            assert same(found, right)
    assert refused
    assert all("retain_graph=True" in why for why in refused)


def test_backward_through_half_of_the_graph_is_right() -> None:
    """Gradients of the last layers only: most of what was planned is never asked for."""
    model = chain(dropout=0.1)
    engine = engine_for(model, dropout=0.1)
    last = list(model[-5].parameters())
    right = torch.autograd.grad(forward(model), last)
    found = torch.autograd.grad(forward(model, engine.forward()), last)
    assert same(list(found), list(right))


def test_an_exception_in_mid_forward_leaves_nothing_behind() -> None:
    model = chain(dropout=0.1)
    engine = engine_for(model, dropout=0.1)
    right = gradients_of(model, forward(model))
    stopper = Stopper(UsersError)
    stopper.armed = "forward"
    batch = rows()
    with pytest.raises(UsersError), engine.forward():
        stopper.loss(model, batch)
    assert same(gradients_of(model, forward(model)), right)  # no hook or mode is left
    assert same(gradients_of(model, forward(model, engine.forward())), right)


def with_regions(model: nn.Module, batch: Any) -> Tensor:
    """A teacher without gradients and one layer in eval mode, inside of the loss."""
    x, y = batch
    with torch.no_grad():
        target = model(x).tanh()
    with torch.inference_mode():
        scale = float(model(x).abs().mean())
    model[4].eval()  # type: ignore[index]
    student = model(x)
    model[4].train()  # type: ignore[index]
    return nn.functional.mse_loss(student, y + 0.1 * target) / (1 + 0 * scale)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_regions_without_gradient_and_in_eval_mode_are_followed(fraction: float) -> None:
    model = chain(dropout=0.3)
    made = plan_at(fraction, model, rows(), with_regions)
    assert not made.script.plain
    engine = memfit.apply(made, model)
    right = gradients_of(model, forward(model, None, with_regions))
    assert same(gradients_of(model, forward(model, engine.forward(), with_regions)), right)


def test_two_engines_may_take_turns() -> None:
    one, other = chain(dropout=0.1), chain(dropout=0.1)
    engines = [engine_for(m, dropout=0.1) for m in (one, other)]
    right = gradients_of(one, forward(one))
    first, second = forward(one, engines[0].forward()), forward(other, engines[1].forward())
    assert same(gradients_of(one, first), right)
    assert same(gradients_of(other, second), right)


def test_one_engine_inside_another_is_right() -> None:
    one, other = chain(dropout=0.1), chain(dropout=0.1)
    engines = [engine_for(m, dropout=0.1) for m in (one, other)]
    parameters = [*one.parameters(), *other.parameters()]

    batch = rows()

    def both(contexts: Callable[[int], Any]) -> list[Tensor]:
        torch.manual_seed(4)
        with contexts(0):
            a = squared_error(one, batch)
            with contexts(1):
                b = squared_error(other, batch)
            return list(torch.autograd.grad(a + 2 * b, parameters))

    assert same(both(lambda i: engines[i].forward()), both(lambda _: nullcontext()))


def test_one_engine_for_two_forwards_before_backward_is_right() -> None:
    model = chain(dropout=0.1)
    engine = engine_for(model, dropout=0.1)
    right = gradients_of(model, forward(model))
    losses = [forward(model, engine.forward()) for _ in range(2)]
    assert all(same(gradients_of(model, loss), right) for loss in losses)


def changed_between(layer: int, around: Any, model: nn.Sequential) -> None:
    loss = forward(model, around)
    with torch.no_grad():
        model[layer].weight.add_(1.0)  # type: ignore[operator, union-attr]
    loss.backward()


LINEAR = [i for i, layer in enumerate(chain(4)) if isinstance(layer, nn.Linear)]


def refuses(layer: int) -> bool:
    model = chain()
    try:
        changed_between(layer, engine_for(model).forward(), model)
    except RuntimeError:
        return True
    return False


def test_parameters_changed_between_forward_and_backward_are_noticed() -> None:
    for layer in LINEAR[1:]:  # torch does not need the first one: its input wants no gradient
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changed_between(layer, None, chain())
    assert [layer for layer in LINEAR[1:] if not refuses(layer)] == []


def test_a_parameter_that_a_rerun_reads_is_checked() -> None:
    assert any(refuses(layer) for layer in LINEAR)
    model = chain()
    layer = next(layer for layer in LINEAR if refuses(layer))
    with pytest.raises(RuntimeError, match=r"shape \(32, 32\) .*(was changed in place|expected version)"):
        changed_between(layer, engine_for(model).forward(), model)


# -- modes changed under an engine -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:a forward differed from the plan", "ignore:no plan for the path that a step took fits"
)
@pytest.mark.parametrize("layers", [slice(None), slice(1, 2)], ids=["all", "one batch norm"])
def test_a_model_put_in_eval_mode_is_trained_plainly_right(layers: slice) -> None:
    one, other = chain(batch_norm=True), chain(batch_norm=True)
    engine, plain = engine_for(one, batch_norm=True), adamw(other.parameters())
    for model in (one, other):
        model[layers].eval()
    engine.step(rows())
    squared_error(other, rows()).backward()
    plain.step()
    assert same(state_of(one, engine.optimizer), state_of(other, plain))


def test_gradients_left_over_are_part_of_the_update_as_in_torch() -> None:
    """`zero_grad` is the user's, as in a loop of their own; after a step no gradient is left."""
    one, other = chain(), chain()
    engine, plain = engine_for(one), adamw(other.parameters())
    for model in (one, other):
        squared_error(model, rows()).backward()
    engine.step(rows())
    squared_error(other, rows()).backward()
    plain.step()
    assert same(state_of(one, engine.optimizer), state_of(other, plain))
    assert all(p.grad is None for p in one.parameters())
