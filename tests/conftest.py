"""GPU tests run where a GPU is; with REQUIRE_GPU=1 a missing one is a failure, so that a proof can't pass by skipping."""

import os
import tempfile
from pathlib import Path

import pytest

# one sweep at a time uses a host's devices, under a lock in the temporary folder: each pytest worker has a folder of its own
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    own = Path(tempfile.gettempdir()) / f"mfu-{os.getuid()}-{worker}"
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(own)
    tempfile.tempdir = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu or os.environ.get("REQUIRE_GPU") == "1":
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
