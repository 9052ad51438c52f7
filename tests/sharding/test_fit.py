"""`memfit.fit` in each of several ranks: one plan for all, one rehearsal together, nothing changed by it, and the numbers of one device."""

from __future__ import annotations

import re
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memfit
import memfit.ranks
import small
from memfit.capture.process_group import fake_mesh
from memfit.engine.engine import Engine
from memfit.ranks import join_group
from memfit.sharding.agreement import Agreement
from memfit.sharding.ways import follow_device
from sharding import equality, fits, steps
from sharding.ranks import as_torchrun_tells, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "way", ["zero1", "pipeline", *(pytest.param(w, marks=pytest.mark.slow) for w in ("data", "zero2", "zero3"))]
)
def test_ranks_fit_together_and_train_as_one_device_does(way: str) -> None:
    model, sample, loss_fn = steps.chain()
    alone = memfit.apply(memfit.plan(model, sample, loss_fn, "1GiB", small.adamw), model)
    losses = [alone.step(sample).loss for _ in range(3)]

    for told, measured, predicted, unchanged in on_ranks(2, fits.fitted, 2, way, joined=False):
        assert unchanged
        # gloo releases in a thread of its own, so up to one collective's buffer more may be seen; `test_training` takes more steps and compares to the byte.
        assert measured <= predicted + sum(p.nbytes for p in model.parameters())
        assert measured >= predicted
        assert predicted <= 1 << 20
        assert told == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "way", ["data", *(pytest.param(w, marks=pytest.mark.slow) for w in ("zero2", "zero3", "1f1b"))]
)
def test_a_path_that_another_ranks_samples_take_is_planned_for(way: str) -> None:
    """Rank 0 plans, and only rank 1 has padding, which makes a mask and all that comes of it."""
    model, sample, loss_fn = steps.padded()
    fixed = {"sharding": way}
    budget = memfit.smallest_budget(
        memfit.plan(model, steps.part_of(sample, 0, 2), loss_fn, "1GiB", steps.sgd, devices=2, fixed=fixed)
    )
    losses, _ = steps.alone(steps.padded, "sgd")
    for told, peaks, left in on_ranks(2, fits.padded_elsewhere, way, budget, joined=False):
        assert told == pytest.approx(losses, rel=1e-5)
        assert min(peaks) <= budget
        assert left == 0


def test_the_first_rank_saves_the_whole_model_under_any_way() -> None:
    """`model.state_dict()` has shards under ZeRO 2 and 3, and of a pipeline a stage."""
    model, sample, loss_fn = steps.chain()
    alone = memfit.apply(memfit.plan(model, sample, loss_fn, "1GiB", small.adamw), model).state_dict()
    first, other = on_ranks(2, fits.saved, 2, ["zero1", "zero3", "1f1b"], joined=False)
    assert other == [{}] * 3
    for found in first:
        assert found.keys() == alone.keys()
        assert all(type(value) is torch.Tensor and torch.equal(value, alone[name]) for name, value in found.items())


def test_a_loop_of_the_scripts_own_trains_under_every_way() -> None:
    """Under ZeRO 2 and 3 gradients stayed with the model's parameters, and the optimizer, which steps their shards, saw none and cleared none."""
    _, parameters = steps.alone(steps.chain, "sgd", clip_norm=0.1)
    first, _ = on_ranks(2, fits.looped, 2, ["data", "zero1", "zero2", "zero3"], joined=False)
    for found in first:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found.values(), parameters, strict=True))


@pytest.mark.slow
def test_a_loop_of_the_scripts_own_in_fp16_skips_on_all_ranks_what_overflows_on_one() -> None:
    """The scaler looked for gradients in shards that had none yet, and its ranks would have gone different ways."""
    whole = equality.undivided(steps.chain, "sgd", parts=2, precision="fp16", clip_norm=0.1, hot=1e6)
    first, other = on_ranks(2, fits.looped_in_fp16, 2, ["data", "zero1", "zero2", "zero3"], joined=False)
    for (skipped, found), (also_skipped, _) in zip(first, other, strict=True):
        assert skipped == also_skipped == whole.skipped == [False, True, False]
        pairs = zip(found.values(), whole.parameters, strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize(
    ("way", "extra"),
    [
        ({"sharding": "zero1", "micro_batches": 1}, 2000),
        pytest.param({"sharding": "1f1b", "micro_batches": 2}, 4000, marks=pytest.mark.slow),
    ],
)
def test_a_rank_above_its_budget_is_repaired_by_a_plan_for_all_or_all_say_which_and_by_how_much(
    way: dict[str, Any],
    extra: int,
) -> None:
    """Of a pipeline the cut stays, and what is run again in its stages is chosen anew."""
    model, sample, loss_fn = steps.chain()
    own = steps.part_of(sample, 0, 2)
    plain = memfit.plan(model, own, loss_fn, "1MiB", small.adamw, devices=2, fixed=way)
    budget = plain.prediction.peak_bytes
    first, last = on_ranks(2, fits.repaired, 2, way, budget, extra, joined=False)
    assert first[0] == last[0] == ""
    assert first[1] == last[1] in {2, 3}
    assert max(first[2], last[2]) <= budget
    assert first[3] == last[3]
    assert "above the budget; planned again for" in first[3]

    (told, _, needed, _), other = on_ranks(2, fits.repaired, 2, way, budget, budget, joined=False)
    assert (told, 0, needed, "") == other
    assert "the rehearsal measured a peak of" in told
    assert re.search(r"on rank [01], ", told)
    assert "there is no plan that much smaller: the smallest one is predicted to take" in told
    assert needed > budget


@pytest.mark.slow
def test_a_fit_goes_on_in_a_group_that_is_there() -> None:
    """Captured beside it: the same bytes as in a process without one; and where rank 0 finds no plan, all are told."""
    first, last = on_ranks(2, fits.in_a_group, 2)
    model, sample, loss_fn = steps.chain()
    own = steps.part_of(sample, 0, 2)
    fixed = {"micro_batches": 1}
    for way, (peak, predicted, error) in first.items():
        alone = memfit.plan(model, own, loss_fn, 1 << 40, small.adamw, devices=2, fixed={**fixed, "sharding": way})
        assert predicted == [figures.peak_bytes for figures in alone.prediction.ranks]
        assert last[way][1:] == (predicted, error)
        assert predicted[0] <= peak <= predicted[0] + sum(p.nbytes for p in model.parameters())
        assert error.startswith("no way of sharing the step out among 2 devices fits")


@pytest.mark.slow
def test_a_fit_in_another_world_says_what_to_call() -> None:
    """A script may catch what rank 0 says: the others waited for it to join them."""
    for other, no_plan, one, *again, structure, values, of_zero1, of_stages in on_ranks(
        2, fits.refused, 2, joined=False
    ):
        assert "there is 'data', 'zero1'" in no_plan
        assert len(again) == 2
        assert structure.startswith("the model of rank 1 is not that of rank 0")
        assert values.startswith(
            "the parameters of rank 1 are not those of rank 0 (2.weight is the first that differs)"
        )
        assert of_zero1 == of_stages
        assert of_zero1.startswith("the optimizer of rank 1 is not that of rank 0 (lr is 1.1 and 0.1), so ranks would")
        assert all("this rank has only a part of the model, since an earlier memfit.fit" in each for each in again)
        assert "there are 3 devices to train on, and this run has 2 ranks" in other
        assert "and memfit.fit without devices= fits one device" in one
    model, sample, loss_fn = steps.chain()
    with pytest.raises(memfit.InputError, match="there are 2 devices to train on, and this process is alone"):
        memfit.fit(model, sample, loss_fn, "1MiB", small.adamw, devices=2)


def test_a_step_after_an_evaluation_takes_what_is_predicted() -> None:
    for predicted, peaks in on_ranks(2, fits.evaluated, 2, "zero3", joined=False):
        assert peaks == [predicted] * 2


def test_weights_that_one_rank_gathers_alone_are_to_be_gathered_by_all() -> None:
    said, _ = on_ranks(2, fits.left_alone, joined=False)
    assert said.startswith("another rank has ended, or has kept rank 0 waiting for too long (")
    assert said.endswith("and call engine.state_dict() on all of them")


def test_ranks_that_have_planned_each_for_itself_are_told_what_differs() -> None:
    """They were told that their models differ, or waited for each other. What each runs again is its own."""

    def of(way: str, **more: Any) -> dict[str, Any]:
        return {"fixed": {"sharding": way, **more}}

    plans = [
        (of("data"), of("1f1b")),
        (of("zero2"), of("zero3")),
        (of("zero3"), {**of("zero3"), "clip_norm": 1.0}),
        (of("1f1b", micro_batches=2), of("1f1b", micro_batches=4)),
        (of("zero1"), {**of("zero1", precision="fp16"), "allow": ["fp16"]}),
        (of("data", micro_batches=1), of("data", micro_batches=2)),
    ]
    first, other = on_ranks(2, fits.planned_apart, plans)
    assert first == other
    *differing, alike = first
    assert alike == ""
    names = ["sharding", "sharding", "clip_norm", "(stages|micro_batches)", "precision"]
    for each, name in zip(differing, names, strict=True):
        assert re.match(rf"the plan of rank 1 is not that of rank 0 \({name} is ", each)


def test_a_rank_whose_code_is_another_one_is_named_on_all() -> None:
    """Each trained its own, and gradients of both were added up, without a word. What does not reach the loss may differ."""
    cases = [("data", kind) for kind in fits.OTHER_CODE] + [("zero3", "another loss"), ("zero3", "a line of a log")]
    cases += [("1f1b/2", kind) for kind in fits.OTHER_CODE if kind != "a line of a log"]
    first, other = on_ranks(2, fits.by_other_code, cases, joined=False, limit=60.0)
    assert first == other
    all_said, looks = first
    assert looks == sum(kind != "a line of a log" and way != "1f1b/2" for way, kind in cases)
    for said, (_, kind) in zip(all_said, cases, strict=True):
        told = "rank 1 computes the loss of rank 0's sample by other operations than rank 0 does, and a mixture"
        assert said.startswith(told) if kind != "a line of a log" else not said


def test_what_a_stage_cannot_run_is_told_with_a_way_that_can() -> None:
    """A loop of `engine.accumulate` as Accelerate's users write it, for which the fastest plan was a pipeline."""
    with pytest.raises(memfit.InputError, match=r'engine\.step does; or share .* fixed=\{"sharding": "data"\}'):
        Engine._refuse_stages(SimpleNamespace(_pipelined=object()), "engine.accumulate")  # type: ignore[arg-type]  # all that is asked


def test_ranks_are_not_told_to_hand_over_an_iterator_which_they_cannot() -> None:
    for said in on_ranks(2, fits.listed):
        assert "a list of 2 batches holds" in said
        assert "]: plan with a sample that holds all their samples and" in said


@pytest.mark.parametrize("way", ["zero3", "1f1b", pytest.param("zero2", marks=pytest.mark.slow)])
def test_ranks_that_call_different_things_are_told_at_once(way: str) -> None:
    """`if rank == 0: torch.save(engine.state_dict(), ...)`, while the others go on training, waited for half an hour."""
    *said, loss, names = (first := on_ranks(2, fits.apart, way, joined=False, limit=60.0))[0]
    *also, also_loss, none = first[1]
    one, other, refused, *evaluations = said
    model, sample, loss_fn = steps.chain()
    alone = memfit.apply(memfit.plan(model, sample, loss_fn, "1GiB", small.adamw), model)
    assert one == also[0]
    assert one.startswith("EngineError: rank 0 calls engine.state_dict() and rank 1 takes a step, and each has only")
    assert other == also[1]
    assert other.startswith("EngineError: rank 1 calls engine.state_dict() and rank 0 takes a step, and each has only")
    assert refused.startswith("BatchError: the batch is [")
    assert also[2].startswith("BatchError: rank 0 refuses its batch, and no rank takes the step: the batch is [")
    assert evaluations == also[3:]
    assert [each.partition(", and each has")[0] for each in evaluations] == [
        "EngineError: rank 0 calls engine.evaluating() and rank 1 takes a step",
        "EngineError: rank 0 calls engine.state_dict() and rank 1 calls engine.evaluating()",
    ][: len(evaluations)]
    assert loss == also_loss
    assert float(loss) == pytest.approx(alone.step(sample).loss, rel=1e-5)
    assert (names.split(), none) == (list(model.state_dict()), "")


def test_an_error_of_the_users_own_code_on_the_rank_that_plans_is_told_to_the_others() -> None:
    first, second = on_ranks(2, fits.failing, 2, joined=False, limit=60.0)
    assert first[:-1] == ["KeyError: 'nobody'"] * 2
    assert (
        second[:-1]
        == [
            "EngineError: rank 0 plans for all, and model, loss or optimizer failed there (KeyError: 'nobody'): see what it says"
        ]
        * 2
    )
    assert first[-1] == second[-1]


def test_one_device_is_as_none() -> None:
    """What a script under torchrun gives that counts its ranks, when it runs alone."""
    model, sample, loss_fn = steps.chain()
    engine = memfit.fit(model, sample, loss_fn, "1GiB", small.adamw, devices=1)
    assert engine.sharded is None
    alone = memfit.plan(model, sample, loss_fn, "1GiB", small.adamw, devices=1)
    assert alone.prediction.peak_bytes == engine.plan.prediction.peak_bytes
    assert not alone.choices.sharding


@pytest.mark.parametrize(("device", "asked"), [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl")])
def test_ranks_of_gpus_send_what_lies_in_the_hosts_memory_too(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str
) -> None:
    backends: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", backends.append)
    monkeypatch.setattr(memfit.ranks, "leave_group_at_exit", lambda: None)
    join_group(torch.device(device))
    assert backends == [asked]


def test_a_rank_sends_through_the_gpu_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    follow_device(torch.device("cuda", 1))
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(memfit.InputError, match=r"the model is on cpu, and .* alone \(cuda:nccl\): move the model"):
        follow_device(torch.device("cpu"))


def test_a_port_in_use_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in as_torchrun_tells(0, 2, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            memfit.EngineError, match=rf"^rank 0 of 2 has not met the others at 127\.0\.0\.1:{port} \(.+\): see that"
        ):
            join_group(torch.device("cpu"))
    assert not dist.is_initialized()


def test_a_rank_that_meets_nobody_in_a_step_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader with fewer batches, or an error that its script has not shown: gloo says the same of both."""

    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "[pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash."
        )

    with fake_mesh("data/2", "cpu") as mesh:
        agreement = Agreement(mesh.get_group(), torch.device("cpu"))
        monkeypatch.setattr(dist, "all_reduce", closed)  # a fake group's way, and that of many ranks
        told = r"^another rank has ended, .* rank 0 waiting .* \(\[pair\.cc:553\] Connection closed by peer \[127\.0\.0\.1\]:1\): see"
        for said in (partial(agreement.counts, 1, 1), partial(agreement.first, concerned=False)):
            with pytest.raises(memfit.EngineError, match=told):
                said()
