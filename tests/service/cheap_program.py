"""Stands in for `memfit` where a service is tried with a thousand runs: plans and trains in milliseconds, and notices whatever is done twice.

Run as a script without the package (`python -I -S cheap_program.py PLACE plan|train|resume ...`). PLACE is a folder that all runs share; `plan.json` in
it is the plan that each gets, with the bytes that its run file asks for. The steps are taken in a process that is forked, as ranks and loaders are.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False  # without typing, whose import takes as long as all the others
if TYPE_CHECKING:
    from typing import Any

STEP_SECONDS = 0.02


def noticed(place: str, what: str) -> None:
    with open(os.path.join(place, "noticed"), "a") as stream:
        stream.write(what + "\n")


def held(file: str) -> bool:
    """Take a lock, for as long as this process and those forked from it live."""
    try:
        fcntl.flock(os.open(file, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def plan(place: str, config: dict[str, Any], words: list[str]) -> None:
    with open(os.path.join(place, "plan.json")) as stream:
        made = json.load(stream)
    size, ranks = config["fit"]["budget"], config["fit"].get("devices") or 1
    made["prediction"]["peak_bytes"] = made["budget_bytes"] = size
    made["device_kind"] = config["fit"]["device"]
    made["prediction"]["ranks"] = [
        {"rank": rank, "peak_bytes": size, "step_seconds": STEP_SECONDS} for rank in range(ranks) if ranks > 1
    ]
    with open(words[words.index("--save") + 1], "w") as stream:
        json.dump(made, stream)
    sys.stdout.write(json.dumps({"fits": True, "total_steps": config["train"]["steps"]}))


def steps(out: str, last: int, gate: str | None) -> None:
    """Take the steps that are left after the last snapshot, each with a line in the log; the last ones once a file is there, if one is named."""
    snapshot = os.path.join(out, "snapshot")
    step, size = 0, 0
    if os.path.exists(snapshot):
        with open(snapshot) as stream:
            step, size = json.load(stream)
    with open(os.path.join(out, "log.jsonl"), "ab") as log:
        log.truncate(size)
        while step < last:
            time.sleep(STEP_SECONDS)
            while gate is not None and step == last // 2 and not os.path.exists(gate):
                time.sleep(0.05)
            step += 1
            log.write(json.dumps({"step": step, "loss": 1 / step, "peak_bytes": 1}).encode() + b"\n")
            log.flush()
            with open(snapshot + ".new", "w") as stream:
                json.dump([step, log.tell()], stream)
            os.rename(snapshot + ".new", snapshot)


def train(place: str, config: dict[str, Any], out: str) -> int:
    about = config["model"]["args"]
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "config.json"), "a"):
        pass  # from now on there is something to resume
    if not held(os.path.join(out, "lock")):
        noticed(place, f"{out} is run twice at a time")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if config["fit"]["device"] == "cuda":
        with open(os.path.join(out, "visible"), "a") as stream:
            stream.write(visible + "\n")
    for device in visible.split(","):
        if about["large"] and not held(os.path.join(place, f"large{device}")):
            noticed(place, f"{out} is together with another of 60 %")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        steps(out, config["train"]["steps"], about.get("gate"))
        os._exit(about["status"])
    told: list[int] = []

    def ended(*_: object) -> None:
        told.append(1)
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, ended)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and not told:
        os.kill(os.getpid(), os.WTERMSIG(status))
    return 143 if told else os.WEXITSTATUS(status)


def main() -> int:
    place, verb, target, *words = sys.argv[1:]
    out = target if verb == "resume" else os.path.join(os.path.dirname(target), "out")
    with open(os.path.join(os.path.dirname(out), "run.json")) as stream:
        config = json.load(stream)
    if verb == "plan":
        plan(place, config, words)
        return 0
    return train(place, config, out)


if __name__ == "__main__":
    sys.exit(main())
