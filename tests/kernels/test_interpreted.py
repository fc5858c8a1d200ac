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
    found = [json.loads(line) for line in done.stdout.splitlines()]
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
    assert most.keys() <= {each["kernel"] for each in found}
    for each in found:
        if each["kernel"] not in most:  # adamw_advance_kernel, of a few numbers
            continue
        assert each["spilled"] == 0 and each["registers"] <= most[each["kernel"]], each
        assert any("ld" in w and "v4.b32" in w for w in each["widths"]), each
        assert not any("cp.async.ca" in w for w in each["widths"]), each  # cg is of 16 bytes, ca of fewer
        assert any("st" in w and "v4.b32" in w for w in each["widths"]), each
    norms = [each for each in found if each["kernel"] == "rms_norm_backward_kernel"]
    for grads, each in enumerate(norms, start=1):
        rows = 2 * (2 + grads) * 2048 * 2  # two of each input wait in shared memory, beside a few words of the sums
        assert rows < each["shared"] < rows + 1024, each
        assert any("cp.async.cg" in w for w in each["widths"]), each
    assert len(norms) == 3
