"""Compiled code and kernels of other packages: what works beside memfit, and what is refused in the same words by `plan`, a run file, Trainer and Lightning."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from integrations import trainer_ranks
from integrations.quiet_trainers import QUIET, trained_by_lightning
from integrations.trainer_ranks import SHAPE
from memfit.errors import InputError
from memfit.train import run as runs
from memfit.train.config import from_json

transformers = pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("accelerate")

SAMPLES, TOKENS, STEPS = 4, 64, 3
# What says nothing about one model alone: Accelerate keeps its own for the process.
ENVIRONMENT = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    ),  # the compiler's own
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What these tests tell torch and Accelerate for the whole process is taken back."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def llama(attention: str = "sdpa", layers: int = 2) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": layers, "num_key_value_heads": 4, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, attn_implementation=attention))


def rows() -> list[dict[str, Tensor]]:
    return trainer_ranks.rows("language model", SAMPLES * STEPS, TOKENS)


def batch() -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows()[:SAMPLES]]) for name in rows()[0]}


# -- the models ----------------------------------------------------------------------------------------------------------------


def compiled() -> Any:
    return torch.compile(llama(), backend="eager")


def compiled_in_place() -> Any:
    model = llama()
    model.compile(backend="eager")
    return model


def compiled_layer() -> Any:
    model = llama()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


class Rotated(nn.Module):
    """Its forward calls a function that is compiled; nothing of the module says so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **named: Any) -> Any:
        result = self.inner(**named)
        result["loss"] = _scaled(result["loss"])
        return result


def compiled_function() -> Any:
    return Rotated(llama())


@torch.compile(backend="eager")
def _scaled(loss: Tensor) -> Tensor:
    return loss * 2 + 1


def flex_attention() -> Any:
    return llama("flex_attention")


def flash_attention() -> Any:
    """As a model is whose kernels are there: transformers makes none without the package, and then says so itself."""
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


class LigerLike(nn.RMSNorm):
    """Known for Liger's by the module that its class is of, whether or not the package is here."""

    __module__ = "liger_kernel.transformers.rms_norm"


def ligers_norm() -> Any:
    model = llama()
    model.model.norm = LigerLike(SHAPE["hidden_size"])
    return model


def ligers_own() -> Any:
    """As `use_liger_kernel=True` makes it, with the package's own patch."""
    pytest.importorskip("triton")
    liger = pytest.importorskip("liger_kernel.transformers")
    modeling = sys.modules["transformers.models.llama.modeling_llama"]
    before = dict(vars(modeling))  # some of the patch is the module's, for all models
    model = llama()
    liger._apply_liger_kernel_to_instance(model=model)
    vars(modeling).update(before)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "compiled": (compiled, "is compiled by torch.compile: "),
    "compiled in place": (compiled_in_place, "is compiled by torch.compile: "),
    "compiled layer": (compiled_layer, "is compiled by torch.compile: "),
    "compiled function": (compiled_function, "is compiled by torch.compile: "),
    "flex_attention": (flex_attention, 'attn_implementation="flex_attention": '),
    "flash_attention_2": (flash_attention, 'attn_implementation="flash_attention_2" '),
    "liger": (ligers_norm, "runs kernels of the package liger-kernel: "),
    "liger's own": (ligers_own, "runs kernels of the package liger-kernel: "),
}


# -- the doors -----------------------------------------------------------------------------------------------------------------


def by_plan(make: Callable[[], Any], _: Path) -> None:
    memfit.plan(make(), batch(), budget="1GiB")


def by_absent_gpu(make: Callable[[], Any], _: Path) -> None:
    memfit.plan(make(), batch(), budget="1GiB", device="rtx4090")


def by_fit(make: Callable[[], Any], _: Path) -> None:
    memfit.fit(make(), batch(), budget="1GiB")


def by_run_file(make: Callable[[], Any], folder: Path) -> None:
    builders = ModuleType("memfit_tests_builders")
    builders.make = make  # type: ignore[attr-defined]
    builders.__file__ = "builders.py"
    sys.modules[builders.__name__] = builders
    arrays: dict[str, Any] = {name: torch.stack([row[name] for row in rows()]).numpy() for name in rows()[0]}
    np.savez(folder / "data.npz", **arrays)
    settings = {
        "model": {"python": f"{builders.__name__}:make"},
        "data": {"train": "data.npz"},
        "fit": {"budget": "1GiB", "global_batch": SAMPLES, "device": "cpu"},
        "train": {"steps": STEPS, "out": "out"},
    }
    runs.start(from_json(settings, folder))


def by_trainer(make: Callable[[], Any], folder: Path) -> None:
    memfit.transformers.fit(trainer(make(), folder), "1GiB")


def by_lightning(make: Callable[[], Any], _: Path) -> None:
    losses_by_lightning(make(), memfit.lightning.FitToMemory("1GiB"))


DOORS = [by_plan, by_absent_gpu, by_fit, by_run_file, by_trainer, by_lightning]


def trainer(model: Any, folder: Path, **named: Any) -> Any:
    settings = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": SAMPLES,
        "max_steps": STEPS,
        **QUIET,
        "remove_unused_columns": False,  # of a compiled model, Trainer does not see what its forward takes
        **named,
    }
    return transformers.Trainer(model, transformers.TrainingArguments(**settings), train_dataset=rows())


def losses_by_lightning(model: Any, *callbacks: Any) -> list[float]:
    return list(trained_by_lightning(model, rows(), SAMPLES, *callbacks, max_steps=STEPS).losses[-STEPS:])


@pytest.mark.parametrize("name", REFUSED)
def test_every_door_refuses_it_in_the_same_words(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    told = []
    for door in DOORS:
        with pytest.raises(InputError) as refused:
            door(make, tmp_path)
        told.append(str(refused.value).partition(said)[2])  # what comes before says which part of the model

    assert len(told[0]) > 80  # what is wrong, and what to do
    assert set(told) == {told[0]}


@pytest.mark.parametrize("name", ["torch_compile", "use_liger_kernel"])
def test_trainers_own_arguments_for_it_are_refused_in_the_same_words(name: str, tmp_path: Path) -> None:
    make, said = REFUSED["compiled" if name == "torch_compile" else "liger"]
    with pytest.raises(InputError) as by_model:
        by_plan(make, tmp_path)
    with pytest.raises(InputError, match=rf"TrainingArguments\({name}=True\)") as refused:
        memfit.transformers.fit(trainer(llama(), tmp_path, **{name: True}), "1GiB")

    assert str(refused.value).partition(said)[2] == str(by_model.value).partition(said)[2] != ""


def test_accelerates_own_setting_for_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    with pytest.raises(
        InputError, match=r"under Accelerate \(ACCELERATE_DYNAMO_BACKEND\) is compiled by torch.compile"
    ):
        memfit.transformers.fit(trainer(llama(), tmp_path), "1GiB")


def test_a_plan_of_the_plain_model_is_not_applied_to_a_compiled_one() -> None:
    plan = memfit.plan(llama(), batch(), budget="1GiB")
    with pytest.raises(InputError, match="is compiled by torch.compile"):
        memfit.apply(plan, compiled_in_place())


@pytest.mark.parametrize("make", [lambda: torch.compile(_scaled_square, backend="eager"), lambda: _calls_compiled])
def test_a_compiled_loss_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match="is compiled by torch.compile"):
        memfit.plan(small.chain(1), small.rows(), make(), "1GiB")


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
def test_torchscript_is_refused() -> None:
    rows = torch.randn(8, small.WIDTH)
    traced = torch.jit.trace(blocks_as_written(), rows)
    for model, what in ((traced, "the model"), (nn.Sequential(traced), "the model's 0")):
        with pytest.raises(InputError, match=f"^{what} is TorchScript, .*give the module that it was made of"):
            memfit.plan(model, rows, _scaled_square, "1GiB")


def blocks_as_written() -> nn.Module:
    return nn.Sequential(nn.Linear(small.WIDTH, small.WIDTH), nn.GELU())


def _scaled_square(model: nn.Module, sample: Any) -> Tensor:
    return model(sample[0]).square().mean()  # type: ignore[no-any-return]


def _calls_compiled(model: nn.Module, sample: Any) -> Tensor:
    return _scaled(_scaled_square(model, sample))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler's own
def test_what_was_compiled_and_run_before_is_seen_all_the_same() -> None:
    """Its code is at hand by then, and would run in place of the operations, were it not for the capture."""
    calls_compiled = Rotated(llama())
    for _ in range(2):
        calls_compiled(**batch())["loss"].backward()
    with pytest.raises(InputError, match="_scaled, which runs in the step, is compiled by torch.compile"):
        memfit.plan(calls_compiled, batch(), budget="1GiB")


def _compile_a_part(engine: memfit.Engine) -> None:
    engine.model[1].compile(backend="eager")  # type: ignore[operator]


def _compile_the_model(engine: memfit.Engine) -> None:
    engine.model.compile(backend="eager")


def _compile_the_update(engine: memfit.Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.step = torch.compile(engine.optimizer.step, backend="eager")  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("change", "steps", "what"),
    [
        (_compile_a_part, 0, "the model's 1"),
        (_compile_the_model, 1, "the model"),
        (_compile_the_update, 1, "the optimizer's step"),
    ],
)
def test_what_is_compiled_after_planning_is_refused_before_the_next_step(
    change: Callable[[Any], None], steps: int, what: str
) -> None:
    engine = _chain_engine()
    for _ in range(steps):
        engine.step(torch.ones(4, 8))
    change(engine)
    before = {name: each.clone() for name, each in engine.model.state_dict().items()}
    with pytest.raises(InputError, match=f"^{what} is compiled by torch.compile"):
        engine.step(torch.ones(4, 8))
    assert all(torch.equal(each, before[name]) for name, each in engine.model.state_dict().items())


def test_a_stance_that_is_taken_back_is_noticed() -> None:
    torch.compiler.set_stance("force_eager")
    try:
        engine = _chain_engine(compiled=1)
        engine.step(torch.ones(4, 8))
        torch.compiler.set_stance("default")
        with pytest.raises(InputError, match="^the model's 1 is compiled by torch.compile"):
            engine.step(torch.ones(4, 8))
        torch.compiler.set_stance("force_eager")
        engine.step(torch.ones(4, 8))
    finally:
        torch.compiler.set_stance("default")


def _chain_engine(compiled: int | None = None) -> memfit.Engine:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    if compiled is not None:
        model[compiled].compile(backend="eager")
    return memfit.fit(
        model,
        torch.ones(4, 8),
        lambda model, x: model(x).square().mean(),
        "1MiB",
        lambda parameters: torch.optim.SGD(parameters, 0.1),
    )


def test_flex_attention_of_torchs_own_is_refused_wherever_it_is_to_run() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(small.WIDTH, 3 * small.WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            heads = (part.reshape(1, 2, len(x), -1) for part in self.inner(x).chunk(3, dim=-1))
            return torch.nn.attention.flex_attention.flex_attention(*heads)  # type: ignore[return-value]

    with torch.device("meta"):
        absent = Attending()
    for model, device in ((Attending(), None), (Attending(), "rtx4090"), (absent, "rtx4090")):
        with pytest.raises(InputError, match="take torch.nn.functional.scaled_dot_product_attention"):
            memfit.plan(model, small.rows(32), _scaled_square, "1GiB", device=device)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_a_folder_that_names_such_attention_is_refused_before_its_model_is_made(attention: str, tmp_path: Path) -> None:
    settings = llama().config
    settings.save_pretrained(tmp_path / "llama")
    text = (tmp_path / "llama/config.json").read_text().replace("{", f'{{"attn_implementation": "{attention}",', 1)
    (tmp_path / "llama/config.json").write_text(text)
    np.savez(tmp_path / "data.npz", input_ids=np.ones((4, 8), np.int64), labels=np.ones((4, 8), np.int64))
    config = from_json(
        {
            "model": {"hf": "llama", "task": "causal-lm", "init": "random"},
            "data": {"train": "data.npz"},
            "fit": {"budget": "1GiB", "global_batch": 2, "device": "cpu"},
        },
        tmp_path,
    )
    with pytest.raises(InputError, match=rf'attn_implementation="{attention}".*"attn_implementation": "sdpa"'):
        runs.start(config)


# -- what works ----------------------------------------------------------------------------------------------------------------


def by_hand(model: Any) -> list[float]:
    losses = []
    optimizer = small.adamw(model.parameters())
    for _ in range(STEPS):
        loss = model(**batch())["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


AS_WRITTEN = [compiled, compiled_in_place, compiled_layer, compiled_function]


@pytest.mark.alternate(2)
@pytest.mark.parametrize("make", [llama, lambda: llama("eager"), *AS_WRITTEN])
def test_plain_loops_run_it_to_the_bit_in_the_bytes_predicted(make: Callable[[], Any]) -> None:
    """PyTorch's own attention; and what is compiled, under the stance that runs it as it is written."""
    torch.compiler.set_stance("force_eager")
    plan = memfit.plan(make(), batch(), None, "1GiB", small.adamw, fixed={"micro_batches": 1})
    plan = memfit.replan(plan, memfit.smallest_budget(plan))
    engine = memfit.apply(plan, make())
    records = [engine.step(batch(), meter=True) for _ in range(STEPS)]

    assert not plan.script.plain
    assert [record.loss for record in records] == by_hand(make())
    assert [record.peak_bytes for record in records[1:]] == [plan.prediction.peak_bytes] * (STEPS - 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(small.WIDTH, small.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(self.inner(x)).tanh()


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_streamed_layers_run_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    x = torch.randn(32, small.WIDTH)
    given: Any = {"loss_fn": squares, "optimizer": small.adamw, "fixed": {"streamed": ".", "micro_batches": 1}}
    with pytest.raises(InputError, match=r"_scaled, which runs in .*, is compiled by torch.compile"):
        memfit.plan(blocks(), x, budget="1GiB", **given)
    torch.compiler.set_stance("force_eager")
    plan = memfit.plan(blocks(), x, budget="1GiB", **given)
    engine = memfit.apply(plan, blocks(), squares)
    records = [engine.step(x, meter=True) for _ in range(STEPS)]
    plainly = memfit.fit(blocks(), x, squares, "1GiB", small.adamw, fixed={"micro_batches": 1})

    assert [record.loss for record in records] == [plainly.step(x).loss for _ in range(STEPS)]
    assert [record.peak_bytes for record in records[1:]] == [plan.prediction.peak_bytes] * (STEPS - 1)


@pytest.mark.alternate(1)
@pytest.mark.parametrize("make", [lambda: llama("eager"), compiled, compiled_in_place])
def test_trainer_runs_it_to_the_bit(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.compiler.set_stance("force_eager")
    plainly = trainer(make(), tmp_path)
    plainly.train()
    first = memfit.transformers.fit(trainer(make(), tmp_path), "1GiB", fixed={"micro_batches": 1})
    inside = trainer(make(), tmp_path)
    fitted = memfit.transformers.fit(inside, memfit.smallest_budget(first.plan), fixed={"micro_batches": 1}, meter=True)
    inside.train()

    assert not fitted.plan.script.plain
    assert [entry.get("loss") for entry in inside.state.log_history] == [
        entry.get("loss") for entry in plainly.state.log_history
    ]
    peaks = [record.peak_bytes for record in fitted.engine.records[1:]]  # type: ignore[union-attr]
    assert peaks == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.005)] * (STEPS - 1)


@pytest.mark.alternate(2)
@pytest.mark.parametrize("make", [lambda: llama("eager"), compiled, compiled_in_place])
def test_lightning_runs_it_to_the_bit(make: Callable[[], Any]) -> None:
    torch.compiler.set_stance("force_eager")
    first = memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 1})
    losses_by_lightning(make(), first)
    fitted = memfit.lightning.FitToMemory(memfit.smallest_budget(first.plan), fixed={"micro_batches": 1}, meter=True)

    assert losses_by_lightning(make(), fitted) == losses_by_lightning(make())
    assert not fitted.plan.script.plain
    peaks = [record.peak_bytes for record in fitted.engine.records[1:]]  # type: ignore[union-attr]
    assert peaks == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.005)] * (STEPS - 1)
