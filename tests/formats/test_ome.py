import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.formats import ome
from tests import slides

XML = (
    '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0" Name="S">'
    '<Pixels SizeX="9" {}>{}</Pixels></Image></OME>'
)


@pytest.mark.parametrize("subifds", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_channels_of_a_subifd_pyramid(tmp_path, channels, dtype, subifds):
    path = tmp_path / "slide.ome.tif"
    pixels = np.moveaxis(slides.picture(300, 420, channels, dtype), -1, 0)
    names = [f"Marker {index}" for index in range(channels)]
    metadata = {
        "axes": "CYX",
        "Channel": {"Name": names, "Color": [-16776961] * channels},
        "PhysicalSizeX": 325.0,
        "PhysicalSizeXUnit": "nm",
        "PhysicalSizeY": 0.65,
        "PhysicalSizeYUnit": "µm",
    }
    levels = slides.write_pyramid(
        path,
        np.ascontiguousarray(pixels),
        (2, 2) if subifds else (),
        subifds=subifds,
        metadata=metadata,
        photometric="minisblack",
    )
    with open_slide(path) as slide:
        assert [channel.name for channel in slide.channels] == names
        assert {channel.color for channel in slide.channels} == {"#ff0000"}
        assert slide.mpp == pytest.approx((0.325, 0.65))
        assert slide.metadata["ome"]["Pixels"]["PhysicalSizeXUnit"] == "nm"
        assert slide.level_count == len(levels)
        for array, level in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(array[...], np.moveaxis(level, 0, -1))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_rgb(tmp_path, dtype):
    path = tmp_path / "slide.ome.tif"
    pixels = slides.picture(200, 300, 3, dtype)
    levels = slides.write_pyramid(
        path, pixels, (2,), subifds=True, metadata={"axes": "YXS"}, photometric="rgb"
    )
    with open_slide(path) as slide:
        assert slide.layout.rgb
        assert slide.channels == ()
        for array, level in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(array[...], level)


@pytest.mark.parametrize(
    ("attributes", "mpp"),
    [
        ('PhysicalSizeX="0.5" PhysicalSizeY="0.25"', (0.5, 0.25)),
        ('PhysicalSizeX="500" PhysicalSizeXUnit="nm" PhysicalSizeY="0.5"', (0.5, 0.5)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="mm" PhysicalSizeY="1"', (1000, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="\u03bcm" PhysicalSizeY="1"', (1, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="\u00b5m" PhysicalSizeY="1"', (1, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="Å" PhysicalSizeY="1"', (1e-4, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="in" PhysicalSizeY="1"', (25400, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="pixel" PhysicalSizeY="1"', None),
        ('PhysicalSizeX="0" PhysicalSizeY="1"', None),
        ('PhysicalSizeX="-1" PhysicalSizeY="1"', None),
        ('PhysicalSizeX="nan" PhysicalSizeY="1"', None),
        ('PhysicalSizeX="x" PhysicalSizeY="1"', None),
        ('PhysicalSizeX="1"', None),
        ("", None),
    ],
)
def test_physical_size(attributes, mpp):
    assert ome.parse(XML.format(attributes, "")).mpp == (
        None if mpp is None else pytest.approx(mpp)
    )


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        ("-1", "#ffffff"),
        ("-16776961", "#ff0000"),
        ("16711935", "#00ff00"),
        ("65535", "#0000ff"),
        ("255", None),  # black can't be seen
        ("red", None),
        ("", None),
    ],
)
def test_colors(color, expected):
    found = ome.parse(XML.format("", f'<Channel Name="A" Color="{color}"/><Channel/>'))
    assert found.channels[0].color == expected
    assert found.channels[1].color is None
    assert found.channels[1].name == "channel 1"


@pytest.mark.parametrize(
    "xml",
    [
        None,
        "",
        "<OME>",
        "<OME/>",
        "<OME><Image/></OME>",
        '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><OME><Image><Pixels>&b;</Pixels>'
        "</Image></OME>",
        '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]><OME>&a;</OME>',
    ],
)
def test_hostile_or_empty_xml_says_nothing(xml):
    assert ome.parse(xml) is None


@pytest.mark.parametrize("description", ["<OME><broken", "<OME xmlns='x'></OME>"])
def test_a_file_with_broken_xml_is_a_plain_tiff(tmp_path, description):
    path = tmp_path / "slide.ome.tif"
    pixels = slides.picture(60, 70)
    page = slides.tiffbytes.page(pixels, bytes, description=description)
    slides.tiffbytes.write(path, [page])
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
