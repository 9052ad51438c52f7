"""What it costs to ask a service how its runs stand, with ten thousand of them in its store, two hundred times a second, beside runs that train.

Windows without requests, with requests, and with the same requests to a server that only repeats an answer alternate; steps of the training processes are
compared, so that what the clients take is told apart from what the service takes. Processor time is the service's in windows with requests, less what it
takes in those without; and once more where requests come one after the other, so that it does not sleep in between. Beside it the page's first paint, where
there are a Chromium and playwright (`pip install playwright`).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import clients
import measuring
import painting

measuring.with_tests_models()

RUNS = 10_000
AT_ONCE = 3000  # requests, one after the other on each connection
PATHS = ("/v1/runs/NUMBER", "/v1/runs?limit=50")


def serve(folder: Path, told: Any) -> None:
    """The service, in a process of its own, with a log as `memfit serve` has it."""
    from memfit.service.serving import JsonLines, Serving
    from memfit.service.settings import ServiceSettings

    handler = logging.FileHandler(os.devnull)
    handler.setFormatter(JsonLines())
    logging.getLogger("memfit.service").addHandler(handler)
    logging.getLogger("memfit.service").setLevel(logging.INFO)
    serving = Serving(ServiceSettings(folder, {"cpu": 1 << 30}, confined=False))
    serving.run(lambda: told.send((serving.port, serving.tell_local_clients())))


def train(steps: Any) -> None:
    """Steps of a small network, counted."""
    import torch

    torch.set_num_threads(1)
    model, batch = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), torch.ones(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    while True:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.value += 1


def processor_seconds(pid: int) -> float:
    """That a process has had, to the nanosecond: ticks miss what runs for less than one of them."""
    return time.clock_gettime((~pid << 3) | 2)  # the number that Linux gives to the clock of a process


def store(folder: Path) -> None:
    """Runs that are over, with run files and plans of the usual size; nothing runs: what trains beside it is the bench's own."""
    from memfit.service.planned import Planned
    from service import small_runs
    from service.test_much import filled

    planned = Planned(400 << 10, 390 << 10, 900 << 10, (390 << 10,), {"host": 12345}, "cpu", 0.0123, 0.0101, 600, 4.56)
    found = filled(folder, RUNS)
    with found.writing() as connection:
        connection.execute(
            "UPDATE runs SET state='done', ended=submitted+1, reason='done', measured_peak_bytes=399000, disk_bytes=123456, config=?, plan=?",
            (json.dumps(small_runs.run_file()), json.dumps(planned.to_json())),
        )
        for kind, text in (("waiting", "390 KiB of 400 KiB at the peak"), ("running", "started"), ("done", "done")):
            connection.execute(
                "INSERT INTO events (run, time, kind, text) SELECT number, submitted, ?, ? FROM runs", (kind, text)
            )
    found.close()


def steps_a_second(steps: Sequence[Any], during: Callable[[], Any]) -> tuple[float, Any]:
    """Of all training processes while something happens, and what came of it."""
    before, begun = sum(each.value for each in steps), time.perf_counter()
    found = during()
    return (sum(each.value for each in steps) - before) / (time.perf_counter() - begun), found


def middle(values: Sequence[float]) -> float | None:
    """The median; None for none."""
    return sorted(values)[len(values) // 2] if values else None


def measured(training: int, seconds: float, windows: int, rate: float) -> list[dict[str, Any]]:
    """A row for each path, and one for the page."""
    spawn = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        store(Path(temporary))
        ours, theirs = zip(*(spawn.Pipe() for _ in range(2)), strict=True)
        service = spawn.Process(target=serve, args=(Path(temporary), theirs[0]), daemon=True)
        trivial = spawn.Process(target=clients.say, args=(theirs[1],), daemon=True)
        steps = [spawn.Value("q", 0, lock=False) for _ in range(training)]
        trainers = [spawn.Process(target=train, args=(each,), daemon=True) for each in steps]
        try:
            service.start()
            trivial.start()
            port, token = ours[0].recv()
            other = ours[1].recv()
            painted = painting.measured(f"http://127.0.0.1:{port}", token)  # on a computer that does nothing else
            for each in trainers:
                each.start()
            while not all(each.value > 20 for each in steps):
                time.sleep(0.1)
            assert service.pid is not None
            for path in PATHS:
                rows.append(asked(path, service.pid, port, token, (other, ours[1]), steps, seconds, windows, rate))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            for each in (*trainers, service, trivial):
                if each.pid is not None:
                    each.kill()
    if painted is not None:
        rows.append({"path": "/", "stored": RUNS, "training": training, **painted})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def asked(
    path: str,
    service: int,
    port: int,
    token: str,
    trivial: tuple[int, Any],
    steps: Sequence[Any],
    seconds: float,
    windows: int,
    rate: float,
) -> dict[str, Any]:
    """One path; `trivial` is the port of the other server, and the pipe to it."""
    draw = random.Random(0)

    def request() -> bytes:
        target = path.replace("NUMBER", str(draw.randint(1, RUNS)))
        return f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {token}\r\n\r\n".encode()

    latencies: list[float] = []
    kept: dict[str, list[float]] = {"service": [], "clients": []}
    taken, background, of_clients = 0.0, 0.0, 0.0
    trivial[1].send(clients.ask(port, request, 1.0, rate).answer)
    for _ in range(windows):
        before = processor_seconds(service)
        alone, _ = steps_a_second(steps, lambda: time.sleep(seconds))
        background += processor_seconds(service) - before
        before = processor_seconds(service)
        beside, found = steps_a_second(steps, lambda: clients.ask(port, request, seconds, rate))
        taken += processor_seconds(service) - before
        beside_trivial, _ = steps_a_second(steps, lambda: clients.ask(trivial[0], request, seconds, rate))
        latencies += found.latencies
        of_clients += found.processor_seconds
        if steps:
            kept["service"].append(beside / alone)
            kept["clients"].append(beside_trivial / alone)
    latencies.sort()
    before = processor_seconds(service)
    many = len(clients.ask(port, request, AT_ONCE / 1e6, 1e6).latencies)
    at_once = processor_seconds(service) - before
    return {
        "path": path,
        "stored": RUNS,
        "rate": rate,
        "training": len(steps),
        "load": os.getloadavg()[0],
        "processor_seconds": (taken - background) / len(latencies),
        "processor_seconds_at_once": at_once / many,
        "client_processor_seconds": of_clients / len(latencies),
        "background": background / (windows * seconds),
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[int(0.99 * len(latencies))],
        "kept": middle(kept["service"]),
        "kept_beside_clients_alone": middle(kept["clients"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--training", type=int, default=4, help="processes that train meanwhile (4)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window (6)")
    parser.add_argument("--windows", type=int, default=5, help="of each kind for each path (5)")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (200)")
    parser.add_argument("--keep", action="store_true", help="put the figures into results.jsonl")
    arguments = parser.parse_args()
    rows = measured(arguments.training, arguments.seconds, arguments.windows, arguments.rate)
    if arguments.keep:
        measuring.keep_part(
            "service", "status", measuring.machine(), rows, lambda row: row["training"] == arguments.training
        )


if __name__ == "__main__":
    main()
