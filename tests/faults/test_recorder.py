"""NCCL's flight recorder: asked through its pipe on a hang, its dump kept in the point's folder."""

import ctypes
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.lab import TINY, read, statuses, sweep
from train.launch import stacks

#: what torch's monitor thread does (ProcessGroupNCCL, struct DumpPipe): a FIFO opened without blocking, looked at once a
#: second; any byte is a request, answered by a file that takes a moment to be whole
MONITOR = """
import os, sys, time
stem, rank = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"], sys.argv[1]
assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0
os.mkfifo(f"{stem}{rank}.pipe", 0o666)
fd = os.open(f"{stem}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK)
print("open", flush=True)
while not os.read(fd, 128):
    time.sleep(1)
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb", buffering=0) as f:
    f.write(b"first half, ")
    time.sleep(0.05)
    f.write(b"second half")
"""


def test_dumps_are_asked_for_and_kept_whole(tmp_path: Path) -> None:
    """Ranks 0 and 1 have a recorder, rank 2 (gone, or on gloo) has no pipe, rank 3 has one that nobody reads."""
    scratch, logs = tmp_path / "scratch", tmp_path / "logs"
    scratch.mkdir()
    logs.mkdir()
    env = os.environ | stacks.recorder_env(scratch)
    monitors = [
        subprocess.Popen([sys.executable, "-c", MONITOR, str(r)], env=env, stdout=subprocess.PIPE) for r in (0, 1)
    ]
    os.mkfifo(scratch / "flightpipe_3.pipe")
    for m in monitors:
        assert m.stdout is not None and m.stdout.readline() == b"open\n"
    stacks.flight_recorder(scratch, logs, [0, 1, 2, 3])
    assert [m.wait(10) for m in monitors] == [0, 0]
    assert {p.name: p.read_text() for p in logs.iterdir()} == dict.fromkeys(
        ("flight_0", "flight_1"), "first half, second half"
    )


def test_no_room_for_a_dump_is_no_failure(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    os.mkfifo(scratch / "flightpipe_0.pipe")
    (scratch / "flight_0").write_bytes(b"dump")
    fd = os.open(scratch / "flightpipe_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        stacks.flight_recorder(scratch, tmp_path / "gone", [0])
    finally:
        os.close(fd)


def test_a_rank_answers_after_a_library_took_its_signal(tmp_path: Path) -> None:
    """As LLVM does when Triton compiles for the first time."""
    with open(tmp_path / "stack", "w") as file:
        try:
            stacks.answer(file)
            ctypes.CDLL(None).signal(signal.SIGUSR1, 1)  # SIG_IGN
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not (tmp_path / "stack").stat().st_size
            stacks.answer(file)
            os.kill(os.getpid(), signal.SIGUSR1)
            found = stacks.read((tmp_path / "stack").read_text())
            assert "test_recorder.py" in found.where, found
        finally:
            faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_hang_on_nccl_leaves_every_rank_s_dump(tmp_path: Path) -> None:
    args = [a for a in TINY if a != "device=cpu"]
    done = sweep(
        tmp_path, "name=n", *args, "device=cuda", "nproc=2", "steps=9", "fault=hang@1:4", "launch.hang_seconds=3"
    )
    assert done.code == 1, done.output
    ((name, status),) = statuses(tmp_path / "n").items()
    assert status["status"] == "timeout" and status["reason"].startswith("rank 1 gave no sign of life"), status
    for rank in (0, 1):
        dump = pickle.loads((tmp_path / "n" / name / "logs" / f"flight_{rank}").read_bytes())
        assert dump["entries"], dump.keys()  # the last collectives, with their state
        assert (tmp_path / "n" / name / "logs" / f"rank{rank}.stack").stat().st_size
    done.nothing_left()


@pytest.mark.gpu
@pytest.mark.whole_gpu  # with others on it, they are named instead
def test_device_out_of_memory(tmp_path: Path) -> None:
    """oom with rank, requested and free bytes; what is larger along micro_batch is implied."""
    args = [a for a in TINY if a != "device=cpu" and not a.startswith("micro_batch")]
    done = sweep(tmp_path, "name=o", *args, "device=cuda", "nproc=1", "steps=5", "fault=oom@0:2", "micro_batch=1,2")
    assert done.code == 0, done.output
    found = sorted(statuses(tmp_path / "o").values(), key=lambda s: s["status"])
    assert [s["status"] for s in found] == ["infeasible", "oom"]
    memory = found[1]["summary"]["failure"]["memory"]
    assert found[1]["reason"].startswith("rank 0 at step 2: out of device memory: ")
    assert memory["requested_gib"] > memory["free_gib"] >= 0
    assert found[0]["reason"].startswith("implied by micro-batch-1")


#: takes all but a little of the device, as another user's job would
HOG = """
import torch
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
input()
"""


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_another_process_holds_the_memory(tmp_path: Path) -> None:
    """A point that would have fitted alone is not `oom`: the other process is named, and never a silent result."""
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None and hog.stdout.readline() == b"holding\n"
        args = ["device=cuda", "nproc=1", "data=fake", "model=dense_1b", "steps=3"]
        done = sweep(tmp_path, "name=g", *args)
    finally:
        hog.kill()
        hog.wait()
    assert done.code == 1, done.output
    ((name, status),) = statuses(tmp_path / "g").items()
    assert status["status"] == "crashed" and "another process holds " in status["reason"], status["reason"]
    assert read(tmp_path / "g" / name / "status.json")["summary"]["telemetry"]["foreign_processes"]
