"""A Trainer on several ranks: what its loop, its evaluation, its saving and its resuming need of a model that memfit has shared out.

Trainer would wrap the model itself (DistributedDataParallel), for which no plan could choose. So the model is marked as one that Accelerate has prepared, and
Trainer's methods that look at gradients or tensors as a whole are attributes of this one trainer; no class is changed.

What is saved is what Trainer saves of one process: whole weights, and the optimizer's whole state. So a run may go on in another number of ranks, shared out in
another way, alone, or without memfit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.utils.data import BatchSampler

from memfit.engine import Engine
from memfit.errors import InputError
from memfit.integrations.optimizer_parts import gathers_itself, set_state, whole_state
from memfit.integrations.ranks import SharedStep
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.sharding.sharded import ShardedModel
from memfit.step.program import own_optimizer

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
OPTIMIZER: Final = "optimizer.pt"


def prepared(trainer: Any) -> Any:
    """The trainer's model as Accelerate prepares it for evaluation: placed, with autocast, not wrapped, and left so."""
    model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    model._is_accelerate_prepared = True  # noqa: SLF001 - Accelerate's own mark: it wraps nothing twice
    return model


def check_saving(trainer: Any, engine: Engine) -> None:
    """Refuse what cannot be saved or loaded of a model that is shared out.

    Raises:
        InputError: there is such a setting; all ranks raise it.
    """
    assert engine.sharded is not None
    way = engine.plan.choices.sharding.partition("/")[0]
    if engine.sharded.shards_parameters and trainer.args.load_best_model_at_end:
        raise InputError(
            f"load_best_model_at_end=True loads whole weights into the model, of which a rank has a part under {way}: leave it out and load the best "
            'checkpoint after training, or take fixed={"sharding": "zero1"}'
        )
    smooths = engine.sharded.shards_parameters and trainer.label_smoother is not None
    if smooths and type(trainer.model).__name__.removeprefix("FSDP").endswith("ForCausalLM"):
        raise InputError(
            f"label_smoothing_factor of a causal language model: Trainer knows one by the name of its class, which torch's fully_shard ({way}) changes, so it "
            'would smooth labels that are not shifted: take fixed={"sharding": "zero1"} or "data"'
        )
    saves = str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no"
    if saves and not trainer.args.save_only_model and way != "data" and _packed(engine):
        raise InputError(
            f"the optimizer's state is packed in 8 bits within each rank's part ({way}), of which Trainer's checkpoints hold no whole: save_only_model=True, "
            'save_strategy="no", or fixed={"sharding": "data"}'
        )


def _packed(engine: Engine) -> bool:
    return isinstance(own_optimizer(engine.optimizer), ChunkedOptimizer)


class WholeRounds:
    """A sampler's rows in micro-batches, whole rounds of them: the last one is filled up from the first, as Accelerate does it, or dropped.

    A round is one of the user's batches on each rank. `accelerate.data_loader.BatchSamplerShard` goes around this one and deals batches out in turns; around
    the micro-batches themselves it would fill up the last round of those, which is smaller.

    Args:
        inner: of micro-batches, as torch's DataLoader made it.
        number: of micro-batches in a round.

    Attributes:
        sampler, batch_size, drop_last: of `inner`; Accelerate asks for them.
    """

    def __init__(self, inner: BatchSampler, number: int) -> None:
        self.sampler = inner.sampler
        self.batch_size = inner.batch_size
        self.drop_last = inner.drop_last
        self._number = number

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        size = self.batch_size * self._number
        first: list[int] = []
        while taken := list(islice(rows, size)):
            first = first or taken
            if len(taken) < size:
                if self.drop_last:
                    return
                taken += islice(cycle(first), size - len(taken))
            for start in range(0, size, self.batch_size):
                yield taken[start : start + self.batch_size]

    def __len__(self) -> int:
        size, rows = self.batch_size * self._number, len(cast("Sized", self.sampler))
        return (rows // size if self.drop_last else -(-rows // size)) * self._number


class TrainerOnRanks:
    """Sets a trainer's methods for a model that is shared out.

    Args:
        trainer: whose methods.
        engine: of the plan, on this rank.
        shared: the step in progress.
        is_last: whether the micro-batch that begins is the last of its step.
        divisor: micro-batches that one of the user's batches becomes.
    """

    def __init__(
        self, trainer: Any, engine: Engine, shared: SharedStep, is_last: Callable[[], bool], divisor: int
    ) -> None:
        assert engine.sharded is not None
        self._trainer = trainer
        self._engine = engine
        self._shared = shared
        self._sharded: ShardedModel = engine.sharded
        self._is_last = is_last
        optimizer = trainer.accelerator.prepare_optimizer(engine.optimizer, device_placement=False)
        optimizer._is_accelerate_prepared = True  # noqa: SLF001 - as of the model: its state is where it belongs
        trainer.optimizer = optimizer
        trainer.training_step = self._around(trainer.training_step)
        if divisor > 1:
            trainer.get_train_dataloader = self._in_the_users_rounds(trainer.get_train_dataloader, divisor)
        trainer._clip_grad_norm = lambda _: self._sharded.clip(trainer.args.max_grad_norm)  # noqa: SLF001 - there is no other way in
        trainer._get_grad_norm = self._norm  # noqa: SLF001 - likewise
        if trainer.args.device.type == "cpu":
            # Of several ranks it is "cpu:0", to which Trainer would copy each batch inside the step, beside the loader's own.
            trainer._prepare_input = _as_it_is  # noqa: SLF001 - likewise
        if engine.plan.choices.sharding.startswith("data/"):
            return
        trainer._save_optimizer_and_scheduler = self._save_optimizer(trainer._save_optimizer_and_scheduler)  # noqa: SLF001 - likewise
        trainer._load_optimizer_and_scheduler = self._load_optimizer(trainer._load_optimizer_and_scheduler)  # noqa: SLF001 - likewise
        if self._sharded.shards_parameters:
            trainer.evaluation_loop = self._evaluating(trainer.evaluation_loop)
            trainer.save_model = self._save_model
            trainer._load_from_checkpoint = self._load_model  # noqa: SLF001 - likewise

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def _around(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def training_step(*args: Any, **named: Any) -> Any:
            with self._shared.micro_batch(last=self._is_last()):
                return own(*args, **named)

        return training_step

    def _in_the_users_rounds(self, own: Callable[[], Any], divisor: int) -> Callable[[], Any]:
        """The loader's micro-batches make up the rounds that the user's batches would have: Accelerate fills the last one up, and counts it in batches."""

        @functools.wraps(own)
        def get_train_dataloader() -> Any:
            loader = own()
            shard: Any = getattr(loader, "batch_sampler", None)
            inner = getattr(shard, "batch_sampler", None)
            if type(inner) is BatchSampler and getattr(shard, "even_batches", False) and not shard.split_batches:
                shard.batch_sampler = WholeRounds(inner, shard.num_processes * divisor)
            return loader

        return get_train_dataloader

    def _norm(self, model: Any, grad_norm: Any = None) -> Any:
        del model
        return self._sharded.clip(float("inf")) if grad_norm is None else grad_norm

    def _evaluating(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def evaluation_loop(*args: Any, **named: Any) -> Any:
            with self._sharded.evaluating():
                return own(*args, **named)

        return evaluation_loop

    # -- the model -----------------------------------------------------------------------------------------------------------

    def _save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002 - Trainer's own
        """Whole weights, as Trainer saves them; all ranks come here."""
        trainer = self._trainer
        trainer._save(output_dir, state_dict=self._sharded.whole())  # noqa: SLF001 - what its `save_model` calls
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _load_model(self, checkpoint: str, model: Any = None) -> None:
        """This rank's part of whole weights."""
        del model
        whole = _weights(Path(checkpoint))
        model = self._sharded.model
        names: dict[int, list[str]] = {}
        for name, parameter in torch.nn.Module.named_parameters(model, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)  # tied ones are saved once, under one of their names
        with torch.no_grad():
            for name, part in self._sharded.named().items():
                known = next((n for n in names[id(model.get_parameter(name))] if n in whole), None)
                if known is None:
                    raise InputError(
                        f"{checkpoint} has no weights for {name}: it is of another model, or of adapters alone, which cannot be loaded into a model whose "
                        'parameters are shared out: take fixed={"sharding": "zero1"}, or load the weights before memfit.transformers.fit'
                    )
                part.copy_(self._sharded.part_of(name, whole[known]))
            for name, buffer in model.named_buffers():
                if name in whole:
                    buffer.copy_(whole[name])

    # -- the optimizer -------------------------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._engine.optimizer is not None
        return self._engine.optimizer

    def _save_optimizer(self, own: Callable[[str], None]) -> Callable[[str], None]:
        @functools.wraps(own)
        def save(output_dir: str) -> None:
            whole = whole_state(self._optimizer, self._sharded)
            trainer = self._trainer
            if trainer.args.should_save:
                torch.save(whole, Path(output_dir, OPTIMIZER))
                torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

        return save

    def _load_optimizer(self, own: Callable[[str | None], None]) -> Callable[[str | None], None]:
        @functools.wraps(own)
        def load(checkpoint: str | None) -> None:
            if checkpoint is None or gathers_itself(self._optimizer):
                own(checkpoint)  # torch's takes what it has of a whole state
                return
            with suppress(FileNotFoundError):  # saved with save_only_model: as Trainer, without
                saved = torch.load(Path(checkpoint, OPTIMIZER), map_location="cpu", weights_only=True, mmap=True)
                set_state(self._optimizer, self._sharded, saved)
                scheduler = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
                self._trainer.lr_scheduler.load_state_dict(scheduler)

        return load


def _as_it_is(data: Any) -> Any:
    return data


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint's weights, mapped from its files.

    Raises:
        InputError: there are none.
    """
    from safetensors.torch import load_file

    if (folder / WEIGHTS).is_file():
        return load_file(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        return {name: value for file in sorted(files) for name, value in load_file(folder / file).items()}
    raise InputError(
        f"{folder} holds neither {WEIGHTS} nor {INDEX}, from which the ranks take their parts of the weights: name a checkpoint of Trainer's"
    )
