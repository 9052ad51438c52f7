"""The page that lists every key of a configuration, made from the schema itself, so that it cannot fall behind.

python docs/write_configuration.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from memfit.train.config import Config
from memfit.tune.search import SearchConfig

_HEAD: Final = """# Configuration

Every key of a run file, as `memfit plan`, `train`, `frontier`, `tune` and `submit` read it. A run file is YAML, or JSON with the same keys; a key that is not
on this page is an error that names the nearest one. Relative paths are read from the folder of the file. Each key can be set on the command line, too, as if
it stood in the file: `--set optim.lr=1e-4`.

A short file is in [the quickstart](../quickstart.md#from-the-command-line), whole ones are in [examples](../../examples/README.md).

This page is written by `python docs/write_configuration.py`, and a test compares it with the code.
"""


_SEARCH: Final = " `memfit tune` reads this section, the other commands pass over it: [Tuning](../tuning.md)."
PAGE: Final = Path(__file__).with_name("reference") / "configuration.md"


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    kinds = typing.get_type_hints(Config)
    alone: list[dataclasses.Field[Any]] = []
    for field in dataclasses.fields(Config):
        section = _of_section(kinds[field.name])
        if section is not None:
            parts.append(_section(field.name, section))
        else:
            alone.append(field)
    said = attributes(Config)
    rows = [(field.name, kinds[field.name], _default(field), said.get(field.name, "")) for field in alone]
    parts += [f"## Beside the sections\n\n{_table(rows)}", _section("search", SearchConfig, _SEARCH)]
    return "\n".join(parts)


def _of_section(kind: Any) -> Any:
    """The class of a section, which may be left out as a whole (`lora`); None for a single key."""
    return next((each for each in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(each)), None)


def _section(name: str, kind: Any, more: str = "") -> str:
    said = attributes(kind)
    kinds = typing.get_type_hints(kind)
    opening = (inspect.getdoc(kind) or "").split("\n\n")[0]
    rows = [
        (f"{name}.{field.name}", kinds[field.name], _default(field), said[field.name])
        for field in dataclasses.fields(kind)
    ]
    return f"## {name}\n\n{' '.join(opening.split())}{more}\n\n{_table(rows)}"


def _table(rows: Iterable[tuple[str, Any, str, str]]) -> str:
    lines = ["| key | value | when left out | what it is |", "|---|---|---|---|"]
    for name, kind, default, text in rows:
        cells = (f"`{name}`", kind_in_words(kind), default, text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def attributes(kind: type) -> dict[str, str]:
    """What the docstring says of each attribute; one line may be about several."""
    text = inspect.getdoc(kind) or ""
    _, _, below = text.partition("Attributes:\n")
    said: dict[str, str] = {}
    names: list[str] = []
    for line in below.splitlines():
        match = re.fullmatch(r"    (\w+(?:, \w+)*): (.*)", line)
        if match:
            names = match[1].split(", ")
            said |= dict.fromkeys(names, match[2])
        elif line.startswith("        ") and names:
            said |= {name: f"{said[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return said


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "needed"
    if value is None or value in ((), "") or (isinstance(value, Mapping) and not value):
        return ""
    return f"`{json.dumps(value)}`".replace('"', "")


def kind_in_words(kind: Any) -> str:
    """A type as who writes YAML calls it."""
    return " or ".join(dict.fromkeys(_kinds(kind)))


def _kinds(kind: Any) -> Iterator[str]:
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        for each in of:
            if each is not type(None):
                yield from _kinds(each)
    elif origin is typing.Literal:
        yield ", ".join(f"`{value}`" for value in of)
    elif origin is tuple:
        inner = kind_in_words(of[0])
        yield f"list of {inner}" if len(of) == 2 and of[1] is Ellipsis else f"list of {len(of)} x {inner}"
    elif origin is not None and issubclass(origin, Mapping):
        yield "mapping"
    elif dataclasses.is_dataclass(kind):
        yield "keys of its own"
    else:
        yield {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}.get(kind, "any value")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
