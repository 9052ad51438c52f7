"""A step happens whole or not at all.

When anything fails before the update (the model, a NaN loss, an interrupt), gradients are freed and buffers, generators and the gradient scaler put
back. An interrupt during the update waits for its end. An update that fails half way cannot be undone, as there is no copy of the parameters: then no
further step is taken.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from memfit import dispatch
from memfit.batches import LossFunction
from memfit.engine.interrupts import interrupts_wait
from memfit.engine.new_paths import NewPathError
from memfit.errors import EngineError, MemfitError, NonFiniteLossError
from memfit.step.buffers import BufferCopies
from memfit.step.guard import Deciding, Guard, Trained, Updated
from memfit.step.modules import let_go_of_gradients
from memfit.techniques.autocast.precision import Scaling


class Transaction:
    """One step in progress.

    Attributes:
        committed: the step has happened; nothing is put back any more.
    """

    def __init__(self, transactions: Transactions, rest: ExitStack) -> None:
        self.committed = False
        self._transactions = transactions
        self._rest = rest

    def commit(self) -> None:
        """The step has happened: what fails from here on does not undo it."""
        self.committed = True

    def begin_update(self, written: Sequence[torch.Tensor]) -> None:
        """From here to the end of the transaction these tensors are written. An interrupt waits for the end; after a failure no further step is taken."""
        self._rest.enter_context(self._transactions.updating(written))

    def interrupts_wait(self) -> None:
        """Defer Ctrl-C to the end of the transaction."""
        self._rest.enter_context(interrupts_wait())


class Transactions:
    """The steps of one model.

    Args:
        model: being trained.
        loss_fn: its loss; what its modules note is put back, too.
        clear: lets go of the gradients; None where they are those of the model's parameters.
        optimizer: of the model's own parameters; None where it has others, or where there is none.

    Attributes:
        buffers: copies of those that forward writes.
        before: what may have decided the path of the last step, as it was when that began; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        clear: Callable[[], None] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._clear = clear
        self.buffers = BufferCopies(model)
        self.before: Deciding | None = None
        self._trained: Trained | None = None
        self._updated = Updated(model, optimizer)
        self._stuck = ""

    def check(self) -> None:
        """Raise EngineError where an update has failed half way: nothing can go on from there."""
        if self._stuck:
            raise EngineError(self._stuck)

    def newly_trained(self) -> tuple[int, int]:
        """How many parameters are trained that were not when this was last asked, and how many no longer: a step that fails puts back which were."""
        if self._trained is None:
            self._trained = Trained(self._model)
        return self._trained.changes()

    def changed_parameters(self) -> tuple[int, int, int]:
        """How many parameters have been replaced, added or converted since this was last asked; see `Updated.changes`."""
        return self._updated.changes(self._model)

    @contextmanager
    def begin(self, scaling: Scaling | None) -> Iterator[Transaction]:
        """One step runs inside; when it fails before `commit`, everything is put back.

        Args:
            scaling: of the gradients, where they are scaled.
        """
        guard = Guard(self._model, self.buffers.copies, scaling, self._loss_fn)
        self.before = guard.deciding
        rest = ExitStack()
        transaction = Transaction(self, rest)
        try:
            with rest:  # ends first: an interrupt that waited for the update is heard here
                yield transaction
        except BaseException as error:
            if isinstance(error, NewPathError):
                # What forward has made goes first, since putting generators back takes memory.
                traceback.clear_frames(error.__traceback__)
            if not transaction.committed:
                self._let_go_of_gradients()
                guard.put_back()
                if self._trained is not None:
                    self._trained.put_back()
            raise

    def _let_go_of_gradients(self) -> None:
        if self._clear is not None:
            self._clear()
            return
        let_go_of_gradients(self._model)

    @contextmanager
    def updating(self, written: Sequence[torch.Tensor]) -> Iterator[None]:
        """An update of these tensors happens inside, which may put others in their place: those go as they would in plain PyTorch."""
        before = [(weakref.ref(tensor), dispatch.version_of(tensor)) for tensor in written]
        del written
        with interrupts_wait():
            try:
                yield
            except NonFiniteLossError:
                raise  # noticed before an update or in place of one; fused optimizers count a skipped step as a write
            except BaseException as error:
                now = ((reference(), version) for reference, version in before)
                if any(tensor is None or dispatch.version_of(tensor) != version for tensor, version in now):
                    raise self.failed_half_way(error) from error
                raise

    def failed_half_way(self, error: BaseException) -> EngineError:
        """What to raise where an update has failed half way; no step is taken from here on."""
        reason = str(error).partition(": ")[0] if isinstance(error, MemfitError) else type(error).__name__
        message = (
            f"the optimizer's update failed half way ({reason}), so parameters and optimizer state lie between two steps: "
            "load the last snapshot (memfit resume does) and make an engine anew"
        )
        self._stuck = message
        return EngineError(message)
