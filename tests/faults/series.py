"""Series of tries, one for each fault that befalls a run on disk: each returns a tally, in which nothing may be lost."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

from faults.runs import DONE, INTERRUPTED, KILLED, End, Fault, Tally, Workplace, fill, interrupt, kill
from memfit.errors import SnapshotError
from memfit.train import snapshot_folders, snapshots

MOST_FAULTS = 3  # in one try, before it is let through to its end
FILES = ("model.pt", "optimizer.pt", "loop.pt", "snapshot.json")


def killed(place: Workplace, tries: int, draw: Random) -> Tally:
    """Process killed (kill -9), at moments and at times, of `train` and of the `resume` after it, again and again, then to the end."""

    def wrong(_out: Path, end: End) -> str | None:
        return _unless(end, KILLED)

    return _stopped(place, "kill -9", tries, "killed", draw, kill, signal.SIGKILL, wrong)


def interrupted(place: Workplace, tries: int, draw: Random) -> Tally:
    """Ctrl-C at moments and at times; a snapshot of the last whole step has to be there once training had begun."""

    def wrong(out: Path, end: End) -> str | None:
        return _unless(end, INTERRUPTED) or _stopped_whole(out, end)

    return _stopped(place, "Ctrl-C", tries, "interrupted", draw, interrupt, signal.SIGINT, wrong)


def _stopped(
    place: Workplace,
    name: str,
    tries: int,
    folder: str,
    draw: Random,
    fault: Fault,
    number: int,
    wrong_with: Callable[[Path, End], str | None],
) -> Tally:
    """Stopped by a fault at a moment, or by a signal with this number after a time, up to MOST_FAULTS times; then to the end."""
    tally = Tally(name)
    for attempt in range(tries):
        out = place.folder / f"{folder}-{attempt}"
        stops, wrong = 0, None
        for _ in range(draw.randint(1, MOST_FAULTS)):
            end = (
                place.go_on(out, at=place.draw(draw), fault=fault)
                if draw.random() < 0.7
                else place.go_on(out, after_s=draw.random() * place.seconds, number=number)
            )
            if end.status == DONE:
                break
            stops += 1
            wrong = wrong_with(out, end)
            if wrong is not None:
                break
        tally.add(stops, wrong or _finish(place, out))
    return tally


def _stopped_whole(out: Path, end: End) -> str | None:
    """When the loop was asked to stop, what it says it has done is what the snapshot holds."""
    if "stopping: the running step is finished" not in end.said:
        return None  # before or after training: nothing to save
    found = re.search(r"(\d+) of \d+ steps done", end.said)
    newest = snapshot_folders.folders(out)[-1:]
    if found is None or not newest:
        return f"stopped without a snapshot: {end.said[-300:]}"
    if newest[0].name != f"step-{int(found[1]):06d}":
        return f"stopped at step {found[1]}, the snapshot is {newest[0].name}"
    return None


def full_disk(place: Workplace, tries: int, draw: Random) -> Tally:
    """Every write from a drawn moment on fails with ENOSPC; then there is room again."""

    def run(out: Path) -> End:
        return place.go_on(out, at=place.draw(draw, ("open", "write", "fsync", "rename", "mkdir")), fault=fill)

    return _full(place, "full disk (ENOSPC)", tries, "full", run)


def full_below(place: Workplace, tries: int, draw: Random) -> Tally:
    """The disk is full from a drawn write on of what is offloaded: activations, optimizer state, or streamed layers. No snapshot is written then."""

    def run(out: Path) -> End:
        return place.go_on(out, at=place.draw(draw, ("below",)), fault=fill)

    return _full(place, "full disk below (ENOSPC)", tries, "full_below", run, status=2)


def too_large(place: Workplace, tries: int, draw: Random) -> Tally:
    """The kernel lets no file grow past a drawn size (RLIMIT_FSIZE): real failing writes, in the middle of any file."""
    largest = max(f.stat().st_size for f in place.whole.rglob("*") if f.is_file())

    def run(out: Path) -> End:
        return place.go_on(out, most_bytes=draw.randrange(largest))

    return _full(place, "file size limit (EFBIG)", tries, "limited", run)


def _full(
    place: Workplace, name: str, tries: int, folder: str, run: Callable[[Path], End], *, status: int = 3
) -> Tally:
    tally = Tally(name)
    for number in range(tries):
        out = place.folder / f"{folder}-{number}"
        end = run(out)
        if end.status == DONE:  # the moment was never reached, or no file was as large
            tally.add(0, _finish(place, out))
            continue
        tally.add(1, _said_clearly(end, status) or _older_are_whole(out) or _finish(place, out))
    return tally


def _said_clearly(end: End, status: int) -> str | None:
    """A sentence of memfit's, no traceback, and the exit status that goes with it."""
    if "Traceback" in end.said or "memfit: " not in end.said:
        return f"no clear error, status {end.status}: {end.said[-1500:]}"
    return _unless(end, status)


def _older_are_whole(out: Path) -> str | None:
    for folder in snapshot_folders.folders(out):
        try:
            snapshots.read(folder)
        except SnapshotError as error:
            return f"a snapshot was damaged: {error}"
    return None


def damaged(place: Workplace, tries: int, draw: Random, *, resumed: int) -> Tally:
    """A flipped bit, or a cut, at a drawn place of a drawn file of the newest snapshot.

    Args:
        place: of the run.
        tries: places.
        draw: of the places.
        resumed: for so many of them, `memfit resume` is run to the end; for the others, only what it would start from is looked at.
    """
    tally = Tally("damaged snapshot")
    finished = place.folder / "finished"
    shutil.copytree(place.whole, finished)
    before, newest = snapshot_folders.folders(finished)[-2:]
    original = {name: (newest / name).read_bytes() for name in FILES}
    for number in range(tries):
        name = draw.choice(FILES)
        content = bytearray(original[name])
        at = draw.randrange(len(content))
        if draw.random() < 0.5:
            content[at] ^= 1 << draw.randrange(8)
        else:
            del content[at:]
        where = f"{name}, byte {at} of {len(original[name])}"
        if number < resumed:
            out = place.folder / f"damaged-{number}"
            shutil.copytree(finished, out)
            (out / newest.name / name).write_bytes(bytes(content))
            end = place.resume(out)
            told = newest.name in end.said and "trying the one before" in end.said
            tally.add(1, _unless(end, DONE) or (None if told else f"{where}: said nothing") or _differs(place, out))
            continue
        (newest / name).write_bytes(bytes(content))
        notices: list[str] = []
        found = snapshots.latest(finished, notices.append)
        seen = found.folder == before and len(notices) == 1 and newest.name in notices[0]
        tally.add(1, None if seen else f"{where}: {found.folder.name} was used, notices: {notices}")
        (newest / name).write_bytes(original[name])
    shutil.rmtree(finished)
    return tally


def _unless(end: End, status: int) -> str | None:
    return None if end.status == status else f"status {end.status}: {end.said[-1500:]}"


def _finish(place: Workplace, out: Path) -> str | None:
    """Go on without faults to the end; what is wrong with it then."""
    end = place.go_on(out)
    return _unless(end, DONE) or _differs(place, out)


def _differs(place: Workplace, out: Path) -> str | None:
    wrong = place.differs(out)
    if wrong is None:
        shutil.rmtree(out)  # what is lost stays, to be looked at
    return None if wrong is None else f"{out.name}: {wrong}"
