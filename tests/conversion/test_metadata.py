"""Metadata and associated images that a conversion keeps or leaves out."""

import json

import numpy as np
import pytest
import tifffile

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.layout import Channel
from tests.conftest import shared_slide
from tests.writers import slides

FIELDS = (
    "AppMag = 20", "MPP = 0.4990", "Date = 12/29/09", "Time = 09:59:15", "Barcode = S21-10045",
    "User = jdoe", "ScanScope ID = SS1302", "Focus Offset = 0.5", "Filename = S21-10045",
)  # fmt: skip
PRIVATE = ("S21-10045", "jdoe", "2009", "12/29/09")


@pytest.fixture
def source(tmp_path):
    slides.write_aperio(
        tmp_path / "s.svs", slides.picture(300, 300), (), tile=(64, 64), fields=FIELDS
    )
    return tmp_path / "s.svs"


def all_bytes(path):
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return b"".join(file.read_bytes() for file in files)


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
@pytest.mark.parametrize("private", [False, True])
def test_private_fields_need_private(tmp_path, source, name, private):
    convert(source, tmp_path / name, private=private, compression="raw")
    data = all_bytes(tmp_path / name)
    for text in PRIVATE[:2]:
        assert (text.encode() in data) == private
    if not private:
        assert not any(text.encode() in data for text in PRIVATE)


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
@pytest.mark.parametrize("private", [False, True])
def test_tiff_keeps_the_metadata(tmp_path, source, name, private):
    convert(source, tmp_path / name, private=private)
    with open_slide(source, "cpu") as slide, open_slide(tmp_path / name, "cpu") as found:
        assert found.mpp == pytest.approx(slide.mpp, rel=1e-12)
        assert found.objective == slide.objective
        assert found.metadata["scan_date"] == (slide.metadata["scan_date"] if private else None)
        expected = dict(slide.associated_images)
        if not private:
            assert set(expected) == {"thumbnail", "label", "macro"}
            del expected["label"], expected["macro"]
        assert set(found.associated_images) == set(expected)
        for key, image in expected.items():
            np.testing.assert_array_equal(found.associated_images[key].read(), image.read())
        assert found.layout.problems == ()
        if name == "out.tif":
            assert found.vendor == "wsigpu"
            assert found.metadata["wsigpu"] == {"vendor": "aperio"}
            assert found.metadata["aperio"]["Focus Offset"] == "0.5"
            assert ("User" in found.metadata["aperio"]) == private
            assert found.metadata["barcode"] == ("S21-10045" if private else None)


def test_zarr_keeps_the_metadata(tmp_path, source):
    zarr = pytest.importorskip("zarr")
    convert(source, tmp_path / "out.zarr", private=True)
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    record = group.attrs["wsigpu"]
    [image] = group.attrs["ome"]["multiscales"]
    assert [axis.get("unit") for axis in image["axes"]] == [None, "micrometer", "micrometer"]
    [first, *_] = image["datasets"]
    [transform] = first["coordinateTransformations"]
    with open_slide(source, "cpu") as slide:
        assert transform == {"type": "scale", "scale": [1.0, *slide.mpp[::-1]]}
        assert record["objective"] == slide.objective
        assert record["metadata"]["aperio"] == slide.metadata["aperio"]
        for key, item in slide.associated_images.items():
            pixels = np.moveaxis(group[f"associated/{key}/0"][...], 0, -1)
            np.testing.assert_array_equal(pixels, item.read())
    colors = [channel["color"] for channel in group.attrs["ome"]["omero"]["channels"]]
    assert colors == ["FF0000", "00FF00", "0000FF"]


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
def test_channels_keep_names_and_colors(tmp_path, name):
    pixels = np.moveaxis(slides.picture(150, 200, 2, "uint16"), -1, 0)
    colors = [0x00FF00FF, -0xFFFF01]  # green, and red, which is negative as a signed integer
    names = {"axes": "CYX", "Channel": {"Name": ["DAPI", "Cy5 µ"], "Color": colors}}
    source = tmp_path / "s.ome.tif"
    slides.write_pyramid(source, pixels, (), metadata=names, photometric="minisblack")
    convert(source, tmp_path / name)
    expected = (Channel("DAPI", "#00ff00"), Channel("Cy5 µ", "#ff0000"))
    if name == "out.zarr":
        zarr = pytest.importorskip("zarr")
        omero = zarr.open_group(tmp_path / name, mode="r").attrs["ome"]["omero"]
        found = tuple(
            Channel(item["label"], f"#{item['color'].lower()}") for item in omero["channels"]
        )
        for item, plane in zip(omero["channels"], pixels, strict=True):
            window = item["window"]
            assert (window["min"], window["max"]) == (0, 65535)
            assert plane.min() <= window["start"] < window["end"] <= plane.max()
    else:
        with open_slide(tmp_path / name, "cpu") as slide:
            found = slide.channels
    assert found == expected


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
def test_tiff_keeps_the_icc_profile(tmp_path, name):
    profile = bytes(range(256)) * 2
    source = tmp_path / "s.tif"
    tifffile.imwrite(
        source, slides.picture(100, 100), tile=(64, 64), photometric="rgb", iccprofile=profile
    )
    convert(source, tmp_path / name)
    with open_slide(tmp_path / name, "cpu") as slide:
        assert slide.icc_profile == profile


def test_zarr_keeps_the_icc_profile(tmp_path):
    zarr = pytest.importorskip("zarr")
    profile = bytes(range(256)) * 2
    source = tmp_path / "s.tif"
    tifffile.imwrite(
        source, slides.picture(100, 100), tile=(64, 64), photometric="rgb", iccprofile=profile
    )
    convert(source, tmp_path / "out.zarr")
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    assert bytes(group["icc_profile"][...]) == profile


def test_second_conversion_keeps_the_record(tmp_path, source):
    convert(source, tmp_path / "one.tif")
    convert(tmp_path / "one.tif", tmp_path / "two.tif")
    with open_slide(tmp_path / "one.tif", "cpu") as one, open_slide(tmp_path / "two.tif") as two:
        assert two.metadata["wsigpu"] == {"vendor": "aperio"}
        assert two.metadata["aperio"] == one.metadata["aperio"]
        assert two.mpp == one.mpp


def test_real_slide_keeps_openslide_properties(tmp_path):
    source = shared_slide("CMU-1-Small-Region.svs")
    convert(source, tmp_path / "out.tif", private=True)
    with open_slide(source, "cpu") as slide, open_slide(tmp_path / "out.tif", "cpu") as found:
        assert found.metadata["aperio"] == slide.metadata["aperio"]
        for key in ("scanner", "objective", "scan_date", "barcode"):
            assert found.metadata[key] == slide.metadata[key]


def test_the_description_is_json(tmp_path, source):
    convert(source, tmp_path / "out.tif", region=(0, 0, 100, 100))
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        record = json.loads(file.pages[0].description)
    assert record["wsigpu"] == 1
    assert record["mpp"] == [0.499, 0.499]


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
@pytest.mark.parametrize("private", [False, True])
def test_region_is_recorded(tmp_path, source, name, private):
    convert(source, tmp_path / name, region=(64, 128, 150, 100), private=private)
    with open_slide(source, "cpu") as slide, open_slide(tmp_path / name, "cpu") as found:
        assert found.metadata["wsigpu"] == {"vendor": "aperio", "region": [64, 128, 150, 100]}
        assert found.mpp == pytest.approx(slide.mpp, rel=1e-12)
        np.testing.assert_array_equal(
            found.read_region((0, 0), (150, 100)), slide.read_region((64, 128), (150, 100))
        )
        # Label and macro show the glass slide and are kept; a thumbnail would show the whole scan.
        assert set(found.associated_images) == ({"label", "macro"} if private else set())


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
def test_region_of_the_whole_slide_keeps_the_thumbnail(tmp_path, source, name):
    convert(source, tmp_path / name, region=(0, 0, 300, 300))
    with open_slide(tmp_path / name, "cpu") as found:
        assert set(found.associated_images) == {"thumbnail"}
        assert "region" not in found.metadata["wsigpu"]


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
def test_nested_region_refers_to_the_original_slide(tmp_path, name):
    source = tmp_path / "s.svs"
    slides.write_aperio(source, slides.picture(300, 400), (2,), tile=(64, 64))
    convert(source, tmp_path / f"one.{name}", region=(64, 32, 200, 160), level=1)
    convert(tmp_path / f"one.{name}", tmp_path / f"two.{name}", region=(10, 20, 30, 40))
    convert(tmp_path / f"two.{name}", tmp_path / f"three.{name}")
    with open_slide(source, "cpu") as slide:
        mpp = slide.mpp[0]
    for file, region, size in (
        ("one", [64, 32, 200, 160], (100, 80)),
        ("two", [84, 72, 60, 80], (30, 40)),
        ("three", [84, 72, 60, 80], (30, 40)),
    ):
        with open_slide(tmp_path / f"{file}.{name}", "cpu") as found:
            assert found.metadata["wsigpu"]["region"] == region
            assert found.dimensions == size
            assert found.mpp == pytest.approx((2 * mpp, 2 * mpp), rel=1e-12)


@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_label_images_are_reported_as_left_out(tmp_path, name):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    source = tmp_path / "s.zarr"
    zarrs.write_image(source, [slides.picture(64, 48).transpose(2, 0, 1)], "cyx")
    assert convert(source, tmp_path / f"none.{name}").notes == ()
    zarrs.write_label(source, "cells", [np.ones((64, 48), np.uint8)])
    done = convert(source, tmp_path / name)
    assert done.notes == ("Label images are not converted (1).",)
    done = convert(source, tmp_path / name, private=True, overwrite=True)
    assert done.notes == ("Label images are not converted ('cells').",)


@pytest.mark.parametrize("name", ["out.tif", "out.png"])
def test_left_out_planes_and_problems_are_reported(tmp_path, name):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    source = tmp_path / "s.zarr"
    planes = zarrs.halved(np.zeros((3, 5, 1, 80, 96), np.uint8), "tzcyx", 1)
    zarrs.write_image(source, planes, "tzcyx")
    (source / "1" / "zarr.json").write_text("{")
    done = convert(source, tmp_path / name)
    planes, problem = done.notes
    assert planes == "1 of 15 planes is converted: t = 0, z = 2."
    assert problem.startswith("A level is left out. ")
