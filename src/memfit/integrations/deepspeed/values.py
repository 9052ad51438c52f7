"""Values of one section: read into a frozen dataclass, converted as DeepSpeed's own sections (pydantic models) convert them.

`memfit.strict` reads memfit's configuration by other rules: YAML's numbers, no "auto", no second names, no keys to be ignored.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from memfit.errors import ConfigError

T = TypeVar("T")


class Auto(Enum):
    """Left open: what a configuration says with "auto"."""

    AUTO = "auto"

    def __repr__(self) -> str:
        return "AUTO"

    def __str__(self) -> str:
        return "auto"


AUTO: Final = Auto.AUTO

_TRUTH: Final = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}
_WHOLE: Final = re.compile(r"\s*[+-]?\d+(\.0+)?\s*")
_WORDS: Final[dict[object, str]] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Auto: '"auto"',
}


def within(*, least: float | None = None, most: float | None = None, name: str = "") -> dict[str, Any]:
    """Metadata of a field: its range, and the name that stands in the file where it is not the field's."""
    return {"least": least, "most": most, "name": name}


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads the sections of one configuration, and collects notices for the user.

    Attributes:
        version: of DeepSpeed, for messages.
        strict: keys that DeepSpeed ignores are errors.
        notices: what the user should know, added to while reading.
    """

    version: str
    strict: bool
    notices: list[str]

    def section(self, kind: type[T], data: object, path: str, *, closed: bool = False) -> T:
        """A dataclass from the keys of one section.

        Args:
            kind: the dataclass; its annotations say what is accepted, `within` in which range.
            data: what the file says.
            path: where it stands: "zero_optimization.offload_param".
            closed: DeepSpeed itself refuses keys it does not know here.

        Raises:
            ConfigError: unknown key, or a value of a wrong type or out of range.
        """
        assert is_dataclass(kind)
        known = {f.metadata.get("name") or f.name: f for f in fields(kind)}
        # Both names of a key are real, and DeepSpeed takes one at a time.
        second = {f.name: name for name, f in known.items() if f.name != name}
        given = self.known(data, path, {**known, **second}, closed=closed)
        hints = get_type_hints(kind)
        values: dict[str, Any] = {}
        for key, value in given.items():
            each = known[second.get(key, key)]
            if each.name in values:
                raise ConfigError(f"{path}: {second[each.name]} and {each.name} are one key: give one of them")
            values[each.name] = self._value(hints[each.name], each, value, f"{path}.{key}")
        for name, each in known.items():
            if each.name not in values and each.default is MISSING and each.default_factory is MISSING:
                raise ConfigError(f"{path}.{name} is missing: {_described(hints[each.name])}")
        return cast("T", kind(**values))

    def known(self, data: object, path: str, names: Collection[str], *, closed: bool = False) -> dict[str, Any]:
        """The keys of `data` that exist; the others are told, or an error."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path}: expected keys and values, found {shown(data)}")
        for key in data:
            if key in names:
                continue
            guess = nearest(str(key), names)
            where = f"{path}.{key}" if path else str(key)
            if self.strict or closed:
                raise ConfigError(f"{where}: DeepSpeed {self.version} has no such key; {guess}")
            self.notices.append(f"{where} is ignored: DeepSpeed {self.version} has no such key; {guess}")
        return {key: value for key, value in data.items() if key in names}

    def _value(self, hint: Any, each: Field[Any], value: object, path: str) -> Any:
        hints = options(hint)
        nested = next((h for h in hints if is_dataclass(h)), None)
        if nested is not None and value is not None:
            return self.section(cast("type[Any]", nested), value, path, closed=True)
        found = convert(hint, value, path)
        check_range(found, path, each.metadata.get("least"), each.metadata.get("most"))
        return found


def options(hint: Any) -> tuple[Any, ...]:
    """What an annotation accepts."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def convert(hint: Any, value: object, path: str, *, quoted: bool = True) -> Any:
    """`value` as the annotation wants it.

    Args:
        hint: the annotation: plain types, Literal, tuples of text, Mapping, and unions with None and Auto.
        value: what the file says.
        path: where it stands.
        quoted: numbers and truth values in quotes count, as in DeepSpeed's pydantic models.

    Raises:
        ConfigError: it is something else.
    """
    kinds = options(hint)
    if value == "auto" and Auto in kinds:
        return AUTO
    if value is None and types.NoneType in kinds:
        return None
    for kind in kinds:
        if kind not in (Auto, types.NoneType):
            found = _converted(kind, value, quoted=quoted)
            if found is not MISSING:
                return found
    guess = ""
    if get_origin(kinds[0]) is Literal:
        close = difflib.get_close_matches(str(value), get_args(kinds[0]), 1)
        guess = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{path}: expected {_described(hint)}, found {shown(value)}{guess}")


def check_range(value: object, path: str, least: float | None, most: float | None) -> None:
    """Refuse a number out of range; whatever is no number passes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if least is not None and value < least:
        raise ConfigError(f"{path}: {value} is less than {least}")
    if most is not None and value > most:
        raise ConfigError(f"{path}: {value} is more than {most}")


def _converted(kind: Any, value: object, *, quoted: bool) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        return value if isinstance(value, str) and value in get_args(kind) else MISSING
    if origin is tuple:
        texts = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
        return tuple(cast("list[str]", value)) if texts else MISSING
    if origin is not None and issubclass(origin, Mapping):
        return dict(value) if isinstance(value, Mapping) else MISSING
    return _SCALARS[kind](value, quoted)


def _bool(value: object, quoted: bool) -> Any:  # noqa: FBT001 - one of a table of functions
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    return _TRUTH.get(value.lower(), MISSING) if quoted and isinstance(value, str) else MISSING


def _int(value: object, quoted: bool) -> Any:  # noqa: FBT001 - as above
    if isinstance(value, bool):  # pydantic makes 1 of true; nobody means it
        return MISSING
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():  # 5e8
        return int(value)
    return int(value.split(".")[0]) if quoted and isinstance(value, str) and _WHOLE.fullmatch(value) else MISSING


def _float(value: object, quoted: bool) -> Any:  # noqa: FBT001 - as above
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or (isinstance(value, str) and not quoted):
        return MISSING
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return MISSING
    return number if math.isfinite(number) else MISSING


def _str(value: object, quoted: bool) -> Any:  # noqa: ARG001, FBT001 - as above
    return value if isinstance(value, str) else MISSING


_SCALARS: Final[Mapping[Any, Callable[[object, bool], Any]]] = {bool: _bool, int: _int, float: _float, str: _str}


def _described(hint: Any) -> str:
    words = []
    for kind in options(hint):
        origin = get_origin(kind)
        if kind is types.NoneType:
            continue
        if origin is Literal:
            words.append("one of " + ", ".join(map(str, get_args(kind))))
        elif origin is tuple:
            words.append("a list of texts")
        else:
            words.append(_WORDS.get(kind, "keys and values"))
    return " or ".join(words)


def nearest(key: str, known: Collection[str]) -> str:
    """What to say about a name that does not exist."""
    lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(key.lower(), lower, 1, 0.5)
    return f"did you mean {lower[found[0]]}?" if found else f"there are: {', '.join(sorted(known))}"


def shown(value: object) -> str:
    """A value in a message, as JSON writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
