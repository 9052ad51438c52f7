"""A search file run by Ray Tune in place of `memfit tune`: for those whose machines, callbacks and dashboards are Ray's already.

Ray Tune keeps the study and decides what runs when; Optuna's sampler proposes, through Ray's own `OptunaSearch`. What memfit adds: each trial is planned when
Ray makes it, and asks Ray for its predicted peak as a custom resource, so that trials run side by side where they fit; what cannot fit is reported as
infeasible with its bytes, and never launched; a trial runs under the same guard and limits as in `memfit tune`.
Source: https://docs.ray.io/en/latest/tune/api/doc/ray.tune.with_resources.html (resources that depend on a trial's parameters)
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memfit.errors import ConfigError, InputError
from memfit.runner import End, Runner
from memfit.runner.cluster import RESOURCE
from memfit.tune.capacity import capacity_of, largest_device
from memfit.tune.metrics import Metrics
from memfit.tune.plans import Fit
from memfit.tune.results import values_of
from memfit.tune.sampling import sampler_of
from memfit.tune.search import Objective, Search
from memfit.tune.trials import CommandTrials, MemfitTrials

if TYPE_CHECKING:
    from ray.tune import ResultGrid, RunConfig

STATE: Final = "memfit_state"  # of a trial, as in the results of `memfit tune`
BYTES: Final = "memfit_peak_bytes"  # predicted; of an infeasible trial the smallest budget that would do
_MIB: Final = 1 << 20
_PLANS: Final = "plans"  # folder in `out`: by the values of a trial
_POLL_SECONDS: Final = 0.5
_SCHEDULERS: Final = {
    "none": "FIFOScheduler",
    "median": "MedianStoppingRule",
    "halving": "ASHAScheduler",
    "hyperband": "HyperBandScheduler",
}
_planners: dict[Path, MemfitTrials | CommandTrials] = {}  # of this process, which makes Ray's trials


def ray_tune(search: Search, run_config: RunConfig | None = None) -> ResultGrid:
    """Search with Ray Tune.

    Args:
        search: from `load_search` or `read_search`. `trials`, `at_once`, `sampler` and `pruner` (none, median, halving, hyperband) are Ray Tune's to
            honour; its store, heartbeat and several ranks are not.
        run_config: Ray Tune's own, such as its callbacks; its results go into `search.out` when left out.

    Returns:
        Ray Tune's results. Each has the metrics of its trial, `memfit_state` ("done", "infeasible" or "out of memory") and `memfit_peak_bytes`.

    Raises:
        InputError: Ray is missing, or there is no cluster at `search.cluster`.
        ConfigError: Ray Tune has no such pruner, or a trial has several ranks.
    """
    try:
        import ray
        from ray import tune
        from ray.tune.search.optuna import OptunaSearch
    except ImportError as error:
        raise InputError(f"Ray Tune is missing ({error.name}): pip install 'memfit[raytune]'") from error
    config, objectives = search.config, search.config.objectives
    scheduler = _scheduler(search)
    capacity = _connect(ray, search)
    shutil.rmtree(
        search.out / _PLANS, ignore_errors=True
    )  # of an earlier call, when model or data may have been others
    names = [each.name for each in objectives]
    modes = [each.direction[:3] for each in objectives]
    one = len(objectives) == 1

    algorithm = OptunaSearch(
        space={name: each.distribution() for name, each in search.space.items()},
        metric=names[0] if one else names,
        mode=modes[0] if one else modes,
        sampler=sampler_of(search, config.seed),
        points_to_evaluate=[
            {key: search.space[key].label(value, "search.start") for key, value in each.items()}
            for each in config.start
        ]
        or None,
    )

    def resources(values: dict[str, Any]) -> Any:
        fit = _planned(search, values, capacity)
        size = fit.peak_bytes if fit.fits else 0
        return tune.PlacementGroupFactory([{RESOURCE.format(fit.device): max(1, math.ceil(size / _MIB))}])

    tuner = tune.Tuner(
        tune.with_resources(_trainable(search, capacity), resources),
        tune_config=tune.TuneConfig(
            metric=names[0] if one else None,
            mode=modes[0] if one else None,
            search_alg=algorithm,
            scheduler=scheduler,
            num_samples=config.trials,
            max_concurrent_trials=None if config.at_once == "auto" else config.at_once,
        ),
        run_config=run_config or tune.RunConfig(name="raytune", storage_path=str(search.out), verbose=0),
    )
    try:
        return tuner.fit()
    finally:
        trials = _planners.pop(search.out, None)
        if trials is not None:
            trials.close()


def _scheduler(search: Search) -> Any:
    from ray.tune import schedulers

    pruner = search.config.pruner
    name, options = (pruner, {}) if isinstance(pruner, str) else (pruner.name, dict(pruner.options))
    if name not in _SCHEDULERS:
        raise ConfigError(f"search.pruner: Ray Tune has no {name}; it has {', '.join(_SCHEDULERS)}")
    return getattr(schedulers, _SCHEDULERS[name])(**options)


def _connect(ray: Any, search: Search) -> int | None:
    """Connect to the cluster that the search names, or to Ray on this computer with the bytes of its budget; the bytes of the largest device."""
    if search.config.cluster is not None:
        from memfit.runner.cluster import connected

        connected(search.config.cluster)
        told = [name for node in ray.nodes() for name in node["Resources"].items()]
        return max((int(size) * _MIB for name, size in told if name.startswith("memfit_c")), default=None)
    capacity = capacity_of(search)
    sizes = {RESOURCE.format(name.partition(":")[0]): size // _MIB for name, size in capacity.items()}
    if len(sizes) < len(capacity):
        raise ConfigError(
            "search.devices: for Ray Tune each device is a machine of a cluster of its own: name search.cluster"
        )
    if not ray.is_initialized():
        # Of what no bytes are known nothing is held back.
        ray.init(
            resources=sizes or {RESOURCE.format("cpu"): search.config.trials},
            include_dashboard=False,
            log_to_driver=False,
        )
    return largest_device(capacity)


def _trials_of(search: Search) -> MemfitTrials | CommandTrials:
    return CommandTrials(search) if search.is_command else MemfitTrials(search)


def _plan_folder(search: Search, config: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]
    return search.out / _PLANS / key


def _planned(search: Search, config: Mapping[str, Any], capacity: int | None) -> Fit:
    """The plan of a trial; made once for the same values, by the process that makes trials."""
    folder = _plan_folder(search, config)
    file = folder / "fit.json"
    if not file.exists():
        trials = _planners.setdefault(search.out, _trials_of(search))
        fit = trials.fit(values_of(search, dict(config)), folder)
        if len(fit.by_rank) > 1:
            raise ConfigError("fit.devices, search.ranks: through Ray Tune a trial has one rank; leave them out")
        if fit.fits and capacity is not None and fit.peak_bytes > capacity:
            fit = replace(fit, fits=False, minimum_bytes=fit.peak_bytes, message="more than the largest device has")
        waiting = file.with_name(".fit.json")
        waiting.write_text(json.dumps(asdict(fit)), encoding="utf-8")
        waiting.replace(file)
    return Fit(**json.loads(file.read_text(encoding="utf-8")))


def _trainable(search: Search, capacity: int | None) -> Callable[[dict[str, Any]], None]:
    """What Ray runs for a trial."""

    def trial(config: dict[str, Any]) -> None:
        from ray import tune

        for report in reports(search, config, tune.get_context().get_trial_id() or "trial", capacity):
            tune.report(report)

    return trial


def reports(search: Search, config: Mapping[str, Any], name: str, capacity: int | None) -> Iterator[dict[str, Any]]:
    """Run one trial, and tell what it reports, as Ray Tune takes it: every value of the first objective, and everything at its end.

    Args:
        search: whose trial it is.
        config: values of the parameters, choices by their labels.
        name: of the trial.
        capacity: bytes of the largest device; None where nothing is said of them.

    Raises:
        InputError: the trial failed; with the reason.
    """
    fit = _planned(search, config, capacity)
    worst = {each.name: math.inf if each.direction == "minimize" else -math.inf for each in search.config.objectives}
    if fit.error:
        raise InputError(f"the trial could not be planned: {fit.message}")
    if not fit.fits:
        yield {**worst, STATE: "infeasible", BYTES: fit.minimum_bytes or fit.peak_bytes}
        return
    trials, folder = _trials_of(search), search.out / "trials" / name
    folder.mkdir(parents=True, exist_ok=True)
    values = values_of(search, dict(config))
    if isinstance(trials, MemfitTrials):
        trials.write(trials.config(values, folder), folder)
        shutil.copyfile(_plan_folder(search, config) / "plan.json", folder / "plan.json")
    request = trials.request(name, 0, values, folder, fit)
    sizes = {fit.device: sum(request.rank_bytes), **request.peak_bytes}
    told: set[int] = set()
    with Runner(folder / "runner", sizes) as runner:
        runner.submit(request)
        while (end := runner.end_of(name)) is None:
            runner.poll(_POLL_SECONDS)
            if len(search.config.objectives) == 1:
                seen = trials.watched(folder, runner.stdout(name)).read()
                for step, value in seen.values.get(search.config.objectives[0].name, ()):
                    if step not in told and math.isfinite(value):
                        told.add(step)
                        yield {search.config.objectives[0].name: value, "step": step}
        metrics = trials.watched(folder, runner.stdout(name)).finished()
        final = trials.final(folder, runner.stdout(name), fit, end.seconds, metrics)
    yield _last(search, end, final, fit, worst)


def _last(search: Search, end: End, metrics: Metrics, fit: Fit, worst: Mapping[str, float]) -> dict[str, Any]:
    known = {BYTES: fit.peak_bytes}
    if end.kind == "out_of_memory":
        return {**worst, STATE: "out of memory", **known}
    if end.kind != "done":
        raise InputError(f"the trial failed: {end.text}")
    values = {name: last for name in metrics.values if (last := metrics.last(name)) is not None}
    counted = {each.name: _counted(each, metrics) for each in search.config.objectives}
    return {**values, **counted, STATE: "done", **known}


def _counted(objective: Objective, metrics: Metrics) -> float:
    """The value that counts.

    Raises:
        InputError: it was never reported as a number.
    """
    series = [value for _, value in metrics.values.get(objective.name, ())]
    good = [value for value in series if math.isfinite(value)]
    if not good or not math.isfinite(series[-1]):
        raise InputError(f"the trial failed: {objective.name} was never reported as a number, or is not one at the end")
    return (min if objective.direction == "minimize" else max)(good) if objective.take == "best" else series[-1]
