from collections.abc import Iterator

import pytest
import torch

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two gloo ranks, started once."""
    with Ranks(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four gloo ranks, started once."""
    with Ranks(4, tmp_path_factory.mktemp("four")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Eight gloo ranks, started once."""
    with Ranks(8, tmp_path_factory.mktemp("eight")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks over NCCL, with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Ranks(2, tmp_path_factory.mktemp("nccl"), "cuda") as ranks:
        yield ranks
