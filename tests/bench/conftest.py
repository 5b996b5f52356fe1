"""No test touches the user's cache, and none inherits the driver that another made up."""

from tests.cli.conftest import private_cache  # noqa: F401
