"""A step whose layers are streamed: the stream runs forward, backward and update in an order of its own, here within a transaction."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.batches import Batch
from memfit.engine.transaction import Transaction, Transactions
from memfit.meter import MeterReading
from memfit.step.program import StepProgram
from memfit.streaming.stream import LayerStream
from memfit.streaming.watch import NO_WATCH, Watch
from memfit.values.report import StepRecord


class _Metered(Watch):
    """Moves the meter from thread to thread, as a profiler session sees one thread."""

    def __init__(self, reading: MeterReading) -> None:
        self.leave_thread = reading.leave_thread  # type: ignore[method-assign]
        self.enter_thread = reading.enter_thread  # type: ignore[method-assign]


class StreamedStep:
    """Runs one step of a stream.

    Args:
        stream: of the layers.
        transactions: those of the engine, which record an update that fails half way.
        reading: of the meter, where the step is metered.
    """

    def __init__(self, stream: LayerStream, transactions: Transactions, reading: MeterReading | None) -> None:
        self._stream = stream
        self._transactions = transactions
        self._watch = _Metered(reading) if reading is not None else NO_WATCH

    def run(
        self, program: StepProgram, weighted: Sequence[tuple[Batch, float | None]], transaction: Transaction
    ) -> StepRecord:
        """The whole step, over micro-batches with their shares of the loss (None for the whole of it).

        Raises:
            EngineError: an update failed half way.
        """
        try:
            losses = self._stream.step(
                program,
                [micro_batch for micro_batch, _ in weighted],
                [weight for _, weight in weighted],
                check_finite=True,
                watch=self._watch,
                changing=transaction.interrupts_wait,
            )
        except BaseException as error:
            if not self._stream.updating:
                raise
            raise self._transactions.failed_half_way(error) from error
        finally:
            program.clear()
        loss = sum(
            float(value) * (1.0 if weight is None else weight)
            for value, (_, weight) in zip(losses, weighted, strict=True)
        )
        return StepRecord(0, loss, 0.0, len(weighted))
