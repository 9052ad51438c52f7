"""The cases keep what they promise, so that a failure elsewhere is memfit's and not the model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from . import CASES, Built, Case, Sample, build_gpt, case, loss_of
from .programs import OPERATIONS, Instruction, Program, ProgramBuilt, program_loss, programs

CASE_NAMES = [each.name for each in CASES]
SPLIT_NAMES = [each.name for each in CASES if each.splits]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves behind."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


def step(build: Callable[[], Built]) -> Outcome:
    """Build, seed, run one forward and backward pass."""
    model, sample, loss_fn = build()
    torch.manual_seed(1)
    loss = loss_of(model, sample, loss_fn)
    loss.backward()
    return Outcome(loss.detach(), {name: each.grad for name, each in model.named_parameters()}, model.state_dict())


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal to the last bit, or both absent."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def tensors_of(sample: Sample) -> list[Tensor]:
    """The tensors of a batch, in its order."""
    if isinstance(sample, Tensor):
        return [sample]
    return list(sample.values() if isinstance(sample, dict) else sample)


def like(sample: Sample, tensors: list[Tensor]) -> Sample:
    """The inverse of `tensors_of`."""
    if isinstance(sample, Tensor):
        return tensors[0]
    return dict(zip(sample, tensors, strict=True)) if isinstance(sample, dict) else tuple(tensors)


def test_names_are_unique_and_find_their_case() -> None:
    assert len(set(CASE_NAMES)) == len(CASE_NAMES)
    assert all(case(each.name) is each for each in CASES)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no case is named 'gtp'; there are gpt, gpt_dropout"):
        case("gtp")


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_step_is_finite_and_gives_gradients(name: str) -> None:
    outcome = step(case(name).build)
    assert outcome.loss.shape == ()
    assert outcome.loss.isfinite()
    gradients = [each for each in outcome.gradients.values() if each is not None]
    assert gradients
    assert all(bool(each.isfinite().all()) for each in gradients)


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", [each.name for each in CASES if each.bit_exact])
def test_two_steps_from_one_seed_are_bit_equal(name: str) -> None:
    one, other = step(case(name).build), step(case(name).build)
    assert same_bits(one.loss, other.loss)
    assert {key for key in one.gradients if not same_bits(one.gradients[key], other.gradients[key])} == set()
    assert {key for key in one.state if not same_bits(one.state[key], other.state[key])} == set()


@pytest.mark.alternate(2)
@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_step_leaves_its_batch_alone(name: str) -> None:
    model, sample, loss_fn = case(name).build()
    before = [each.clone() for each in tensors_of(sample)]
    loss_of(model, sample, loss_fn).backward()
    assert all(same_bits(one, other) for one, other in zip(before, tensors_of(sample), strict=True))


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", SPLIT_NAMES)
def test_a_case_that_splits_is_the_weighted_mean_of_its_parts(name: str) -> None:
    whole, parts = _gradients_whole_and_in_parts(case(name))
    # Autocast rounds each part on its own to 8 bits; the other cases differ by the order of sums alone.
    tolerance = 3e-2 if "bf16" in name or "amp" in name else 1e-4
    scale = max(each.abs().max().item() for each in whole)
    differences = [(one - other).abs().max().item() for one, other in zip(whole, parts, strict=True)]
    assert max(differences) <= tolerance * scale


@pytest.mark.parametrize("name", [each.name for each in CASES if not each.splits and each.name != "item_control_flow"])
def test_a_case_that_does_not_split_is_not_the_mean_of_its_parts(name: str) -> None:
    whole, parts = _gradients_whole_and_in_parts(case(name), train=True)
    scale = max(each.abs().max().item() for each in whole)
    assert max((one - other).abs().max().item() for one, other in zip(whole, parts, strict=True)) > 1e-3 * scale


def _gradients_whole_and_in_parts(each: Case, *, train: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of one batch, and of its two uneven parts weighted; without dropout unless `train`."""
    model, sample, loss_fn = each.build()
    model.train(train)
    tensors = tensors_of(sample)
    cut = len(tensors[0]) // 4
    parts = [like(sample, [one[:cut] for one in tensors]), like(sample, [one[cut:] for one in tensors])]

    def gradients(batches: list[Sample]) -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            share = each.weight(batch) / each.weight(sample)
            (loss_of(model, batch, loss_fn) * share).backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    return gradients([sample]), gradients(parts)


def test_both_branches_of_item_control_flow_are_taken() -> None:
    model, sample, _ = case("item_control_flow").build()
    assert isinstance(model, nn.Sequential)
    x = tensors_of(sample)[0]
    spreads = []
    for layer in model:
        spreads.append(x.std().item())
        x = layer(x)
    assert min(spreads) < 1.25 < max(spreads)
    assert all(abs(each - 1.25) > 0.01 for each in spreads)  # no branch hangs on rounding


def test_tied_weights_are_one_parameter() -> None:
    model, _, _ = build_gpt(layers=1, hidden=8, heads=2, batch=2, tokens=4, vocab=16, tied=True)
    names = [
        name for name, _ in model.named_parameters(remove_duplicate=False) if name in {"token.weight", "head.weight"}
    ]
    assert len(names) == 2
    assert model.get_parameter("token.weight") is model.get_parameter("head.weight")


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(built=programs())
def test_a_drawn_program_gives_the_same_bits_twice(built: ProgramBuilt) -> None:
    drawn, sample, loss_fn = built
    before = sample.clone()
    one, other = (step(lambda: (Program(drawn.instructions, drawn.seed), sample, loss_fn)) for _ in range(2))
    assert one.loss.isfinite()
    assert any(each is not None for each in one.gradients.values())
    assert same_bits(one.loss, other.loss)
    assert all(same_bits(one.gradients[key], other.gradients[key]) for key in one.gradients)
    assert same_bits(before, sample)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_runs_in_a_program(name: str) -> None:
    operation = OPERATIONS[name]
    x = torch.randn(4, 6, 8)
    start = Instruction("clone", (1,))
    program = Program((start, Instruction(name, (2, 1)[: operation.arity], operation.sizes(x))), seed=0)
    loss = program_loss(program, x)
    assert loss.requires_grad
    loss.backward()
