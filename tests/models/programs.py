"""Random tensor programs: what nobody would write, but PyTorch runs, must come out the same after recomputation.

A program is a list of instructions over a pool of live tensors. Instructions run as they are drawn, so each next one is
chosen among those that the tensors at hand allow. Writes in place change no shape, so they are drawn freely and tried
at the end: those which autograd refuses ("modified by an inplace operation") are struck out one by one. So nearly all
draws give a valid program, and the valid writes stay in.

torch's OpInfo looks similar but tests one operation at a time. Random programs as a test of program transformations
are due to Yang, Chen, Eide, Regehr 2011 (Csmith). Ours have no control flow, but for `Branching`: a program whose steps
differ from each other, as a counter, a value or a draw decides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from .built import LossFn

Tensors: TypeAlias = tuple[Tensor, ...]
ProgramBuilt: TypeAlias = tuple["Program", Tensor, LossFn]

LAST = 3  # the loss reads this many of the pool's last tensors
CLASSES = 50  # of programs that end in a loss head; more than any other layer makes
SHAPE = (4, 6, 8)
MAX_ELEMENTS = 2048  # operations that grow a tensor stop here
MAX_INSTRUCTIONS = 24


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on tensors of the pool.

    Attributes:
        name: a key of OPERATIONS.
        operands: places in the pool.
        sizes: of the parameters, for operations that have them.
    """

    name: str
    operands: tuple[int, ...]
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """How an instruction of one name is drawn and run.

    Attributes:
        run: takes the instruction's own part (an empty module if it has none) and its operands; returns tensors new to
            the pool, none for a write in place.
        arity: 1, or 2 for two operands of the same shape.
        fits: whether the first operand allows it.
        part: the submodule made from `sizes`.
        sizes: of the part, from the first operand.
        writes: whether it changes its first operand in place.
    """

    run: Callable[[nn.Module, Sequence[Tensor]], Tensors]
    arity: Literal[1, 2] = 1
    fits: Callable[[Tensor], bool] = lambda _: True
    part: Callable[..., nn.Module] = lambda *_: nn.Identity()
    sizes: Callable[[Tensor], tuple[int, ...]] = lambda _: ()
    writes: bool = False


class Pick(nn.Module):
    """Indices for index_select, as a buffer: with repetitions, in no order."""

    indices: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("indices", torch.randint(length, (length,)))


def _out(f: Callable[[Tensor], Tensor]) -> Operation:
    return Operation(lambda _, xs: (f(xs[0]),))


def _pair(f: Callable[[Tensor, Tensor], Tensor], fits: Callable[[Tensor], bool] = lambda _: True) -> Operation:
    return Operation(lambda _, xs: (f(xs[0], xs[1]),), arity=2, fits=fits)


def _write(f: Callable[[Sequence[Tensor]], object], arity: Literal[1, 2] = 1) -> Operation:
    def run(_: nn.Module, xs: Sequence[Tensor]) -> Tensors:
        f(xs)
        return ()

    return Operation(run, arity=arity, writes=True)


def _with_part(part: Callable[..., nn.Module], sizes: Callable[[Tensor], tuple[int, ...]]) -> Operation:
    return Operation(lambda own, xs: (own(xs[0]),), part=part, sizes=sizes, fits=_is_float)


def _cast(dtype: torch.dtype) -> Operation:
    return Operation(lambda _, xs: (xs[0].to(dtype),), fits=lambda x: x.dtype != dtype)


def _batch_norm(own: nn.Module, xs: Sequence[Tensor]) -> Tensors:
    flat: Tensor = own(xs[0].reshape(-1, xs[0].shape[-1]))
    return (flat.view(xs[0].shape),)


def _index_select(own: nn.Module, xs: Sequence[Tensor]) -> Tensors:
    assert isinstance(own, Pick)
    return (xs[0].index_select(0, own.indices),)


def _below_max(own: nn.Module, xs: Sequence[Tensor]) -> Tensors:
    del own
    values, indices = xs[0].max(dim=-1, keepdim=True)
    return values, xs[0].gather(-1, indices.flip(0)) - xs[0]


def _without_gradient(own: nn.Module, xs: Sequence[Tensor]) -> Tensors:
    del own
    with torch.no_grad():
        return (torch.sigmoid(xs[0] * 2),)


def _under_autocast(own: nn.Module, xs: Sequence[Tensor]) -> Tensors:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Twice the same layer: autocast casts its weight once and keeps the copy until the region ends.
        return (functional.gelu(own(own(xs[0]))),)


def _through_bf16(x: Tensor) -> Tensor:
    return functional.gelu(x.bfloat16()).float()


def _matmul_bf16(a: Tensor, b: Tensor) -> Tensor:
    return (a.bfloat16() @ b.bfloat16().transpose(-1, -2)).float() / a.shape[-1]


def _last(x: Tensor) -> tuple[int, ...]:
    return (x.shape[-1],)


def _is_float(x: Tensor) -> bool:
    return x.dtype == torch.float32  # as parameters are


def _may_double(x: Tensor) -> bool:
    return 2 * x.numel() <= MAX_ELEMENTS


def _square_is_small(x: Tensor) -> bool:
    return x.numel() // x.shape[-1] * x.shape[-2] <= MAX_ELEMENTS


def _last_is_even(x: Tensor) -> bool:
    return x.shape[-1] % 2 == 0


OPERATIONS: dict[str, Operation] = {
    "linear": _with_part(lambda inner: nn.Linear(inner, 8), _last),
    "narrow_linear": _with_part(lambda inner: nn.Linear(inner, 4, bias=False), _last),
    # Weights of more than one block of 8-bit state, and not of whole ones.
    "wide": _with_part(lambda inner: nn.Sequential(nn.Linear(inner, 40), nn.GELU(), nn.Linear(40, 8)), _last),
    "layer_norm": _with_part(nn.LayerNorm, _last),
    "batch_norm": Operation(_batch_norm, part=nn.BatchNorm1d, sizes=_last, fits=_is_float),
    "autocast": Operation(_under_autocast, part=lambda n: nn.Linear(n, n), sizes=_last, fits=_is_float),
    "index_select": Operation(_index_select, part=Pick, sizes=lambda x: (x.shape[0],)),
    "below_max": Operation(_below_max),
    "no_grad": Operation(_without_gradient),
    "relu": _out(functional.relu),
    "gelu": _out(functional.gelu),
    "tanh": _out(torch.tanh),
    "softmax": _out(lambda x: functional.softmax(x, dim=-1)),
    "dropout": _out(lambda x: functional.dropout(x, 0.3, training=True)),
    "clone": _out(torch.clone),
    "detach": _out(torch.detach),
    "bf16": _out(_through_bf16),
    "to_bf16": _cast(torch.bfloat16),
    "to_double": _cast(torch.float64),
    "to_float": _cast(torch.float32),
    "sum_broadcast": _out(lambda x: x + x.sum(-1, keepdim=True) / x.shape[-1]),
    "cumsum": _out(lambda x: x.cumsum(0) / x.shape[0]),
    "transpose": _out(lambda x: x.transpose(-1, -2)),
    "view": _out(lambda x: x.reshape(x.shape[1], x.shape[0], -1)),
    "tail": _out(lambda x: x[..., x.shape[-1] // 2 :]),
    "expand": Operation(lambda _, xs: (xs[0][:1].expand(xs[0].shape),)),
    "chunk": Operation(lambda _, xs: xs[0].chunk(2, dim=-1), fits=_last_is_even),
    "add": _pair(torch.add),
    "mul": _pair(torch.mul),
    "matmul": _pair(lambda a, b: a @ b.to(a.dtype).transpose(-1, -2) / a.shape[-1], fits=_square_is_small),
    "matmul_bf16": _pair(_matmul_bf16, fits=_square_is_small),
    "cat": _pair(lambda a, b: torch.cat([a, b], dim=-1), fits=_may_double),
    "where": _pair(lambda a, b: torch.where(a > b, a, b * 0.5)),
    "relu_": _write(lambda xs: functional.relu_(xs[0])),
    "add_": _write(lambda xs: xs[0].add_(xs[1]), arity=2),
    "mul_": _write(lambda xs: xs[0].mul_(xs[1]), arity=2),
    "scale_": _write(lambda xs: xs[0].mul_(0.5)),
    "slice_add_": _write(lambda xs: xs[0][..., :1].add_(1)),
    "row_copy_": _write(lambda xs: xs[0][0].copy_(xs[1][-1]), arity=2),
    "dropout_": _write(lambda xs: functional.dropout(xs[0], 0.3, training=True, inplace=True)),
}

# What draws at random gives other numbers in parts than in one piece, however right both are.
RANDOM = frozenset({"dropout", "dropout_"})
# What looks from one sample to another, or does not leave samples along the first dimension.
ACROSS_SAMPLES = frozenset({"batch_norm", "index_select", "below_max", "cumsum", "view", "expand", "row_copy_"})
WITHIN_SAMPLES = OPERATIONS.keys() - RANDOM - ACROSS_SAMPLES


class Program(nn.Module):
    """Runs its instructions in order on a pool which starts with the sample and a linear layer of it."""

    def __init__(self, instructions: tuple[Instruction, ...], seed: int) -> None:
        super().__init__()
        self.instructions = instructions
        self.seed = seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Linear(SHAPE[-1], SHAPE[-1])
            self.parts = nn.ModuleList(OPERATIONS[each.name].part(*each.sizes) for each in instructions)

    def forward(self, x: Tensor) -> Tensors:
        """Sample of shape SHAPE to the pool's last tensors."""
        pool = [x, self.stem(x)]
        for number in range(len(self.instructions)):
            self.run(number, pool)
        return tuple(pool[-LAST:])

    def run(self, number: int, pool: list[Tensor]) -> None:
        """One instruction; what it makes goes into the pool."""
        instruction = self.instructions[number]
        operands = [pool[place] for place in instruction.operands]
        pool += OPERATIONS[instruction.name].run(self.parts[number], operands)

    def __repr__(self) -> str:
        """As Python that makes it again: hypothesis prints this when a program fails."""
        return f"Program({self.instructions!r}, seed={self.seed})"


class Headed(Program):
    """A program that ends as language models do: one of its tensors goes through a linear layer into a cross entropy.

    Args:
        instructions, seed: as of `Program`.
        place: in the pool, of the tensor.
        features: of the tensor.
    """

    def __init__(self, instructions: tuple[Instruction, ...], seed: int, place: int, features: int) -> None:
        super().__init__(instructions, seed)
        self.place = place
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            self.head = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensors:
        """As of `Program`, with the logits before the rest."""
        pool = [x, self.stem(x)]
        for number in range(len(self.instructions)):
            self.run(number, pool)
        return (self.head(pool[self.place]), *pool[-LAST:])

    def __repr__(self) -> str:
        """As of `Program`."""
        return f"Headed({self.instructions!r}, {self.seed}, {self.place}, {self.head.in_features})"


Decision: TypeAlias = Literal["counter", "value", "draw"]
Change: TypeAlias = Literal["more", "write", "overwrite", "detach", "cast", "shape", "stop", "operand"]
DECISIONS: tuple[Decision, ...] = ("counter", "value", "draw")
CHANGES: tuple[Change, ...] = ("more", "write", "overwrite", "detach", "cast", "shape", "stop")


class Branching(Program):
    """A program with a branch: some of its forwards run something else after one of the instructions.

    Args:
        instructions, seed: as of `Program`.
        at: number of the instruction.
        decision: whether to take the branch. "counter": every second forward; "value": of the batch; "draw": at random.
        change: what the branch does to the newest tensor; "overwrite": to the one before it, which operations have read;
            "stop": leaves the rest out; "operand": the same operations on another tensor.

    Attributes:
        changed_is_read: whether an instruction or the loss reads the newest tensor, as of the last forward.
    """

    def __init__(
        self, instructions: tuple[Instruction, ...], seed: int, at: int, decision: Decision, change: Change
    ) -> None:
        super().__init__(instructions, seed)
        self.at, self.decision, self.change = at, decision, change
        self.forwards = 0
        self.changed_is_read = False

    def forward(self, x: Tensor) -> Tensors:
        """As of `Program`, but for the branch."""
        self.forwards += 1
        pool = [x, self.stem(x)]
        for number in range(len(self.instructions)):
            self.run(number, pool)
            if number == self.at:
                changed, taken = len(pool) - 1, self._decides(x)
                if taken and self.change == "stop":
                    break
                if self.change == "operand":
                    pool[-1] = self._one_of_two(pool[-1], taken)
                elif taken and self.change == "overwrite":
                    pool[-2].mul_(0.5)
                elif taken:
                    pool[-1] = self._changed(pool[-1])
        later = {place for each in self.instructions[self.at + 1 :] for place in each.operands}
        self.changed_is_read = changed in later or changed >= len(pool) - LAST
        return tuple(pool[-LAST:])

    def _decides(self, x: Tensor) -> bool:
        if self.decision == "counter":
            return self.forwards % 2 == 0
        return bool(x[0, 0, 0] > 0) if self.decision == "value" else bool(torch.rand(()) < 0.5)

    def _one_of_two(self, y: Tensor, taken: bool) -> Tensor:  # noqa: FBT001 - the branch
        """The same operations either way, on another operand."""
        one, other = torch.tanh(y), torch.sigmoid(y)
        picked = other if taken else one
        return torch.sin(torch.exp(picked * 0.5)) * torch.sigmoid(picked)

    def _changed(self, y: Tensor) -> Tensor:
        if self.change == "more":
            return torch.tanh(y) * 2
        if self.change == "write":
            return y.mul_(0.5)
        if self.change == "detach":
            return y.detach()
        if self.change == "cast":
            return y.bfloat16().to(y.dtype)
        # Other shapes on the way, the same at the end.
        return torch.cat([y, y], dim=-1).sigmoid()[..., : y.shape[-1]]

    def __repr__(self) -> str:
        """As of `Program`."""
        return f"Branching({self.instructions!r}, {self.seed}, {self.at}, {self.decision!r}, {self.change!r})"


def program_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean of the mean squares of the program's last tensors."""
    return torch.stack([out.square().mean().float() for out in model(batch)]).mean()


def headed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the logits, and a little of what the program's other tensors give."""
    logits, *others = model(batch)
    labels = (batch.sum(-1).abs() * 7).long() % CLASSES
    rest = torch.stack([out.square().mean().float() for out in others]).mean()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * rest


def sample_of(seed: int) -> Tensor:
    """The sample that goes with a program of this seed."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@st.composite
def programs(draw: st.DrawFn, names: Collection[str] = OPERATIONS.keys()) -> ProgramBuilt:
    """A program with its sample and loss, on which plain PyTorch's step runs and gives finite numbers.

    Dropout draws from the global generator: seed it before each step. Batch norm updates buffers: build `Program(...)`
    anew, or copy it, for each run that is compared.

    Args:
        draw: hypothesis's own.
        names: of the operations that may occur.
    """
    seed = draw(st.integers(0, 2**16))
    sample = sample_of(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = _draw_instructions(draw, sample.clone(), seed, names)
        kept = _strike_out_refused_writes(drawn, sample, seed)
        assume(_gives_finite_numbers(Program(kept, seed), sample))
    return Program(kept, seed), sample, program_loss


@st.composite
def branching(draw: st.DrawFn) -> ProgramBuilt:
    """A program with a branch, either way of which runs; as of `programs`."""
    made, sample, loss_fn = draw(programs())
    assume(made.instructions)  # refused writes may have been all there was
    at = draw(st.integers(0, len(made.instructions) - 1))
    decision, change = draw(st.sampled_from(DECISIONS)), draw(st.sampled_from(CHANGES))
    program = Branching(made.instructions, made.seed, at, decision, change)
    with torch.random.fork_rng():
        trial = Branching(made.instructions, made.seed, at, "counter", change)
        for runs_well in (_runs, _gives_finite_numbers):
            for forwards in (0, 1):  # one way, and the other
                trial.forwards = forwards
                assume(runs_well(trial, sample))
    assume(torch.equal(sample, sample_of(made.seed)))  # the branch may write where a view of the batch is
    return program, sample, loss_fn


@st.composite
def headed(draw: st.DrawFn) -> ProgramBuilt:
    """A program that ends in a loss head; as of `programs`."""
    made, sample, _ = draw(programs())
    pool = [sample, made.stem(sample)]
    with torch.random.fork_rng():
        torch.manual_seed(made.seed)
        for number in range(len(made.instructions)):
            made.run(number, pool)
    rows = [place for place, y in enumerate(pool) if y.dtype == torch.float32 and y.shape[:2] == SHAPE[:2]]
    place = rows[-1 - draw(st.integers(0, len(rows) - 1))]
    program = Headed(made.instructions, made.seed, place, pool[place].shape[-1])
    with torch.random.fork_rng():
        torch.manual_seed(made.seed)
        # What is read now may be what a write has spoiled: only tensors that the loss did not reach before.
        assume(_runs(copy.deepcopy(program), sample, headed_loss))
        assume(_gives_finite_numbers(copy.deepcopy(program), sample, headed_loss))
    return program, sample, headed_loss


def _draw_instructions(draw: st.DrawFn, sample: Tensor, seed: int, names: Collection[str]) -> tuple[Instruction, ...]:
    pool = [sample, Program((), seed).stem(sample)]
    instructions: list[Instruction] = []
    for _ in range(draw(st.integers(1, MAX_INSTRUCTIONS))):
        # Counted from the end, so that programs shrink to chains.
        place = len(pool) - 1 - draw(st.integers(0, len(pool) - 1))
        x = pool[place]
        # Writes stand twice: they are where recomputation goes wrong.
        doubled = (name for name, each in OPERATIONS.items() if name in names for _ in range(1 + each.writes))
        name = draw(st.sampled_from([name for name in doubled if _allows(OPERATIONS[name], x, sample)]))
        operation = OPERATIONS[name]
        operands = [place]
        if operation.arity == 2:
            alike = [other for other, y in enumerate(pool) if y.shape == x.shape]
            operands.append(draw(st.sampled_from(alike)))
        instruction = Instruction(name, tuple(operands), operation.sizes(x))
        instructions.append(instruction)
        if not operation.writes:  # whether a write is allowed shows later; it changes no shape
            pool += operation.run(operation.part(*instruction.sizes), [pool[each] for each in operands])
    return tuple(instructions)


def _allows(operation: Operation, x: Tensor, sample: Tensor) -> bool:
    if operation.writes and x.untyped_storage().data_ptr() == sample.untyped_storage().data_ptr():
        return False  # a step that changed its batch could not be repeated
    return operation.fits(x)


def _strike_out_refused_writes(drawn: tuple[Instruction, ...], sample: Tensor, seed: int) -> tuple[Instruction, ...]:
    """The longest program found by adding the writes in order, each if forward and backward pass still run with it.

    Writes put nothing into the pool, so the other instructions keep their meaning.
    """
    writes = [place for place, each in enumerate(drawn) if OPERATIONS[each.name].writes]
    kept: set[int] = set(range(len(drawn))) - set(writes)
    for place in writes:
        trial = kept | {place}
        if _runs(Program(tuple(drawn[each] for each in sorted(trial)), seed), sample):
            kept = trial
    return tuple(drawn[each] for each in sorted(kept))


def _runs(program: Program, sample: Tensor, loss_fn: LossFn = program_loss) -> bool:
    try:
        loss = loss_fn(program, sample)
        if loss.requires_grad:
            loss.backward()
    except RuntimeError:
        return False  # at once (a write into expanded memory, into one of several views) or in the backward pass
    return True


def _gives_finite_numbers(program: Program, sample: Tensor, loss_fn: LossFn = program_loss) -> bool:
    loss = loss_fn(program, sample)
    if not loss.requires_grad or not loss.isfinite():
        return False
    loss.backward()
    return all(bool(each.grad.isfinite().all()) for each in program.parameters() if each.grad is not None)
