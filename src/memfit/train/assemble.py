"""From a configuration to the objects that it describes: model, loss, optimizer, data."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from logging import LogRecord, getLogger
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, cast

import numpy as np
import torch

from memfit.batches import LossFunction
from memfit.errors import ConfigError, InputError
from memfit.hardware.machine import is_machine
from memfit.integrations.deepspeed.training import FromDeepSpeed, from_deepspeed
from memfit.remedies.changes import keeps_cache
from memfit.step.other_kernels import refuse_attention
from memfit.step.program import OptimizerFactory
from memfit.train import deepspeed_merge, packing
from memfit.train.adapters import with_adapters
from memfit.train.config import Config
from memfit.train.data import Batches, ItemSamples, Samples
from memfit.train.deepspeed_merge import TOTAL
from memfit.train.generation import Generation
from memfit.train.prompts import GenerateConfig
from memfit.train.reading import Reader, encoder_of
from memfit.train.stream import Stream, StreamBatches, collated, is_stream

LARGE_BYTES: Final = 2 << 30  # of parameters: to plan for another device a larger model is not put into memory
CACHE_OFF: Final = (
    "model.hf: use_cache is off while the model is trained, since no step reads the keys and values that it would hand out; in the folder that is written it "
    "is as it was"
)
_AUTO: Final = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
}
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "4bit": torch.bfloat16}  # as they are read
_OPTIMIZERS: Final[dict[str, type[torch.optim.Optimizer]]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a configuration describes.

    Attributes:
        model: on its device, in training mode.
        loss_fn: None when the model returns its own loss.
        optimizer: makes one from parameters.
        batches: to train on.
        validation: to evaluate on; None when there is none.
        notes: what the reader should know, such as texts that were cut.
        deepspeed: the DeepSpeed configuration merged with the run's own; None where there is none.
        generation: what the model writes on the way; None for nothing.
    """

    model: torch.nn.Module
    loss_fn: LossFunction | None
    optimizer: OptimizerFactory
    batches: Batches | StreamBatches
    validation: Batches | None
    notes: tuple[str, ...]
    deepspeed: FromDeepSpeed | None = None
    generation: Generation | None = None


def assemble(config: Config, progress: Callable[[str, float], None] | None = None, *, weights: bool = True) -> Assembly:
    """Model, loss, optimizer and data of a configuration.

    The initial weights depend on `train.seed` alone.

    Args:
        config: of the run.
        progress: told what is being done.
        weights: without them a Hugging Face model stays on the meta device, which is enough to plan for another device.

    Raises:
        ConfigError: something named is not there.
        InputError: data that cannot be read; an extra that is not installed.
    """
    say = progress or (lambda _text, _share: None)
    device = choose_device(str(config.fit.device)) if weights else torch.device("cpu")
    say("reading the model", 0.0)
    seed_all(config.train.seed)
    model, loss_fn = build_model(config, weights=weights)
    switched = config.model.hf is not None and keeps_cache(model)
    if switched:
        settings: Any = model.config
        settings.use_cache = False
    _check_length(config, model)
    if config.lora is not None:
        model = with_adapters(model, config.lora, config.model.task)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
    model.train()
    say("reading the data", 0.0)
    training, validation, notes = read_data(config, model, loss_fn)
    notes = (*notes, *((CACHE_OFF,) if switched else ()))
    size = config.fit.global_batch
    deepspeed = read_deepspeed(config)
    optimizer: OptimizerFactory = partial(_optimizer, _OPTIMIZERS[config.optim.name], config.optim.settings())
    if deepspeed is not None:
        optimizer = deepspeed.optimizer if deepspeed.config.optimizer is not None else optimizer
        notes = (*notes, *(f"DeepSpeed configuration: {notice}" for notice in deepspeed.notices))
    batches: Batches | StreamBatches
    if isinstance(training, Stream):
        batches = StreamBatches(training.samples, size, device, training.collate, drop_last=config.data.drop_last)
        if config.train.steps is None:
            raise batches.without_steps()
    else:
        if len(training) < size:
            notes = (*notes, f"the data holds {len(training)} samples: each step takes all of them, not {size}")
        held = min(size, max(1, len(training)))
        batches = Batches(training, held, config.train.seed, device, drop_last=config.data.drop_last)
        if config.data.packing and weights:
            packing.check(model, loss_fn, training.batch([0], 0), device)
    generation = None if config.generate is None else _generation(config, config.generate, model, batches)
    if generation is not None and weights:
        generation.check(model, device)
    return Assembly(
        model,
        loss_fn,
        optimizer,
        batches,
        None if validation is None else Batches(validation, size, None, device),
        notes,
        deepspeed,
        generation,
    )


def _generation(
    config: Config, settings: GenerateConfig, model: torch.nn.Module, batches: Batches | StreamBatches
) -> Generation:
    """What the model writes on the way, in the tokens of the data and no longer than a sample."""
    sample = batches.sample()
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise ConfigError(
            "generate needs batches with input_ids of shape (samples, tokens), which the length of a text is measured by, and the data has none"
        )
    return Generation(settings, encoder_of(config), model, ids.shape[1], chat=config.data.messages is not None)


def read_deepspeed(config: Config, total_steps: int | None = None) -> FromDeepSpeed | None:
    """The DeepSpeed configuration merged with the run's own; None where there is none.

    Args:
        config: of the run.
        total_steps: of the run, for a schedule that leaves them "auto"; None where they are not known yet.
    """
    if not config.deepspeed:
        return None
    said = (config.deepspeed.get("scheduler") or {}).get("params", {}).get("total_num_steps")
    auto = {TOTAL: total_steps} if said == "auto" and total_steps is not None else {}
    streamed = str(config.fit.fixed.get("streamed", ""))
    number = deepspeed_merge.ranks_of(config.fit.devices)
    return from_deepspeed(
        config.deepspeed, auto=auto, strict=config.deepspeed_strict, world_size=number, streamed=streamed
    )


def _optimizer(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    return kind(parameters, **settings)


def seed_all(seed: int) -> None:
    """Set every generator that a model or a dataset may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - users' datasets still draw from the global one
    torch.manual_seed(seed)


def choose_device(name: str) -> torch.device:
    """The device a configuration means.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK", "")
    if name in {"auto", "cuda"} and rank.isdecimal():  # each of torchrun's processes has a GPU of its own
        if int(rank) >= (have := torch.cuda.device_count()):
            raise ConfigError(
                f"fit.device: a GPU for each process of this computer was asked for; it has {have}, and this is process {int(rank) + 1}: start as many as "
                "there are GPUs (--nproc), or write fit.device: cpu"
            )
        return torch.device("cuda", int(rank))
    if name == "auto":
        return torch.device("cuda")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if is_machine(name):
            raise ConfigError(
                f"fit.device: {name!r} is the name of a GPU, for which memfit can plan; torch has no device of that name to run on: write cuda, or auto"
            ) from error
        raise ConfigError(f"fit.device: torch cannot use {name!r} here: {str(error).splitlines()[0]}") from error
    return device


def build_model(config: Config, *, weights: bool = True) -> tuple[torch.nn.Module, LossFunction | None]:
    """The model, and its loss function when it does not return the loss itself."""
    if config.model.hf is not None:
        return _from_folder(config, config.hf_folder(config.model.hf), weights=weights), None
    assert config.model.python is not None
    build = _with_arguments(config.model.python, config, "model", config.model.args)
    built = build() if weights else _to_plan_for(build, config.train.seed)
    model, loss_fn = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model.python: {config.model.python} returned {type(model).__name__}, not a torch.nn.Module")
    return model, loss_fn


def _check_length(config: Config, model: torch.nn.Module) -> None:
    """Refuse samples longer than a table of positions; what is computed (rotary embeddings) takes any length.

    Raises:
        ConfigError: they are longer.
    """
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    given = config.data.max_length
    if config.model.hf is None or given is None or longest is None or given <= longest:
        return
    words = cast("Any", model).get_input_embeddings()
    tables = (each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not words)
    if any(table.num_embeddings == longest for table in tables):
        raise ConfigError(
            f"data.max_length: {given}: this model has positions for {longest} tokens (max_position_embeddings)"
        )


def built_on_meta(build: Callable[[], Any]) -> Any:
    """What a function builds, without memory where it can be built so: some look at the values of what they make."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError, ValueError):
        return build()


def _to_plan_for(build: Callable[[], Any], seed: int) -> Any:
    """What a function builds: a large model without memory for its parameters; a small one as it is, since values of buffers may decide what forward does."""
    built = built_on_meta(build)
    model = built[0] if isinstance(built, tuple) and built else built
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    if sum(parameter.nbytes for parameter in parameters) > LARGE_BYTES:
        return built
    seed_all(seed)
    return build()


def _from_folder(config: Config, folder: Path, *, weights: bool) -> torch.nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise InputError("model.hf needs transformers: pip install 'memfit[transformers]'") from error
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.hf: there is no {folder / 'config.json'} and no such model in the cache of the Hugging Face Hub: name a folder, or fetch it first "
            f"(hf download {config.model.hf}), as memfit downloads nothing"
        )
    given = {} if config.model.num_labels is None else {"num_labels": config.model.num_labels}
    assert config.model.task is not None
    dtype = _DTYPES.get(config.model.weights or "")
    if config.model.weights == "bf16" and config.lora is None:
        dtype = torch.float32  # memfit writes them in bf16 itself, beside an optimizer that rounds stochastically
    of_dtype = {} if dtype is None else {"dtype": dtype}
    auto = getattr(transformers, _AUTO[config.model.task])
    try:
        settings = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, **given)
        refuse_attention(settings._attn_implementation)  # noqa: SLF001 - transformers has no other name for it
        if not weights:
            with torch.device("meta"):
                model = auto.from_config(settings, **of_dtype)
        elif config.model.init == "random":
            model = auto.from_config(settings, **of_dtype)
        else:
            if not [f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin")]:
                raise ConfigError(
                    f"model.hf: {folder} holds no weights; to start from fresh ones, set model.init: random"
                )
            with quietly():
                model = auto.from_pretrained(str(folder), config=settings, local_files_only=True, **of_dtype)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise ConfigError(
            f"model.hf: transformers cannot make a {config.model.task} model of {folder}: {error}"
        ) from error
    except _unreadable() as error:
        raise ConfigError(
            f"model.hf: the weights in {folder} cannot be read ({type(error).__name__}: {error}): compare the files' sizes with those of where they come "
            "from, and copy them again"
        ) from error
    assert isinstance(model, torch.nn.Module)
    return model


@contextmanager
def cache_as_read(model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """While the block runs, in which the model is written, `use_cache` says what it says in the folder that the model is from: training switches it off."""
    import transformers

    settings: Any = getattr(model, "config", None)
    if not hasattr(settings, "use_cache"):
        yield
        return
    before = settings.use_cache
    settings.use_cache = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True).use_cache
    try:
        yield
    finally:
        settings.use_cache = before


def _unreadable() -> tuple[type[Exception], ...]:
    """What readers of weights raise for a file that is damaged, was not copied as a whole, or holds something else."""
    from safetensors import SafetensorError

    return (SafetensorError, UnpicklingError, EOFError)


@contextmanager
def quietly() -> Iterator[None]:
    """While the block runs, transformers draws no progress bars of its own between ours, and DeepSpeed does not mind that there is no GPU.

    Where DeepSpeed is installed, transformers imports it to save any model (by accelerate's `extract_model_from_parallel`), and it says so on standard output,
    which belongs to results.
    """
    from transformers.utils import logging

    there = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    deepspeed = getLogger("DeepSpeed")
    deepspeed.addFilter(_says_more_than_that_there_is_no_gpu)
    try:
        yield
    finally:
        deepspeed.removeFilter(_says_more_than_that_there_is_no_gpu)
        if there:
            logging.enable_progress_bar()


def _says_more_than_that_there_is_no_gpu(record: LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


def resolve(target: str, config: Config, path: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, looked for beside the configuration first.

    Raises:
        ConfigError: no such module or function. What the module itself raises passes on untouched.
    """
    module_name, _, name = target.partition(":")
    for folder in (str(Path.cwd()), config.folder):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        without = f"; write {module_name.removesuffix('.py')}:{name}" if module_name.endswith(".py") else ""
        raise ConfigError(
            f"{path}: there is no module {error.name!r} in {config.folder or '.'} or among what is installed{without}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value)]
        near = get_close_matches(name, functions, 1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"{path}: {module.__file__} has no function {name!r}{hint}")
    return function  # type: ignore[no-any-return]


def _with_arguments(target: str, config: Config, section: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """The function that a section names, with the arguments that it gives.

    Raises:
        ConfigError: as for `resolve`, or the function does not take these arguments.
    """
    function = resolve(target, config, f"{section}.python")
    signature = None
    with suppress(ValueError):  # of what is written in C there may be none
        signature = inspect.signature(function)
    try:
        if signature is not None:
            signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{section}.args: {target} takes {signature}: {error}") from None
    return partial(function, **arguments)


def read_data(
    config: Config, model: torch.nn.Module, loss_fn: LossFunction | None = None
) -> tuple[Samples | Stream, Samples | None, tuple[str, ...]]:
    """Training samples, validation samples or None, and notes."""
    data = config.data
    training: Samples | Stream
    if data.python is not None:
        made = _with_arguments(data.python, config, "data", data.args)()
        pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        for each in pair:
            if isinstance(each, torch.utils.data.DataLoader):
                raise ConfigError(
                    f"data.python: {data.python} returned a DataLoader: return its dataset, of which memfit makes batches of fit.global_batch samples"
                )
            sized = not is_stream(each) and hasattr(each, "__len__") and hasattr(each, "__getitem__")
            if each is not None and not sized and (each is pair[1] or not is_stream(each)):
                raise ConfigError(
                    f"data.python: {data.python} returned {type(each).__name__}, which has no length and items"
                )
        if pair[1] is None and config.early_stopping is not None:
            raise ConfigError(
                f"early_stopping needs data to evaluate on, and data.python: {data.python} returned one dataset: return (train, validation)"
            )
        training = Stream(pair[0], collated) if is_stream(pair[0]) else ItemSamples(pair[0])
        return training, None if pair[1] is None else ItemSamples(pair[1]), ()
    read = Reader(config, model, packing.constants_for(model, loss_fn) if data.packing else {})
    training = read.stream("data.train", data.train) if data.stream else read.samples("data.train", data.train)
    validation = read.samples("data.validation", data.validation) if data.validation else None
    return training, validation, tuple(read.notes)
