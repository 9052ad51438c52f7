"""What MkDocs is told beside `mkdocs.yml`: pages from outside of docs/, and links out of docs/ where nothing answers on the site.

Pages are written for a code host, where `../CONTRIBUTING.md` and `../src/memfit/choices.py` lead somewhere. On the site the pages of `BESIDE` are
there too; whatever else lies outside of docs/ is named without a link, as no address of the repository is known.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")
ONLY_CODE = re.compile(r"^(?:\* |  )(?:`[^`\n]+`,? ?)+$", re.MULTILINE)
LINK = re.compile(r"(?<!`)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for name in BESIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point every link at its place on the site, and end lines of lists that are nothing but code: a message stands above what it means."""
    here = page.file.src_uri
    place = here if here in BESIDE else f"docs/{here}"

    def on_site(link: re.Match[str]) -> str:
        path, mark, anchor = link["target"].partition("#")
        if not path or "://" in path:
            return link[0]
        meant = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
        source = meant.removeprefix("docs/")
        if source != meant or meant in BESIDE:
            return f"[{link['text']}]({posixpath.relpath(source, posixpath.dirname(here) or '.')}{mark}{anchor})"
        return link["text"]

    return ONLY_CODE.sub(r"\g<0>  ", LINK.sub(on_site, markdown))
