import numpy as np

from napari_wsigpu import open_slide
from tests import oracles
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import ASCII, RATIONAL, SHORT

TEXT = "Resolution = 0.25um\nObjective=20X\r\nnoise\n a = b = c \nempty="


def write(path):
    pixels = slides.picture(300, 400)
    tags = {
        271: (ASCII, "Huron Digital Pathology"),
        272: (ASCII, "LE120"),
        282: (RATIONAL, 40000),
        283: (RATIONAL, 20000),
        296: (SHORT, 3),
    }
    pages = [tiffbytes.page(pixels, bytes, more=tags, tile=(64, 64), description=TEXT)]
    pages.append(tiffbytes.page(slides.picture(30, 40), bytes, tile=None, description="x"))
    pages += [
        tiffbytes.page(np.ascontiguousarray(pixels[::step, ::step]), bytes, tile=(64, 64))
        for step in (2, 4)
    ]
    pages += [
        tiffbytes.page(slides.picture(20, width), bytes, tile=None, subfile_type=kind)
        for kind, width in ((1, 30), (9, 50))
    ]
    tiffbytes.write(path, pages)


def test_metadata_equals_openslide(tmp_path):
    path = tmp_path / "slide.tif"
    write(path)
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == properties["openslide.vendor"] == "huron"
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
        assert slide.objective is None
        assert "openslide.objective-power" not in properties
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], oracles.openslide_level(path, index))
        expected = {
            name.removeprefix("huron."): value
            for name, value in properties.items()
            if name.startswith("huron.")
        }
        assert slide.metadata["huron"] == expected
        assert slide.layout.problems == ()
        tags = {key: oracles.as_property(value) for key, value in slide.metadata["tiff"].items()}
        assert tags == oracles.openslide_tiff_tags(path)
        assert set(slide.associated_images) == set(other.associated_images)
        for name, image in other.associated_images.items():
            pixels = slide.associated_images[name].read()
            np.testing.assert_array_equal(pixels, np.asarray(image)[..., :3])


def test_scanner(tmp_path):
    path = tmp_path / "slide.tif"
    write(path)
    with open_slide(path) as slide:
        assert slide.metadata["scanner"] == "Huron Digital Pathology LE120"
