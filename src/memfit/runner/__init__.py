"""Runs as subprocesses: started, watched, limited, ended, and found again; each with a predicted peak, so that it is admitted only where it fits.

`Runner` is of this computer; `memfit.runner.cluster.ClusterRunner`, with the same face, of the machines of a Ray cluster.

Torch-free: a run's code is never imported into the process that watches it. `memfit tune` stands on this.
"""

from memfit.runner.ends import End, RankEnd
from memfit.runner.ledger import Ledger
from memfit.runner.request import RunRequest
from memfit.runner.runner import Runner
from memfit.runner.runs import Runs

__all__ = ["End", "Ledger", "RankEnd", "RunRequest", "Runner", "Runs"]
