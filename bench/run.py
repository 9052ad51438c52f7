"""Ask all questions, or those named, and write the pages.

python bench/run.py [QUESTION ...]        # make bench
python bench/run.py --pages               # only the pages, from the results that are there
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import charts
import measuring
import pictures

from memfit.views.layout import NARROW, WIDE
from memfit.views.svg import escaped, svg_file

FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parent / "docs"
README = FOLDER.parent / "README.md"
TECHNIQUES = DOCS / "techniques"
PICTURES = DOCS / "pictures" / "figures"
PHONE = 700  # pixels of a screen below which a chart is shown in its narrow layout
QUESTIONS = (
    "exactness",
    "paths",
    "programs",
    "operations",
    "reference_gpt",
    "planning",
    "growth",
    "overhead",
    "slowdowns",
    "frontier",
    "fit",
    "predict",
    "faults",
    "zoo",
    "techniques",
    "choices",
    "optimizers",
    "offloading",
    "seeds",
    "published",
    "published_seconds",
    "stages",
    "clusters",
    "sharding",
    "tune",
    "service",
    "answers",
)
ON_A_GPU = "gpu"  # asked where there is one, by itself
COMMANDS = {ON_A_GPU: "PYTHONPATH=src python bench/gpu/run.py --out results && python bench/gpu/keep.py results"}
BEGIN, END = "<!-- written by bench/run.py -->", "<!-- end -->"


def module_of(question: str) -> Any:
    """The question's run.py, by its file: a question may have the name of something else (the zoo of the tests)."""
    spec = importlib.util.spec_from_file_location(f"question_{question}", FOLDER / question / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    spec.loader.exec_module(module)
    return module


def section(question: str, folder: Path) -> str:
    """Machine, command, charts and table of a question, from its kept results, for a page in a folder."""
    rows = measuring.kept(question)
    command = f"```console\n$ {COMMANDS.get(question, f'python bench/run.py {question}')}\n```"
    if not rows:
        return f"{command}\n\nNot run yet."
    shown = [shown_in(folder, name, picture(WIDE).label) for name, picture in charts_of(question, rows).items()]
    table = in_the_fields_words(module_of(question).table(rows))
    told = "; ".join(measuring.in_words(own[0]["machine"]) for own in measuring.by_computer(rows).values())
    return "\n\n".join([command, f"{told}.", *shown, table])


def charts_of(question: str, rows: Sequence[dict[str, Any]]) -> dict[str, charts.Picture]:
    """The question's charts, by the names of their files."""
    return pictures.OF[question](rows, module_of(question)) if question in pictures.OF else {}


def shown_in(folder: Path, name: str, label: str) -> str:
    """A chart on a page: the wide layout, and the narrow one on a phone."""
    place = Path(os.path.relpath(PICTURES, folder)).as_posix()
    narrow = f'<source media="(max-width: {PHONE}px)" srcset="{place}/{name}-narrow.svg">'
    return f'<picture>{narrow}<img src="{place}/{name}.svg" alt="{escaped(label)}"></picture>'


def drawn() -> dict[Path, str]:
    """Every chart, in both layouts."""
    out = {}
    for question in QUESTIONS:
        if rows := measuring.kept(question):
            for name, picture in charts_of(question, rows).items():
                for layout, ending in ((WIDE, ""), (NARROW, "-narrow")):
                    out[PICTURES / f"{name}{ending}.svg"] = svg_file(picture(layout), also_dark=True)
    return out


def measured(technique: str) -> str:
    """What the kept results say of one technique: of each question that has something, the command, the machine and the rows."""
    parts = []
    for question in QUESTIONS:
        rows = measuring.kept(question)
        excerpt = getattr(module_of(question), "excerpt", None)
        told = excerpt(rows, technique) if rows and excerpt is not None else ""
        if told:
            command = f"```console\n$ python bench/run.py {question}\n```"
            parts += [command, f"{measuring.in_words(rows[0]['machine'])}.", in_the_fields_words(told)]
    return "\n\n".join(parts)


def packed(folder: Path, *, with_chart: bool) -> str:
    """Runs packed by their predicted peaks beside other ways to start them, for a page in a folder that is not about measurements."""
    rows = measuring.kept("tune")
    own = [row for row in rows if row["part"] == "own runs"]
    charts = [shown_in(folder, name, picture(WIDE).label) for name, picture in charts_of("tune", rows).items()]
    table = module_of("tune").own_runs.short_table(own)
    told = "\n\n".join([*(charts if with_chart else []), table, f"{measuring.in_words(own[0]['machine'])}."])
    return f"\n{told}\n"


# Stored results have the words of the code that wrote them; pages have the field's.
WORDS = (
    (r"\bswap\b", "activation offloading"),
    (r"(?<!optimizer )\bstate on disk\b", "optimizer state on disk"),
    (r"\bnumbers (?=equal|differ)", "results "),
    (r"\| numbers \|", "| results |"),
    (r"\| ways \|", "| candidates |"),
)


def in_the_fields_words(text: str) -> str:
    """A table as pages have it."""
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text)
    return text


def between(text: str, written: str) -> str:
    """A page with what stands between its marks written anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.split(END)[1]}"


def pages() -> dict[Path, str]:
    """Each question's README, docs/figures.md with all of them, and the pages that quote some, from the kept results."""
    out = {}
    parts = []
    for question in (*QUESTIONS, ON_A_GPU):
        path = FOLDER / question / "README.md"
        out[path] = between(path.read_text(), section(question, path.parent))
        before, after = out[path].split(BEGIN)[0], out[path].split(END)[1]
        body = before.strip().replace("# ", "## ", 1)
        parts += [body, "", section(question, DOCS), ""]
        if after.strip():
            parts += [after.strip(), ""]
    for path in sorted(TECHNIQUES.glob("*.md")):
        if BEGIN in (text := path.read_text()):
            out[path] = between(text, f"\n{measured(path.stem)}\n")
    fits, tuning = DOCS / "24gb.md", DOCS / "tuning.md"
    out[fits] = between(fits.read_text(), f"\n{section('answers', DOCS)}\n")
    out[tuning] = between(tuning.read_text(), packed(DOCS, with_chart=True))
    out[README] = between(README.read_text(), packed(README.parent, with_chart=False))
    body = "\n".join(parts).rstrip() + "\n"
    out[DOCS / "figures.md"] = f"{beginning(body)}\n{body}"
    return out | drawn()


def beginning(body: str) -> str:
    """The top of the page of figures: what each chart shows, and the sections."""
    told = []
    for question in pictures.OF:
        heading = (FOLDER / question / "README.md").read_text().partition("\n")[0].removeprefix("# ")
        for picture in charts_of(question, measuring.kept(question)).values():
            told.append(f"* [{heading}](#{anchor(heading)}): {picture(WIDE).label}")
    headings = re.findall(r"^## (.+)$", body, re.MULTILINE)
    contents = [f"* [{each}](#{anchor(each)})" for each in headings]
    return "\n".join(
        [
            "# Figures",
            "",
            "What was measured, on which machine, with which command: charts first, then the tables. Written by `python bench/run.py` from",
            "`bench/*/results.jsonl`; run it (`make bench`) to get your own.",
            "",
            "What the charts show:",
            "",
            *told,
            "",
            "All sections:",
            "",
            *contents,
            "",
        ]
    )


def anchor(heading: str) -> str:
    """As code hosts derive it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, []], default=[])
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    arguments = parser.parse_args()
    if not arguments.pages:
        for question in arguments.questions or QUESTIONS:
            print(f"== {question}", flush=True)
            subprocess.run([sys.executable, str(FOLDER / question / "run.py")], check=True)
    written = pages()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in set(PICTURES.glob("*.svg")) - set(written):
        path.unlink()
    for path, text in written.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
