"""The whole of a search in one call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from memfit.errors import InputError
from memfit.tune.live import SearchDisplay, SilentDisplay
from memfit.tune.page import write_page
from memfit.tune.results import Results, results
from memfit.tune.search import Search
from memfit.tune.study_store import store_errors
from memfit.tune.tuning import Tuning


def run(search: Search, display: SearchDisplay | None = None) -> Results:
    """Search until all trials are told, or go on with a search that was stopped; then write the results.

    Args:
        search: from `load_search` or `read_search`.
        display: shows what happens; None for nothing.

    Returns:
        All trials and the best. Beside them, in `search.out`: trials.csv, best.yaml (which `memfit train` takes), report.html, and a folder for each trial.

    Raises:
        ConfigError, InputError: it cannot be searched so; the store or a package is missing or damaged.
        InfeasibleError: nothing that is searched fits into the budget; said before the first trial.
        KeyboardInterrupt: after what ran was stopped; the same call goes on.
    """
    if not isinstance(search, Search):
        raise InputError(
            f'run takes a search, not {search!r}: load_search("search.yaml"), or read_search of what such a file holds'
        )
    display = display or SilentDisplay()
    tuning = Tuning(search, note=display.note)
    if search.own_out is not None:
        display.note(
            f"train.out ({search.own_out}) is where a single run writes; trials write into {search.out} (search.out)"
        )
    try:
        with _terminated():
            more = True
            shown: object = None
            while True:
                with store_errors(tuning.url):
                    found = results(search, tuning.study, tuning.launched, tuning.url)
                now = ([(row.number, row.state) for row in found.rows], tuning.runner.running)
                if now != shown:
                    display.show(tuning, found)
                    shown = now
                if not more:
                    break
                more = tuning.step()
    finally:
        tuning.close()
    found = results(search, tuning.study, tuning.launched, tuning.url)
    found.save()
    write_page(found, tuning.runner.ledger.capacity)
    return found


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends a search as Ctrl-C does: what runs is stopped, and the study is whole."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, on_signal)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
