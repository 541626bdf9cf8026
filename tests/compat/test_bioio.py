"""The bioio reader; skipped if bioio is not installed."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from tests.writers import slides

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("bioio", exc_type=ImportError)

from bioio import BioImage  # noqa: E402

from napari_wsigpu.compat import bioio as ours  # noqa: E402


def test_levels(path):
    image = BioImage(path, reader=ours.Reader)
    with open_slide(path) as slide:
        for number, level in enumerate(slide.levels):
            image.set_resolution_level(number)
            assert slide.mpp[0] * slide.level_downsamples[number] == image.physical_pixel_sizes.X
            assert image.dims.order == "TCZYXS"
            np.testing.assert_array_equal(image.data[0, 0, 0], level[...])
            np.testing.assert_array_equal(image.dask_data[0, 0, 0].compute(), level[...])
    image.reader.slide.close()


def test_pixels_match_the_tifffile_reader(whole):
    theirs = pytest.importorskip("bioio_tifffile", exc_type=ImportError)
    image, expected = (BioImage(whole, reader=kind) for kind in (ours.Reader, theirs.Reader))
    assert image.dims.order == expected.dims.order
    np.testing.assert_array_equal(image.data, expected.data)
    image.reader.slide.close()


def test_channels(tmp_path):
    path = tmp_path / "slide.ome.tif"
    pixels = slides.picture(100, 120, 1, "uint16")[..., 0]
    tifffile.imwrite(path, pixels, tile=(32, 32), photometric="minisblack")
    image = BioImage(path, reader=ours.Reader)
    assert image.dims.order == "TCZYX"
    np.testing.assert_array_equal(image.data[0, 0, 0], pixels)
    image.reader.slide.close()


def test_supported_files(path, tmp_path):
    text = tmp_path / "text.svs"
    text.write_text("no slide")
    assert ours.Reader.is_supported_image(path)
    assert not ours.Reader.is_supported_image(text)
    assert {"svs", "mrxs"} <= set(ours.ReaderMetadata.get_supported_extensions())
    assert ours.ReaderMetadata.get_reader() is ours.Reader
