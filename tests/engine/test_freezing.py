"""What patterns freeze is what `requires_grad_(False)` freezes: the same numbers, and bytes that the plan has told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit
import small
from memfit import api
from memfit.errors import InputError
from memfit.planning import planning_of
from memfit.techniques.freezing.freeze import freeze, frozen, frozen_parts, watching
from models import case
from models.outcome import measured_peak

pytestmark = pytest.mark.usefixtures("one_thread")


class Encoder(nn.Module):
    """Named as Hugging Face names its parts."""

    def __init__(self, layers: int = 12, width: int = small.WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.ModuleDict({"words": nn.Embedding(50, width), "norm": nn.LayerNorm(width)})
        self.encoder = nn.ModuleDict(
            {
                "layer": nn.ModuleList(
                    nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)
                )
            }
        )
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embeddings["norm"](self.embeddings["words"](ids))
        for layer in self.encoder["layer"]:  # type: ignore[attr-defined]
            h = h + layer(h)
        found: Tensor = self.head(h)
        return found


def ids(rows: int = 32, tokens: int = 16) -> Tensor:
    return torch.randint(0, 50, (rows, tokens), generator=torch.Generator().manual_seed(1))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


# -- patterns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        (["embeddings"], ["embeddings"]),
        (["embeddings.words", "encoder.layer.[0-3]"], ["embeddings.words", *(f"encoder.layer.{i}" for i in range(4))]),
        (["encoder.layer.1?"], ["encoder.layer.10", "encoder.layer.11"]),
        (["*.norm"], ["embeddings.norm"]),
        (["embeddings*", "embeddings.norm"], ["embeddings"]),
        (["head.bias"], ["head.bias"]),
        (["encoder.layer.?.0.bias"], [f"encoder.layer.{i}.0.bias" for i in range(10)]),
    ],
)
def test_patterns_mean_whole_paths_and_what_lies_inside(patterns: list[str], paths: list[str]) -> None:
    model = Encoder()
    parts = frozen_parts(model, patterns)
    assert [part.path for part in parts] == paths
    assert names(model) == set()
    freeze(model, patterns)
    expected = {n for n, _ in model.named_parameters() if any(n == p or n.startswith(f"{p}.") for p in paths)}
    assert names(model) == expected
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == sum(p.parameters for p in parts)
    assert sum(p.nbytes for p in model.parameters() if not p.requires_grad) == sum(p.bytes for p in parts)


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["embedings"], "matches no module or parameter of this model; the nearest are embeddings"),
        (["layer.0"], "the nearest are encoder.layer.0"),
        (["words"], "the nearest are embeddings.words"),
        (["encoder.layer.[0-3]", "encoder.layer.12"], "freeze='encoder.layer.12' matches no module"),
        (["encoder.layer.0.2"], "matches modules that hold no parameters"),
        (["embeddings", "encoder", "head"], "leaves no parameter to train"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(patterns: list[str], sentence: str) -> None:
    model = Encoder()
    with pytest.raises(InputError, match=sentence):
        memfit.plan(model, ids(), next_token, "1GiB", freeze=patterns)
    assert names(model) == set()


def test_a_tied_weight_is_frozen_wherever_it_is_used() -> None:
    model = Encoder()
    model.head.weight = model.embeddings["words"].weight  # type: ignore[assignment]
    (part,) = frozen_parts(model, ["head.weight"])
    assert (part.path, part.parameters) == ("head.weight", 50 * small.WIDTH)
    with frozen(model, ["head"]):
        assert names(model) == {"embeddings.words.weight", "head.bias"}
    assert names(model) == set()


class Named(Encoder):
    """Tells its parameters by a method of its own, without the argument that nn.Module's has besides (torchrl's losses leave their target networks out)."""

    def named_parameters(self, prefix: str = "", *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        yield from super().named_parameters(prefix, recurse)


@pytest.mark.parametrize("patterns", [[], ["embeddings"]])
def test_a_model_may_tell_its_parameters_by_a_method_of_its_own(patterns: list[str]) -> None:
    engine = memfit.fit(Named(), ids(), next_token, "1GiB", small.adamw, freeze=patterns)
    engine.step(ids())
    assert names(engine.model) == (
        {"embeddings.words.weight", "embeddings.norm.weight", "embeddings.norm.bias"} if patterns else set()
    )


# -- numbers and bytes -----------------------------------------------------------------------------------------------------

PATTERNS = ["embeddings", "encoder.layer.[0-5]"]


def test_planning_leaves_the_model_and_applying_freezes_it() -> None:
    model = Encoder()
    model.embeddings["norm"].weight.requires_grad_(False)  # the user's own
    next_token(model, ids()).backward()
    made = memfit.plan(model, ids(), next_token, "1GiB", small.adamw, freeze=PATTERNS)
    assert names(model) == {"embeddings.norm.weight"}

    engine = memfit.apply(made, model)

    assert names(model) == {
        n
        for n, _ in model.named_parameters()
        if n.startswith(("embeddings", *(f"encoder.layer.{i}." for i in range(6))))
    }
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert engine.optimizer is not None
    assert all(p.requires_grad for group in engine.optimizer.param_groups for p in group["params"])
    engine.step(ids())
    assert len(engine.optimizer.state) == sum(p.requires_grad for p in model.parameters())
    loaded = memfit.Plan.from_json(made.to_json())
    assert loaded == made
    memfit.apply(loaded, Encoder(), next_token, small.adamw)
    with pytest.raises(memfit.PlanFileError):
        memfit.apply(made, small.chain(2))


@pytest.mark.alternate(1)
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_steps_are_those_of_requires_grad_false(fraction: float) -> None:
    one, other = Encoder(), Encoder()
    plain = memfit.plan(
        one, ids(), next_token, 1 << 50, small.adamw, freeze=PATTERNS, fixed={"micro_batches": 1}, clip_norm=0.5
    )
    search = planning_of(plain)
    smallest, largest = search.smallest()[0], search.plain_peak()
    engine = memfit.apply(api.replan(plain, round(smallest + fraction * (largest - smallest))), one)
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(not name.startswith(("embeddings", *(f"encoder.layer.{i}." for i in range(6)))))
    optimizer = small.adamw(p for p in other.parameters() if p.requires_grad)
    torch.manual_seed(3)
    losses = [engine.step(ids()).loss for _ in range(3)]  # dropout drops in frozen layers too
    torch.manual_seed(3)
    for loss in losses:
        optimizer.zero_grad()
        found = next_token(other, ids())
        found.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        assert found.item() == loss
    assert small.same(small.state_of(one, engine.optimizer), small.state_of(other, optimizer))


def test_what_freezing_saves_is_measured_and_stands_beside_what_is_claimed() -> None:
    model, sample = Encoder(), ids(128, 32)
    made = memfit.plan(model, sample, next_token, 1 << 50, small.adamw, freeze=PATTERNS, fixed={"micro_batches": 1})
    whole = memfit.plan(Encoder(), sample, next_token, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    (saving,) = made.savings
    before = measured_peak(whole, Encoder(), sample, next_token, small.adamw)
    after = measured_peak(made, Encoder(), sample, next_token, small.adamw)

    assert before == pytest.approx(whole.prediction.peak_bytes, rel=0.005)
    assert after == pytest.approx(made.prediction.peak_bytes, rel=0.005)
    assert saving.technique == "freeze"
    assert saving.predicted_bytes == pytest.approx(before - after, rel=0.01)
    frozen_bytes = sum(part.bytes for part in made.frozen)
    count = sum(
        1
        for n, _ in model.named_parameters()
        if n.startswith(("embeddings", *(f"encoder.layer.{i}." for i in range(6))))
    )
    assert (
        saving.claimed_bytes == 3 * frozen_bytes + 4 * count
    )  # a gradient and two moments of its size, a step count each
    # Half of the layers run no backward and keep nothing for it, which the claim leaves out.
    assert saving.predicted_bytes > 2 * saving.claimed_bytes
    text = made.explain()
    assert "with these parts frozen" in text
    assert f"Frozen: {sum(part.parameters for part in made.frozen):,} parameters" in text
    assert "gradients and optimizer state of what is frozen" in text


def test_parts_of_a_frozen_model_add_up() -> None:
    model, sample = Encoder(), ids()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    made = memfit.plan(model, sample, next_token, 1 << 50, small.adamw, freeze=PATTERNS, fixed={"micro_batches": 4})
    expected = float(next_token(model, sample).detach())
    assert memfit.apply(made, model).step(sample).loss == pytest.approx(expected, rel=1e-5)


def test_a_frozen_batch_norm_goes_on_counting() -> None:
    model = small.chain(2, batch_norm=True)
    made = memfit.plan(model, small.rows(), small.squared_error, "1GiB", small.adamw, freeze=["[0-4]"])
    before = [b.clone() for b in model.buffers()]
    memfit.apply(made, model).step(small.rows())
    assert model[1].training
    assert not small.same(before, list(model.buffers()))


# -- gradients forced through what is frozen -------------------------------------------------------------------------------


def ask(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


class Between(Encoder):
    """Asks for gradients in its own forward, between modules, where no hook of ours can tell whose they are."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embeddings["norm"](self.embeddings["words"](ids)).requires_grad_(True)
        for layer in self.encoder["layer"]:  # type: ignore[attr-defined]
            h = layer(h)
        found: Tensor = self.head(h)
        return found


@pytest.mark.alternate(0)
@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_hook_that_asks_for_gradients_does_not_send_backward_through_what_is_frozen(fraction: float) -> None:
    models = [Encoder() for _ in range(3)]
    for model in models[:2]:
        model.embeddings["words"].register_forward_hook(ask)
    hooked, plain = (
        memfit.plan(m, ids(), next_token, 1 << 50, small.adamw, freeze=PATTERNS, fixed={"micro_batches": 1})
        for m in (models[0], models[2])
    )
    assert hooked.choices.unforced == ("embeddings.words",)
    assert hooked.prediction.peak_bytes == plain.prediction.peak_bytes
    assert any("the output of embeddings.words is made to ask for gradients" in note for note in hooked.notes)
    search = planning_of(hooked)
    smallest, largest = search.smallest()[0], search.plain_peak()
    made = api.replan(hooked, round(smallest + fraction * (largest - smallest)))
    engine = memfit.apply(made, models[0])
    torch.manual_seed(3)
    records = [engine.step(ids(), meter=meter) for meter in (False, True)]
    assert records[1].divergences == ()
    assert records[1].peak_bytes == pytest.approx(made.prediction.peak_bytes, rel=0.005)
    freeze(models[1], PATTERNS)
    optimizer = small.adamw(p for p in models[1].parameters() if p.requires_grad)
    torch.manual_seed(3)
    for record in records:
        optimizer.zero_grad()
        loss = next_token(models[1], ids())
        loss.backward()
        optimizer.step()
        assert loss.item() == record.loss
    assert small.same(small.state_of(models[0], engine.optimizer), small.state_of(models[1], optimizer))


def test_hugging_faces_way_to_ask_is_taken_back_too() -> None:
    model, sample, loss_fn = case("input_grads").build()
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    patterns = ["model.embed_tokens", "model.layers.[01]"]
    forced = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    made = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, freeze=patterns, fixed={"micro_batches": 1})
    assert made.choices.unforced == ("model.embed_tokens",)
    assert made.prediction.peak_bytes < 0.8 * forced.prediction.peak_bytes
    measured = measured_peak(made, model, sample, loss_fn, small.adamw)
    assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.005)
    assert {n for n, p in model.named_parameters() if p.requires_grad} < wanted


def test_where_the_step_needs_the_forced_gradient_it_is_left_and_said() -> None:
    """Re-entrant checkpointing gives no gradients to layers whose input asks for none."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(small.WIDTH, small.WIDTH), small.chain(2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.second, self.first(x), use_reentrant=True)
            return found

    torch.manual_seed(0)
    model = Checkpointed()
    model.first.register_forward_hook(ask)
    made = memfit.plan(model, small.rows(), small.squared_error, 1 << 50, small.adamw, freeze=["first"])
    assert made.choices.unforced == ()
    assert any("without that the step would be another" in note for note in made.notes)
    memfit.apply(made, model).step(small.rows())


def test_what_is_asked_for_between_modules_is_said() -> None:
    model = Between()
    with frozen(model, PATTERNS), watching(model) as found:
        model(ids())
    assert found.outputs == []
    assert found.inputs == ["encoder.layer.0"]
    made = memfit.plan(model, ids(), next_token, 1 << 50, small.adamw, freeze=PATTERNS)
    assert any("backward runs through what is frozen in encoder.layer.0" in note for note in made.notes)
