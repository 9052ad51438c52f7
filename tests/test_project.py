"""What holds for the project as a whole: one public list, no torch where none is needed, one version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import memfit

ROOT = Path(__file__).parents[1]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def torch_free_modules() -> list[str]:
    """The modules that the import contract keeps from torch: one list for both checks."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (forbidden,) = [contract for contract in contracts if contract.get("forbidden_modules") == ["torch"]]
    return ["memfit", *forbidden["source_modules"]]


def test_the_public_list_is_what_is_visible() -> None:
    assert sorted(memfit.__all__) == memfit.__all__
    integrations = [
        "lightning",
        "transformers",
    ]  # modules, each with an extra of its own: `import *` must not need them
    assert dir(memfit) == sorted([*memfit.__all__, *integrations, "__version__"])


@pytest.mark.parametrize("name", memfit.__all__)
def test_each_public_name_is_there_and_ours(name: str) -> None:
    assert getattr(memfit, name).__module__.startswith("memfit.")


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'memfit' has no attribute 'paln'"):
        memfit.paln  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", torch_free_modules())
def test_importing_it_does_not_import_torch(module: str) -> None:
    """The contract reads import statements; this sees what really happens."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_there_is_one_version() -> None:
    assert memfit.__version__ == pyproject()["project"]["version"] == version("memfit")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == memfit.__version__


def test_every_tool_of_the_dev_extra_is_pinned() -> None:
    """An unpinned linter turns a green main branch red overnight."""
    project = pyproject()["project"]
    wanted = {each.split(">")[0] for each in (*project["dependencies"], *project["optional-dependencies"]["dev"])}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}

    assert wanted - pinned == set()
