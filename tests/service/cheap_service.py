"""A service that listens and whose runs are `cheap_program`'s, until SIGTERM: `cheap_service.py FOLDER PORT [URL HOST]`: one of several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.service.serving import Serving
from service import killing_hosts
from service.killing import settings


def main() -> None:
    """Tell local clients where, and serve."""
    folder, port, *shared = sys.argv[1:]
    told = killing_hosts.settings(Path(folder), *shared) if shared else settings(Path(folder))
    serving = Serving(told, port=int(port))

    def begun() -> None:
        serving.tell_local_clients()

    serving.run(begun)


if __name__ == "__main__":
    main()
