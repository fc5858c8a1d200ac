"""Recipes of many ranks: valid as they are, and built and stepped at their full size."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT, environment
from tests.parallel import fake
from train import config
from train.measure import flops
from train.parallel import mesh
from train.sweep import freeze, validate

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.parallel.fake"])
MANY = [p.stem for p in sorted((ROOT / "conf" / "recipe").glob("*.yaml")) if "nproc:" in p.read_text()]


def compose(recipe: str, folder: Path) -> config.Train:
    """The configuration of a recipe as the command line gives it, resolved for GPUs that need not be here."""
    command = [sys.executable, "-m", "train", f"recipe={recipe}", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=True)
    cfg: config.Train = config.from_dict(config.Train, yaml.safe_load(done.stdout))
    assert cfg.nproc is not None
    cfg.device, cfg.precision.name = "cuda", "bf16"
    assert validate.combination(cfg, cfg.nproc) is None
    degrees = mesh.resolve(cfg, cfg.nproc)
    for name, degree in degrees.items():
        setattr(cfg.parallelism, name, degree)
    cfg.grad_accum, cfg.global_batch = validate.batch(cfg, mesh.data_ranks(degrees))
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MANY)
def test_builds_and_steps_at_full_size(recipe: str, tmp_path: Path) -> None:
    cfg = compose(recipe, tmp_path)
    assert cfg.nproc is not None
    if cfg.parallelism.pp != 1:
        cfg.grad_accum = int(cfg.parallelism.pp)  # more micro-batches show no more
    (tmp_path / "config.yaml").write_text(freeze.config_text(cfg))
    owned = []
    pp = int(cfg.parallelism.pp)  # one rank of every stage
    for rank in (0, cfg.nproc - 1) if pp == 1 else range(0, cfg.nproc, cfg.nproc // pp):
        with FORKS.Pool(1) as process:  # a process of its own, as a rank has
            owned.append(process.apply(fake.main, (tmp_path / "config.yaml", rank)))
    # together the ranks of an island hold every parameter at least once, and no more than padding and norms above
    island = cfg.nproc // int(cfg.parallelism.dp_replicate)
    together = owned[0] * island if pp == 1 else sum(owned) * island // pp
    assert flops.param_count(cfg.model) <= together <= 1.05 * flops.param_count(cfg.model)
