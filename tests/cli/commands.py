"""Commands of memfit, run in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memfit.cli.main import main


class Ran:
    """What a command left behind."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.status = main([str(a) for a in arguments])
        self.out, self.err = capsys.readouterr()

    @property
    def data(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.out)
        return read
