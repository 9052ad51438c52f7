"""Planning for several devices: which way is taken, what is told of the others, and how devices and links are written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import memfit
import small
from defined_costs import GLOO
from memfit.capture import cost_table, gloo_time
from memfit.capture.cost_table import CostTable
from memfit.capture.process_group import fake_mesh
from memfit.capture.trace_source import TraceSource
from memfit.hardware.machine import known_machine
from memfit.hardware.network import ASSUMED_BANDWIDTH, ASSUMED_LATENCY_SECONDS, collective_seconds, devices_of
from memfit.hardware.topology import PeerLink, Topology
from memfit.planning import Planning, planning_of
from memfit.sharding.by_rows import check_by_rows
from memfit.sharding.fully_sharded import checked
from memfit.sharding.roles import fullest, roles_of
from memfit.techniques.choices import Choices
from memfit.techniques.sharding import ONE_UNIT, WAYS, setting_of, way_of
from memfit.units import format_seconds
from sharding import steps
from sharding.ranks import as_torchrun_tells

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = known_machine("a100")


def planned(devices: Any, budget: Any = "100%", blocks: int = 3, **named: Any) -> memfit.Plan:
    model, sample = small.chain(blocks), small.rows(64)
    return memfit.plan(model, sample, small.squared_error, budget, small.adamw, devices=devices, **named)


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_collectives_that_were_timed_beside_other_programs_are_told(
    slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(GLOO, slowdown=slowdown)
    monkeypatch.setattr(gloo_time, "gloo_time", lambda *_: here)
    told = planned(2, blocks=1, fixed={"sharding": "data"}).explain()
    assert ("while other programs used its cores" in told) == (slowdown > gloo_time.BUSY)


@pytest.mark.parametrize("way", ["data", "zero1", ONE_UNIT, "zero3", "1f1b", "interleaved", "1f1b/2x2+zero1"])
def test_collectives_take_longer_where_all_work_does(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gloo takes was that of a quiet computer whatever else was slower: ZeRO 2 looked faster than a pipeline by that much where programs ran beside it."""
    seconds = []
    for slowdown in (1.0, 1.5):
        monkeypatch.setattr(cost_table, "_KNOWN", {})  # as another process
        monkeypatch.setattr(CostTable, "_slowdown_of", lambda *_, slowdown=slowdown: slowdown)
        model, sample, loss_fn = steps.gpt()
        made = memfit.plan(
            model,
            sample,
            loss_fn,
            "100%",
            steps.adamw,
            devices=4 if "x" in way else 2,
            fixed={"sharding": way, "micro_batches": 1 if way in WAYS else 4},
        )
        seconds.append(made.prediction.step_seconds)
    assert seconds[1] == pytest.approx(1.5 * seconds[0], rel=0.005)


def test_the_less_that_fits_the_more_is_sharded_and_what_is_turned_down_is_told() -> None:
    roomy, data = (planned("4x1GiB@50GB/s", blocks=1, fixed=fixed) for fixed in (None, {"sharding": "data"}))
    lacking = memfit.smallest_budget(data) - 1
    tight = planned(f"4x{lacking}B", blocks=1)
    assert way_of(roomy.choices.sharding)[:2] == ("data", 4)
    assert way_of(tight.choices.sharding)[0] != "data"
    assert len(roomy.prediction.ranks) == 4
    assert (
        max(rank.peak_bytes for rank in tight.prediction.ranks)
        == tight.prediction.peak_bytes
        <= tight.budget_bytes
        == lacking
    )
    told = tight.explain()
    assert "Rejected: data parallel on 4 ranks: does not fit, at least " in told
    assert "seconds of collectives are measured among 4 ranks of gloo that compute in between, on this computer" in told
    assert (
        "ring of links of 50 GB/s" in planned("4x1GiB@50GB/s", fixed={"sharding": "data", "micro_batches": 1}).explain()
    )
    assert memfit.Plan.from_json(tight.to_json()).prediction == tight.prediction


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways of sharing out that are captured in the test, each as often as it is."""
    ways: list[str] = []
    trace_of = TraceSource.trace_of

    def noting(source: TraceSource, choices: Choices, *rest: Any) -> Any:
        ways.append(choices.sharding)
        return trace_of(source, choices, *rest)

    monkeypatch.setattr(TraceSource, "trace_of", noting)
    return ways


def test_of_a_way_that_cannot_be_faster_no_other_ranks_are_captured(
    captured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uneven model's parameters give each rank of ZeRO 1 other state, and so a capture of its own."""

    def others_of_zero1() -> set[str]:
        """Ranks whose steps are captured beside the first one's."""
        return {each for each in captured if each.startswith("zero1/3@")}

    def ways() -> memfit.Plan:
        captured.clear()
        model, sample, loss_fn = steps.uneven()
        return memfit.plan(model, sample, loss_fn, 1 << 40, small.adamw, devices=3, fixed={"micro_batches": 1})

    monkeypatch.setattr(Planning, "seconds_at_best", lambda _: 0.0)
    ways()
    assert others_of_zero1()
    monkeypatch.setattr(Planning, "seconds_at_best", lambda _: 2.0)
    plan = ways()
    assert plan.choices.sharding == "data/3"
    assert not others_of_zero1()
    assert f"optimizer state sharded (ZeRO 1) on 3 ranks: {format_seconds(2.0)} a step at best" in plan.rejected


def test_where_no_way_fits_other_ranks_are_captured_of_what_may_need_least_alone(captured: list[str]) -> None:
    model, sample, loss_fn = steps.uneven()
    with pytest.raises(memfit.InfeasibleError) as error:
        memfit.plan(model, sample, loss_fn, 6000, small.adamw, devices=3)
    fits = [each for each in error.value.weighed if "does not fit" in each]
    assert fits[0].startswith("optimizer state sharded (ZeRO 1) on 3 ranks: does not fit, the smallest plan needs")
    assert sum(", at least " in each for each in fits) == 2
    assert {each.partition("/")[0] for each in captured if "@" in each} == {"zero1"}


@pytest.mark.slow
def test_nothing_fits_names_the_smallest_of_all_ways() -> None:
    with pytest.raises(memfit.InfeasibleError, match="no way of sharing the step out among 2 devices fits: ") as error:
        planned(2, 20000)
    assert error.value.minimum_bytes is not None
    (larger,) = error.value.remedies
    assert str(error.value).endswith(
        f". Ways out: {larger.text}. Not tried: more devices, a smaller batch for each, words of allow="
    )
    assert planned(2, error.value.minimum_bytes).prediction.peak_bytes <= error.value.minimum_bytes


@pytest.mark.alternate(1)
@pytest.mark.parametrize("way", ["zero1", "zero3"])
def test_the_figures_of_each_rank_are_those_of_its_own_capture(way: str) -> None:
    model, sample, loss_fn = steps.uneven()
    plan = memfit.plan(
        model, sample, loss_fn, 1 << 40, small.adamw, devices=3, fixed={"sharding": way, "micro_batches": 1}
    )
    for rank, figures in enumerate(plan.prediction.ranks):
        own = {"sharding": setting_of(way, 3, rank), "micro_batches": 1}
        planning = planning_of(memfit.plan(model, sample, loss_fn, 1 << 40, small.adamw, fixed=own))
        assert planning is not None
        assert planning.solver(1).plain.peak == figures.peak_bytes
    assert plan.prediction.plain_peak_bytes == plan.prediction.peak_bytes
    assert roles_of(model, plan.choices.sharding) != (0, 0, 0)
    assert (
        max(plan.prediction.ranks, key=lambda r: r.peak_bytes).peak_bytes
        == plan.prediction.ranks[fullest(model, f"{way}/3")].peak_bytes
    )


@pytest.mark.slow
def test_zero3_drops_as_much_as_checkpoint_around_every_block() -> None:
    """Weights that are gathered again for backward are what they were: recomputations read them."""
    way = {"sharding": setting_of("zero3", 2), "micro_batches": 1}
    model, sample, loss_fn = steps.gpt()
    plan = memfit.plan(model, sample, loss_fn, 1 << 40, small.adamw, fixed=way)
    by_hand, _, _ = steps.gpt()
    blocks: Any = by_hand.blocks
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)
    theirs = memfit.plan(by_hand, sample, loss_fn, 1 << 40, small.adamw, fixed=way)
    assert memfit.smallest_budget(plan) < theirs.prediction.plain_peak_bytes < plan.prediction.plain_peak_bytes


def test_devices_are_written_in_a_few_words() -> None:
    four = devices_of("4x24GiB@50GB/s", HERE)
    assert [d.memory_bytes for d in four.devices] == [24 << 30] * 4
    assert [(p.first, p.second, p.bandwidth) for p in four.peers] == [
        (0, 1, 50e9),
        (1, 2, 50e9),
        (2, 3, 50e9),
        (3, 0, 50e9),
    ]
    assert devices_of(2, HERE).devices == (HERE, HERE)
    assert len(devices_of(2, HERE).peers) == 1
    assert devices_of("8 x h100", HERE).devices[0].name == known_machine("h100").name
    for wrong in ("x24GiB", "0x24GiB", "four", "4x24GiB@fast", "2xcpu"):
        with pytest.raises(memfit.InputError, match="write how many and what"):
            devices_of(wrong, HERE)
    with pytest.raises(memfit.InputError, match="devices of 24 bytes: write the unit along"):
        devices_of("4x24", HERE)


def test_collectives_take_the_time_of_a_ring() -> None:
    slow = Topology(
        (HERE,) * 3, (), (PeerLink(0, 1, 10e9, 1e-5), PeerLink(1, 2, 5e9, 2e-5), PeerLink(2, 0, 10e9, 1e-5))
    )
    assert collective_seconds(slow, "all_gather", 10**9, (0, 1, 2)) == pytest.approx(0.2 + 2 * 2e-5)
    assert collective_seconds(slow, "all_reduce", 10**9, (0, 1, 2)) == pytest.approx(0.2 + 4 * 2e-5)
    assert collective_seconds(slow, "send", 10**9, (0, 1)) == pytest.approx(0.1 + 1e-5)
    assert collective_seconds(None, "broadcast", 0, (0, 1)) == ASSUMED_LATENCY_SECONDS
    assert collective_seconds(None, "send", int(ASSUMED_BANDWIDTH), (0, 1)) == pytest.approx(
        1 + ASSUMED_LATENCY_SECONDS
    )


def test_zero2_in_one_unit_is_weighed_among_processes_alone() -> None:
    """Links of devices send one block's while the next one computes, which predictions do not count."""

    def zero2(devices: Any, way: str = "zero2") -> memfit.Plan:
        return planned(devices, "1GiB", fixed={"sharding": way, "micro_batches": 1})

    unit = "the model as one unit"
    assert unit in zero2(2).explain()
    assert unit not in zero2("2x1GiB@50GB/s").explain()
    asked = zero2("2x1GiB@50GB/s", "zero2+whole")
    assert asked.choices.sharding == "zero2+whole/2"
    assert memfit.smallest_budget(asked) > memfit.smallest_budget(zero2("2x1GiB@50GB/s"))


class Parts(nn.Module):
    """Blocks between two layers, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.out, self.unused = nn.Linear(32, 32), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.out(x.to(self.out.weight.dtype)).float()
        return found


def of_a_part(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Parts)
    return model.out(batch[0]).square().mean()


def of_a_gradient(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().mean()


def tied(model: Parts) -> None:
    model.blocks[2][0].weight = model.blocks[0][0].weight  # type: ignore[index]


def tied_to_the_end(model: Parts) -> None:
    model.out.weight = model.blocks[0][0].weight  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("way", "change", "loss_fn", "told"),
    [
        ("data", None, small.squared_error, r"a parameter gets no gradient in a step \(unused.weight, unused.bias\), which Distributed"),
        ("zero3", None, of_a_part, "the loss calls a part of the model, or uses a parameter, outside of the model's own forward"),
        ("zero3", tied, small.squared_error, r"blocks.0.0.weight and blocks.2.0.weight are one parameter, and fully_shard"),
        ("zero2", tied_to_the_end, small.squared_error, r"blocks.0.0.weight and out.weight are one parameter, and fully_shard"),
        ("zero2", lambda model: model.unused.double(), small.squared_error, "parameters that are trained have several types"),
        ("zero3", None, of_a_gradient, "forward takes a gradient that is differentiated again, and fully_shard frees parameters after each backward"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_train_is_refused_in_a_sentence(way: str, change: Any, loss_fn: Any, told: str) -> None:
    model, fixed = Parts(), {"sharding": setting_of(way, 2), "micro_batches": 1}
    if change is not None:
        change(model)
    sample = (torch.randn(4, 32), torch.randn(4, 32))
    with pytest.raises(memfit.CaptureError, match=told):
        memfit.plan(model, sample, loss_fn, 1 << 40, small.adamw, fixed=fixed)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_a_plan_says_where_ranks_do_not_give_what_one_device_would(*, batch_norm: bool) -> None:
    """Statistics of a batch norm are those of a rank's own samples, which no plan said."""
    model, sample = small.chain(2, batch_norm=batch_norm), small.rows(4)
    plan = memfit.plan(model, sample, small.squared_error, 1 << 40, small.adamw, fixed={"sharding": "data/2"})
    assert any("each rank takes the loss of its own part of the batch" in note for note in plan.notes) is batch_norm


def test_a_parameter_that_is_a_single_number_leaves_the_ways_that_bear_it() -> None:
    """CLIP's temperature is one."""
    model = Parts()
    model.unused = nn.ParameterList([nn.Parameter(torch.ones(()))])  # type: ignore[assignment]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return small.squared_error(model, batch) * model.unused[0]

    sample = (torch.randn(4, 32), torch.randn(4, 32))
    plan = memfit.plan(model, sample, loss_fn, 1 << 34, small.adamw, devices=2, fixed={"micro_batches": 1})
    assert plan.choices.sharding in {"data/2", "zero1/2"}
    assert any("the parameter unused.0 is a single number" in told for told in plan.rejected)


@pytest.mark.parametrize(
    ("parameter", "told"),
    [
        (torch.ones(()), "the parameter scale is a single number, .*, or give it the shape \\(1,\\)$"),
        (torch.ones(2, 3).t(), "the parameter scale is not contiguous, .*, or make it contiguous$"),
    ],
)
def test_what_fully_shard_does_not_take_is_refused_with_what_it_takes(parameter: Tensor, told: str) -> None:
    """And that is taken."""
    model = nn.Module()
    model.scale = nn.Parameter(parameter)
    with pytest.raises(memfit.InputError, match=told):
        checked(model)
    model.scale = nn.Parameter(parameter.reshape(1) if parameter.ndim == 0 else parameter.contiguous())
    checked(model)


@pytest.mark.parametrize(
    ("named", "told"),
    [({"fixed": {"stages": 2}}, "'stages' is no choice"), ({"allow": ["fp8"]}, "'fp8' is nothing that can be allowed")],
)
def test_a_name_that_no_way_knows_is_told_once(named: dict[str, Any], told: str) -> None:
    with pytest.raises(memfit.InputError) as caught:
        planned(2, **named)
    assert str(caught.value).count(told) == 1


def test_what_cannot_be_shared_out_is_refused_in_a_sentence() -> None:
    with pytest.raises(memfit.InputError, match="devices names one device"):
        planned("1x1GiB")
    for sharding in ("zero3", "1f1b", "data"):
        with pytest.raises(
            memfit.InputError,
            match=f"fixed sharding='{sharding}' shares a step out among several devices, and there is one",
        ):
            planned(1, fixed={"sharding": sharding})
    with pytest.raises(memfit.InputError, match="is a pipeline, which is planned for devices that are named"):
        planned(1, fixed={"sharding": "1f1b/2x2"})
    with pytest.raises(
        memfit.InputError, match="equal parts are for devices that are alike, and these are not: take a pipeline"
    ):
        planned(Topology((HERE, known_machine("h100"))), fixed={"sharding": "zero2"})
    with pytest.raises(memfit.InputError, match="is a share, and the devices have from"):
        planned(Topology((HERE, replace(HERE, memory_bytes=1 << 30))), budget="50%")
    for unknown in ("zero4", "zero1+whole"):
        with pytest.raises(memfit.InputError, match="there is 'data', 'zero1', 'zero2', 'zero3'"):
            planned(2, fixed={"sharding": unknown})
    for elsewhere, here in (("fsdp", "zero3"), ("DDP", "data"), (3, "zero3"), ("ZeRO-2", "zero2"), ("1F1B", "1f1b")):
        with pytest.raises(memfit.InputError, match=f"memfit's name for {elsewhere} is '{here}'"):
            planned(2, fixed={"sharding": elsewhere})
    for joined in ("zero2/2+whole", "zero1+pipeline"):  # of which each word is a name of memfit's
        with pytest.raises(memfit.InputError, match="'pipeline'; of what has a [+] there are 'zero2[+]whole' and"):
            planned(2, fixed={"sharding": joined})
    for other in ("zero2", ONE_UNIT):
        with pytest.raises(memfit.InputError, match=re.escape(f"is for 4 devices, and there are 2: write '{other}/2'")):
            planned(2, fixed={"sharding": f"{other}/4"})
    with pytest.raises(memfit.InputError, match="of 2 ranks the last one is 1"):
        way_of("zero3/2@2")
    plan = planned(2, fixed={"sharding": "data", "micro_batches": 1})
    with pytest.raises(
        memfit.InputError, match="this process belongs to no group: start it with torchrun --nproc-per-node 2"
    ):
        memfit.apply(plan, steps.chain()[0])


def test_a_device_holds_no_more_than_its_memory_whatever_the_budget() -> None:
    with pytest.raises(memfit.InfeasibleError, match="data parallel on 2 ranks: does not fit"):
        planned(Topology((replace(HERE, memory_bytes=1 << 10),) * 2), budget="1GiB", fixed={"sharding": "data"})


@pytest.mark.parametrize("way", ["data", "zero3", "1f1b"])
def test_an_optimizer_that_holds_the_whole_model_is_refused_before_anything_is_captured(way: str) -> None:
    model, sample, loss_fn = steps.chain()
    made: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(memfit.InputError, match="hand over a function that makes it"):
        memfit.plan(model, sample, loss_fn, "1GiB", made, devices=2, fixed={"sharding": way})


def test_an_optimizer_of_whole_matrices_is_not_given_rows_of_them() -> None:
    """Under ZeRO 2 and 3 Muon would make each rank's rows orthogonal by themselves."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    batch = (torch.randn(4, 32), torch.randn(4, 32))
    fixed = {"micro_batches": 1}

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=1e-3)

    plan = memfit.plan(model, batch, small.squared_error, 1 << 34, muon, devices=2, fixed=fixed)
    told = "Muon gives a part of a parameter's rows other numbers than the whole parameter"
    assert any("ZeRO 3" in each and told in each for each in plan.rejected)
    for way in ("zero2", "zero3"):
        with pytest.raises(memfit.InputError, match=told):
            memfit.plan(model, batch, small.squared_error, 1 << 34, muon, devices=2, fixed={**fixed, "sharding": way})
    for made in (torch.optim.Adagrad, torch.optim.ASGD, torch.optim.Rprop):
        check_by_rows(made(model.parameters(), lr=0.1))


def test_a_process_of_torchrun_is_not_fitted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a group or before there is one."""
    for name, value in as_torchrun_tells(1, 2, 1).items():
        monkeypatch.setenv(name, value)
    model, sample, loss_fn = steps.chain()
    with pytest.raises(memfit.InputError, match="this process is rank 1 of 2, and memfit.fit without devices="):
        memfit.fit(model, sample, loss_fn, "1GiB")


@pytest.mark.parametrize(
    ("name", "value"), [("MASTER_ADDR", None), ("MASTER_PORT", None), ("MASTER_PORT", "some"), ("RANK", "2")]
)
@pytest.mark.parametrize("devices", [None, 2])
def test_a_process_that_is_one_of_several_and_cannot_meet_them_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, devices: int | None, name: str, value: str | None
) -> None:
    for each, told in (as_torchrun_tells(1, 2, 1) | {name: value}).items():
        monkeypatch.delenv(each, raising=False) if told is None else monkeypatch.setenv(each, told)
    model, sample, loss_fn = steps.chain()
    with pytest.raises(memfit.InputError, match=f"one of 2, and not where they meet .*{name}={value or ''}[,)]"):
        memfit.fit(model, sample, loss_fn, "1GiB", devices=devices)


def test_named_devices_are_planned_for_as_they_are_and_told() -> None:
    plan = planned("2xh100")
    assert (plan.device, plan.device_kind, plan.prediction.seconds_are) == ("h100", "cuda", "estimated")
    told = plan.explain()
    assert "at the peak of the fullest of 2 devices, " in told
    assert "each of the 2 devices is taken to be such as h100, with 80.0 GiB" in told


def test_a_model_that_another_engine_shares_out_is_refused_before_it_sends_anything() -> None:
    sample = small.rows(8)
    with fake_mesh("data/2", "cpu") as mesh:
        wrapped = nn.parallel.DistributedDataParallel(small.chain(2), process_group=mesh.get_group())
        sharded: Any = fully_shard(small.chain(2), mesh=mesh)
        for model, engine in ((wrapped, "DistributedDataParallel"), (nn.Sequential(sharded), "fully_shard")):
            for planned_or_fitted in (memfit.plan, memfit.fit):
                with pytest.raises(memfit.InputError, match=f"is shared out by {engine} already, and memfit shares"):
                    planned_or_fitted(model, sample, small.squared_error, "1GiB", small.adamw, devices=2)


def test_a_line_that_reads_a_value_is_named_once_for_all_ways() -> None:
    """What a loss function logs, say: fake tensors have none."""
    seen = []

    def logged(model: nn.Module, batch: Any) -> Tensor:
        loss = small.squared_error(model, batch)
        seen.append(loss.item())
        return loss

    model, sample = small.chain(2), small.rows(8)
    for fixed, error in (
        ({"sharding": "zero3"}, memfit.CaptureError),
        ({"sharding": "1f1b"}, memfit.CaptureError),
        ({}, memfit.InputError),
    ):
        with pytest.raises(error) as caught:
            memfit.plan(model, sample, logged, "1GiB", small.adamw, devices=2, fixed=fixed)
        (line,) = re.findall(r"in test_devices\.py, line \d+: (.*)\)\), and that", str(caught.value))
        assert line == "seen.append(loss.item())"
        assert str(caught.value).count("do that after the step: record.loss has the loss of all ranks") == 1


def test_sparse_gradients_are_refused_in_every_way() -> None:
    """Their bytes are not known: stages held more than half above what was predicted."""
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 8))
    sample = torch.arange(16)
    for fixed, error in (({"sharding": "1f1b"}, memfit.CaptureError), ({}, memfit.InputError)):
        with pytest.raises(error, match="the step makes sparse tensors .* take sparse=False") as caught:
            memfit.plan(model, sample, of_rows, "1GiB", steps.sgd, devices=2, fixed=fixed)
        assert str(caught.value).count("sparse=False") == 1


def of_rows(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found
