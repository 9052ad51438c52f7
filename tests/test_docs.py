"""The pages keep what they promise: links lead somewhere, the Python runs, configurations are read, commands are parsed.

Blocks of one page run one after another in one namespace. It starts with tiny stand-ins for what a reader has anyway
(`STAND_INS`), so that a page may show a fragment such as `memfit.plan(model, sample, budget="8GiB")`; a page that defines
them itself is run with its own. Pages of one technique go on from the blocks of their folder's README.md, as they say.

A block of text right below a block of Python is what it prints.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import yaml_reader
from memfit.cli.main import main, parser
from memfit.train.config import from_json
from memfit.tune import read_search

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "memfit"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"(?<!`)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
ELLIPSIS = "…"


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, kind: str) -> list[str]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block["code"] for block in found if block["kind"] == kind]


def with_blocks(kind: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, kind)]


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


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "techniques").glob("[!R]*.md")), ids=page_name)
def test_a_page_about_a_technique_answers_the_same_questions_as_the_others(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
        "When to use it",
        "How to use it",
        "What it costs",
        "Limits",
        "Measured",
        "Where it comes from",
    ]
    assert "$ python bench/run.py" in text, "what is measured comes from the results of a benchmark"
    assert f"]({page.name})" in page.with_name("README.md").read_text(encoding="utf-8")


def test_the_page_of_configuration_keys_is_the_one_that_the_code_makes() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "write_configuration.py"))
    keys = set(re.findall(r"^\| `([\w.]+)` \|", made["page"](), re.MULTILINE))

    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "python docs/write_configuration.py"
    assert {"model.hf", "fit.budget", "train.out", "search.space", "deepspeed"} <= keys
    assert "None;" not in made["page"](), "YAML calls it null, and who reads the page leaves it out"


# ------------------------------------------------------------------------------------------- Python, YAML, command lines


class Tiny(nn.Module):
    """Returns its loss, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, inputs: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.layers(inputs), labels))


def stand_ins() -> dict[str, Any]:
    """What every page may take for granted."""
    batches = [{"inputs": torch.randn(4, 8), "labels": torch.randn(4, 8)} for _ in range(2)]
    return {
        "__name__": "page",
        "torch": torch,
        "memfit": memfit,
        "model": Tiny(),
        "sample": batches[0],
        "batches": batches,
    }


def before(page: Path) -> list[Path]:
    """Pages whose blocks come first."""
    folder = page.with_name("README.md")
    return [folder] if page.parent.name == "techniques" and page != folder else []


def as_pinned() -> bool:
    """Whether the versions are here whose bytes the pages have."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return all(f"{name}=={version(name).partition('+')[0]}" in pins for name in ("torch", "transformers"))


# At night, and by `make docs`: what these pages show has quick tests of its own, and running them takes longest.
LONGER = {
    "docs/quickstart.md",
    "docs/loops.md",
    "docs/transformers.md",
    "docs/choosing.md",
    *(
        f"docs/techniques/{name}.md"
        for name in (
            "4-bit-weights",
            "8-bit-state",
            "activation-offloading",
            "bf16-parameters",
            "mixed-precision",
            "recompute-by-hand",
        )
    ),
}


def run_pages() -> list[Any]:
    pages = with_blocks("python")
    assert {page_name(page) for page in pages} >= LONGER
    return [pytest.param(page, marks=pytest.mark.slow if page_name(page) in LONGER else ()) for page in pages]


# Lightning 2.6 asks torch for what is called otherwise since; and finds few workers and few batches on a page.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*(does not have many workers|number of training batches|tensorboardX)")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # the compiler's own
# What PEFT asks of transformers 5.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("page", run_pages(), ids=page_name)
def test_python_runs_and_prints_what_the_page_says(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    """Bytes are those of the pinned torch and transformers; under others the blocks are only run."""
    monkeypatch.chdir(tmp_path)
    namespace = stand_ins()
    compared = as_pinned()
    for source in (*before(page), page):
        for number, block in enumerate(PRINTS.finditer(source.read_text(encoding="utf-8")), 1):
            capsys.readouterr()
            name = f"{page_name(source)}, block {number}"
            exec(compile(block["code"], name, "exec"), namespace)  # noqa: S102 - our own pages
            printed = capsys.readouterr().out
            assert block["printed"] is None or not compared or printed == block["printed"], name
    exec(DOORS.get(page_name(page), ""), namespace)  # noqa: S102
    for code in after_the_diffs(page):
        exec(compile(code, f"{page_name(page)}, the diff", "exec"), namespace)  # noqa: S102


DOORS = {
    "docs/deepspeed.md": "from pathlib import Path; Path('ds_config.json').write_text('{train_batch_size: 4, optimizer: {\"type\": \"SGD\"}}')",
    "docs/lightning.md": "module, sample = Module(), next(iter(loader))",
    "docs/loops.md": "",
    "docs/paddle.md": "batches = [batch]",
    "docs/transformers.md": "from transformers import Trainer",
}
"""Pages of front doors, and what their reader has before the diff besides what the page's own blocks make."""
AT_MOST_NEW = 3  # lines


def after_the_diffs(page: Path) -> Iterator[str]:
    """What stands there once the reader has made the changes of a page."""
    for diff in blocks(page, "diff"):
        yield "\n".join(line[1:] for line in diff.splitlines() if line and not line.startswith("-"))


def test_each_door_has_a_diff_of_three_lines_at_most() -> None:
    assert {page_name(page) for page in with_blocks("diff")} == set(DOORS)
    for name in DOORS:
        for diff in blocks(ROOT / name, "diff"):
            assert sum(line.startswith("+") for line in diff.splitlines()) <= AT_MOST_NEW, name


def test_there_are_no_blocks_that_nothing_runs_or_reads() -> None:
    """A block of text is what the block above it, or a command, prints."""
    kinds = {"python", "yaml", "console", "diff", "text"}

    assert {block["kind"] for page in PAGES for block in BLOCK.finditer(page.read_text(encoding="utf-8"))} <= kinds
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        printed = sum(block["printed"] is not None for block in PRINTS.finditer(text))
        assert len(blocks(page, "text")) == printed or page.parent.name == "examples"  # what `make demo` prints


@pytest.mark.parametrize("page", with_blocks("yaml"), ids=page_name)
def test_configurations_are_read(page: Path) -> None:
    for code in blocks(page, "yaml"):
        data, folder = yaml_reader.parse(code), ROOT / "examples" / "cli"
        if "search" in data:
            assert read_search(data, folder).space
        if "model" in data:
            assert from_json(data, folder).fit.budget is not None


def commands(page: Path) -> list[list[str]]:
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for code in blocks(page, "console")
        for line in code.splitlines()
        if line.startswith("$ memfit ")
    ]


@pytest.mark.parametrize("page", with_blocks("console"), ids=page_name)
def test_commands_are_parsed(page: Path) -> None:
    for words in commands(page):
        assert parser().parse_args(words[1:]).verb == words[1]
        named = [word for word in words if word.startswith("examples/") and "/out/" not in word]
        assert [word for word in named if not (ROOT / word).exists()] == []


QUICK = {"doctor"}
"""Verbs that take seconds and need no run before them; tests/cli runs the others."""


def test_quick_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        tuple(words[1:]) for page in PAGES for words in commands(page) if words[1] in QUICK and "--oom" not in words
    }

    assert found
    for words in sorted(found):
        assert main(words) == 0
        assert capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- the page of errors


@functools.cache
def raised() -> list[tuple[str, str]]:
    """(where, message) of what is raised on purpose; what differs from case to case is an ellipsis."""
    found = []
    kinds = {name for name in memfit.__all__ if name.endswith("Error")} | {"StoreError"}  # the service's, an InputError
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            target.id: flat(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign)
            and isinstance(target := node.target, ast.Name)
            and node.value is not None
        }
        variables = {
            target.id: flat(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)  # type: ignore[assignment]
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            if node.func.id in kinds:
                message = node.args[0]
                named = {**variables, **constants}.get(message.id) if isinstance(message, ast.Name) else None
                found.append((f"{file.relative_to(ROOT)}:{node.lineno}", named or flat(message)))
    return found


def flat(node: ast.expr) -> str:
    """A text as far as the source says it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(flat(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return flat(left) + flat(right)
    return ELLIPSIS


def told(text: str, message: str) -> bool:
    """Whether a text of the page is of this message: the words between ellipses come in order."""
    at = 0
    for words in filter(None, (part.strip() for part in text.split(ELLIPSIS))):
        at = message.find(words, at)
        if at < 0:
            return False
        at += len(words)
    return True


def sections(page: Path) -> dict[str, list[str]]:
    """Heading of the second level -> the messages below it."""
    parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        found[heading] = [
            span for span in CODE_SPAN.findall(body) if len(span.strip(" :" + ELLIPSIS)) > 7 and " " in span
        ]
    return found


OF_TORCH = "What PyTorch says"


def failing() -> Iterator[Callable[[], object]]:
    """Mistakes that PyTorch answers with a message of the page."""
    yield lambda: torch.empty(1 << 58)
    yield lambda: torch.ones(2).sum().backward()
    once = torch.ones(2, requires_grad=True).exp().sum()
    once.backward()
    yield once.backward
    written = torch.ones(2, requires_grad=True).exp()
    total = (written * written).sum()
    written.add_(1)
    yield total.backward
    yield lambda: checkpoint(nn.Linear(2, 2), torch.ones(1, 2), use_reentrant=True)
    if torch.cuda.is_available():
        yield lambda: torch.empty(1 << 58, device="cuda")


def test_every_message_of_pytorch_on_the_page_is_what_pytorch_says() -> None:
    said = [inspect.getsource(torch.utils.checkpoint), inspect.getsource(torch.amp.grad_scaler)]
    for mistake in failing():
        with pytest.raises((RuntimeError, UserWarning)) as told_so:  # warnings are errors here
            mistake()
        said.append(str(told_so.value))

    body = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split(f"## {OF_TORCH}\n")[1].split("\n## ")[0]
    items = re.findall(r"^\* ((?:`[^`]+`(?:, )?)+)$", body, re.MULTILINE)
    on_page = [text for item in items for text in CODE_SPAN.findall(item)]
    unseen = [] if torch.cuda.is_available() else ["CUDA out of memory. Tried to allocate …"]

    assert len(on_page) > 8
    assert [text for text in on_page if not any(told(text, message) for message in said)] == unseen


def test_every_error_has_its_section() -> None:
    kinds = {name for name in memfit.__all__ if name.endswith("Error")} - {"MemfitError"}

    assert set(sections(ROOT / "docs" / "errors.md")) - {OF_TORCH, "Warnings"} == kinds


def test_every_message_is_on_the_page_of_errors() -> None:
    on_page = [text for texts in sections(ROOT / "docs" / "errors.md").values() for text in texts]
    # Planners that only tests and benchmarks call, and messages that merely pass another one on.
    messages = [
        (where, text)
        for where, text in raised()
        if "planner/baselines" not in where and len(re.sub(r"[\W_]", "", text)) > 4
    ]

    assert len(messages) > 100
    missing = [f"{where}: {message}" for where, message in messages if not any(told(t, message) for t in on_page)]
    assert not missing, "docs/errors.md lacks\n" + "\n".join(missing)


def test_every_message_on_the_page_of_errors_is_in_the_code() -> None:
    page = sections(ROOT / "docs" / "errors.md")
    messages = [text for _, text in raised()]
    warned = page.pop("Warnings")
    del page[OF_TORCH]
    source = "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))

    quoted = [text for texts in page.values() for text in texts if ELLIPSIS in text or len(text) > 40]
    gone = [text for text in quoted if not any(told(text, message) for message in messages)]
    assert not gone, "docs/errors.md still has\n" + "\n".join(gone)
    assert [text for text in warned if not all(w.strip(" :.,") in source for w in text.split(ELLIPSIS))] == []


# -------------------------------------------------------------------------------------------------------------- glossary


def glossary() -> list[list[str]]:
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]


def test_each_word_of_the_glossary_stands_once_and_in_order() -> None:
    words = [row[0].strip("*") for row in glossary() if row[0].startswith("**")]
    others = [word for row in glossary() if not row[0].startswith("**") for word in row[0].split(", ")]
    every = [word.lower() for word in (*words, *others)]

    assert words == sorted(words, key=str.lower)
    assert sorted({word for word in every if every.count(word) > 1}) == []


def test_each_word_of_the_glossary_lives_where_it_says() -> None:
    for word, _, *where in (row for row in glossary() if row[0].startswith("**")):
        spans = CODE_SPAN.findall(where[0])
        text = "".join((SOURCE / path).read_text(encoding="utf-8") for path in spans if path.endswith(".py"))
        assert text, word
        for name in (span for span in spans if not span.endswith(".py")):
            owner, _, member = name.partition(".")
            assert re.search(rf"^(class|def) {owner}\b", text, re.MULTILINE), f"{word}: no {owner} there"
            assert not member or re.search(rf"\b{member}\b", text), f"{word}: no {name} there"
