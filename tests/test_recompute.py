"""Recomputation placed by hand does what it says, and no worse than torch's own on the same units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memfit
from memfit import batches
from memfit.capture.trace_source import RNG_STATE_BYTES
from memfit.meter import metered
from memfit.planner.baselines.segment_rules import sqrt_segments
from memfit.planner.modules import module_calls, outputs_read_later, repeated_blocks
from memfit.planning import planning_of
from memfit.step.program import state_tensors
from models import build_gpt, case
from models.outcome import measured_peak, outcome_of
from small import WIDTH, adamw, chain, rows, squared_error
from sweeps import by_turns

pytestmark = pytest.mark.usefixtures("one_thread")

UNITS: dict[str | int, Callable[[int], tuple[int, ...]]] = {
    "block": lambda count: tuple(range(count)),
    2: lambda count: tuple(range(0, count, 2)),
    "sqrt": sqrt_segments,
}


def gpt() -> Any:
    return build_gpt(layers=5, hidden=64, heads=4, batch=8, tokens=64, vocab=256)


def bert() -> Any:
    """Dropout 0.1: torch keeps a generator state for each unit, memfit one for each operation that draws."""
    return case("bert_eager").build()


class Unit(nn.Module):
    """Blocks called one after another."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **named: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **named)
        return x


class Checkpointed(nn.Module):
    """A unit under torch's checkpoint."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, *args: Any, **named: Any) -> Any:
        return checkpoint(self.unit, *args, use_reentrant=False, **named)


def checkpointed(model: nn.Module, path: str, starts: tuple[int, ...]) -> None:
    blocks = list(model.get_submodule(path))  # type: ignore[call-overload]
    units = [blocks[a:b] for a, b in zip(starts, (*starts[1:], len(blocks)), strict=True)]
    holder, _, name = path.rpartition(".")
    setattr(model.get_submodule(holder), name, nn.ModuleList(Checkpointed(Unit(unit)) for unit in units))


def torch_peak_and_flops(model: nn.Module, sample: Any, loss_fn: Any) -> tuple[int, int]:
    """Peak of a second step, as memfit's are measured, and what forward and backward multiply."""
    optimizer = adamw(model.parameters())
    for _ in range(2):
        present = [*model.parameters(), *model.buffers(), *batches.leaves(sample), *state_tensors(optimizer)]
        with metered(present) as reading:
            batches.loss_of(model, sample, loss_fn).backward()
            optimizer.step()
            optimizer.zero_grad()
    with FlopCounterMode(display=False) as counted:
        batches.loss_of(model, sample, loss_fn).backward()
    return reading.peak_bytes, counted.get_total_flops()


SUBJECTS: dict[str, tuple[Callable[[], Any], str]] = {"gpt": (gpt, "blocks"), "bert": (bert, "bert.encoder.layer")}


@pytest.mark.alternate(0)
@pytest.mark.parametrize(("every", "subject"), by_turns(UNITS, SUBJECTS), ids=str)
def test_blocks_placed_by_hand_are_no_worse_than_under_torchs_checkpoint(every: str | int, subject: str) -> None:
    build, path = SUBJECTS[subject]
    model, sample, loss_fn = build()
    made = memfit.recompute(model, sample, loss_fn, adamw, every=every)
    found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
    assert found.divergence is None
    assert found.differs(outcome_of(model, sample, loss_fn)) is None
    measured = measured_peak(made, model, sample, loss_fn, adamw)
    assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.0001)
    rival, _, _ = build()
    checkpointed(rival, path, UNITS[every](len(rival.get_submodule(path))))  # type: ignore[arg-type]
    peak, flops = torch_peak_and_flops(rival, sample, loss_fn)
    # torch keeps one generator state for a unit, memfit one for each operation that draws; all else counts.
    states = RNG_STATE_BYTES["cpu"] * len(made.script.random)
    assert measured <= peak + states
    assert (states == 0) == (build is gpt)
    assert flops_of(made, model, sample, loss_fn) <= flops
    assert made.prediction.peak_bytes < made.prediction.plain_peak_bytes


def flops_of(made: memfit.Plan, model: nn.Module, sample: Any, loss_fn: Any) -> int:
    """Recomputations are hidden from modes that are on, so they are counted from the plan: an operation run again costs what it cost in forward."""
    with FlopCounterMode(display=False) as counted:
        batches.loss_of(model, sample, loss_fn).backward()
    for parameter in model.parameters():
        parameter.grad = None
    trace = planning_of(made).solver(1).trace
    products = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
    assert any(name in products for name in made.script.operations)
    forward = [trace.operations[e] for e in trace.events[: trace.forward_events] if e >= 0]
    again = 0
    for step in made.script.steps:
        for number in (n for run in step.runs for n in run):
            if forward[number].name in products:
                again += product_flops(forward[number].key)
    return counted.get_total_flops() + again


def product_flops(key: str) -> int:
    """Twice the product of batch, rows, columns and length of a matrix product described as capture does."""
    shapes = [[int(n) for n in found.split(",")] for found in re.findall(r"float32\[([\d, ]+)\]", key)]
    a, b = shapes[-2:]
    return 2 * math.prod((*a, b[-1]))


def test_flops_are_counted_as_torch_counts_them() -> None:
    trace = memfit.record(*gpt(), None, micro_batches=1).trace  # type: ignore[call-arg, arg-type, misc]
    forward = [trace.operations[e] for e in trace.events[: trace.forward_events] if e >= 0]
    model, sample, loss_fn = gpt()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        loss_fn(model, sample)
    products = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}
    assert sum(product_flops(op.key) for op in forward if op.name in products) == counted.get_total_flops()


# -- outputs that are kept -------------------------------------------------------------------------------------------------


def test_the_outputs_of_named_modules_are_kept_and_what_lies_between_is_rebuilt() -> None:
    model, sample, loss_fn = gpt()
    made = memfit.recompute(model, sample, loss_fn, adamw, keep=["blocks.*.attention"])
    solver = planning_of(made).solver(1)
    recipes, trace = solver.recipes, solver.trace
    calls = module_calls(trace)
    kept = {s for n in range(5) for call in calls[f"blocks.{n}.attention"] for s in outputs_read_later(recipes, call)}
    number = {op: i for i, op in enumerate(e for e in trace.events[: trace.forward_events] if e >= 0)}
    rerun = {operation for step in made.script.steps for run in step.runs for operation in run}
    remade = {s for op, i in number.items() if i in rerun for s in trace.operations[op].makes}
    assert len(kept) == 5
    assert kept.isdisjoint(remade)
    last = calls["blocks.4.attention"][0].last
    dropped = {s for s in recipes.saved & recipes.rebuildable if trace.storages[s].birth < last}
    crossing = {
        s
        for s in dropped
        if any(
            trace.storages[s].birth <= c.last < recipes.last_reads.get(s, -1)
            for n in range(5)
            for c in calls[f"blocks.{n}.attention"]
        )
    }
    assert dropped - crossing <= remade
    assert max(made.script.recorded) <= number[trace.events[last]]
    found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
    assert found.differs(outcome_of(model, sample, loss_fn)) is None
    assert measured_peak(made, model, sample, loss_fn, adamw) == pytest.approx(made.prediction.peak_bytes, rel=0.0001)


def test_each_operation_runs_again_at_most_once() -> None:
    made = memfit.recompute(*gpt(), adamw, keep="blocks.*")  # type: ignore[misc, arg-type]
    runs = [operation for step in made.script.steps for run in step.runs for operation in run]
    assert len(runs) == len(set(runs)) > 0


def test_leading_names_may_be_left_out() -> None:
    model, sample, loss_fn = bert()
    short = memfit.recompute(model, sample, loss_fn, adamw, keep=["encoder.layer.*"])
    whole = memfit.recompute(model, sample, loss_fn, adamw, keep=["bert.encoder.layer.[0-2]"])
    assert short.script == whole.script


def test_what_must_not_run_twice_stays_and_is_named() -> None:
    class Watched(nn.Module):
        """Its result depends on what it has seen."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) * x

    model = chain(4)
    for place in (4, 2):
        model.insert(place, Watched())
    made = memfit.recompute(model, rows(), squared_error, adamw, keep=["0", "9"])
    assert any("must not run twice: in 2, 5" in note for note in made.notes), made.notes
    found = outcome_of(model, rows(), squared_error, memfit.apply(made, model, squared_error, None))
    assert found.differs(outcome_of(model, rows(), squared_error)) is None


# -- blocks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.alternate(0)
@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("gpt", ["blocks.0", "blocks.1", "blocks.2"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("resnet", [f"stages.{n}" for n in range(6)]),
        ("unet", ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2"]),
        ("lstm", []),
    ],
)
def test_repeated_blocks_are_found(name: str, paths: list[str]) -> None:
    trace = memfit.record(*case(name).build(), None, micro_batches=1).trace
    assert [call.path for call in repeated_blocks(trace)] == paths


def test_a_module_that_runs_again_at_once_is_as_many_blocks() -> None:
    class Again(nn.Module):
        """One layer in a list, called three times."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([chain(1)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.layers[0](x)
            return x

    trace = memfit.record(Again(), rows(), squared_error, None, micro_batches=1).trace
    assert [call.path for call in repeated_blocks(trace)] == ["layers.0"] * 3


def test_blocks_of_two_kinds_in_turn_are_repeated_and_one_of_its_own_kind_is_not() -> None:
    """As where attention and state spaces, or windows and whole rows, take turns."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.back = nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.back(self.wide(x[:, None]).tanh())[:, 0]
            return x + y

    def gated() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())

    model = nn.Sequential(*(chain(1) if number % 2 else gated() for number in range(5)), Odd(), gated(), chain(1))
    trace = memfit.record(model, rows(), squared_error, None, micro_batches=1).trace
    assert [call.path for call in repeated_blocks(trace)] == ["0", "1", "2", "3", "4", "6", "7"]
    made = memfit.recompute(model, rows(), squared_error, adamw, every="block")
    assert made.script.recomputations
    found = outcome_of(model, rows(), squared_error, memfit.apply(made, model, squared_error, None))
    assert found.differs(outcome_of(model, rows(), squared_error)) is None


# -- a budget for activations ----------------------------------------------------------------------------------------------


def test_activations_stay_within_their_own_budget_and_less_is_never_faster() -> None:
    model, sample, loss_fn = gpt()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, None, fixed={"micro_batches": 1})
    most = max(plain.prediction.curve["activation"])
    seconds = plain.prediction.step_seconds
    for part in (0.7, 0.4):
        asked = int(part * most)
        made = memfit.recompute(model, sample, loss_fn, adamw, activation_bytes=asked)
        assert 0 < max(made.prediction.curve["activation"]) <= asked
        assert made.prediction.step_seconds >= seconds
        seconds = made.prediction.step_seconds
        assert measured_peak(made, model, sample, loss_fn, adamw) == pytest.approx(
            made.prediction.peak_bytes, rel=0.0001
        )


def test_too_few_activation_bytes_name_how_many_would_do() -> None:
    with pytest.raises(memfit.InfeasibleError, match="activation_bytes=1000 is too little") as caught:
        memfit.recompute(chain(), rows(), squared_error, adamw, activation_bytes=1000)
    least = caught.value.minimum_bytes
    assert least is not None
    memfit.recompute(chain(), rows(), squared_error, adamw, activation_bytes=least)
    with pytest.raises(memfit.InfeasibleError):
        memfit.recompute(chain(), rows(), squared_error, adamw, activation_bytes=least - 1)


# -- a plan like any other -------------------------------------------------------------------------------------------------


def test_a_plan_by_hand_is_explained_saved_and_kept_to_for_other_batches(tmp_path: Any) -> None:
    model, sample, loss_fn = gpt()
    made = memfit.recompute(model, sample, loss_fn, adamw, every="sqrt", fixed={"micro_batches": 2})
    assert made.choices.micro_batches == 2
    assert "placed by hand: of 5 blocks (blocks.0, blocks.1, blocks.2 and 2 more), 3 at a time" in made.explain()
    made.save(tmp_path / "plan.json")
    assert memfit.Plan.load(tmp_path / "plan.json") == made
    engine = memfit.apply(made, model)
    assert engine.planner is not None
    smaller = tuple(t[:6] for t in sample)
    assert any("placed by hand" in note for note in engine.planner(smaller).notes)
    assert engine.step(sample).recomputations == 2 * made.script.recomputations


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({}, "recompute was given nothing to go by: exactly one of"),
        ({"keep": "blocks.*", "every": 2}, "recompute was given keep and every: exactly one of"),
        ({"keep": []}, "module paths are needed"),
        ({"every": "second"}, 'every=\'second\': "block", "sqrt" or a number'),
        ({"every": 0}, "every=0"),
        ({"keep": "layers.*"}, "matches no module that runs in forward; the nearest are: "),
        ({"every": "block"}, "every='block' needs repeated blocks, and this model has none"),
        (
            {"keep": "0", "fixed": {"streamed": "."}},
            "fixed streamed='.' cannot be honoured by recompute: streamed layers are",
        ),
        (
            {"keep": "0", "fixed": {"loss_chunks": 2}},
            "fixed loss_chunks=2 cannot be honoured: this step takes no cross",
        ),
        (
            {"keep": "0", "fixed": {"update": "in_backward"}, "clip_norm": 1.0},
            "clipping needs the norm of all gradients",
        ),
        ({"activation_bytes": "much"}, "is not a number of bytes"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_words(named: dict[str, Any], words: str) -> None:
    with pytest.raises(memfit.InputError) as caught:
        memfit.recompute(chain(), rows(), squared_error, adamw, **named)
    assert words in str(caught.value)


def test_an_output_that_nothing_reads_is_nothing_to_keep() -> None:
    class Loose(nn.Module):
        """Its last layer's result goes nowhere."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.loose = chain(1), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            self.loose(y)
            return y

    with pytest.raises(memfit.InputError, match="nothing that they make is read by other modules"):
        memfit.recompute(Loose(), rows(), squared_error, adamw, keep="loose")
