"""The search: asks Optuna for values, plans each trial, runs side by side what fits, tells what came of it, and goes on after any crash.

A trial is Optuna's from the moment it is asked for: values, state and intermediate values are in the store before anything else happens. What runs is the
runner's, under a name made of the trial's number. So a search that was killed finds both again and joins them: a trial is told once, whoever saw it end.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memfit import strict
from memfit.errors import ConfigError, InputError
from memfit.runner import End, Runner
from memfit.tune.capacity import budget_of, capacity_of, largest_device
from memfit.tune.feasibility import check_feasible
from memfit.tune.metrics import Metrics, MetricsFile
from memfit.tune.plans import Fit
from memfit.tune.sampling import quietly
from memfit.tune.search import Search
from memfit.tune.study_store import MISSED_BEATS, beat, open_study, own_folder, store_errors, url_of
from memfit.tune.trials import ALONE, CommandTrials, MemfitTrials, TrialRuns, Trials, most_at_once, name_of
from memfit.units import format_bytes

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

WORKER: Final = "memfit:worker"  # who runs a trial
ENDED: Final = "memfit:end"  # how its run ended, in words
STATE: Final = "memfit:state"  # "infeasible", "out of memory", ...; what Optuna's states do not tell
BYTES: Final = "memfit:peak_bytes"
MINIMUM: Final = "memfit:minimum_bytes"
CONSTRAINT: Final = "bytes over the budget"
_SILENT_TRIALS: Final = 3  # without the objective, after which the search ends
_POLL_SECONDS: Final = 0.5


@dataclass
class Live:
    """A trial that was asked for and not told yet.

    Attributes:
        trial: Optuna's.
        values: of the parameters, as the run takes them.
        fit: what was predicted.
        run: name of its run.
        reported: steps whose value Optuna knows.
        stopping: whether it is being pruned.
    """

    trial: Trial
    values: dict[str, Any]
    fit: Fit
    run: str
    metrics: MetricsFile
    reported: set[int] = field(default_factory=set)
    stopping: bool = False


class Tuning:
    """One search, from its first call to its last trial.

    Args:
        search: that was read.
        trials: how trials are run; made of the search where none are given.
        runs: where they run; this computer, or the cluster that the search names, where none are given.
        note: told what is worth a line.

    Raises:
        InputError, ConfigError: as for `open_study` and `own_folder`; another process works in the same folder.
        InfeasibleError: nothing that is searched fits into the budget.
    """

    def __init__(
        self,
        search: Search,
        *,
        trials: Trials | None = None,
        runs: TrialRuns | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.search = search
        self.note = note
        self.url = url_of(search)
        self.live: dict[str, Live] = {}
        self.launched = 0
        self._never: list[str] = []  # sentences about trials that never reported the objective
        self._tidied: set[int] = set()  # trials whose snapshots are gone
        self._last_beat = -math.inf
        self._grid = _points_of_grid(search)
        # Before anything is written: what cannot be meant leaves no folder behind.
        self.study: Study = open_study(search)
        self.trials: Trials = trials or (CommandTrials(search) if search.is_command else MemfitTrials(search))
        if isinstance(self.trials, MemfitTrials):
            self.trials.planner.idle = self._meanwhile
        try:
            self.runner: TrialRuns = runs or self._runner()
            self.worker = _worker(self.runner.folder)
            try:
                own_folder(search, self.study)
                self._check()
                with store_errors(self.url):
                    self._found_again()
                    self._tidy()
            except BaseException:
                self.runner.close()
                raise
        except BaseException:
            self.trials.close()
            raise

    def _check(self) -> None:
        """Whether any trial could fit."""
        if self.search.is_command or not self.study.trials:
            check_feasible(self.search, self.runner.ledger.capacity, self._fit)

    def _runner(self) -> TrialRuns:
        folder, cluster = self.search.out / "runner", self.search.config.cluster
        if cluster is None:
            return Runner(folder, capacity_of(self.search), most_at_once(self.search))
        from memfit.runner.cluster import ClusterRunner

        return ClusterRunner(folder, cluster, most_at_once(self.search))

    # ----------------------------------------------------------------------------------------------------------- before

    def _found_again(self) -> None:
        """Trials that were begun before: those of this folder are joined with their runs, and others are left to their own processes."""
        from optuna.trial import Trial, TrialState

        for frozen in self.study.get_trials(states=(TrialState.RUNNING,)):
            owner = frozen.user_attrs.get(WORKER)
            own_store = self.search.config.store is None  # in this folder, which nobody else has open
            # The computer may have another name by now: a container's is new each time.
            here = owner is None or owner.partition(":")[2] == self.worker.partition(":")[2]
            if owner == self.worker or (own_store and here):
                self._prepare(Trial(self.study, frozen._trial_id))  # noqa: SLF001 - Optuna has no other way back to a trial

    # ------------------------------------------------------------------------------------------------------------ while

    def step(self, seconds: float = _POLL_SECONDS) -> bool:
        """Ask, start, watch, tell.

        Args:
            seconds: to wait at most where nothing happens.

        Returns:
            Whether there is more to do.

        Raises:
            ConfigError: the first trials never reported the objective.
            InputError: the store cannot be written; the same command goes on later.
        """
        with store_errors(self.url):
            self._beat()
            while self._may_ask():
                with quietly(), _options_of_optuna():
                    trial = self.study.ask()
                self._prepare(trial)
            for name, end in self.runner.poll(seconds if self.live else 0.0):
                if name in self.live:
                    with self._unless_told(self.live[name]):
                        self._over(self.live[name], end)
            for live in list(self.live.values()):
                self._watch(live)
            return bool(self.live) or self._left() > 0

    @contextmanager
    def _unless_told(self, live: Live) -> Iterator[None]:
        """A search that was halted, or whose computer slept, finds its trials told by another one, which took them for dead: they are that one's."""
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            yield
        except UpdateFinishedTrialError:
            self.note(
                f"trial {live.trial.number} was told by another process, which had no sign of life of it for {MISSED_BEATS} heartbeats; what ran of it ends"
            )
            self.live.pop(live.run, None)
            self.runner.stop(live.run, at_once=True)

    def _left(self) -> int:
        from optuna.trial import TrialState

        every = self.study.get_trials(deepcopy=False)
        again = {
            each.user_attrs.get("memfit:again") for each in every
        }  # whose process was lost, and which were queued again
        counted = [
            each
            for each in every
            if each.state != TrialState.WAITING and each.number not in again and "memfit:from" not in each.user_attrs
        ]
        left = self.search.config.trials - len(counted)
        if self._grid is not None:
            begun = {each.system_attrs.get("grid_id") for each in every} - {None}
            left = min(left, self._grid - len(begun))
        return left

    def _may_ask(self) -> bool:
        return len(self.live) < most_at_once(self.search) and not self.runner.waiting and self._left() > 0

    def _beat(self) -> None:
        import optuna

        now = time.monotonic()
        if now - self._last_beat < self.search.config.heartbeat:
            return
        self._last_beat = now
        beat(self.study, [live.trial._trial_id for live in self.live.values()])  # noqa: SLF001 - as above
        with quietly():
            optuna.storages.fail_stale_trials(self.study)

    def _meanwhile(self) -> None:
        """While a trial is planned: what runs is watched, and stopped where the pruner says so; ends wait until it is planned."""
        self._beat()
        for live in list(self.live.values()):
            self._watch(live)

    def _prepare(self, trial: Trial) -> None:
        """Values, a plan, a run. Done again for a trial that was begun before, it finds what is there."""
        trial.set_user_attr(WORKER, self.worker)
        with _options_of_optuna():
            values = {name: each.suggest(trial, name) for name, each in self.search.space.items()}
        beat(self.study, [trial._trial_id])  # noqa: SLF001 - as above
        name = name_of(trial.number)
        name = name + ALONE if self.runner.knows(name + ALONE) else name
        folder = self._folder(trial.number, name)
        known = _known_fit(folder) if self.runner.knows(name) else None
        fit = known or self._fit(values, folder)
        live = Live(trial, values, fit, name, self.trials.watched(folder, self.runner.stdout(name)))
        live.reported = set(self._stored(trial).intermediate_values) if self.runner.knows(name) else set()
        if fit.error:
            self._failed(live, f"could not be planned: {fit.message}")
            return
        if not fit.fits:
            self._infeasible(live)
            return
        self._start(live, folder)

    def _start(self, live: Live, folder: Path) -> None:
        if not self.runner.knows(live.run):
            _write_fit(folder, live.fit)
            if live.fit.peak_bytes:
                live.trial.set_user_attr(BYTES, live.fit.peak_bytes)
            request = self.trials.request(live.run, live.trial.number, live.values, folder, live.fit)
            self._check_disk(live, folder)
            try:
                self.runner.ledger.check(request)
            except InputError as error:
                live.fit = replace(live.fit, fits=False, message=str(error))
                self._infeasible(live)
                return
            self.runner.submit(request)
            self.launched += 1
        self.live[live.run] = live
        end = self.runner.end_of(live.run)
        if end is not None:  # it was over before the last process died, and not told
            self._over(live, end)

    def _check_disk(self, live: Live, folder: Path) -> None:
        """See that the disk has room for the trial's snapshots: otherwise this trial would fail, and after it all others.

        Raises:
            InputError: it has not; the trial is begun by the next call.
        """
        number, each = self.trials.snapshots(live.values), live.fit.snapshot_bytes
        free = shutil.disk_usage(folder).free
        if number * each > free:
            raise InputError(
                f"search.out: trial {live.trial.number} writes up to {number} snapshots of {format_bytes(each)} to {self.search.out}, "
                f"and {format_bytes(free)} are free: free space, lower train.keep, or set search.snapshots to none; the same command then goes on"
            )

    def _fit(self, values: dict[str, Any], folder: Path, again: int | None = None) -> Fit:
        fit = self.trials.fit(values, folder, again=again)
        capacity = largest_device(self.runner.ledger.capacity)
        if fit.fits and capacity is not None and fit.peak_bytes > capacity:
            return replace(
                fit, fits=False, minimum_bytes=fit.peak_bytes, message="more than all trials together may take"
            )
        return fit

    def _folder(self, number: int, run: str = "") -> Path:
        folder = self.search.out / "trials" / name_of(number)
        return folder / "alone" if run.endswith(ALONE) else folder

    def _watch(self, live: Live) -> None:
        """Intermediate values: told, and the trial stopped where the pruner says so."""
        with self._unless_told(live):
            self._report(live)

    def _report(self, live: Live) -> None:
        if len(self.search.config.objectives) > 1 or live.stopping or live.run in self.runner.waiting:
            return
        for step, value in live.metrics.read().values.get(self.search.config.objectives[0].name, ()):
            if step in live.reported or not math.isfinite(value):
                continue
            live.reported.add(step)
            live.trial.report(value, step)
            with _options_of_optuna():
                live.stopping = live.trial.should_prune()
            if live.stopping:
                # A run of ours has nothing to save: its bytes are wanted.
                self.runner.stop(live.run, at_once=not self.search.is_command)
                return

    # ------------------------------------------------------------------------------------------------------------ after

    def _over(self, live: Live, end: End) -> None:
        from optuna.trial import TrialState

        folder = self._folder(live.trial.number, live.run)
        self.live.pop(live.run, None)
        live.metrics = self.trials.watched(folder, self.runner.stdout(live.run))
        if end.kind == "out_of_memory":
            self._out_of_memory(live, end)
        elif end.kind == "stopped" and (live.stopping or end.reason == "asked"):
            words = f"pruned after step {max(live.reported)}" if live.stopping else end.text
            self._tell(live, TrialState.PRUNED, words, "pruned")
        elif end.kind == "done":
            self._done(
                live,
                end,
                self.trials.final(folder, self.runner.stdout(live.run), live.fit, end.seconds, live.metrics.finished()),
            )
        else:
            self._failed(live, end.text)

    def _done(self, live: Live, end: End, metrics: Metrics) -> None:
        """Every objective was reported as a number, or the trial has failed with the reason."""
        from optuna.trial import TrialState

        values = []
        for objective in self.search.config.objectives:
            series = [value for _, value in metrics.values.get(objective.name, ())]
            if not series:
                self._failed(live, self._unreported(objective.name, metrics), never=True)
                return
            good = [value for value in series if math.isfinite(value)]
            best = (min if objective.direction == "minimize" else max)(good) if good else math.nan
            value = best if objective.take == "best" else series[-1]
            if not math.isfinite(value):
                self._failed(live, f"{objective.name} is {value}")
                return
            values.append(value)
        if len(values) == 1:
            self._report_rest(live, metrics)
        for name in metrics.values.keys() - {each.name for each in self.search.config.objectives}:
            if (last := metrics.last(name)) is not None and math.isfinite(last):
                live.trial.set_user_attr(f"metric:{name}", last)
        if not self.search.is_command:
            live.trial.set_constraint(CONSTRAINT, live.fit.peak_bytes - live.fit.budget_bytes)
        self._tell(live, TrialState.COMPLETE, end.text, "done", values)

    def _report_rest(self, live: Live, metrics: Metrics) -> None:
        """What came between the last look and the end."""
        for step, value in metrics.values.get(self.search.config.objectives[0].name, ()):
            if step not in live.reported and math.isfinite(value):
                live.reported.add(step)
                live.trial.report(value, step)

    def _unreported(self, name: str, metrics: Metrics) -> str:
        if name in metrics.texts:
            return f"{name} is reported as text, {metrics.texts[name]!r}: a number is needed"
        there = sorted(each for each in metrics.values if each != "seconds")
        known = (
            f"it reported {', '.join(there)}; {strict.nearest(name, dict.fromkeys(there))}"
            if there
            else "it reported nothing"
        )
        return f"{name} was never reported: {known}"

    def _failed(self, live: Live, why: str, *, never: bool = False) -> None:
        from optuna.trial import TrialState

        self._tell(live, TrialState.FAIL, why, "failed")
        if not never:
            return
        self._never.append(why)
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(self._never) >= _SILENT_TRIALS and not done:
            raise ConfigError(f"search.objective: {len(self._never)} trials have ended, and in each {why}")

    def _out_of_memory(self, live: Live, end: End) -> None:
        """Once more, alone and with less; after that it is a constraint that the trial violates, and never the end of the search."""
        from optuna.trial import TrialState

        number = live.trial.number
        if not live.run.endswith(ALONE):
            alone = name_of(number) + ALONE
            folder = self._folder(number, alone)
            fit = self._fit(live.values, folder, again=live.fit.peak_bytes)
            if fit.fits:
                self.note(f"trial {number} ran out of memory; once more, alone")
                self._start(
                    replace(live, fit=fit, run=alone, metrics=self.trials.watched(folder, self.runner.stdout(alone))),
                    folder,
                )
                return
        live.trial.set_constraint(CONSTRAINT, max(1, live.fit.peak_bytes or 1))
        self._tell(live, TrialState.PRUNED, end.reason, "out of memory")

    def _infeasible(self, live: Live) -> None:
        """Recorded with its bytes, never launched."""
        from optuna.trial import TrialState

        fit = live.fit
        least = fit.minimum_bytes or fit.peak_bytes
        budget = fit.budget_bytes or budget_of(self.search, live.values, self.runner.ledger.capacity)
        if least:
            live.trial.set_user_attr(MINIMUM, least)
        live.trial.set_constraint(CONSTRAINT, max(1, least - budget) if least else 1)
        why = f"needs {format_bytes(least)}, and there are {format_bytes(budget)}" if least > budget else fit.message
        self._tell(live, TrialState.PRUNED, why, "infeasible")

    def _tell(self, live: Live, state: Any, words: str, kind: str, values: list[float] | None = None) -> None:
        frozen = self._stored(live.trial)
        # What Optuna's own state does not tell; each is a write to the disk.
        if kind != "done" and not frozen.state.is_finished():
            live.trial.set_user_attr(ENDED, words)
            live.trial.set_user_attr(STATE, kind)
        try:
            self.study.tell(live.trial, values, state=state, skip_if_finished=True)
        except RuntimeError as error:
            # The grid is exhausted: the trial is told, and then the sampler stops a loop that is not Optuna's.
            if "Study.stop" not in str(error):
                raise
        if kind in {"pruned", "out of memory"}:
            self.trials.forget(self._folder(live.trial.number))
        else:
            self._tidy()

    def _tidy(self) -> None:
        """Snapshots of trials that are over are removed, so that many trials of a large model do not fill the disk; by default the best ones' stay."""
        wanted = self.search.config.snapshots
        if wanted == "all" or self.search.is_command:
            return
        kept = {each.number for each in best_trials(self.study)} if wanted == "best" else set()
        for each in finished(self.study):
            if each.number not in kept | self._tidied and each.user_attrs.get(WORKER) == self.worker:
                self.trials.forget(self._folder(each.number))
                self._tidied.add(each.number)

    def _stored(self, trial: Trial) -> FrozenTrial:
        return self.study._storage.get_trial(trial._trial_id)  # noqa: SLF001 - `study.trials` copies all of them

    def close(self) -> None:
        """Stop what runs; the same command goes on with it."""
        try:
            self.runner.close()
        finally:
            self.trials.close()


@contextmanager
def _options_of_optuna() -> Iterator[None]:
    """What Optuna does not check of a sampler's or pruner's options it fails with when it uses them.

    Raises:
        ConfigError: it has.
    """
    try:
        yield
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"search.sampler and search.pruner: Optuna fails with their options ({type(error).__name__}: {error}): change them"
        ) from error


def _points_of_grid(search: Search) -> int | None:
    """How many trials a grid has; None for another sampler."""
    sampler = search.config.sampler
    if (sampler if isinstance(sampler, str) else sampler.name) != "grid":
        return None
    return math.prod(len(each.grid(name)) for name, each in search.space.items())


def _known_fit(folder: Path) -> Fit | None:
    try:
        return Fit(**json.loads((folder / "fit.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_fit(folder: Path, fit: Fit) -> None:
    (folder / "fit.json").write_text(json.dumps(asdict(fit)) + "\n", encoding="utf-8")


def _worker(folder: Path) -> str:
    """A name for who runs trials in this folder, the same whenever it comes back."""
    import socket

    return f"{socket.gethostname()}:{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def best_trials(study: Study) -> list[FrozenTrial]:
    """The best trial; with several objectives those that no other surpasses in all of them. None before the first is done."""
    from optuna.trial import TrialState

    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        return []
    return [study.best_trial] if len(study.directions) == 1 else list(study.best_trials)


def finished(study: Study) -> list[FrozenTrial]:
    """The trials of a study that are over, in order."""
    return [each for each in study.get_trials(deepcopy=False) if each.state.is_finished()]
