"""Optuna's samplers and pruners by the names that a search file uses, with their own options."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from memfit import strict
from memfit.errors import ConfigError, InputError
from memfit.tune.search import Named, Search

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

SAMPLERS: Final = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "random": "RandomSampler",
    "grid": "GridSampler",
    "cmaes": "CmaEsSampler",
    "nsga2": "NSGAIISampler",
    "nsga3": "NSGAIIISampler",
    "qmc": "QMCSampler",
}
PRUNERS: Final = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "hyperband": "HyperbandPruner",
    "halving": "SuccessiveHalvingPruner",
    "patient": "PatientPruner",
    "threshold": "ThresholdPruner",
    "wilcoxon": "WilcoxonPruner",
}


@contextmanager
def quietly() -> Iterator[None]:
    """Without Optuna's warnings that something is experimental, or meant for its own loop: heartbeats are, and ours beats them itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sampler_of(search: Search, seed: int) -> BaseSampler:
    """The sampler of a search.

    Args:
        search: that names it.
        seed: for its generator; on a study that goes on another one than at its start, or the same values would be drawn again.

    Raises:
        ConfigError: there is none of that name, or it has no such option.
        InputError: a package that it needs is missing.
    """
    import optuna

    asked = _named(search.config.sampler)
    given: dict[str, Any] = {"seed": seed}
    if asked.name == "grid":
        given["search_space"] = {name: each.grid(f"search.space.{name}") for name, each in search.space.items()}
    sampler: BaseSampler = _made(optuna.samplers, SAMPLERS, asked, "sampler", given)
    return sampler


def pruner_of(search: Search) -> BasePruner:
    """The pruner of a search.

    Raises:
        ConfigError, InputError: as for `sampler_of`; or there are several objectives, which no pruner compares.
    """
    import optuna

    asked = _named(search.config.pruner)
    if asked.name != "none" and len(search.config.objectives) > 1:
        raise ConfigError(
            f"search.pruner: {asked.name} compares trials by one objective, and there are {len(search.config.objectives)}: leave it out"
        )
    given: dict[str, Any] = {}
    if asked.name == "patient" and isinstance(asked.options.get("wrapped_pruner"), (str, Mapping)):
        inner = asked.options["wrapped_pruner"]
        named = inner if isinstance(inner, str) else strict.read(Named, inner, "search.pruner.options.wrapped_pruner")
        given["wrapped_pruner"] = _made(optuna.pruners, PRUNERS, _named(named), "pruner", {})
    if asked.name == "percentile" and "percentile" not in asked.options:
        given["percentile"] = 25.0
    pruner: BasePruner = _made(optuna.pruners, PRUNERS, asked, "pruner", given)
    return pruner


def _named(value: str | Named) -> Named:
    return Named(value) if isinstance(value, str) else value


def _made(module: Any, known: Mapping[str, str], asked: Named, what: str, given: dict[str, Any]) -> Any:
    if asked.name not in known:
        raise ConfigError(f"search.{what}: there is no {asked.name!r}; {strict.nearest(asked.name, known)}")
    kind = getattr(module, known[asked.name])
    takes = inspect.signature(kind).parameters
    options = dict(given)
    for name, value in asked.options.items():
        if name == "seed":
            raise ConfigError(f"search.{what}.options.{name}: the seed of a search is search.seed")
        if name not in takes:
            raise ConfigError(f"search.{what}.options.{name}: no such option; {strict.nearest(name, takes)}")
        number = {"int": int, "float": float, "bool": bool}.get(str(takes[name].annotation))
        options.setdefault(
            name, value if number is None else strict.convert(number, value, f"search.{what}.options.{name}")
        )
    missing = [name for name, each in takes.items() if each.default is each.empty and name not in options]
    if missing:
        raise ConfigError(
            f"search.{what}: {asked.name} needs {', '.join(missing)}: write {{name: {asked.name}, options: {{{missing[0]}: ...}}}}"
        )
    try:
        with quietly():
            return kind(**options)
    except (ImportError, ModuleNotFoundError) as error:
        raise InputError(
            f"the {what} {asked.name} needs a package that is missing ({error.name}): pip install 'memfit[tune]'"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"search.{what}: Optuna does not take these options: {error}") from error
