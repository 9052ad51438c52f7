"""What is told where nothing fits leads to a plan: each way out is planned with exactly the arguments that it prints."""

from __future__ import annotations

import functools
import json
import pickle
import shlex
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

import memfit
import small
from memfit import api, batches
from memfit.capture.trace_source import TraceSource
from memfit.cli.answer import as_settings, failure
from memfit.errors import InfeasibleError, Remedy
from memfit.planner.infeasible import with_remedies
from memfit.remedies import changes, search
from memfit.remedies.changes import Held, adapter_targets, below_the_last_block
from memfit.techniques.registry import ALLOWED
from memfit.train.config import override
from memfit.values.request import Request
from models import build_gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def build() -> Any:
    """Most bytes are those of parameters, gradients and state."""
    torch.manual_seed(0)
    return build_gpt(
        layers=3, hidden=128, heads=4, batch=1, tokens=16, vocab=50
    )  # one sample: one micro-batch to capture


def parameter_bytes() -> int:
    return sum(p.nbytes for p in build()[0].parameters())


def refused(budget: int | str, **named: Any) -> InfeasibleError:
    """What is said of this budget; looked for once."""
    key = f"{budget} {named}"
    if key not in REFUSED:
        REFUSED[key] = _refused(budget, **named)
    return REFUSED[key]


REFUSED: dict[str, InfeasibleError] = {}


def _refused(budget: int | str, **named: Any) -> InfeasibleError:
    model, sample, loss_fn = build()
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, loss_fn, budget, named.pop("optimizer", small.adamw), **named)
    return caught.value


def planned_as_told(remedy: Remedy, budget: int | str, **named: Any) -> memfit.Plan:
    """Planned with what the remedy says, read from its text."""
    model, sample, loss_fn = build()
    optimizer = named.pop("optimizer", small.adamw)
    if remedy.kind == "optimizer":
        optimizer = eval(remedy.text.partition("=")[2], {"functools": functools, "torch": torch})  # noqa: S307 - our own text
    if remedy.kind == "batch":
        sample = batches.split(sample, [n := int(remedy.text.split()[3]), batches.size(sample) - n])[0]
    if "peft.get_peft_model" in remedy.text:
        peft = pytest.importorskip("peft")
        model = eval(remedy.text.partition(" and ")[0].partition(" = ")[2], {"peft": peft, "model": model})  # noqa: S307
    told = {"budget": budget, **named, **(remedy.arguments or {})}
    for name, value in (remedy.arguments or {}).items():
        assert f"{name}=" in remedy.text
        assert (value if isinstance(value, str) else repr(value).replace("'", '"')) in remedy.text
    return memfit.plan(model, sample, loss_fn, optimizer=optimizer, **told)


EASY: Any = (3.2, {})
HARD: Any = (1.3, {})  # no single change does


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # peft's, of layers it knows less well
@pytest.mark.parametrize(
    ("share", "named"),
    [
        pytest.param(*EASY, id="state elsewhere"),
        pytest.param(*HARD, id="gradients gone too", marks=pytest.mark.slow),
        pytest.param(1.3, {"clip_norm": 1.0}, id="clipped", marks=pytest.mark.slow),
        pytest.param(1.6, {"allow": ["in_backward"]}, id="some of it allowed", marks=pytest.mark.slow),
        pytest.param(1.5, {"optimizer": None}, id="no optimizer", marks=pytest.mark.slow),
    ],
)
def test_every_way_out_leads_to_a_plan(share: float, named: dict[str, Any]) -> None:
    budget = int(share * parameter_bytes())
    error = refused(budget, **named)
    assert error.remedies[0].kind == "budget"
    assert len(error.remedies) >= (2 if named.get("optimizer", small.adamw) else 1)
    for remedy in error.remedies:
        plan = planned_as_told(remedy, budget, **named)
        assert plan.prediction.peak_bytes <= (budget if remedy.kind != "budget" else error.minimum_bytes + (1 << 20))
        assert remedy.text in str(error)


@pytest.mark.slow
def test_where_no_single_change_does_a_combination_is_named_of_which_nothing_can_be_left_out() -> None:
    budget = int(HARD[0] * parameter_bytes())
    error = refused(budget)
    (_, combination, *_) = error.remedies
    assert combination.arguments is not None
    words = combination.arguments.get("allow", [])
    parts: list[dict[str, Any]] = [{"allow": [w for w in words if w != word]} for word in words]
    parts += [{name: None} for name in combination.arguments if name == "host_budget"]
    assert len(parts) >= 2
    model, sample, loss_fn = build()
    for part in parts:
        fewer = {name: value for name, value in {**combination.arguments, **part}.items() if value is not None}
        with pytest.raises(InfeasibleError):
            memfit.plan(model, sample, loss_fn, budget, small.adamw, **fewer)


def test_what_changes_results_less_is_told_first() -> None:
    told = [remedy.text for remedy in refused(int(3.2 * parameter_bytes())).remedies]
    assert told[0].startswith("budget=")
    assert told[1].startswith("host_budget=")
    changing = [index for index, text in enumerate(told) if "8bit" in text or "bf16" in text]
    assert min(changing, default=2) >= 2


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The choices of the steps that are captured in the test."""
    choices_of_steps: list[Any] = []
    known = TraceSource.captured

    def noted(self: TraceSource, choices: Any) -> Any:
        choices_of_steps.append(choices)
        return known(self, choices)

    monkeypatch.setattr(TraceSource, "captured", noted)
    return choices_of_steps


def test_a_hopeless_budget_is_refused_without_a_capture_more(captured: list[Any]) -> None:
    error = _refused("1KiB")
    assert [remedy.kind for remedy in error.remedies] == ["budget"]
    _, _, tried = str(error).partition("Nothing fits with any of these besides, or with combinations of them: ")
    tried, _, words = tried.partition(". Weighed")[0].partition("allow=")
    assert tried.startswith("host_budget, ")
    assert set(json.loads(words)) <= set(ALLOWED)  # as the user would write them
    assert not any(way.techniques for way in captured if not way.loss_chunks > 1)


@pytest.mark.slow
def test_where_every_plan_holds_more_than_the_budget_the_smallest_is_not_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []
    least_of = search._least_of

    def noted(*given: Any) -> Any:
        tried.append(least_of(*given))
        return tried[-1]

    monkeypatch.setattr(search, "_least_of", noted)
    budget = int(0.6 * parameter_bytes())
    _refused(budget)
    assert any(least is not None and least[0] > budget and least[1] is None for least in tried)


def test_bytes_of_weights_in_4_bits_are_not_halved_by_16() -> None:
    held = Held(32.0, 32.0, 64.0)
    assert held.under([(0.5, 0.5, 0.5), (0.125, 1.0, 1.0)]) == Held(4.0, 16.0, 32.0)
    assert held.under([]) == held


def test_no_more_is_captured_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_CAPTURES", 1)
    error = _refused(int(HARD[0] * parameter_bytes()))
    assert len(error.remedies) == 1
    assert "or with combinations of them that were tried: host_budget, " in str(error)


@pytest.mark.slow
def test_a_switch_of_the_model_is_put_back_and_told() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=20, num_key_value_heads=4, **shape)
    assert config.use_cache
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 20, (2, 128))
    sample = {"input_ids": ids, "labels": ids}
    made = memfit.plan(model, sample, None, 1 << 40, None, fixed={"micro_batches": 1})
    with_cache = memfit.smallest_budget(made)
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, None, with_cache - 2048, None, fixed={"micro_batches": 1})
    assert model.config.use_cache is True
    told = [remedy for remedy in caught.value.remedies if "use_cache" in remedy.text]
    assert [remedy.text for remedy in told] == ["model.config.use_cache = False"]
    exec(told[0].text, {"model": model})  # noqa: S102 - our own text
    fits = memfit.plan(model, sample, None, with_cache - 2048, None, fixed={"micro_batches": 1})
    assert fits.prediction.peak_bytes <= with_cache - 2048


def test_more_than_the_device_has_is_not_a_budget_to_give() -> None:
    model, sample, loss_fn = build()
    bundle = memfit.record(model, sample, loss_fn, small.adamw, fixed={"micro_batches": 1})
    (device,) = bundle.topology.devices
    poor = replace(bundle, topology=replace(bundle.topology, devices=(replace(device, memory_bytes=1 << 20),)))
    with pytest.raises(InfeasibleError) as caught:
        memfit.replan(poor, 1 << 20)
    (only,) = caught.value.remedies
    assert only.arguments is None
    assert only.text.startswith("a device with ")
    assert f"the 1.00 MiB of {device.name}" in only.text


@pytest.mark.slow
def test_the_way_home_from_a_worker_keeps_all_of_it() -> None:
    error = refused(int(3.2 * parameter_bytes()))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - written here
    assert (str(again), again.remedies, again.weighed) == (str(error), error.remedies, error.weighed)


def test_bytes_and_seconds_of_all_but_a_larger_budget_are_bounds() -> None:
    refusal = InfeasibleError("", budget_bytes=1 << 20, minimum_bytes=2 << 20, moment="forward: aten.mm.default")
    ways = (Remedy('budget="2MiB"', 1 << 20, 0.5, "budget"), Remedy('allow=["8bit"]', 3 << 18, -0.5))
    told = str(with_remedies(refusal, ways))
    assert 'budget="2MiB" (1.00 MiB more, 500 ms a step slower)' in told
    assert 'allow=["8bit"] (at least 768 KiB less, at least 500 ms a step faster)' in told


def test_a_budget_that_lacks_few_bytes_is_told_in_bytes() -> None:
    refusal = InfeasibleError("", budget_bytes=1_017_659, minimum_bytes=1_017_660, moment="forward: aten.mm.default")
    told = str(with_remedies(refusal, ()))
    assert told.startswith(
        "994 KiB (1017659 bytes) is too little: the smallest plan found needs 994 KiB (1017660 bytes), "
    )


def test_on_the_command_line_arguments_are_settings() -> None:
    arguments = {"allow": ["in_backward", "8bit"], "host_budget": "20MiB", "fixed": {"micro_batches": 2}}
    lora = ("lora.rank=8", 'lora.targets=["q", "0.v"]')
    ways = (
        Remedy("a", 1, 0.0, "", arguments),
        Remedy("b", 1, 0.0, "budget", {"budget": "3MiB"}),
        Remedy("c", 1, 0.0, "", {"host_budget": "1MiB"}, lora),
        Remedy("d", 1, 0.0, "", {"host_budget": "1MiB"}, None),  # with a statement that no run file has
        Remedy("e", 1, 0.0, "batch"),
    )
    answer = failure(InfeasibleError("too little", budget_bytes=1, remedies=ways))
    told = answer.data["settings"]
    assert told == [as_settings(ways[0]), "--budget 3MiB", as_settings(ways[2])]
    assert answer.text.endswith(f"On the command line: {', or '.join(told)}")
    for setting, number, keys in (
        (told[0], 3, {"fit": arguments}),
        (told[2], 3, {"fit": {"host_budget": "1MiB"}, "lora": {"rank": 8, "targets": ["q", "0.v"]}}),
    ):
        read: dict[str, Any] = {"fit": {}}
        words = shlex.split(setting)
        assert words[::2] == ["--set"] * number
        for word in words[1::2]:
            override(read, word)
        assert read == keys


class Stem(nn.Module):
    """Blocks within a part of the model, with something before them and something after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.body = nn.Module()
        self.body.first = nn.Linear(8, 8)
        self.body.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 2)


def test_what_is_frozen_is_what_comes_before_the_last_block() -> None:
    assert below_the_last_block(Stem()) == ("embed", "body.first", "body.blocks.[0-1]")
    assert below_the_last_block(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("blocks", [2, 3, 11, 32, 80, 126, 1001])
def test_many_blocks_are_frozen_by_few_patterns(blocks: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(blocks)))
    patterns = below_the_last_block(model)
    assert len(patterns) <= 9
    for number in range(blocks + 20):
        assert sum(fnmatchcase(str(number), pattern) for pattern in patterns) == (number < blocks - 1)


def test_adapters_go_beside_the_linear_layers_of_the_blocks() -> None:
    assert adapter_targets(build()[0]) == ["mlp.0", "mlp.2", "out", "qkv"]
    rows = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(3)))
    assert adapter_targets(rows) == ["0.0", "1.0", "2.0"]  # "0" is a block's name, too
    assert adapter_targets(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))) == ["0", "1", "2"]
    convolutions = nn.Sequential(*(nn.Sequential(nn.Conv1d(2, 2, 1), nn.GELU()) for _ in range(3)))
    assert adapter_targets(convolutions) == []


def test_adapters_go_beside_the_linear_layers_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=2, n_head=1))
    assert adapter_targets(model) == ["c_attn", "c_fc", "c_proj"]


def test_a_change_that_the_model_cannot_have_stands_in_the_way_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_by_peft(*_: Any, **__: Any) -> Any:
        raise ValueError("no such layer")

    def only_combined(_: Any, combined: Any, *__: Any) -> Any:
        return search._Tried(tuple(combined), 1, None, None) if len(combined) > 1 else None  # type: ignore[arg-type]

    monkeypatch.setattr(changes, "_with_adapters", refused_by_peft)
    monkeypatch.setattr(search._Search, "_smallest", only_combined)
    monkeypatch.setattr(search._Search, "_leaner", lambda _, found: found)
    told = ", ".join
    monkeypatch.setattr(search._Search, "_remedy", lambda _, way: Remedy(told(c.name for c in way.changes), 1, 0.0))
    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))  # no blocks to freeze
    sample = torch.randn(1, 8), torch.randn(1, 8)
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, small.squared_error, "40KiB", small.adamw)
    assert caught.value.remedies[1].text == "offloading, in_backward"


def test_a_statement_alone_has_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search._Search, "_seconds", lambda *_: 1.0)
    asked = Request()
    looking = search._Search(None, None, asked, 1)  # type: ignore[arg-type]
    looking.size, looking.plain_seconds = 3, 0.5
    switch = changes.Change(
        "switch", changes.Effect.SAME_NUMBERS, statement="model.config.use_cache = False", keys=None
    )
    told = looking._remedy(search._Tried((switch,), 1, None, asked))  # type: ignore[arg-type]
    assert told == Remedy(switch.statement, 2, 0.5, "", None, None)
    assert not as_settings(told)


def test_what_lies_beside_the_model_leaves_no_room_that_a_change_could_make(captured: list[Any]) -> None:
    model, sample, loss_fn = build()
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, loss_fn, 1 << 10, small.adamw, device="rtx4090")
    beside = caught.value.beside_bytes
    assert beside > 1 << 20  # workspaces of CUDA's libraries
    captured.clear()
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, loss_fn, beside, small.adamw, device="rtx4090")
    assert [remedy.kind for remedy in caught.value.remedies] == ["budget"]
    assert not any(name in {"precision", "parameters", "state_format"} for way in captured for name in way.used)


def test_where_the_update_alone_is_too_much_no_more_micro_batches_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "with_ways_out", lambda error, *_: error)  # the planner's own answer
    model, sample = small.chain(), small.rows(64)
    held = 4 * sum(p.nbytes for p in model.parameters())  # with gradients and AdamW's two moments
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(model, sample, small.squared_error, held // 2, small.adamw)
    assert caught.value.minimum_bytes is not None
    assert caught.value.minimum_bytes > held
    (weighed,) = caught.value.weighed
    assert weighed.startswith("1 micro-batch: nothing fits, ")
    assert weighed.endswith("are held in the optimizer's update")
