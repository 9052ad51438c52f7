"""Read plain data (YAML, JSON) into frozen dataclasses; an unknown key or a wrong type is an error that names its path.

A misspelt key that is silently ignored trains for days with the default. Libraries that do this (pydantic, cattrs)
would be a dependency for what is one recursive function here, and would speak of "validation errors" where a person
wants the nearest real key.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from memfit.errors import ConfigError

T = TypeVar("T")

# What other trainers' configurations call what stands here under another name.
_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("model.path", "model.name", "model.folder", "model.name_or_path", "model.model_name_or_path", "model.id"), "model.hf"),
    **dict.fromkeys(("model", "base_model", "model_name_or_path"), "model.hf"),
    **dict.fromkeys(("train.lr", "train.learning_rate", "optim.learning_rate", "lr", "learning_rate"), "optim.lr"),
    **dict.fromkeys(("optim.type", "optim.optimizer", "train.optimizer", "train.optim"), "optim.name"),
    **dict.fromkeys(("train.batch_size", "fit.batch_size", "data.batch_size", "fit.batch", "train.batch", "batch_size"), "fit.global_batch"),
    **dict.fromkeys(("data.length", "data.seq_len", "data.max_seq_length", "data.sequence_length", "data.sequence_len"), "data.max_length"),
    **dict.fromkeys(("train.output_dir", "train.output", "out", "output_dir"), "train.out"),
    **dict.fromkeys(("train.max_steps", "train.num_steps"), "train.steps"),
    **dict.fromkeys(("train.patience", "train.early_stopping_patience", "early_stopping_patience", "early_stopping.steps"), "early_stopping.patience"),
    **dict.fromkeys(("early_stopping.threshold", "early_stopping_threshold", "train.early_stopping_threshold", "train.min_delta"), "early_stopping.min_delta"),
    **dict.fromkeys(("early_stopping.monitor", "train.monitor", "train.metric_for_best_model", "train.metric"), "early_stopping.metric"),
    **dict.fromkeys(("train.early_stopping", "train.load_best_model_at_end", "early_stop", "stop"), "early_stopping"),
    **dict.fromkeys(("train.num_epochs", "train.num_train_epochs", "train.max_epochs"), "train.epochs"),
    **dict.fromkeys(("budget", "memory", "fit.memory", "fit.bytes", "train.budget", "model.budget"), "fit.budget"),
    **dict.fromkeys(("fit.precision", "train.precision", "train.bf16", "fit.bf16", "train.fp16"), "fit.allow: [bf16]"),
    **dict.fromkeys(("data.path", "data.file", "data.files"), "data.train"),
    **dict.fromkeys(("data.streaming", "streaming", "train.stream"), "data.stream"),
    **dict.fromkeys(("generate.max_length", "generate.tokens", "generate.length"), "generate.max_new_tokens"),
    **dict.fromkeys(("generate.prompt", "prompts", "train.prompts", "sample_prompts", "train.sample_prompts"), "generate.prompts"),
    **dict.fromkeys(("generate.every_steps", "generate.steps", "train.sample_every", "train.generate_every"), "generate.every"),
    **dict.fromkeys(("generation", "train.generate", "samples", "train.samples"), "generate"),
    **dict.fromkeys(("data.pack", "data.packed", "data.sample_packing", "train.packing", "sample_packing", "packing", "data.padding_free"), "data.packing"),
    **dict.fromkeys(("data.conversations", "data.chat", "data.chat_template", "data.conversation"), "data.messages"),
    **dict.fromkeys(("peft", "adapter", "adapters", "qlora", "model.lora", "fit.lora"), "lora"),
    **dict.fromkeys(("lora.r", "lora.lora_r"), "lora.rank"),
    **dict.fromkeys(("lora.lora_alpha",), "lora.alpha"),
    **dict.fromkeys(("lora.lora_dropout",), "lora.dropout"),
    **dict.fromkeys(("lora.target_modules", "lora.lora_target_modules", "lora.modules"), "lora.targets"),
    **dict.fromkeys(("model.load_in_4bit", "model.quantization", "load_in_4bit"), "model.weights: 4bit"),
    **dict.fromkeys(("model.dtype", "model.torch_dtype"), "model.weights"),
    **dict.fromkeys(("data.val", "data.valid", "data.eval", "data.test"), "data.validation"),
}  # fmt: skip
_WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def read(kind: type[T], data: object, path: str = "") -> T:
    """A dataclass from plain data.

    Args:
        kind: the dataclass; its annotations say what is accepted, and the metadata `bytes` of a field that it takes a number of bytes.
        data: what YAML or JSON gave.
        path: where `data` stands in the whole, for error messages: "fit".

    Raises:
        ConfigError: unknown key, missing key, or wrong type; the message starts with the path.
    """
    assert is_dataclass(kind)
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}
    if data is None:  # `optim:` with nothing below it
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path or 'the configuration'}: expected keys and values ({', '.join(known)}), found {_shown(data)}"
        )
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(f"{_join(path, str(key))}: no such key; {nearest(str(key), known, path)}")
        try:
            values[key] = convert(hints[key], value, _join(path, key))
        except ConfigError as error:
            if value is None and known[key].default is not MISSING:
                raise ConfigError(f"{error}; left out it is {_shown(known[key].default)}") from None
            if "bytes" in known[key].metadata:
                raise ConfigError(
                    f'{error}: write "8GiB", a whole number of bytes, or a share of the device such as "80%"'
                ) from None
            raise
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{_join(path, name)} is missing: {described(hints[name])}")
    return cast("T", kind(**values))


def convert(hint: Any, value: object, path: str) -> Any:
    """`value` as the annotation `hint` wants it."""
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return read(cast("type[Any]", hint), value, path)
    if origin in (Union, types.UnionType):
        return _one_of(options, value, path)
    if origin is Literal:
        if value in options and not isinstance(value, bool):
            return value
        guess = _guess(str(value), [str(o) for o in options])
        raise ConfigError(f"{path}: expected {described(hint)}, found {_shown(value)}{guess}")
    if origin is tuple:
        return _sequence(options, value, path)
    if origin is not None and issubclass(origin, Mapping):
        if value is None:
            return {}
        if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
            raise ConfigError(f"{path}: expected keys and values, found {_shown(value)}")
        return {key: convert(options[1], each, _join(path, key)) for key, each in value.items()}
    return _scalar(hint, value, path)


def _guess(value: str, options: Sequence[str]) -> str:
    """The option that was meant, whatever its capitals; "" where none is near."""
    found = difflib.get_close_matches(value.lower(), {o.lower(): o for o in options}, 1)
    return next((f"; did you mean {o}?" for o in options if found and o.lower() == found[0]), "")


def _one_of(options: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and types.NoneType in options:
        return None
    wanted = [o for o in options if o is not types.NoneType]
    for option in wanted:  # what it is already beats what it could be read as
        if isinstance(option, type) and type(value) is option and not _is_no_number(value):
            return value
    problems = []
    for option in wanted:
        try:
            return convert(option, value, path)
        except ConfigError as error:
            problems.append(error)
    deeper = [problem for problem in problems if str(problem).startswith((f"{path}.", f"{path}["))]
    if len(wanted) == 1 or len(deeper) == 1:  # the one form that was meant, with a mistake inside
        raise (deeper or problems)[0]
    raise ConfigError(f"{path}: expected {' or '.join(described(o) for o in wanted)}, found {_shown(value)}")


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _sequence(options: tuple[Any, ...], value: object, path: str) -> tuple[Any, ...]:
    if options[-1] is Ellipsis:
        # One name is a list of one name, nothing is a list of none.
        value = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path}: expected a list, found {_shown(value)}")
    if options[-1] is Ellipsis:
        return tuple(convert(options[0], each, f"{path}[{i}]") for i, each in enumerate(value))
    if len(value) != len(options):
        raise ConfigError(f"{path}: expected {len(options)} values, found {len(value)}")
    return tuple(convert(o, each, f"{path}[{i}]") for i, (o, each) in enumerate(zip(options, value, strict=True)))


def _scalar(hint: Any, value: object, path: str) -> Any:
    wrong = ConfigError(f"{path}: expected {described(hint)}, found {_shown(value)}")
    if hint in (str, bool):
        if type(value) is hint:
            return value
        if hint is str and isinstance(value, (bool, int, float)):
            raise ConfigError(f"{wrong}; put it in quotes if it is meant as text")
        raise wrong
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong
    if hint is int and isinstance(value, int):
        return value
    try:
        # A number in quotes, or 1e-4, which YAML 1.1 reads as text, is still that number.
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if _is_no_number(number) or (hint is int and not number.is_integer()):
        raise wrong
    return int(number) if hint is int else number


def described(hint: Any) -> str:
    """An annotation in words."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(o) for o in options)
    if origin in (Union, types.UnionType):
        return " or ".join(described(o) for o in options if o is not types.NoneType)
    if origin is tuple:
        return "a list"
    return _WORDS.get(hint, "keys and values")


def known_elsewhere(name: str) -> str | None:
    """The key of ours for what other trainers' configurations call so, in whatever section; None where none is known."""
    return next((ours for theirs, ours in _ELSEWHERE.items() if theirs.rpartition(".")[2] == name), None)


def nearest(key: str, known: Mapping[str, object], path: str = "") -> str:
    """What to say about a key that does not exist."""
    if _join(path, key) in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[_join(path, key)]}?"
    found = difflib.get_close_matches(key, known, 1, 0.5)
    return f"did you mean {_join(path, found[0])}?" if found else f"there are: {', '.join(known)}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
