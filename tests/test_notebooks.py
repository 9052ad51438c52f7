"""The notebooks run from their first cell to their last, as they are stored: without outputs, in the format that Jupyter reads.

Their cells are run one after another in one namespace, as a kernel runs them; none uses what IPython alone has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert {"metadata", "cells"} <= set(found)
    return list(found["cells"])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": notebook.stem}
    for number, cell in enumerate(cells(notebook), 1):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), namespace)  # noqa: S102 - our own notebooks

    assert "bytes" in capsys.readouterr().out


def test_notebooks_are_stored_without_outputs() -> None:
    assert len(NOTEBOOKS) >= 2
    for notebook in NOTEBOOKS:
        names = [cell["id"] for cell in cells(notebook)]
        assert len(set(names)) == len(names)
        for cell in cells(notebook):
            assert cell["cell_type"] in {"markdown", "code"}
            assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)
