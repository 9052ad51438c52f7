"""Exports: a shell runs the script and nothing of what the run file holds; a TrainJob says what the plan has found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from memfit.cli.main import main
from memfit.service.exports import Needs, safe_name, slurm, train_job
from memfit.service.refusals import NotNowError, Refusal
from service import small_runs
from service.conftest import ANNA, Serving

HOSTILE = {
    "model": {"python": "net:build", "args": {"a": "$(touch owned)`touch owned`", "b": "\nMEMFIT_RUN_FILE\ntouch owned\n", "ü": "'\"\\"}},
    "fit": {"budget": "1GiB"},
}  # fmt: skip
NEEDS = Needs((1 << 30,), "cuda", 2 << 30, 3600.0)
BASH = shutil.which("bash") or "/bin/bash"
FAKE = '#!/bin/sh\nfor word in "$@"; do echo "$word" >> asked; done\nif [ "$1" = srun ]; then shift; fi\n'


def ran(script: str, folder: Path) -> list[str]:
    """The words that a script hands to srun, with this folder as its working one."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    (place / "srun").write_text(FAKE, encoding="utf-8")
    (place / "srun").chmod(0o755)
    (folder / "asked").unlink(missing_ok=True)
    assert subprocess.run([BASH, "-n"], input=script, text=True, check=False).returncode == 0
    path = f"{place}:{os.environ['PATH']}"
    subprocess.run([BASH, "-s"], input=script, text=True, check=True, cwd=folder, env={"PATH": path})
    return (folder / "asked").read_text().splitlines()


@pytest.mark.parametrize("name", ["plain", "a; touch owned", "$(touch owned)", "-x\n#SBATCH --wrap=owned", "…"])
def test_a_script_runs_what_it_should_and_nothing_of_what_it_holds(tmp_path: Path, name: str) -> None:
    script = slurm(HOSTILE, name, NEEDS)
    short = safe_name(name)
    assert ran(script, tmp_path) == ["memfit", "train", f"{short}.json"]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["asked", "bin", f"{short}.json"])
    told = json.loads((tmp_path / f"{short}.json").read_text())
    assert told == {**HOSTILE, "train": {"out": f"{short}-out"}}
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert f"#SBATCH --mem={5 * 1024}M" in directives  # 2 GiB of the host and 3 of the process
    assert "#SBATCH --gpus-per-node=1" in directives
    assert "#SBATCH --time=122" in directives
    assert len(directives) == 9
    (tmp_path / f"{short}-out").mkdir()
    (tmp_path / f"{short}-out" / "config.json").write_text("{}")
    assert ran(script, tmp_path) == ["memfit", "resume", f"{short}-out"]


def test_ranks_have_a_device_each(tmp_path: Path) -> None:
    script = slurm({}, "two", Needs((1 << 30, 1 << 29), "cpu"))
    assert ran(script, tmp_path) == ["memfit", "train", "two.json", "--nproc", "2"]
    assert "#SBATCH --mem=7872M" in script  # an eighth more than 1.5 GiB, and 3 GiB for each process
    assert "--time" not in script


def test_a_train_job_has_the_run_file_in_its_environment() -> None:
    made = train_job(HOSTILE, "My run", NEEDS, "image:1")
    trainer = made["spec"]["trainer"]
    assert made["metadata"]["name"] == "my-run"
    assert trainer["resourcesPerNode"]["limits"] == {"memory": "5120Mi", "nvidia.com/gpu": 1}
    (value,) = [each["value"] for each in trainer["env"] if each["name"] == "MEMFIT_RUN_FILE"]
    assert json.loads(value.replace("$$(", "$("))["model"] == HOSTILE["model"]
    assert trainer["command"][2] == 'printf %s "$MEMFIT_RUN_FILE" > run.json && exec memfit train run.json'
    assert yaml.safe_load(yaml.safe_dump(made)) == made


def test_a_run_of_the_service_is_exported_with_the_bytes_of_its_plan(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = serving.submit()
    with pytest.raises(NotNowError, match="has no plan"):
        serving.service.exported(ANNA, run.number, "slurm")
    plan: dict[str, Any] = {
        "rank_bytes": [300 << 20], "device": "cpu", "tiers": {}, "total_steps": 10, "step_seconds": 1.0, "startup_seconds": 5.0,
    }  # fmt: skip
    serving.service.store.change(run.number, "waiting", "planned", state="waiting", plan=plan)
    assert "# Predicted: 314572800 bytes on cpu, 15 s." in serving.service.exported(ANNA, run.number, "slurm")
    with pytest.raises(Refusal, match="needs an image"):
        serving.service.exported(ANNA, run.number, "trainjob")
    assert "image: mine:2" in serving.service.exported(ANNA, run.number, "trainjob", "mine:2")
    with pytest.raises(Refusal, match="no export 'pbs'"):
        serving.service.exported(ANNA, run.number, "pbs")


def test_a_file_is_exported_without_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, script = tmp_path / "run.json", tmp_path / "job.sh"
    file.write_text(json.dumps(small_runs.run_file()), encoding="utf-8")
    assert main(["submit", str(file), "--export", "slurm", "--to", str(script)]) == 0
    assert ran(script.read_text(), tmp_path)[:2] == ["memfit", "train"]
    assert main(["submit", str(file), "--export", "trainjob"]) == 3
    assert "needs --image" in capsys.readouterr().err
    assert main(["submit", str(file), "--export", "slurm", "--set", "fit.budget=null"]) == 3
    assert "--export needs fit.budget" in capsys.readouterr().err
