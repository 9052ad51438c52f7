"""What is started for a run: `memfit plan`, then `memfit train`, in an environment without secrets, confined to the run's folder."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from itertools import chain
from pathlib import Path
from typing import Final

import memfit
from memfit.runner import RunRequest
from memfit.runner.cores import CORES, THREADS, runs_at_once, threads
from memfit.runner.machines import Machines
from memfit.service import confine
from memfit.service.planned import Planned
from memfit.service.settings import ServiceSettings
from memfit.service.store import StoredRun
from memfit.service.submission import device_kind
from memfit.train.limit_variable import VARIABLE as MEMORY_LIMIT
from memfit.values.script import TIERS

# Of the service's environment what a run gets. No token, key or proxy is among them.
_PASSED_ON: Final = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    THREADS,
    "MKL_NUM_THREADS",
)
_SYSTEM: Final = (
    "/usr", "/lib", "/lib64", "/bin", "/opt", "/proc", "/sys", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/hosts",
    "/etc/passwd", "/etc/ssl", "/etc/mime.types", "/etc/alternatives",
)  # fmt: skip
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/shm")  # noqa: S108 - shared memory, not a temporary folder
PLANNING: Final = "planning"  # in the account: the memory that processes of planning share
_SLACK_BYTES: Final = 3 << 30  # of writable memory, for Python, torch and its libraries


def folder_of(settings: ServiceSettings, number: int) -> Path:
    """Where all of a run is."""
    return settings.folder / "runs" / f"{number:06d}"


def code_of(settings: ServiceSettings, digest: str) -> Path:
    """Where uploaded code is, unpacked."""
    return settings.folder / "code" / digest


def output_of(settings: ServiceSettings, name: str) -> Path:
    """Folder of what the last attempt of a part has printed, on whatever host it was; one that is not there, where there was none."""
    return max(outputs_of(settings, name), key=_begun, default=settings.own / "runner" / "runs" / name / "1")


def outputs_of(settings: ServiceSettings, name: str) -> list[Path]:
    """Folders of all attempts of a part."""
    hosts = settings.folder.glob(f"hosts/*/runner/runs/{name}/[0-9]*") if settings.host else ()
    own = (settings.folder.glob(f"{runner}/runs/{name}/[0-9]*") for runner in ("runner", "cluster"))
    return [*hosts, *chain.from_iterable(own)]


def _begun(attempt: Path) -> tuple[float, int]:
    try:
        return attempt.stat().st_ctime, int(attempt.name)
    except (OSError, ValueError):
        return 0.0, 0


def name_of(number: int, part: int) -> str:
    """By which the runner knows a part of a run; part 0 is its plan."""
    return f"{number:06d}-{'plan' if part == 0 else part}"


def write(settings: ServiceSettings, run: StoredRun) -> Path:
    """The run's folder, with its run file as `memfit` reads it."""
    folder = folder_of(settings, run.number)
    for name in ("", "home", "tmp", "cache"):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    code = folder if run.code is None else code_of(settings, run.code)
    content = {
        **run.config,
        "folder": str(code),
        "train": {**(run.config.get("train") or {}), "out": str(folder / "out")},
        "report": {"html": False, **(run.config.get("report") or {})},
    }
    (folder / "run.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return folder


def planning(settings: ServiceSettings, run: StoredRun, lease: str = "") -> RunRequest:
    """`memfit plan`, which says whether the run fits, and writes the plan."""
    folder = folder_of(settings, run.number)
    words = ("plan", str(folder / "run.json"), "--json", "--save", str(folder / "plan.json"))
    return RunRequest(
        name_of(run.number, 0),
        _command(settings, run, words, tcp=False),
        folder=str(folder),
        environment={**_environment(settings, run), **_threads_of_planning(settings, run)},
        inherits=False,
        peak_bytes={PLANNING: settings.planning_bytes},
        memory_limit_bytes=settings.planning_bytes,
        seconds=settings.planning_seconds,
        outlives_runner=True,
        restarts=1,
        lease=lease,
    )


def training(settings: ServiceSettings, run: StoredRun, planned: Planned, part: int, lease: str = "") -> RunRequest:
    """`memfit train` with that plan, and `memfit resume` once there is something to resume."""
    folder, out = folder_of(settings, run.number), folder_of(settings, run.number) / "out"
    ranks = len(planned.rank_bytes)
    plan: tuple[str, ...] = ("--plan", str(folder / "plan.json"), "--json")
    if ranks > 1:
        plan = ("--nproc", str(ranks), *plan)
    tiers = {name: size for name, size in planned.tiers.items() if name in TIERS and settings.shares_tier(name)}
    limit = max(planned.rank_bytes) * 9 // 8 + _SLACK_BYTES
    cores = {CORES: min(ranks, settings.cores)} if planned.device == "cpu" else {}
    return RunRequest(
        name_of(run.number, part),
        _command(settings, run, ("train", str(folder / "run.json"), *plan), tcp=ranks > 1),
        folder=str(folder),
        environment={
            **_environment(settings, run),
            **_threads_of_training(settings, run, planned),
            MEMORY_LIMIT: ",".join(map(str, planned.rank_bytes)),
        },
        inherits=False,
        peak_bytes={**tiers, **cores},
        rank_bytes=planned.rank_bytes,
        device=planned.device,
        memory_limit_bytes=limit if planned.device == "cpu" else None,
        seconds=settings.run_seconds,
        silent_seconds=settings.silent_seconds,
        watched=str(out / "log.jsonl"),
        grace_seconds=settings.grace_seconds,
        outlives_runner=True,
        resume_command=_command(settings, run, ("resume", str(out), *plan), tcp=ranks > 1),
        resume_if=str(out / "config.json"),
        restarts=settings.restarts,
        lease=lease,
    )


def _threads_of_planning(settings: ServiceSettings, run: StoredRun) -> dict[str, str]:
    """As many threads as training will have if the plan takes the budget, so that seconds are measured as they will be."""
    fit = run.config.get("fit") or {}
    size, ranks = fit.get("budget"), fit.get("devices")
    ranks = ranks if isinstance(ranks, int) else 1
    return _share(settings, device_kind(fit, settings.capacity), size * ranks if isinstance(size, int) else 0, ranks)


def _threads_of_training(settings: ServiceSettings, run: StoredRun, planned: Planned) -> dict[str, str]:
    if run.request is None:
        return _share(settings, planned.device, sum(planned.rank_bytes), len(planned.rank_bytes))
    begun = run.request["environment"].get(THREADS)  # sums over another number of threads have other last digits
    return {} if begun is None else {THREADS: begun}


def _share(settings: ServiceSettings, device: str, size: int, ranks: int) -> dict[str, str]:
    """What a run on the processor has of its cores: an equal part beside as many like it as fit; nothing is said for one that has them to itself."""
    if device != "cpu" or size <= 0:
        return {}
    if settings.machines is not None:
        return {} if THREADS in os.environ else {THREADS: str(_share_of_machine(settings.machines, size))}
    return threads(
        settings.cores, runs_at_once(settings.cores, ranks, fit=settings.capacity.get("cpu", 0) // size), ranks
    )


def _share_of_machine(machines: Machines, size: int) -> int:
    """The smallest share of cores on any machine that holds a run: the same on each, so that it is the same run wherever it goes on."""
    fitting = [each for each in machines.by_machine.values() if each.get("cpu", 0) >= size]
    shares = (each[CORES] // runs_at_once(each[CORES], fit=each["cpu"] // size) for each in fitting)
    return max(1, min(shares, default=1))


def _command(settings: ServiceSettings, run: StoredRun, words: tuple[str, ...], *, tcp: bool) -> tuple[str, ...]:
    code = () if run.code is None else (code_of(settings, run.code),)
    write = (folder_of(settings, run.number),)
    return confined(settings, (*settings.program, *words), read=code, write=write, tcp=tcp)


def confined(
    settings: ServiceSettings,
    command: tuple[str, ...],
    read: tuple[Path, ...] = (),
    write: tuple[Path, ...] = (),
    *,
    tcp: bool,
) -> tuple[str, ...]:
    """A command that reads what runs may read, and writes and connects no more than is said; as it is where runs are not confined."""
    if not settings.confined:
        return command
    told = {"read": _readable(settings, read), "write": [*map(str, write), *_devices()], "tcp": tcp}
    return (sys.executable, "-I", "-S", confine.__file__, json.dumps(told), *command)


def _readable(settings: ServiceSettings, code: tuple[Path, ...]) -> list[str]:
    installed = {
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("purelib"),
        *_python_path(),
        # Of an environment that is stacked on another one.
        *(each for each in sys.path if Path(each).name in {"site-packages", "dist-packages"}),
        str(Path(memfit.__file__).parent.parent),
    }
    return [*_SYSTEM, *sorted(installed), *map(str, (*settings.data, *code))]


def _devices() -> list[str]:
    return [*_DEVICES, *(str(each) for each in Path("/dev").glob("nvidia*"))]


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def passed_on() -> dict[str, str]:
    """What runs get of the service's environment."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    path = {"PYTHONPATH": os.pathsep.join(_python_path())} if _python_path() else {}
    return {**passed, **path}


def _environment(settings: ServiceSettings, run: StoredRun) -> dict[str, str]:
    folder = folder_of(settings, run.number)
    paths = {"HOME": "home", "TMPDIR": "tmp", "MEMFIT_CACHE_DIR": "cache", "XDG_CACHE_HOME": "cache"}
    return {
        **passed_on(),
        **{name: str(folder / inside) for name, inside in paths.items()},
        "PYTHONDONTWRITEBYTECODE": "1",
        "MEMFIT_RUN": str(run.number),
    }
