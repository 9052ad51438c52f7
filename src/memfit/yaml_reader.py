"""YAML as people mean it: floats of version 1.2, dates as text, no key given twice, and nothing that JSON cannot say."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML with the floats of version 1.2, and no key given twice: the first would be lost without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - the base's signature
        """A mapping, or an error at the second of two equal keys."""
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name is not None and name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(name)
        return dict(super().construct_mapping(node, deep=deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",  # YAML 1.1 wants a point and a sign: to it 1e-4 is text
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
_Loader.yaml_implicit_resolvers = {  # version 1.2 has no dates: 2026-01-31 is text
    first: [(tag, form) for tag, form in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> Any:
    """The content of a YAML text.

    Raises:
        yaml.YAMLError: it is none, a key is given twice, or it holds what JSON cannot say (`!!binary`, an alias of what it stands in).
    """
    content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    try:
        json.dumps(content)
    except (TypeError, ValueError) as error:
        raise yaml.YAMLError(f"it holds more than texts, numbers, lists and keys with values: {error}") from error
    return content


def lines(text: str) -> dict[str, int]:
    """Line of each key and entry of a YAML text that can be parsed, by its path as `memfit.strict` writes it: "nodes[0].devices[1].gpu"."""
    found: dict[str, int] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{path}.{key.value}" if path else str(key.value)
                found[inner] = key.start_mark.line + 1
                walk(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                found[f"{path}[{number}]"] = value.start_mark.line + 1
                walk(value, f"{path}[{number}]")

    walk(yaml.compose(text, Loader=_Loader), "")
    return found


def reason(error: Exception) -> str:
    """What is wrong with a text that could not be read, with its line where that is known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = f"line {error.problem_mark.line + 1}"
        if "\\t" in str(error.problem):
            return f"{line} is indented with a tab, which YAML does not take: use spaces"
        return f"{line}: {error.problem or error.context}"
    return str(error)
