"""The site is built without a warning, asks the network for nothing, and has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).parents[1]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
NAMED = re.compile(r"^::: memfit\.(\w+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a process of its own: MkDocs and its plugins leave warnings and loggers behind.

    Not with --quiet: what is not logged is not counted as a warning, so nothing would be strict.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]

    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in {"script", "img", "iframe", "source", "video", "audio"}:
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in {"canonical", "prev", "next"}:
            self.addresses.append(given.get("href") or "")


def pages(site: Path) -> Iterator[tuple[str, str]]:
    for page in sorted(site.rglob("*.html")):
        yield page.relative_to(site).as_posix(), page.read_text(encoding="utf-8")


def test_every_page_is_there(site: Path) -> None:
    built = {name for name, _ in pages(site)}
    written = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in ROOT.glob("docs/**/*.md")}

    assert {name.replace("README.html", "index.html") for name in written} <= built
    assert 'href="CONTRIBUTING.html"' in (site / "index.html").read_text(encoding="utf-8"), "from outside of docs/"
    assert not list(site.glob("*.py"))


def test_search_runs_where_the_folder_is_opened_from_disk(site: Path) -> None:
    """Without its index as a script the theme's own script ends with an error there, and the switch to dark colours does nothing."""
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    for name, text in pages(site):
        fetched = Fetched()
        fetched.feed(text)
        up = "/" if name == "404.html" else "../" * name.count("/")  # that one comes from a server
        assert f"{up}iframe-worker.js" in fetched.addresses, name


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    for name, text in pages(site):
        fetched = Fetched()
        fetched.feed(text)
        assert fetched.addresses, name
        assert [address for address in fetched.addresses if "//" in address] == [], name
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//|@import", style.read_text(encoding="utf-8")) == [], style.name


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    named = [name for page in REFERENCE for name in NAMED.findall(page.read_text(encoding="utf-8"))]

    assert sorted(named) == memfit.__all__
    for page in REFERENCE:
        text = (site / "reference" / page.with_suffix(".html").name).read_text(encoding="utf-8")
        missing = [n for n in NAMED.findall(page.read_text(encoding="utf-8")) if f'id="memfit.{n}"' not in text]
        assert missing == []
        # "first, second: what they are" is read as one attribute of that name.
        assert re.findall(r'title="memfit[^"]*,[^"]*"', text) == []
