"""A run ends when evaluations get no better, and leaves the model of the best one; stopped in between, it ends in the same way."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import ConfigError, InputError
from memfit.meter import metered
from memfit.train import log, snapshot_folders, snapshots
from memfit.train.config import TrainConfig
from memfit.train.data import Position
from memfit.train.early_stopping import Best, EarlyStopping, EarlyStoppingConfig
from memfit.train.live import RunState
from memfit.train.loop import RunOutcome, RunOutput, Validation, train
from memfit.train.progress import SilentDisplay
from train.fakes import FakeEngine
from train.test_loop import Crash, crash_at, data, engine, losses

VALUES = [3.0, 2.0, 2.5, 1.0, 1.5, 1.2, 1.1, 0.5]  # the best of the first seven is the fourth, after step 8


class Notes(SilentDisplay):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.may_end_early: list[bool] = []

    def begin(self, run: RunState) -> None:
        self.may_end_early.append(run.may_end_early)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(
    out: Path,
    made: FakeEngine,
    values: Sequence[float] = VALUES,
    *,
    patience: int = 3,
    notes: Notes | None = None,
    **named: Any,
) -> RunOutcome:
    """Sixteen steps at most, evaluated after every second one with these losses."""
    rest = iter(values)

    def told(_model: nn.Module, _batch: Any) -> torch.Tensor:
        return torch.tensor(next(rest))

    return train(
        made,
        data(),
        RunOutput(out, display=notes or SilentDisplay()),
        TrainConfig(steps=16, save_every=3, keep=1, log_every=1, eval_every=2),
        validation=Validation(data(4, 4, None), told),
        early_stopping=named.pop("early_stopping", EarlyStoppingConfig(patience=patience)),
        **named,
    )


def weights(made: FakeEngine) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in [*made.model.state_dict().items(), ("seen", made.model.get_buffer("seen"))]}


def after(steps: int, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after so many steps of a run that is not stopped early."""
    made = engine()
    train(made, data(), RunOutput(folder), TrainConfig(steps=steps))
    return weights(made)


def test_training_ends_and_the_model_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    made, notes = engine(), Notes()

    outcome = run(tmp_path / "run", made, notes=notes)

    assert (outcome.step, outcome.total_steps, len(made.records)) == (14, 16, 14)
    assert outcome.best == Best("validation_loss", 1.0, 8)
    assert outcome.stopped_early == "no better validation loss in 3 evaluations"
    assert outcome.validation_loss == pytest.approx(1.1)
    expected = after(8, tmp_path / "plain")
    assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())
    # Of the others only the newest is kept; it is that of the last step, to go on from.
    assert [f.name for f in snapshot_folders.folders(tmp_path / "run")] == ["step-000008", "step-000014"]
    assert outcome.snapshot is not None
    assert outcome.snapshot.name == "step-000014"
    best = [line["step"] for line in log.read(tmp_path / "run") if line.get("best")]
    assert best == [2, 4, 8]
    assert "stopped early after step 14: no better validation loss in 3 evaluations" in notes.notes
    assert notes.may_end_early == [True]
    assert notes.notes[-1] == "the model is that of the best evaluation: validation loss 1.0000 after step 8"


def test_without_an_end_before_the_last_step_the_model_is_the_best_one_all_the_same(tmp_path: Path) -> None:
    made = engine()

    outcome = run(tmp_path / "run", made, patience=9, values=[3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])

    assert (outcome.step, outcome.stopped_early) == (16, None)
    expected = after(4, tmp_path / "plain")
    assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())


@pytest.mark.parametrize("at", [5, 10, 14])
def test_a_run_that_crashed_ends_as_one_that_did_not(tmp_path: Path, at: int) -> None:
    whole = engine()
    expected = run(tmp_path / "whole", whole)
    with pytest.raises(Crash):
        run(tmp_path / "cut", engine(crash_at(at)))
    resumed = engine()

    snapshot = snapshots.latest(tmp_path / "cut", pytest.fail)
    outcome = run(tmp_path / "cut", resumed, VALUES[snapshot.step // 2 :], snapshot=snapshot)

    assert (outcome.step, outcome.best, outcome.stopped_early) == (14, expected.best, expected.stopped_early)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    mine, theirs = weights(whole), weights(resumed)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [f.name for f in snapshot_folders.folders(tmp_path / "cut")] == ["step-000008", "step-000014"]


def test_a_run_that_ended_early_stays_ended_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    run(tmp_path, engine())

    again, notes = engine(), Notes()
    outcome = run(tmp_path, again, [], notes=notes, snapshot=snapshots.latest(tmp_path, pytest.fail))
    assert notes.may_end_early == []  # that it trains is not told
    assert (again.records, outcome.step, outcome.best) == ([], 14, Best("validation_loss", 1.0, 8))

    on = engine()
    outcome = run(tmp_path, on, VALUES[7:], patience=9, snapshot=snapshots.latest(tmp_path, pytest.fail))
    assert (len(on.records), outcome.step, outcome.best) == (2, 16, Best("validation_loss", 0.5, 16))


def test_a_best_snapshot_that_is_damaged_leaves_the_last_model_and_says_so(tmp_path: Path) -> None:
    made, notes = engine(), Notes()
    model = tmp_path / "run" / "step-000008" / "model.pt"
    made.on_step = lambda step: model.write_bytes(b"") if step == 13 else None  # type: ignore[assignment, func-returns-value]

    outcome = run(tmp_path / "run", made, notes=notes)

    assert outcome.best is None
    assert notes.notes[-1].endswith("the model is that of step 14, not of the best evaluation")
    expected = after(14, tmp_path / "plain")
    assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())


def test_a_best_snapshot_that_is_gone_is_looked_for_anew(tmp_path: Path) -> None:
    run(tmp_path, engine())
    shutil.rmtree(tmp_path / "step-000008")
    notes = Notes()

    outcome = run(tmp_path, engine(), [1.3], notes=notes, patience=9, snapshot=snapshots.latest(tmp_path, pytest.fail))

    assert notes.notes[0].startswith(
        "the snapshot of the best evaluation (validation loss 1.0000 after step 8) is gone"
    )
    assert outcome.best == Best("validation_loss", float(torch.tensor(1.3)), 16)


def test_going_back_to_the_best_model_makes_no_second_copy_of_it(tmp_path: Path) -> None:
    """At that moment the optimizer's state is there as well, so a copy may be more than was planned for."""
    torch.manual_seed(5)
    made = FakeEngine(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), None)
    staged = snapshots.stage(tmp_path, made, snapshots.Moment(1, Position(), 1, {}, {}))
    snapshots.commit(staged, staged.on_disk())
    expected = {name: value.clone() for name, value in made.model.state_dict().items()}
    for parameter in made.model.parameters():
        parameter.data.zero_()
    snapshot = snapshots.read(staged.final)

    with metered(made.model.parameters()) as reading:
        snapshots.restore_model(snapshot, made.model)

    mapped = (
        (staged.final / "model.pt").stat().st_size
    )  # pages of the file, which the system can drop; the meter counts them
    assert mapped in reading.changes
    assert all(abs(change) < 1024 for change in reading.changes if abs(change) != mapped)
    assert all(torch.equal(value, expected[name]) for name, value in made.model.state_dict().items())


def test_an_accuracy_that_the_model_does_not_give_is_refused_at_the_first_evaluation(tmp_path: Path) -> None:
    made = engine()

    with pytest.raises(InputError, match=r"early_stopping\.metric: validation_accuracy needs logits"):
        run(tmp_path, made, early_stopping=EarlyStoppingConfig(metric="validation_accuracy"))

    assert len(made.records) == 2


def test_an_accuracy_has_to_rise_and_a_loss_to_fall_by_more_than_the_least_change() -> None:
    falls = EarlyStopping(EarlyStoppingConfig(patience=2, min_delta=0.25))
    assert [falls.take(i, value) for i, value in enumerate([2.0, 1.75, 1.5, 1.3])] == [True, False, True, False]
    assert not falls.over
    falls.take(4, 1.5)
    assert falls.over
    assert falls.reason() == "no better validation loss by more than 0.25 in 2 evaluations"

    rises = EarlyStopping(EarlyStoppingConfig(metric="validation_accuracy"))
    assert [rises.take(i, value) for i, value in enumerate([0.5, 0.75, 0.75, 0.5])] == [True, True, False, False]
    assert str(rises.best) == "validation accuracy 75.0 % after step 1"


def test_a_loss_that_is_not_finite_is_no_improvement() -> None:
    count = EarlyStopping(EarlyStoppingConfig(patience=2))

    assert [count.take(i, value) for i, value in enumerate([math.nan, 5.0, -math.inf, math.nan])] == [
        False, True, False, False,
    ]  # fmt: skip
    assert count.over
    assert count.best == Best("validation_loss", 5.0, 1)


def test_another_metric_is_counted_anew() -> None:
    one = EarlyStopping(EarlyStoppingConfig())
    one.take(3, 2.0)
    one.take(6, 3.0)
    same, other = EarlyStopping(EarlyStoppingConfig()), EarlyStopping(EarlyStoppingConfig(metric="validation_accuracy"))

    same.set_state(one.state())
    other.set_state(one.state())
    other.set_state(None)  # a snapshot of a run without early stopping

    assert (same.best, same.misses) == (one.best, 1)
    assert (other.best, other.misses) == (None, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"patience": 0}, "early_stopping.patience: 0 is less than 1"), ({"min_delta": -0.1}, "-0.1 is no change")],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStoppingConfig(**settings)
