"""A copy of the store is put back: nothing that happened since is mixed up with what happens then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.cli.main import main
from memfit.errors import InputError
from memfit.runner import RunRequest
from memfit.service import launching
from memfit.service.database import NAME
from memfit.service.restoring import restore
from memfit.service.store import ServiceStore
from service.conftest import Serving, started


def test_a_copy_is_put_back_and_no_number_is_given_twice(serve: Callable[..., Serving], tmp_path: Path) -> None:
    serving = serve()
    first = serving.submit()
    copy = tmp_path / "copy.sqlite"
    serving.service.store.backup(copy)
    since = serving.submit()
    launching.write(serving.settings, since)
    folder = serving.settings.folder
    with pytest.raises(InputError, match="another process runs what is in"):
        restore(folder, copy)

    runner = serving.service.dispatcher.runner
    runner.submit(RunRequest(launching.name_of(since.number, 1), ("sleep", "60"), outlives_runner=True))
    runner.poll()
    guard = runner._running[launching.name_of(since.number, 1)].process
    assert guard is not None
    serving.service.dispatcher.close()
    serving.service.store.close()
    before = restore(folder, copy)
    assert before is not None
    assert before.exists()
    fresh = started(serving.settings, tmp_path)
    serving.service, serving.studies = fresh.service, fresh.studies
    assert [run.number for run in serving.service.store.listed(owner=None)] == [first.number]
    runner = serving.service.dispatcher.runner
    serving.until(lambda: runner.end_of(launching.name_of(since.number, 1)) is not None)
    guard.wait()  # it is this process's own, whichever runner watches it
    assert serving.submit().number == since.number + 1


def test_what_is_no_copy_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    ServiceStore(folder).close()
    content = (folder / NAME).read_bytes()
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at " * 100)
    for wrong in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(InputError, match="nothing was changed"):
            restore(folder, wrong)
    assert (folder / NAME).read_bytes() == content
    assert not (tmp_path / "missing").exists()


def test_a_folder_that_is_new_gets_the_copy(tmp_path: Path, serve: Callable[..., Serving]) -> None:
    serving = serve()
    serving.submit()
    serving.service.store.backup(tmp_path / "copy")
    assert main(["serve", "--folder", str(tmp_path / "new"), "--restore", str(tmp_path / "copy")]) == 0
    store = ServiceStore(tmp_path / "new")
    assert len(store.listed(owner=None)) == 1
    store.close()
