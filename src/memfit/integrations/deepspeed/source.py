"""From a file to plain data: JSON, or hjson (comments, keys without quotes, trailing commas) where the package for it is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError, InputError


class _TwiceError(ValueError):
    """A key stands twice: what both parsers let through as it is, and what is no error of their syntax."""


def load(source: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a configuration.

    Args:
        source: path of a file, or the data itself, whose duplicate keys Python has dropped already.

    Raises:
        ConfigError: no such file, neither JSON nor hjson, a key that is given twice, or no keys at all.
        InputError: the file needs the hjson package, which is not installed.
    """
    if isinstance(source, Mapping):
        return deepcopy(dict(source))  # a configuration does not change when its source does
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read the DeepSpeed configuration {source}: {reason}") from error
    try:
        data = _parse(text, str(source))
    except _TwiceError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected keys and values, such as train_batch_size")
    return dict(data)


def fill(data: dict[str, Any], auto: Mapping[str, Any]) -> None:
    """Put values where the configuration says "auto".

    Args:
        data: is changed.
        auto: values by the paths of their keys.

    Raises:
        ConfigError: there is no "auto" at a path.
    """
    for path, value in auto.items():
        *sections, key = path.split(".")
        place: Any = data
        for name in sections:
            place = place.get(name) if isinstance(place, dict) else None
        if not isinstance(place, dict) or place.get(key) != "auto":
            said = repr(place[key]) if isinstance(place, dict) and key in place else "nothing"
            raise ConfigError(f'auto: a value for {path} was given, where the configuration says {said}, not "auto"')
        place[key] = value


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as no_json:
        try:
            import hjson
        except ImportError as error:
            raise InputError(
                f"{name} is no plain JSON ({no_json}), and reading hjson needs a package: pip install 'memfit[deepspeed]'"
            ) from error
        try:
            return hjson.loads(text, object_pairs_hook=_unique)
        except hjson.HjsonDecodeError as error:
            raise ConfigError(f"{name}: neither JSON nor hjson ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(f"the key {key!r} is given twice")
        found[key] = value
    return found
