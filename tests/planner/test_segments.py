"""Forward is cut where people would cut it: after each residual addition, found from bytes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import small
from memfit.capture.capture import capture
from memfit.capture.source import StepSource
from memfit.planner.recipes import Recipes
from memfit.planner.segments import Boundary, boundaries, lasting, windows
from memfit.values.trace import Trace
from models import build_chain, build_gpt, case
from planner.traces import Writer, drawn, encoder_decoder
from sweeps import each_seed

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch hides this warning of its own, but not where warnings are errors; then no capture would be a fake one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def cuts_of(built: Any) -> tuple[Trace, list[Boundary]]:
    trace = capture(StepSource(*built)).trace  # type: ignore[call-arg]
    return trace, boundaries(Recipes(trace))


def names(trace: Trace, found: list[Boundary]) -> list[str]:
    return [trace.operations[trace.events[b.event]].name.split(".")[1] for b in found]


def forward_events(trace: Trace, name: str, module_prefix: str = "") -> list[int]:
    return [
        e
        for e, op in enumerate(trace.events[: trace.forward_events])
        if op >= 0 and trace.operations[op].name == name and trace.operations[op].module.startswith(module_prefix)
    ]


def test_a_decoder_is_cut_after_each_residual_addition() -> None:
    trace, found = cuts_of(build_gpt(layers=4, hidden=32, heads=4, batch=4, tokens=16, vocab=64))
    additions = forward_events(trace, "aten.add.Tensor", "blocks")
    assert len(additions) == 8
    inside = [b for b in found if trace.operations[trace.events[b.event]].module.startswith("blocks")]
    assert [b.event for b in inside] == additions
    stream = 4 * 16 * 32 * 4
    assert all(b.crossing_bytes == stream and len(b.storages) == 1 for b in inside)


def test_a_residual_chain_is_cut_after_each_addition() -> None:
    trace, found = cuts_of(build_chain(6, 16, 64))
    assert set(forward_events(trace, "aten.add.Tensor")) <= {b.event for b in found}


def test_a_residual_network_is_cut_after_each_block_though_it_adds_in_place() -> None:
    trace, found = cuts_of(case("resnet").build())
    additions = [
        e
        for e in forward_events(trace, "aten.add_.Tensor")
        if trace.operations[trace.events[e]].module in {f"stages.{i}" for i in range(6)}  # not those that count batches
    ]
    assert len(additions) == 6
    # The last block is followed by pooling, which is narrower by far.
    assert set(additions[:-1]) <= {b.event for b in found}
    assert all(len(b.storages) == 1 for b in found)


def test_a_unet_is_not_cut_between_skips() -> None:
    """While skips wait for the decoder many storages cross; there is no cut between the first pooling and the last joining."""
    trace, found = cuts_of(case("unet").build())
    pooling = forward_events(trace, "aten.max_pool2d_with_indices.default")
    joins = forward_events(trace, "aten.cat.default")
    assert found
    assert not [b.event for b in found if pooling[0] <= b.event < joins[-1]]
    assert [b for b in found if b.event < pooling[0]]
    assert [b for b in found if b.event >= joins[-1]]


def test_a_plain_chain_may_be_cut_after_every_layer() -> None:
    """One tensor crosses everywhere."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))
    trace, found = cuts_of((model, (torch.randn(64, 16), torch.randn(64, 16)), small.squared_error))
    made = names(trace, found)
    assert made[: 3 * 5] == ["addmm", "gelu", "addmm"] * 5
    assert all(len(b.storages) == 1 for b in found)


def test_a_boundary_names_exactly_what_crosses_it() -> None:
    w = Writer()
    x = w.before(1)
    for _ in range(3):
        wide = w.one((x,), 500)
        side = w.one((x,), 30)
        x = w.one((wide, side), 100)
    w.one((x,), 1)
    trace = w.trace()
    found = boundaries(Recipes(trace))
    ends = [b for b in found if b.event % 3 == 2]
    assert [(b.event, b.crossing_bytes) for b in ends] == [(2, 100), (5, 100), (8, 100)]
    assert [b.storages for b in ends] == [trace.operations[b.event].makes for b in ends]
    assert not [b for b in found if b.event % 3 == 1]  # two tensors cross there


def test_a_decoder_is_cut_around_what_all_of_it_reads() -> None:
    trace = encoder_decoder(5)
    recipes = Recipes(trace)
    modules = [trace.operations[op].module for op in trace.events[: trace.forward_events]]
    ends = {e for e, name in enumerate(modules) if name.startswith("decoder") and name not in modules[e + 1 :]}
    assert len(ends) == 5
    around = lasting(recipes)
    # The encoder's output and the bias; not the stream, which each block makes anew.
    assert len(around) == 2
    assert not ends - {max(ends)} & {b.event for b in boundaries(recipes)}
    found = {b.event: b for b in boundaries(recipes, around)}
    assert ends - {max(ends)} <= found.keys()
    for e in ends - {max(ends)}:
        assert set(found[e].storages) == {*around, *trace.operations[trace.events[e]].makes}
        assert found[e].crossing_bytes == 300
    assert {b.event for b in boundaries(recipes)} <= found.keys()


def test_nothing_lasts_in_a_deep_chain() -> None:
    trace = capture(StepSource(*build_chain(12, 16, 64))).trace
    assert not lasting(Recipes(trace))


def test_the_decoder_of_t5_is_cut_around_the_output_of_the_encoder() -> None:
    trace = capture(StepSource(*case("t5").build())).trace
    recipes = Recipes(trace)

    def inside(found: list[Boundary]) -> set[str]:
        modules = {trace.operations[trace.events[b.event]].module for b in found}
        return {m for m in modules if m.startswith("decoder.block")}

    # The last read of the encoder's output is in the second block's attention.
    before = inside(boundaries(recipes))
    assert all(m.startswith(("decoder.block.1.layer.1", "decoder.block.1.layer.2")) for m in before)
    # The stream is a boundary after each attention.
    around = inside(boundaries(recipes, lasting(recipes)))
    assert {f"decoder.block.{i}.layer.{j}" for i in (0, 1) for j in (0, 1)} <= around


@pytest.mark.parametrize("around", ["nothing", "what lasts"])
@each_seed(40)
def test_what_a_boundary_says_is_what_later_operations_read(seed: int, around: str) -> None:
    trace = drawn(seed, forward=20)
    recipes = Recipes(trace)
    for b in boundaries(recipes, lasting(recipes) if around == "what lasts" else ()):
        later = {
            s
            for e in range(b.event + 1, trace.forward_events)
            if trace.events[e] >= 0
            for s in trace.operations[trace.events[e]].reads
        }
        crossing = [s for s in recipes.managed if s in later and trace.storages[s].birth <= b.event]
        assert sorted(b.storages) == crossing
        assert b.crossing_bytes == sum(trace.storages[s].bytes for s in crossing)


def test_windows_end_at_boundaries() -> None:
    cuts = [Boundary(2, (), 0), Boundary(5, (), 0)]
    # What is saved by a boundary's own operation belongs to the window it ends; what the next one saves, to the next.
    assert windows(cuts, 7) == {-1: 0, 0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2}
    assert windows([], 2) == {-1: 0, 0: 0, 1: 0, 2: 0}
