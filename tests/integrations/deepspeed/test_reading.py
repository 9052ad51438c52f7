"""DeepSpeed's configurations are read as DeepSpeed reads them, or refused with a reason; nothing is dropped."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from integrations.deepspeed.configurations import CASES, GA, MB, TB, Case, four, fp16, zero
from integrations.deepspeed.record import RECORDING, asked
from memfit.errors import ConfigError, InputError
from memfit.integrations.deepspeed import AUTO, VERSION, DeepSpeedConfig, keys, read
from memfit.integrations.deepspeed.sections import Bf16, Fp16, OffloadOptimizer, OffloadParam, ZeroOptimization

RECORDED: dict[str, Any] = json.loads(RECORDING.read_text(encoding="utf-8"))


def answer(case: Case, folder: Path) -> DeepSpeedConfig | str:
    """What is read, or why it is not."""
    said: Any = case.said
    if isinstance(said, str):
        said = folder / "ds_config.json"
        said.write_text(case.said, encoding="utf-8")
    try:
        return read(said, strict=case.strict, world_size=case.ranks)
    except ConfigError as error:
        return str(error)


def sizes(config: DeepSpeedConfig) -> tuple[Any, Any, Any]:
    """As the table writes them."""
    found = (config.batch.train, config.batch.micro, config.batch.accumulation)
    return tuple("auto" if each is AUTO else each for each in found)  # type: ignore[return-value]


def test_the_table_is_large_and_names_each_once() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_says_what_the_table_says(case: Case, tmp_path: Path) -> None:
    found = answer(case, tmp_path)

    if isinstance(case.wants, str):
        assert isinstance(found, str), "it was read"
        assert case.wants in found
    else:
        assert isinstance(found, DeepSpeedConfig), found
        assert sizes(found) == case.wants


def same(ours: DeepSpeedConfig | str, theirs: list[int] | str) -> bool:
    """Whether both refuse, or both take it and infer the same batch."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return isinstance(ours, str) and isinstance(theirs, str)
    return sizes(ours) == tuple(theirs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_does_as_deepspeed_where_nothing_else_is_said(case: Case, tmp_path: Path) -> None:
    assert same(answer(case, tmp_path), RECORDED[case.name]) == (not case.apart)


def test_the_recording_is_of_the_version_that_is_followed() -> None:
    assert RECORDED["version"] == VERSION
    assert list(RECORDED) == ["version", *(case.name for case in CASES)]


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed itself, in the version that is followed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs = pytest.importorskip("deepspeed", reason="deepspeed is not installed; its answers are recorded")
    if theirs.__version__ != VERSION:
        pytest.skip(f"deepspeed {theirs.__version__} is installed, the recording is of {VERSION}")


@pytest.mark.filterwarnings("default")  # DeepSpeed's own
def test_deepspeed_itself_says_what_was_recorded(real: None) -> None:
    found = {case.name: asked(case.said, case.ranks) for case in CASES}

    assert {"version": VERSION, **found} == RECORDED


@pytest.mark.filterwarnings("default")  # DeepSpeed's own
def test_deepspeed_itself_infers_the_same_batches(real: None) -> None:
    values = (None, -1, 0, 1, 2, 3, 4, 6, 12)
    for train, micro, accumulation, ranks in product(values, values, values, (1, 2, 3)):
        said = {TB: train, MB: micro, GA: accumulation}
        case = Case("", said, "", ranks)

        assert same(answer(case, Path()), asked(said, ranks)), f"{said}, {ranks} ranks"


@pytest.mark.filterwarnings("default")  # DeepSpeed's own
def test_deepspeed_itself_has_the_same_fields_and_defaults(real: None) -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    for theirs, ours in (
        (precision_config.DeepSpeedFP16Config, Fp16),
        (precision_config.DeepSpeedBF16Config, Bf16),
        (config.DeepSpeedZeroConfig, ZeroOptimization),
        (offload_config.DeepSpeedZeroOffloadParamConfig, OffloadParam),
        (offload_config.DeepSpeedZeroOffloadOptimizerConfig, OffloadOptimizer),
    ):
        wanted = {name: (each.alias or "", each.default) for name, each in theirs.model_fields.items()}
        found = {each.name: (each.metadata.get("name", ""), each.default) for each in fields(ours)}
        for made in (wanted, found):  # of classes that mixtures of experts have, by a function on both sides
            made.pop("leaf_module", None)

        assert found == wanted


# ------------------------------------------------------------------------------------------------------------ the values


def test_defaults_are_those_of_the_version() -> None:
    """Those of deepspeed/runtime/{constants,precision_config,zero/config,zero/offload_config}.py, which have moved before."""
    config = read({TB: 4})

    assert config.gradient_clipping == 1.0
    assert (OffloadParam().pin_memory, OffloadOptimizer().pin_memory) == (True, True)
    assert (Fp16().initial_scale_power, Fp16().loss_scale_window, Fp16().hysteresis) == (16, 1000, 2)
    assert Bf16().check_grad_overflow is True
    assert ZeroOptimization().reduce_bucket_size == 5e8
    assert ZeroOptimization().max_live_parameters == 1e9


def test_values_are_converted_and_keep_their_place() -> None:
    config = read(
        {
            MB: 2,
            "fp16": {"enabled": "true", "loss_scale": "128", "initial_scale_power": 12.0},
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 2e9,
                "offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_count": "7"},
                "overlap_comm": None,
            },
            "optimizer": {"type": "ADAM", "params": {"lr": "auto"}},
            "activation_checkpointing": {"number_checkpoints": "auto"},
        }
    )

    assert config.fp16 == Fp16(enabled=True, loss_scale=128.0, initial_scale_power=12)
    assert config.zero_optimization.max_live_parameters == 2_000_000_000
    assert config.zero_optimization.offload_param == OffloadParam("nvme", "/disk", buffer_count=7)
    assert config.optimizer is not None
    assert config.optimizer.type == "adam"
    assert config.activation_checkpointing is not None
    assert config.activation_checkpointing.number_checkpoints is AUTO


def test_it_cannot_be_changed() -> None:
    config = read({TB: 4})

    with pytest.raises(AttributeError):
        config.world_size = 2  # type: ignore[misc]


def test_the_old_offload_is_the_new_one() -> None:
    config = read(zero(stage=3, cpu_offload=True, cpu_offload_param=True))

    assert config.zero_optimization.offload_optimizer == OffloadOptimizer("cpu")
    assert config.zero_optimization.offload_param == OffloadParam("cpu")


def test_what_is_read_is_not_held() -> None:
    said = four(optimizer={"type": "Adam", "params": {"betas": [0.9, 0.95]}})
    config = read(said)
    said["optimizer"]["params"]["betas"][0] = 1.0

    assert config.optimizer is not None
    assert config.optimizer.params == {"betas": [0.9, 0.95]}


# ----------------------------------------------------------------------------------------------------------- the notices


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (four(gradient_checkpointing=True), "gradient_checkpointing is no key of DeepSpeed, which ignores it"),
        (four(gradient_checkpointing=False), "recomputes none where the budget has room"),
        (four(activation_checkpointing={}), "activation_checkpointing switches nothing on, in DeepSpeed either"),
        (four(), f"gradient_clipping is 1.0, the default of DeepSpeed {VERSION}"),
        (four(gradient_clipping="auto"), "gradient_clipping auto is 1.0"),
        (four(steps_per_print=10), "steps_per_print has no effect: what is printed"),
        (zero(stage=2), "zero_optimization.stage 2 holds as it is on one rank"),
        (four(zero_optimization=True), "zero_optimization: true is the old form of stage 1"),
        (zero(stage=1, cpu_offload=True), "zero_optimization.cpu_offload is the old form of offload_optimizer"),
        (four(optimizer={"type": "Adam"}), 'optimizer.type "Adam" is AdamW'),
        (fp16(), "fp16: parameters stay as the model has them"),
        ({TB: 4, MB: 2}, "gradient_accumulation_steps: micro-batches count for what the loss averages over"),
        (four(bf16={"enabled": True}), "bf16: parameters stay as the model has them"),
        (four(bf16={}, bfloat16={}), "bfloat16 is ignored"),
    ],
)
def test_what_is_taken_otherwise_is_told(said: dict[str, Any], words: str) -> None:
    assert sum(words in notice for notice in read(said).notices) == 1


def test_what_needs_no_word_has_none() -> None:
    said = four(
        gradient_clipping=1.0,
        fp16={"enabled": False},
        torch_autocast={"enabled": True, "dtype": "bf16"},
        optimizer={"type": "Adam", "params": {"adam_w_mode": False}},
        zero_optimization={"stage": 0},
    )

    assert read(said).notices == ()


def test_lenient_tells_what_it_ignores() -> None:
    notices = read(four(gradient_cliping=2.0, optimizer={"type": "SGD", "parms": {}}), strict=False).notices

    assert "gradient_cliping is ignored: DeepSpeed 0.19.8 has no such key; did you mean gradient_clipping?" in notices
    assert any(notice.startswith("optimizer.parms is ignored") for notice in notices)


@pytest.mark.parametrize("key", keys.HARMLESS)
def test_every_harmless_key_is_taken_and_told(key: str) -> None:
    value = {} if key in {**keys.CLOSED, **keys.OPEN} else {"gradient_allreduce_op": "mean"}.get(key)

    assert any(notice.startswith(f"{key} has no effect") for notice in read(four(**{key: value})).notices)


def test_what_ranks_send_each_other_is_told_of_where_there_are_several() -> None:
    notices = read(zero(stage=2, overlap_comm=True) | {"prescale_gradients": True}, world_size=4).notices

    assert not any("rank" in notice for notice in notices)
    assert any(notice.startswith("prescale_gradients has no effect: gradients are averaged") for notice in notices)
    assert any(notice.startswith("zero_optimization.overlap_comm has no effect: torch's engines") for notice in notices)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"gradient_allreduce_op": "sum"},
            "gradient_allreduce_op: sum cannot be honoured: the gradients of all ranks are averaged",
        ),
        (
            {"communication_data_type": "bf16"},
            "communication_data_type: .* cannot be honoured: gradients are sent in the type",
        ),
        ({"use_data_before_expert_parallelism": True}, "memfit has no expert parallelism"),
    ],
)
def test_what_would_make_gradients_others_than_the_mean_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(zero(stage=2) | said, world_size=4)


@pytest.mark.parametrize("key", [*keys.REFUSED, *keys.REMOVED])
def test_no_key_is_of_two_kinds(key: str) -> None:
    homes = [name for name in ("HARMLESS", "REFUSED", "REMOVED") if key in getattr(keys, name)]

    assert len(homes) == 1


# -------------------------------------------------------------------------------------------------------------- the file


def test_the_message_starts_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 0}', encoding="utf-8")

    with pytest.raises(ConfigError) as refused:
        read(path)

    assert str(refused.value).startswith(f"{path}: train_batch_size: 0 is less than 1")


def test_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the DeepSpeed configuration"):
        read(str(tmp_path / "nowhere.json"))


def test_hjson_without_its_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 4, }', encoding="utf-8")

    with pytest.raises(InputError, match=r"pip install 'memfit\[deepspeed\]'"):
        read(path)

    path.write_text('{"train_batch_size": 4}', encoding="utf-8")
    assert read(path).batch.train == 4


def test_ranks_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="world_size: 0"):
        read({TB: 4}, world_size=0)


# ----------------------------------------------------------------------------------------------- what torch has by name


@pytest.mark.parametrize("name", [each for each in keys.OPTIMIZER_PARAMS if each[0].isupper()])
def test_torchs_optimizers_take_what_is_listed(name: str) -> None:
    taken = list(inspect.signature(getattr(torch.optim, name)).parameters)

    assert sorted(keys.OPTIMIZER_PARAMS[name]) == sorted(taken[1:])


@pytest.mark.parametrize("name", keys.TORCH_SCHEDULES)
def test_torchs_schedules_are_there(name: str) -> None:
    assert inspect.isclass(getattr(torch.optim.lr_scheduler, name))


# ------------------------------------------------------------------------------------------------- arguments of the plan


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (four(), {"clip_norm": 1.0, "allow": (), "fixed": {"micro_batches": 1, "precision": "full"}}),
        ({TB: 4, MB: 1, "gradient_clipping": 0}, {"clip_norm": None, "allow": (), "fixed": {"micro_batches": 4, "precision": "full"}}),
        ({TB: 4, MB: "auto", "gradient_clipping": "auto"}, {"clip_norm": 1.0, "allow": (), "fixed": {"precision": "full"}}),
        (fp16(), {"clip_norm": 1.0, "allow": ("fp16",), "fixed": {"micro_batches": 1, "precision": "fp16"}}),
        (four(bf16={"enabled": "auto"}), {"clip_norm": 1.0, "allow": ("bf16",), "fixed": {"micro_batches": 1}}),
        (four(fp16={"enabled": "auto"}, bf16={"enabled": True}), {"clip_norm": 1.0, "allow": ("bf16",), "fixed": {"micro_batches": 1, "precision": "bf16"}}),
        (four(torch_autocast={"enabled": True, "dtype": "half"}), {"clip_norm": 1.0, "allow": ("fp16",), "fixed": {"micro_batches": 1, "precision": "fp16"}}),
    ],
)  # fmt: skip
def test_arguments_follow(said: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert read(said).arguments() == wanted


@pytest.mark.parametrize(
    ("device", "place"), [("none", "device"), ("cpu", "host"), ("nvme", "disk"), ("auto", None), (None, None)]
)
def test_where_state_lies(device: str | None, place: str | None) -> None:
    section = {} if device is None else {"offload_optimizer": {"device": device, "nvme_path": "/disk"}}

    assert read(zero(stage=2, **section)).arguments()["fixed"].get("state_place") == place


@pytest.mark.parametrize(("device", "place"), [("none", "device"), ("cpu", "device"), ("nvme", "disk")])
def test_on_a_cpu_the_hosts_memory_is_where_state_lies_anyway(device: str, place: str) -> None:
    config = read(zero(stage=2, offload_optimizer={"device": device, "nvme_path": "/disk"}))

    assert config.arguments(device="cpu")["fixed"]["state_place"] == place


def test_on_a_cpu_parameters_are_streamed_from_the_disk_alone() -> None:
    below = zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/disk"})
    beside = zero(stage=3, offload_param={"device": "cpu"})

    assert read(below).arguments(streamed="layers", device="cpu")["fixed"]["streamed"] == "layers"
    assert "streamed" not in read(beside).arguments(streamed="layers", device="cpu")["fixed"]


def test_a_micro_batch_decides_their_number_where_that_is_open() -> None:
    config = read({MB: 4, GA: "auto"})

    assert "micro_batches" not in config.arguments()["fixed"]
    assert config.arguments(samples=12)["fixed"]["micro_batches"] == 3
    with pytest.raises(ConfigError, match="a batch of 10 samples cannot be taken 4 at a time"):
        config.arguments(samples=10)


def test_the_sample_is_the_batch_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="takes 4 samples a step and the sample holds 5"):
        read(four()).arguments(samples=5)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (four(), None),
        (four(torch_autocast={"enabled": True, "dtype": "fp16"}), None),
        (fp16(loss_scale=128), {"initial": 128.0, "constant": True}),
        (fp16(initial_scale_power=8, hysteresis=4), {"initial": 256.0, "window": 1000, "least": 1.0, "hysteresis": 1, "refilled": False}),
        ({**fp16(hysteresis=4, min_loss_scale=2), **zero(stage=1)}, {"initial": 65536.0, "window": 1000, "least": 2.0, "hysteresis": 4, "refilled": False}),
    ],
)  # fmt: skip
def test_how_fp16_scales(said: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert read(said).scaling == wanted


def test_what_is_auto_is_filled_in() -> None:
    said = four(gradient_clipping="auto", optimizer={"type": "SGD", "params": {"lr": "auto"}})
    config = read(said, auto={"gradient_clipping": 0.5, "optimizer.params.lr": 0.1})

    assert config.gradient_clipping == 0.5
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.1}
    assert said["gradient_clipping"] == "auto"


@pytest.mark.parametrize(
    ("path", "there"),
    [("optimizer.params.lr", "0.1"), ("optimizer.params.eps", "nothing"), ("fp16.enabled", "nothing")],
)
def test_only_what_is_auto_is_filled_in(path: str, there: str) -> None:
    said = four(optimizer={"type": "SGD", "params": {"lr": 0.1}})

    with pytest.raises(ConfigError, match=f"a value for {path} was given, where the configuration says {there}"):
        read(said, auto={path: 1.0})


def test_moved_parameters_are_streamed_with_their_state() -> None:
    config = read(zero(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}))

    assert config.arguments(streamed="encoder.layer")["fixed"] == {
        "micro_batches": 1,
        "precision": "full",
        "streamed": "encoder.layer",
    }


@pytest.mark.parametrize(
    ("said", "ranks", "streamed", "words"),
    [
        (zero(stage=3, offload_param={"device": "cpu"}), 2, "", "offload_param: cannot be honoured on several ranks"),
        (zero(stage=3, offload_param={"device": "cpu"}), 1, "", "which blocks are streamed?"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/d"}), 1, "layers", "nvme cannot be honoured"),
        (
            zero(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "nvme", "nvme_path": "/d"}),
            1,
            "layers",
            "the state of streamed layers goes where they go",
        ),
        (zero(stage=3), 1, "layers", "the configuration leaves parameters where they are"),
    ],
)
def test_what_a_plan_cannot_hold_is_refused(said: dict[str, Any], ranks: int, streamed: str, words: str) -> None:
    config = read(said, world_size=ranks)

    with pytest.raises(ConfigError) as refused:
        config.arguments(streamed=streamed)

    assert words in str(refused.value)


@pytest.mark.parametrize("said", [{TB: 4, MB: 2}, four(bf16={"enabled": True}, gradient_clipping=0)])
def test_the_planner_takes_the_arguments(said: dict[str, Any]) -> None:
    config = read(said)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    plan = memfit.plan(model, torch.randn(4, 8), lambda model, x: model(x).sum(), "1MiB", **config.arguments())

    assert plan.choices.micro_batches == config.batch.accumulation
    assert plan.choices.precision == config.precision
