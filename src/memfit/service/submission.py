"""A run file that a client sends: what it may name, and what it may not. What it does when it runs is for `memfit.service.confine` to bound."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import BudgetError, ConfigError
from memfit.service.refusals import Refusal
from memfit.service.settings import ServiceSettings
from memfit.train.config import from_json
from memfit.units import parse_bytes


def checked(config: Any, code: Path | None, settings: ServiceSettings) -> dict[str, Any]:
    """A run file as it is kept: complete, and with nothing in it that a run of the service may not say.

    Args:
        config: the content of the file, sections by name.
        code: folder of the uploaded code; None without.
        settings: of the service.

    Raises:
        ConfigError: a key is misspelt, has a wrong type or is missing.
        Refusal: it names what is not there, or what runs here may not read.
    """
    if not isinstance(config, Mapping) or any(not isinstance(key, str) for key in config):
        raise Refusal("a run file holds sections such as model, data and fit: send its content as an object")
    if "search" in config:
        raise Refusal("the run file has a search: part, and a search is no single run: use memfit tune")
    if "folder" in config:
        raise Refusal("folder: the service has folders of its own; leave it out")
    content = dict(config)
    if isinstance(content.get("deepspeed"), str):
        raise Refusal("deepspeed: write the content of that file in its place; the service reads no file by this name")
    train = content.get("train")
    if isinstance(train, Mapping):
        content["train"] = {name: value for name, value in train.items() if name != "out"}
    root = code or settings.folder / "nowhere"
    from_json(content, root)  # strict: names and types of all keys
    _check_paths(content, root, settings)
    _check_modules(content, code, settings)
    return _within_capacity(content, settings)


def _check_paths(content: Mapping[str, Any], root: Path, settings: ServiceSettings) -> None:
    allowed = [Path(os.path.realpath(each)) for each in (root, *settings.data)]
    for key, text in paths(content):
        try:
            place = os.path.realpath(os.path.join(root, os.path.expanduser(text.partition("*")[0])))  # noqa: PTH118, PTH111 - as `glob` will read it
        except ValueError:  # a character that no path has
            raise Refusal(f"{key}: there is no {text!r}") from None
        if (
            ".." in text.split("/")
            or text.startswith("~")
            or not any(Path(place).is_relative_to(each) for each in allowed)
        ):
            there = ", ".join(str(each) for each in settings.data) or "none on this service"
            raise Refusal(
                f"{key}: {text!r} is neither in the uploaded folder nor in a folder that runs may read ({there})"
            )
        if "*" not in text and "?" not in text and "[" not in text and not os.path.exists(place):  # noqa: PTH110 - a text
            raise Refusal(f"{key}: there is no {text!r}")


def paths(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Everything in a run file that is a path, with its key."""
    for section, names in (("model", ("hf",)), ("data", ("train", "validation", "tokenizer"))):
        part = content.get(section)
        if not isinstance(part, Mapping):
            continue
        for name in names:
            value = part.get(name)
            for text in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(text, str) and not (name == "tokenizer" and text == "bytes"):
                    yield f"{section}.{name}", text
    fit = content.get("fit")
    if (
        isinstance(fit, Mapping)
        and isinstance(fit.get("devices"), str)
        and ("/" in fit["devices"] or "." in fit["devices"].partition("@")[0])
    ):
        yield "fit.devices", fit["devices"]


def _check_modules(content: Mapping[str, Any], code: Path | None, settings: ServiceSettings) -> None:
    for section in ("model", "data"):
        part = content.get(section)
        target = part.get("python") if isinstance(part, Mapping) else None
        if not isinstance(target, str):
            continue
        module = target.partition(":")[0]
        if code is None and module not in settings.modules:
            raise Refusal(f"{section}.python: {target!r} needs its code: send the folder that holds it")
        if code is None:
            continue
        first = code / module.partition(".")[0]
        if not os.path.isfile(f"{first}.py") and not os.path.isdir(first):  # noqa: PTH112, PTH113 - whatever its name
            there = ", ".join(sorted(each.stem for each in code.glob("*.py"))) or "none"
            raise Refusal(
                f"{section}.python: the uploaded folder has no module {first.name!r}; its modules are {there}"
            )


def device_kind(fit: Mapping[str, Any], capacity: Mapping[str, int]) -> str:
    """The kind of devices that a run takes here, "cuda" or "cpu"; `fit` is that section of its file."""
    kind = str(fit.get("device", "auto")).partition(":")[0]
    kinds = {name.partition(":")[0] for name in capacity}
    return kind if kind in kinds else "cuda" if "cuda" in kinds else "cpu"


def _within_capacity(content: dict[str, Any], settings: ServiceSettings) -> dict[str, Any]:
    """A budget above the largest device is that of the device: a plan for more could not run here."""
    fit = dict(content.get("fit") or {})
    kind = device_kind(fit, settings.capacity)
    largest = max((size for name, size in settings.capacity.items() if name.partition(":")[0] == kind), default=0)
    if fit.get("budget") is None:
        raise ConfigError(f"fit.budget is missing: the bytes that the run may take, at most {largest} on {kind} here")
    try:
        wanted = parse_bytes(fit["budget"], total_bytes=largest)
    except BudgetError as error:
        raise ConfigError(f"fit.budget: {error}") from None
    fit["budget"] = min(wanted, largest) if largest else wanted
    return {**content, "fit": fit}
