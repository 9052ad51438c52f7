"""For a GPU that is not here a capture shows CUDA's operations, and what they save; everywhere else nothing changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import memfit
import models
import small
from memfit import dispatch
from memfit.capture.capture import capture
from memfit.capture.cuda.attention import DROPOUT_IN_SIXTEENTHS, Call, Kernel, chosen
from memfit.capture.cuda.kernels import ASSUMED
from memfit.capture.cuda.recurrent import RESERVED_VALUES, reserve_bytes
from memfit.capture.cuda.workspaces import HANDLES, LARGE_WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES, library_bytes
from memfit.capture.source import StepSource
from memfit.capture.trace_source import TraceSource
from memfit.hardware.machine import Capability
from memfit.optimizers.chunked import CHUNK
from memfit.planning import planning_of
from memfit.techniques.choices import BASELINE, Choices
from memfit.techniques.sharding import WAYS
from memfit.units import format_bytes
from memfit.values.trace import BEFORE_STEP, Phase, Trace

ADA, HOPPER, VOLTA = (8, 9), (9, 0), (7, 0)


def summed(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x)
    return made.float().sum()


def traced(
    model: nn.Module, sample: Any, loss: Any = summed, capability: Capability | None = ADA, choices: Choices = BASELINE
) -> Trace:
    return capture(StepSource(model, sample, loss, small.adamw, cuda=capability), choices).trace


def names(trace: Trace) -> Counter[str]:
    return Counter(operation.name for operation in trace.operations)


def saved_bytes(trace: Trace) -> Counter[int]:
    """Of the distinct storages that forward makes and autograd saves."""
    kept = {save.storage for save in trace.saves}
    return Counter(
        trace.storages[s].bytes for s in kept if trace.storages[s].birth != BEFORE_STEP and trace.storages[s].bytes
    )


# -- updates in chunks -----------------------------------------------------------------------------------------------------


def largest_in_update(trace: Trace) -> int:
    """Bytes of the largest storage that the update makes."""
    update = [o for o in trace.operations if o.phase is Phase.OPTIMIZER]
    return max(trace.storages[s].bytes for o in update for s in o.makes)


def test_chunks_of_an_update_are_as_large_as_on_the_gpu() -> None:
    """In a parameter of several chunks of a CPU and one of a GPU, 8-bit state takes the workspace of the GPU's chunk."""
    count = 4 * CHUNK["cpu"]
    model, x = nn.Linear(1 << 10, count >> 10, bias=False), torch.randn(1, 1 << 10)

    def largest(capability: Capability | None) -> int:
        return largest_in_update(traced(model, x, capability=capability, choices=Choices(state_format="8bit")))

    assert largest(None) == 4 * CHUNK["cpu"]
    assert largest(ADA) == 4 * count


def test_chunks_are_those_of_the_gpu_on_several_devices_too() -> None:
    count = 4 * CHUNK["cpu"]
    model, x = nn.Linear(1 << 10, count >> 10, bias=False), torch.randn(2, 1 << 10)
    asked: Any = {"allow": ["8bit"], "fixed": {"sharding": "data/2", "state_format": "8bit", "micro_batches": 1}}
    plan = memfit.plan(model, x, summed, 1 << 34, small.adamw, devices="2xrtx4090", **asked)
    assert largest_in_update(planning_of(plan).solver(1).trace) == 4 * count


def test_of_an_update_in_chunks_the_first_ones_are_written_down() -> None:
    chunks = 9
    model, x = nn.Linear(1 << 10, (chunks * CHUNK["cpu"]) >> 10, bias=False), torch.randn(1, 1 << 10)
    trace = traced(model, x, capability=None, choices=Choices(state_format="8bit"))
    update = [o for o in trace.operations if o.phase is Phase.OPTIMIZER and o.name == "aten._fused_adamw_.default"]
    assert [o.times for o in update] == [1, chunks - 1]
    assert {o.times for o in trace.operations if o.phase is not Phase.OPTIMIZER} == {1}


# -- dropout ---------------------------------------------------------------------------------------------------------------


def test_dropout_saves_one_byte_an_element() -> None:
    x = torch.randn(16, 32)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1))
    assert saved_bytes(traced(model, x)) == {16 * 64: 1}
    assert saved_bytes(traced(model, x, capability=None)) == {16 * 64 * 4: 1}
    assert names(traced(model, x))["aten.native_dropout.default"] == 1


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.0), nn.Dropout(0.1, inplace=True), nn.Dropout2d(0.1), nn.Dropout(0.1).eval()]
)
def test_dropout_that_is_not_fused_on_a_gpu_is_left_as_it_is(layer: nn.Module) -> None:
    sample = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), layer)
    model[1].train(layer.training)
    here, there = (traced(model, sample, capability=c) for c in (None, ADA))
    assert names(here) == names(there)


# -- attention -------------------------------------------------------------------------------------------------------------


def call(dtype: torch.dtype, size: int = 64, tokens: int = 100, *, keys: int | None = None, **more: Any) -> Call:
    query = torch.empty(2, 4, tokens, size, dtype=dtype, device="meta", requires_grad=True)
    key = torch.empty(2, 4, keys or tokens, size, dtype=dtype, device="meta", requires_grad=True)
    return Call(query, key, key, **more)


MASK = torch.zeros(100, 100, device="meta")


@pytest.mark.parametrize(
    ("asked", "capability", "kernel"),
    [
        (call(torch.bfloat16), ADA, Kernel.FLASH),
        (call(torch.float16, dropout_p=0.1, is_causal=True), ADA, Kernel.FLASH),
        (call(torch.bfloat16), HOPPER, Kernel.CUDNN),
        (
            call(torch.bfloat16, dropout_p=0.1),
            HOPPER,
            Kernel.FLASH if DROPOUT_IN_SIXTEENTHS else Kernel.CUDNN,
        ),  # not a multiple of 1/16
        (call(torch.bfloat16, dropout_p=0.125), HOPPER, Kernel.CUDNN),
        (call(torch.bfloat16, size=256), ADA, Kernel.FLASH),
        (
            call(torch.bfloat16, size=256, dropout_p=0.1),
            ADA,
            Kernel.EFFICIENT,
        ),  # flash has no such backward on this chip
        (call(torch.bfloat16, size=256, dropout_p=0.1), (8, 0), Kernel.FLASH),
        (call(torch.bfloat16, size=264), (8, 0), Kernel.EFFICIENT),
        (call(torch.float32), ADA, Kernel.EFFICIENT),
        (call(torch.float32), HOPPER, Kernel.EFFICIENT),
        (call(torch.bfloat16, attn_mask=MASK.bfloat16()), ADA, Kernel.EFFICIENT),
        (call(torch.bfloat16, attn_mask=MASK.bfloat16()), HOPPER, Kernel.CUDNN),
        (call(torch.bfloat16, keys=50, is_causal=True), ADA, Kernel.EFFICIENT),
        (call(torch.float32, size=30), ADA, Kernel.MATH),  # heads are not aligned
        (call(torch.float32, size=30), VOLTA, Kernel.EFFICIENT),
        (call(torch.float16), VOLTA, Kernel.EFFICIENT),
        (call(torch.bfloat16), VOLTA, Kernel.MATH),
        (call(torch.float64), ADA, Kernel.MATH),
    ],
)
def test_the_kernel_is_the_one_that_pytorch_takes(asked: Call, capability: Capability, kernel: Kernel) -> None:
    assert chosen(asked, capability) is kernel


def test_a_kernel_that_the_user_switched_off_is_not_taken() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert chosen(call(torch.bfloat16), ADA) is Kernel.MATH


class Attending(nn.Module):
    """One linear layer makes queries, keys and values of four heads; with dropout where it is asked for."""

    def __init__(self, width: int, dtype: torch.dtype, dropout: float, *, masked: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=dtype)
        self.dropout, self.masked = dropout, masked

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (4, -1)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        return F.scaled_dot_product_attention(heads, heads, heads, mask, self.dropout)


@pytest.mark.parametrize(
    ("model", "capability", "kernel", "statistics"),
    [
        (Attending(64, torch.bfloat16, 0.1, masked=False), ADA, "flash", 100),
        (Attending(64, torch.float32, 0.1, masked=False), ADA, "efficient", 128),  # a multiple of 32
        (Attending(64, torch.float16, 0.0, masked=True), ADA, "efficient", 128),
        (Attending(64, torch.bfloat16, 0.0, masked=False), HOPPER, "cudnn", 100),
    ],
)
def test_a_fused_kernel_saves_its_result_and_one_number_a_row(
    model: Attending, capability: Capability, kernel: str, statistics: int
) -> None:
    dtype = model.linear.weight.dtype
    trace = traced(model, torch.randn(2, 100, 64, dtype=dtype), capability=capability)
    assert names(trace)[f"aten._scaled_dot_product_{kernel}_attention.default"] == 1
    assert names(trace)[f"aten._scaled_dot_product_{kernel}_attention_backward.default"] == 1
    saved = saved_bytes(trace)
    assert saved[2 * 4 * statistics * 4] == 1
    heads = 2 * 100 * 64 * dtype.itemsize
    assert saved[heads] == 2  # queries, keys and values in one storage, and the result
    assert not saved[2 * 4 * 100 * 100 * dtype.itemsize]  # no scores


def test_the_math_kernel_saves_the_weights_and_a_mask_of_bytes() -> None:
    trace = traced(
        Attending(64, torch.bfloat16, 0.1, masked=False), torch.randn(2, 100, 64).bfloat16(), capability=VOLTA
    )
    saved, scores = saved_bytes(trace), 2 * 4 * 100 * 100
    assert saved[scores] == 1
    assert saved[2 * scores] == 2  # before and after dropout


def test_heads_that_flash_does_not_take_are_padded() -> None:
    trace = traced(Attending(4 * 20, torch.bfloat16, 0.0, masked=False), torch.randn(2, 100, 80).bfloat16())
    assert names(trace)["aten.constant_pad_nd.default"] == 2 * 3  # and back
    assert saved_bytes(trace)[2 * 4 * 100 * 24 * 2] == 4


# -- cuDNN -----------------------------------------------------------------------------------------------------------------


def test_batch_norm_is_that_of_cudnn_and_its_statistics_are_known_to_change() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    trace = traced(model, torch.randn(4, 3, 10, 10))
    assert names(trace)["aten.cudnn_batch_norm.default"] == names(trace)["aten.cudnn_batch_norm_backward.default"] == 1
    assert saved_bytes(trace) == {8 * 4: 2, 4 * 8 * 8 * 8 * 4: 1}
    assert {"1.running_mean", "1.running_var"} <= set(trace.changed_buffers)


def test_batch_norm_of_rows_is_not_that_of_cudnn() -> None:
    trace = traced(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8))
    assert not names(trace)["aten.cudnn_batch_norm.default"]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_recurrent_layers_are_one_kernel_with_a_reserve(kind: str, directions: int, dropout: float) -> None:
    """Which is not run again where it draws: cuDNN's masks come from a state of its own, which no generator's puts back."""
    model = getattr(nn, kind)(12, 20, num_layers=2, dropout=dropout, bidirectional=directions == 2, batch_first=True)
    sample = torch.randn(6, 30, 12)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = model(x)[0]
        return made.sum()

    captured = capture(StepSource(model, sample, loss, small.adamw, cuda=ADA))
    trace = captured.trace
    assert names(trace)["memfit.cudnn_rnn.default"] == names(trace)["memfit.cudnn_rnn_backward.default"] == 1
    values = RESERVED_VALUES[kind.lower() if kind != "RNN" else "rnn_tanh"]
    cells = 6 * 30 * 20 * 2 * directions
    assert saved_bytes(trace)[reserve_bytes(cells, 4, values, dropout)] == 1
    (layers,) = (o for o in trace.operations if o.name == "memfit.cudnn_rnn.default")
    assert layers.rerunnable == (not dropout)
    assert layers.random == bool(dropout)
    assert captured.receiving == {name for name, _ in model.named_parameters()}
    assert "recurrent layers: cuDNN, whose reserve is estimated" in trace.notes[0]


@pytest.mark.parametrize(("dropout", "train", "again"), [(0.3, True, False), (0.3, False, True), (0.0, True, True)])
def test_cudnn_recurrent_layers_are_run_again_where_they_draw_nothing(
    dropout: float, train: object, again: object
) -> None:
    state = torch.zeros(8, dtype=torch.uint8)
    x, weights, hidden = torch.ones(2, 3, 4), [torch.ones(4)], torch.ones(1, 3, 4)
    call = (x, weights, 4, None, hidden, None, 2, 4, 0, 2, False, dropout, train, False, [], state)
    assert dispatch.is_rerunnable(torch.ops.aten._cudnn_rnn.default, call, {}) == again
    assert dispatch.is_random(torch.ops.aten._cudnn_rnn.default, call, {}) != again


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_is_one_kernel_that_saves_one_number_a_row(affine: object) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.RMSNorm(64, elementwise_affine=bool(affine)))
    captured = capture(StepSource(model, torch.randn(16, 32), summed, small.adamw, cuda=ADA))
    assert saved_bytes(captured.trace) == {16 * 64 * 4: 1, 16 * 4: 1}
    (kernel,) = (o for o in captured.trace.operations if o.name == "memfit.cuda_rms_norm.default")
    assert kernel.rerunnable
    assert captured.receiving == {name for name, _ in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_of_other_types_than_its_weight_is_single_operations() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.RMSNorm(64))
    model[0].bfloat16()
    assert not names(traced(model, torch.randn(16, 32).bfloat16()))["memfit.cuda_rms_norm.default"]


# -- autocast and optimizers -----------------------------------------------------------------------------------------------


def test_layer_norm_under_autocast_gives_fp32_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh())
    x, bf16 = torch.randn(16, 32), BASELINE.but(precision="bf16")
    size = 16 * 64
    here, there = (saved_bytes(traced(model, x, capability=c, choices=bf16)) for c in (None, ADA))
    # The input of layer norm (on a GPU its copy in fp32), and the result of tanh.
    assert (here[2 * size], here[4 * size]) == (2, 0)
    assert (there[2 * size], there[4 * size]) == (0, 2)


def test_softmax_under_autocast_gives_fp32_and_reads_fp16_as_it_is() -> None:
    class Soft(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(super().forward(x), -1)

    for precision, copies in (("fp16", 0), ("bf16", 1)):
        trace = traced(Soft(32, 64), torch.randn(16, 32), choices=BASELINE.but(precision=precision))
        assert saved_bytes(trace)[16 * 64 * 4] == 1
        forward = [o for o in trace.operations if o.phase == "forward"]
        soft = next(i for i, o in enumerate(forward) if o.name == "aten._softmax.default")
        assert (forward[soft - 1].name == "aten._to_copy.default") == bool(copies)


def test_an_optimizer_without_a_form_updates_all_parameters_at_once() -> None:
    model, x = nn.Linear(32, 64), torch.randn(16, 32)

    def of(**form: Any) -> Counter[str]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, **form)

        return names(capture(StepSource(model, x, summed, make, cuda=ADA)).trace)

    assert of()["aten._foreach_sqrt.default"] == 1
    assert not of(foreach=False)["aten._foreach_sqrt.default"]
    assert of(fused=True)["aten._fused_adamw_.default"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_without_a_form_updates_all_shards_at_once(way: str) -> None:
    """A rank's shards are plain tensors, which torch's default counts as it does whole parameters."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), torch.randn(16, 32)

    def of(devices: str, **form: Any) -> Counter[str]:
        plan = memfit.plan(
            model, x, summed, 1 << 34, lambda p: torch.optim.AdamW(p, **form), devices=devices,
            fixed={"sharding": way, "micro_batches": 1},
        )  # fmt: skip
        return names(planning_of(plan).solver(1).trace)

    assert of("2xrtx4090")["aten._foreach_sqrt.default"] == 1
    assert not of("2xrtx4090", foreach=False)["aten._foreach_sqrt.default"]
    assert not of("2x24GiB")["aten._foreach_sqrt.default"]  # of this computer's kind


# -- the whole -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "each"), [("rtx4090", SMALL_WORKSPACE_BYTES), ("h100", LARGE_WORKSPACE_BYTES)])
def test_both_handles_of_cublas_have_a_workspace(device: str, each: int) -> None:
    def before(x: Tensor, model: nn.Module) -> int:
        trace = TraceSource(model, x, summed, small.adamw, device=device).trace_of(BASELINE)
        return sum(s.bytes for s in trace.storages if s.birth == BEFORE_STEP and s.category == "other")

    assert before(torch.randn(4, 8), nn.Linear(8, 8)) == HANDLES * each
    assert before(torch.randn(2, 3, 8, 8), nn.Conv2d(3, 3, 3)) == 0


def test_a_capture_for_this_computer_is_the_same_before_and_after_one_for_a_gpu() -> None:
    model, sample, loss = models.case("bert_sdpa").build()[:3]
    before = traced(model, sample, loss, capability=None)
    assert names(traced(model, sample, loss)) != names(before)
    assert traced(model, sample, loss, capability=None) == before


class OneHead(nn.Linear):
    """Attention of one head, by torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)[:, None]
        return F.scaled_dot_product_attention(y, y, y)[:, 0]


def test_a_plan_for_several_gpus_tells_the_kernels_of_its_own_precision() -> None:
    """The step on one device is captured before it, in 32 bits, and its kernels were told as well."""
    plan = memfit.plan(
        nn.Sequential(OneHead(64, 64), nn.Linear(64, 64)), torch.randn(4, 32, 64), lambda model, x: model(x).square().mean(), "4GiB", small.adamw,
        devices="2xh100", allow=["bf16"], fixed={"sharding": "data/2", "micro_batches": 1, "precision": "bf16"}, host_budget=0,
    )  # fmt: skip
    assert sum(note.startswith(ASSUMED) for note in plan.notes) == 1, plan.notes


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", ["gpt_dropout", "checkpointed", "bert_sdpa_bf16", "resnet", "lstm", "views"])
def test_a_real_model_is_confirmed_by_what_runs_here(name: str) -> None:
    model, sample, loss = models.case(name).build()[:3]
    trace = TraceSource(model, sample, loss, small.adamw, device="rtx4090").trace_of(BASELINE)
    assumed = any(note.startswith("the kernels of CUDA are assumed") for note in trace.notes)
    as_here = any("those of the CPU's kernels" in note for note in trace.notes)
    # What could only be captured on real tensors has the CPU's kernels, and says so.
    assert (assumed, as_here) == ((True, False) if trace.source == "fake" else (False, True))
    assert (trace.source == "fake") == (name != "views")


@pytest.mark.parametrize(("name", "kernels"), [("gpt_dropout", "dropout: fused"), ("resnet", "batch norm: cuDNN")])
def test_a_plan_for_a_gpu_says_which_kernels_it_assumes(name: str, kernels: str) -> None:
    model, sample, loss = models.case(name).build()[:3]
    plan = memfit.plan(model, sample, loss, "1GiB", small.adamw, device="rtx4090", fixed={"micro_batches": 1})
    assert kernels in plan.explain()
    assert "not counted: workspaces of convolutions" in plan.explain()
    held = format_bytes(library_bytes(names(traced(model, sample, loss)), (8, 9)))
    assert f"{held} of cuBLAS's workspaces are counted, as other bytes" in plan.explain()
    assert plan.device == "rtx4090"
