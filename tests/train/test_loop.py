"""However a run is stopped, going on gives the numbers of one that was not; the rest does what it says."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
import small
from memfit.errors import NonFiniteLossError, SnapshotError
from memfit.step import process_generators
from memfit.train import log, snapshot_folders, snapshots
from memfit.train.config import ScheduleConfig, TrainConfig
from memfit.train.data import ArraySamples, Batches
from memfit.train.evaluate import Accuracy, evaluate
from memfit.train.loop import RunOutcome, RunOutput, Validation, total_steps, train
from memfit.train.schedule import Rates, factor
from memfit.values.report import StepRecord
from train.fakes import FakeEngine, Noisy, non_finite, plan

SCHEDULE = ScheduleConfig("cosine", 3)


def data(samples: int = 10, size: int = 4, seed: int | None = 0) -> Batches:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((samples, 3)), random.standard_normal(samples)
    return Batches(ArraySamples({"x": x.astype(np.float32), "y": y.astype(np.float32)}), size, seed)


def engine(on_step: Callable[[int], None] = lambda _: None) -> FakeEngine:
    torch.manual_seed(5)
    model = Noisy()
    return FakeEngine(model, torch.optim.AdamW(model.parameters(), lr=0.01), on_step=on_step)


def run(out: Path, made: FakeEngine | memfit.Engine, steps: int = 11, **named: Any) -> RunOutcome:
    settings = named.pop("settings", TrainConfig(steps=steps, save_every=4, log_every=1, eval_every=3))
    batches = named.pop("batches", None) or data()
    return train(
        made, batches, RunOutput(out), settings, schedule=SCHEDULE, validation=Validation(data(seed=None)), **named
    )


def losses(out: Path) -> list[tuple[int, str, float]]:
    return [
        (line["step"], key, line[key])
        for line in log.read(out)
        for key in ("loss", "lr", "validation_loss")
        if key in line
    ]


def same_state(one: FakeEngine, other: FakeEngine) -> bool:
    assert one.optimizer is not None
    assert other.optimizer is not None
    mine, theirs = ({**e.model.state_dict(), **dict(e.model.named_buffers())} for e in (one, other))
    states = [(a, b) for s, t in zip(one.optimizer.state.values(), other.optimizer.state.values(), strict=True)
              for a, b in zip(s.values(), t.values(), strict=True)]  # fmt: skip
    return all(torch.equal(mine[k], theirs[k]) for k in mine) and all(torch.equal(a, b) for a, b in states)


class Crash(Exception):  # noqa: N818 - no error of ours
    """The process is gone."""


def crash_at(step: int) -> Callable[[int], None]:
    def on_step(number: int) -> None:
        if number == step:
            raise Crash

    return on_step


def signal_at(step: int, number: int = signal.SIGINT) -> Callable[[int], None]:
    def on_step(at: int) -> None:
        if at == step:
            os.kill(os.getpid(), number)

    return on_step


def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(tmp_path: Path) -> None:
    whole = engine()
    run(tmp_path / "whole", whole)
    with pytest.raises(Crash):
        run(tmp_path / "cut", engine(crash_at(7)))  # in mid-epoch, three steps after the snapshot
    torch.manual_seed(123)
    resumed = engine()

    snapshot = snapshots.latest(tmp_path / "cut", pytest.fail)
    outcome = run(tmp_path / "cut", resumed, snapshot=snapshot)

    assert snapshot.step == 4
    assert outcome.step == 11
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_state(whole, resumed)
    assert len(resumed.records) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves_it(tmp_path: Path, number: int) -> None:
    whole = engine()
    run(tmp_path / "whole", whole)
    before = signal.getsignal(number)

    stopped = run(tmp_path / "cut", engine(signal_at(6, number)))

    assert (stopped.step, stopped.signal) == (6, number)
    assert stopped.snapshot is not None
    assert stopped.snapshot.name == "step-000006"
    assert signal.getsignal(number) is before
    resumed = engine()
    run(tmp_path / "cut", resumed, snapshot=snapshots.latest(tmp_path / "cut", pytest.fail))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_state(whole, resumed)


def test_a_second_signal_stops_at_once_and_leaves_the_older_snapshots(tmp_path: Path) -> None:
    def twice(step: int) -> None:
        if step == 6:
            signal_at(6)(6)
            signal_at(6)(6)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, engine(twice))

    assert [f.name for f in snapshot_folders.folders(tmp_path)] == ["step-000004"]


def test_a_stop_during_an_evaluation_gives_it_up(tmp_path: Path) -> None:
    made = engine()
    forward = made.model.forward

    def interrupted(**batch: torch.Tensor) -> torch.Tensor:
        if not made.model.training:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(**batch)

    made.model.forward = interrupted  # type: ignore[method-assign]

    outcome = run(tmp_path, made)

    assert (outcome.step, outcome.validation_loss) == (3, None)
    assert made.model.training


def test_a_loss_that_is_not_finite_leaves_a_snapshot_of_before(tmp_path: Path) -> None:
    made = engine(lambda step: non_finite(step) if step == 6 else None)

    with pytest.raises(NonFiniteLossError, match=r"step 6: the loss is nan\. The state before it is in .*step-000005"):
        run(tmp_path, made)

    whole, resumed = engine(), engine()
    run(tmp_path / "whole", whole)
    run(tmp_path, resumed, snapshot=snapshots.latest(tmp_path, pytest.fail))
    assert same_state(whole, resumed)


def test_going_on_from_an_earlier_snapshot_sets_the_later_ones_aside(tmp_path: Path) -> None:
    run(tmp_path, engine(), settings=TrainConfig(steps=11, save_every=4, keep=9, log_every=1))

    run(tmp_path, engine(), steps=6, snapshot=snapshots.read(tmp_path / "step-000004"))

    assert [f.name for f in snapshot_folders.folders(tmp_path)] == ["step-000004", "step-000006"]
    assert [line["step"] for line in log.read(tmp_path) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, engine())
    again = engine()

    outcome = run(tmp_path, again, snapshot=snapshots.latest(tmp_path, pytest.fail))

    assert again.records == []
    assert (outcome.step, outcome.loss, outcome.validation_loss) == (11, first.loss, first.validation_loss)
    assert losses(tmp_path).count((11, "validation_loss", first.validation_loss or 0.0)) == 1


def test_data_of_another_length_is_refused(tmp_path: Path) -> None:
    run(tmp_path, engine())

    with pytest.raises(SnapshotError, match="training on 10 samples, and the data now holds 11"):
        run(tmp_path, engine(), batches=data(11), snapshot=snapshots.latest(tmp_path, pytest.fail))


def test_a_run_that_goes_on_under_another_plan_measures_the_peak_of_that_one(tmp_path: Path) -> None:
    """It told the peak measured under the plan before, beside the one predicted by the plan of now."""
    run(tmp_path, engine(), steps=4)
    made = engine()
    made.plan = plan(peak_bytes=2**18)
    run(tmp_path, made, steps=6, snapshot=snapshots.latest(tmp_path, pytest.fail))
    assert [record.peak_bytes is not None for record in made.records] == [True, False]
    same = engine()
    outcome = run(tmp_path, same, steps=8, snapshot=snapshots.latest(tmp_path, pytest.fail))
    assert outcome.peak_bytes is not None


def test_a_disk_too_full_for_a_snapshot_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    made = engine()

    with pytest.raises(SnapshotError, match="no space for a snapshot"):
        run(tmp_path, made)

    assert made.records == []


def test_every_sample_is_used_and_the_last_short_batch_too(tmp_path: Path) -> None:
    made = engine()

    outcome = run(tmp_path, made, settings=TrainConfig(epochs=2))

    assert outcome.total_steps == total_steps(TrainConfig(epochs=2), data()) == 6
    assert [len(batch["x"]) for batch in made.batches] == [4, 4, 2] * 2


def test_the_run_depends_on_its_seed_and_not_on_what_was_drawn_before(tmp_path: Path) -> None:
    one = engine()
    run(tmp_path / "one", one)
    other = engine()
    torch.rand(100)

    run(tmp_path / "other", other)

    assert same_state(one, other)


def test_evaluating_and_saving_more_often_changes_nothing(tmp_path: Path) -> None:
    rarely, often = engine(), engine()

    run(tmp_path / "rarely", rarely, settings=TrainConfig(steps=11))
    run(tmp_path / "often", often, settings=TrainConfig(steps=11, save_every=1, eval_every=1))

    assert same_state(rarely, often)


def test_the_schedule_moves_once_per_step_and_never_stands_at_zero(tmp_path: Path) -> None:
    made = engine()
    assert made.optimizer is not None

    run(tmp_path, made)

    rates = [line["lr"] for line in log.read(tmp_path) if "lr" in line]
    assert rates == [0.01 * factor(SCHEDULE, 11, step) for step in range(11)]
    assert rates[:4] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])
    assert min(rates) > 0
    assert made.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_are_torchs(name: str) -> None:
    """Against LambdaLR and CosineAnnealingLR, which step once per optimizer step."""
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3) for _ in range(2)]
    torchs: torch.optim.lr_scheduler.LRScheduler
    if name == "cosine":
        torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 20)
    else:
        torchs = torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda s: 1.0 if name == "constant" else 1 - s / 20)
    ours = Rates(optimizers[0], ScheduleConfig(name), 20)  # type: ignore[arg-type]

    for step in range(20):
        assert ours.set(step) == pytest.approx(optimizers[1].param_groups[0]["lr"])
        optimizers[1].step()
        torchs.step()


@pytest.mark.parametrize("largest", [1, 3, 100])
def test_evaluation_weighs_every_sample_alike_and_disturbs_nothing(largest: int) -> None:
    model = Noisy()
    model.inner[1].eval()  # a user's frozen batch norm
    batches = data(10, 4, None)
    before = process_generators.generators()

    loss = evaluate(model, batches, None, largest=largest)

    everything = batches.samples.batch(range(10), 0)
    with torch.no_grad():
        expected = float(model.eval()(**everything))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert torch.equal(before["torch"], torch.get_rng_state())


def test_the_accuracy_of_a_classifier_is_counted_over_all_samples() -> None:
    class Classifier(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=x.mean(), logits=torch.nn.functional.one_hot(x.long(), 3).float())

    x, labels = np.array([0, 1, 2, 0, 1, 2, 0]), np.array([0, 1, 2, 1, 1, 0, 0])
    batches = Batches(ArraySamples({"x": x.astype(np.float32), "labels": labels}), 4, None)
    accuracy = Accuracy()
    evaluate(Classifier(), batches, None, largest=3, accuracy=accuracy)
    assert (accuracy.right, accuracy.samples, accuracy.share) == (5, 7, 5 / 7)

    nothing = Accuracy()
    model = Noisy()
    evaluate(model, data(), None, largest=4, accuracy=nothing)
    assert (nothing.share, len(model._forward_hooks)) == (None, 0)


def test_evaluation_puts_every_modules_mode_back() -> None:
    model = Noisy()
    model.inner[1].eval()

    evaluate(model, data(), None, largest=4)

    assert [m.training for m in model.modules()] == [True, True, True, False, True, True]


def test_evaluation_by_tokens_is_the_mean_over_tokens() -> None:
    labels = np.array([[5, 1, 2, -100], [5, 3, -100, -100], [5, -100, -100, -100]])
    batches = Batches(ArraySamples({"labels": labels}), 2, None)

    def mean(_: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        counted = batch["labels"][:, 1:]
        return counted[counted != -100].float().mean()

    assert evaluate(nn.Identity(), batches, mean, largest=1, weights="next_tokens:labels") == pytest.approx(2.0)
    assert math.isnan(
        evaluate(
            nn.Identity(),
            Batches(ArraySamples({"labels": labels[2:]}), 1, None),
            mean,
            largest=1,
            weights="next_tokens:labels",
        )
        or 0
    )


def test_micro_batches_of_an_evaluation_are_no_larger_than_the_plans(tmp_path: Path) -> None:
    seen: list[int] = []
    made = engine()
    made.plan = plan(micro_batches=3)
    made.model.register_forward_pre_hook(
        lambda module, _, batch: None if module.training else seen.append(len(batch["x"])), with_kwargs=True
    )

    run(tmp_path, made, steps=1)

    assert max(seen) == 2  # of 4, in 3 parts


def test_metered_steps_stand_beside_their_prediction_in_the_log(tmp_path: Path) -> None:
    outcome = run(tmp_path, engine(), settings=TrainConfig(steps=5, meter_every=3, log_every=100))

    lines = [line for line in log.read(tmp_path) if "loss" in line]
    assert [(line["step"], line.get("peak_bytes")) for line in lines] == [(1, None), (2, 500_000), (5, 500_000)]
    assert lines[1]["predicted_peak_bytes"] == 2**19
    assert outcome.peak_bytes == 500_000
    assert [record.peak_bytes for record in log.records(tmp_path)] == [None, 500_000, 500_000]


def test_a_line_of_the_log_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / log.NAME).write_text(json.dumps({"step": 1, "loss": 2.0, "seconds": 1.0}) + '\n{"step": 2, "lo')

    assert [record.step for record in log.records(tmp_path)] == [1]


# -- steps that are skipped since fp16 overflowed ----------------------------------------------------------------------------


class Skipping(FakeEngine):
    """Skips the steps of these numbers, as a gradient scaler does."""

    def __init__(self, *skipped: int) -> None:
        torch.manual_seed(5)
        model = Noisy()
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        self.skipped = skipped

    def step(self, batch: Any, *, meter: bool = False) -> StepRecord:
        record = super().step(batch, meter=meter)
        return replace(record, skipped=record.step in self.skipped)


def test_a_skipped_step_uses_its_batch_and_does_not_move_the_schedule(tmp_path: Path) -> None:
    run(tmp_path, Skipping(1, 2, 6))

    lines = [line for line in log.read(tmp_path) if "loss" in line]
    places = [0, 0, 0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert [line["lr"] for line in lines] == [0.01 * factor(SCHEDULE, 11, place) for place in places]
    assert [line["step"] for line in lines if line.get("skipped")] == [1, 2, 6]
    assert [record.step for record in log.records(tmp_path) if record.skipped] == [1, 2, 6]


def test_a_resumed_run_knows_how_far_the_schedule_has_moved(tmp_path: Path) -> None:
    run(tmp_path / "whole", Skipping(1, 2, 6))
    first = Skipping(1, 2)
    first.on_step = crash_at(5)
    with pytest.raises(Crash):
        run(tmp_path / "cut", first)

    run(
        tmp_path / "cut", Skipping(2), snapshot=snapshots.latest(tmp_path / "cut", pytest.fail)
    )  # the second is the sixth

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def scaled_engine(on_step: Callable[[int], None] = lambda _: None) -> memfit.Engine:
    """A real one, whose first steps overflow."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        on_step(made.steps + 1)
        loss: torch.Tensor = model(**batch) * 100
        return loss

    torch.manual_seed(5)
    model = Noisy()
    fixed = {"precision": "fp16", "micro_batches": 1}
    plan = memfit.plan(model, data().sample(), lambda m, b: m(**b) * 100, "1GiB", small.adamw, fixed=fixed)
    made = memfit.apply(plan, model, loss_fn)
    return made


def test_a_resumed_run_in_fp16_is_bit_equal_to_one_that_never_stopped(tmp_path: Path, one_thread: None) -> None:
    whole = scaled_engine()
    run(tmp_path / "whole", whole)
    with pytest.raises(Crash):
        run(tmp_path / "cut", scaled_engine(crash_at(7)))
    resumed = scaled_engine()

    run(tmp_path / "cut", resumed, snapshot=snapshots.latest(tmp_path / "cut", pytest.fail))

    assert any(record.skipped for record in whole.records)
    assert not all(record.skipped for record in whole.records)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert small.same(small.state_of(whole.model, whole.optimizer), small.state_of(resumed.model, resumed.optimizer))
    assert whole.scaling is not None
    assert resumed.scaling is not None
    assert whole.scaling.state() == resumed.scaling.state()


def test_an_evaluation_runs_in_the_precision_of_training() -> None:
    seen: list[torch.dtype] = []
    model = Noisy()
    model.inner[0].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    evaluate(model, data(), None, largest=4, precision="bf16")
    evaluate(model, data(), None, largest=4)
    assert set(seen[: len(seen) // 2]) == {torch.bfloat16}
    assert set(seen[len(seen) // 2 :]) == {torch.float32}
