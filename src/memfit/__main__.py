"""`python -m memfit`: the command `memfit` of the Python that runs this."""

from __future__ import annotations

import sys

from memfit.cli.main import main

sys.exit(main())
