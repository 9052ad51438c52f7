"""What is refused of an upload leaves nothing behind; what a run puts into its folder leads nobody out of it."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.runs import _line
from memfit.cli.submit import _names_files
from memfit.errors import InputError
from memfit.service import uploads
from memfit.service.client import Client
from memfit.service.own_folder import files_inside, open_inside
from memfit.service.refusals import NotKnownError, Refusal, TooLargeError
from memfit.service.uploads import UploadLimits, packed, unpack
from service import small_runs
from service.conftest import ANNA, Serving

LIMITS = UploadLimits(unpacked_bytes=1 << 20, files=10)


def archive(folder: Path, write: Callable[[zipfile.ZipFile], None]) -> Path:
    file = folder / "sent.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        write(opened)
    return file


def special(kind: int) -> Callable[[zipfile.ZipFile], None]:
    def write(opened: zipfile.ZipFile) -> None:
        entry = zipfile.ZipInfo("link")
        entry.external_attr = (kind | 0o777) << 16
        opened.writestr(entry, "/etc/passwd")

    return write


def bomb(opened: zipfile.ZipFile) -> None:
    opened.writestr("zeros", b"\0" * (2 << 20))


def bomb_that_lies(opened: zipfile.ZipFile) -> None:
    bomb(opened)
    opened.infolist()[0].file_size = 10


def twice(opened: zipfile.ZipFile) -> None:
    opened.writestr("net.py", "a")
    opened.writestr("NET.py", "b")


def many(opened: zipfile.ZipFile) -> None:
    for number in range(11):
        opened.writestr(f"f{number}", "")


def encrypted(opened: zipfile.ZipFile) -> None:
    opened.writestr("net.py", "a")
    opened.infolist()[0].flag_bits |= 1


HOSTILE = {
    "climbs": lambda z: z.writestr("../out.py", ""),
    "climbs inside": lambda z: z.writestr("a/../../out.py", ""),
    "absolute": lambda z: z.writestr("/out.py", ""),
    "backslashes": lambda z: z.writestr("..\\out.py", ""),
    "a drive": lambda z: z.writestr("C:out.py", ""),
    "a control character": lambda z: z.writestr("a\nb.py", ""),
    "a long name": lambda z: z.writestr("a" * 500, ""),
    "a deep path": lambda z: z.writestr("a/" * 30 + "b", ""),
    "a link": special(stat.S_IFLNK),
    "a pipe": special(stat.S_IFIFO),
    "a device": special(stat.S_IFCHR),
    "a bomb": bomb,
    "a bomb that lies": bomb_that_lies,
    "too many files": many,
    "a name twice": twice,
    "encrypted": encrypted,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_without_a_trace(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    with pytest.raises(Refusal):
        unpack(archive(tmp_path, HOSTILE[name]), folder / "digest", LIMITS)
    assert list(folder.iterdir()) == []
    assert sorted(os.listdir(tmp_path)) == ["code", "sent.zip"]


@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4 no more", bytes(range(100, 200))], ids=["nothing", "a beginning", "something else"]
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sent.zip").write_bytes(content)
    with pytest.raises(Refusal, match="no zip archive"):
        unpack(tmp_path / "sent.zip", tmp_path / "code", LIMITS)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../out.py", "no path below"),
        ("a" * 500, "500 characters, and 400 are taken"),
        ("a/" * 30 + "b", "31 parts, and 20 are taken"),
    ],
)
def test_what_is_wrong_with_a_path_is_told(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(Refusal, match=told):
        unpack(archive(tmp_path, lambda z: z.writestr(name, "")), tmp_path / "code", LIMITS)


def test_a_bomb_is_told_by_its_limit(tmp_path: Path) -> None:
    with pytest.raises(TooLargeError, match="unpacks to more than 1.00 MiB"):
        unpack(archive(tmp_path, bomb), tmp_path / "code", LIMITS)


def test_the_same_archive_is_taken_from_several_at_the_same_moment(tmp_path: Path) -> None:
    source = small_runs.code(tmp_path / "source")
    for number in range(100):
        (source / f"file{number}").write_text(str(number))
    with (tmp_path / "sent.zip").open("wb") as stream:
        packed(source, stream)
    (tmp_path / "code").mkdir()
    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(
                lambda _: unpack(tmp_path / "sent.zip", tmp_path / "code" / "digest", UploadLimits()), range(16)
            )
        )
    assert {each.files for each in found} == {102}
    assert len(os.listdir(tmp_path / "code" / "digest")) == 102
    assert os.listdir(tmp_path / "code") == ["digest"]


def test_a_folder_arrives_as_it_was_and_without_what_is_hidden(tmp_path: Path) -> None:
    source = small_runs.code(tmp_path / "source")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("secret")
    (source / ".env").write_text("secret")
    (source / "link").symlink_to("/etc/passwd")
    for place in (
        "service",
        "several/hosts/one",
    ):  # of services that were started here: a token, and all code that was sent
        (source / place / "code").mkdir(parents=True)
        (source / place / "address.json").write_text("secret")
    first, second = io.BytesIO(), io.BytesIO()
    packed(source, first)
    packed(source, second)
    assert first.getvalue() == second.getvalue()  # so that the same code has the same digest
    (tmp_path / "sent.zip").write_bytes(first.getvalue())
    found = unpack(tmp_path / "sent.zip", tmp_path / "code", LIMITS)
    assert (found.files, sorted(os.listdir(tmp_path / "code"))) == (2, ["net.py", "train.npz"])
    assert (tmp_path / "code" / "net.py").read_text() == small_runs.NET


@pytest.mark.parametrize(
    ("section", "beside"),
    [
        ({"data": {"train": "train.npz"}}, True),
        ({"data": {"train": "pages/*.md"}}, True),
        ({"data": {"train": "pages/one.md"}}, True),
        ({"data": {"train": ["/srv/a.npz", "pages/**.md"]}}, True),
        ({"data": {"train": "/srv/a.npz"}, "model": {"hf": "small"}}, True),
        ({"data": {"train": "/srv/a.npz", "tokenizer": "bytes"}}, False),
        ({"data": {"train": "gone.npz"}}, False),
        ({"data": None}, False),
    ],
)
def test_files_beside_a_run_file_are_found(tmp_path: Path, section: dict[str, Any], *, beside: bool) -> None:
    for name in ("pages", "small"):
        (tmp_path / name).mkdir()
    for name in ("train.npz", "pages/one.md", "bytes"):
        (tmp_path / name).write_text("")
    assert _names_files(section, tmp_path) == beside


def test_a_run_of_unknown_length_is_told_without_it() -> None:
    plan = {"peak_bytes": 1024, "budget_bytes": 2048, "total_steps": None}
    run = {"run": 8, "state": "running", "asked": "", "name": "huge", "owner": "anna", "plan": plan, "step": 3}
    assert _line({**run, "reason": "started"}) == "8  running  huge (anna), 1.00 KiB of 2.00 KiB, step 3: started"


def test_a_folder_of_data_is_refused_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").write_bytes(bytes(2 << 20))
    monkeypatch.setattr(uploads, "UploadLimits", lambda: LIMITS)
    with (
        Client("http://127.0.0.1:9", "token") as asking,
        pytest.raises(
            InputError, match=r"the folder .*data is too large to be sent along \(the upload unpacks to more"
        ),
    ):
        asking.upload(tmp_path / "data")
    for number in range(11):
        (tmp_path / "data" / f"f{number}").write_text("")
    (tmp_path / "data" / "large").unlink()
    with pytest.raises(TooLargeError, match="the upload holds more than 10 files"):
        packed(tmp_path / "data", io.BytesIO())


def test_a_run_that_writes_links_and_pipes_leads_nobody_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "run"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "file").write_text("own")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    with open_inside(folder, "inside/file") as stream:
        assert stream.read() == b"own"
    for name in (
        "link",
        "up/secret",
        "pipe",
        "../secret",
        "inside/../../secret",
        str(tmp_path / "secret"),
        "",
        "inside",
        "inside\0",
        "a" * 5000,
    ):
        with pytest.raises(NotKnownError):
            open_inside(folder, name)
    assert list(files_inside(tmp_path, "run")) == [("inside/file", 3)]
    for name in ("link", "up", "pipe", "nothing"):
        assert list(files_inside(folder, name)) == []
    assert list(files_inside(tmp_path / "nowhere", "out")) == []


def test_a_run_whose_folder_of_results_is_a_link_shows_nobody_elses(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    serving = serve()
    run = serving.submit()
    folder = serving.service.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    (folder / "out").symlink_to(tmp_path / "elsewhere")
    assert list(serving.service.artifacts(ANNA, run.number)) == []
    with pytest.raises(NotKnownError):
        serving.service.artifact(ANNA, run.number, "secret")


def test_a_plan_that_a_run_has_written_anew_is_read_up_to_a_limit(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()
    run = serving.submit()
    serving.service.store.change(run.number, "waiting", "fits", state="waiting", reason="fits", plan={})
    folder = serving.service.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "plan.json").open("wb") as plan:
        plan.truncate(1 << 40)
    monkeypatch.setattr("memfit.service.service.MOST_PLAN_BYTES", 1 << 20)
    assert serving.service.words(ANNA, run.number) == "fits"
    (folder / "plan.json").write_text("[" * 100_000)
    assert serving.service.words(ANNA, run.number) == "fits"
