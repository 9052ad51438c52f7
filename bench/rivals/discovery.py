"""Which rivals there are: the files in a folder, and whether what they need is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType


def modules(package: str, folder: Path) -> list[ModuleType]:
    """The modules in a folder, by file name, importable as `package.name`."""
    return [
        importlib.import_module(f"{package}.{path.stem}")
        for path in sorted(folder.glob("*.py"))
        if not path.stem.startswith("_")
    ]


def techniques() -> list[ModuleType]:
    """The rivals that train."""
    return modules("rivals.techniques", Path(__file__).resolve().parent / "techniques")


def absent(rival: ModuleType) -> str | None:
    """In words that a rival's package is not installed; None where it is."""
    if rival.PACKAGE is None or importlib.util.find_spec(rival.PACKAGE) is not None:
        return None
    return f"not installed: pip install --no-deps {rival.INSTALL}"


def version(rival: ModuleType) -> str | None:
    """Of the rival's package."""
    if rival.INSTALL is None:
        return None
    try:
        return importlib.metadata.version(rival.INSTALL.split("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
