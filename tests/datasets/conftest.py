"""Two slides of different sizes, and two with several planes, written once."""

import pytest

from napari_wsigpu.datasets import Patches
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
    """Paths and pixels (t, z, c, y, x) of two slides with several planes."""
    folder = tmp_path_factory.mktemp("stacks")
    pixels = [stacks.stack(0), stacks.stack(1)[:, :3]]
    paths = [folder / "five.ome.tif", folder / "three.ome.tif"]
    for path, each in zip(paths, pixels, strict=True):
        stacks.write_ome(path, each)
    return [str(path) for path in paths], pixels


@pytest.fixture
def partly_damaged(tmp_path):
    """Nine patches in nine tiles, of which the one at (32, 32) is damaged."""
    path, numbers = tmp_path / "partly.svs", iter(range(9))

    def encode(tile):
        return b"damaged" if next(numbers) == 4 else slides.jpeg(tile)

    options = {"tile": (32, 32), "thumbnail": False, "associated": ()}
    slides.write_aperio(path, slides.picture(96, 96), (), encode=encode, **options)
    places = [(x, y) for y in (0, 32, 64) for x in (0, 32, 64)]
    return Patches.at({path: places}, 16)
