"""A service that listens and whose runs are `cheap_program`'s, until SIGTERM: `cheap_service.py FOLDER PORT`."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.service.serving import Serving
from service.killing import settings


def main() -> None:
    """Tell local clients where, and serve."""
    serving = Serving(settings(Path(sys.argv[1])), port=int(sys.argv[2]))

    def begun() -> None:
        serving.tell_local_clients()

    serving.run(begun)


if __name__ == "__main__":
    main()
