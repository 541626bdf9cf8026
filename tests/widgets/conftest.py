from tests.viewer.conftest import viewer, write_channels  # noqa: F401
