"""What it costs to ask a service how its runs stand, with ten thousand of them in its store, two hundred times a second, beside runs that train.

Windows with requests and without alternate; steps of the training processes in both are compared, and the service's processor time is divided by its requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measuring

measuring.with_tests_models()

RUNS = 10_000
CLIENTS = 8


def serve(folder: Path, told: Any) -> None:
    """The service, in a process of its own."""
    from memfit.service.serving import Serving
    from memfit.service.settings import ServiceSettings

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
    """That a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def asked(port: int, token: str, path: str, seconds: float, rate: float) -> list[float]:
    """Seconds that each answer took, at so many requests a second over several connections; a late answer delays none but its own connection's next."""
    found: list[float] = []
    draw = random.Random(0)

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        begun, turn = time.perf_counter(), number
        while (due := begun + turn / rate) < begun + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            asked_at = time.perf_counter()
            target = path.replace("NUMBER", str(draw.randint(1, RUNS)))
            connection.request("GET", target, headers={"authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            found.append(time.perf_counter() - asked_at)
            turn += CLIENTS

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def rates(steps: Sequence[Any], seconds: float, during: Any) -> tuple[float, Any]:
    """Steps a second of all training processes while something happens."""
    before, begun = sum(each.value for each in steps), time.perf_counter()
    found = None
    if during:
        found = during()
    else:
        time.sleep(seconds)
    return (sum(each.value for each in steps) - before) / (time.perf_counter() - begun), found


def measured(training: int, seconds: float, windows: int, rate: float) -> list[dict[str, Any]]:
    from service.test_much import filled

    fork = multiprocessing.get_context("spawn")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = filled(folder, RUNS)
        with store.writing() as connection:  # nothing runs: what trains beside it is the bench's own
            connection.execute("UPDATE runs SET state='done', ended=submitted+1")
        store.close()
        here, there = fork.Pipe()
        service = fork.Process(target=serve, args=(folder, there), daemon=True)
        service.start()
        assert service.pid is not None
        port, token = here.recv()
        steps = [fork.Value("q", 0, lock=False) for _ in range(training)]
        processes = [fork.Process(target=train, args=(each,), daemon=True) for each in steps]
        for process in processes:
            process.start()
        while not all(each.value > 20 for each in steps):
            time.sleep(0.1)
        try:
            for path in ("/v1/runs/NUMBER", "/v1/runs?limit=50"):
                latencies: list[float] = []
                ratios, taken, requests = [], 0.0, 0
                for _ in range(windows):
                    alone, _ = rates(steps, seconds, None)
                    before = processor_seconds(service.pid)
                    beside, found = rates(steps, seconds, lambda path=path: asked(port, token, path, seconds, rate))
                    taken, requests = taken + processor_seconds(service.pid) - before, requests + len(found)
                    latencies += found
                    if training:
                        ratios.append(beside / alone)
                latencies.sort()
                row = {
                    "path": path,
                    "stored": RUNS,
                    "rate": rate,
                    "training": training,
                    "load": os.getloadavg()[0],
                    "processor_seconds": taken / requests,
                    "p50": latencies[len(latencies) // 2],
                    "p99": latencies[int(0.99 * len(latencies))],
                    "kept": sorted(ratios)[len(ratios) // 2] if ratios else None,
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
        finally:
            for process in (*processes, service):
                process.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--training", type=int, default=4, help="processes that train meanwhile (4)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window (10)")
    parser.add_argument("--windows", type=int, default=6, help="with requests, and as many without (6)")
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
