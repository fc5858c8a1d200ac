"""The processes that the tests of this folder run on: a rank that dies costs its case a fresh start, once."""

import os
import signal
from pathlib import Path

import pytest

from tests.parallel.ranks import Ranks


def dies(rank: int, world: int, mark: str, always: bool) -> int:
    """Rank 1 kills itself, unless it has done so before and not `always`."""
    if rank == 1 and (always or not Path(mark).exists()):
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return rank


def test_a_rank_that_died_once_gets_another_case(two: Ranks, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="start again for dies"):
        assert two.run(dies, str(tmp_path / "once"), False) == [0, 1]


def test_a_rank_that_dies_twice_is_a_failure(two: Ranks, tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="start again"),
        pytest.raises(AssertionError, match=r"exit codes \[-6\] in dies"),
    ):
        two.run(dies, str(tmp_path / "always"), True)
    assert two.run(dies, str(tmp_path / "always"), False) == [0, 1]
