from tests.adapt.conftest import _own_cache, dense, rows  # noqa: F401 - fixtures
