"""From a file to what is known of the failure. Two kinds of file: text that holds a message, and a snapshot (`oom/snapshot.py`)."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path
from typing import Final

from memfit.errors import InputError
from memfit.oom.failure import Failure
from memfit.oom.messages import find
from memfit.oom.snapshot import read_snapshot

_PICKLE: Final = b"\x80"  # the first byte of every pickle since protocol 2, and of no text in UTF-8
_MOST_TEXT: Final = 16 << 20  # of a log: how it ended stands at its end


def read(path: Path) -> Failure:
    """What a file tells of a failure.

    Args:
        path: text with an out-of-memory message (a log, a traceback), or what `torch.cuda.memory._dump_snapshot` wrote.

    Raises:
        InputError: it cannot be read, or tells of no failure.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(2)
            if start.startswith(_PICKLE):
                stream.seek(0)
                return read_snapshot(stream, path)
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _MOST_TEXT) // 2 * 2)
            # What PowerShell redirects into a file is in UTF-16.
            text = stream.read().decode(
                "utf-16" if start in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8", errors="replace"
            )
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    found = find(text)
    if found is None:
        raise InputError(
            f"{path} holds no out-of-memory message that memfit knows, and is no memory snapshot: give the text that the "
            "program ended with, or a file of torch.cuda.memory._dump_snapshot"
        )
    return found
