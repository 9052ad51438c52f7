"""What is searched: a name for each parameter, and the values that it may take.

A parameter of a run of memfit is named by its key in the run's configuration ("optim.lr", "fit.budget", "model.args.rank"); one of a command by the word in
braces that it replaces. Values may be anything that YAML can say: a list of techniques to allow is a choice like any other.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

Scalar = None | bool | int | float | str

_RANGE = ("low", "high", "step", "log")
_MOST = 2**53  # above it neighbours are one float, which is what samplers draw


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two, both included.

    Attributes:
        low, high: whole numbers, or fractions.
        step: between neighbours; None for any number in between (1 for whole numbers).
        log: whether they are drawn on a logarithmic scale.
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def suggest(self, trial: Trial, name: str) -> Any:
        """A value from the study's sampler."""
        if self.whole:
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def distribution(self) -> BaseDistribution:
        """The same as Optuna's value."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            step = 1 if self.step is None else int(self.step)
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def value(self, suggested: Any) -> Any:
        """What a suggestion stands for."""
        return suggested

    def label(self, value: Any, where: str) -> Scalar:
        """The suggestion that stands for a value.

        Raises:
            ConfigError: it is none of the range.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            raise ConfigError(f"{where}: {value!r} is not between {self.low} and {self.high}")
        steps = (value - self.low) / (self.step or 1)
        if (self.whole or self.step) and not math.isclose(steps, round(steps), abs_tol=1e-9):
            raise ConfigError(f"{where}: {value!r} is none of the values from {self.low} in steps of {self.step or 1}")
        return value

    def extremes(self) -> list[Any]:
        """Values that tell what is possible: the ends."""
        return [self.low, self.high]

    def grid(self, where: str) -> list[Scalar]:
        """All values, where they are finitely many.

        Raises:
            ConfigError: they are not.
        """
        step = self.step or (1 if self.whole else None)
        if step is None or self.log:
            raise ConfigError(f"{where}: a grid needs values that can be counted: give choices, or a step")
        return [self.low + i * step for i in range(math.floor((self.high - self.low) / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several values, each with a label by which the study knows it.

    Attributes:
        values: by label.
    """

    values: Mapping[Scalar, Any]

    def suggest(self, trial: Trial, name: str) -> Any:
        """A value from the study's sampler."""
        return self.value(trial.suggest_categorical(name, list(self.values)))

    def distribution(self) -> BaseDistribution:
        """The same as Optuna's value."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(list(self.values))

    def value(self, suggested: Any) -> Any:
        """What a suggestion stands for."""
        return self.values[suggested]

    def label(self, value: Any, where: str) -> Scalar:
        """The suggestion that stands for a value, given as itself or by its label.

        Raises:
            ConfigError: it is none of the choices.
        """
        for label, each in self.values.items():
            if (value == each and type(value) is type(each)) or (isinstance(value, str) and value == label):
                return label
        raise ConfigError(f"{where}: {value!r} is none of the choices {', '.join(map(str, self.values))}")

    def extremes(self) -> list[Any]:
        """Values that tell what is possible: all of them."""
        return list(self.values.values())

    def grid(self, where: str) -> list[Scalar]:  # noqa: ARG002 - choices can always be counted
        """All labels."""
        return list(self.values)


Parameter = Range | Choices
Space = Mapping[str, Parameter]


def read_space(data: object) -> dict[str, Parameter]:
    """A search space from plain data.

    Args:
        data: by parameter: a list of values; {choices: ...} with a list, or values by their labels; or {low:, high:} with step: or log: where wanted.

    Raises:
        ConfigError: a range is empty or contradicts itself, or there is nothing to search.
    """
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(
            "search.space is empty: name what is to be searched, such as optim.lr: {low: 1e-5, high: 1e-2, log: true}"
        )
    return {str(name): _parameter(each, f"search.space.{name}") for name, each in data.items()}


def _parameter(data: object, where: str) -> Parameter:
    if isinstance(data, list):
        return _choices(data, where)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: {data!r} is one value, so there is nothing to search: give a list, or low and high"
        )
    if "choices" in data:
        if len(data) > 1:
            raise ConfigError(f"{where}: choices stand alone; what else is there, {_others(data)}, belongs to a range")
        return _choices(data["choices"], where)
    for key in data:
        if key not in _RANGE:
            found = difflib.get_close_matches(str(key), (*_RANGE, "choices"), 1, 0.6)
            guess = f"did you mean {found[0]}?" if found else "a range has low, high, step and log"
            raise ConfigError(f"{where}.{key}: no such key; {guess}")
    return _range(data, where)


def _others(data: Mapping[str, Any]) -> str:
    return ", ".join(key for key in data if key != "choices")


def _choices(data: object, where: str) -> Choices:
    if isinstance(data, Mapping):
        values = dict(data)
    elif isinstance(data, list):
        values = {each if isinstance(each, Scalar) else json.dumps(each): each for each in data}
        if len(values) < len(data) or len({str(label) for label in values}) < len(values):
            raise ConfigError(f"{where}: a choice stands there twice")
    else:
        raise ConfigError(f"{where}.choices: expected a list, or values by their labels, found {data!r}")
    if not values:
        raise ConfigError(f"{where}: there are no choices: list at least one")
    return Choices(values)


def _range(data: Mapping[str, Any], where: str) -> Range:
    for key in ("low", "high"):
        if key not in data:
            raise ConfigError(f"{where}.{key} is missing: a range has low and high, and anything else is a list")
    for key in ("low", "high", "step"):
        value = data.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST
        if not number and not (key == "step" and value is None):
            raise ConfigError(f"{where}.{key}: expected a number, found {value!r}")
    low, high, step, log = data["low"], data["high"], data.get("step"), data.get("log", False)
    if not isinstance(log, bool):
        raise ConfigError(f"{where}.log: expected true or false, found {log!r}")
    if low > high:
        raise ConfigError(f"{where}: low is {low} and high is {high}, so the range is empty: exchange them")
    if log and low <= 0:
        raise ConfigError(f"{where}: a logarithmic scale begins above 0, and low is {low}: raise it, or leave log out")
    if log and step is not None:
        raise ConfigError(f"{where}: log and step contradict each other: leave one of them out")
    if step is not None and not 0 < step <= max(high - low, step if high == low else 0):
        raise ConfigError(f"{where}: step is {step}, which does not fit between {low} and {high}")
    if isinstance(low, int) != isinstance(high, int) or (isinstance(step, float) and isinstance(low, int)):
        low, high = float(low), float(high)
    return Range(low, high, step, log)


def corners(space: Space, most: int) -> Iterator[dict[str, Any]]:
    """Combinations of extreme values, one parameter changed after the other, and then all at once: what tells whether anything is possible."""
    first = {name: each.extremes()[0] for name, each in space.items()}
    last = {name: each.extremes()[-1] for name, each in space.items()}
    seen: list[dict[str, Any]] = []
    candidates = [first, last]
    candidates += [
        {**base, name: value} for base in (first, last) for name, each in space.items() for value in each.extremes()
    ]
    for values in candidates:
        if values not in seen and len(seen) < most:
            seen.append(values)
            yield values
