"""Whether a batch splits is decided by gradients; tokens are weighted as the whole batch weights them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
import small
from memfit import batches
from memfit.capture import splitting
from memfit.capture.splitting import find_splitting
from models import CASES, Case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.alternate(0)
@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=lambda c: c.name)
def test_the_verdict_is_the_true_one(case: Case) -> None:
    model, sample, loss_fn = case.build()
    before = small.state_of(model)
    found = find_splitting(model, sample, loss_fn)
    assert (found.weights is not None) is case.splits, found
    assert (found.reason == "") is case.splits
    assert small.same(small.state_of(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_one_sample_of_each_rank_is_weighted_as_several_are() -> None:
    """Ranks with one sample each counted samples and not tokens, and pipelines of them were refused."""
    assert find_splitting(small.chain(1), small.rows(1), small.squared_error).weights == "samples"
    assert find_splitting(small.chain(1, batch_norm=True), small.rows(1), small.squared_error).weights is None


def test_a_loss_that_is_a_sum_is_added_up() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum()

    found = find_splitting(small.chain(1), small.rows(8), loss_fn)
    assert found.weights == "sum"


def test_a_model_that_takes_no_fewer_samples_is_told() -> None:
    class AllOrNothing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 8:
                raise RuntimeError("eight rows belong together")
            return super().forward(x)

    found = find_splitting(AllOrNothing(32, 32), small.rows(8), small.squared_error)
    assert found.weights is None
    assert "a part of the batch cannot be run alone (RuntimeError: eight rows belong together)" in found.reason


def test_a_part_that_cannot_be_run_alone_is_told() -> None:
    class Whole(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) < 2:
                raise ValueError("at least two rows")
            return super().forward(x)

    found = find_splitting(Whole(32, 32), small.rows(8), small.squared_error)
    assert found.weights is None
    assert "a part of the batch cannot be run alone (ValueError: at least two rows)" in found.reason


def through_a_dead_unit(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(torch.relu(x)).square().mean()
    return out


@pytest.mark.parametrize("dead", [0, 4, 20, 100])
def test_where_the_first_samples_have_no_gradient_others_are_looked_at(dead: int) -> None:
    x = torch.rand(128, 8)
    x[:dead] *= -1.0
    assert find_splitting(nn.Linear(8, 8, bias=False), x, through_a_dead_unit).weights == "samples"


@pytest.mark.parametrize(("rows", "told"), [(8, 8), (512, 256)])
def test_where_none_of_many_samples_has_one_they_are_counted(rows: int, told: int) -> None:
    found = find_splitting(nn.Linear(8, 8, bias=False), -torch.rand(rows, 8), through_a_dead_unit)
    assert found.weights is None
    assert found.reason == f"the gradient of {told} samples is 0.0, so nothing can be compared"


@pytest.mark.parametrize("sign", [1, -1])
def test_what_mixes_samples_only_once_the_model_has_moved_is_seen(sign: int) -> None:
    """KTO (https://arxiv.org/abs/2402.01306): a divergence over the batch, zero at the start and never less, moves each sample's loss."""
    model, reference = small.chain(1), small.chain(1)
    reference.load_state_dict(model.state_dict())

    def kto(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            start = reference(batch[0]).sum(1)
        gain = sign * (model(batch[0]).sum(1) - start)
        divergence = gain.detach().mean().clamp(min=0)
        return torch.sigmoid(divergence - gain).mean()

    versions = [p._version for p in model.parameters()]
    found = find_splitting(model, small.rows(8), kto)

    assert found.weights is None
    assert "mixes the samples of a batch" in found.reason
    assert [p._version for p in model.parameters()] == versions  # planning leaves no trace
    assert small.same(small.state_of(model), small.state_of(reference))


def test_a_student_that_starts_as_its_teacher_splits() -> None:
    model, teacher = small.chain(1), small.chain(1)
    teacher.load_state_dict(model.state_dict())

    def distilled(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), teacher(batch[0]).detach())

    assert find_splitting(model, small.rows(8), distilled).weights == "samples"


def test_a_model_that_fails_off_its_parameters_is_compared_at_them() -> None:
    class Unit(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not bool((self.bias == 1).all()):
                raise RuntimeError("the bias is one")
            return super().forward(x)

    model = Unit(32, 32)
    nn.init.ones_(model.bias)
    assert find_splitting(model, small.rows(8), small.squared_error).weights == "samples"


def test_gradients_of_nothing_cannot_be_compared() -> None:
    found = find_splitting(small.chain(1), small.rows(8), lambda m, b: 0 * small.squared_error(m, b))
    assert found.weights is None
    assert "nothing can be compared" in found.reason


# -- in doubt ---------------------------------------------------------------------------------------------------------------


class Looking(nn.Module):
    """A layer, and as much of a batch norm as wanted; whatever else a test puts between."""

    def __init__(self, strength: float, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.BatchNorm1d(8), nn.Linear(32, 32)
        self.strength, self.between = strength, between

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self.first(x))
        if self.strength:
            h = h + self.strength * self.norm(h.reshape(-1, 8)).view(h.shape)
        y: Tensor = self.last(h)
        return y


def cancelling(count: int = 4) -> tuple[Tensor, Tensor]:
    """Samples whose gradients nearly add up to nothing, so that rounding is a large share of what is left."""
    x, y = small.rows(count)
    x[1::2], y[1::2] = x[::2], -y[::2] * (1 + 1e-4)
    return x, y


def product(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) * y).mean()


def in_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing ran in float64."""
    monkeypatch.setattr(splitting, "_differences_in_float64", lambda *_: None)


def test_a_standard_deviation_over_the_batch_is_named_and_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    def standardised(model: nn.Module, batch: Any) -> Tensor:
        x, advantages = batch
        return (model(x) * (advantages - advantages.mean()) / advantages.std()).mean()

    x, _ = small.rows(8)
    found = find_splitting(nn.Linear(x.shape[1], 1), (x, torch.randn(8, 1)), standardised)
    assert found.weights is None
    assert "standard deviation over the batch" in found.reason
    assert not recwarn.list


@pytest.mark.parametrize("strength", [2e-5, 5e-5, 1e-4])
def test_a_batch_norm_of_little_effect_is_found(strength: float) -> None:
    model = Looking(strength)
    before = small.state_of(model)
    found = find_splitting(model, small.rows(8), small.squared_error)
    assert found.weights is None
    assert 1e-5 < found.error < 1e-4
    assert "do not add up" in found.reason
    assert small.same(small.state_of(model), before)


@pytest.mark.slow
@given(st.floats(-5.0, 0.0))
def test_a_batch_norm_of_any_effect_is_found(exponent: float) -> None:
    assert find_splitting(Looking(10**exponent), small.rows(8), small.squared_error).weights is None


@pytest.mark.slow
@given(st.floats(-5.0, 0.0))
def test_what_splits_is_accepted_if_ill_conditioned(exponent: float) -> None:
    """The share of the gradients that is left over, down to where fp32 has lost most digits."""
    x, y = small.rows(4)
    x[1::2], y[1::2] = x[::2], -y[::2] * (1 + 10**exponent)
    assert find_splitting(Looking(0.0), (x, y), product).weights == "samples"


def test_an_ill_conditioned_program_that_splits_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = Looking(0.0), cancelling()
    found = find_splitting(model, sample, product)
    assert found.weights == "samples"
    assert found.error < 1e-9
    in_own_precision(monkeypatch)
    alone = find_splitting(model, sample, product)
    assert alone.weights is None
    assert alone.error > splitting.FP32_TOLERANCE


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda h: torch.tanh(h).float(),
    "softmax in float": lambda h: functional.softmax(h, dim=-1, dtype=torch.float32),
    "a constant of its own": lambda h: h * torch.linspace(0, 1, 32) + torch.zeros(32, dtype=torch.float32),
    "written into": lambda h: torch.zeros(len(h), 32).index_put_((torch.arange(len(h)),), torch.tanh(h)),
    "complex": lambda h: torch.view_as_real(torch.fft.fft(torch.view_as_complex(h.view(-1, 16, 2).float()))).flatten(1),
    "drawn": lambda h: h + torch.randn(32) * torch.rand_like(h),
}


@pytest.mark.parametrize("between", CASTS.values(), ids=CASTS)
def test_programs_that_name_a_precision_are_run_in_float64(between: Callable[[Tensor], Tensor]) -> None:
    found = find_splitting(Looking(0.0, between), cancelling(), product)
    assert found.weights == "samples"
    assert found.error < 1e-9


def test_autocast_is_decided_in_float64() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return small.squared_error(model, batch)

    found = find_splitting(Looking(0.0), small.rows(8), loss_fn)
    assert found.weights == "samples"
    assert found.error < 1e-9
    assert find_splitting(Looking(1e-3), small.rows(8), loss_fn).weights is None  # less than bfloat16 rounds


def test_casts_to_16_bits_are_decided_in_float64() -> None:
    found = find_splitting(Looking(0.0, lambda h: torch.tanh(h.half()).to(h.dtype)), small.rows(8), small.squared_error)
    assert found.weights == "samples"
    assert found.error < 1e-9


def test_models_of_16_bits_are_decided_in_float64() -> None:
    x, y = small.rows(8)
    sample = (x.bfloat16(), y.bfloat16())
    found = find_splitting(Looking(0.0).bfloat16(), sample, small.squared_error)
    assert found.weights == "samples"
    assert found.error < 1e-9
    assert find_splitting(Looking(1e-2).bfloat16(), sample, small.squared_error).weights is None


def test_tensors_a_loss_closes_over_are_run_in_float64() -> None:
    mask = torch.linspace(0.1, 1.0, 32)
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    found = find_splitting(
        Looking(0.0), cancelling(), lambda m, b: (functional.linear(m(b[0]), weight) * b[1] * mask).mean()
    )
    assert found.weights == "samples"
    assert found.error < 1e-9


def _bits(h: Tensor) -> Tensor:
    return torch.tanh(h) * (h.detach().view(torch.int32) > -(2**31))


def test_what_cannot_run_in_float64_is_held_to_the_promise() -> None:
    """No second chance for the ill-conditioned, nor for a batch norm of little effect."""
    assert find_splitting(Looking(0.0, _bits), small.rows(8), small.squared_error).weights == "samples"
    assert find_splitting(Looking(0.0, _bits), cancelling(), product).weights is None
    assert find_splitting(Looking(5e-5, _bits), small.rows(8), small.squared_error).weights is None
    # Where 16-bit operations run, all that is known is that wrong weights are off by more.
    rough = find_splitting(Looking(0.0, lambda h: _bits(h).bfloat16().float()), small.rows(8), small.squared_error)
    assert rough.weights == "samples"
    assert 1e-4 < rough.error < splitting.LOW_PRECISION_TOLERANCE


def test_of_large_models_no_second_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "LARGE_MODEL_PARAMETERS", 1000)
    monkeypatch.setattr(splitting, "_differences_in_float64", lambda *_: pytest.fail("a copy in float64"))
    assert find_splitting(Looking(0.0), small.rows(8), small.squared_error).weights == "samples"
    assert find_splitting(Looking(5e-5), small.rows(8), small.squared_error).weights is None


def test_without_doubt_nothing_is_compared_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "_differences_in_float64", lambda *_: pytest.fail("compared again"))
    assert find_splitting(small.chain(2), small.rows(8), small.squared_error).weights == "samples"
    assert find_splitting(small.chain(2, batch_norm=True), small.rows(8), small.squared_error).weights is None


# -- tokens ----------------------------------------------------------------------------------------------------------------

LENGTHS = (5, 10, 60, 125)
VOCABULARY = 32


def batch(*, names: bool, columns: int = 125) -> Any:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), columns), generator=generator)
    labels = (ids * 7 + 3) % VOCABULARY
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = 0
        labels[row, length:] = -100
    # Rows of different lengths speak different languages, so that their gradients differ.
    ids[:2] = ids[:2] // 4
    return {"ids": ids, "labels": labels} if names else (ids, labels)


def tokens_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, VOCABULARY))


def token_loss(model: nn.Module, given: Any) -> Tensor:
    ids, labels = given.values() if isinstance(given, dict) else given
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def shifted_loss(model: nn.Module, given: Any) -> Tensor:
    ids, labels = given.values() if isinstance(given, dict) else given
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradient(model: nn.Module, loss_fn: Any, parts: list[Any], shares: list[float]) -> Tensor:
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for part, share in zip(parts, shares, strict=True):
        found = torch.autograd.grad(loss_fn(model, part), list(model.parameters()))
        total += share * torch.cat([g.flatten() for g in found]).double()
    return total


@pytest.mark.parametrize("names", [True, False], ids=["by name", "in a tuple"])
@pytest.mark.parametrize(("loss_fn", "kind"), [(token_loss, "tokens"), (shifted_loss, "next_tokens")])
def test_tokens_are_weighted_as_the_whole_batch_weights_them(loss_fn: Any, kind: str, *, names: bool) -> None:
    model, whole = tokens_model(), batch(names=names)
    found = find_splitting(model, whole, loss_fn)
    assert found.weights is not None
    assert found.weights.startswith(f"{kind}:")
    right = gradient(model, loss_fn, [whole], [1.0])
    for sizes in ([1, 1, 1, 1], [2, 2], [3, 1]):
        parts = batches.split(whole, sizes)
        shares = batches.shares(parts, found.weights)
        assert shares is not None
        assert sum(shares) == pytest.approx(1)
        added = gradient(model, loss_fn, parts, shares)
        assert float((added - right).norm() / right.norm()) < 1e-5
    means = gradient(model, loss_fn, batches.split(whole, [1, 1, 1, 1]), [0.25] * 4)
    assert float((means - right).norm() / right.norm()) > 0.1  # what would be trained by mistake


@pytest.mark.parametrize(("loss_fn", "kind"), [(token_loss, "tokens"), (shifted_loss, "next_tokens")])
def test_short_texts_of_one_length_are_weighted_as_texts_of_several_lengths_are(loss_fn: Any, kind: str) -> None:
    """All labels of the sample that is given fewer of them were masked: what the others count for was in one proportion under either weighting."""
    whole = batch(names=True)
    whole["labels"] = whole["labels"].clamp(min=0)
    whole["labels"][:, 3:] = batches.IGNORED_LABEL
    assert find_splitting(tokens_model(), whole, loss_fn).weights == f"{kind}:labels"


@pytest.mark.parametrize("samples", [4, 2])
@pytest.mark.parametrize(
    "counting",
    [[(1, 5), (1, 6), (1, 7), (1, 8)], [(0, 10), (0, 20), (0, 15), (0, 20)], [(4, 9), (2, 30), (9, 20), (9, 30)]],
    ids=str,
)
@pytest.mark.parametrize(("loss_fn", "kind"), [(token_loss, "tokens"), (shifted_loss, "next_tokens")])
def test_whether_labels_are_shifted_is_seen_where_first_labels_do_not_show_it(
    loss_fn: Any, kind: str, counting: list[tuple[int, int]], samples: int
) -> None:
    """All samples began with masked labels, or first labels were in the proportion of all: either weighting was right for these, and not for others."""
    whole = {name: tensor[-samples:] for name, tensor in batch(names=True, columns=30).items()}
    whole["labels"] = torch.full_like(whole["ids"], batches.IGNORED_LABEL)
    for row, (begin, end) in enumerate(counting[-samples:]):
        whole["labels"][row, begin:end] = whole["ids"][row, begin:end]
    assert find_splitting(tokens_model(), whole, loss_fn).weights == f"{kind}:labels"


@pytest.mark.parametrize(("loss_fn", "kind"), [(token_loss, "tokens"), (shifted_loss, "next_tokens")])
def test_tokens_of_a_single_text_are_weighted_as_those_of_several_are(loss_fn: Any, kind: str) -> None:
    one = {name: tensor[:1] for name, tensor in batch(names=True).items()}
    assert find_splitting(tokens_model(), one, loss_fn).weights == f"{kind}:labels"

    def weighed(model: nn.Module, given: Any) -> Tensor:
        return loss_fn(model, (given["ids"], given["labels"])) * given["of_two_classes"].sum()

    with_constant = {**one, "of_two_classes": torch.tensor([0.4, 0.6])}
    assert find_splitting(tokens_model(), with_constant, weighed).weights == f"{kind}:labels"


def test_the_engine_accumulates_the_whole_batchs_gradient() -> None:
    model, whole = tokens_model(), batch(names=True)
    right = [p.grad for p in _trained(model, whole, 1)]
    found = [p.grad for p in _trained(model, whole, 4)]
    difference = sum(float((a - b).norm() ** 2) for a, b in zip(right, found, strict=True)) ** 0.5
    norm = sum(float(a.norm() ** 2) for a in right) ** 0.5
    assert 0 < difference / norm < 1e-5


class Holds(torch.optim.SGD):
    """Changes nothing and keeps what it was given."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.kept = [p.grad.clone() for p in self.param_groups[0]["params"]]


class _Kept:
    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _trained(model: nn.Module, whole: Any, parts: int) -> list[_Kept]:
    made = memfit.plan(model, whole, token_loss, 1 << 40, None, fixed={"micro_batches": parts})
    optimizer = Holds(model.parameters(), lr=0.1)
    engine = memfit.apply(made, model, token_loss, optimizer)
    assert engine.step(whole).micro_batches == parts
    return [_Kept(g) for g in optimizer.kept]


def test_labels_without_padding_in_the_sample_still_count_tokens() -> None:
    """The sample may show no padding where later batches have it."""
    whole = batch(names=True)
    whole["labels"] = whole["labels"].clamp(min=0)
    found = find_splitting(tokens_model(), whole, token_loss)
    assert found.weights == "tokens:labels"


@pytest.mark.parametrize("form", ["tuple", "targets"])
def test_labels_of_any_name_without_padding_in_the_sample_still_count_tokens(form: str) -> None:
    ids, labels = batch(names=False)
    whole: Any = (ids, labels.clamp(min=0)) if form == "tuple" else {"ids": ids, "targets": labels.clamp(min=0)}
    found = find_splitting(tokens_model(), whole, token_loss)
    assert found.weights in {"tokens:1", "tokens:targets"}


def test_a_model_on_meta_is_checked_with_values_of_its_own() -> None:
    with torch.device("meta"):
        absent, normed = small.chain(2), small.chain(1, batch_norm=True)
    made = memfit.plan(absent, small.rows(16), small.squared_error, "1GiB", small.adamw, fixed={"micro_batches": 4})
    there = memfit.plan(
        small.chain(2), small.rows(16), small.squared_error, "1GiB", small.adamw, fixed={"micro_batches": 4}
    )
    assert made.choices == there.choices
    assert made.prediction.peak_bytes == there.prediction.peak_bytes
    assert all(parameter.is_meta for parameter in absent.parameters())
    with pytest.raises(memfit.SplitError, match="cannot be honoured"):
        memfit.plan(normed, small.rows(16), small.squared_error, "1GiB", small.adamw, fixed={"micro_batches": 4})


class Tables(nn.Module):
    """A bag of words whose gradient is sparse, and weights that are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, small.WIDTH, mode="sum", sparse=True)
        self.filters = nn.Parameter(torch.randn(small.WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, words: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.bag(words)) * self.filters, n=small.WIDTH)


def test_gradients_that_are_sparse_or_complex_are_compared() -> None:
    sample = torch.randint(100, (16, 5)), torch.randn(16, small.WIDTH)
    assert find_splitting(Tables(), sample, small.squared_error).weights == "samples"


class Again(nn.Module):
    """Under checkpoints of the kind that runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.body, x.detach().requires_grad_(), use_reentrant=True)
        return made


def test_reentrant_checkpoints_are_compared_and_leave_no_gradient() -> None:
    model, sample = Again(), small.rows(16)
    assert find_splitting(model, sample, small.squared_error).weights == "samples"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_updates_parameters_as_their_gradients_come_is_not_set_off() -> None:
    model, sample = Again(), small.rows(16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    assert find_splitting(model, sample, small.squared_error).weights is None
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("takes", ["by backward", "by backward, and clears", "by grad"])
def test_a_loss_that_touches_gradients_does_not_split(takes: str) -> None:
    """Adversarial training, whose step towards worse inputs leaves gradients in the parameters, clears those that are there, or does neither."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        first = small.squared_error(model, (x, batch[1]))
        if takes == "by grad":
            (gradient,) = torch.autograd.grad(first, x)
        else:
            first.backward()
            gradient = x.grad
        if takes == "by backward, and clears":
            model.zero_grad()
        return small.squared_error(model, (batch[0] + 0.1 * gradient.sign(), batch[1]))

    model = small.chain(1)
    found = find_splitting(model, small.rows(8), loss_fn)
    assert found.weights == ("samples" if takes == "by grad" else None)
    assert takes == "by grad" or "itself changes gradients of parameters" in found.reason
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_list_with_a_tensor_for_each_sample_is_told() -> None:
    """Images of unlike sizes, whose first dimension is colours."""
    images = [torch.randn(3, small.WIDTH) for _ in range(6)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        y: Tensor = model(torch.stack([image.mean(0) for image in batch["images"]]))
        return functional.cross_entropy(y, batch["labels"])

    found = find_splitting(small.chain(1), {"images": images, "labels": torch.arange(6)}, loss)
    assert found.weights is None
    assert (
        "along the first dimension of 'images.0' (3 of them), and a list with a tensor for each sample" in found.reason
    )


def test_terms_that_are_averaged_over_labels_and_over_samples_are_told() -> None:
    """Of two tasks, one has a label for each pixel and one for each sample."""
    sample = (torch.randn(16, 4, small.WIDTH), torch.randint(8, (16, 4)), torch.randint(8, (16,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0])
        each = functional.cross_entropy(y.flatten(0, 1), batch[1].flatten())
        return each + functional.cross_entropy(y.mean(1), batch[2])

    found = find_splitting(small.chain(1), sample, loss)
    assert found.weights is None
    assert "averaged over labels that are not masked, and another one over samples" in found.reason


def test_a_loss_that_leaves_a_class_out_is_found_where_a_sample_is_of_it() -> None:
    """Only the last sample is."""
    x, labels = torch.randn(16, small.WIDTH), torch.arange(16) % 9 + 1
    labels[-1] = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0)

    assert find_splitting(small.chain(1), (x, labels), loss).weights != "samples"
