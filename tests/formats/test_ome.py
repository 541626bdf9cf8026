import json
import re

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.formats import markup
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.tiff import ome
from tests.writers import slides

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
        ('PhysicalSizeX="1" PhysicalSizeXUnit="ft" PhysicalSizeY="1"', (304800, 1)),
        ('PhysicalSizeX="12" PhysicalSizeXUnit="li" PhysicalSizeY="1"', (25400, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="micron" PhysicalSizeY="1"', (1, 1)),
        ('PhysicalSizeX="1" PhysicalSizeXUnit="Mm" PhysicalSizeY="1"', (1e12, 1)),
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
    assert ome.describe(markup.parse(XML.format(attributes, ""))).mpp == (
        None if mpp is None else pytest.approx(mpp)
    )


def test_unknown_units_are_named():
    stated = 'PhysicalSizeX="1" PhysicalSizeXUnit="dogs" PhysicalSizeY="1"'
    assert ome.describe(markup.parse(XML.format(stated, ""))).problems == (
        "The pixel size has an unknown unit of length ('dogs') and is ignored.",
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
    channels = f'<Channel Name="A" Color="{color}"/><Channel/>'
    found = ome.describe(markup.parse(XML.format("", channels)))
    assert found.channels[0].color == expected
    assert found.channels[1].color is None
    assert found.channels[1].name == "channel 1"


def test_channels_in_color(tmp_path):
    """Each of two channels has three samples, as tifffile reads them."""
    pixels = np.stack([slides.picture(60, 70), slides.picture(60, 70)[::-1]])
    path = tmp_path / "a.ome.tif"
    metadata = {"axes": "CYXS", "Channel": {"Name": ["H&E", "Azan"]}}
    tifffile.imwrite(path, pixels, ome=True, photometric="rgb", metadata=metadata)
    with tifffile.TiffFile(path) as file:
        [series] = file.series
        assert series.axes == "CYXS"
        expected = np.concatenate(list(series.asarray()), axis=-1)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        assert [(channel.name, channel.color) for channel in slide.channels] == [
            ("H&E red", "#ff0000"),
            ("H&E green", "#00ff00"),
            ("H&E blue", "#0000ff"),
            ("Azan red", "#ff0000"),
            ("Azan green", "#00ff00"),
            ("Azan blue", "#0000ff"),
        ]
        assert [channel.visible for channel in slide.channels] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("xml", ["<OME/>", "<OME><Image/></OME>"])
def test_no_image(xml):
    assert ome.describe(markup.parse(xml)) is None


@pytest.mark.parametrize("description", ["<OME><broken", "<OME xmlns='x'></OME>"])
def test_a_file_with_broken_xml_is_a_plain_tiff(tmp_path, description):
    path = tmp_path / "slide.ome.tif"
    pixels = slides.picture(60, 70)
    page = slides.tiffbytes.page(pixels, bytes, description=description)
    slides.tiffbytes.write(path, [page])
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


def write(path, xml, levels=2):
    """Write a file whose OME-XML is given; the main image and pictures of 3 samples."""
    pixels = slides.picture(256, 320)
    pictures = [slides.picture(40, 30), slides.picture(20, 60)]
    options = {"metadata": None, "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, description=xml.encode(), subifds=levels - 1, tile=(64, 64), **options)
        for level in range(1, levels):
            reduced = pixels[:: 2**level, :: 2**level]
            file.write(reduced, subfiletype=1, tile=(64, 64), **options)
        for picture in pictures:
            file.write(picture, **options)
    return pixels, pictures


def image(name, width, height, ifd, *, more="", within=""):
    return (
        f'<Image ID="Image:{ifd}" Name="{name}">{more}<Pixels ID="Pixels:{ifd}" '
        f'DimensionOrder="XYCZT" Type="uint8" SizeX="{width}" SizeY="{height}" SizeC="3" '
        f'SizeZ="1" SizeT="1" PhysicalSizeX="{0.25 + ifd}" PhysicalSizeY="0.5">'
        f'<Channel ID="Channel:{ifd}:0" SamplesPerPixel="3"/>'
        f'<TiffData IFD="{ifd}" PlaneCount="1">{within}</TiffData></Pixels></Image>'
    )


def ome_xml(*parts, attributes=""):
    start = f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" {attributes}>'
    return f"{start}{''.join(parts)}</OME>"


MAIN = image("Slide", 320, 256, 0)


@pytest.mark.parametrize("side", ["SizeX", "SizeY"])
def test_xml_of_another_size_is_reported(tmp_path, side):
    path = tmp_path / "slide.ome.tif"
    pixels = np.arange(2 * 64 * 64, dtype=np.uint16).reshape(2, 64, 64)
    metadata = {"axes": "CYX", "Channel": {"Name": ["a", "b"]}, "PhysicalSizeX": 0.5}
    tifffile.imwrite(path, pixels, metadata=metadata)
    xml = tifffile.tiffcomment(path).replace(f'{side}="64"', f'{side}="65"')
    tifffile.tiffcomment(path, xml)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 1], pixels[1])
        assert slide.mpp is None
        assert slide.layout.problems == (
            "The OME-XML describes no image of 64 x 64 pixels and is ignored.",
            ome.PAGES_AS_CHANNELS,
        )


class TestSeveralImages:
    def test_label_and_macro(self, tmp_path):
        path = tmp_path / "slide.ome.tif"
        xml = ome_xml(MAIN, image("label image", 30, 40, 1), image("Macro image", 60, 20, 2))
        pixels, pictures = write(path, xml)
        with open_slide(path) as slide, tifffile.TiffFile(path) as file:
            assert [series.kind for series in file.series] == ["ome"] * 3
            assert not slide.layout.problems
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
            assert slide.level_count == len(file.series[0].levels) == 2
            assert list(slide.associated_images) == ["label", "macro"]
            for found, expected in zip(slide.associated_images.values(), pictures, strict=True):
                np.testing.assert_array_equal(found.read(), expected)

    def test_others_are_named(self, tmp_path):
        path = tmp_path / "slide.ome.tif"
        xml = ome_xml(MAIN, image("label", 30, 40, 1), image("Other", 60, 20, 2))
        write(path, xml)
        with open_slide(path) as slide:
            (problem,) = slide.layout.problems
            assert "'Other' (60 x 20)" in problem

    def test_the_largest_is_not_the_first(self, tmp_path):
        path = tmp_path / "slide.ome.tif"
        xml = ome_xml(image("macro", 30, 40, 1), image("label", 60, 20, 2), MAIN)
        pixels, _ = write(path, xml)
        with open_slide(path) as slide:
            assert slide.mpp == (0.25, 0.5)
            assert slide.metadata["ome"]["Image"]["Name"] == "Slide"
            np.testing.assert_array_equal(slide.levels[0][...], pixels)


def instrument(number, objectives, make='Manufacturer="Leica" Model="AT2"'):
    return f'<Instrument ID="Instrument:{number}"><Microscope {make}/>{objectives}</Instrument>'


OBJECTIVES = (
    '<Objective ID="Objective:0" NominalMagnification="{}"/>'
    '<Objective ID="Objective:1" NominalMagnification="40.0"/>'
)
TWO = instrument(0, OBJECTIVES.format(20))
FIRST, SECOND = (f'<ObjectiveSettings ID="Objective:{index}"/>' for index in range(2))
DATE = "<AcquisitionDate>2020-01-02T03:04:05</AcquisitionDate>"


@pytest.mark.parametrize(
    ("parts", "more", "objective", "scanner"),
    [
        (TWO, SECOND, 40, "Leica AT2"),
        (TWO, FIRST, 20, "Leica AT2"),
        (TWO, "", None, "Leica AT2"),
        (instrument(0, OBJECTIVES.format("x")), FIRST, None, "Leica AT2"),
        (instrument(0, '<Objective NominalMagnification="10"/>', ""), "", 10, None),
        (instrument(0, "") + instrument(1, ""), "", None, None),
        (
            instrument(0, "") + instrument(1, "", 'Model="X"'),
            '<InstrumentRef ID="Instrument:1"/>',
            None,
            "X",
        ),
        ("", '<InstrumentRef ID="Instrument:1"/>', None, None),
    ],
)  # fmt: skip
def test_instruments(tmp_path, parts, more, objective, scanner):
    path = tmp_path / "slide.ome.tif"
    write(path, ome_xml(parts, image("Slide", 320, 256, 0, more=DATE + more)))
    with open_slide(path) as slide:
        assert slide.objective == objective
        assert slide.metadata["scanner"] == scanner
        assert slide.metadata["scan_date"] == "2020-01-02T03:04:05"
        whole = json.loads(json.dumps(slide.metadata))["ome"]["OME"]
        assert whole["Image"]["Pixels"]["SizeX"] == "320"


def test_long_xml_is_kept_in_part(tmp_path):
    path = tmp_path / "slide.ome.tif"
    write(path, ome_xml(MAIN, f"<!--{'x' * ome.LONGEST_KEPT}-->"))
    with open_slide(path) as slide:
        assert "OME" not in slide.metadata["ome"]
        assert slide.metadata["ome"]["Pixels"]["SizeX"] == "320"


ELSEWHERE = '<UUID FileName="other.ome.tif">urn:uuid:1</UUID>'
HUGE = 'ModuloAlongZ Type="lifetime" Start="0" End="1e9" Step="1e-9"'


@pytest.mark.parametrize(
    "xml",
    [
        "<OME><broken</OME>",
        '<!DOCTYPE x [<!ENTITY a "aa">]><OME>&a;</OME>',
        ome_xml('<BinaryOnly MetadataFile="companion.ome" UUID="urn:uuid:1"/>'),
        ome_xml(MAIN.replace('SizeX="320"', 'SizeX="wide"')),
        ome_xml(MAIN.replace('SizeX="320"', "")),
        ome_xml(MAIN.replace('SizeZ="1"', f'SizeZ="{10**12}"')),
        ome_xml(MAIN.replace('SizeT="1"', 'SizeT="-1"')),
        ome_xml(MAIN.replace("XYCZT", "XYC")),
        ome_xml(MAIN.replace('SamplesPerPixel="3"', 'SamplesPerPixel="0"')),
        ome_xml(MAIN.replace('PlaneCount="1"', f'PlaneCount="{10**12}"')),
        ome_xml(MAIN.replace('IFD="0"', 'IFD="-1"')),
        ome_xml(MAIN.replace('PlaneCount="1"', f'FirstZ="{"9" * 5000}"')),
        ome_xml(image("Slide", 320, 256, 0, within=ELSEWHERE)),
        ome_xml(MAIN, f'<StructuredAnnotations><A ID="A"><V><M><{HUGE}/></M></V></A>'
                "</StructuredAnnotations>"),
    ],
)  # fmt: skip
def test_unusable_xml(tmp_path, xml):
    path = tmp_path / "slide.ome.tif"
    pixels, _ = write(path, xml)
    with open_slide(path) as slide:
        *others, problem = slide.layout.problems
        assert "OME-XML" in problem
        # An XML that is read as that of a renamed file doesn't mention the other images.
        not_shown = "2 more image(s) of the file are not shown: 30 x 40, 60 x 20."
        assert others == ([] if problem == ome.RENAMED else [not_shown])
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


@pytest.mark.parametrize("attributes", ['UUID="urn:uuid:1"', ""])
def test_planes_in_this_very_file(tmp_path, attributes):
    path = tmp_path / "other.ome.tif"
    xml = ome_xml(image("Slide", 320, 256, 0, within=ELSEWHERE), attributes=attributes)
    pixels, _ = write(path, xml)
    with open_slide(path) as slide:
        assert not slide.layout.problems
        assert slide.mpp == (0.25, 0.5)
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_impossible_pixel_size_is_reported(tmp_path, value):
    path = tmp_path / "slide.ome.tif"
    write(path, ome_xml(MAIN.replace('PhysicalSizeY="0.5"', f'PhysicalSizeY="{value}"')))
    with open_slide(path) as slide:
        (problem,) = slide.layout.problems
        assert f"'{value}'" in problem
        assert slide.mpp is None


@pytest.mark.parametrize(
    "xml", [ome_xml(), ome_xml("<Image/>"), ome_xml("<Image><Pixels/></Image>")]
)
def test_xml_without_an_image(tmp_path, xml):
    path = tmp_path / "slide.ome.tif"
    pixels, _ = write(path, xml)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


@pytest.mark.parametrize(
    "planes",
    ["", '<TiffData IFD="0"><UUID FileName="other.ome.tif">urn:uuid:2</UUID></TiffData>'],
)
@pytest.mark.parametrize("others", [0, 1])
def test_xml_of_the_only_image_of_a_size(tmp_path, planes, others):
    """Though tifffile can't tell by it where planes lie."""
    image = (
        '<Image ID="Image:{0}"><Pixels ID="Pixels:{0}" DimensionOrder="XYCZT" Type="uint8" '
        'SizeX="90" SizeY="80" SizeZ="1" SizeC="1" SizeT="1" PhysicalSizeX="0.5" '
        'PhysicalSizeY="0.25"><Channel ID="Channel:{0}:0" Name="DAPI"/>{1}</Pixels></Image>'
    )
    images = "".join(image.format(number, planes) for number in range(1 + others))
    xml = f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">{images}</OME>'
    pixels = slides.picture(80, 90, 1)[..., 0]
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, description=xml, metadata=None)
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as file:
        assert planes or file.series[0].kind == "generic"
    with open_slide(tmp_path / "a.ome.tif") as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 0], pixels)
        assert slide.mpp == (None if others else (0.5, 0.25))
        assert [channel.name for channel in slide.channels] == ["gray" if others else "DAPI"]
        assert len(slide.layout.problems) == bool(planes)


def plane_xml(sizes, samples, offsets):
    """Return XML that places plane by plane; `offsets` are added to the indices along each axis."""
    planes = "".join(
        f'<TiffData IFD="{number}" PlaneCount="1" FirstT="{t + offsets.get("T", 0)}" '
        f'FirstZ="{z + offsets.get("Z", 0)}" FirstC="{c + offsets.get("C", 0)}"/>'
        for number, (t, z, c) in enumerate(np.ndindex(*sizes))
    )
    channels = "".join(
        f'<Channel ID="Channel:0:{c}" Name="{"ABC"[c]}" SamplesPerPixel="{samples}"/>'
        for c in range(sizes[2])
    )
    return ome_xml(
        f'<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" '
        f'SizeX="50" SizeY="40" SizeC="{samples * sizes[2]}" SizeZ="{sizes[1]}" '
        f'SizeT="{sizes[0]}">{channels}{planes}</Pixels></Image>'
    )


@pytest.mark.parametrize("counted_from_one", ["", "C", "Z", "T", "CZ", "CZT"])
@pytest.mark.parametrize("samples", [1, 3])
def test_indices_that_count_from_one(tmp_path, counted_from_one, samples):
    """The planes are those that tifffile reads if the indices count from 0."""
    sizes = (2, 3, 2)
    shape = (*sizes, 40, 50, 3)[: 5 + (samples == 3)]
    pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    options = {"metadata": None, "photometric": "rgb" if samples == 3 else "minisblack"}
    pages = pixels.reshape(-1, *shape[3:])
    named = tmp_path / "a.ome.tif", tmp_path / "b.ome.tif"
    for path, axes in zip(named, ("", counted_from_one), strict=True):
        xml = plane_xml(sizes, samples, dict.fromkeys(axes, 1))
        tifffile.imwrite(path, pages, description=xml, **options)
    with tifffile.TiffFile(named[0]) as file:
        [series] = file.series
        assert series.axes == "TZCYXS"[: len(shape)]
        expected = series.asarray().reshape(*sizes, 40, 50, samples)
    with open_slide(named[1], "cpu") as slide:
        assert slide.layout.problems == ()
        assert slide.planes.sizes == {"t": 2, "z": 3}
        names = ["A", "B"] if samples == 1 else ["A red", "A green", "A blue", "B red"]
        assert [channel.name for channel in slide.channels][:4] == names
        for t, z in np.ndindex(2, 3):
            channels = np.concatenate(list(expected[t, z]), axis=-1)
            np.testing.assert_array_equal(slide.plane(z, t).levels[0][...], channels)


@pytest.mark.parametrize(
    ("stated", "changed"), [('FirstZ="1"', 'FirstZ="0"'), ('SizeZ="3"', 'SizeZ="4"')]
)
def test_indices_that_count_from_zero_with_gaps(tmp_path, stated, changed):
    """An index of 0, or none as large as the axis, shows that they count from 0."""
    xml = plane_xml((1, 3, 1), 1, {"Z": 1}).replace(stated, changed)
    pixels = slides.picture(40, 50, 3).transpose(2, 0, 1)
    options = {"metadata": None, "photometric": "minisblack"}
    path = tmp_path / "a.ome.tif"
    tifffile.imwrite(path, pixels, description=xml, **options)
    with tifffile.TiffFile(path) as file, open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(file.series[0].asarray()[2], pixels[1])
        np.testing.assert_array_equal(slide.plane(z=2).levels[0][..., 0], pixels[1])
        assert any("planes, but" in problem for problem in slide.layout.problems)


def test_indices_that_are_no_numbers(tmp_path):
    xml = plane_xml((1, 3, 1), 1, {"Z": 1}).replace('FirstZ="1"', 'FirstZ="one"')
    pixels = slides.picture(40, 50, 3).transpose(2, 0, 1)
    options = {"metadata": None, "photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, description=xml, **options)
    with open_slide(tmp_path / "a.ome.tif", "cpu") as slide:
        assert ome.CONTRADICTION in slide.layout.problems


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda xml: xml[:-8], "The OME-XML can't be read"),
        (lambda xml: xml + "x", "The OME-XML can't be read"),
        (lambda xml: re.sub(' PhysicalSizeY="[^"]*"', "", xml), "along one axis only"),
    ],
)
def test_lost_scales_are_reported(tmp_path, change, sentence):
    path, pixels = tmp_path / "a.ome.tif", np.zeros((33, 47), np.uint8)
    metadata = {"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    tifffile.imwrite(path, pixels, ome=True, metadata=metadata)
    with tifffile.TiffFile(path) as file:
        xml = file.pages.first.description
    tifffile.imwrite(path, pixels, description=change(xml).encode(), metadata=None)
    found = describe(path)
    assert found.mpp is None
    assert sentence in " ".join(found.problems)


def test_names_of_too_few_channels_are_reported(tmp_path):
    path, pixels = tmp_path / "a.ome.tif", np.zeros((2, 33, 47), np.uint8)
    metadata = {"axes": "CYX", "Channel": {"Name": ["DAPI", "CD3"]}}
    tifffile.imwrite(path, pixels, ome=True, photometric="minisblack", metadata=metadata)
    with tifffile.TiffFile(path) as file:
        xml = file.pages.first.description
    fewer = re.sub("<Channel [^>]*CD3.*?</Channel>", "", xml)
    assert "DAPI" in fewer
    assert "CD3" not in fewer
    tifffile.tiffcomment(path, fewer.encode())
    found = describe(path)
    assert "describes 1 channel(s), but the image has 2" in " ".join(found.problems)
