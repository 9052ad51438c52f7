"""The `search:` part of a configuration, beside the run's own keys: what is searched, how, and what for. Torch-free, strict, frozen."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

from memfit import strict
from memfit.errors import BudgetError, ConfigError
from memfit.train import config as run_config
from memfit.tune.space import Space, read_space
from memfit.units import parse_bytes

KEY: Final = "search"
# What a run of memfit reports: during training, and at its end.
DURING: Final = ("loss", "validation_loss", "validation_accuracy")
AT_END: Final = ("peak_bytes", "predicted_peak_bytes", "step_seconds", "seconds")
PLACE: Final = re.compile(r"(?<![{$])\{([A-Za-z_][\w.-]*)\}(?!\})")  # a word in braces
_OF_A_SHELL: Final = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1")
_OF_A_TRIAL: Final = ("trial", "out")  # words in braces that are no parameters


@dataclass(frozen=True, slots=True)
class Objective:
    """What is to become small or large.

    Attributes:
        name: of the metric.
        direction: "minimize" or "maximize".
        take: which of the reported values counts: the "last", or the "best".
    """

    name: str
    direction: Literal["minimize", "maximize"] = "minimize"
    take: Literal["last", "best"] = "last"


@dataclass(frozen=True, slots=True)
class Named:
    """A sampler or pruner of Optuna.

    Attributes:
        name: of it.
        options: its own keyword arguments.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How to search.

    Attributes:
        space: by parameter, what `read_space` reads.
        objective: name of a metric, or name, direction and take; a list for several.
        direction: of an objective that is given by its name alone.
        trials: how many in all, those of earlier calls on the same study included.
        at_once: how many at most at one time; "auto" for as many as fit into the budget; of trials of memfit on a CPU no more than it has cores.
        budget: bytes of the device for all trials together, of each where there are several; left out, what `at_once` trials of `fit.budget` take.
        devices: how many devices of this computer trials are shared out on; or bytes by their names ({"cuda:0": "24GiB"}), in place of `budget`.
        host_budget, disk_budget: bytes on lower tiers for all trials together; left out, `at_once` times those of `fit`, and where it names none, no limit.
        sampler: tpe, gp, random, grid, cmaes, nsga2, nsga3, qmc; or its name and options.
        pruner: none, median, percentile, hyperband, halving, patient, threshold, wilcoxon; or its name and options.
        seed: of the sampler.
        start: values to try first; what is not named is drawn.
        warm_start: names of studies in the same store whose finished trials the sampler knows.
        command: program and arguments of a trial, with parameters in braces; left out, the trial is the run that the file describes.
        metrics: file that the command writes metrics to, from the trial's folder; its output when left out.
        memory: bytes that a trial of a command takes at most, each of its ranks: its share of the budget, and a hard limit on its processes.
        ranks: that a trial of a command has (torchrun), each on a device of its own; a run of memfit says so by `fit.devices`.
        cluster: address of a Ray cluster on whose machines trials run ("auto" for the one that this computer belongs to); each machine has told Ray its bytes.
            This computer alone when left out.
        device: that a trial of a command runs on, as a name; for the account of bytes alone.
        timeout: seconds after which a trial is stopped.
        silence: seconds without a sign of life after which a trial is stopped.
        grace: seconds between the end signal and SIGKILL.
        store: SQLite file, or URL of a database that several computers share; a file in `out` when left out.
        study: name in the store; the name of the configuration file when left out.
        heartbeat: seconds between signs of life of a trial in the store; after three of them another process takes it for dead.
        snapshots: of trials of memfit that are over, whose stay in `out`: of the "best" so far, of "all" that were neither pruned nor out of memory, of "none".
        out: folder for trials and results.
    """

    space: Mapping[str, Any]
    objective: str | Objective | tuple[Objective, ...] = ()
    direction: Literal["minimize", "maximize"] = "minimize"
    trials: int = 20
    at_once: int | Literal["auto"] = 1
    budget: str | int | None = None
    devices: int | Mapping[str, Any] = 1
    host_budget: str | int | None = None
    disk_budget: str | int | None = None
    sampler: str | Named = "tpe"
    pruner: str | Named = "none"
    seed: int = 0
    start: tuple[Mapping[str, Any], ...] = ()
    warm_start: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    metrics: str | None = None
    memory: str | int | None = None
    ranks: int = 1
    cluster: str | None = None
    device: str = "cpu"
    timeout: float | None = None
    silence: float | None = None
    grace: float = 10.0
    store: str | None = None
    study: str | None = None
    heartbeat: int = 60
    snapshots: Literal["best", "all", "none"] = "best"
    out: str = "tune"

    def __post_init__(self) -> None:
        counted = [name for name in ("at_once", "devices") if isinstance(getattr(self, name), int)]
        for name in ("trials", "heartbeat", "ranks", *counted):
            if getattr(self, name) < 1:
                raise ConfigError(f"search.{name}: {getattr(self, name)} is less than 1")
        for name in ("timeout", "silence"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"search.{name}: {value} is not positive; leave it out for no limit")
        if self.grace < 0:
            raise ConfigError(f"search.grace: {self.grace} is less than 0")
        if not isinstance(self.devices, int):
            if not self.devices:
                raise ConfigError("search.devices names none: give a number, or bytes by the names of devices")
            if self.budget is not None:
                raise ConfigError(
                    "search.budget and the bytes in search.devices say the same twice: leave one of them out"
                )
        if self.cluster is not None:
            for name in ("budget", "host_budget", "disk_budget"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"search.{name} and search.cluster: the bytes of a cluster are what its machines have told Ray; leave it out"
                    )
            if self.devices != 1 or self.ranks != 1:
                raise ConfigError(
                    "search.cluster: on a cluster a trial has one device, and its machines say which there are; leave search.devices and ranks out"
                )
        for name in ("budget", "memory", "host_budget", "disk_budget"):
            value = getattr(self, name)
            if value is not None:
                try:
                    parse_bytes(value, total_bytes=2**62)  # of what a share is taken is known later
                except BudgetError as error:
                    raise ConfigError(f"search.{name} is no number of bytes: {error}") from None

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All of them."""
        if isinstance(self.objective, str):
            return (Objective(self.objective, self.direction),)
        return (self.objective,) if isinstance(self.objective, Objective) else self.objective


@dataclass(frozen=True)
class Search:
    """A search that has been read and checked.

    Attributes:
        config: how to search.
        space: what is searched.
        run: the run's own keys; empty where a trial is a command.
        folder: that relative paths are read from.
        name: of the study.
    """

    config: SearchConfig
    space: Space
    run: Mapping[str, Any]
    folder: Path
    name: str

    @property
    def out(self) -> Path:
        """Folder for trials and results."""
        return Path(self.folder, Path(self.config.out).expanduser()).resolve()

    @property
    def own_out(self) -> str | None:
        """What the run's own keys name as its folder, in which no trial writes; None where they name none."""
        train = self.run.get("train")
        return train.get("out") if isinstance(train, Mapping) else None

    @property
    def is_command(self) -> bool:
        """Whether a trial is a command, not a run of memfit."""
        return bool(self.config.command)

    def run_with(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The run's keys with the values of a trial in their places; relative paths are read from `folder`."""
        data: dict[str, Any] = json.loads(json.dumps(self.run))
        for name, value in sorted(values.items(), key=lambda each: each[0].count(".")):  # a section, then what it holds
            put(data, name, copy.deepcopy(value))
        return {**data, "folder": str(self.folder)}

    def described(self) -> dict[str, Any]:
        """What makes it this search and not another: two of one description may share a study."""
        return {
            "space": {name: repr(each) for name, each in self.space.items()},
            "objective": [[each.name, each.direction, each.take] for each in self.config.objectives],
            "command": list(self.config.command),
            "run": self.run,
        }


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set one key by its path, "optim.lr"."""
    *names, last = path.split(".")
    place = data
    for name in names:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[last] = value


def load_search(path: str | Path, settings: Iterable[str] = ()) -> Search:
    """Read a configuration file with a `search:` part.

    Args:
        path: YAML, or JSON when its name ends so; or a Katib Experiment.
        settings: overrides such as "search.trials=50", as if they stood in the file.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be meant.
    """
    data = run_config.read_content(path)
    try:
        if data.get("kind") == "Experiment":
            from memfit.tune import katib

            try:
                data = katib.imported(data)
            except (AttributeError, KeyError, TypeError) as error:
                raise ConfigError(f"a part of this Katib Experiment is of another kind than Katib's: {error}") from None
        for setting in settings:
            _override(data, setting)
        return read_search(data, Path(path).resolve().parent, Path(path).stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _override(data: dict[str, Any], setting: str) -> None:
    """Set one key by its path; the name of a parameter has dots of its own."""
    path, equals, text = setting.partition("=")
    inside = path.strip().removeprefix(f"{KEY}.space.")
    search = data.get(KEY)
    space = search.get("space") if isinstance(search, dict) else None
    if inside == path.strip() or not isinstance(space, dict):
        run_config.override(data, setting)
        return
    name = max((each for each in map(str, space) if f"{inside}.".startswith(f"{each}.")), key=len, default=inside)
    parameter = {"parameter": space.get(name)}
    run_config.override(parameter, f"parameter{inside.removeprefix(name)}{equals}{text}")
    space[name] = parameter["parameter"]


def read_search(data: Mapping[str, Any], folder: str | Path = ".", name: str = "search") -> Search:
    """A search from plain data: the run's keys, and `search`.

    Args:
        data: as in the file.
        folder: that relative paths are read from.
        name: of the study, where the data names none.

    Raises:
        ConfigError: it says something that cannot be meant; the message names the key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f'read_search takes what a search file holds, not {data!r}: of a file, load_search("search.yaml")'
        )
    if data.get(KEY) is None:
        raise ConfigError("search is missing: what is to be searched, and what for (docs/tuning.md)")
    given = data[KEY]
    if isinstance(given, Mapping) and isinstance(given.get("command"), str):
        given = {**given, "command": _words(given["command"])}
    config = strict.read(SearchConfig, given, KEY)
    run = {key: value for key, value in data.items() if key != KEY}
    try:
        json.dumps([run, config.space])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the search holds more than texts, numbers, lists and keys with values: {error}") from None
    folder = Path(folder, str(run.pop("folder", None) or ".")).resolve()
    search = Search(config, read_space(config.space), run, folder, config.study or name)
    if not config.objectives:
        raise ConfigError("search.objective is missing: the metric that counts, such as validation_loss")
    names = [each.name for each in config.objectives]
    if len(set(names)) < len(names):
        raise ConfigError(f"search.objective: {', '.join(names)} names a metric twice")
    (_check_command if config.command else _check_run)(search)
    for number, values in enumerate(config.start):
        for key, value in values.items():
            where = f"search.start[{number}].{key}"
            if key not in search.space:
                raise ConfigError(f"{where}: no such parameter; {strict.nearest(key, dict(search.space))}")
            search.space[key].label(value, where)
    return search


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"search.command cannot be read as a shell reads it: {error}") from None
    if not words:
        raise ConfigError("search.command is empty: name a program, or leave it out for trials that are runs of memfit")
    for word in words:
        if word in _OF_A_SHELL:
            raise ConfigError(
                f"search.command: {word!r} is a shell's, and no shell reads the command: have one do so, as in sh -c '... {word} ...'"
            )
    return words


def _check_run(search: Search) -> None:
    """Every parameter is a key of the run, and every extreme value one that the run takes."""
    config = search.config
    for name in ("metrics", "memory"):
        if getattr(config, name) is not None:
            raise ConfigError(f"search.{name} goes with search.command: a run of memfit has both by itself")
    if config.ranks > 1:
        raise ConfigError("search.ranks goes with search.command: a run of memfit has as many as fit.devices names")
    known = {*DURING, *AT_END}
    for objective in config.objectives:
        if objective.name not in known:
            raise ConfigError(
                f"search.objective: a run has no metric {objective.name!r}; {strict.nearest(objective.name, dict.fromkeys(sorted(known)))}"
            )
        if objective.name.startswith("validation") and not _has_validation(search.run):
            raise ConfigError(f"search.objective: {objective.name} needs data.validation, and there is none")
        if (objective.name, objective.direction) == ("validation_accuracy", "minimize"):
            raise ConfigError(
                "search.objective: validation_accuracy is to become large: write {name: validation_accuracy, direction: maximize}"
            )
    base = {name: each.extremes()[0] for name, each in search.space.items()}
    for name in search.space:
        _check_key(name)
    try:
        run_config.from_json(search.run_with(base), search.folder)
    except ConfigError as error:
        if not str(error).startswith(tuple(base)):
            raise  # whatever is searched
    for name, parameter in search.space.items():
        for value in parameter.extremes():
            try:
                run_config.from_json(search.run_with({**base, name: value}), search.folder)
            except ConfigError as error:
                raise ConfigError(f"search.space.{name}: with {value!r} the run cannot be read: {error}") from None


def _has_validation(run: Mapping[str, Any]) -> bool:
    data = run.get("data")
    return not isinstance(data, Mapping) or bool(data.get("validation")) or bool(data.get("python"))


def _check_key(path: str) -> None:
    """Check that a path leads to a key of a run's configuration, or below one that holds anything.

    Raises:
        ConfigError: it does not; names the nearest one that does.
    """
    if path == "train.out":
        raise ConfigError("search.space.train.out: each trial has a folder of its own below search.out; leave it out")
    kind: Any = run_config.Config
    names = path.split(".")
    for depth, name in enumerate(names):
        if not is_dataclass(kind):
            if depth and _holds_anything(kind):
                return
            raise ConfigError(f"search.space.{path}: {'.'.join(names[:depth])} is a value and has no keys")
        known = [each.name for each in fields(kind) if (kind, each.name) != (run_config.Config, "folder")]
        if name not in known:
            guess = strict.nearest(path, dict.fromkeys(sorted(_paths(run_config.Config))))
            guess = guess if guess.startswith("did") else f"there are: {', '.join(known)}"
            raise ConfigError(f"search.space.{path}: the run has no such key; {guess}")
        hint = get_type_hints(kind)[name]
        kind = _section(hint)
    if is_dataclass(hint):
        inner = ", ".join(f"{path}.{each.name}" for each in fields(kind))
        raise ConfigError(f"search.space.{path} is a section, not a key: search one of {inner}")


def _holds_anything(kind: Any) -> bool:
    return "Mapping" in str(kind)


def _section(hint: Any) -> Any:
    """The section that a key holds, also where it may be left out (`lora`); the hint itself where it holds none."""
    return next((each for each in get_args(hint) if is_dataclass(each)), hint)


def _paths(kind: Any, before: str = "") -> Iterable[str]:
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(section := _section(hint)):
            yield from _paths(section, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _check_command(search: Search) -> None:
    """The command exists, every word in braces is a parameter, and every parameter stands in a word."""
    config = search.config
    if search.run:
        raise ConfigError(
            f"search.command and {', '.join(search.run)}: a trial is a command or the run that the file describes, not both"
        )
    if config.snapshots != "best":
        raise ConfigError("search.snapshots goes with runs of memfit: what a command writes is left as it is")
    if config.at_once == "auto" and config.memory is None:
        raise ConfigError(
            "search.at_once: auto needs search.memory, the bytes of each trial: without it nothing says how many fit"
        )
    program = config.command[0]
    beside = Path(search.folder, program)
    if not PLACE.search(program) and shutil.which(str(beside) if "/" in program else program) is None:
        if beside.is_file():
            raise ConfigError(
                f"search.command: {program} is no program that the system starts: begin with what runs it, as in python3 {program}"
            )
        raise ConfigError(f"search.command: there is no command {program!r}: give its path, or install it")
    there = [name for word in config.command for name in PLACE.findall(word)]
    for name in there:
        if name not in search.space and name not in _OF_A_TRIAL:
            raise ConfigError(f"search.command: {{{name}}} is no parameter; {strict.nearest(name, dict(search.space))}")
    for name in search.space:
        if name not in there:
            raise ConfigError(
                f"search.space.{name}: the command does not use it: write {{{name}}} where its value belongs"
            )


def command_with(search: Search, values: Mapping[str, Any], trial: int, out: Path) -> tuple[str, ...]:
    """The command of a trial: words in braces replaced."""
    words = {**values, "trial": trial, "out": out}

    def replaced(word: str) -> str:
        return PLACE.sub(lambda match: _text(words[match[1]]), word)

    return tuple(replaced(word) for word in search.config.command)


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else str(value) if isinstance(value, (int, float, Path)) else json.dumps(value)
    )
