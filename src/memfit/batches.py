"""A batch: its structure, its size, how to split it, and how a model makes a loss of it.

A batch is a tensor, or a tuple, list or mapping that holds tensors. Samples lie along dimension 0 of every tensor that has the batch's length there, and along
lists of plain values (names, paths) that are as long.
"""

from __future__ import annotations

import copy
import math
import re
from collections import UserDict
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from memfit.errors import BatchError, InputError

IGNORED_LABEL: Final = -100  # what torch's cross entropy leaves out of its mean

Batch = Any
LossFunction = Callable[[torch.nn.Module, Batch], torch.Tensor]


def leaves(batch: Batch) -> list[torch.Tensor]:
    """The tensors of a batch, in a fixed order."""
    return [
        leaf for leaf in pytree.tree_leaves(_plain(batch), is_leaf=_is_list_of_values) if isinstance(leaf, torch.Tensor)
    ]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """The same batch with every tensor replaced."""
    return _map_all(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _map_all(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """The same batch with every leaf replaced."""
    return _in_its_class(pytree.tree_map(function, _plain(batch), is_leaf=_is_list_of_values), batch)


def flattened(batch: Batch) -> tuple[list[Any], Any]:
    """All leaves of a batch, tensors and others, in a fixed order, and what `rebuilt` takes."""
    found, structure = pytree.tree_flatten(_plain(batch), is_leaf=_is_list_of_values)
    return found, (structure, _in_its_class({}, batch))


def rebuilt(leaves: Iterable[Any], structure: Any) -> Batch:
    """Inverse of `flattened`, with other leaves."""
    plain, like = structure
    return _in_its_class(pytree.tree_unflatten(leaves, plain), like)


def _plain(batch: Batch) -> Batch:
    # transformers' BatchEncoding is a UserDict, which pytree would take for a leaf.
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _in_its_class(made: Batch, given: Batch) -> Batch:
    """A dictionary in the class of the batch that it is made of, where losses may ask for `batch.input_ids`."""
    if not isinstance(given, UserDict):
        return made
    found = copy.copy(given)
    found.data = made
    return found


def _is_list_of_values(node: Any) -> bool:
    """Whether a node is one leaf: a list of plain values, or a tuple of texts, which torch's collate function makes of them."""
    kinds = _VALUES if type(node) is list else (str, bytes) if type(node) is tuple else ()
    return bool(kinds) and len(node) > 0 and all(type(value) in kinds for value in node)


_VALUES: Final = (str, bytes, bool, int, float, type(None))


def size(batch: Batch) -> int:
    """Number of samples: the length of dimension 0 of the first tensor that has one.

    Raises:
        BatchError: no tensor in it has a dimension, or one is nested.
    """
    found = leaves(batch)
    if any(leaf.is_nested for leaf in found):
        raise BatchError(
            "the batch holds a nested tensor, of which no samples can be taken: give one padded tensor and the lengths, and make the nested one of them in the "
            "model or the loss function"
        )
    for leaf in found:
        if leaf.dim() > 0:
            return int(leaf.shape[0])
    raise BatchError(
        f"the batch holds no tensor with a dimension{_what_instead(batch)}: memfit needs at least one whose first dimension counts samples"
    )


def _what_instead(batch: Batch) -> str:
    """What a batch holds in place of tensors, and how its user would make a batch of it."""
    if isinstance(batch, torch.Tensor):
        return " but one number"
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(each, int) for each in batch):
        return f" but numbers (if they are its shape, give torch.zeros({', '.join(map(str, batch))}))"
    if batch is None:
        return ", it is None"
    kinds = sorted({type(leaf).__name__ for leaf in pytree.tree_leaves(_plain(batch))})
    held = f" but {', '.join(kinds)}" if kinds else ""
    if "ndarray" in kinds:
        return f"{held} (torch.from_numpy makes a tensor of an array)"
    if any(isinstance(each, torch.Tensor) for each in getattr(batch, "__dict__", {}).values()):
        return f"{held} (of an object that holds tensors, give these in a dictionary: vars(batch))"
    if isinstance(batch, Iterable) and not isinstance(batch, (str, Mapping, list, tuple, torch.Tensor)):
        return f"{held} (of what gives batches, hand over one: next(iter(loader)))"
    return held


def counts_samples(leaf: Any, samples: int) -> bool:
    """Whether a leaf of a batch of so many samples is a tensor with them along its first dimension."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples


def split(batch: Batch, sizes: Sequence[int], whole: Container[str] = ()) -> list[Batch]:
    """Views of the batch with `sizes` samples each.

    Tensors without the batch's length in front go whole into every part, as do the leaves that `whole` names.
    """
    total = size(batch)
    if sum(sizes) != total:
        raise BatchError(f"cannot split {total} samples into parts of {list(sizes)}")
    return [batch] if len(sizes) == 1 else sliced(batch, sizes, whole)


def sliced(batch: Batch, sizes: Sequence[int], whole: Container[str] = ()) -> list[Batch]:
    """As `split`, for a batch of which some tensors are not there, so that it cannot tell its own size."""
    total = sum(sizes)
    parts = []
    start = 0
    for length in sizes:
        stop = start + length

        def part(path: Any, leaf: Any, a: int = start, b: int = stop) -> Any:
            return leaf[a:b] if _along_samples(leaf, total) and leaf_name(path) not in whole else leaf

        parts.append(map_leaves(part, batch))
        start = stop
    return parts


def repeated(batch: Batch, samples: int) -> Batch:
    """A batch of so many samples, which are this one's over and over; tensors without the batch's length in front stay as they are."""
    have = size(batch)
    return batch if have == samples else rows(batch, [place % have for place in range(samples)])


def rows(batch: Batch, places: Sequence[int]) -> Batch:
    """A batch of these samples, copied; tensors without the batch's length in front stay as they are."""
    total = size(batch)
    chosen = torch.tensor(places)

    def of(leaf: Any) -> Any:
        if not _along_samples(leaf, total):
            return leaf
        return leaf[chosen.to(leaf.device)] if isinstance(leaf, torch.Tensor) else type(leaf)(leaf[i] for i in places)

    return _map_all(of, batch)


def _along_samples(leaf: Any, samples: int) -> bool:
    return counts_samples(leaf, samples) or (_is_list_of_values(leaf) and len(leaf) == samples)


def planned_size(planned_signature: str) -> int:
    """Number of samples in a batch with this signature."""
    return next((shape[0] for _, _, shape in parse_signature(planned_signature) if shape), 1)


@cache
def undivided(planned_signature: str) -> frozenset[str]:
    """Names of the tensors of a batch with this signature that go whole into every part."""
    size = planned_size(planned_signature)
    shapes = ((name, shape) for name, _, shape in parse_signature(planned_signature) if shape is not None)
    return frozenset(name for name, shape in shapes if not shape or shape[0] != size)


def micro_batch_sizes(total: int, micro_batches: int) -> list[int]:
    """`total` samples in `micro_batches` parts, the largest last, differing by at most one.

    The largest comes when the gradients are there already, so that its peak is the step's peak and one capture tells it.
    """
    base, extra = divmod(total, micro_batches)
    return [base] * (micro_batches - extra) + [base + 1] * extra


def leaf_name(path: Any) -> str:
    """Name of a leaf from its path in the batch: keys and positions joined by dots, without blanks."""
    keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path]
    return ".".join(str(k) for k in keys).replace(" ", "_").replace(",", "_").replace("[", "(") or "tensor"


def map_leaves(function: Callable[[Any, Any], Any], batch: Batch) -> Batch:
    """The same batch with every leaf replaced by `function(path, leaf)`."""
    return _in_its_class(pytree.tree_map_with_path(function, _plain(batch), is_leaf=_is_list_of_values), batch)


def names_and_leaves(batch: Batch) -> list[tuple[str, Any]]:
    """All leaves of a batch, tensors and others, in the order of `flattened`, each with its name."""
    flat, _ = pytree.tree_flatten_with_path(_plain(batch), is_leaf=_is_list_of_values)
    return [(leaf_name(path), leaf) for path, leaf in flat]


def named_leaves(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch by name."""
    return {name: leaf for name, leaf in names_and_leaves(batch) if isinstance(leaf, torch.Tensor)}


def joined_signature(signatures: Sequence[str]) -> str | None:
    """The signature of a batch whose parts have these; None where they differ in more than the number of samples."""
    parsed = [parse_signature(each) for each in signatures]
    sizes = [planned_size(each) for each in signatures]

    def without_samples(number: int) -> list[tuple[str, str, tuple[int | None, ...] | None]]:
        have = sizes[number]
        return [
            (
                name,
                kind,
                None if shape is None else (None if shape[0] == have else shape[0], *shape[1:]) if shape else (),
            )
            for name, kind, shape in parsed[number]
        ]

    if any(without_samples(number) != without_samples(0) for number in range(len(parsed))):
        return None
    parts = []
    for name, kind, shape in parsed[0]:
        lengths = list(shape or ())
        if lengths and lengths[0] == sizes[0]:
            lengths[0] = sum(sizes)
        parts.append(f"{name} {kind}" if shape is None else f"{name} {kind}{lengths}")
    return ", ".join(parts)


def weightings(batch: Batch) -> list[str]:
    """Ways in which the losses of parts may add up to the loss of the whole, the more particular ones first.

    "tokens:x" counts the entries of x that are not IGNORED_LABEL, "next_tokens:x" the same from the second column on (causal models shift labels
    inside), "filled:x" the nonzero entries of x (a mask), "samples" the samples; "sum" is for losses that are sums.
    """
    counts = [n for n, t in named_leaves(batch).items() if t.dim() > 1 and not t.is_floating_point()]
    labels = [n for n in counts if bool((named_leaves(batch)[n] == IGNORED_LABEL).any())]
    return [
        *(f"tokens:{n}" for n in labels),
        *(f"next_tokens:{n}" for n in labels),
        "samples",
        "sum",
        *(f"filled:{n}" for n in counts if n not in labels),
    ]


def counted(part: Batch, how: str) -> int:
    """What the loss of a part counts for among parts, in the words of `weightings`: its samples, or its entries that count; 1 for sums.

    Raises:
        BatchError: the batch lacks the tensor whose entries are counted.
    """
    kind, _, name = how.partition(":")
    if kind == "sum":
        return 1
    if kind == "samples":
        return size(part)
    leaf = named_leaves(part).get(name)
    if leaf is None:
        raise BatchError(f"losses are weighted by {how}, but the batch has no {name!r}")
    if kind == "filled":
        return int(leaf.count_nonzero())
    leaf = leaf[..., 1:] if kind == "next_tokens" else leaf
    return leaf.numel() - int((leaf == IGNORED_LABEL).sum())


def counted_leaf(how: str) -> str:
    """Name of the leaf that `counted` looks at; empty where it looks at none."""
    return how.partition(":")[2]


def shares(parts: Sequence[Batch], how: str) -> list[float] | None:
    """Share of each part in the loss of the whole; None when nothing is counted at all."""
    if how == "sum":
        return [1.0] * len(parts)
    counts = [counted(part, how) for part in parts]
    total = sum(counts)
    return [c / total for c in counts] if total else None


def signature(batch: Batch) -> str:
    """Structure, shapes and dtypes in one readable line, e.g. `input_ids int64[16, 128], labels int64[16]`."""
    parts = []
    for name, leaf in names_and_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{name} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        else:
            parts.append(f"{name} {type(leaf).__name__}")
    return ", ".join(parts)


def signature_bytes(text: str) -> int:
    """Bytes of the tensors of a batch with this signature."""
    shapes = ((kind, shape) for _, kind, shape in parse_signature(text) if shape is not None)
    return sum(math.prod(shape) * int(getattr(torch, kind).itemsize) for kind, shape in shapes)


_BETWEEN_ENTRIES: Final = re.compile(r", (?=[^\]]*(?:\[|$))")  # commas that stand in no shape


def parse_signature(text: str) -> list[tuple[str, str, tuple[int, ...] | None]]:
    """(name, dtype, shape) for each leaf of a signature; shape is None for leaves that are not tensors."""
    out: list[tuple[str, str, tuple[int, ...] | None]] = []
    for item in _BETWEEN_ENTRIES.split(text):
        if "[" in item:
            named, _, dims = item.partition("[")
            name, _, kind = named.rpartition(" ")
            out.append((name, kind, tuple(int(d) for d in dims.rstrip("]").split(",") if d.strip())))
        else:
            name, _, kind = item.rpartition(" ")
            out.append((name, kind, None))
    return out


def fits_within(batch_signature: str, planned_signature: str) -> bool:
    """Whether a batch has the planned structure and is nowhere larger than planned."""
    have, planned = parse_signature(batch_signature), parse_signature(planned_signature)
    if _form(have) != _form(planned):
        return False
    sizes = ((shape or (), most or ()) for (_, _, shape), (_, _, most) in zip(have, planned, strict=True))
    return all(a <= b for shape, most in sizes for a, b in zip(shape, most, strict=True))


def _form(leaves: Sequence[tuple[str, str, tuple[int, ...] | None]]) -> list[tuple[str, str, int | None]]:
    """Of a parsed signature: names, dtypes and numbers of dimensions."""
    return [(name, kind, None if shape is None else len(shape)) for name, kind, shape in leaves]


_MOST_TOLD: Final = 8  # entries of a batch that a message names


def _told(batch_signature: str, other: str) -> str:
    """A signature as messages have it: of many entries, those that stand otherwise in the other one, or not at all."""
    entries = parse_signature(batch_signature)
    if len(entries) <= _MOST_TOLD:
        return batch_signature
    known = set(parse_signature(other))
    told = ([each for each in entries if each not in known] or entries)[:_MOST_TOLD]
    named = (f"{name} {kind}{'' if shape is None else list(shape)}" for name, kind, shape in told)
    return f"{', '.join(named)}, and {len(entries) - len(told)} more"


LARGEST_SHAPE: Final = "plan again with a sample of the largest shape that will come"


def larger_than_planned(
    batch_signature: str,
    planned_signature: str,
    micro_batch_size: int | None = None,
    again: str = LARGEST_SHAPE,
) -> BatchError:
    """The error for a batch that does not fit within the plan's, the same wherever batches come in.

    Args:
        batch_signature, planned_signature: of the batch, and of the one that was planned for.
        micro_batch_size: samples that the batch may have, where it is one micro-batch of the planned one.
        again: how its user would plan for larger ones.
    """
    here, planned = _told(batch_signature, planned_signature), _told(planned_signature, batch_signature)
    if _form(parse_signature(batch_signature)) != _form(parse_signature(planned_signature)):
        return BatchError(
            f"the batch is [{here}], the plan is for batches of another form, [{planned}] (entries, dtypes, dimensions): give them as the "
            "sample was, or plan again with one of these; it has not run"
        )
    of = "" if micro_batch_size is None else f" in micro-batches of {micro_batch_size} samples"
    return BatchError(
        f"the batch is [{here}], the plan is for batches up to [{planned}]{of}: {again}, or cut the batch down to it; it has not run"
    )


def what_the_model_gives(model: torch.nn.Module, batch: Batch, loss_fn: LossFunction | None) -> Any:
    """What stands for the loss, unchecked: of the loss function, or of the model's own output.

    An error that tells of a loss function or a batch of another form than memfit calls gets a note that says what form that is; it stays the user's own.
    """
    try:
        if loss_fn is not None:
            return loss_fn(model, _own_containers(batch))
        output = _called(model, batch)
    except (TypeError, AttributeError) as error:
        note = _note_on_forms(str(error), model, batch, has_loss=loss_fn is not None)
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
    found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    return output.get("loss") if found is None and isinstance(output, Mapping) else found


def _own_containers(batch: Batch) -> Batch:
    """The same leaves in dictionaries and lists of its own: one batch is given to a loss function several times, and many take the labels out of it."""
    if isinstance(batch, dict | tuple | list):
        if _is_list_of_values(batch):
            return copy.copy(batch)
        if type(batch) is dict:
            return {name: _own_containers(each) for name, each in batch.items()}
        if type(batch) in (tuple, list):
            return type(batch)(map(_own_containers, batch))
    return copy.copy(batch) if isinstance(batch, MutableMapping) else batch


def _called(model: torch.nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _note_on_forms(message: str, model: torch.nn.Module, batch: Batch, *, has_loss: bool) -> str:
    """What to write, where an error may come from the way in which loss function and model are called; "" elsewhere."""
    if has_loss:
        used = {type(model).__name__, *([] if isinstance(batch, torch.Tensor) else [f"'{type(batch).__name__}'"])}
        if not any(name in message for name in used) and "required positional argument" not in message:
            return ""
        taken = "yours(model(batch[0]), batch[1])"
        if isinstance(batch, torch.Tensor):
            taken = "yours(model(batch), batch)"
        elif isinstance(batch, Mapping):
            first, second = (*map(repr, batch), "...", "...")[:2]
            taken = f"yours(model(batch[{first}]), batch[{second}])"
        return f"memfit calls loss_fn(model, batch); if yours takes (output, target), write loss_fn=lambda model, batch: {taken}"
    if f"{type(model).__name__}.forward()" not in message and "forward() " not in message:
        return ""
    call = "**batch" if isinstance(batch, Mapping) else "*batch" if isinstance(batch, (tuple, list)) else "batch"
    return (
        f"without a loss_fn memfit calls model({call}) and takes the loss it returns; for a batch of inputs and targets give "
        "loss_fn=nn.CrossEntropyLoss(), or loss_fn=lambda model, batch: ..., which returns the scalar loss; with a run file return (model, loss_fn) from "
        "model.python"
    )


def loss_without_gradients(model: torch.nn.Module, batch: Batch, loss_fn: LossFunction | None) -> torch.Tensor:
    """The scalar loss where nothing is trained.

    Raises:
        InputError: the model gives none.
    """
    loss = what_the_model_gives(model, batch, loss_fn)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InputError(
            "in evaluation mode the model gives no loss: return (model, loss_fn) from model.python, "
            "or leave the validation data out"
        )
    return loss


def loss_of(model: torch.nn.Module, batch: Batch, loss_fn: LossFunction | None) -> torch.Tensor:
    """The scalar loss: `loss_fn(model, batch)`, or `model(**batch).loss` when no function is given.

    Raises:
        InputError: what came back is not a scalar tensor that autograd can follow.
    """
    loss = what_the_model_gives(model, batch, loss_fn)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        several = ""
        if isinstance(loss, (tuple, list, Mapping)):
            what = f"a {type(loss).__name__} of {len(loss)}"
            several = f"; several losses are added up, sum(losses{'.values()' if isinstance(loss, Mapping) else ''})"
        if loss_fn is not None:
            raise InputError(f"loss_fn(model, batch) gave {what}: return the loss alone, as one scalar tensor{several}")
        raise InputError(
            f"model(**sample).loss gave {what}; memfit needs one scalar tensor: pass loss_fn=lambda model, batch: ...{several}"
        )
    if not loss.requires_grad:
        raise InputError(
            "the loss does not depend on any trainable parameter: check requires_grad and torch.no_grad(), in the model and around this call, "
            "and that loss_fn detaches nothing"
        )
    return loss
