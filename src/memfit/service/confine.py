"""Runs a command that may read what it needs of the computer, write its own folder alone, and neither signal, trace nor connect to what is outside of it.

It is run as a script without the package (`python -I -S confine.py '{"read": [...], "write": [...], "tcp": false}' COMMAND...`), restricts itself and becomes
the command. The means is Landlock, which needs no privileges and cannot be taken off again; its documentation is at https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # numbers of the system calls, the same on all architectures
_NO_NEW_PRIVILEGES = 38  # of prctl
_CAPABILITIES = 0x20080522  # version 3 of capset's structures
_OF_PATHS = 1  # kind of a rule
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL  # the others are of folders
_LEAST = 4  # the version from which on it is about connections, too


def version() -> int:
    """Of Landlock in this kernel; 0 where it has none."""
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def available() -> bool:
    """Whether this kernel can confine a run."""
    return sys.platform == "linux" and version() >= _LEAST


def restrict(read: list[str], write: list[str], *, tcp: bool) -> None:
    """Restrict this process and all that it starts, for good, and give up all capabilities.

    Args:
        read: folders and files that may be read and executed.
        write: those that may be written, too.
        tcp: whether it may listen and connect.

    Raises:
        OSError: the kernel refuses.
    """
    libc, abi = ctypes.CDLL(None, use_errno=True), version()
    rights = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    connections = 0 if tcp else 0b11  # to listen and to connect
    scopes = 0b11 if abi >= 6 else 0  # abstract sockets and signals beyond this domain
    attributes = struct.pack("=QQQ", rights, connections, scopes)
    size = ctypes.c_size_t(24 if abi >= 6 else 16)
    rules = _checked(libc.syscall(_CREATE, attributes, size, 0))
    for paths, allowed in ((read, _READING), (write, rights)):
        for path in paths:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # what is not there cannot be read
            given = allowed & rights & (-1 if os.path.isdir(path) else _OF_FILES)  # noqa: PTH112 - no pathlib: it takes longer than the rest
            _checked(libc.syscall(_ADD, rules, _OF_PATHS, struct.pack("=Qi", given, place), 0))
            os.close(place)
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    # None but root has any; with them the environment of other processes could be read all the same.
    _checked(libc.capset(struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)))
    _checked(libc.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    """Become a command that is restricted."""
    told = json.loads(sys.argv[1])
    restrict(told["read"], told["write"], tcp=told["tcp"])
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command of a run, without a shell


if __name__ == "__main__":
    main()
