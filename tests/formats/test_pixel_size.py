"""The size of pixels by all places of a TIFF that may say it."""

import io
import os

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.compat.tiffslide import TiffSlide
from tests.writers import tiffbytes
from tests.writers.tiffbytes import ASCII, RATIONAL, SHORT, UNDEFINED

PIXELS = np.arange(64 * 80, dtype=np.uint32).astype(np.uint8).reshape(64, 80, 1)
SCREEN = {282: (RATIONAL, 96), 283: (RATIONAL, 96), 296: (SHORT, 2)}


def write(folder, more, description=""):
    page = tiffbytes.page(
        PIXELS, bytes, photometric=1, tile=None, description=description, more=more
    )
    return tiffbytes.write(folder / "slide.tif", [page])


def read(path):
    with open_slide(path, "cpu") as slide:
        return slide.mpp, slide.layout.problems


def fei(path):
    with tifffile.TiffFile(path) as file:
        scan = file.fei_metadata["Scan"]
    return scan["PixelWidth"] * 1e6, scan["PixelHeight"] * 1e6


def zeiss(path):
    with tifffile.TiffFile(path) as file:
        _, size, unit = file.sem_metadata["ap_image_pixel_size"]
    return (size * {"nm": 1e-3, "µm": 1}[unit],) * 2


def tvips(path):
    with tifffile.TiffFile(path) as file:
        found = file.tvips_metadata
    return found["PixelSizeX"] / 1000, found["PixelSizeY"] / 1000


def tvips_header():
    first = np.zeros(1, np.dtype(tifffile.TIFF.TVIPS_HEADER_V1))
    second = np.zeros(1, np.dtype(tifffile.TIFF.TVIPS_HEADER_V2))
    first["Version"], second["Magic"] = 2, 0xAAAAAAAA
    second["PixelSizeX"], second["PixelSizeY"] = 0.36, 0.72
    return first.tobytes() + second.tobytes()


FEI = b"[User]\r\nDate=1\r\n[Scan]\r\nPixelWidth=7.7e-09\r\nPixelHeight=8.8e-09\r\n"
ZEISS = b"0\r\n0\r\n0\r\n2.78e-08\r\nAP_IMAGE_PIXEL_SIZE\r\nImage Pixel Size = 27.8 nm\r\n"
VENDORS = {
    "FEI SFEG": (34680, FEI, fei),
    "FEI Helios": (34682, FEI, fei),
    "Zeiss": (34118, ZEISS, zeiss),
    "TVIPS": (37706, tvips_header(), tvips),
}


@pytest.mark.parametrize(("code", "text", "oracle"), VENDORS.values(), ids=VENDORS)
def test_vendor_tags_take_precedence_over_resolution(tmp_path, code, text, oracle):
    path = write(tmp_path, {**SCREEN, code: (UNDEFINED, text)})
    expected = oracle(path)
    mpp, problems = read(path)
    assert mpp == pytest.approx(expected, rel=1e-6)
    assert problems == ()


HITACHI = "[SemImageFile]\r\nInstructName=SU8000\r\nImageName={}\r\nPixelSize=24.8\r\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-16"])
def test_text_file_of_hitachi(tmp_path, monkeypatch, encoding):
    """Bio-Formats reads the same section; a file of another picture or a pipe says nothing."""
    path = write(tmp_path, SCREEN)
    text = path.with_suffix(".txt")
    text.write_bytes(HITACHI.format("SLIDE.tif").encode(encoding))
    assert read(path) == ((0.0248, 0.0248), ())
    monkeypatch.chdir(tmp_path)
    with TiffSlide(io.BytesIO(path.read_bytes())) as slide:
        assert slide.properties["tiffslide.mpp-x"] > 200  # 96 dpi
    for other in (HITACHI.format("other.tif"), HITACHI.format("slide.tif")[2:], "", "\0" * 99):
        text.write_bytes(other.encode(encoding))
        assert read(path)[0] is None
    text.unlink()
    os.mkfifo(text)
    assert read(path)[0] is None


def test_aperio_description_of_a_file_without_tiles(tmp_path):
    text = "Aperio Image Library v10\r\n80x64|AppMag = 20|MPP = 0.4990"
    path = write(tmp_path, SCREEN, text)
    assert read(path) == ((0.499, 0.499), ())
    with open_slide(path, "cpu") as slide:
        assert (slide.vendor, slide.objective) == ("generic-tiff", 20)
    assert read(write(tmp_path, SCREEN, "Aperio|MPP = x|AppMag = -1"))[0] is None


def test_contradictory_resolution_is_reported(tmp_path):
    centimetres = {282: (RATIONAL, 20000), 283: (RATIONAL, 20000), 296: (SHORT, 3)}
    mpp, [problem] = read(write(tmp_path, {**centimetres, 34682: (UNDEFINED, FEI)}))
    assert mpp == (0.0077, 0.0088)
    assert "0.0077 µm according to the tags of FEI, which is used, but 0.5 µm" in problem


@pytest.mark.parametrize(
    "text",
    [b"", b"[Scan]\r\n", b"[Scan]\r\nPixelWidth=x\r\n", b"\xff\xfe", b"[Scan]\r\nPixelWidth=-1"],
)
@pytest.mark.parametrize("code", [34680, 34118, 37706, 33560, 51123, 34683])
@pytest.mark.parametrize("kind", [UNDEFINED, ASCII, SHORT])
def test_senseless_tags(tmp_path, text, code, kind):
    value = 7 if kind == SHORT else text or b"\0"
    assert read(write(tmp_path, {code: (kind, value)}))[0] is None


@pytest.mark.parametrize(
    ("unit", "dots", "said"),
    [
        (2, 72, "72 dpi"),
        (2, 96, "96 dpi"),
        (3, 72 / 2.54, "72 dpi"),
        (2, 1, "1 pixel per inch"),
        (3, 1, "1 pixel per centimeter"),
        (None, 72, "72 dpi"),
    ],
)
def test_screen_resolutions_are_ignored(tmp_path, unit, dots, said):
    more = {282: (RATIONAL, dots), 283: (RATIONAL, dots)} | ({296: (SHORT, unit)} if unit else {})
    mpp, [problem] = read(write(tmp_path, more))
    assert mpp is None
    assert problem.startswith("The pixel size is unknown: the file states")
    assert said in problem


def test_resolution_of_1_without_a_unit_is_ignored(tmp_path):
    more = {282: (RATIONAL, 1), 283: (RATIONAL, 1), 296: (SHORT, 1)}
    assert read(write(tmp_path, more)) == (None, ())


@pytest.mark.parametrize(
    ("unit", "dots", "size"), [(4, 2000, 0.5), (5, 4, 0.25), (2, 101600, 0.25), (2, 300, 84.6667)]
)
def test_units_of_the_resolution(tmp_path, unit, dots, size):
    more = {282: (RATIONAL, dots), 283: (RATIONAL, dots * 2), 296: (SHORT, unit)}
    mpp, problems = read(write(tmp_path, more))
    assert mpp == pytest.approx((size, size / 2), rel=1e-5)
    assert problems == ()


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("\\u00B5m", 1),
        ("\\u03BCm", 1),
        ("\\u03bcm", 1),
        ("um", 1),
        ("micron", 1),
        ("microns", 1),
        ("Microns", 1),
        ("micrometer", 1),
        ("nm", 0.001),
        ("mm", 1000),
        ("cm", 10000),
        ("pixel", None),
        ("", None),
    ],
)
def test_units_of_imagej(tmp_path, unit, factor):
    more = {282: (RATIONAL, 2), 283: (RATIONAL, 4), 296: (SHORT, 1)}
    mpp, _ = read(write(tmp_path, more, f"ImageJ=1.54p\nunit={unit}\n"))
    assert mpp == (None if factor is None else pytest.approx((factor / 2, factor / 4)))


def test_each_axis_of_imagej_may_have_a_unit(tmp_path):
    said = "ImageJ=1.54p\nimages=3\nslices=3\nunit=micron\nyunit=nm\nzunit=mm\nspacing=0.5\n"
    more = {282: (RATIONAL, 2), 283: (RATIONAL, 2), 296: (SHORT, 1)}
    page = tiffbytes.page(PIXELS, bytes, photometric=1, tile=None, description=said, more=more)
    path = tiffbytes.write(tmp_path / "slide.tif", [page] * 3)
    with open_slide(path, "cpu") as slide:
        assert slide.mpp == pytest.approx((0.5, 0.0005))
        assert slide.planes.size_z == 3
        assert slide.planes.z_spacing == pytest.approx(500)


@pytest.mark.parametrize(
    ("stated", "more", "mpp", "said"),
    [
        ({}, {282: (RATIONAL, 20000), 283: (RATIONAL, 10000), 296: (SHORT, 3)}, (0.5, 1), ""),
        ({}, SCREEN, None, "96 dpi"),
        ({"PhysicalSizeX": 0.25, "PhysicalSizeY": 0.25}, SCREEN, (0.25, 0.25), ""),
        (
            {"PhysicalSizeX": 0.25, "PhysicalSizeY": 0.25},
            {282: (RATIONAL, 20000), 283: (RATIONAL, 20000), 296: (SHORT, 3)},
            (0.25, 0.25),
            "0.25 µm according to the OME-XML, which is used, but 0.5 µm",
        ),
        ({}, {34682: (UNDEFINED, FEI)}, (0.0077, 0.0088), ""),
    ],
)
def test_ome_tiff(tmp_path, stated, more, mpp, said):
    sizes = " ".join(f'{name}="{value}"' for name, value in stated.items())
    text = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        '<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="80" SizeY="64" '
        f'SizeC="1" SizeZ="1" SizeT="1" {sizes}><Channel ID="Channel:0:0" SamplesPerPixel="1"/>'
        "<TiffData/></Pixels></Image></OME>"
    )
    found, problems = read(write(tmp_path, more, text))
    assert found == (None if mpp is None else pytest.approx(mpp))
    assert [said in problem for problem in problems] == ([True] if said else [])
