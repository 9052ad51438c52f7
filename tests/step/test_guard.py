"""What a step that comes to nothing leaves: buffers, generators and the scale of gradients as they were."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from memfit.errors import EngineError
from memfit.step import generators, process_generators
from memfit.step.attributes import PlainValues
from memfit.step.buffers import BufferCopies, Buffers
from memfit.step.device import device_of
from memfit.step.guard import Guard
from memfit.techniques.autocast.precision import Scaling

CPU = torch.device("cpu")


class Statistics(nn.Module):
    """One buffer written in place, one replaced, one that is None until forward."""

    written: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + x
        self.absent = x
        return torch.rand(3) * x


def test_buffers_written_replaced_and_made_are_put_back() -> None:
    model = nn.Sequential(Statistics())
    copies = BufferCopies(model)
    copies.add(("0.written",))
    before = dict(model[0].named_buffers())
    guard = Guard(model, copies.copies)
    model(torch.ones(3))
    guard.put_back()
    after = dict(model[0].named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert not model[0].written.any()
    assert not model[0].replaced.any()


class Lengths(nn.Module):
    """What forward sets besides buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.known: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.length += len(x)
        self.last = self.length
        self.state = x
        self.known[self.length] = x
        return x


def test_plain_attributes_set_and_made_are_put_back() -> None:
    model = Lengths()
    guard = Guard(model)
    x = torch.ones(3)
    model(x)
    guard.put_back()
    assert model.length == 0
    assert not hasattr(model, "last")


def test_a_guard_of_values_keeps_no_tensor_alive() -> None:
    model = Lengths()
    model(torch.ones(3))
    guard = Guard(model)
    gone = weakref.ref(model.state)
    model.known.clear()
    model(torch.ones(3))
    assert gone() is None
    guard.put_back()


def test_a_buffer_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(EngineError, match="'0.other'"):
        BufferCopies(nn.Sequential(Statistics())).add(("0.written", "0.other"))


def test_what_is_drawn_in_a_guarded_step_is_drawn_again() -> None:
    model = Statistics()
    guard = Guard(model)
    first = model(torch.ones(3))
    guard.put_back()
    assert torch.equal(model(torch.ones(3)), first)


def test_the_scale_of_gradients_is_put_back() -> None:
    scaling = Scaling(CPU)
    before = scaling.state()
    guard = Guard(nn.Linear(1, 1), scaling=scaling)
    scaling.scaler.update(2.0)
    scaling.skipped_in_a_row = 3
    guard.put_back()
    assert scaling.state() == before


def test_noting_the_generators_allocates_no_tensor() -> None:
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        generators.GeneratorStates(CPU)
    assert not [event for event in profile.events() if event.self_cpu_memory_usage]


def test_forked_generators_come_back_from_an_error_too() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="while drawing"), generators.forked_generators():
        torch.rand(3)
        raise ValueError("while drawing")
    assert torch.equal(torch.get_rng_state(), before)


def test_drawing_from_an_earlier_state_leaves_the_present_one() -> None:
    state_before = torch.get_rng_state()
    first = torch.rand(3)
    present = torch.get_rng_state()
    with generators.drawing_from(state_before, CPU):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), present)


def test_streams_of_several_indices_differ_and_the_process_goes_on_alike_after_each() -> None:
    before = torch.get_rng_state()
    drawn, after = [], []
    for index in (0, 1, 0):
        torch.set_rng_state(before)
        with generators.own_stream(index, CPU):
            drawn.append(torch.rand(8).tolist())
        after.append(torch.rand(8).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    assert after[0] == after[1] == after[2]
    assert not {*drawn[0], *drawn[1]} & {*after[0]}
    with generators.own_stream(0, CPU):
        assert torch.rand(8).tolist() not in drawn, "the next block draws on"


def test_a_stream_that_ends_in_an_error_leaves_the_generators_as_they_were() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="while drawing"), generators.own_stream(3, CPU):
        torch.rand(3)
        raise ValueError("while drawing")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_snapshot_has_every_generator_of_the_process() -> None:
    states = process_generators.generators()
    assert list(states) == ["torch", "cuda", "python", "numpy"]
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()  # noqa: NPY002 - the global one is what is saved
    process_generators.set_generators(states)
    assert drawn == (torch.rand(2).tolist(), random.random(), np.random.rand())  # noqa: NPY002 - as above


def test_a_model_on_the_meta_device_or_without_parameters_is_on_the_cpu() -> None:
    assert device_of(nn.Linear(1, 1, device="meta")) == CPU
    assert device_of(nn.ReLU()) == CPU


def test_a_model_of_which_a_part_is_elsewhere_is_on_the_device_of_what_is_here() -> None:
    """As a stage of a pipeline is on a GPU, whose first parameters other ranks have."""
    here = nn.Linear(1, 1)
    with FakeTensorMode():
        here.weight = nn.Parameter(torch.empty(1, 1, device="cuda"))
    assert device_of(nn.Sequential(nn.Linear(1, 1, device="meta"), here)).type == "cuda"


def test_buffers_without_copies_are_the_same_tensors_again() -> None:
    model = Statistics()
    replaced = model.replaced
    noted = Buffers(model, {})
    model(torch.ones(3))
    noted.put_back()
    assert model.replaced is replaced
    assert model.absent is None


def test_modules_of_torch_get_their_mode_back() -> None:
    """A loss that samples in eval mode may be ended before it has set train again."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model[0].eval()
    noted = PlainValues(model)
    model.eval()
    noted.put_back()
    assert [module.training for module in model.modules()] == [True, False, True]
