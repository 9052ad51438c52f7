"""A report is the same after a journey through JSON, whatever it does or does not hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.errors import PlanFileError
from memfit.techniques.choices import Choices
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.report import FrontierPoint, Rehearsal, Report, StepRecord
from memfit.values.script import Script


def plan() -> Plan:
    return Plan(
        budget_bytes=1000,
        choices=Choices(2, 8, "samples"),
        script=Script(),
        prediction=Prediction(900, 2000, 1.5, 1.0, 1.25, "measured", curve={"parameter": (1, 2)}, moments=(0, 1)),
        signature="x float32[16]",
        model="m",
        device="cpu",
        torch_version="2",
    )


def full() -> Report:
    return Report(
        "a title",
        plan(),
        Rehearsal(900, 890, 2.0, 2, ("operation 3 differs",), (1, 5, 2)),
        (StepRecord(1, 0.5, 0.1, 2, 890, 7, ("late",)), StepRecord(2, 0.25, 0.1)),
        (FrontierPoint(1000, 900, 1.5, 1.25, 2), FrontierPoint(800, 790, 1.9, 1.5)),
        (("torch", "2.13"), ("accuracy", "0.9")),
    )


@pytest.mark.parametrize("report", [full(), Report("", plan())], ids=["full", "bare"])
def test_json_gives_the_same_report_back(report: Report) -> None:
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_a_file_holds_the_same_report(tmp_path: Path) -> None:
    full().save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert Report.from_json(json.loads(text)) == full()


def test_a_report_with_a_damaged_plan_is_refused() -> None:
    data = full().to_json()
    del data["plan"]["script"]
    with pytest.raises(PlanFileError):
        Report.from_json(data)


def test_a_loss_that_is_no_number_survives() -> None:
    """`memfit.measure` has no loss to report."""
    report = replace(full(), records=(StepRecord(1, float("nan"), 0.1),))
    assert math.isnan(Report.from_json(json.loads(json.dumps(report.to_json()))).records[0].loss)


def test_the_error_of_a_prediction_has_a_sign() -> None:
    assert Rehearsal(1010, 1000, 1.0).error == pytest.approx(0.01)
    assert Rehearsal(990, 1000, 1.0).error == pytest.approx(-0.01)
    assert Rehearsal(990, 0, 1.0).error == 0.0
