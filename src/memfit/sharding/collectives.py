"""Which dispatched operations are collectives, how many bytes each sends, and what a backend allocates for it besides its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from memfit import dispatch
from memfit.values.trace import Collective

# Overload packets of c10d -> what it is called.
_KINDS: Final[Mapping[str, str]] = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}

_AVERAGED: Final = (torch.float32, torch.bfloat16)
_DIVISOR_BYTES: Final = 8  # the number of ranks as an integer; its kernel makes another one of the type


def backend_for(device: torch.device) -> str:
    """Which of torch's backends sends tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def backends_for(device: torch.device) -> str:
    """Of ranks that compute on such devices, as `init_process_group` takes them; beside NCCL gloo sends what lies in the host's memory, and objects."""
    own = backend_for(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def kind_of(func: Any) -> str | None:
    """The name of a collective; None for what one device does alone."""
    return _KINDS.get(func._schema.name)


def collective_of(func: Any, args: Sequence[Any], ranks: Sequence[int]) -> Collective | None:
    """What an operation moves between devices; None for what one device does alone.

    Bytes are those of the whole message, of which a rank of n sends and receives (n - 1)/n in an all-gather and a reduce-scatter, and twice that in an
    all-reduce, in a ring: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations, section 3.

    Args:
        func, args: the call.
        ranks: of the group.
    """
    kind = kind_of(func)
    if kind is None:
        return None
    size = max((_bytes(argument) for argument in args if isinstance(argument, (torch.Tensor, list, tuple))), default=0)
    count = len(ranks)
    if kind in {"all_gather", "reduce_scatter", "all_to_all"}:
        size -= size // count
    elif kind == "all_reduce":
        size = 2 * (size - size // count)
    return Collective(kind, size, tuple(ranks))


def _bytes(argument: Any) -> int:
    return sum(t.numel() * t.element_size() for t in dispatch.tensors_in(argument))


def workspace_bytes(func: Any, args: Sequence[Any], backend: str) -> int:
    """What a backend allocates while the operation runs.

    gloo gathers into one flat tensor and copies that out, and reduces and scatters by an all-reduce of a copy, divided by the number of ranks for a mean
    (torch's ProcessGroupGloo.cpp); tests/sharding/test_collectives.py measures them. NCCL takes its buffers when it connects, outside of torch's allocator.
    """
    kind = kind_of(func)
    if backend != "gloo" or kind not in {"all_gather", "reduce_scatter"}:
        return 0
    size = max((_bytes(argument) for argument in args if isinstance(argument, (torch.Tensor, list, tuple))), default=0)
    # Dispatched calls do not show how they reduce: `fully_shard`, which alone does it here, takes the mean of these types, and the sum of others.
    dtype = next(dispatch.tensors_in(args)).dtype
    return size + (_DIVISOR_BYTES + dtype.itemsize if kind == "reduce_scatter" and dtype in _AVERAGED else 0)
