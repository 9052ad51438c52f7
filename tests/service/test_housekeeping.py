"""Files go when their time has come, and never without a word; an owner's quota holds; a service that is drained starts nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.cli.main import main
from memfit.errors import InputError
from memfit.runner import RunRequest
from memfit.service import launching
from memfit.service.housekeeping import bytes_on_disk
from memfit.service.refusals import DrainingError, NotAllowedError, NotKnownError, NotNowError, TooLargeError
from memfit.service.service import Submission
from memfit.service.settings import ServiceSettings, memory_bytes
from memfit.service.store import StoredRun
from memfit.service.tokens import Caller
from service import small_runs
from service.conftest import ANNA, Serving

ADMIN = Caller("root", "admin")


def over(serving: Serving, days_ago: float = 0.0, size: int = 100_000) -> StoredRun:
    """A run that is done and has files."""
    run = serving.submit()
    out = launching.write(serving.settings, run) / "out"
    out.mkdir()
    (out / "weights").write_bytes(b"x" * size)
    serving.service.store.change(run.number, "done", "done", state="done", ended=time.time() - days_ago * 86400)
    return serving.service.store.run(run.number)


def there(serving: Serving, run: StoredRun) -> bool:
    return launching.folder_of(serving.settings, run.number).exists()


def test_old_files_go_with_a_word_and_the_run_stays_known(serve: Callable[..., Serving]) -> None:
    serving = serve(keep_days=7.0)
    old, young = over(serving, 8.0), over(serving, 6.0)
    told = serving.service.described(young)
    assert told["kept_until"] == pytest.approx(young.ended + 7 * 86400)  # type: ignore[operator]
    serving.housekeeping.look()
    assert (there(serving, old), there(serving, young)) == (False, True)
    last = serving.service.events(ANNA, old.number)[-1]
    assert last.kind == "removed"
    assert last.text.endswith(" are removed: it ended more than 7 days ago")
    found = serving.service.described(serving.service.store.run(old.number))
    assert found["state"] == "done"
    assert found["removed"] is not None
    assert list(serving.service.artifacts(ANNA, old.number)) == []
    assert serving.service.described(serving.service.store.run(young.number))["disk_bytes"] > 100_000


def test_above_the_bytes_that_are_kept_the_oldest_go_first(serve: Callable[..., Serving]) -> None:
    serving = serve(keep_bytes=400_000)
    runs = [over(serving, days, 150_000) for days in (1.0, 3.0, 2.0)]
    serving.housekeeping.look()
    assert [there(serving, run) for run in runs] == [True, False, True]
    assert "all runs take" in serving.service.events(ANNA, runs[1].number)[-1].text


def test_a_removal_that_was_cut_off_is_finished(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = over(serving)
    serving.housekeeping.look()
    assert there(serving, run), "nobody has asked for it to go"
    serving.service.store.change(run.number, "removed", "asked", removed=1.0)  # and then the service was killed
    serving.again()
    serving.housekeeping.look()
    assert not there(serving, run)


def test_an_owner_removes_their_own_runs_once_they_are_over(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run, live = over(serving), serving.submit()
    with pytest.raises(NotKnownError):
        serving.housekeeping.remove(Caller("eve", "submit"), run.number)
    with pytest.raises(NotAllowedError):
        serving.housekeeping.remove(Caller("eve", "read"), run.number)
    with pytest.raises(NotNowError, match="cancel it first"):
        serving.housekeeping.remove(ANNA, live.number)
    assert serving.housekeeping.remove(ANNA, run.number).removed is not None
    assert not there(serving, run)
    events = len(serving.service.events(ANNA, run.number))
    serving.housekeeping.remove(ANNA, run.number)
    assert len(serving.service.events(ANNA, run.number)) == events


def test_a_quota_refuses_submissions_and_pauses_what_runs(serve: Callable[..., Serving]) -> None:
    serving = serve(owner_disk_bytes=50_000)
    live = serving.submit()
    serving.service.store.change(live.number, "running", "started", state="running")
    full = over(serving)
    serving.housekeeping.look()
    assert serving.service.store.run(live.number).asked == "pause"
    assert "are allowed: remove some" in serving.service.events(ANNA, live.number)[-1].text
    with pytest.raises(TooLargeError, match="memfit runs N --remove"):
        serving.submit()
    assert serving.submit(Caller("bob", "submit")).owner == "bob"
    serving.housekeeping.remove(ANNA, full.number)
    assert serving.submit().owner == "anna"


def test_code_and_audit_rows_that_nobody_needs_go(serve: Callable[..., Serving]) -> None:
    serving = serve(keep_days=7.0, keep_audit_days=30.0)
    run = over(serving, 8.0)
    store = serving.service.store
    with store.writing() as connection:
        connection.execute("UPDATE uploads SET made=0")
        for moment in (0.0, time.time()):
            connection.execute(
                "INSERT INTO audit (time, owner, address, method, path, status) VALUES (?, '', '', 'GET', '/', 401)",
                (moment,),
            )
    assert run.code is not None
    folder = launching.code_of(serving.settings, run.code)
    live = serving.submit()
    with store.writing() as connection:
        connection.execute("UPDATE uploads SET made=0")
    serving.housekeeping.look()
    assert folder.exists(), "a run that is not over needs it"
    assert store.read("SELECT COUNT(*) FROM audit")[0][0] == 1
    store.change(live.number, "done", "done", state="done", ended=1.0)
    serving.housekeeping.look()
    assert not folder.exists()
    assert store.read("SELECT COUNT(*) FROM uploads")[0][0] == 0


def test_what_is_removed_is_forgotten_by_the_runner(serve: Callable[..., Serving]) -> None:
    serving = serve()
    run = over(serving)
    name, runner = launching.name_of(run.number, 0), serving.service.dispatcher.runner
    runner.submit(RunRequest(name, ("true",)))
    serving.until(lambda: runner.end_of(name) is not None)
    serving.housekeeping.remove(ANNA, run.number)
    serving.service.dispatcher.look()
    assert not runner.knows(name)
    serving.again()
    assert not serving.service.dispatcher.runner.knows(name)


def test_a_service_that_is_drained_takes_and_starts_nothing_and_then_goes_on(serve: Callable[..., Serving]) -> None:
    serving = serve()
    waits = serving.submit()
    with pytest.raises(NotAllowedError, match="for admins"):
        serving.service.drain(ANNA, on=True)
    assert serving.service.drain(ADMIN, on=True) == 0
    with pytest.raises(DrainingError):
        serving.submit()
    serving.service.dispatcher.look()
    assert not serving.service.dispatcher.runner.knows(launching.name_of(waits.number, 0))
    serving.service.drain(ADMIN, on=False)
    serving.service.dispatcher.look()
    assert serving.service.dispatcher.runner.knows(launching.name_of(waits.number, 0))


def test_planning_has_bytes_of_its_own_in_the_account_and_a_hard_limit(serve: Callable[..., Serving]) -> None:
    serving = serve(planning_bytes=3 << 30)
    run = serving.submit()
    serving.service.dispatcher.look()
    serving.service.dispatcher.look()
    ledger = serving.service.dispatcher.runner.ledger
    assert (ledger.used(launching.PLANNING), ledger.used("cpu")) == (3 << 30, 0)
    assert launching.planning(serving.settings, run).memory_limit_bytes == 3 << 30


def test_more_than_the_computer_has_is_not_promised(tmp_path: Path) -> None:
    settings = ServiceSettings(tmp_path, {"cpu": memory_bytes(), "cuda:0": 1 << 50}, planning_bytes=1 << 30)
    with pytest.raises(InputError, match="lower --capacity, or --planning-memory"):
        settings.check_memory()
    ServiceSettings(tmp_path, {"cpu": memory_bytes() - (1 << 30)}, planning_bytes=1 << 30).check_memory()


def test_links_are_not_followed_when_files_are_measured(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 1_000_000)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "large")
    (inside / "around").symlink_to(tmp_path)
    assert bytes_on_disk(inside) < 100_000


def test_a_study_keeps_its_trials(serve: Callable[..., Serving]) -> None:
    serving = serve(keep_days=1.0)
    run = over(serving, 5.0)
    search = {"space": {"optim.lr": [0.1, 0.2]}, "objective": "loss"}
    sent = Submission({**small_runs.run_file(), "search": search}, code=serving.code())
    study = serving.studies.submit(ANNA, sent)[0]
    serving.service.store.change(run.number, "done", "done", study=study.number)
    serving.housekeeping.look()
    assert there(serving, run)
    serving.studies.store.change(study.number, state="done")
    serving.housekeeping.look()
    assert not there(serving, run)


def test_to_drain_what_was_never_started_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--folder", str(tmp_path), "--drain"]) == 3
    assert "no service has been started in" in capsys.readouterr().err
    assert main(["serve", "--folder", str(tmp_path), "--keep-bytes", "lots"]) == 3
    assert "--keep-bytes: " in capsys.readouterr().err
