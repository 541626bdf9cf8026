import json

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import CorruptSlideError
from tests.writers import slides

NAMES = ["DAPI", "Opal 520", "Opal 690", "Sample AF"]
COLORS = ["0,0,255", "0,255,0", "255,0,0", "0,0,0"]


def describe(kind, index=0, *, name="", color="", more=""):
    channel = f"<Name>{name}</Name><Color>{color}</Color>" if name else ""
    return (
        '<?xml version="1.0" encoding="utf-16"?>\n<PerkinElmer-QPI-ImageDescription>'
        "<DescriptionVersion>2</DescriptionVersion><AcquisitionSoftware>VectraScan"
        f"</AcquisitionSoftware><ImageType>{kind}</ImageType><SlideID>S-1</SlideID>"
        f"<Barcode>B 17</Barcode><InstrumentType>Vectra Polaris</InstrumentType>{channel}"
        f"<ExposureTime>{100 + index}</ExposureTime><Objective>20x</Objective>"
        f"<Camera><Gain>1</Gain><Band>a</Band><Band>b</Band></Camera>{more}"
        "</PerkinElmer-QPI-ImageDescription>"
    )


def write(path, *, count=4, dtype="uint8", rgb=False, xml=describe, dropped=(), steps=(1, 2, 4)):
    """Write as Akoya's software does; return the levels, (Y, X, C)."""
    pixels = slides.picture(384, 512, 3 if rgb else count, dtype)
    levels = [pixels[::step, ::step] for step in steps]
    options = {"metadata": None, "software": "PerkinElmer-QPI", "compression": "zlib"}
    options |= {"resolution": (20000, 25000), "resolutionunit": "CENTIMETER"}
    tiled = options | {"tile": (128, 128), "photometric": "rgb" if rgb else "minisblack"}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for number, level in enumerate(levels):
            kind = "ReducedResolution" if number else "FullResolution"
            for index in range(1 if rgb else count):
                plane = level if rgb else level[..., index]
                text = xml(kind, index, name="" if rgb else NAMES[index], color=COLORS[index])
                if (number, index) not in dropped:
                    plane = np.ascontiguousarray(plane)
                    file.write(plane, description=text, subfiletype=int(number > 0), **tiled)
            if number == 0:
                file.write(
                    slides.picture(48, 64),
                    description=xml("Thumbnail"),
                    photometric="rgb",
                    **options,
                )
        for kind, width in (("Overview", 70), ("Label", 30)):
            picture = slides.picture(40, width)
            file.write(picture, description=xml(kind), photometric="rgb", **options)
    return levels


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_channels(tmp_path, dtype):
    path = tmp_path / "slide.qptiff"
    levels = write(path, dtype=dtype)
    with open_slide(path) as slide, tifffile.TiffFile(path) as file:
        series = file.series[0]
        assert series.kind == "qpi"
        assert slide.vendor == "perkinelmer"
        assert slide.level_count == len(series.levels) == len(levels)
        for level, expected in zip(slide.levels, series.levels, strict=True):
            np.testing.assert_array_equal(level[...], np.moveaxis(expected.asarray(), 0, -1))
        assert [channel.name for channel in slide.channels] == NAMES
        assert [channel.color for channel in slide.channels] == [
            "#0000ff", "#00ff00", "#ff0000", None,
        ]  # fmt: skip
        assert slide.mpp == (0.5, 0.4)
        assert slide.objective == 20
        assert not slide.layout.problems


@pytest.mark.parametrize("name", ["thumbnail", "macro", "label"])
def test_associated_images(tmp_path, name):
    path = tmp_path / "slide.qptiff"
    write(path)
    sizes = {"thumbnail": (48, 64), "macro": (40, 70), "label": (40, 30)}
    with open_slide(path) as slide:
        assert set(slide.associated_images) == set(sizes)
        expected = slides.picture(*sizes[name])
        np.testing.assert_array_equal(slide.associated_images[name].read(), expected)


def test_metadata(tmp_path):
    path = tmp_path / "slide.qptiff"
    write(path)
    with open_slide(path) as slide:
        metadata = json.loads(json.dumps(slide.metadata))
        assert metadata["scanner"] == "Vectra Polaris"
        assert metadata["barcode"] == "B 17"
        fields = metadata["perkinelmer"]
        assert fields["SlideID"] == "S-1"
        assert fields["Camera"] == {"Gain": "1", "Band": ["a", "b"]}
        assert [item["ExposureTime"] for item in fields["Channels"]] == ["100", "101", "102", "103"]
        assert [item["Name"] for item in fields["Channels"]] == NAMES
        assert metadata["tiff"]["ResolutionUnit"] == "centimeter"


def test_brightfield(tmp_path):
    path = tmp_path / "slide.qptiff"
    levels = write(path, rgb=True)
    with open_slide(path) as slide:
        assert slide.layout.rgb
        assert slide.layout.background == 255
        assert slide.metadata["perkinelmer"]["Objective"] == "20x"
        for level, expected in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(level[...], expected)


@pytest.mark.parametrize("text", ["", "<PerkinElmer-QPI-ImageDescription>", "no XML"])
def test_without_descriptions(tmp_path, text):
    """Channels, levels and the thumbnail are then told by their place."""
    path = tmp_path / "slide.qptiff"
    levels = write(path, xml=lambda *_, **__: text)
    with open_slide(path) as slide:
        assert slide.level_count == len(levels)
        assert [channel.name for channel in slide.channels] == [f"channel {i}" for i in range(4)]
        assert set(slide.associated_images) == {"thumbnail"}
        assert len(slide.layout.problems) == 1
        for level, expected in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(level[...], expected)


def test_a_level_that_lacks_a_channel(tmp_path):
    path = tmp_path / "slide.qptiff"
    levels = write(path, dropped=[(2, 3)])
    with open_slide(path) as slide:
        assert slide.level_count == len(levels) - 1
        (problem,) = slide.layout.problems
        assert "128 x 96" in problem


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ("<Objective>40X</Objective>", 40),
        ("<Objective>2.5x</Objective>", 2.5),
        ("<Objective>0x</Objective>", None),
        ("<Objective>unknown</Objective>", None),
        ("<Objective/>", None),
        ("", None),
    ],
)
def test_objectives(tmp_path, element, expected):
    path = tmp_path / "slide.qptiff"

    def xml(*arguments, **options):
        return describe(*arguments, **options).replace("<Objective>20x</Objective>", element)

    write(path, xml=xml, count=1, steps=(1,))
    with open_slide(path) as slide:
        assert slide.objective == expected


@pytest.mark.parametrize("color", ["", "red", "1,2", "256,0,0", "-1,2,3,4", "0,0,0", "9" * 5000])
def test_no_color(tmp_path, color):
    path = tmp_path / "slide.qptiff"

    def xml(*arguments, **options):
        return describe(*arguments, **options | {"color": color})

    write(path, xml=xml, count=1, steps=(1,))
    with open_slide(path) as slide:
        assert slide.channels[0].color is None


def test_levels_of_other_samples(tmp_path):
    path = tmp_path / "slide.qptiff"
    options = {"metadata": None, "software": "PerkinElmer-QPI", "tile": (64, 64)}
    with tifffile.TiffWriter(path) as file:
        for dtype, size in (("uint8", 256), ("uint16", 128)):
            file.write(slides.picture(size, size, 1, dtype)[..., 0], **options)
    with pytest.raises(CorruptSlideError, match="differ"):
        open_slide(path)


def test_channels_stored_in_different_ways(tmp_path):
    path = tmp_path / "slide.qptiff"
    options = {"metadata": None, "software": "PerkinElmer-QPI", "tile": (64, 64)}
    with tifffile.TiffWriter(path) as file:
        for compression in ("zlib", "lzw"):
            pixels = slides.picture(256, 256, 1)[..., 0]
            file.write(pixels, compression=compression, **options)
    with pytest.raises(CorruptSlideError, match="different ways"):
        open_slide(path)
