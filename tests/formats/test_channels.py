"""Channels: how many, and what the file calls them."""

import json

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from tests.writers import czis, dicomslides, slides, tiffbytes, zarrs
from tests.writers.tiffbytes import ASCII

GRAY = {"photometric": "minisblack"}


def stack(count, height=40, width=50, dtype="uint16"):
    return np.random.default_rng(count).integers(0, 250, (count, height, width), dtype)


@pytest.mark.parametrize("count", [65, 72, 130, 512])
@pytest.mark.parametrize("kind", ["ome", "separate", "contig"])
def test_any_number_in_tiff(tmp_path, count, kind):
    path, pixels = tmp_path / ("a.ome.tif" if kind == "ome" else "a.tif"), stack(count)
    if kind == "ome":
        names = [f"m{index}" for index in range(count)]
        tifffile.imwrite(
            path,
            pixels,
            tile=(16, 16),
            metadata={"axes": "CYX", "Channel": {"Name": names}},
            **GRAY,
        )
    else:
        found = pixels if kind == "separate" else pixels.transpose(1, 2, 0)
        tifffile.imwrite(path, found, metadata=None, planarconfig=kind, **GRAY)
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels.transpose(1, 2, 0))
        assert len(slide.channels) == count
        if kind == "ome":
            assert [channel.name for channel in slide.channels] == names


@pytest.mark.parametrize("count", [65, 512])
def test_any_number_in_other_formats(tmp_path, count):
    pixels = stack(count, 20, 30)
    zarrs.write_image(tmp_path / "a.zarr", [pixels], chunks=(1, 20, 30))
    czis.write(tmp_path / "a.czi", [czis.Block(plane, c=c) for c, plane in enumerate(pixels)])
    for name in ("a.zarr", "a.czi"):
        with open_slide(tmp_path / name, "cpu") as slide:
            np.testing.assert_array_equal(slide.levels[0][...], pixels.transpose(1, 2, 0))


QPI = "PerkinElmer-QPI-ImageDescription"


def test_biomarkers_of_qptiff(tmp_path):
    texts = [
        "<Name>DAPI</Name>",
        "<Name>Opal 520</Name><Biomarker>CD3</Biomarker>",
        "<Name>Opal 570</Name><Biomarker></Biomarker>",
    ]
    pages = [
        tiffbytes.page(
            *(slides.picture(64, 96, 1), bytes),
            **{"photometric": 1, "tile": (32, 48)},
            description=f"<{QPI}><ImageType>FullResolution</ImageType>{text}</{QPI}>",
        )
        for text in texts
    ]
    with open_slide(tiffbytes.write(tmp_path / "a.qptiff", pages), "cpu") as slide:
        assert [channel.name for channel in slide.channels] == ["DAPI", "CD3", "Opal 570"]


def ramp(*color):
    return np.array([np.linspace(0, shade, 256).astype(np.uint8) for shade in color])


@pytest.mark.parametrize("z", [0, 2])
def test_imagej_channels(tmp_path, z):
    path = tmp_path / "a.tif"
    labels = [
        f"c:{c + 1}/2 z:{z + 1}/3 - {name}" for z in range(3) for c, name in enumerate(("A", "B"))
    ]
    tifffile.imwrite(
        *(path, np.zeros((3, 2, 40, 50), "uint16")),
        imagej=True,
        metadata={
            "axes": "ZCYX",
            "Labels": labels,
            "LUTs": [ramp(255, 0, 0), ramp(0, 255, 128)],
            "Ranges": (10.0, 200.0, 0.0, 4000.0),
        },
    )
    with open_slide(path, "cpu") as slide:
        found = slide.plane(z=z).channels
        assert [channel.name for channel in found] == ["A", "B"]
        assert [channel.color for channel in found] == ["#ff0000", "#00ff80"]
        assert [channel.window for channel in found] == [(10, 200), (0, 4000)]


def test_labels_of_files_are_no_names_of_channels(tmp_path):
    path = tmp_path / "a.tif"
    metadata = {"axes": "CYX", "Labels": ["scan.tif", "scan.tif"], "LUTs": [ramp(9, 9, 9)] * 2}
    tifffile.imwrite(path, np.zeros((2, 40, 50), "uint16"), imagej=True, metadata=metadata)
    with open_slide(path, "cpu") as slide:
        assert [channel.name for channel in slide.channels] == ["channel 0", "channel 1"]
        assert [channel.color for channel in slide.channels] == [None, None]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["80ArAr", "131Xe", "191Ir"], ["80ArAr", "131Xe", "191Ir"]),
        (["one", "one", "one"], ["channel 0", "channel 1", "channel 2"]),
        (["one", "", "two"], ["channel 0", "channel 1", "channel 2"]),
    ],
)
def test_names_of_pages(tmp_path, names, expected):
    pages = [
        tiffbytes.page(
            *(slides.picture(40, 50, 1, "uint16"), bytes),
            **{"photometric": 1, "tile": None},
            more={285: (ASCII, name)} if name else {},
        )
        for name in names
    ]
    with open_slide(tiffbytes.write(tmp_path / "a.tif", pages), "cpu") as slide:
        assert [channel.name for channel in slide.channels] == expected


def write_images(path, images):
    """Write an OME-TIFF of several images by their names."""
    with tifffile.TiffWriter(path, ome=True) as file:
        for name, pixels, options in images:
            file.write(pixels, metadata={"Name": name, **options}, photometric="minisblack")


SMALL, MAIN = np.zeros((50, 60), np.uint8), np.zeros((100, 110), np.uint8)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Label", "label"),
        ("slide label", "label"),
        ("slide_label.tif", "label"),
        ("Macro image", "macro"),
        ("OVERVIEW", "macro"),
        ("thumbnail (1)", "thumbnail"),
        ("Macrophages ROI", None),
        ("Immunolabelled control", None),
        ("labels", None),
        ("thumbnails of cells", None),
    ],
)
def test_associated_images_are_named_by_whole_words(tmp_path, name, found):
    path = tmp_path / "a.ome.tif"
    write_images(path, [("main", MAIN, {}), (name, SMALL, {})])
    with open_slide(path, "cpu") as slide:
        assert list(slide.associated_images) == ([found] if found else [])
        said = any("1 more image(s)" in problem for problem in slide.layout.problems)
        assert said == (found is None)


@pytest.mark.parametrize(
    ("pixels", "options"),
    [
        (SMALL.astype("uint16"), {}),
        (np.stack([SMALL] * 5), {"axes": "CYX"}),
        (np.stack([SMALL] * 5), {"axes": "ZYX"}),
    ],
)
def test_only_ordinary_images_can_be_associated(tmp_path, pixels, options):
    path = tmp_path / "a.ome.tif"
    write_images(path, [("main", MAIN, {}), ("macro", pixels, options)])
    with open_slide(path, "cpu") as slide:
        assert list(slide.associated_images) == []
        assert any("1 more image(s)" in problem for problem in slide.layout.problems)


def test_large_image_that_cannot_be_associated_is_the_slide(tmp_path):
    path = tmp_path / "a.ome.tif"
    large = np.full((2, 300, 310), 7, "uint16")
    write_images(path, [("small", SMALL, {}), ("overview", large, {"axes": "CYX"})])
    with open_slide(path, "cpu") as slide:
        assert slide.dimensions == (310, 300)


@pytest.mark.parametrize(("stated", "held"), [(5, 3), (4, 1), (130, 72)])
def test_ome_xml_that_claims_more_channels(tmp_path, stated, held):
    path, pixels = tmp_path / "a.ome.tif", stack(held, 64, 80)
    names = [f"m{index}" for index in range(held)]
    tifffile.imwrite(path, pixels, metadata={"axes": "CYX", "Channel": {"Name": names}}, **GRAY)
    more = "".join(
        f'<Channel ID="Channel:0:{index}" SamplesPerPixel="1" Name="m{index}"/>'
        for index in range(held, stated)
    )
    with tifffile.TiffFile(path) as file:
        text = file.ome_metadata
    place = text.index("<TiffData")
    changed = (text[:place] + more + text[place:]).replace(f'SizeC="{held}"', f'SizeC="{stated}"')
    page = [
        tiffbytes.page(plane[..., None], bytes, photometric=1, tile=None, description=said)
        for plane, said in zip(pixels, [changed] + [""] * (held - 1), strict=True)
    ]
    with open_slide(tiffbytes.write(path, page), "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels.transpose(1, 2, 0))
        if held > 1:
            assert [channel.name for channel in slide.channels] == names
        said = f"{stated - held} of {stated} channels are missing from the file."
        assert said in slide.layout.problems


CONTRADICTION = "The shape in the description (JSON) contradicts the pages; the pages are used."


@pytest.mark.parametrize(
    ("count", "shape", "axes", "contradicts"),
    [
        (3, [3, 64, 80], "CYX", False),
        (3, [5, 64, 80], "CYX", True),
        (3, [2, 64, 80], "CYX", True),
        (3, [64, 80], "YX", True),
        (1, [3, 64, 80], "CYX", True),
        (3, [3, 80, 64], "CYX", True),
        (3, "three", "", True),
    ],
)
def test_pages_override_the_json_shape(tmp_path, count, shape, axes, contradicts):
    pixels = stack(count, 64, 80)
    said = json.dumps({"shape": shape, "axes": axes})
    pages = [
        tiffbytes.page(plane[..., None], bytes, photometric=1, tile=None, description=text)
        for plane, text in zip(pixels, [said] + [""] * (count - 1), strict=True)
    ]
    with open_slide(tiffbytes.write(tmp_path / "a.tif", pages), "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels.transpose(1, 2, 0))
        assert slide.layout.problems == ((CONTRADICTION,) if contradicts else ())


def test_many_optical_paths_of_dicom(tmp_path):
    pixels = slides.picture(64, 64, 1)
    paths = [dicomslides.item(OpticalPathIdentifier=str(index)) for index in range(70)]
    dataset = dicomslides.instance(pixels, "raw gray", OpticalPathSequence=paths)
    dataset.NumberOfFrames = dataset.NumberOfOpticalPaths = 70
    dataset.PixelData = dataset.PixelData * 70
    with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset), "cpu") as slide:
        assert slide.levels[0].shape == (64, 64, 70)
