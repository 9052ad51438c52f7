"""The pages keep what they promise: links lead somewhere, and the Python in them is Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"(?<!`)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
PYTHON = re.compile(r"^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def heading_anchors(page: Path) -> set[str]:
    """The anchors that code hosts derive from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        path, _, anchor = link["target"].partition("#")
        if "://" in path:
            continue  # The network is not asked.
        target = page.parent / path if path else page

        assert target.exists(), f"{page_name(page)} links to {link['target']}"
        assert not anchor or anchor in heading_anchors(target), f"{page_name(page)} links to {link['target']}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_examples_compile(page: Path) -> None:
    for example in PYTHON.finditer(page.read_text(encoding="utf-8")):
        compile(example["code"], page_name(page), "exec")
