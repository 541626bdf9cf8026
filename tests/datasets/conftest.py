"""Two slides of different sizes, written once."""

import pytest

from tests import slides


@pytest.fixture(scope="session")
def two_slides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    paths = [folder / "one.svs", folder / "two.svs"]
    for path, size in zip(paths, ((300, 400), (250, 220)), strict=True):
        slides.write_aperio(path, slides.picture(*size))
    return [str(path) for path in paths]
