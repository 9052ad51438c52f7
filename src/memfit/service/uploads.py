"""Code that a client sends: a zip archive, unpacked once under its digest. What it holds is counted as it is unpacked; what its headers say is not believed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from memfit.service.own_folder import is_services
from memfit.service.refusals import Refusal, TooLargeError
from memfit.units import format_bytes

_CHUNK: Final = 1 << 20
_LONGEST_PATH: Final = 400
_DEEPEST_PATH: Final = 20


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What an upload may hold.

    Attributes:
        bytes: of the archive.
        unpacked_bytes: of all files in it.
        files: and folders.
    """

    bytes: int = 64 << 20
    unpacked_bytes: int = 256 << 20
    files: int = 2000


@dataclass(frozen=True, slots=True)
class Upload:
    """Code that was uploaded.

    Attributes:
        digest: SHA-256 of the archive, by which submissions name it.
        bytes: of its files.
        files: in it.
    """

    digest: str
    bytes: int
    files: int


def unpack(archive: Path, folder: Path, limits: UploadLimits) -> Upload:
    """Unpack an archive into a folder that is not there yet, all of it or nothing.

    Args:
        archive: of a client.
        folder: is made; its parent is there.
        limits: of what is taken.

    Raises:
        Refusal: it is no archive, or holds what is not taken: a link, a path out of the folder, a name twice, an encrypted file.
        TooLargeError: too many files or bytes.
    """
    # One of its own for each upload: the same archive may be sent twice at the same moment.
    waiting = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        with archive.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        files, size = _unpacked(archive, waiting, limits)
        try:
            waiting.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # It is there already, with the same files.
    except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeError, RuntimeError) as error:
        raise Refusal(f"the upload is no zip archive that can be read: {error}") from error
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
            raise  # nothing that the archive could mend
        raise Refusal(f"the upload cannot be unpacked: {error.strerror or error}") from error
    finally:
        shutil.rmtree(waiting, ignore_errors=True)
    return Upload(digest, size, files)


def _unpacked(archive: Path, folder: Path, limits: UploadLimits) -> tuple[int, int]:
    left, files, seen = limits.unpacked_bytes, 0, set[str]()
    with zipfile.ZipFile(archive) as opened:
        entries = opened.infolist()
        if len(entries) > limits.files:
            raise TooLargeError(f"the upload holds {len(entries)} files, and {limits.files} are taken")
        for entry in entries:
            name = checked_name(entry)
            if name.casefold() in seen:
                raise Refusal(f"the upload holds {name!r} twice")
            seen.add(name.casefold())
            if entry.is_dir():
                (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with opened.open(entry) as source, (folder / name).open("xb") as target:
                left = _copied(source, target, left, limits)
            files += 1
    return files, limits.unpacked_bytes - left


def _copied(source: IO[bytes], target: IO[bytes], left: int, limits: UploadLimits) -> int:
    """Copy a file; the bytes that may still come after it."""
    while chunk := source.read(_CHUNK):
        left -= len(chunk)
        if left < 0:
            raise TooLargeError(f"the upload unpacks to more than {format_bytes(limits.unpacked_bytes)}")
        target.write(chunk)
    return left


def checked_name(entry: zipfile.ZipInfo) -> str:
    """Where a file of an archive goes, below the folder.

    Raises:
        Refusal: not there, or it is no plain file.
    """
    name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
    if entry.flag_bits & 0x1:
        raise Refusal(f"the upload holds an encrypted file, {name!r}")
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise Refusal(f"the upload holds {name!r}, which is a link or another special file")
    parts = PurePosixPath(name).parts
    printable = name.isprintable() and "\\" not in name and ":" not in name
    if not parts or name.startswith("/") or ".." in parts or not printable:
        raise Refusal(f"the upload holds {name[:80]!r}, which is no path below its folder")
    if len(name) > _LONGEST_PATH:
        raise Refusal(
            f"the upload holds a path of {len(name)} characters, and {_LONGEST_PATH} are taken: {name[:80]}..."
        )
    if len(parts) > _DEEPEST_PATH:
        raise Refusal(f"the upload holds a path of {len(parts)} parts, and {_DEEPEST_PATH} are taken: {name[:80]}...")
    return PurePosixPath(name).as_posix()


def packed(folder: Path, archive: IO[bytes]) -> None:
    """Pack a folder of code as `unpack` takes it; the same files give the same bytes.

    Args:
        folder: whose regular files are packed, but hidden ones, Python's caches and folders of a service, which hold a token and all code that was sent.
        archive: written to.

    Raises:
        TooLargeError: it holds more than a service takes, as a folder of data does.
    """
    limits, files, size = UploadLimits(), 0, 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for place, folders, names in os.walk(folder):
            known = (each for each in folders if not each.startswith(".") and each != "__pycache__")
            folders[:] = sorted(each for each in known if not is_services(Path(place) / each))
            for name in sorted(names):
                file = Path(place) / name
                if name.startswith(".") or file.is_symlink() or not file.is_file():
                    continue
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                size, files = size + file.stat().st_size, files + 1
                if size > limits.unpacked_bytes:
                    raise TooLargeError(f"the upload unpacks to more than {format_bytes(limits.unpacked_bytes)}")
                if files > limits.files:
                    raise TooLargeError(f"the upload holds more than {limits.files} files")
                with file.open("rb") as source, target.open(entry, "w") as copy:
                    shutil.copyfileobj(source, copy)
    if archive.tell() > limits.bytes:
        raise TooLargeError(f"the upload has more than {format_bytes(limits.bytes)}")
