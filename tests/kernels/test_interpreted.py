"""Triton's interpreter over the kernels, and its compiler for Hopper: neither needs a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton (Linux only)"
)


def test_kernels_equal_their_plain_form_in_the_interpreter() -> None:
    file = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compiled_for_hopper_they_move_16_bytes_at_once_and_spill_nothing() -> None:
    command = [sys.executable, "-m", "tests.kernels.hopper"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["kernel"]: each for each in map(json.loads, done.stdout.splitlines())}
    # threads of an SM's 2048 that fit into its 65536 registers: half of them at least keep enough loads under way
    most = {
        "adamw_kernel": 80,
        "cross_entropy_kernel": 64,
        "swiglu_kernel": 64,
        "swiglu_backward_kernel": 64,
        "ordered_sum_kernel": 32,
        "rope_kernel": 64,
        "rms_norm_backward_kernel": 128,  # a quarter is enough: its loads wait in shared memory
    }
    for name, registers in most.items():
        assert found[name]["spilled"] == 0 and found[name]["registers"] <= registers, found[name]
        assert any("ld" in w and "v4.b32" in w for w in found[name]["widths"]), found[name]
        assert not any("cp.async.ca" in w for w in found[name]["widths"]), found[name]  # cg is of 16 bytes, ca of fewer
        assert any("st" in w and "v4.b32" in w for w in found[name]["widths"]), found[name]
