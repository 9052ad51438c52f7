"""The extras of this installation, from the package's own metadata: one list, in pyproject.toml."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any, Final

_FOR_DEVELOPERS: Final = "dev"
_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([^'\"]+)")


def extras(package: str = "memfit") -> dict[str, dict[str, Any]]:
    """Each extra of a package: whether all of it is installed, and which version of each package it needs is (None: none).

    Empty when the package itself was not installed but only found on the path.
    """
    try:
        requirements = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for requirement in requirements:
        wanted, _, condition = requirement.partition(";")
        extra, package_name = _EXTRA.search(condition), re.match(r"[\w.-]+", wanted)
        if extra is None or extra[1] == _FOR_DEVELOPERS or package_name is None:
            continue
        least = re.search(r">=\s*([\d.]+)", wanted)
        there = version(package_name[0])
        entry = found.setdefault(extra[1], {"installed": True, "packages": {}})
        entry["packages"][package_name[0]] = there
        entry["installed"] &= there is not None and _release(there) >= _release(least[1] if least else "0")
    return found


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """As much of a version as a lower bound asks: "5.2.1rc1" -> (5, 2, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else (0,)


def described(found: dict[str, dict[str, Any]]) -> list[str]:
    """The same as text, one line for each."""
    lines = []
    for name, extra in found.items():
        there = ", ".join(f"{package} {number}" for package, number in extra["packages"].items() if number is not None)
        if extra["installed"]:
            lines.append(f"Extra {name}: {there}")
        else:
            has = f", has {there}" if there else ""
            lines.append(f"Extra {name}: missing{has} (pip install 'memfit[{name}]')")
    return lines or ["Extras: not known, for memfit is on the path without being installed"]
