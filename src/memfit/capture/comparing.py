"""Whether two traces show the same step: the same operations, and where it matters the same sizes."""

from __future__ import annotations

from memfit.values.trace import Trace


def forward_names(trace: Trace) -> list[str]:
    """Operations of a captured forward and loss."""
    return [operation.name for operation in trace.in_forward()]


def path_taken(trace: Trace) -> list[tuple[str, str, bool]]:
    """Operations of a captured forward and loss, each with the module that ran it, as blocks that are alike are told apart.

    And whether it needs a gradient: what autograd saves differs where layers have been frozen, or a part is cut off.
    """
    return [(operation.name, operation.module, operation.wanted) for operation in trace.in_forward()]


def same_operations(a: Trace, b: Trace) -> bool:
    """Whether all events of two traces are alike, in the same modules, and as many storages are made; sizes may differ."""
    return (
        a.events == b.events
        and len(a.storages) == len(b.storages)
        and [o.name for o in a.operations] == [o.name for o in b.operations]
        and path_taken(a) == path_taken(b)
    )


def same_forward(one: Trace, other: Trace) -> bool:
    """Whether two traces run the same forward operations, and make as many bytes in each."""

    def made(trace: Trace) -> list[tuple[str, bool, tuple[int, ...]]]:
        return [(o.name, o.random, tuple(trace.storages[s].bytes for s in o.makes)) for o in trace.in_forward()]

    return made(one) == made(other)
