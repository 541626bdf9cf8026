"""Planes along z and t: sizes, choice and pixels, compared with tifffile and zarr."""

import pickle

import numpy as np
import pytest
import tifffile
import zarr

from napari_wsigpu import open_slide
from napari_wsigpu.errors import CorruptSlideError, PlaneError, SlideChangedError, SlideClosedError
from napari_wsigpu.formats.describe import describe
from tests.stacks import SIZES, of_plane, save, stack, write_ome, write_stack


@pytest.fixture(params=["TZCYX", "ZTCYX", "TCZYX", "zarr"])
def saved(request, tmp_path):
    pixels = stack()
    return save(tmp_path, request.param, pixels), pixels


def test_sizes_and_steps(saved):
    path, _ = saved
    with open_slide(path) as slide:
        assert slide.planes.sizes == SIZES
        assert slide.planes.names == ("t", "z")
        assert (slide.planes.z, slide.planes.t) == (2, 0)
        assert slide.planes.z_spacing == pytest.approx(1.5)
        assert slide.planes.time_step == pytest.approx(0.25)
        assert slide.mpp == pytest.approx((0.5, 0.5))
        assert slide.layout.hidden_planes == 9


def test_each_plane_of_each_level(saved):
    path, pixels = saved
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], of_plane(pixels, 2, 0))
        for z in range(SIZES["z"]):
            for t in range(SIZES["t"]):
                expected = of_plane(pixels, z, t)
                plane = slide.plane(z, t)
                assert plane is slide.plane(z=z, t=t)
                assert (plane.planes.z, plane.planes.t) == (z, t)
                np.testing.assert_array_equal(plane.levels[0][...], expected)
                np.testing.assert_array_equal(plane.levels[1][...], expected[::2, ::2])
        assert slide.plane(z=2) is slide.plane() is slide


def test_regions_and_tiles_of_a_plane(saved):
    path, pixels = saved
    with open_slide(path) as slide:
        expected = of_plane(pixels, 4, 1)
        region = slide.read_region((20, 10), (70, 50), z=4, t=1)
        np.testing.assert_array_equal(region, expected[10:60, 20:90])
        corners = [(0, 0), (90, 40), (3, 5)]
        regions = slide.read_regions(corners, (40, 30), z=4, t=1)
        for (x, y), found in zip(corners, regions, strict=True):
            np.testing.assert_array_equal(found, expected[y : y + 30, x : x + 40])
        for batch, locations in slide.tiles(32, z=4, t=1):
            for (x, y), found in zip(locations, batch, strict=True):
                np.testing.assert_array_equal(found, expected[y : y + 32, x : x + 32])
        # Only t is chosen: z stays the one that is shown.
        region = slide.read_region((0, 0), (8, 8), t=1)
        np.testing.assert_array_equal(region, of_plane(pixels, 2, 1)[:8, :8])


@pytest.mark.parametrize("wrong", [{"z": 5}, {"z": -1}, {"t": 2}, {"z": 1.5}, {"t": "1"}])
def test_planes_that_are_not_there(saved, wrong):
    [(axis, number)] = wrong.items()
    with open_slide(saved[0]) as slide:
        last = SIZES[axis] - 1
        sentence = f"has no plane {axis} = {number!r}; its planes along {axis} are 0 to {last}"
        with pytest.raises(PlaneError, match=sentence):
            slide.read_region((0, 0), (8, 8), **wrong)


def test_a_plane_is_closed_and_released_with_its_slide(saved):
    path, pixels = saved
    slide = open_slide(path)
    plane = slide.plane(z=0)
    slide.release()
    np.testing.assert_array_equal(plane.levels[0][...], of_plane(pixels, 0, 0))
    slide.close()
    for read in (lambda: plane.levels[0][:8, :8], lambda: slide.plane(z=1)):
        with pytest.raises(SlideClosedError):
            read()


def test_a_pickled_plane_stays_one(saved):
    path, pixels = saved
    with open_slide(path) as slide, pickle.loads(pickle.dumps(slide.plane(z=1, t=1))) as again:
        np.testing.assert_array_equal(again.levels[0][...], of_plane(pixels, 1, 1))


def test_a_file_that_was_replaced(tmp_path):
    path = save(tmp_path, "TZCYX", stack())
    with open_slide(path) as slide:
        path.unlink()
        write_ome(path, stack(1))
        with pytest.raises(SlideChangedError, match="has changed since it was opened"):
            slide.plane(z=0)


def test_label_images_follow(tmp_path):
    path, objects = save(tmp_path, "zarr", stack()), stack(2)[:, :, :1]
    labels = zarr.open_group(path).create_group("labels")
    labels.attrs["labels"] = ["nuclei"]
    write_stack(path / "labels" / "nuclei", [np.moveaxis(objects, 2, 1)])
    with open_slide(path) as slide:
        for z, t in ((2, 0), (0, 1), (4, 0)):
            found = slide.plane(z, t).labels["nuclei"].levels[0][...]
            np.testing.assert_array_equal(found, of_plane(objects, z, t))


def test_the_first_plane_is_shown_where_the_middle_one_is_missing(tmp_path):
    path, pixels = tmp_path / "a.ome.tif", stack()[0, :3, 0]
    tifffile.imwrite(path, pixels, metadata={"axes": "ZYX"}, tile=(32, 32), ome=True)
    content = path.read_bytes()
    assert content.count(b'SizeZ="3"') == 1
    path.write_bytes(content.replace(b'SizeZ="3"', b'SizeZ="9"'))
    with open_slide(path) as slide:
        assert (slide.planes.z, slide.planes.size_z) == (0, 9)
        np.testing.assert_array_equal(slide.levels[0][..., 0], pixels[0])
        np.testing.assert_array_equal(slide.plane(2).levels[0][..., 0], pixels[2])
        with pytest.raises(CorruptSlideError, match="is missing"):
            slide.plane(5)


def test_a_slide_without_planes(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, stack()[0, 0, 0], tile=(32, 32))
    with open_slide(path) as slide:
        assert (slide.planes.names, slide.planes.sizes) == ((), {})
        assert slide.plane(0, 0) is slide
        with pytest.raises(PlaneError, match="its planes along z are 0 to 0"):
            slide.plane(z=1)


def test_the_plane_that_zarrs_rendering_names_is_shown(tmp_path):
    path = save(tmp_path, "zarr", stack())
    zarr.open_group(path).attrs["omero"] = {"rdefs": {"defaultZ": 4, "defaultT": 1}}
    layout = describe(path)
    assert (layout.planes.z, layout.planes.t) == (4, 1)
