"""A snapshot on its way to the disk, in a thread beside the training where that is asked for.

Training waits while the files are written, since the next step changes what is in them, but they go no further than the system's cache of the disk. That they
reach the disk, are read again for their sums, and get the snapshot's name comes after. So the copy that is saved is in files from the start. None of it is
in the memory of the process, where it would count as bytes of a step on a processor, and as the host's on a GPU.

The threads of several ranks talk to nobody. Ranks agree between two steps whether all have ended, and commit together then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.sharding.agreement import Agreement
from memfit.train import durable, snapshots
from memfit.train.snapshots import Moment, Staged
from memfit.train.state import Savable


class Saving:
    """One snapshot.

    Args:
        staged: its files.
        together: the ranks that have written them; None for one process.
        beside: whether they reach the disk in a thread, while training goes on.
    """

    def __init__(self, staged: Staged, together: Agreement | None, *, beside: bool) -> None:
        self._staged, self._together = staged, together
        self._files: Mapping[str, Any] = {}
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if beside:
            # Where the process ends all the same, its files are those of an interrupted write.
            self._thread = threading.Thread(target=self._reach_the_disk, name="memfit-saving", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, out: Path, engine: Savable, moment: Moment, together: Agreement | None, *, beside: bool) -> Saving:
        """A snapshot of an engine as it is now; all ranks have to call it.

        Args:
            out: folder of the run.
            engine: what is saved.
            moment: of the run.
            together, beside: as for the class.

        Raises:
            SnapshotError: its files cannot be written; on all ranks.
        """
        if together is None:
            with engine.gathered(on_host=True, changed=False):
                return cls(snapshots.stage(out, engine, moment), None, beside=beside)
        from memfit.train import rank_snapshots

        return cls(rank_snapshots.stage(out, engine, together, moment), together, beside=beside)

    def _reach_the_disk(self) -> None:
        try:
            self._files = self._staged.on_disk()
        except OSError as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether `finish` need not wait, on any rank; all have to ask."""
        waits = self._thread is not None and self._thread.is_alive()
        return not waits if self._together is None else self._together.first(concerned=waits) is None

    def finish(self) -> Path:
        """Wait for the files, and give the snapshot its name; all ranks have to call it.

        Returns:
            The snapshot's folder.

        Raises:
            SnapshotError: the files could not reach the disk; on all ranks. Older snapshots are as before.
        """
        staged, together = self._staged, self._together
        try:
            self._wait()
            if together is not None:
                from memfit.train import rank_snapshots

                rank_snapshots.commit(staged, together, self._files, self._error)
                return staged.final
            if self._error is not None:
                raise self._error
            snapshots.commit(staged, self._files)
        except OSError as error:
            durable.remove(staged.partial)  # before the free bytes are counted
            raise snapshots.failed(staged.final.parent, staged.final, staged.needed_bytes, error) from error
        finally:
            if together is None or together.rank == 0:
                durable.remove(staged.partial)
        return staged.final

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        else:
            self._reach_the_disk()

    def give_up(self) -> None:
        """Training has failed: one process completes the snapshot all the same, ranks cannot agree any more and leave it to be swept away."""
        if self._together is None:
            self.finish()
        elif self._thread is not None:
            self._thread.join()
