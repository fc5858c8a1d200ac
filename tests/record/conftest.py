from tests.parallel.conftest import four, two  # noqa: F401
