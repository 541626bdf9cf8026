import numpy as np
import pytest

from napari_wsigpu import open_slide
from tests import oracles
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import ASCII, RATIONAL, SHORT

XML = (
    "<Argos.Scan.Metadata><MinZ>{}</MinZ><MaxZ>{}</MaxZ><Barcode>B-7</Barcode>"
    "<ObjectiveMagnification>20</ObjectiveMagnification><Scan><Name>S</Name>"
    '<Tagged a="1">T</Tagged></Scan></Argos.Scan.Metadata>'
)


def write(path, planes=1, xml=None):
    text = XML.format(0, planes - 1) if xml is None else xml
    tags = {65000: (ASCII, text), 272: (ASCII, "Argos 1")}
    tags |= {282: (RATIONAL, 40000), 283: (RATIONAL, 20000), 296: (SHORT, 3)}
    pages = []
    for plane in range(planes):
        pixels = slides.picture(300, 400 + plane)[:, :400]
        pages += [
            tiffbytes.page(
                np.ascontiguousarray(pixels[::step, ::step]), bytes, tile=(64, 64), more=tags
            )
            for step in (1, 2, 4)
        ]
    pages += [tiffbytes.page(slides.picture(20, width), bytes, tile=None) for width in (30, 50)]
    tiffbytes.write(path, pages)


@pytest.mark.parametrize("planes", [1, 2, 3, 5])
def test_metadata_equals_openslide(tmp_path, planes):
    path = tmp_path / "slide.avs"
    write(path, planes)
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == properties["openslide.vendor"] == "argos"
        assert slide.layout.other_planes == planes - 1
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
        assert slide.objective == float(properties["openslide.objective-power"])
        assert slide.metadata["barcode"] == properties["openslide.barcode"]
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], oracles.openslide_level(path, index))
        for z in range(planes):
            assert slide.plane(z).planes.z == z
            expected = slides.picture(300, 400 + z)[:, :400]
            np.testing.assert_array_equal(slide.plane(z).levels[0][...], expected)
        for name, value in properties.items():
            if name.startswith("argos."):
                found = slide.metadata
                for key in name.split("."):
                    found = found[key]
                assert found == value
        tags = {key: oracles.as_property(value) for key, value in slide.metadata["tiff"].items()}
        assert tags == oracles.openslide_tiff_tags(path)
        assert set(slide.associated_images) == set(other.associated_images)
        for name, image in other.associated_images.items():
            pixels = slide.associated_images[name].read()
            np.testing.assert_array_equal(pixels, np.asarray(image)[..., :3])


@pytest.mark.parametrize("xml", ["<Argos.Scan.Metadata>", "<Argos.Scan.Metadata/>"])
def test_unreadable_xml(tmp_path, xml):
    path = tmp_path / "slide.avs"
    write(path, 3, xml)
    with open_slide(path) as slide:
        assert len(slide.layout.problems) == 1
        assert slide.objective is None
        assert slide.metadata["barcode"] is None
        expected = slides.picture(300, 401)[:, :400]
        np.testing.assert_array_equal(slide.levels[0][...], expected)
