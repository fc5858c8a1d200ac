"""compile.kernels=fused through the real command line: over 200 steps in bf16 the plain model's loss, compiled and eager."""

from pathlib import Path

import pytest

from tests.helpers import metrics, points, status, train

COMMON = ["precision=bf16", "model=debug", "micro_batch=2", "seq_len=64", "steps=200", "nproc=1",
          "optim.lr=5e-4", "optim.warmup_steps=10"]  # fmt: skip
CURVES = {"eager": ("none", "inductor"), "plain": ("layer", "inductor"), "fused": ("layer", "fused")}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_curve_beside_the_plain_models(tmp_path: Path, device: str) -> None:
    """Differences of the loss from the compiled plain model's, their mean and their largest: no more than twice the eager plain
    model's, whose rounding differs too."""
    losses = {}
    for name, (compiled, kernels) in CURVES.items():
        how = [f"device={device}", f"compile={compiled}", f"compile.kernels={kernels}", f"name={name}"]
        done = train(*COMMON, *how, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        (point,) = points(tmp_path / "outputs" / name).values()
        ran = set(status(point)["summary"]["engine"]["kernels"])
        assert ran == ({"adamw", "loss", "norm", "carry", "stacked"} if name == "fused" else set())
        losses[name] = [line["loss"] for line in metrics(point)]
    plain = losses["plain"]
    assert len(plain) == 200 and plain[0] > 6 and plain[-1] < 3
    off = {name: [abs(a - b) / b for a, b in zip(losses[name], plain, strict=True)] for name in ("eager", "fused")}
    found = {name: (sum(each) / len(each), max(each)) for name, each in off.items()}
    print(found, plain[-1], losses["fused"][-1])
    assert 0 < found["fused"][0] <= 2 * found["eager"][0], found
    assert found["fused"][1] <= 2 * found["eager"][1], found
