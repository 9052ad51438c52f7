"""Watches one run, as its parent: a process of its own, so that a run's end is known even when the runner that started it is gone.

It is started as a script without the package (`python -I -S guard.py FOLDER`), which takes a fiftieth of a second and 10 MB. It

* claims the folder, so that no attempt is run twice: whoever creates the file `claim` first has it, and a guard that comes second ends at once;
* runs the command in a session of its own, under a limit of memory, first in line when the kernel runs out of memory;
* on SIGTERM passes the signal on and kills after the grace; kills at once on SIGUSR1, on SIGQUIT (the runner ends, and the next begins the run again), at the
  limits of time and silence, and (unless the run is to go on) when the runner dies;
* leaves no process of the run behind, whatever session it moved to: as a "subreaper" it becomes the parent of all that are orphaned;
* ends a run whose lease is over: its host writes the lease anew as long as the other hosts know that it lives, and once they may think otherwise they may start
  the run elsewhere. Such a run is watched by a second process, which ends it where this one is killed or halted, and is replaced where it is killed itself;
* writes how it ended into `end.json`, whose bytes it takes from the disk before it starts, so that a full disk loses no end; and whether the disk is full.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False  # without typing, whose import takes as long as all the others
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

CLAIM = "claim"
END = "end.json"
SPEC = "spec.json"
ATTEMPT = "MEMFIT_ATTEMPT"
"""Variable of a run's environment: the folder of the attempt that it is."""
_END_BYTES = 1024
# Free on a disk that is called full: a program whose write has failed may leave a part of a block.
_FULL_BYTES = 64 << 10
_DEATHSIG, _SUBREAPER = 1, 36  # of prctl
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None where there is no such process, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 - no pathlib: it takes longer than the rest
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def halted(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 - as above
            return stream.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def boot() -> str:
    """Which boot of the computer this is: ticks count from there."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:  # noqa: PTH123 - as above
            return stream.read().strip()
    except OSError:
        return ""


def claim(folder: str, content: dict[str, Any]) -> bool:
    """Whether this process is the first to claim an attempt's folder; the claim appears whole or not at all."""
    waiting = os.path.join(folder, f".claim-{os.getpid()}")  # noqa: PTH118 - as above
    with open(waiting, "w", encoding="utf-8") as stream:  # noqa: PTH123
        json.dump(content, stream)
    try:
        os.link(waiting, os.path.join(folder, CLAIM))  # noqa: PTH118
    except FileExistsError:
        return False
    finally:
        os.unlink(waiting)  # noqa: PTH108
    return True


def since_boot() -> float:
    """Seconds since the computer started, those in which it slept included; nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_lease(file: str, ends: float, last: float) -> None:
    """Say until when runs may go on. A file that is there is written in place, so that a full disk ends no lease.

    Args:
        file: of the lease.
        ends: of `since_boot`, when runs are told to end.
        last: when those that have not are killed.
    """
    line = f"{ends:017.3f} {last:017.3f} {boot()}\n"
    written = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(written, (line * 2).encode(), 0)  # twice: whoever reads in the middle of it sees that they differ
    finally:
        os.close(written)


class Lease:
    """Until when a run may go on, as its host says in a file.

    Args:
        file: that `write_lease` writes; "" for a run that needs no lease.
    """

    def __init__(self, file: str) -> None:
        self.file, self.ends, self.last = file, 0.0, 0.0  # over, until something else is read
        self.told = -1  # where a new lease is told to the second watcher

    def _look(self) -> float:
        try:
            with open(self.file, encoding="ascii") as stream:  # noqa: PTH123 - as above
                first, second = stream.read().split("\n")[:2]
            ends, last, booted = first.split()
            if first == second and booted == boot() and (float(ends), float(last)) != (self.ends, self.last):
                self.ends, self.last = float(ends), float(last)
                if self.told >= 0:
                    os.write(self.told, f"{ends} {last}\n".encode())
        except (OSError, ValueError):
            pass  # what was read before holds
        return since_boot()

    def is_over(self) -> bool:
        """Whether the run is to be told to end."""
        if not self.file:
            return False
        now = self._look()
        return now > self.ends

    def seconds_left(self) -> float:
        """Until it is killed."""
        now = self._look()
        return self.last - now


def end_left_behind(folder: str) -> int:
    """Kill all that is left of an attempt, and wait until it is gone.

    What belongs to it is told by a variable of its environment, which the guard sets and whatever is started inherits, in whatever session. A process that
    was started without its parent's environment is not found.

    Args:
        folder: of the attempt.

    Returns:
        How many there were.
    """
    mark, ended = f"{ATTEMPT}={folder}".encode(), 0
    while there := _marked(mark):  # again: one may have started another in the meantime
        for watch in there:
            try:
                signal.pidfd_send_signal(watch, signal.SIGKILL)
            except OSError:
                continue
        for watch in there:
            select.select([watch], [], [])
            os.close(watch)
        ended += len(there)
    return ended


def _marked(mark: bytes) -> list[int]:
    """Processes with a variable in their environment, as file descriptors that are readable once they have ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names alone are wanted
        try:
            watch = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as stream:  # noqa: PTH123 - as above
                has = mark in stream.read().split(b"\0")
        except OSError:
            has = False
        if has and not select.select([watch], [], [], 0)[0]:
            found.append(watch)
        else:
            os.close(watch)
    return found


def _seconded(folder: str, lease: Lease) -> int:
    """A second process that watches this one, as a file descriptor: nobody else may come to end what a killed watcher leaves behind.

    It opens no file: of a network file system that does not answer, whoever reads the lease waits, and the run may go on. So it is told each new lease, and
    where it has heard of none for too long it ends this process, and the run.
    """
    if lease.told >= 0:  # of the one before
        os.close(lease.told)
    watched = os.pidfd_open(os.getpid())
    heard, lease.told = os.pipe()
    os.set_blocking(lease.told, False)
    pid = os.fork()
    if pid:
        os.close(watched)
        os.close(heard)
        return os.pidfd_open(pid)
    try:
        os.setsid()
        os.close(lease.told)
        ends, last = lease.ends, lease.last
        while True:
            # Later than the first one would have ended the run, and before others may have it: after 1.75 of two leases.
            wait = last + (last - ends) / 2 - since_boot()
            ready = select.select([watched, heard], [], [], max(0.0, wait))[0]
            if watched in ready:
                break
            if heard in ready:
                lines = os.read(heard, 1 << 16).split(b"\n")[:-1]
                if lines:  # nothing is heard of one that is about to be gone
                    ends, last = map(float, lines[-1].split())
            elif wait <= 0:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
                select.select([watched], [], [])
        end_left_behind(folder)
    finally:
        os._exit(0)


def _oom_kills() -> int:
    """How many processes the kernel has killed in this control group for want of memory; 0 where that cannot be read."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as stream:  # noqa: PTH123
            path = stream.read().rpartition("0::")[2].strip()
        with open(f"/sys/fs/cgroup{path.rstrip('/')}/memory.events", encoding="ascii") as stream:  # noqa: PTH123
            return int(dict(line.split() for line in stream).get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _children() -> list[int]:
    """Processes whose parent this one is."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
                    fields = stream.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] not in "ZX":
                found.append(int(name))
    return found


def _kill_all() -> None:
    """Kill every process of the run: each one's children become ours when it dies."""
    while children := _children():
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        _reap(None)
        time.sleep(0.002)
    _reap(None)


def _reap(keep: int | None) -> None:
    """Collect what has ended, but for the command itself."""
    while True:
        try:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if seen is None or seen.si_pid == keep:
            return
        os.waitpid(seen.si_pid, os.WNOHANG)


def _in_child(libc: ctypes.CDLL, limit: int | None, mask: set[Any]) -> Callable[[], None]:
    """What the command's process is given before the command begins."""
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_DEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # killed before that: nobody watches any more
            os.kill(os.getpid(), signal.SIGKILL)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:  # noqa: PTH123
                stream.write("500")
        except OSError:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _sign_of_life(files: Iterable[str]) -> float:
    times = [0.0]
    for file in files:
        try:
            times.append(os.stat(file).st_mtime)  # noqa: PTH116
        except OSError:
            continue
    return max(times)


class Limits:
    """Of time and of silence, both by a clock that does not jump when the computer's time is set.

    Args:
        seconds: from the start, or None.
        silent_seconds: without a new sign of life, or None.
        now: of time.monotonic().
    """

    def __init__(self, seconds: float | None, silent_seconds: float | None, now: float) -> None:
        self.seconds, self.silent_seconds, self.begun = seconds, silent_seconds, now
        self._sign, self._since = 0.0, now

    def passed(self, now: float, sign: float) -> str:
        """Which limit has passed: "time", "silence", or "" for none.

        Args:
            now: of time.monotonic().
            sign: the last change of what is watched, as its file tells it; only that it is another one counts.
        """
        if sign != self._sign:
            self._sign, self._since = sign, now
        if self.seconds is not None and now - self.begun > self.seconds:
            return "time"
        if self.silent_seconds is not None and now - self._since > self.silent_seconds:
            return "silence"
        return ""


def main(folder: str) -> int:
    """Run what `spec.json` in a folder says, and write `end.json` beside it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    # The runner has blocked them already, so that none is lost that comes before this line.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) - set(SIGNALS)

    def place(name: str) -> str:
        return os.path.join(folder, name)  # noqa: PTH118

    with open(place(SPEC), encoding="utf-8") as stream:  # noqa: PTH123
        spec = json.load(stream)
    if not spec["outlives_runner"]:
        libc.prctl(_DEATHSIG, signal.SIGUSR2, 0, 0, 0)
    with open(place(f".{END}"), "wb") as space:  # noqa: PTH123
        space.write(b" " * _END_BYTES)
        space.flush()
        os.fsync(space.fileno())
    if not claim(folder, {"pid": os.getpid(), "started": started(os.getpid()), "boot": boot()}):
        return 3
    kills = _oom_kills()
    limits = Limits(spec["seconds"], spec["silent_seconds"], time.monotonic())
    lease = Lease(spec.get("lease", ""))
    second = None
    end: dict[str, Any] = {"status": None, "signal": None, "reason": "", "forced": False, "resident_bytes": 0}

    def orphaned() -> bool:
        return not spec["outlives_runner"] and os.getppid() != spec["runner"]

    child = None
    if lease.is_over():
        end["reason"] = "lease"
    else:
        second = _seconded(folder, lease) if lease.file else None
        try:
            with open(place("stdout"), "ab") as out, open(place("stderr"), "ab") as err:  # noqa: PTH123
                child = subprocess.Popen(  # noqa: S603 - what the user asked to be run
                    spec["command"],
                    cwd=spec["folder"] or None,
                    env={**os.environ, **spec["environment"], ATTEMPT: folder},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=_in_child(libc, spec["memory_limit_bytes"], mask),  # noqa: PLW1509 - there are no threads
                )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            end["error"] = f"{spec['command'][0]}: {getattr(error, 'strerror', None) or error}"
    kill_at = None
    files = (place("stdout"), place("stderr"), spec["watched"])
    while child is not None:
        _reap(child.pid)
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        if pid:
            end["status"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            end["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            end["resident_bytes"] = used.ru_maxrss * 1024
            break
        now = time.monotonic()
        if kill_at is not None and now >= kill_at:
            end["forced"] = end["forced"] or spec["grace_seconds"] > 0
            os.kill(child.pid, signal.SIGKILL)
        if second is not None and select.select([second], [], [], 0)[0]:
            os.close(second)
            second = _seconded(folder, lease)
        if lease.is_over():
            if not end["reason"]:
                end["reason"] = "lease"
                _tell(child.pid)
            last = now + lease.seconds_left()
            kill_at = last if kill_at is None else min(kill_at, last)
        if not end["reason"]:
            end["reason"] = limits.passed(now, _sign_of_life(files))
            if not end["reason"] and orphaned():
                end["reason"], kill_at = "runner died", now
                continue
            if end["reason"]:
                kill_at = now + spec["grace_seconds"]
                _tell(child.pid)
        limited = spec["seconds"] is not None or spec["silent_seconds"] is not None or bool(lease.file)
        wait = 0.05 if kill_at is not None else 0.5 if limited else 2.0
        got = signal.sigtimedwait(SIGNALS, wait)
        number = None if got is None else got.si_signo
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and kill_at is None:
            end["reason"], kill_at = "asked", time.monotonic() + spec["grace_seconds"]
            _tell(child.pid)
        elif number == signal.SIGUSR1:
            end["reason"] = end["reason"] or "asked"
            os.kill(child.pid, signal.SIGKILL)
        elif number == signal.SIGQUIT:
            end["reason"] = end["reason"] or "runner closed"
            os.kill(child.pid, signal.SIGKILL)
        elif number == signal.SIGUSR2 and orphaned():
            end["reason"] = "runner died"
            os.kill(child.pid, signal.SIGKILL)
    end["disk_full"] = is_full(folder, spec["folder"], os.path.dirname(spec["watched"]))  # noqa: PTH120
    _kill_all()
    end["oom_kills"] = _oom_kills() - kills
    end["seconds"] = time.monotonic() - limits.begun
    with open(place(f".{END}"), "r+b") as taken:  # noqa: PTH123
        taken.write(json.dumps(end).encode()[:_END_BYTES].ljust(_END_BYTES))
        taken.flush()
        os.fsync(taken.fileno())
    os.rename(place(f".{END}"), place(END))  # noqa: PTH104
    return 0


def is_full(*folders: str) -> bool:
    """Whether one of these folders is on a disk without space; "" for none."""
    for folder in filter(None, folders):
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        if found.f_bavail * found.f_frsize < _FULL_BYTES:
            return True
    return False


def _tell(pid: int) -> None:
    """The end signal, to the command and all of its group."""
    try:
        os.killpg(pid, signal.SIGTERM)
        os.killpg(pid, signal.SIGCONT)  # one that is halted (SIGSTOP, Ctrl-Z) would not see it
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
