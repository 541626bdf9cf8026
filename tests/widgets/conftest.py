from tests.viewer.conftest import own_settings, viewer, write_channels  # noqa: F401
