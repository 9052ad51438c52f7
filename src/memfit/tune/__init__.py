"""Many runs: a search over what a configuration leaves open, in which each trial is planned before it starts.

    from memfit.tune import load_search, run
    found = run(load_search("search.yaml"))
    print(found.best[0].params)

Optuna proposes, `memfit.runner` runs. Needs `pip install 'memfit[tune]'`; torch is imported in the processes of trials alone.
"""

from memfit.tune.call import run
from memfit.tune.ray_tune import ray_tune
from memfit.tune.results import Results, TrialRow
from memfit.tune.search import Search, load_search, read_search

__all__ = ["Results", "Search", "TrialRow", "load_search", "ray_tune", "read_search", "run"]
