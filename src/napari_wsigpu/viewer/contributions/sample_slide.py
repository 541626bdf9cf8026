"""The sample slide in File > Open Sample."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from napari_wsigpu.viewer.contributions.slide_reader import read_slides

if TYPE_CHECKING:
    from pathlib import Path

    from napari_wsigpu.viewer.layers.slide_layers import LayerData


def sample_path() -> Path:
    """Return the path of the H&E phantom, a small Aperio slide."""
    with as_file(files("napari_wsigpu") / "resources" / "he_phantom.svs") as path:
        return path


def he_phantom() -> list[LayerData]:
    """Open the H&E phantom."""
    return read_slides(str(sample_path()))
