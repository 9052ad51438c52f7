"""A step on a GPU has small tensors on the CPU, and a host that launches its kernels: what a capture makes of both, as far as a CPU can show it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.capture import arguments
from memfit.capture.arguments import arguments_of, build
from memfit.capture.calls import StorageSpec, describe
from memfit.capture.capture import capture, capture_real
from memfit.capture.cuda import attention
from memfit.capture.cuda.workspaces import take_workspaces
from memfit.capture.host_time import ELSEWHERE, has_kernel
from memfit.capture.isolation import lent
from memfit.capture.lifetimes import Lifetimes
from memfit.capture.source import StepSource
from memfit.capture.trace_source import FOLLOWED, LAUNCHED, RECOMPUTED, TraceSource
from memfit.engine.compiled import CompiledScript
from memfit.engine.follower import Follower
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Category, Phase, Trace
from models import outcome

META = torch.device("meta")

# ------------------------------------------------------------------------------------------------------ tensors on the CPU


@pytest.mark.parametrize(("device", "counted"), [("cpu", 16), ("cuda", 0), (None, 16)])
def test_only_bytes_of_the_steps_device_count(device: str | None, counted: int) -> None:
    lifetimes = Lifetimes(device)
    there = torch.ones(4)
    number = lifetimes.add(there, Category.ACTIVATION, "", 0)
    assert lifetimes.storages[number].bytes == counted


def test_calls_that_differ_by_a_device_are_not_the_same_and_are_timed_where_they_ran() -> None:
    on_device, on_cpu = torch.ones(4, device=META), torch.ones(())
    mixed, call = describe(torch.ops.aten.mul.Tensor, (on_device, on_cpu), {})
    alike, _ = describe(torch.ops.aten.mul.Tensor, (on_device, torch.ones((), device=META)), {})
    assert mixed != alike
    args, _ = build(call, META)
    assert [tensor.device.type for tensor in args] == ["meta", "cpu"]


def test_a_copy_to_the_cpu_stays_one() -> None:
    _, call = describe(torch.ops.aten._to_copy.default, (torch.ones(4, device=META),), {"device": torch.device("cpu")})
    _, kwargs = build(call, META)
    assert kwargs["device"].type == "cpu"


@torch.library.custom_op("memfit_tests::opaque", mutates_args=())
def opaque(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As a recurrent layer's kernel: what it keeps for backward only it can write."""
    return x.clone(), torch.full((3,), 7, dtype=torch.uint8)


@torch.library.custom_op("memfit_tests::opaque_backward", mutates_args=())
def opaque_backward(gradient: Tensor, x: Tensor, state: Tensor, reserve: Tensor) -> Tensor:
    """Reads the state that went into forward, and what forward kept."""
    return gradient.clone()


def test_backward_reads_what_its_forward_wrote_and_the_state_that_went_into_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations = torch.ops.memfit_tests
    monkeypatch.setitem(arguments.FORWARD_OF, "memfit_tests.opaque_backward.default", "memfit_tests.opaque.default")
    x, state, reserve = torch.ones(2, 3), torch.zeros(5, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    _, forward = describe(operations.opaque.default, (x, state), {})
    _, backward = describe(operations.opaque_backward.default, (x, x, state, reserve), {})
    device = torch.device("cpu")
    args, _ = arguments_of(backward, {"forward": forward}, device, arguments.Filled(device))
    assert args[2].tolist() == [0] * 5
    assert args[3].tolist() == [7] * 3


@pytest.mark.parametrize(("device", "follows"), [("cpu", False), ("cuda", True)])
def test_what_a_step_on_a_gpu_makes_on_the_cpu_is_no_larger_than_planned(device: str, follows: bool) -> None:  # noqa: FBT001 - a parameter
    model, sample = small.chain(), small.rows()
    made = small.plan_at(0.5, model, sample)
    makes = {at: tuple((output, number, 0) for output, number, _ in each) for at, each in made.script.makes.items()}
    assert any(makes.values())
    follower = Follower(CompiledScript(replace(made.script, makes=makes)), device=device)
    with follower.following():
        loss = small.squared_error(model, sample)
    assert (follower.divergence is None) is follows
    loss.backward()


def test_lent_weights_of_recurrent_layers_are_not_laid_out_anew() -> None:
    """Torch lays them out in one storage where it finds others than before, which on fake tensors of a GPU fails."""
    layer = nn.LSTM(4, 4)
    with lent(layer, torch.clone):
        assert not layer._weights_have_changed()
        assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    assert not layer._weights_have_changed()


# ------------------------------------------------------------------------------------------------- one storage for several


class Flat(nn.Module):
    """Two weights in one storage, and a look at all of it through that of the first, as cuDNN's recurrent layers look at theirs."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.randn(2, 8, 8).mul_(0.1).unbind()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        every = torch.empty(0, device=x.device)
        with torch.no_grad():
            every.set_(self.first.untyped_storage(), 0, (2 * 8 * 8,), (1,))
        x = x @ self.first @ self.second
        return x * every[:8]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def test_a_real_capture_shares_the_storages_that_parameters_share() -> None:
    captured = capture_real(StepSource(Flat(), torch.randn(16, 8), squares, small.adamw))
    weights = [s.bytes for s in captured.trace.storages if s.category is Category.PARAMETER]
    assert weights == [2 * 8 * 8 * 4]
    (call,) = (call for key, call in captured.calls.items() if "aten.set_" in key)
    assert call.args[1] == StorageSpec(2 * 8 * 8 * 4, "cpu")
    args, _ = build(call, torch.device("cpu"))
    assert args[1].nbytes() == 2 * 8 * 8 * 4


def test_such_a_step_is_exact_and_its_peak_is_that_predicted() -> None:
    model = nn.Sequential(*(Flat() for _ in range(4)))
    x = torch.randn(256, 8)
    plans = outcome.plans_between(model, x, squares, small.adamw, (1.0, 0.0))
    reference = outcome.outcome_of(model, x, squares)
    for made in plans:
        found = outcome.outcome_of(model, x, squares, memfit.apply(made, model, squares))
        assert reference.differs(found) is None
        assert outcome.measured_peak(made, model, x, squares, small.adamw) == made.prediction.peak_bytes


def test_a_call_is_described_by_the_size_of_a_storage_not_by_its_bytes() -> None:
    """The `repr` of a storage reads each of them: on a GPU planning for an LSTM did not end."""
    key, _ = describe(torch.ops.aten.set_.source_Storage, (torch.empty(0), torch.ones(4096).untyped_storage()), {})
    assert "StorageSpec(bytes=16384" in key
    assert len(key) < 200


def test_what_a_step_reads_besides_its_model_is_told_by_a_real_capture_alone() -> None:
    """The device has it already, so it is none of the device's other bytes; fake tensors do not tell that."""
    there = [
        [torch.ones(8)]
    ]  # one that the loss closes over, or in a list, is looked for, and counted, in every capture

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = (model(x) * there[0][0]).mean()
        return out

    source = StepSource(nn.Linear(8, 8), torch.ones(4, 8), loss, small.adamw)
    assert capture_real(source).met_bytes == (32,)
    assert capture(source).met_bytes == ()


def test_arguments_of_a_call_are_freed_without_the_garbage_collector() -> None:
    """Else they are freed in the middle of another call, whose workspace seems smaller by as much."""
    _, call = describe(torch.ops.aten.add.Tensor, (torch.ones(4), torch.ones(4)), {})
    gc.disable()
    try:
        args, _ = build(call, torch.device("cpu"))
        there = weakref.ref(args[0].untyped_storage())
        del args
        assert there() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------------- the host


def plain(model: nn.Module, sample: Tensor) -> Trace:
    source = TraceSource(model, sample, lambda m, x: m(x).sum(), small.adamw, device="rtx4090")
    return source.trace_of(BASELINE)


def test_where_the_gpu_waits_for_the_host_a_step_takes_what_launching_takes() -> None:
    with META:
        trace = plain(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.empty(2, 8))
    kernels = sum(has_kernel(o) for o in trace.operations if o.phase is not Phase.OPTIMIZER)
    assert trace.pass_seconds == pytest.approx(LAUNCHED * ELSEWHERE.mode * kernels)
    assert trace.dispatch_seconds == pytest.approx(FOLLOWED * ELSEWHERE.mode)
    assert trace.recomputed_seconds == pytest.approx(RECOMPUTED * ELSEWHERE.mode)


def test_where_the_host_is_ahead_of_the_gpu_it_adds_nothing() -> None:
    with META:
        trace = plain(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.empty(1 << 16, 4096))
    assert (trace.python_seconds, trace.dispatch_seconds, trace.recomputed_seconds) == (0.0, 0.0, 0.0)
    assert trace.pass_seconds == pytest.approx(
        sum(o.seconds for o in trace.operations if o.phase is not Phase.OPTIMIZER)
    )


def test_taking_workspaces_draws_nothing() -> None:
    before = torch.get_rng_state()
    take_workspaces(torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


# --------------------------------------------------------------------------------------------------- which attention kernel

ADA, HOPPER = (8, 9), (9, 0)


def asked(dtype: torch.dtype = torch.float32, **named: Any) -> attention.Call:
    query = torch.empty(2, 4, 32, 64, dtype=dtype)
    return attention.Call(query, query, query, **named)


def test_a_bias_whose_rows_are_not_dense_is_left_to_the_math_kernel() -> None:
    """As that of T5: made by permuting the output of an embedding. On an H100 such a step held 16 % more than with the memory-efficient kernel."""
    bias = torch.empty(32, 32, 4).permute(2, 0, 1).unsqueeze(0)
    assert attention.chosen(asked(attn_mask=bias), ADA) is attention.Kernel.MATH
    assert attention.chosen(asked(attn_mask=bias.contiguous()), ADA) is attention.Kernel.EFFICIENT


@pytest.mark.parametrize(("sixteenths", "kernel"), [(True, attention.Kernel.FLASH), (False, attention.Kernel.CUDNN)])
def test_cudnn_takes_any_dropout_before_torch_2_12(
    monkeypatch: pytest.MonkeyPatch,
    sixteenths: bool,  # noqa: FBT001 - a parameter
    kernel: attention.Kernel,
) -> None:
    monkeypatch.setattr(attention, "DROPOUT_IN_SIXTEENTHS", sixteenths)
    assert attention.chosen(asked(torch.bfloat16, dropout_p=0.1), HOPPER) is kernel
