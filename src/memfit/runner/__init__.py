"""Runs as subprocesses: started, watched, limited, ended, and found again; each with a predicted peak, so that it is admitted only where it fits.

Torch-free: a run's code is never imported into the process that watches it. `memfit tune` stands on this.
"""

from memfit.runner.ends import End
from memfit.runner.ledger import Ledger
from memfit.runner.request import RunRequest
from memfit.runner.runner import Runner

__all__ = ["End", "Ledger", "RunRequest", "Runner"]
