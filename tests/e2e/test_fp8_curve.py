"""fp8 through the real command line: the loss curve beside bf16's, and what status and table say about the peak."""

from pathlib import Path

import pytest

from tests.helpers import metrics, points, status, train

COMMON = ["model=debug", "micro_batch=2", "seq_len=64", "steps=60", "nproc=2", "device=cpu",
          "optim.lr=5e-4", "optim.warmup_steps=10"]  # fmt: skip


@pytest.mark.slow
def test_loss_curve_beside_bf16(tmp_path: Path) -> None:
    """60 steps on two gloo ranks. Each step within 3 % of bf16's loss, the mean over them within 0.5 %."""
    for args in (["precision=bf16,fp8"], ["precision=fp8", "precision.scaling=rowwise"]):
        done = train(*args, *COMMON, f"name=n{len(args)}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("fp8-peak" in done.stdout) and "measured-peak" in done.stdout
    by = points(tmp_path / "outputs" / "n1") | points(tmp_path / "outputs" / "n2")
    assert len(by) == 3
    curves = {
        (s["precision"], key): [m["loss"] for m in metrics(point)]
        for key, point in by.items()
        for s in [status(point)["summary"]]
    }
    (plain,) = [curve for (precision, _), curve in curves.items() if precision == "bf16"]
    assert plain[0] > 6 and plain[-1] < 3.3
    for (precision, key), curve in curves.items():
        if precision == "fp8":
            off = [abs(a - b) / b for a, b in zip(curve, plain, strict=True)]
            assert max(off) < 0.03 and 0 < sum(off) / len(off) < 0.005, (key, off)
    for point in by.values():
        s = status(point)["summary"]
        assert s["peak"]["dtype"] == s["precision"] and s["peak"]["kind"] == "measured"
        assert ("float8_e4m3fn" if s["precision"] == "fp8" else "bfloat16") in s["peak"]["source"]
