"""The command line: arguments, exit statuses, JSON, messages; a stand-in plans and trains."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cli.commands import Ran
from memfit.cli import doctor, extras
from memfit.cli.main import main, parser
from memfit.errors import BudgetError, CaptureError, InfeasibleError, InputError, NonFiniteLossError, Remedy
from memfit.storage import links
from memfit.trackers import tensorboard
from memfit.train import plans
from memfit.train import run as runs
from train.fakes import Api, non_finite, plan

CONFIG = """
model: {python: "cli_toy:build"}
data: {train: train.npz}
fit: {budget: 1MiB, global_batch: 4}
train: {steps: 5, save_every: 2}
"""

TOY = """
from train.fakes import Noisy

def build(fail=False):
    print("a word from the user's model")
    if fail:
        raise RuntimeError("the user's own mistake")
    return Noisy()
"""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    for module in (runs, plans):
        monkeypatch.setattr(module, "api", made)
    return made


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_toy.py").write_text(TOY, encoding="utf-8")
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "train.npz",
        x=random.standard_normal((10, 3)).astype(np.float32),
        y=random.standard_normal(10).astype(np.float32),
    )
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the configuration's folder goes in front
    monkeypatch.delitem(sys.modules, "cli_toy", raising=False)
    return path


def test_help_and_bad_arguments_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from memfit.cli.main import main; "
        "assert main(['plan', '--help']) == 0 and main(['plan']) == 3 and main(['explain', 'nowhere.json']) == 3; "
        "sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "--budget" in done.stdout


def _verbs() -> list[str]:
    (verbs,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    return list(verbs.choices)


@pytest.mark.parametrize("verb", _verbs())
def test_every_verb_has_help_and_json(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    ran = Ran(capsys, verb, "--help")

    assert ran.status == 0
    assert "--json" in ran.out


@pytest.mark.parametrize(
    "arguments", [["fly"], ["frontier"], ["plan", "x.yaml", "--speed"], ["frontier", "x", "--points", "a"]]
)
def test_bad_arguments_are_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    ran = Ran(capsys, *arguments)

    assert ran.status == 3
    assert ran.err.startswith("usage: memfit")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["plan", "run.yaml", "--epochs", "1"], "--epochs 1; did you mean --set train.epochs=...?"),
        (["train", "run.yaml", "--host-budget=1GiB"], "--host-budget=1GiB; did you mean --set fit.host_budget=...?"),
        (["plan", "run.yaml", "--gpu", "4090"], "--gpu 4090; did you mean --device?"),
        (["estimate", "m", "--gpu", "t4", "--seq-len", "64"], "--seq-len 64; did you mean --length?"),
        (["estimate", "m", "--gpu", "t4", "--batch-size", "4"], "--batch-size 4; did you mean --batch?"),
        (["doctor", "x"], "unrecognized arguments: x\n"),
        (["paln", "run.yaml"], "; did you mean plan?"),
        (["fly"], "'explain', 'doctor')\n"),
        (["plan", "run.yaml", "--largest", "bach"], "; did you mean batch?"),
        (["plan", "run.yaml", "--batch-size", "4"], "--batch-size 4; did you mean --set fit.global_batch=...?"),
        (["train", "run.yaml", "--output", "o"], "--output o; did you mean --set train.out=...?"),
        (["train", "run.yaml", "--bf16"], "--bf16; did you mean --set fit.allow=[bf16]?"),
        (["train", "run.yaml", "--memory=9"], "--memory=9; did you mean --budget?"),
        (["train", "run.yaml", "--nproc_per_node=2"], "--nproc_per_node=2; did you mean --nproc?"),
        (["train", "run.yaml", "--resume"], "--resume; did you mean memfit resume?"),
        (["train", "run.yaml", "--quiet"], "unrecognized arguments: --quiet\n"),  # and no --set, which is nearest
        (["--json", "plan", "run.yaml"], "options stand after the command: memfit plan ... --json"),
    ],
)
def test_an_option_that_there_is_not_names_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str
) -> None:
    ran = Ran(capsys, *arguments)

    assert ran.status == 3
    assert meant in ran.err


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    alone, asked, of_verb = Ran(capsys), Ran(capsys, "help"), Ran(capsys, "help", "plan")

    assert (alone.status, asked.status, of_verb.status) == (3, 0, 0)
    for verb in _verbs():
        assert f"\n    {verb} " in alone.err
        assert f"\n    {verb} " in asked.out
    assert of_verb.out.startswith("usage: memfit plan")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["plan", "cli_toy.py"], "cli_toy.py is Python: name a run file (YAML or JSON)"),
        (["train", "."], ". is a folder: name a run file (YAML or JSON)"),
        (
            ["plan", "run.yaml", "--budget", "0.8"],
            "memfit: --budget 0.8: expected text or a whole number, found 0.8: write",
        ),
        (
            ["plan", "run.yaml", "--set", "fit.budget=[8GiB]"],
            "found ['8GiB']: write \"8GiB\", a whole number of bytes, or",
        ),
        (
            ["plan", "run.yaml", "--device", "cuda"],
            "--device cuda is a device of this computer: --set fit.device=cuda plans",
        ),
        (["frontier", "run.yaml", "--device", "cuda:0"], "--device cuda:0 is a device of this computer"),
        (["frontier", "run.yaml", "--device", "4900"], "no device called '4900' is known; did you mean rtx4090"),
        (["plan", "run.yaml", "--save", "."], "cannot write the plan .: it is a folder: name a file in it"),
        (["plan", "run.yaml", "--save-trace", "run.yaml/x"], "cannot write the trace run.yaml/x: there is no folder "),
        (
            ["plan", "run.yaml", "--save", "no/such/folder.json"],
            "cannot write the plan no/such/folder.json: there is no folder ",
        ),
        (["frontier", "run.yaml", "--html", "run.yaml/x.html"], "cannot write the report run.yaml/x.html: "),
    ],
)
def test_a_wrong_guess_is_told_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, given: list[str], told: str
) -> None:
    ran = Ran(capsys, *given)

    assert ran.status == 3
    assert told in ran.err
    assert "reading" not in ran.err
    assert not api.calls


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_an_answer_that_cannot_be_written_says_so_and_not_that_nothing_fits(tmp_path: Path) -> None:
    """Status 1 would say that training does not fit."""
    plan().save(tmp_path / "plan.json")
    with Path("/dev/full").open("w", encoding="utf-8") as out:
        ran = subprocess.run(
            [sys.executable, "-m", "memfit", "explain", "plan.json"],
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    told = "memfit: cannot write the answer to standard output: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (2, told)


def test_a_folder_whose_name_the_terminal_cannot_write_is_escaped(
    monkeypatch: pytest.MonkeyPatch, api: Api, config: Path
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))

    assert main(["train", str(config), "--set", "train.out=l\u00e4uft"]) == 0
    sys.stdout.flush()
    assert b"l\\xe4uft" in buffer.getvalue()


def test_a_run_that_has_ended_is_not_planned_anew(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    Ran(capsys, "train", config)
    before = {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    api.calls.clear()

    ran = Ran(capsys, "resume", "out", "--set", "fit.global_batch=2")

    assert ran.status == 3
    assert "5 steps are done, and none is left to train with other settings" in ran.err
    assert not api.calls
    assert {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()} == before
    assert Ran(capsys, "resume", "out", "--set", "fit.global_batch=2", "--set", "train.steps=9").status == 0


@pytest.mark.parametrize("option", ["--save", "--save-trace"])
def test_a_shell_leaves_home_to_the_command_after_an_equals_sign(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    api: Api,
    config: Path,
    option: str,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))

    assert Ran(capsys, "plan", config, f"{option}=~/plan.json").status == 0
    assert (home / "plan.json").is_file()
    assert "~nobody-here/plan.json" in Ran(capsys, "plan", config, f"{option}=~nobody-here/plan.json").err


def test_a_service_that_is_not_there_is_told_by_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("MEMFIT_SERVICE", raising=False)

    assert "--folder of one that was started with it" in Ran(capsys, "runs").err
    there = tmp_path / "service"
    assert f"no service has been started in {there}: " in Ran(capsys, "runs", "--folder", there).err
    assert "--budget 1GiB; did you mean --capacity?" in Ran(capsys, "serve", "--budget", "1GiB").err


@pytest.mark.parametrize("shorter", ["train.steps=3", "train.steps=1"])
def test_a_run_is_not_made_shorter_than_it_is(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, shorter: str
) -> None:
    Ran(capsys, "train", config)
    before = {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}

    ran = Ran(capsys, "resume", "out", "--set", shorter)

    assert ran.status == 3
    assert f"5 steps are done, and the run is to have {shorter[-1]}: ask for 5 or more" in ran.err
    assert {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()} == before
    assert Ran(capsys, "resume", "out", "--set", "train.steps=5").status == 0


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert Ran(capsys, "--version").out.startswith("memfit ")


def test_a_plan_is_explained_and_saved(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    ran = Ran(capsys, "plan", config, "--budget", "2MiB", "--set", "fit.clip_norm=1e-1", "--save", "plan.json")

    assert ran.status == 0
    assert "Fits: 512 KiB of 1.00 MiB" in ran.out
    ((name, (_, sample, budget), named),) = api.calls
    assert (name, budget, named["clip_norm"], named["device"]) == ("plan", "2MiB", 0.1, None)
    assert list(sample["x"].shape) == [4, 3]
    explained = Ran(capsys, "explain", "plan.json", "--json")
    assert explained.data["peak_bytes"] == 2**19


def test_a_plan_and_its_trace_are_made_of_one_model(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    ran = Ran(capsys, "plan", config, "--save-trace", "trace.json.gz")

    (first, (recorded, *_), _), (second, (planned, *_), _) = api.calls
    assert (first, second, recorded) == ("record", "plan", planned)
    assert ran.out.count("a word from the user's model") == 1
    assert Path("trace.json.gz").exists()


def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    ran = Ran(capsys, "plan", config, "--json")

    assert ran.data["fits"] is True
    assert ran.data["peak_bytes"] == 2**19
    assert "a word from the user's model" in ran.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InfeasibleError("too little", budget_bytes=1, minimum_bytes=9, remedies=(Remedy("x=1", 2, 0.5),)), 1),
        (CaptureError("cannot be written down"), 2),
        (NonFiniteLossError("nan"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_status_says_what_happened(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, error: BaseException, status: int
) -> None:
    api.error = error

    for verb in ("plan", "train", "frontier"):
        ran = Ran(capsys, verb, config, "--json")

        assert ran.status == status
        assert ran.data["exit_status"] == status
        assert ran.data["error"] == type(error).__name__
        assert "Traceback" not in ran.err
        assert f"memfit: {error if str(error) else 'interrupted'}" in ran.err


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    api.error = InfeasibleError("too little", budget_bytes=1, minimum_bytes=9, remedies=(Remedy("x=1", 2, 0.5),))

    data = Ran(capsys, "plan", config, "--json").data

    assert (data["fits"], data["minimum_bytes"]) == (False, 9)
    (remedy,) = data["remedies"]
    assert remedy == {
        "text": "x=1",
        "saved_bytes": 2,
        "extra_seconds": 0.5,
        "kind": "",
        "arguments": None,
        "settings": [],
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--budget", "24"], "memfit: --budget=24 is 24 bytes"),
        (["--set", "fit.budget=24"], "memfit: --set fit.budget=24 is 24 bytes"),
        ([], "run.yaml: fit.budget=24 is 24 bytes"),
    ],
)
def test_a_budget_is_named_as_it_was_given(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, given: list[str], told: str
) -> None:
    api.error = BudgetError("budget=24 is 24 bytes")

    assert told in Ran(capsys, "plan", config, *given).err


def test_a_users_own_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    ran = Ran(capsys, "plan", config, "--set", "model.args={fail: true}", "--json")

    assert ran.status == 2
    assert "cli_toy.py" in ran.err
    assert "memfit/cli/plan.py" not in ran.err
    assert ran.data["message"] == "RuntimeError: the user's own mistake"


def test_debug_shows_our_own_lines_of_a_users_error(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    err = Ran(capsys, "plan", config, "--set", "model.args={fail: true}", "--debug").err

    assert "memfit/cli/plan.py" in err
    assert "cli_toy.py" in err


def test_an_error_of_our_own_keeps_all_lines(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.train.plans.make_plan", None)

    err = Ran(capsys, "plan", config).err

    assert "memfit/cli/plan.py" in err
    assert "code that memfit called" not in err


def test_debug_shows_where_our_own_come_from(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert "Traceback" in Ran(capsys, "plan", config, "--set", "fit.x=1", "--debug").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
        (["plan", "run.yaml", "--set", "fit.bugdet=1"], "did you mean fit.budget?"),
        (["plan", "run.yaml", "--set", "fit.budget="], "fit.budget is missing"),
        (["plan", "run.yaml", "--budget", "8G"], "memfit: --budget 8G: '8G' has a unit memfit does not read"),
        (["plan", "run.yaml", "--budget", "-3GiB"], "memfit: --budget -3GiB: '-3GiB' is not a number of bytes"),
        (["plan", "run.yaml", "--set", "optim.lr=-1"], "memfit: --set optim.lr=-1: -1.0 is not positive"),
        (["plan", "run.yaml", "--set", "model.path=m"], "model.path=m: no such key; did you mean model.hf?"),
        (["plan", "run.yaml", "--set", "data.train=gone.npz"], "data.train: there is no file"),
        (["plan", "run.yaml", "--set", "model.python=gone:build"], "model.python: there is no module 'gone'"),
        (["plan", "run.yaml", "--set", "model.python=cli_toy:gone"], "has no function 'gone'"),
        (
            ["plan", "run.yaml", "--set", "model.python=json:dumps", "--set", "model.args={obj: 1}"],
            "not a torch.nn.Module",
        ),
        (
            ["plan", "run.yaml", "--set", "model.args={size: 1}"],
            "model.args: cli_toy:build takes (fail=False): got an unexpected keyword argument 'size'",
        ),
        (["serve", "--port", "99999"], "--port 99999: a port is a number from 1 to 65535"),
        (["serve", "--folder", "run.yaml"], "--folder: cannot make the folder"),
        (["serve", "--folder", "run.yaml", "--make-token", "anna"], "--folder: cannot make the folder"),
        (["serve", "--data", "gone"], "--data: there is no folder gone"),
        (["serve", "--keep-days", "-1"], "--keep-days: -1 is not positive; leave it out for no limit"),
        (["serve", "--run-seconds", "0"], "--run-seconds: 0 is not positive; leave it out for no limit"),
        (["plan", "run.yaml", "--set", "fit.device=tpu"], "fit.device: torch cannot use 'tpu'"),
        (["plan", "run.yaml", "--save", "no/such/folder.json"], "cannot write the plan"),
        (["plan"], "a CONFIG or --trace FILE"),
        (["plan", "run.yaml", "--trace", "trace.gz"], "a CONFIG or --trace FILE"),
        (["plan", "--trace", "gone.gz"], "--trace needs --budget"),
        (["plan", "--trace", "gone.gz", "--budget", "1GiB"], "not a readable trace"),
        (["plan", "--trace", "gone.gz", "--budget", "1GiB", "--device", "t4"], "--device needs a CONFIG"),
        (["frontier", "run.yaml", "--points", "1"], "--points 1"),
        (["train", "run.yaml", "--plan", "gone.json"], "cannot read the plan gone.json"),
        (["explain", "gone.json"], "cannot read the plan gone.json"),
        (["explain", "."], "is no run's folder"),
        (["explain", "run.yaml"], "run.yaml is a run file: memfit explain takes a saved plan"),
        (["resume", "gone"], "there is no folder gone: memfit resume takes the folder of a run"),
        (["resume", "run.yaml"], "run.yaml is a file: memfit resume takes the folder of a run"),
        (["resume", "."], "there is no snapshot in ."),
    ],
    ids=lambda value: " ".join(value[2:]) or value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_said_in_one_message(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, arguments: list[str], message: str
) -> None:
    ran = Ran(capsys, *arguments)

    assert ran.status == 3
    assert ran.out.replace("a word from the user's model\n", "") == ""
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_training_leaves_model_report_and_snapshot_and_says_where(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    ran = Ran(capsys, "train", config, "--json")

    assert ran.status == 0
    data = ran.data
    assert (data["status"], data["step"], data["peak_bytes"]) == ("done", 5, 500_000)
    for name in ("snapshot", "model", "report", "out"):
        assert Path(data[name]).exists()
    assert "step 5/5" in ran.err
    explained = Ran(capsys, "explain", "out", "--json").data
    assert explained["run"]["step"] == 5


def test_a_stopped_run_is_explained_with_the_step_of_its_snapshot(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    api.on_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 13 else None
    cut = Ran(capsys, "train", config, "--set", "train.steps=30", "--set", "train.log_every=10")
    assert cut.status == 130
    newest = max(Path("out").glob("step-*/snapshot.json"))
    taken = json.loads(newest.read_text(encoding="utf-8"))["step"]
    assert taken > 10
    assert f"{taken} of 30 steps done" in cut.out
    assert f"Snapshot: after step {taken}, in {newest.parent.resolve()}" in cut.out
    logged = [json.loads(line)["step"] for line in Path("out/log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert logged[-1] < taken

    explained = Ran(capsys, "explain", "out").out
    assert f"Run: {taken} steps, loss " in explained
    assert f" in step {logged[-1]}, the last in the log, " in explained
    assert f"Last snapshot: after step {taken}, in out/step-{taken:06d}." in explained
    run = Ran(capsys, "explain", "out", "--json").data["run"]
    assert (run["step"], run["snapshot_step"]) == (taken, taken)


def test_a_folder_that_holds_a_run_is_not_written_over(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    Ran(capsys, "train", config)

    ran = Ran(capsys, "train", config)

    assert ran.status == 3
    assert "holds a run already: go on with it (memfit resume" in ran.err


def test_a_folder_in_which_another_process_trains_is_left_alone(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    Ran(capsys, "train", config)
    ended = sorted(path.name for path in Path("out").iterdir())
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, memfit.train.folder_lock as lock\nwith lock.alone_in(pathlib.Path('out')): print('held', flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        resumed = [Ran(capsys, "resume", path) for path in (Path("out"), next(Path("out").glob("step-*")))]
        for kept in ("log.jsonl", *(each for each in ended if each.startswith("step-"))):
            Path("out", kept).rename(Path(f"{kept}.aside"))  # as before a first step is logged
        started = Ran(capsys, "train", config)
        for aside in Path().glob("*.aside"):
            aside.rename(Path("out", aside.stem))
        holder.kill()

    for ran in (*resumed, started):
        assert ran.status == 3
        assert "another process is training in " in ran.err
    assert sorted(path.name for path in Path("out").iterdir()) == ended
    assert Ran(capsys, "resume", "out").status == 0


def test_a_saved_plan_is_followed_and_must_stay_inside_the_budget(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    plan().save("plan.json")

    too_big = Ran(capsys, "train", config, "--plan", "plan.json", "--budget", "100KiB")
    done = Ran(capsys, "train", config, "--plan", "plan.json")

    assert too_big.status == 3
    assert "the plan takes 512 KiB, more than fit.budget allows (100 KiB)" in too_big.err
    assert done.status == 0
    assert [name for name, *_ in api.calls] == ["apply"]


def test_going_on_follows_the_saved_plan_and_another_budget_makes_another(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    Ran(capsys, "train", config)

    longer = Ran(capsys, "resume", "out", "--set", "train.steps=8", "--json")
    smaller = Ran(capsys, "resume", "out", "--budget", "600KiB", "--set", "train.steps=9", "--json")

    assert (longer.data["step"], smaller.data["step"]) == (8, 9)
    assert [name for name, *_ in api.calls] == ["fit", "apply", "fit"]


def test_a_run_that_was_moved_goes_on_where_it_is(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    Ran(capsys, "train", config)
    Path("out").rename("elsewhere")

    ran = Ran(capsys, "resume", "elsewhere/step-000004", "--json")

    assert ran.data["out"] == str(Path("elsewhere").resolve())
    assert not Path("out").exists()
    assert "set aside" in ran.err


def test_a_run_stopped_before_its_first_snapshot_begins_again(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    def crash(step: int) -> None:
        if step == 2:
            raise RuntimeError("gone")

    api.on_step = crash
    assert Ran(capsys, "train", config).status == 2
    api.on_step = lambda _: None

    ran = Ran(capsys, "resume", "out", "--json")

    assert ran.data["step"] == 5
    assert "starting from the beginning" in ran.err


def test_a_loss_that_is_not_finite_tells_how_to_go_on(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    def burst(step: int) -> None:
        if step == 4:
            raise NonFiniteLossError("the loss is nan")

    api.on_step = burst

    ran = Ran(capsys, "train", config)

    assert ran.status == 2
    assert "step 4: the loss is nan. The state before it is in" in ran.err
    assert "--set optim.lr=..." in ran.err
    api.on_step = lambda _: None
    assert Ran(capsys, "resume", "out", "--set", "optim.lr=1e-5", "--json").data["step"] == 5


TRACKED = ("--set", "report.to=[tensorboard]", "--set", "train.log_every=1", "--set", "report.html=false")


def test_a_tracked_run_that_went_on_shows_the_lines_of_its_log(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    pytest.importorskip("tensorboard", reason="reads back its event files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def crash(step: int) -> None:
        if step == 4:
            raise RuntimeError("gone")

    api.on_step = crash
    assert Ran(capsys, "train", config, *TRACKED).status == 2
    api.on_step = lambda _: None

    ran = Ran(capsys, "resume", "out")

    assert ran.status == 0
    assert (
        f"tracked with tensorboard; to look: tensorboard --logdir {Path('out').resolve()}/trackers/tensorboard"
        in ran.err
    )
    read = EventAccumulator("out/trackers/tensorboard")
    read.Reload()
    lines = [json.loads(line) for line in Path("out/log.jsonl").read_text(encoding="utf-8").splitlines()]
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("memory/peak_bytes", "peak_bytes")):
        told = [(each.step, each.value) for each in read.Scalars(tag)]
        assert told == [(line["step"], pytest.approx(line[key])) for line in lines if key in line]
    assert {each.value for each in read.Scalars("memory/predicted_peak_bytes")} == {2**19}


def test_a_tracker_that_fails_on_the_way_is_told_of_once_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        look = ""

        def log(self, step: int, metrics: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self, end: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setitem(sys.modules, "tensorboard", sys)
    monkeypatch.setattr(tensorboard, "begin", lambda start: Failing())

    ran = Ran(capsys, "train", config, *TRACKED)

    assert ran.status == 0
    assert ran.err.count("tracking with tensorboard has stopped (OSError: [Errno 28] No space left on device)") == 1
    assert len(Path("out/log.jsonl").read_text(encoding="utf-8").splitlines()) == 5


def test_how_a_tracked_run_ended_is_told(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    adapter = SimpleNamespace(look="", log=lambda step, metrics: None, close=ends.append)
    monkeypatch.setitem(sys.modules, "tensorboard", sys)
    monkeypatch.setattr(tensorboard, "begin", lambda start: adapter)
    api.on_step = lambda step: non_finite(step) if step == 2 else None
    Ran(capsys, "train", config, *TRACKED)
    api.on_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 1 else None
    Ran(capsys, "resume", "out")
    api.on_step = lambda _: None
    Ran(capsys, "resume", "out")

    assert ends == ["failed", "stopped", "finished"]


def test_a_missing_package_of_a_tracker_is_told_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    ran = Ran(capsys, "train", config, *TRACKED)

    assert ran.status == 3
    assert "pip install 'memfit[tensorboard]'" in ran.err
    assert api.calls == []
    assert not Path("out").exists()


def test_a_tracker_that_there_is_not_is_a_mistake_of_the_configuration(
    capsys: pytest.CaptureFixture[str], api: Api, config: Path
) -> None:
    ran = Ran(capsys, "train", config, "--set", "report.to=[comet]")

    assert ran.status == 3
    assert "report.to" in ran.err
    assert "tensorboard" in ran.err


def test_a_frontier_is_a_table_and_a_page(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    text = Ran(capsys, "frontier", config, "--points", "3", "--html", "frontier.html")
    data = Ran(capsys, "frontier", config, "--points", "3", "--json").data

    assert "512 KiB" in text.out
    assert Path("frontier.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [point["peak_bytes"] for point in data["points"]] == [2**19, 2**18, 2**17]


def test_the_report_shows_the_frontier_when_asked(capsys: pytest.CaptureFixture[str], api: Api, config: Path) -> None:
    Ran(capsys, "train", config, "--set", "report.frontier=true", "--set", "report.html=false")

    report = json.loads(Path("out/report.json").read_text(encoding="utf-8"))
    assert len(report["frontier"]) == 9
    assert not Path("out/report.html").exists()


def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    data, text = Ran(capsys, "doctor", "--json").data, Ran(capsys, "doctor")

    host = next(tier for tier in data["tiers"] if tier["name"] == "cpu")
    assert 0 < host["free_bytes"] <= host["total_bytes"]
    assert host["fp32_flops"] > 0
    assert host["bytes_per_second"] > 0
    assert data["cores"] >= 1
    assert host["bf16_flops"] > 0
    assert data["threads"] == torch.get_num_threads()
    (link,) = (each for each in data["links"] if each["device"] == "cpu")
    assert link["tier"] == "disk"
    assert link["down_bytes_per_second"] > 0
    assert link["up_bytes_per_second"] > 0
    disk = data["tiers"][-1]
    assert disk["read_bytes_per_second"] > 0
    usable = data["usable"]
    assert usable["swap"]["cpu"] == "disk"
    assert usable["bf16_speedup"]["cpu"] == host["bf16_flops"] / host["fp32_flops"]
    assert usable["8bit_backends"][0] == "memfit"
    assert usable["pinned_memory"] is torch.cuda.is_available()
    assert any(machine["name"] == "rtx4090" for machine in data["known_devices"])
    assert data["versions"]["torch"] == torch.__version__
    assert data["versions"].get("cuda") == torch.version.cuda
    assert text.status == 0
    assert all(number in text.out for number in data["versions"].values())
    assert "GFLOP/s" in text.out
    for name in data["extras"]:
        assert f"Extra {name}: " in text.out


def test_doctor_takes_the_extras_from_the_package_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "torch<3,>=2.11",
        "mypy; extra == 'dev'",
        "numpy>=1; extra == 'old'",
        "numpy[x]<999,>=998.5.1; extra == 'newer'",
        "pytest; python_version > '3' and extra == 'two'",
        "no-such-package>=1; extra == 'two'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda package: requirements)

    found = extras.extras()

    assert {name: extra["installed"] for name, extra in found.items()} == {"old": True, "newer": False, "two": False}
    assert found["two"]["packages"] == {"pytest": pytest.__version__, "no-such-package": None}
    assert extras.described(found) == [
        f"Extra old: numpy {np.__version__}",
        f"Extra newer: missing, has numpy {np.__version__} (pip install 'memfit[newer]')",
        f"Extra two: missing, has pytest {pytest.__version__} (pip install 'memfit[two]')",
    ]


def test_extras_of_what_is_not_installed_are_not_known() -> None:
    assert extras.extras("no-such-package") == {}
    assert extras.described({}) == ["Extras: not known, for memfit is on the path without being installed"]


def test_doctor_says_why_a_disk_cannot_be_swapped_to(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(device: torch.device, folder: Path) -> None:
        raise InputError("the disk to swap to cannot be measured")

    monkeypatch.setattr(links, "nearest_link", refused)
    monkeypatch.setattr(
        doctor, "_rates", lambda device: {"fp32_flops": 1.0, "bf16_flops": 1.0, "bytes_per_second": 1.0}
    )
    data, text = Ran(capsys, "doctor", "--json").data, Ran(capsys, "doctor")

    assert data["links"][-1]["reason"] == "the disk to swap to cannot be measured"
    assert "cpu" not in data["usable"]["swap"]
    assert "none (the disk to swap to cannot be measured)" in text.out
