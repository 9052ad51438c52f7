"""What has to be the same on all ranks of a run, and the check that it is, once they have met: another file, version or seed on one would train a mixture."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.errors import ConfigError
from memfit.sharding.agreement import Agreement
from memfit.sharding.same_model import NUMBERS, bytes_of, marked
from memfit.train.assemble import Assembly
from memfit.train.config import Config

SAMPLES: Final = 8  # of the data, evenly spaced


def marks_of(config: Config, assembly: Assembly) -> dict[str, Any]:
    """What is compared, by what it is called in the message; digests of what is large.

    Weights are those of before the first step: `fully_shard` takes each rank's part of that rank's own.

    Args:
        config: of the run.
        assembly: what it describes, on this rank, not shared out yet.
    """
    chosen = (t for each in assembly.batches.some(SAMPLES) for t in batches.leaves(each))
    return _flat(config.to_json()) | {
        "torch": torch.__version__,
        "memfit": importlib.metadata.version("memfit"),
        "the number of samples": assembly.batches.count,
        "the data": marked(bytes_of(t) for t in chosen),
        "the code of model and loss": marked(_sources(assembly)),
        "the initial weights": marked(bytes_of(p, NUMBERS) for p in assembly.model.parameters()),
    }


def check_alike(agreement: Agreement, own: Mapping[str, Any]) -> None:
    """Check that all ranks train the same.

    Args:
        agreement: of all ranks.
        own: `marks_of` this rank.

    Raises:
        ConfigError: one has another configuration, code, data or versions than rank 0; on all ranks, naming that one.
    """
    of_all = agreement.of_all(dict(own))
    for rank, theirs in enumerate(of_all):
        for key in sorted(theirs.keys() | of_all[0].keys()):
            if theirs.get(key) != of_all[0].get(key):
                raise ConfigError(
                    f"rank {rank} differs from rank 0 in {key} ({theirs.get(key)!r}, not {of_all[0].get(key)!r}): start all with the same configuration, code, "
                    "data and versions"
                )


def _flat(data: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{front}{key}.") if isinstance(value, Mapping) else {front + key: value}
    return found


def _sources(assembly: Assembly) -> list[bytes]:
    """Of the classes of all modules, and of the loss."""
    kinds: dict[type[nn.Module], None] = dict.fromkeys(type(module) for module in assembly.model.modules())
    written: list[Any] = [*kinds, *([] if assembly.loss_fn is None else [assembly.loss_fn])]
    found = []
    for each in written:
        try:
            found.append(inspect.getsource(each).encode())
        except (OSError, TypeError):  # made at run time, or an object that is called
            found.append(getattr(each, "__qualname__", type(each).__qualname__).encode())
    return found
