from collections.abc import Iterator

import pytest

from tests.faults.lab import Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    it = Lab()
    yield it
    it.warm.close()
