"""The configuration of `memfit train`: YAML for people, the same keys as JSON. Torch-free, strict, frozen.

Every key stands below with its default; `memfit.strict` turns a misspelt one into an error. Relative paths are
read from the folder of the configuration file, so a folder with configuration, model and data can be moved and used
from anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from memfit import strict, yaml_reader
from memfit.errors import BudgetError, ConfigError
from memfit.train import deepspeed_merge
from memfit.train.early_stopping import EarlyStoppingConfig
from memfit.train.hub_cache import in_cache
from memfit.train.prompts import GenerateConfig
from memfit.units import parse_bytes

Task = Literal["sequence-classification", "causal-lm", "masked-lm"]
TrackerKind = Literal[
    "tensorboard", "mlflow", "wandb", "trackio"
]  # as in memfit.trackers, which need not be imported here


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What to train: exactly one of `hf` and `python`.

    Attributes:
        hf: folder of a Hugging Face model (config.json and weights), or the name of one that has been downloaded into the Hub's cache; its
            `use_cache` is off while it is trained.
        init: "weights" loads the folder's weights, "random" starts from fresh ones drawn with `train.seed`.
        python: "package.module:function"; called with `args`, returns the model, or the pair (model, loss_fn).
        args: keyword arguments for that function.
        task: what the model learns from the data; needed with `hf`, and for text data.
        num_labels: classes of a sequence classifier; what the folder says when left out.
        weights: how the folder's weights are kept. "fp32" and "bf16" as numbers of 4 and 2 bytes (those that are trained in bf16 are written with stochastic
            rounding); "4bit": those of linear layers that are not trained in 4 bits, all others in bf16 (QLoRA, with `lora`). Left out: as the folder has them.
    """

    hf: str | None = None
    init: Literal["weights", "random"] = "weights"
    python: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    task: Task | None = None
    num_labels: int | None = None
    weights: Literal["fp32", "bf16", "4bit"] | None = None

    def __post_init__(self) -> None:
        if (self.hf is None) == (self.python is None):
            raise ConfigError(
                "model: give exactly one of model.hf (a folder) and model.python (package.module:function)"
            )
        if self.hf is not None and self.task is None:
            raise ConfigError("model.task is missing: one of sequence-classification, causal-lm, masked-lm")
        if self.hf is not None and self.args:
            raise ConfigError("model.args goes with model.python; a Hugging Face model is described by its folder")
        if self.num_labels is not None and self.task != "sequence-classification":
            raise ConfigError("model.num_labels goes with model.task: sequence-classification")
        if self.python is not None and self.weights is not None:
            raise ConfigError("model.weights goes with model.hf; what model.python builds is up to its function")
        if self.python is not None and self.init == "random":
            raise ConfigError("model.init goes with model.hf; what model.python builds is up to its function")
        if self.num_labels is not None and self.num_labels < 1:
            raise ConfigError(f"model.num_labels: {self.num_labels} is less than 1")
        _check_target("model.python", self.python)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters of PEFT are trained, and the model's own weights are not.

    Attributes:
        rank: of the adapters.
        alpha: what they are scaled by, over the rank; twice the rank when left out.
        dropout: of what goes into them.
        targets: names of the layers that get one; "all-linear" for all linear ones but the head.
        merge: write the model with its adapters added to its weights, too (`out/merged`).
    """

    rank: int = 16
    alpha: int | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    merge: bool = False

    def __post_init__(self) -> None:
        _at_least("lora.rank", self.rank, 1)
        if self.alpha is not None:
            _at_least("lora.alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout: {self.dropout} is no share from 0 to below 1")
        if not self.targets:
            raise ConfigError("lora.targets: names no layer; leave it out for all linear ones")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What to train on: files, or a function.

    Attributes:
        train, validation: files or patterns (data/*.jsonl), all of one kind: .jsonl, .parquet, .txt (.md) or .npz, or folders that Hugging Face's
            `Dataset.save_to_disk` has written.
        python: "package.module:function"; called with `args`, returns a dataset (length and items), or the pair (train,
            validation).
        args: keyword arguments for that function.
        text: field of a .jsonl line, or column of a table, that holds the text; without it the fields are numbers and become tensors as they
            are.
        messages: field that holds a conversation, a list of {role, content}: it is written out by the tokenizer's own chat template, and what
            the assistant says is learnt, nothing else. For causal-lm.
        label: field that holds the class.
        max_length: tokens per sample; longer text is cut, shorter is padded, so that one plan fits every batch.
        packing: several short samples share one row of max_length tokens, kept apart by their positions; global_batch then counts rows. For causal-lm with
            data.text or data.messages.
        stream: read the files while training, sample after sample in their order, in place of all of them before the first step: for more than memory holds.
            How many there are is not known then, so train.steps is needed. data.validation is read as ever.
        drop_last: leave out the last batch of an epoch where it has fewer samples than fit.global_batch, as torch's DataLoader does under that name.
        tokenizer: folder or name of a Hugging Face tokenizer, or "bytes" (a token is a byte plus one, 0 pads); the model's
            folder when left out.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    python: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    messages: str | None = None
    label: str | None = None
    max_length: int | None = None
    packing: bool = False
    stream: bool = False
    drop_last: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if bool(self.train) == (self.python is not None):
            raise ConfigError("data: give exactly one of data.train (files) and data.python (package.module:function)")
        if self.python is not None and self.validation:
            raise ConfigError(
                "data.validation goes with data.train; what data.python names returns (train, validation)"
            )
        if self.args and self.python is None:
            raise ConfigError("data.args goes with data.python")
        if self.messages is not None and (self.text is not None or self.label is not None):
            raise ConfigError("data.messages goes alone: conversations have no data.text and no data.label")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"data.max_length: {self.max_length} is less than 2 tokens")
        if self.stream and self.python is not None:
            raise ConfigError(
                "data.stream is of files; what data.python returns is a stream where it can be iterated and has no length"
            )
        if self.stream and self.packing:
            raise ConfigError(
                "data.packing needs the lengths of all samples, which data.stream does not read: leave one out"
            )
        if self.packing and self.text is None and self.messages is None:
            raise ConfigError(
                "data.packing packs texts of files (data.text) and conversations (data.messages), and neither is named"
            )
        if self.packing and self.max_length is not None and self.max_length < 4:
            raise ConfigError(
                f"data.packing: rows of {self.max_length} tokens hold no two samples: raise data.max_length"
            )
        _check_target("data.python", self.python)


def _bytes() -> Any:
    """A field for a number of bytes."""
    return field(default=None, metadata={"bytes": True})


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How many bytes, and what may be done to stay inside them.

    Attributes:
        budget: "8GiB", bytes, or a share of the device such as "80%".
        host_budget: the same for the nearest lower memory tier: host memory for a GPU, the disk for a CPU; 0: nothing is offloaded.
        disk_budget: the same for the disk of a computer with a GPU, for what does not fit into host_budget.
        global_batch: samples per optimizer step; a plan may split it, never change it.
        allow: techniques that are used only where they are named, most of which change results: bf16, fp16, bf16_parameters, 8bit, 4bit, in_backward.
        freeze: patterns of module paths that are not trained.
        fixed: choices of the planner pinned by name, such as micro_batches.
        clip_norm: largest global norm of the gradient.
        device: where to train; "auto" is CUDA when there is one, else the CPU. `memfit plan` takes the name of a GPU that is not here, too: 4090.
        devices: several of them, one for each rank: "4x24GiB", "4xh100", "4x24GiB@50GB/s" or just 4. The budget is then that of each, and each takes its own
            part of global_batch.
    """

    budget: str | int | None = _bytes()
    host_budget: str | int | None = _bytes()
    disk_budget: str | int | None = _bytes()
    global_batch: int = 8
    allow: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    device: str | int = "auto"
    devices: str | int | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "host_budget", "disk_budget"):
            value = getattr(self, name)
            try:
                if value is not None and not (name != "budget" and value == 0):
                    parse_bytes(value, total_bytes=2**62)  # of what a share is taken is known later
            except BudgetError as error:
                raise ConfigError(f"fit.{name}: {error}") from None
        _at_least("fit.global_batch", self.global_batch, 1)
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"fit.clip_norm: {self.clip_norm} is not positive; leave it out for no clipping")


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """The optimizer, with torch's own defaults where nothing is said.

    Attributes:
        name: which.
        lr: learning rate.
        weight_decay: as torch's optimizer of that name understands it.
        betas, eps: of adam and adamw.
        momentum, nesterov: of sgd.
        fused: update in one kernel, without the temporaries that the other forms need on top of everything else.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    fused: bool = True

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"optim.lr: {self.lr} is not positive")
        for name in ("momentum", "nesterov") if self.name != "sgd" else ("betas", "eps"):
            if getattr(self, name) is not None:
                raise ConfigError(f"optim.{name}: {self.name} has none")

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for torch's optimizer: what was said, and nothing else."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "name" and getattr(self, f.name) is not None
        }


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How the learning rate changes, once per optimizer step.

    Attributes:
        name: "linear" and "cosine" fall to zero at the end of training.
        warmup_steps: steps in which it rises linearly to `optim.lr`.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _at_least("schedule.warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, and what to write down on the way.

    Attributes:
        epochs, steps: one of them; one epoch when neither is given.
        seed: of initial weights, of the order of the data, and of what the model draws.
        save_every: optimizer steps between snapshots; 0 for one at the end only.
        save_async: train on while the files of a snapshot reach the disk and are summed up. They are written to the system's cache of the disk first, while
            training waits, so no copy of the state is held anywhere else.
        keep: snapshots to keep.
        log_every: optimizer steps between lines of the log.
        eval_every: optimizer steps between evaluations on the validation data; 0 for one at the end only.
        meter_every: optimizer steps between metered ones, whose peak is logged next to the predicted one; 0 for none.
        out: folder that everything is written to.
        rank_timeout: seconds after which the other ranks take one for lost that does not answer: more than a step or a snapshot takes on one rank; left out,
            torch's own (30 minutes on a CPU, 10 on GPUs). A rank that has done no step, evaluation or snapshot for twice as long ends itself.
    """

    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    save_every: int = 0
    save_async: bool = False
    keep: int = 2
    log_every: int = 10
    eval_every: int = 0
    meter_every: int = 100
    out: str = "out"
    rank_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("train: give train.epochs or train.steps, not both")
        for name, least in (("epochs", 1), ("steps", 1), ("seed", 0), ("save_every", 0), ("keep", 1), ("log_every", 1)):
            if getattr(self, name) is not None:
                _at_least(f"train.{name}", getattr(self, name), least)
        _at_least("train.eval_every", self.eval_every, 0)
        if self.rank_timeout is not None:
            _at_least("train.rank_timeout", self.rank_timeout, 1)
        _at_least("train.meter_every", self.meter_every, 0)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """What is told on the way and at the end.

    Attributes:
        to: trackers that get a copy of the log; `log.jsonl` is always written.
        html: write report.html.
        frontier: with the picture of bytes against seconds, which takes a few more plans.
    """

    to: tuple[TrackerKind, ...] = ()
    html: bool = True
    frontier: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run.

    Attributes:
        model, data, fit, optim, schedule, train, report: see there.
        lora: adapters to train in place of the model's weights; None for none.
        early_stopping: when to end before the last step; None for never.
        generate: texts that the model writes on the way; None for none.
        deepspeed: content of a DeepSpeed configuration, or a file that holds it: batch, precision, clipping, offload, optimizer and schedule are what
            it says, and keys of ours that say otherwise an error (`memfit.train.deepspeed_merge`).
        deepspeed_strict: a key in it that DeepSpeed would ignore is an error.
        folder: where relative paths and Python modules are looked for; the folder of the configuration file when left
            out.
    """

    model: ModelConfig
    data: DataConfig
    fit: FitConfig = field(default_factory=FitConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_strict: bool = True
    folder: str = ""
    lora: LoraConfig | None = None
    early_stopping: EarlyStoppingConfig | None = None
    generate: GenerateConfig | None = None

    def __post_init__(self) -> None:
        if self.model.weights == "4bit" and self.lora is None and not self.fit.freeze:
            raise ConfigError(
                "model.weights: weights in 4 bits cannot be trained: add lora: {rank: 16} for adapters beside them, or freeze layers (fit.freeze)"
            )
        if self.lora is not None and self.lora.merge and (self.model.hf is None or self.fit.devices is not None):
            raise ConfigError(
                "lora.merge goes with model.hf and one device: leave it out, and merge the adapters that are written with PEFT's merge_and_unload"
            )
        if self.early_stopping is not None:
            self._check_early_stopping(self.early_stopping)
        if self.data.stream and self.train.steps is None:
            raise ConfigError(
                "train.steps is missing: with data.stream it is not known how many steps an epoch has, so say how many to take"
            )
        if self.generate is not None and self.model.task != "causal-lm":
            raise ConfigError(
                f"generate has a language model go on from prompts: it goes with model.task: causal-lm, not {self.model.task}"
            )
        if self.data.packing and self.model.task != "causal-lm":
            raise ConfigError(
                f"data.packing keeps samples apart in causal language models: it goes with model.task: causal-lm, not {self.model.task}"
            )
        for name, value in self.kept_as.items():
            if self.fit.fixed.get(name, value) != value:
                raise ConfigError(
                    f"model.weights: {self.model.weights} says otherwise than fit.fixed.{name}: {self.fit.fixed[name]}"
                )

    def _check_early_stopping(self, settings: EarlyStoppingConfig) -> None:
        if not self.train.eval_every:
            raise ConfigError(
                "early_stopping compares evaluations, and train.eval_every is 0: set it to the steps between two"
            )
        if self.data.train and not self.data.validation:
            raise ConfigError("early_stopping needs data to evaluate on: name files in data.validation")
        if settings.metric == "validation_accuracy" and self.model.task in ("causal-lm", "masked-lm"):
            raise ConfigError(
                f"early_stopping.metric: validation_accuracy is of a classifier, and model.task is {self.model.task}: take validation_loss"
            )

    @property
    def kept_as(self) -> dict[str, str]:
        """Choices of the planner that `model.weights` asks for, by name."""
        if self.model.weights == "4bit":
            return {"frozen_weights": "4bit"}
        return {"parameters": "bf16"} if self.model.weights == "bf16" and self.lora is None else {}

    def path(self, name: str) -> Path:
        """A path of this configuration, from where one can open it."""
        return Path(self.folder or ".", Path(name).expanduser())

    def hf_folder(self, name: str) -> Path:
        """A folder of a Hugging Face model or tokenizer: a path of this configuration, or else what the Hub's cache holds under that name."""
        there = self.path(name)
        return there if there.exists() else in_cache(name) or there

    @property
    def out(self) -> Path:
        """Where the run writes."""
        return self.path(self.train.out)

    def to_json(self) -> dict[str, Any]:
        """The same keys as the YAML, without those that say nothing."""
        said = {name for name, key in (("optim", "optimizer"), ("schedule", "scheduler")) if self.deepspeed.get(key)}
        return {
            name: {k: v for k, v in part.items() if v is not None and v not in ({}, ())}
            if isinstance(part, dict) and name != "deepspeed"
            else part
            for name, part in asdict(self).items()
            if name not in said and part is not None
        }


def load_config(path: str | Path, settings: Iterable[str] = (), ranks: int | None = None) -> Config:
    """Read a configuration file.

    Args:
        path: YAML, or JSON when its name ends so.
        settings: overrides such as "optim.lr=1e-4", as if they stood in the file.
        ranks: that will train, where they are not started yet and the file names no devices: a DeepSpeed configuration is read for them.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be meant.
    """
    data = _content(path)
    settings = tuple(settings)
    try:
        for setting in settings:
            override(data, setting)
        return from_json(data, Path(path).resolve().parent, ranks)
    except ConfigError as error:
        raise ConfigError(_told_where(str(error), str(path), settings)) from None


def read_content(path: str | Path, settings: Iterable[str] = ()) -> dict[str, Any]:
    """What a configuration file holds, with overrides, for somebody else to check; arguments as for `load_config`.

    Raises:
        ConfigError: the file cannot be read, or an override is none.
    """
    data = _content(path)
    for setting in settings:
        override(data, setting)
    return data


def _content(path: str | Path) -> dict[str, Any]:
    if Path(path).suffix == ".py":
        raise ConfigError(
            f"{path} is Python: name a run file (YAML or JSON), in which model.python names a function of it, such as {Path(path).stem}:build"
        )
    if Path(path).is_dir():
        raise ConfigError(
            f"{path} is a folder: name a run file (YAML or JSON); memfit resume and memfit explain take the folder of a run"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    try:
        data = json.loads(text) if Path(path).suffix == ".json" else yaml_reader.parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {yaml_reader.reason(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections such as model, data and fit")
    return data


_OPTIONS: Final = {"fit.budget": "--budget", "fit.devices": "--devices"}  # that have one of their own


def _told_where(message: str, path: str, settings: Sequence[str]) -> str:
    """An error about a key, with the place in which its value was given: the command line, or the file."""
    for setting in settings:
        key, _, value = setting.partition("=")
        if message.startswith(f"{key.strip()}:"):
            said = f"{_OPTIONS[key]} {value}" if key in _OPTIONS else f"--set {setting}"
            return f"{said}: {message.removeprefix(f'{key.strip()}:').strip()}"
    return f"{path}: {message}"


def from_json(data: Mapping[str, Any], folder: Path, ranks: int | None = None) -> Config:
    """A configuration from plain data; relative paths are read from `folder`; `ranks` as for `load_config`."""
    where = data.get("folder") or "."
    if not isinstance(where, str):
        raise ConfigError(f"folder: expected text, found {where!r}")
    folder = Path(folder, where).resolve()
    data = {key: value for key, value in data.items() if key != "search"}  # `memfit tune` reads that part
    for name in (
        "lora",
        "early_stopping",
        "generate",
    ):  # with nothing below it, such a section asks for what it is by default
        if name in data and data[name] is None:
            data[name] = {}
    return strict.read(Config, {**deepspeed_merge.merged(data, folder, ranks), "folder": str(folder)})


def override(data: dict[str, Any], setting: str) -> None:
    """Set one key by its path: "optim.lr=1e-4"; the value is read as YAML."""
    path, equals, text = setting.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"{setting!r} is no setting: write section.key=value, such as optim.lr=1e-4")
    place = data
    for name in names[:-1]:
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise ConfigError(f"{setting!r}: {name} holds a value, not keys")
    try:
        place[names[-1]] = yaml_reader.parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{setting!r}: {yaml_reader.reason(error)}") from error
    _drop_alternative(place, names)


# Who says --set train.steps=10 does not want the file's epochs as well.
_ALTERNATIVES: Final = {("train", "steps"): "epochs", ("train", "epochs"): "steps"}


def _drop_alternative(place: dict[str, Any], names: list[str]) -> None:
    alternative = _ALTERNATIVES.get(tuple(names))  # type: ignore[arg-type]
    if alternative is not None and place[names[-1]] is not None:
        place.pop(alternative, None)


def _at_least(path: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"{path}: {value} is less than {least}")


def _check_target(path: str, target: str | None) -> None:
    if target is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", target):
        raise ConfigError(f"{path}: {target!r} is not of the form package.module:function (without .py)")
