"""What cannot be meant, and what the computer does: each ends in a sentence, and the service goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import ConfigError, InputError
from memfit.runner import guard
from memfit.service import launching
from memfit.service.database import SqliteDatabase, StoreError
from memfit.service.progress import LogFollower, Progress
from memfit.service.refusals import NotNowError, Refusal
from memfit.service.service import Submission
from memfit.service.settings import read_capacity
from service import small_runs
from service.conftest import ANNA, Serving

PLAN = {
    "budget_bytes": 400 << 10, "peak_bytes": 300 << 10, "plain_peak_bytes": 350 << 10, "rank_bytes": [300 << 10], "tiers": {}, "device": "cpu",
    "step_seconds": 1.0, "plain_step_seconds": 1.0, "total_steps": 5, "startup_seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"model": {"python": "missing:build"}}, Refusal, "no module 'missing'; its modules are net"),
        ({"data": {"train": "gone.npz"}}, Refusal, "data.train: there is no 'gone.npz'"),
        ({"version": {"number": 2}}, ConfigError, "version: no such key"),
        ({"train": {"steps": 5, "epoch_steps": 3}}, ConfigError, "train.epoch_steps: no such key"),
        ({"fit": {"budget": "lots"}}, ConfigError, "fit.budget: "),
        ({"data": {"train": "a\0b"}}, Refusal, "data.train: there is no 'a\\\\x00b'"),
        ({"data": {"train": ["train.npz", "\ud800"]}}, Refusal, "data.train: there is no"),
        ({"model": {"python": f"{'a' * 5000}:build"}}, Refusal, "model.python: the uploaded folder has no module"),
        ({"model": {"args": {"x": float("nan")}}}, Refusal, "the run file holds NaN or an infinity"),
    ],
)  # fmt: skip
def test_a_run_file_that_cannot_be_meant_is_refused_when_it_is_sent(
    serve: Callable[..., Serving], section: dict[str, Any], error: type[InputError], words: str
) -> None:
    serving = serve()
    with pytest.raises(error, match=words):
        serving.submit(**section)
    assert serving.service.store.listed(owner=None) == []


def test_every_section_of_a_run_file_is_taken_and_kept(serve: Callable[..., Serving]) -> None:
    serving = serve()
    told = small_runs.run_file(train={"eval_every": 2}, data={"validation": "train.npz"})
    stopping = {**told, "early_stopping": None}  # with nothing below it: what it is by default
    kept = serving.service.submit(ANNA, Submission(stopping, code=serving.code()))[0].config
    assert "early_stopping" in kept
    model = {**told["model"], "task": "causal-lm"}
    more = {**told, "model": model, "lora": {"rank": 4}, "generate": {"prompts": ["Once"]}}
    kept = serving.service.submit(ANNA, Submission(more, code=serving.code()))[0].config
    assert (kept["lora"], kept["generate"]) == ({"rank": 4}, {"prompts": ["Once"]})


def test_what_is_asked_of_a_run_that_has_just_ended_changes_nothing(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()
    run = serving.submit()
    serving.service.store.change(run.number, "running", "started", state="running")
    seen = serving.service.store.run(run.number)
    serving.service.store.change(run.number, "done", "done", state="done", ended=1.0)
    monkeypatch.setattr(serving.service, "run", lambda *_: seen)  # as it was a moment ago
    assert serving.service.cancel(ANNA, run.number).asked == ""
    with pytest.raises(NotNowError, match="is done: what waits or runs can be paused"):
        serving.service.pause(ANNA, run.number)
    assert [event.kind for event in serving.service.store.events(run.number)] == ["planning", "running", "done"]


def test_numbers_that_a_run_makes_up_stop_nobody(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = serving.submit()
    out = serving.service.folder(run) / "out"
    out.mkdir(parents=True)
    huge = "1" + "0" * 400
    lines = [f'{{"step": {huge}}}', f'{{"step": 3, "seconds": {huge}, "loss": {huge}, "peak_bytes": {huge}}}']
    (out / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert LogFollower(serving.service.folder(run)).look() == Progress(step=3)


def test_a_store_that_cannot_be_read_is_tried_again(serve: Callable[..., Serving]) -> None:
    serving = serve()
    database = serving.service.store.database
    assert isinstance(database, SqliteDatabase)
    database.connection.set_progress_handler(lambda: 1, 1)  # every query fails
    with pytest.raises(StoreError, match="cannot be used: interrupted; what it holds is intact, and memfit goes on"):
        serving.studies.look()
    with pytest.raises(StoreError):
        serving.housekeeping.look()
    database.connection.set_progress_handler(None, 1)


def test_a_gpu_without_a_number_is_the_first() -> None:
    assert read_capacity(("cuda=24GiB", "8GiB")) == {"cuda:0": 24 << 30, "cpu": 8 << 30}


def test_a_copy_that_cannot_be_written_is_one_sentence(serve: Callable[..., Serving], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the copy .*missing.copy: unable to open database file; name"):
        serve().service.store.backup(tmp_path / "missing" / "copy")


def test_the_same_key_with_another_body_is_refused_and_names_the_run(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = serving.submit(key="one")
    assert serving.submit(key="one") == run
    with pytest.raises(NotNowError, match=f"belongs to run {run.number}"):
        serving.submit(key="one", steps=7)


def test_a_device_that_vanishes_leaves_its_runs_waiting_with_the_reason(serve: Callable[..., Serving]) -> None:
    serving = serve()
    stays, goes = serving.submit(), serving.submit()
    store = serving.service.store
    gone = {**PLAN, "device": "cuda", "rank_bytes": [1 << 30]}
    store.change(goes.number, "waiting", "planned", state="waiting", plan=gone)
    store.change(stays.number, "waiting", "planned", state="waiting", plan=PLAN)
    for _ in range(2):
        serving.service.dispatcher.look()
    told = serving.service.described(serving.service.store.run(goes.number))
    assert (told["state"], told["expected_start"]) == ("waiting", None)
    assert "not here now" in told["reason"]
    assert "the devices here are cpu" in told["reason"]
    assert store.run(stays.number).state == "running", "the others go on"
    assert serving.service.cancel(ANNA, goes.number).asked == "cancel"
    serving.service.dispatcher.look()
    assert store.run(goes.number).state == "cancelled"


def test_a_disk_that_is_full_while_code_comes_is_no_fault_of_the_code(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("memfit.service.uploads._copied", full)
        with pytest.raises(OSError, match="No space left"):
            serving.code()
    assert not list((serving.settings.folder / "code").iterdir()), "nothing is half there"
    assert serving.code()


def test_a_disk_that_is_full_when_a_run_is_planned_is_tried_again(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()
    run = serving.submit()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(launching, "write", full)
        with pytest.raises(OSError, match="No space left"):
            serving.service.dispatcher.look()
    assert serving.service.store.run(run.number).state == "planning"
    serving.service.dispatcher.look()
    assert serving.service.dispatcher.runner.knows(launching.name_of(run.number, 0))


def test_files_that_vanish_are_not_there_and_nothing_else(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = serving.submit()
    launching.write(serving.settings, run)
    shutil.rmtree(launching.folder_of(serving.settings, run.number))
    assert list(serving.service.artifacts(ANNA, run.number)) == []
    assert serving.service.words(ANNA, run.number) == "It is being planned."


def test_a_clock_that_jumps_removes_nothing(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    serving = serve(keep_days=7.0)
    run = serving.submit()
    launching.write(serving.settings, run)
    serving.service.store.change(run.number, "done", "done", state="done", ended=time.time())
    serving.housekeeping.look()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 20 * 365 * 86400)
    for _ in range(2):
        serving.housekeeping.look()
        assert launching.folder_of(serving.settings, run.number).exists()
    assert json.dumps(serving.service.described(serving.service.store.run(run.number)))
    serving.service.dispatcher.look()
    assert serving.service.submit(ANNA, Submission(small_runs.run_file(), code=serving.code()))[1]


def test_code_without_the_function_that_is_named_is_refused_when_it_is_planned(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = serving.submit(model={"python": "net:nothing"})
    refused = serving.until_state(run.number, "refused", "waiting", "running", "done", "failed")
    assert refused.state == "refused"
    assert "net" in refused.reason
    assert "nothing" in refused.reason
    assert refused.part == 0, "nothing of it was started"


@pytest.mark.slow
def test_data_that_is_gone_once_the_run_is_planned_ends_it_with_a_sentence(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    serving = serve(data=(small_runs.code(tmp_path / "shared"),))
    data = tmp_path / "shared" / "train.npz"
    run = serving.submit(data={"train": str(data)})
    serving.until(lambda: serving.service.dispatcher.runner.end_of(launching.name_of(run.number, 0)) is not None)
    data.unlink()
    failed = serving.until_state(run.number, "failed", "done", "refused")
    assert failed.state == "failed"
    assert "train.npz" in failed.reason


@pytest.fixture
def disk() -> Iterator[Callable[[Path, str], Callable[[], None]]]:
    """A disk of so many bytes on a folder; what it returns fills it to the last one."""
    mounted: list[Path] = []

    def made(folder: Path, size: str) -> Callable[[], None]:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a disk that can be full is a file system of its own, which only root may mount")
        mounted.append(folder)

        def filled() -> None:
            with (folder / "filler").open("wb", buffering=0) as stream, suppress(OSError):
                while True:
                    stream.write(b"x" * 512)

        return filled

    yield made
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S607 - wherever this system has it


@pytest.mark.slow  # half a minute; disks that are full elsewhere are below
def test_a_disk_that_is_full_for_what_a_run_writes_ends_it_with_the_reason(
    serve: Callable[..., Serving], disk: Callable[[Path, str], Callable[[], None]]
) -> None:
    serving = serve(confined=False)
    run, other = serving.submit(), serving.submit()
    serving.until(lambda: serving.service.dispatcher.runner.knows(launching.name_of(run.number, 0)))
    disk(launching.folder_of(serving.settings, run.number) / "out", "48k")  # some lines of its log, and no snapshot
    failed = serving.until_state(run.number, "failed", "done", "refused")
    assert failed.state == "failed"
    assert "no space for a snapshot" in failed.reason
    assert "Free space, or lower train.keep" in failed.reason
    assert failed.part == 1
    assert serving.until_state(other.number, "failed", "done", "refused").state == "done", "the others go on"


@pytest.mark.slow
def test_a_disk_that_is_full_for_what_a_run_prints_loses_no_end(
    serve: Callable[..., Serving], disk: Callable[[Path, str], Callable[[], None]]
) -> None:
    serving = serve()
    run = serving.submit(steps=60, slow=0.02)
    name, runner = launching.name_of(run.number, 1), serving.service.dispatcher.runner
    fill = disk(runner.folder / "runs" / name, "64k")
    serving.until_state(run.number, "running")
    begun = launching.output_of(serving.settings, name) / "stderr"
    serving.until(begun.exists)
    fill()
    ended = serving.until_state(run.number, "done", "failed", "refused")
    end = runner.end_of(name)
    assert end is not None
    assert (end.kind, end.attempts) in {("done", 1), ("failed", 1)}, (
        "by itself, whatever it does about lines that it could not print"
    )
    assert ended.state == end.kind
    assert ended.reason


@pytest.mark.slow
def test_a_disk_that_is_full_where_the_runner_writes_is_tried_again(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()
    run = serving.submit()
    write = Path.write_text

    def full(file: Path, *about: Any, **named: Any) -> int:
        if file.name == guard.SPEC:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, *about, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(InputError, match="cannot write .*: No space left on device; free space, then start again"):
            for _ in range(2):
                serving.service.dispatcher.look()
    assert serving.service.store.run(run.number).state == "planning"
    assert serving.until_state(run.number, "done", "failed", "refused").state == "done"


@pytest.mark.slow
def test_a_clock_that_jumps_ends_no_run_and_starts_none_twice(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    serving = serve(run_seconds=600.0, silent_seconds=600.0)
    run = serving.submit(steps=40, slow=0.02)
    serving.until_state(run.number, "running")
    now = time.time()
    for jump in (20 * 365 * 86400.0, -20 * 365 * 86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        serving.service.dispatcher.look(0.1)
        assert json.dumps(serving.service.described(serving.service.store.run(run.number)))
        assert json.dumps(serving.service.devices(ANNA))
    done = serving.until_state(run.number, "done", "failed")
    assert (done.state, done.part) == ("done", 1)
    end = serving.service.dispatcher.runner.end_of(launching.name_of(run.number, 1))
    assert end is not None
    assert end.attempts == 1
