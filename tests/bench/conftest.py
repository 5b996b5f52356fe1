"""No test touches the user's cache or inherits the driver that another made up; ``no_nvrtc`` for those that compile."""

from tests.cli.conftest import no_nvrtc, private_cache  # noqa: F401
