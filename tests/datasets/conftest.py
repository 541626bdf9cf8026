"""Two slides of different sizes, and two of several planes, written once."""

import pytest

from tests.writers import slides, stacks


@pytest.fixture(scope="session")
def two_slides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    paths = [folder / "one.svs", folder / "two.svs"]
    for path, size in zip(paths, ((300, 400), (250, 220)), strict=True):
        slides.write_aperio(path, slides.picture(*size))
    return [str(path) for path in paths]


@pytest.fixture(scope="session")
def two_stacks(tmp_path_factory):
    """The paths and pixels (t, z, c, y, x) of two slides of several planes."""
    folder = tmp_path_factory.mktemp("stacks")
    pixels = [stacks.stack(0), stacks.stack(1)[:, :3]]
    paths = [folder / "five.ome.tif", folder / "three.ome.tif"]
    for path, each in zip(paths, pixels, strict=True):
        stacks.write_ome(path, each)
    return [str(path) for path in paths], pixels
