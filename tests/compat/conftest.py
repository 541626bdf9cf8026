"""Fixtures: a slide with missing tiles and one without."""

import pytest

from tests.writers import slides


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(600, 800), (4,), missing=[(0, 7), ()])
    return str(path)


@pytest.fixture
def whole(tmp_path):
    """Return a slide without missing tiles, below which OpenSlide would hide coarser levels."""
    path = tmp_path / "whole.svs"
    slides.write_aperio(path, slides.picture(600, 800), (4,))
    return str(path)
