"""A slide with missing tiles; the packages themselves warn of much that is not ours."""

import pytest

from tests.writers import slides


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(600, 800), (4,), missing=[(0, 7), ()])
    return str(path)


@pytest.fixture
def whole(tmp_path):
    """A slide that lacks no tile: OpenSlide hides what is coarser than a missing one."""
    path = tmp_path / "whole.svs"
    slides.write_aperio(path, slides.picture(600, 800), (4,))
    return str(path)
