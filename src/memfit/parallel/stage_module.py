"""One stage of a model: the user's own forward, of which only the stage's parts are run.

What earlier parts returned is *received* where it is needed and *absent* elsewhere; at the end of the last part the forward is left. So whatever the model does
between its parts (masks from the batch, positions, sums, a flatten) is done as it is written, without a graph or a tracer. What a later stage than the next one
needs is handed on by those between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.dispatch import ForwardLeftError
from memfit.errors import EngineError
from memfit.step.absent import ELSEWHERE, Absent, absent
from memfit.step.device import device_of
from memfit.step.part_calls import Forward, Label, PartCalls, TensorMeta, parts_at, taken_over


class StageModule(nn.Module):
    """Parts [first, end) of a model.

    Args:
        model: whole, or what `without_other_stages` has left of it.
        loss_fn: as for `memfit.plan`.
        calls: of the model's parts, for a micro-batch.
        first, end: positions of the stage's calls.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None, calls: PartCalls, first: int, end: int) -> None:
        super().__init__()
        self.model = model
        self.first, self.end = first, end
        self.is_last = end == len(calls.calls)
        self._loss_fn = loss_fn
        self._calls = calls
        self._incoming = calls.crossing(first) if first else ()
        self._outgoing = () if self.is_last else calls.crossing(end)
        self._parts = parts_at(
            model, (call.path for call in calls.calls)
        )  # looked up once, and not for each micro-batch
        self._device = device_of(model)
        self.train(model.training)

    @property
    def received(self) -> tuple[TensorMeta, ...]:
        """What the stage before sends, in order."""
        return tuple(self._calls.meta(label) for label in self._incoming)

    @property
    def sent(self) -> tuple[TensorMeta, ...]:
        """What goes to the next stage, in order; nothing from the last."""
        return tuple(self._calls.meta(label) for label in self._outgoing)

    @property
    def loss_type(self) -> torch.dtype:
        """Of what the last stage gives."""
        return self._calls.loss_type

    def forward(self, batch: Batch, *received: Tensor) -> tuple[Tensor, ...] | Tensor:
        """The stage on one micro-batch.

        Args:
            batch: the micro-batch, with ELSEWHERE for tensors that the stage does not read (`PartCalls.leaves_read`).
            received: as `self.received` says.

        Returns:
            What `self.sent` says; the scalar loss of the last stage.

        Raises:
            EngineError: the forward calls other parts than it did when it was looked at, or gives results of other shapes.
        """
        batch = self._with_absent(batch)
        run = _Run(self, dict(zip(self._incoming, received, strict=True)))
        with taken_over(self._parts, run.called):
            if self.is_last:
                loss_of = batches.loss_of if torch.is_grad_enabled() else batches.loss_without_gradients
                loss = loss_of(self.model, batch, self._loss_fn)
                run.check_end()
                # A schedule holds it to the end of the step, and some kernels (of the squared error) return a number in the storage of all elements.
                return loss.clone()
            try:
                batches.what_the_model_gives(self.model, batch, self._loss_fn)
            except ForwardLeftError:
                return tuple(run.known[label] for label in self._outgoing)
        raise EngineError(
            f"the forward ended after {run.position} calls of parts, and this stage ends after {self.end}: its path has changed since it was cut. Plan again"
        )

    def _with_absent(self, batch: Batch) -> Batch:
        """What is elsewhere known by its shape, as what other stages return."""
        leaves, structure = batches.flattened(batch)
        if all(leaf is not ELSEWHERE for leaf in leaves):
            return batch
        known = [meta for _, meta in self._calls.batch]
        return batches.rebuilt(
            (
                absent(meta, self._device) if leaf is ELSEWHERE else leaf
                for leaf, meta in zip(leaves, known, strict=True)
            ),
            structure,
        )


class _Run:
    """One forward of a stage."""

    def __init__(self, stage: StageModule, received: dict[Label, Tensor]) -> None:
        self.stage = stage
        self.known = received
        self.position = 0
        self._inside = False

    def called(self, path: str, own: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._inside:
            return own(*args, **kwargs)
        stage, position = self.stage, self.position
        calls = stage._calls.calls  # noqa: SLF001 - its own run
        if position >= len(calls) or calls[position].path != path:
            expected = calls[position].path if position < len(calls) else "the loss"
            raise EngineError(
                f"the forward calls {path} where it called {expected} when it was cut into stages: a path that changes cannot be run as a pipeline"
            )
        if position >= stage.end:  # somebody caught it
            raise ForwardLeftError(stage.model, {}, None)
        self.position += 1
        if position < stage.first:
            return self._without_running(position)
        if any(isinstance(leaf, Absent) for given in (*args, *kwargs.values()) for leaf in _leaves(given)):
            raise EngineError(
                f"{path} reads a tensor, of an earlier stage or of the batch, that it did not read when the model was cut: plan again"
            )
        self._inside = True
        try:
            result = own(*args, **kwargs)
        finally:
            self._inside = False
        if stage.is_last:
            return result
        self._note(position, _leaves(result))
        if self.position == stage.end:
            raise ForwardLeftError(stage.model.get_submodule(path), kwargs, result)
        return result

    def _without_running(self, position: int) -> Any:
        call = self.stage._calls.calls[position]  # noqa: SLF001
        leaves = [self._instead(Label(position, number), leaf) for number, leaf in enumerate(call.leaves)]
        return leaves[0] if call.structure.is_leaf() else pytree.tree_unflatten(leaves, call.structure)

    def _instead(self, label: Label, leaf: Any) -> Any:
        if isinstance(leaf, Label):  # returned as it was given
            return self._instead(leaf, self.stage._calls.calls[leaf.call].leaves[leaf.leaf])  # noqa: SLF001
        if not isinstance(leaf, TensorMeta):
            return leaf
        if label not in self.known:
            self.known[label] = absent(leaf, self.stage._device)  # noqa: SLF001
        return self.known[label]

    def _note(self, position: int, leaves: Sequence[Any]) -> None:
        """Keep what goes on, and see that it is as it was."""
        planned = self.stage._calls.calls[position]  # noqa: SLF001
        for label in self.stage._outgoing:  # noqa: SLF001
            if label.call == position:
                meta = planned.leaves[label.leaf]
                leaf = leaves[label.leaf] if label.leaf < len(leaves) else None
                if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (meta.shape, meta.dtype):
                    have = f"{tuple(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise EngineError(
                        f"{planned.path} returns {have} where it returned {meta.shape} of {meta.dtype} when the model was cut: "
                        "what crosses between stages must have one shape, so pad the batches to it"
                    )
                # Messages are contiguous.
                self.known[label] = leaf.contiguous()

    def check_end(self) -> None:
        expected = len(self.stage._calls.calls)  # noqa: SLF001
        if self.position != expected:
            raise EngineError(
                f"the forward called {self.position} parts, and {expected} when it was cut into stages: a path that changes cannot be run as a pipeline"
            )


def _leaves(tree: Any) -> Sequence[Any]:
    """Of what is given to a part or comes from it: a tensor in most calls, for which no tree need be walked through."""
    return (tree,) if isinstance(tree, Tensor) else pytree.tree_leaves(tree)
