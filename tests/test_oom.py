"""What a program died of is read from its own words, in every wording, and from a snapshot that cannot run anything."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.cli.main import main
from memfit.errors import InputError
from memfit.oom import Failure, budget, explain, read
from memfit.oom.messages import find
from memfit.oom.stacks import Frame, stage, where
from memfit.units import parse_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def failure_in(text: str) -> Failure:
    found = find(text)
    assert found is not None
    return found


def words(text: str) -> str:
    return "\n".join(explain(failure_in(text)))


# ----------------------------------------------------------------------------------------------------------------- wordings

NOW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 24.00 GiB of which 1.50 GiB is free. "
    "Process 4242 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has 20.50 GiB memory in use. "
    "Of the allocated memory 19.00 GiB is allocated by PyTorch, with 512.00 MiB allocated in private pools (e.g., CUDA Graphs), "
    "and 1.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
BEFORE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 36.00 MiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB already allocated; 16.00 MiB free; "
    "{}6.50 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
OLDEST = BEFORE.format("").replace("6.50 GiB reserved in total by PyTorch", "512.00 MiB cached")
ASYNC = """torch.OutOfMemoryError: Allocation on device 2 would exceed allowed memory. (out of memory)
Currently allocated     : 10.00 GiB
Requested               : 4.00 GiB
Device limit            : 16.00 GiB
Free (according to CUDA): 20.00 MiB
PyTorch limit (set by user-supplied memory fraction)
                        : 12.00 GiB"""
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 512.00 MB, max allowed: 18.00 GB). "
    "Tried to allocate 1.00 GB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit"
)
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 12.00 GiB of which 8.00 MiB is free. "
    "Of the allocated memory 10.00 GiB is allocated by PyTorch, and 96.00 MiB is reserved by PyTorch but unallocated."
)
HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000000 "
    "bytes. Error code 12 (Cannot allocate memory)"
)


def test_a_message_of_today_is_read_number_by_number() -> None:
    assert failure_in(NOW) == Failure(
        "message",
        device="cuda:1",
        evidence=" ".join(NOW[NOW.index("CUDA") : NOW.index(" unallocated. If") + len(" unallocated")].split()),
        wanted_bytes=int(2.5 * GIB),
        total_bytes=24 * GIB,
        free_bytes=int(1.5 * GIB),
        allocated_bytes=19 * GIB,
        unallocated_bytes=GIB,
        private_bytes=512 * MIB,
        process_bytes=int(20.5 * GIB),
        other_bytes=2 * GIB,
    )
    assert failure_in(NOW).beside_bytes == 512 * MIB


def test_a_message_broken_into_lines_by_a_log_is_the_same() -> None:
    assert failure_in(NOW.replace(" ", "\n   ")) == failure_in(NOW)


def test_hip_speaks_as_cuda_does() -> None:
    assert failure_in(NOW.replace("CUDA out", "HIP out")).device == "hip:1"


@pytest.mark.parametrize("text", [BEFORE.format(""), OLDEST])
def test_older_messages_say_what_is_reserved_in_their_own_way(text: str) -> None:
    found = failure_in(text)

    assert (found.wanted_bytes, found.total_bytes, found.free_bytes) == (36 * MIB, 8 * GIB, 16 * MIB)
    assert (found.allocated_bytes, found.unallocated_bytes) == (6 * GIB, 512 * MIB)
    # They do not tell processes apart: what is left of the device but for a context.
    assert found.other_bytes == 8 * GIB - 16 * MIB - int(6.5 * GIB) - 512 * MIB


def test_a_limit_of_the_process_is_read() -> None:
    assert failure_in(BEFORE.format("7.00 GiB allowed; ")).allowed_bytes == 7 * GIB
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.00 GiB of which 70.00 GiB is free. 8.00 GiB allowed; "
        "Of the allocated memory 7.50 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )

    assert failure_in(text).allowed_bytes == 8 * GIB
    assert "set_per_process_memory_fraction" in words(text)
    assert budget(failure_in(text)) == "8192MiB"


def test_the_asynchronous_allocator_has_words_of_its_own() -> None:
    found = failure_in(ASYNC)

    assert (found.device, found.wanted_bytes, found.total_bytes) == ("cuda:2", 4 * GIB, 16 * GIB)
    assert (found.allocated_bytes, found.free_bytes, found.allowed_bytes) == (10 * GIB, 20 * MIB, 12 * GIB)


def test_mps_counts_in_1024_too_and_is_told_that_memfit_does_not_train_there() -> None:
    found = failure_in(MPS)

    assert (found.device, found.wanted_bytes, found.total_bytes, found.free_bytes) == ("mps", GIB, 18 * GIB, 512 * MIB)
    assert budget(found) == f"{18 * 1024 - 512}MiB"
    assert "memfit trains on CUDA GPUs and CPUs, not on mps" in words(MPS)
    assert "expandable_segments" not in words(MPS)


def test_xpu_is_read_and_not_told_of_what_cuda_can_do() -> None:
    assert failure_in(XPU).device == "xpu:0"
    assert failure_in(XPU).unallocated_bytes == 96 * MIB
    assert "expandable_segments" not in words(XPU)


def test_the_host_has_no_numbers_but_what_was_asked() -> None:
    found = failure_in(HOST)

    assert (found.device, found.wanted_bytes) == ("host", 400_000_000_000)
    assert failure_in(HOST.replace("can't allocate memory", "not enough memory")).wanted_bytes == 400_000_000_000
    assert "Asked for 373 GiB in the computer's main memory" in words(HOST)
    assert "data-loader workers" in words(HOST)
    assert "--budget 80%" in words(HOST)


def test_the_words_of_this_torch_are_read() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48, dtype=torch.uint8)  # more than a process can address

    assert failure_in(str(caught.value)).wanted_bytes == 2**48


@pytest.mark.parametrize(
    ("text", "device", "kind"),
    [
        ("RuntimeError: CUDA error: out of memory", "cuda", "allocation"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda", "library"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuda", "library"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)", "host", "allocation"),
        ("OSError: [Errno 12] Cannot allocate memory", "host", "allocation"),
        ("Traceback (most recent call last):\nMemoryError", "host", "allocation"),
        ("object type name: MemoryError\nobject repr     : MemoryError()\nlost sys.stderr", "host", "allocation"),
        ("epoch 1 step 20\nKilled\n", "host", "killed"),
        ("run.sh: line 3:  4711 Killed                  python train.py", "host", "killed"),
        ("Command exited with exit code 137", "host", "killed"),
        ("exitcode: -9 (pid: 93)", "host", "killed"),
        ("died with <Signals.SIGKILL: 9>.", "host", "killed"),
        ("RuntimeError: DataLoader worker (pid 41) is killed by signal: Killed.", "host", "killed"),
        ("    Reason: OOMKilled", "host", "killed"),
    ],
)  # fmt: skip
def test_each_short_wording_is_known_for_what_it_is(text: str, device: str, kind: str) -> None:
    assert (failure_in(text).device, failure_in(text).kind) == (device, kind)
    assert "memfit plan CONFIG.yaml --budget 80%" in words(text)


def test_the_kernels_log_says_how_much_the_process_held() -> None:
    text = "[99.1] Out of memory: Killed process 4711 (python) total-vm:90000000kB, anon-rss:62914560kB, file-rss:0kB"

    assert failure_in(text).process_bytes == 60 * GIB
    assert "when it held 60.0 GiB" in words(text)


def test_the_last_of_several_counts_and_the_one_that_tells_most() -> None:
    text = "\n".join([NOW, NOW.replace("2.50 GiB", "3.50 GiB", 1), "RuntimeError: CUDA error: out of memory", "Killed"])

    assert failure_in(text).wanted_bytes == int(3.5 * GIB)
    assert "the last of 2 such failures" in words(text)


@pytest.mark.parametrize("text", ["", "ValueError: shapes differ", "accuracy 0.137, code 1379", "killed it at step 9"])
def test_what_is_no_failure_is_not_made_one(text: str) -> None:
    assert find(text) is None


# ------------------------------------------------------------------------------------------------------------- explanations


def message(
    wanted: str = "2.00 GiB",
    free: str = "1.00 GiB",
    mine: str = "22.50 GiB",
    allocated: str = "20.00 GiB",
    spare: str = "0.50 GiB",
    others: str = "",
) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 24.00 GiB of which {free} is free. {others}"
        f"Including non-PyTorch memory, this process has {mine} memory in use. "
        f"Of the allocated memory {allocated} is allocated by PyTorch, and {spare} is reserved by PyTorch but unallocated."
    )


def test_expandable_segments_are_advised_only_where_they_would_have_been_enough() -> None:
    in_pieces = words(message(spare="1.50 GiB", allocated="20.00 GiB"))
    too_little = words(message(spare="0.50 GiB"))

    assert "Fragmentation: 1.50 GiB were reserved and in no tensor" in in_pieces
    assert "expandable_segments:True" in in_pieces
    assert "Fragmentation is not the reason" in too_little
    assert "512 MiB would still be missing" in too_little
    assert "expandable_segments" not in too_little


def test_a_tensor_larger_than_the_device_is_told_so_and_nothing_else() -> None:
    text = words(message(wanted="130206.04 GiB"))

    assert "larger than all of the device" in text
    assert "Fragmentation" not in text


def test_other_processes_are_named_when_without_them_it_would_have_fit() -> None:
    text = message(
        free="1.00 GiB",
        mine="16.00 GiB",
        allocated="15.00 GiB",
        spare="0.50 GiB",
        others="Process 7 has 7.00 GiB memory in use. ",
    )

    assert "Other processes hold 7.00 GiB of this device, enough for this" in words(text)
    # 24 less 7 of others and half a GiB of context
    assert budget(failure_in(text)) == f"{16 * 1024 + 512}MiB"
    assert "other processes" not in words(message()).lower()


def test_in_a_container_the_process_that_holds_what_pytorch_holds_is_this_one() -> None:
    text = message(mine="20.80 GiB").replace("Including non-PyTorch memory, this process", "Process 99")

    assert failure_in(text).process_bytes == int(20.8 * GIB)


@pytest.mark.parametrize("text", [NOW, BEFORE.format(""), MPS, XPU, HOST, ASYNC, message(), "Killed"])
def test_the_budget_is_one_that_can_be_given_and_less_than_the_device(text: str) -> None:
    found = failure_in(text)
    given = parse_bytes(budget(found), total_bytes=found.total_bytes or 2**40)

    assert given <= (found.total_bytes or 2**40)
    assert f"memfit plan CONFIG.yaml --budget {budget(found)}" in words(text)


# ------------------------------------------------------------------------------------------------------------------- stacks

SITE = "/env/lib/python3.11/site-packages"
STEP = [Frame("/home/me/train.py", 31, "step"), Frame("/home/me/train.py", 60, "<module>")]
LINEAR = [
    Frame(f"{SITE}/torch/nn/modules/linear.py", 134, "forward"),
    Frame(f"{SITE}/torch/nn/modules/module.py", 1788, "_call_impl"),
    Frame("/home/me/model.py", 12, "forward"),
    Frame(f"{SITE}/torch/nn/modules/module.py", 1788, "_call_impl"),
]
BACKWARD = [
    Frame(f"{SITE}/torch/autograd/graph.py", 865, "_engine_run_backward"),
    Frame(f"{SITE}/torch/autograd/__init__.py", 354, "backward"),
    Frame(f"{SITE}/torch/_tensor.py", 625, "backward"),
]
UPDATE = [Frame(f"{SITE}/torch/optim/adamw.py", 227, "_init_group"), Frame(f"{SITE}/torch/optim/adamw.py", 243, "step")]
RECOMPUTE = [Frame(f"{SITE}/torch/utils/checkpoint.py", 1129, "unpack_hook")]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (LINEAR + STEP, "forward"),
        (BACKWARD + STEP, "backward"),
        (LINEAR + RECOMPUTE + BACKWARD + STEP, "recomputing in backward"),
        (UPDATE + STEP, "optimizer"),
        (LINEAR + STEP[:1] + UPDATE[1:] + STEP, "forward"),  # a closure
        (BACKWARD + STEP[:1] + UPDATE[1:] + STEP, "backward"),
        ([Frame(f"{SITE}/torch/nn/modules/module.py", 1371, "to"), *STEP], "moving the model"),
        ([Frame("??", 0, "torch::autograd::Engine::evaluate_function(...)")], "backward"),
        ([Frame("C:\\env\\site-packages\\torch\\optim\\sgd.py", 1, "step")], "optimizer"),
        (STEP, ""),
        ([], ""),
    ],
)
def test_the_part_of_the_step_is_seen_by_the_stack(frames: list[Frame], expected: str) -> None:
    assert stage(frames) == expected


def test_the_line_named_is_the_users() -> None:
    assert where(LINEAR + STEP) == "model.py:12 in forward"
    assert where(BACKWARD) == "graph.py:865 in _engine_run_backward"  # nothing of the user's is there
    assert where([Frame("??", 0, "at::empty")]) == ""


def test_a_traceback_above_the_message_says_when_and_where() -> None:
    lines = "".join(f'  File "{f.file}", line {f.line}, in {f.name}\n    code\n' for f in reversed(BACKWARD + STEP))
    text = f"Traceback (most recent call last):\n{lines}{NOW}\n"

    assert "during backward (train.py:31 in step)" in words(text)


# ---------------------------------------------------------------------------------------------------------------- snapshots


def frames(*stack: Frame) -> list[dict[str, Any]]:
    return [{"filename": each.file, "line": each.line, "name": each.name} for each in stack]


def block(size: int, state: str = "active_allocated", stack: tuple[Frame, ...] = ()) -> dict[str, Any]:
    return {"address": 0, "size": size, "requested_size": size - 8, "state": state, "frames": frames(*stack)}


def segment(*blocks: dict[str, Any], device: int = 0, **more: Any) -> dict[str, Any]:
    """As `torch.cuda.memory._snapshot` documents it."""
    live = sum(each["size"] for each in blocks if each["state"] == "active_allocated")
    return {
        "device": device,
        "address": 0,
        "total_size": sum(each["size"] for each in blocks),
        "allocated_size": live,
        "active_size": live,
        "requested_size": live,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
        **more,
    }


def snapshot(wanted: int = 100 * MIB, free: int = 20 * MIB, after: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "segments": [
            segment(
                block(300 * MIB, stack=(*LINEAR, *STEP)),
                block(60 * MIB, "inactive"),
                block(100 * MIB, stack=(*LINEAR, *STEP)),
                block(30 * MIB, "inactive"),
            ),
            segment(block(50 * MIB, stack=(*UPDATE, *STEP)), block(10 * MIB, "active_pending_free"), block(5 * MIB)),
            segment(block(999 * MIB), device=1),
        ],
        "device_traces": [
            [
                {"action": "alloc", "addr": 0, "size": MIB, "stream": 0, "time_us": 1, "frames": []},
                {"action": "oom", "device_free": free, "size": wanted, "stream": 0, "time_us": 2, "frames": frames(*BACKWARD, *STEP)},
                *after,
            ],
            [],
        ],
        "allocator_settings": {"expandable_segments": False},
    }  # fmt: skip


def saved(folder: Path, content: object) -> Path:
    path = folder / "snapshot.pickle"
    with path.open("wb") as stream:
        pickle.dump(content, stream)
    return path


def test_a_snapshot_tells_what_was_held_where_it_failed_and_by_whom(tmp_path: Path) -> None:
    found = read(saved(tmp_path, snapshot()))

    assert (found.device, found.kind, found.stage, found.where) == (
        "cuda:0",
        "allocation",
        "backward",
        "train.py:31 in step",
    )
    assert (found.wanted_bytes, found.free_bytes) == (100 * MIB, 20 * MIB)
    assert (found.allocated_bytes, found.unallocated_bytes) == (455 * MIB, 100 * MIB)
    assert found.largest_gap_bytes == 60 * MIB
    assert [(held.where, held.bytes, held.blocks, held.stage) for held in found.holders] == [
        ("model.py:12 in forward", 400 * MIB, 2, "forward"),
        ("train.py:31 in step", 50 * MIB, 1, "optimizer"),
        ("", 5 * MIB, 1, ""),
    ]
    text = "\n".join(explain(found))
    assert "Fragmentation: 100 MiB were reserved" in text
    assert "400 MiB in 2 blocks: model.py:12 in forward, forward" in text
    assert f"--budget {555 + 20}MiB" in text  # what the allocator held, and what was free


def test_fragmentation_is_judged_by_the_pieces_that_there_are(tmp_path: Path) -> None:
    expandable = snapshot()
    expandable["allocator_settings"]["expandable_segments"] = True
    one_piece = read(saved(tmp_path, snapshot(wanted=55 * MIB)))
    missing = read(saved(tmp_path, snapshot(wanted=200 * MIB)))

    assert "already" in "\n".join(explain(read(saved(tmp_path, expandable))))
    assert "A free piece of 60.0 MiB was there" in "\n".join(explain(one_piece))
    assert "80.0 MiB would still be missing" in "\n".join(explain(missing))
    for found in (one_piece, missing, read(saved(tmp_path, expandable))):
        assert "expandable_segments:True" not in "\n".join(explain(found))


def test_gaps_in_a_pool_of_a_cuda_graph_are_nobody_elses(tmp_path: Path) -> None:
    content = snapshot()
    content["segments"].append(segment(block(500 * MIB, "inactive"), block(MIB), segment_pool_id=(0, 3)))

    found = read(saved(tmp_path, content))

    assert (found.largest_gap_bytes, found.private_bytes) == (60 * MIB, MIB)


def test_what_was_freed_after_the_failure_is_told(tmp_path: Path) -> None:
    freed = {"action": "free_completed", "addr": 0, "size": 64 * MIB, "stream": 0, "time_us": 3, "frames": []}

    found = read(saved(tmp_path, snapshot(after=(freed,))))

    assert "64.0 MiB were freed" in "\n".join(explain(found))


def test_a_snapshot_without_a_failure_tells_what_is_held(tmp_path: Path) -> None:
    content = snapshot()
    content["device_traces"] = [[], []]

    found = read(saved(tmp_path, content))

    assert (found.kind, found.device, found.wanted_bytes) == ("none", "cuda:1", None)  # where most is held
    assert "No failed allocation" in explain(found)[0]
    assert "_record_memory_history" in "\n".join(explain(found))
    assert budget(found) == "80%"


def test_segments_alone_are_read_too(tmp_path: Path) -> None:
    assert read(saved(tmp_path, snapshot()["segments"])).allocated_bytes == 999 * MIB


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


def test_nothing_in_a_snapshot_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InputError, match="it names .*mkdir, and a snapshot holds plain data only"):
        read(saved(tmp_path, {"segments": [Evil()]}))

    assert not (tmp_path / "made-by-a-pickle").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04garbage",
        pickle.dumps(snapshot())[:-40],
        pickle.dumps({"weights": 1}),
        pickle.dumps(7),
        pickle.dumps({"segments": [{"total_size": 1}]}),
        pickle.dumps({"segments": [], "device_traces": [[{"size": 1}]]}),
    ],
)
def test_a_damaged_or_other_pickle_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)

    with pytest.raises(InputError, match="memory snapshot"):
        read(path)


# --------------------------------------------------------------------------------------------------------- the command line


def test_doctor_explains_a_file_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"step 1\n{NOW}\n", encoding="utf-8")

    assert main(["doctor", "--oom", str(log)]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--oom", str(log), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["oom"]

    assert "Asked for 2.50 GiB on cuda:1" in text
    assert (data["wanted_bytes"], data["other_bytes"], data["in_pieces"]) == (int(2.5 * GIB), 2 * GIB, True)
    assert data["explanation"] == text.splitlines()
    assert f"--budget {data['budget']}" in text


def test_a_log_that_powershell_has_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(NOW, encoding="utf-16")

    assert read(tmp_path / "log.txt") == failure_in(NOW)


def test_of_a_long_log_the_end_counts(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("step\n" * 4_000_000 + NOW, encoding="utf-8")

    assert read(tmp_path / "log.txt") == failure_in(NOW)


@pytest.mark.parametrize(("name", "reason"), [("log.txt", "no out-of-memory message"), ("nowhere.txt", "cannot read")])
def test_a_file_that_tells_nothing_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    (tmp_path / "log.txt").write_text("all is well", encoding="utf-8")

    assert main(["doctor", "--oom", str(tmp_path / name)]) == 3
    assert reason in capsys.readouterr().err
