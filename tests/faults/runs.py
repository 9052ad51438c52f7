"""A tiny configured run in processes of its own, and the faults that befall them.

Starting Python and torch takes seconds, so each process is forked from an interpreter that has them loaded (`forking`); what the child runs is
`memfit.cli.main.main`, all that the installed command runs. A fault is drawn as a *moment*: the n-th time the child is about to open, sync, rename or remove a
file, is in the middle of writing one, or enters a layer or the optimizer. First the kind of moment is drawn, then which one: so the few renames of the snapshot
writer are hit as often as its many writes, and drawn times, which are there too, would miss nearly all of them.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import forking
import memfit
from memfit.cli.main import main
from memfit.hardware.machine import Link
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planning import planning_of
from memfit.train import log, snapshot_folders, snapshots

TOY: Final = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
        )

    def forward(self, x, y):
        return (self.body(x).squeeze(-1) - y).square().mean()

def build():
    return Net()

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(width))

    def forward(self, x):
        return self.inner(x)

class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Linear(width, 1)

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x).squeeze(-1) - y).square().mean()

def tower(width=32):
    return Tower(width)
"""

CONFIG: Final = """
model: {python: "toy:build"}
data: {train: train.npz, validation: validation.npz}
fit: {budget: 60KiB, global_batch: 64, clip_norm: 1.0, fixed: {micro_batches: 1}}
optim: {name: adamw, lr: 1e-2}
schedule: {name: cosine, warmup_steps: 2}
train: {steps: 9, save_every: 2, eval_every: 3, log_every: 1, keep: 2, out: whole}
report: {html: false}
"""

# What is done beside dropping, as settings on the command line. The budget is the smallest in which the run can be planned, so that it drops, too.
TECHNIQUES: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": (),
    "8-bit state": ("fit.fixed.state_format=8bit",),
    "state on disk": ("fit.fixed.state_place=disk",),
    "8-bit state on disk": ("fit.fixed.state_format=8bit", "fit.fixed.state_place=disk"),
    "fp16": ("fit.fixed.precision=fp16",),
    "frozen": ("fit.freeze=[body.0]",),
    "update in backward": ("fit.fixed.update=in_backward", "fit.clip_norm=null"),
    "swap": ("model.python=toy:tower", "fit.host_budget=8MiB"),
    "streamed layers": ("model.python=toy:tower", "fit.fixed.streamed=blocks"),
}

STEPS: Final = 9
DONE: Final = 0
INTERRUPTED: Final = 130
KILLED: Final = -signal.SIGKILL
PATIENCE_S: Final = 300.0
_TOUCHES: Final = {"os.rename": "rename", "os.mkdir": "mkdir", "os.remove": "remove", "os.rmdir": "remove"}
ON_DISK: Final = ("open", "write", "fsync", "rename", "mkdir", "remove", "below")

Fault = Callable[[], None]
Moment = tuple[str, int]  # kind, and which of that kind


def kill() -> None:
    """The process is gone, at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def fill() -> None:
    """The disk is full, from now until somebody makes room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Moments:
    """Counts moments, and calls a fault at one of them; for a child of a fork, since it cannot be taken back.

    Args:
        out: the run's folder.
        at: the moment; None only counts.
        fault: what happens there. A full disk stays full: at every later moment on disk it happens again.
    """

    def __init__(self, out: Path, at: Moment | None, fault: Fault) -> None:
        self.out, self.at, self.fault = str(out), at, fault
        self.counts: dict[str, int] = {}
        self.over = self.happened = False
        sys.addaudithook(self._audit)
        fsync, write = os.fsync, snapshots._Remembering.write

        def fsynced(handle: int) -> None:
            self.moment("fsync")
            fsync(handle)

        def written(file: Any, data: Any) -> int:
            half = len(data) // 2
            write(file, data[:half])
            file._stream.flush()  # half a file must be on the disk, not in a buffer
            try:
                self.moment("write")
            except BaseException as error:
                file.error = file.error or error  # as the writer itself notes it
                raise
            return half + write(file, data[half:])

        # Offloaded activations, state on the disk and streamed layers are written so, in threads of their own; a run's own files are not.
        for name in ("pwrite", "pwritev"):
            setattr(os, name, self._below(getattr(os, name)))
        os.fsync = fsynced  # type: ignore[assignment]
        snapshots._Remembering.write = written  # type: ignore[assignment, method-assign]
        register_module_forward_pre_hook(lambda *_: self.moment("layer"))
        register_optimizer_step_pre_hook(lambda *_: self.moment("update"))
        register_optimizer_step_post_hook(lambda *_: self.moment("update"))

    def _below(self, write: Callable[..., int]) -> Callable[..., int]:
        def written(*arguments: Any) -> int:
            self.moment("below")
            return write(*arguments)

        return written

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.over:
            return
        if event == "open" and str(arguments[0]).startswith(self.out) and arguments[1] not in ("r", "rb", None):
            self.moment("open")
        elif event in _TOUCHES:
            self.moment(_TOUCHES[event])

    def moment(self, kind: str) -> None:
        """One more; the fault, if it is this one."""
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        again = self.happened and self.fault is fill and kind in ON_DISK
        if (kind, number) == self.at or again:
            self.happened = True
            if self.fault is not fill or kind != "remove":  # removing takes no room
                self.fault()


@dataclass(frozen=True, slots=True)
class End:
    """How a child ended.

    Attributes:
        status: exit status; minus the signal's number when one killed it.
        said: on standard error and output.
        moments: it went through, by kind; none when it was killed.
        seconds: it took.
    """

    status: int
    said: str
    moments: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder with model, data, plan, and a run that nothing happened to.

    Attributes:
        folder: holds run.yaml and the rest.
        moments: of the whole run, by kind.
        seconds: it took.
        settings: of the technique, as on the command line.
    """

    folder: Path
    moments: Mapping[str, int]
    seconds: float
    settings: Sequence[str] = ()

    @property
    def whole(self) -> Path:
        """The run that nothing happened to."""
        return self.folder / "whole"

    def draw(self, random: Random, kinds: Sequence[str] | None = None) -> Moment:
        """A moment of the whole run: first of which kind, then which."""
        kind = random.choice(sorted(kinds or self.moments))
        return kind, random.randrange(self.moments[kind])

    def start(self, out: Path, **fault: Any) -> End:
        """`memfit train` into `out`; `fault` as for `child`."""
        settings = _settings((*self.settings, f"train.out={out}"))
        return child(self.folder, out, ["train", "run.yaml", "--plan", "plan.json", *settings], **fault)

    def resume(self, out: Path, **fault: Any) -> End:
        """`memfit resume`."""
        return child(self.folder, out, ["resume", str(out)], **fault)

    def go_on(self, out: Path, **fault: Any) -> End:
        """What a person does next: resume what can be resumed, start what never began."""
        begun = (out / "config.json").exists()
        return self.resume(out, **fault) if begun else self.start(out, **fault)

    def differs(self, out: Path) -> str | None:
        """What of a finished run is not that of the run that nothing happened to; None when all is, to the last bit."""
        return difference(self.whole, out)


def _settings(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def prepare(folder: Path, technique: str = "plain") -> Workplace:
    """Write model, configuration and data, plan, and train once without any fault."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    draw = np.random.default_rng(0)
    for name, samples in (("train", 150), ("validation", 40)):  # batches of 64, 64 and 22
        x = draw.standard_normal((samples, 8)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=np.sin(x.sum(1)))
    settings = TECHNIQUES[technique]
    if technique == "swap":  # what is offloaded is decided below
        settings = (*settings, "fit.budget=1MiB")
    elif settings:
        few = child(folder, folder / "none", ["plan", "run.yaml", *_settings((*settings, "fit.budget=1KiB"))])
        found = re.search(r"the smallest plan found needs [^(]*\((\d+) bytes\)", few.said)
        assert found is not None, few.said
        settings = (*settings, f"fit.budget={found[1]}")
    planned = child(folder, folder / "none", ["plan", "run.yaml", "--save", "plan.json", *_settings(settings)])
    assert planned.status == DONE, planned.said
    if technique == "swap":
        _offload_all(folder)
    place = Workplace(folder, {}, 0.0, settings)
    whole = place.start(place.whole)
    assert whole.status == DONE, whole.said
    return Workplace(folder, whole.moments, whole.seconds, settings)


def _offload_all(folder: Path) -> None:
    """Have the plan offload whatever backward reads: tensors as small as these would not be worth a copy."""
    spec = importlib.util.spec_from_file_location("toy_of_a_plan", folder / "toy.py")
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    sample = {"x": torch.zeros(64, 8), "y": torch.zeros(64)}
    plain = memfit.plan(toy.tower(), sample, None, 1 << 40, fixed={"micro_batches": 1}, clip_norm=1.0)
    recipes = Recipes(planning_of(plain).solver(1).trace, Link("disk", 1e9, 1e9, 1e-4, least_bytes=1))
    offloaded = {s: ways[1] for s, ways in recipes.reloads_of.items() if s in recipes.saved}
    script = compile_script(recipes, recomputations_for(recipes, (), offloaded=offloaded))
    assert script.swaps
    replace(plain, script=script).save(folder / "plan.json")


def child(
    folder: Path,
    out: Path,
    arguments: list[str],
    *,
    at: Moment | None = None,
    after_s: float | None = None,
    fault: Fault = kill,
    number: int = signal.SIGKILL,
    most_bytes: int | None = None,
) -> End:
    """Run the command in a forked process, with a fault at a moment or a signal after some time.

    Args:
        folder: it runs in.
        out: its run's folder.
        arguments: of `memfit`.
        at: moment at which the fault happens.
        after_s: seconds after which the signal is sent.
        fault: what happens at the moment.
        number: of the signal sent after the time.
        most_bytes: no file may grow larger; the kernel sees to it.
    """
    said = folder / f".said-{os.getpid()}"
    counted = folder / f".moments-{os.getpid()}"
    counted.unlink(missing_ok=True)
    process = forking.process(_run, folder, out, arguments, at, fault, most_bytes, said, counted)
    began = time.perf_counter()
    forking.start([process])
    timer = None
    if after_s is not None:
        timer = threading.Timer(after_s, _send, (process.pid, number))
        timer.start()
    status = _wait(process)
    if timer is not None:
        timer.cancel()
    text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    moments = json.loads(counted.read_text(encoding="utf-8")) if counted.exists() else {}
    return End(status, text, moments, time.perf_counter() - began)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it was done before


def _wait(process: BaseProcess) -> int:
    """Exit status of a child; one that hangs is killed, and that is no end."""
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a run took more than {PATIENCE_S:.0f} s")
    return process.exitcode


def _run(
    folder: Path,
    out: Path,
    arguments: list[str],
    at: Moment | None,
    fault: Fault,
    most_bytes: int | None,
    said: Path,
    counted: Path,
) -> NoReturn:
    """The child: the command and nothing else; no test goes on in here."""
    status = 70
    try:
        stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        warnings.resetwarnings()
        # As a process that a person has started: pytest may have put another handler there.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        moments = Moments(out, at, fault)
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
        status = main(arguments)
        moments.over = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        counted.write_text(json.dumps(moments.counts), encoding="utf-8")
    except KeyboardInterrupt:
        status = INTERRUPTED  # before the command could answer: Python itself ends so
    except BaseException:  # noqa: BLE001 - the child must not live on as a second pytest
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


# -- what is left ------------------------------------------------------------------------------------------------------------


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """What the log says of steps and evaluations, without times."""
    return [
        (line["step"], line.get("epoch"), line.get("loss"), line.get("validation_loss"), line.get("lr"))
        for line in log.read(out)
    ]


def difference(whole: Path, out: Path) -> str | None:
    """What of one finished run is not that of another, to the last bit."""
    if numbers(whole) != numbers(out):
        return f"the log: {numbers(out)} instead of {numbers(whole)}"
    files = [Path("model.pt"), *(Path(f"step-{STEPS:06d}") / name for name in ("model.pt", "optimizer.pt", "loop.pt"))]
    for file in files:
        if not (out / file).exists():
            return f"there is no {file}"
        one, other = (torch.load(each / file, weights_only=True) for each in (whole, out))
        if not alike(one, other):
            return str(file)
    names = [f.name for f in snapshot_folders.folders(out)]
    if names != [f.name for f in snapshot_folders.folders(whole)]:
        return f"the snapshots are {names}"
    left = [f.name for f in out.iterdir() if f.name.startswith(".")]
    return f"left over: {left}" if left else None


def alike(one: Any, other: Any) -> bool:
    """Equal to the last bit, through dicts, lists and tuples."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# -- counting ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Tries of one fault.

    Attributes:
        fault: its name.
        tried: how often.
        faults: that happened in them; a try may hold several.
        lost: what went wrong, one line for each lost try.
    """

    fault: str
    tried: int = 0
    faults: int = 0
    lost: list[str] | None = None

    def add(self, faults: int, wrong: str | None) -> None:
        """One try."""
        self.tried += 1
        self.faults += faults
        self.lost = (self.lost or []) + ([wrong] if wrong is not None else [])

    @property
    def survived(self) -> int:
        """Tries after which nothing was missing."""
        return self.tried - len(self.lost or [])
