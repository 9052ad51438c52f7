"""Parts found from the trace, what crosses between them, and stages run one after the other in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture import part_calls as part_calls_module
from memfit.capture.capture import capture
from memfit.capture.part_calls import find_part_calls
from memfit.capture.source import StepSource
from memfit.errors import EngineError, InputError
from memfit.parallel import placement
from memfit.parallel.other_stages import OtherStages, without_other_stages
from memfit.parallel.placement import place, placed
from memfit.parallel.schedule import alone
from memfit.parallel.stage_module import StageModule
from memfit.planner.model_parts import Boundary, chain, part_calls
from memfit.step.absent import Absent, only
from memfit.step.part_calls import PartCalls
from memfit.values.trace import Category
from parallel.stage_models import Decoder, Towers, built, rows, square_loss, word_loss, words


def _found(model: nn.Module, batch: Batch, loss_fn: LossFunction | None, outwards: int = 0) -> PartCalls:
    trace = capture(StepSource(model, batch, loss_fn, None)).trace
    return find_part_calls(model, batch, loss_fn, [call.module for call in part_calls(trace, outwards)])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _by_stages(
    model: nn.Module, batch: Batch, loss_fn: LossFunction | None, calls: PartCalls, ends: Sequence[int]
) -> float:
    """Forward and backward, each stage with nothing but its own parameters and what it reads of the batch; the loss."""
    tape: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
    values: tuple[Tensor, ...] = ()
    for first, end in zip((0, *ends[:-1]), ends, strict=True):
        with without_other_stages(model, calls, [(first, end)]):
            stage = StageModule(model, loss_fn, calls, first, end)
            received = [
                v.detach().clone().requires_grad_(meta.requires_grad)
                for v, meta in zip(values, stage.received, strict=True)
            ]
            result = stage(only(batch, calls.leaves_read(first, end)), *received)
        values = result if isinstance(result, tuple) else (result,)
        tape.append((received, values))
    grads: list[Tensor | None] = [None]
    for received, outputs in reversed(tape):
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        grads = [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in received]
    return values[0].item()


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", ["sequential", "decoder", "tied", "encoder_decoder", "resnet", "vgg"])
def test_stages_one_after_the_other_give_the_gradients_of_the_whole(name: str) -> None:
    model, batch, loss_fn, _ = built(name)
    loss = batches.loss_of(model, batch, loss_fn)
    loss.backward()
    whole = _gradients(model)
    calls = _found(model, batch, loss_fn)
    number = len(calls.calls)
    where = [end for end in range(1, number) if not calls.refused[end]]
    assert len(where) == (number - 4 if name == "vgg" else number - 1)
    every = [(end, number) for end in where]
    for ends in [*every, (*where[:2], number), (where[len(where) // 3], where[2 * len(where) // 3], number)]:
        model.zero_grad()
        assert _by_stages(model, batch, loss_fn, calls, ends) == loss.item()
        split = _gradients(model)
        assert split.keys() == whole.keys()
        for parameter, gradient in whole.items():  # sums over skips and tied weights have another order
            torch.testing.assert_close(split[parameter], gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("sequential", ["0", "2", "4", "6"]),
        ("decoder", ["words", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]),
        (
            "encoder_decoder",
            ["words", "encoder.0", "encoder.1", "norm", "decoder.0", "decoder.1", "decoder.2", "head"],
        ),
        ("resnet", ["stem", "groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1", "head"]),
        ("vgg", ["0", "1", "2", "3", "4", "5", "6", "7", "9"]),
    ],
)
def test_parts_are_found_in_the_trace(name: str, parts: list[str]) -> None:
    model, batch, loss_fn, _ = built(name)
    assert [call.path for call in _found(model, batch, loss_fn).calls] == parts


def test_what_is_shared_by_all_blocks_does_not_cross() -> None:
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    for boundary in range(1, 7):  # neither mask nor tables: every stage makes its own
        assert calls.crossing(boundary) == ((boundary - 1, 0),)
    model, batch, loss_fn, _ = built("encoder_decoder")
    calls = _found(model, batch, loss_fn)
    assert calls.crossing(6) == ((3, 0), (5, 0))  # what the encoder ended with goes on


def test_each_stage_reads_of_the_batch_what_its_parts_or_the_loss_take() -> None:
    model, batch, loss_fn, weights = built("decoder")
    calls = _found(model, batch, loss_fn)
    assert [name for name, _ in calls.batch] == ["ids", "labels"]
    read = [calls.leaves_read(first, end) for first, end in ((0, 2), (2, 5), (5, 7))]
    assert read == [{0}, set(), {1}]  # of the words only the length is asked for after the embedding
    assert calls.leaves_read(0, 7) == {0, 1}
    assert batches.counted_leaf(weights) == "labels"
    assert calls.leaves_read(5, 7, "ids") == {0, 1}, "what micro-batches count for is looked at where the loss is"
    assert calls.leaves_read(2, 5, "ids") == set()


class Masked(nn.Module):
    """Takes words, a mask of them and a scale; how what is masked reaches the layers differs.

    Args:
        how: "argument", "attribute" (of each layer, set before the first), "values" (Python reads them).
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(MaskedLayer() for _ in range(3))

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        x = self.words(ids)
        kept = mask[..., None].to(x.dtype)
        if self.how == "values":
            kept = torch.tensor(mask.tolist(), dtype=x.dtype)[..., None]
        for layer in self.layers:
            assert isinstance(layer, MaskedLayer)
            layer.kept = kept if self.how == "attribute" else None
            x = layer(x, None if self.how == "attribute" else kept)
        return (x * scale).square().mean()


class MaskedLayer(nn.Module):
    """Forgets what is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, kept: Tensor | None) -> Tensor:
        kept = self.kept if kept is None else kept
        assert kept is not None
        y: Tensor = torch.tanh(self.linear(x)) * kept
        return y


@pytest.mark.parametrize("how", ["argument", "attribute", "values"])
def test_what_of_the_batch_reaches_a_part_in_other_ways_is_found(how: str) -> None:
    torch.manual_seed(0)
    model = Masked(how)
    batch = (torch.randint(0, 50, (4, 6)), torch.rand(4, 6) < 0.7, torch.rand(4, 1, 1))
    calls = find_part_calls(model, batch, None, ["words", *(f"layers.{number}" for number in range(3))])
    assert calls.values_read == ({1} if how == "values" else set())
    first = {0, 1} if how == "values" else {0}
    assert [calls.leaves_read(*each) for each in ((0, 1), (1, 3), (3, 4))] == [first, {1}, {1, 2}]
    loss = model(*batch)
    loss.backward()
    whole = _gradients(model)
    model.zero_grad()
    assert _by_stages(model, batch, None, calls, (1, 3, 4)) == loss.item()
    assert {name: gradient.tolist() for name, gradient in _gradients(model).items()} == {
        name: gradient.tolist() for name, gradient in whole.items()
    }


class Cache:
    """What every layer reads, in an object: as prefix tuning hands keys and values of its prompt to all layers."""

    def __init__(self, prompt: Tensor) -> None:
        self.prompt = prompt


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x) + cache.prompt)
        return y


class Prompted(nn.Module):
    """A prompt that is made in a part of its own, and read by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Linear(8, 8)
        self.layers = nn.ModuleList(CachedLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache(self.prompt(torch.ones(1, 8)))
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().mean()


def test_what_an_object_hands_to_parts_crosses_as_what_their_arguments_do() -> None:
    torch.manual_seed(0)
    model, batch = Prompted(), torch.randn(4, 8)
    calls = find_part_calls(model, batch, None, ["prompt", *(f"layers.{number}" for number in range(3))])
    assert calls.crossing(3) == ((0, 0), (2, 0))
    model(batch).backward()
    whole = _gradients(model)
    model.zero_grad()
    assert _by_stages(model, batch, None, calls, (1, 3, 4)) == model(batch).item()
    for name, gradient in _gradients(model).items():  # the prompt's is summed over the layers in another order
        torch.testing.assert_close(gradient, whole[name], rtol=0, atol=1e-7)


class Counting(nn.Module):
    """Its first part returns whole numbers, which a later one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = Ranks()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.ranks(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = x + self.table(ranks)
        return y.square().mean()


class Ranks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def test_whole_numbers_cross_where_torchs_stages_can_receive_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, parts = Counting(), torch.randn(4, 8), ["ranks", "layers.0", "layers.1", "table"]
    for can in (True, False):
        monkeypatch.setattr(part_calls_module, "WHOLE_NUMBERS_CROSS", can)
        calls = find_part_calls(model, batch, None, parts)
        assert [bool(each) for each in calls.refused] == [False, *[not can] * 3]
        assert all("what ranks returns is torch.int64" in each for each in calls.refused if each)


def test_a_parameter_outside_of_modules_is_where_it_is_read() -> None:
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    assert "start" not in calls.parameters(model, 0, 1)  # added to what the embedding returned
    assert "start" in calls.parameters(model, 1, 2)
    model, batch, loss_fn, _ = built("tied")
    calls = _found(model, batch, loss_fn)
    assert "words.weight" in calls.parameters(model, 0, 1)
    assert "words.weight" in calls.parameters(model, 6, 7)


def test_a_stage_holds_its_own_parameters_alone_and_puts_back_the_rest() -> None:
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    before = dict(model.named_parameters())
    with without_other_stages(model, calls, [(2, 4)]):
        names = {name.split(".")[0] + "." + name.split(".")[1] for name, _ in model.named_parameters() if "." in name}
        assert names == {"blocks.1", "blocks.2"}
        assert isinstance(model.head.weight, Absent)
        assert (model.head.weight.shape, model.head.weight.device) == (before["head.weight"].shape, torch.device("cpu"))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


class OfItsOwn(nn.Module):
    """Parameters and buffers of its own; the first one is read last."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            setattr(self, f"scale{number}", nn.Parameter(torch.ones(4) + number))
            self.register_buffer(f"shift{number}", torch.ones(4) * number)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in (2, 1, 0):
            x = self.layers[number](x) * getattr(self, f"scale{number}") + getattr(self, f"shift{number}")
        return x


@pytest.mark.parametrize("part", range(2))
def test_parameters_are_in_their_order_again_after_a_stage(part: int) -> None:
    """Planning a pipeline left those that were put back behind those that had stayed: the rank that plans had another model than the others."""
    model = OfItsOwn()
    calls = _found(model, torch.ones(4, 4), square_loss)
    before = [*model.state_dict()], [name for name, _ in model.named_parameters()]
    with without_other_stages(model, calls, [(part, part + 1)]):
        assert "scale0" not in dict(model.named_parameters())
    assert ([*model.state_dict()], [name for name, _ in model.named_parameters()]) == before


def test_parameters_that_modules_have_in_lists_as_well_are_let_go() -> None:
    """An LSTM has them in one, `_flat_weights`: so each rank held the weights of those of all stages, and planned for them."""
    model = nn.ModuleList(nn.LSTM(4, 4) for _ in range(2))
    theirs, mine = cast("Sequence[nn.LSTM]", model)
    kept = weakref.ref(theirs.weight_ih_l0), weakref.ref(mine.weight_ih_l0)
    names = frozenset(name for name, _ in model.named_parameters() if name.startswith("1."))
    others = OtherStages(model, ["0", "1"], [(1, 2)], names)
    others.let_go()
    assert kept[0]() is None
    assert kept[1]() is mine._flat_weights[0]
    with others.there():
        assert theirs._flat_weights == list(theirs.parameters())
        assert {weight.device.type for weight in theirs._flat_weights} == {"meta"}
    assert [type(weight) for weight in theirs._flat_weights] == [Absent] * 4


def test_what_is_changed_in_place_between_parts_is_refused() -> None:
    torch.manual_seed(0)
    calls = _found(Towers(), rows(), square_loss)
    assert calls.refused == ("", *["what layers.0 returns is changed in place after it"] * 2)


def test_between_a_part_and_its_activation_in_place_there_is_no_cut() -> None:
    """There was one nowhere in such a model; and after a pooling layer less is sent."""
    model, batch, loss_fn, _ = built("vgg")
    calls = _found(model, batch, loss_fn)
    changed = {
        position: f"what {path} returns is changed in place after it" for position, path in ((1, 0), (3, 2), (6, 5))
    }
    assert calls.refused == tuple(changed.get(position, "") for position in range(9))
    assert calls.crossing_bytes(5) == calls.crossing_bytes(4) // 4


def test_an_activation_in_place_that_all_parts_share_is_one_of_each() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.relu(layer(self.relu(x + 1)))
            return x

    torch.manual_seed(0)
    model, batch = Shared(), rows()
    loss = batches.loss_of(model, batch, square_loss)
    loss.backward()
    whole = _gradients(model)
    calls = _found(model, batch, square_loss)
    assert [call.path for call in calls.calls] == [path for n in range(3) for path in ("relu", f"layers.{n}", "relu")]
    number = len(calls.calls)
    for end in [end for end in range(1, number) if not calls.refused[end]]:
        model.zero_grad()
        assert _by_stages(model, batch, square_loss, calls, (end, number)) == loss.item()
        for name, gradient in _gradients(model).items():
            torch.testing.assert_close(gradient, whole[name], rtol=0, atol=0)


def test_a_path_that_changes_is_refused_and_never_trained_wrong() -> None:
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    received = [meta.empty("cpu") for meta in map(calls.meta, calls.crossing(3))]
    model.__dict__["skipped"] = 2
    with pytest.raises(EngineError, match=r"calls blocks\.3 where it called blocks\.2 when it was cut"):
        StageModule(model, loss_fn, calls, 3, 7)(batch, *received)
    model, batch, loss_fn, _ = built("decoder")
    longer = {name: torch.cat([t, t], 1) for name, t in batch.items()}
    with pytest.raises(EngineError, match="what crosses between stages must have one shape"):
        StageModule(model, loss_fn, calls, 0, 3)(longer)


def test_a_model_of_one_part_is_refused() -> None:
    with pytest.raises(InputError, match="there is nothing to cut"):
        _found(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), rows(), square_loss)


@pytest.mark.parametrize("name", ["decoder", "tied", "resnet"])
def test_parts_take_what_the_trace_takes(name: str) -> None:
    model, batch, loss_fn, _ = built(name)
    trace = capture(StepSource(model, batch, loss_fn, lambda p: torch.optim.AdamW(p, fused=True))).trace
    found = part_calls(trace)
    calls = find_part_calls(model, batch, loss_fn, [call.module for call in found])
    parts = chain(trace, found, [Boundary(calls.crossing_bytes(b), calls.refused[b]) for b in range(1, len(found))])
    state = sum(part.state_bytes for part in parts.parts) + sum(shared.bytes for shared in parts.shared)
    there = trace.bytes_of(Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)
    assert state == pytest.approx(there, rel=0.01)
    assert bool(parts.shared) == (name == "tied")
    assert all(part.kept_bytes > 0 for part in parts.parts[1:-1])
    assert parts.stage(0, len(found)).state_bytes == state + parts.fixed_bytes


def test_blocks_are_taken_further_out_where_that_is_asked_for() -> None:
    model, batch, loss_fn, _ = built("resnet")
    assert [call.path for call in _found(model, batch, loss_fn, 1).calls] == ["stem", "groups.0", "groups.1", "head"]


class Alternating(nn.Module):
    """Two kinds of blocks in turn, inside a module that is nearly all of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleDict({"first": nn.Linear(16, 16), "layers": nn.ModuleList()})
        kinds = [
            lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
            lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        ]
        self.body["layers"].extend(kinds[number % 2]() for number in range(6))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body["first"](x)
        for layer in self.body["layers"].children():
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def test_blocks_of_two_kinds_in_turn_are_parts_as_a_whole() -> None:
    calls = _found(Alternating(), torch.randn(4, 3, 16), square_loss)
    assert [call.path for call in calls.calls] == ["body.first", *(f"body.layers.{n}" for n in range(6)), "head"]


def test_absent_tensors_have_a_shape_and_a_place_and_no_values() -> None:
    meta = Absent.like(torch.empty(2, 3), torch.device("cpu"))
    total = (meta + torch.ones(2, 3)).view(3, 2).float() @ torch.ones(2, 5)
    assert isinstance(total, Absent)
    assert (tuple(total.shape), total.device) == ((3, 5), torch.device("cpu"))
    assert not isinstance(torch.arange(4, device=meta.device), Absent)
    assert isinstance(meta.to("cpu"), Absent)
    for asks in (torch.Tensor.item, torch.Tensor.tolist, bool, float, torch.nonzero):
        with pytest.raises(
            EngineError,
            match="needs the values of a tensor, of an earlier stage or of the batch, that were not read when",
        ):
            asks(total.sum())


def test_what_is_computed_with_absent_tensors_is_the_same_whenever_it_is_asked_again() -> None:
    numbers = torch.arange(6).view(2, 3)
    absent = Absent.like(numbers, torch.device("cpu"))
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x * 2,
        lambda x: x * 2.0,  # equal numbers, another type
        lambda x: x * True,
        lambda x: x.float() * 1,
        lambda x: x.t(),
        lambda x: x.t() + x.t(),
        lambda x: functional.dropout(x.double(), 0.5),
        lambda x: torch.stack([x, x]).permute(2, 0, 1),
        lambda x: x.split(2, dim=1)[1],
        lambda x: x.new_zeros(4, dtype=torch.float16),
    ]
    for call in (*calls, *calls):
        made, like = call(absent), call(numbers)
        assert isinstance(made, Absent)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    changed = absent.float()
    assert changed.unsqueeze_(0).shape == (1, 2, 3)
    assert absent.float().shape == (2, 3)


def test_stages_placed_on_devices_give_the_bits_of_one_device() -> None:
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    loss = batches.loss_of(model, batch, loss_fn)
    loss.backward()
    whole = _gradients(model)
    model.zero_grad()
    ends, devices = (3, 7), ("cpu", "cpu")
    place(model, calls, ends, devices)
    with placed(model, calls, ends, devices):
        again = batches.loss_of(model, batch, loss_fn)
        again.backward()
    assert torch.equal(again, loss)
    assert all(torch.equal(gradient, whole[name]) for name, gradient in _gradients(model).items())


def test_each_stage_is_on_its_own_device() -> None:
    """With a meta device in place of the second one: what of the way there and back can be seen without two devices."""
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    place(model, calls, (3, 7), ("cpu", "meta"))
    where = {name: p.device.type for name, p in model.named_parameters()}
    assert {name for name, device in where.items() if device == "cpu"} == {
        name for name in where if name.startswith(("words", "start", "blocks.0", "blocks.1"))
    }
    seen: list[str] = []
    model.blocks[2].norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].device.type))
    with placed(model, calls, (3, 7), ("cpu", "meta")), pytest.raises(NotImplementedError, match="no data"):
        word_loss(model, words())  # the logits cannot come back from meta
    assert seen == ["meta"]
    with pytest.raises(InputError, match="one device for each stage"):
        place(Decoder(), calls, (3, 7), ("cpu",))


def test_only_what_the_last_part_gives_comes_back_after_a_forward_that_failed() -> None:
    model, batch, loss_fn, _ = built("decoder")
    calls = _found(model, batch, loss_fn)
    ends, devices = (3, 7), ("cpu", "meta")
    place(model, calls, ends, devices)
    with placed(model, calls, ends, devices):
        handle = model.blocks[2].register_forward_hook(_refuses)
        with pytest.raises(ValueError, match="enough"):
            word_loss(model, batch)
        handle.remove()
        with pytest.raises(NotImplementedError, match="no data"):
            word_loss(model, batch)


class HalfCheckpointed(nn.Module):
    """Two layers, the first in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False)).square().mean()


def test_only_what_the_last_part_gives_comes_back_beside_checkpoints() -> None:
    """Parts that backward makes again were counted as calls of the step."""
    model, batch = HalfCheckpointed(), (torch.randn(4, 8),)
    calls = find_part_calls(model, batch, lambda m, b: m(*b), ["first", "second"])
    ends, devices, steps = (1, 2), ("cpu", "cpu:0"), []
    with placed(model, calls, ends, devices), mock.patch.object(placement, "_moved", wraps=placement._moved) as moved:
        for _ in range(2):
            loss = model(*batch)
            steps.append([str(call.args[1]) for call in moved.call_args_list])
            loss.backward()
            moved.reset_mock()
    # Arguments and result of each part, and what the model returns.
    assert steps[0] == steps[1] == ["cpu", "cpu", "cpu", "cpu:0", "cpu:0", "cpu:0", "cpu"]


def _refuses(*_: object) -> None:
    raise ValueError("it is enough")


class Checkpointing(nn.Module):
    """Two layers, each in a checkpoint of its own.

    Args:
        reentrant: of which kind.
    """

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_cut_goes_through_a_checkpoint_and_any_between_two(*, reentrant: bool) -> None:
    """In backward the whole checkpoint is called again, and what an earlier stage has done of it is not there."""
    paths = [f"layers.{layer}.{number}" for layer in range(2) for number in range(2)]
    model, batch = Checkpointing(reentrant=reentrant), (torch.randn(4, 8, requires_grad=True),)
    calls = find_part_calls(model, batch, lambda m, b: m(*b), paths)
    assert [bool(reason) for reason in calls.refused] == [False, True, False, True]
    assert "are in one checkpoint of the model's own" in calls.refused[1]


def test_a_gradient_is_sent_without_the_tensor_that_it_is_a_part_of() -> None:
    """Of one sample, that of a long skip is: a schedule would hold all that a `cat` was given back until the message is gone."""
    skip = torch.randn(1, 4, 8, requires_grad=True)
    torch.cat([torch.randn(1, 4, 8), skip], 1).square().sum().backward()
    gradient = skip.grad
    assert gradient is not None
    assert gradient.untyped_storage().nbytes() == 2 * gradient.nbytes
    sent = alone(gradient)
    assert torch.equal(sent, gradient)
    assert sent.untyped_storage().nbytes() == gradient.nbytes
    assert alone(sent) is sent
