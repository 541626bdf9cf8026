import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import UnsupportedSlideError
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import SHORT


def write(tmp_path, **options):
    item = tiffbytes.page(slides.picture(40, 50), bytes, **options)
    return tiffbytes.write(tmp_path / "slide.tif", [item])


@pytest.mark.parametrize(
    ("compression", "name"),
    [(2, "CCITTRLE"), (6, "OJPEG"), (34661, "JBIG"), (12345, "12345")],
)
def test_unsupported_compression_is_named(tmp_path, compression, name):
    path = write(tmp_path, compression=compression)
    with pytest.raises(UnsupportedSlideError, match=rf"slide\.tif.* \(?{name}\b"):
        open_slide(path)


def test_unsupported_predictor_is_named(tmp_path):
    path = write(tmp_path, compression=8, more={317: (SHORT, 34892)})
    with pytest.raises(UnsupportedSlideError, match=r"slide\.tif.*predictor.* 34892\b"):
        open_slide(path)


def test_predictor_of_other_samples_is_refused(tmp_path):
    path = write(tmp_path, compression=8, more={317: (SHORT, 3)})
    with pytest.raises(UnsupportedSlideError, match=r"floating-point samples, not for uint8"):
        open_slide(path)


def test_unsupported_level_is_detected_at_open(tmp_path):
    pixels = slides.picture(100, 100)
    pages = [
        tiffbytes.page(pixels, bytes),
        tiffbytes.page(pixels[::2, ::2], bytes, compression=34661, subfile_type=1),
    ]
    path = tiffbytes.write(tmp_path / "slide.tif", pages)
    with pytest.raises(UnsupportedSlideError, match="JBIG"):
        open_slide(path)
