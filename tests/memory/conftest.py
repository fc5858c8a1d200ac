from tests.parallel.conftest import two

__all__ = ["two"]
