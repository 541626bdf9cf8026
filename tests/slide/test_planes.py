"""Planes along z and t: sizes, selection and pixels, compared with tifffile and zarr."""

import pickle
import re

import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import convert, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    ConversionError,
    CorruptSlideError,
    PlaneError,
    SlideChangedError,
    SlideClosedError,
)
from tests.writers import ndpi, slides, tiffbytes
from tests.writers.stacks import SIZES, of_plane, save, stack, write_ome, write_stack


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
        assert slide.layout.other_planes == 9


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
        # Only t is selected: z stays the default plane.
        region = slide.read_region((0, 0), (8, 8), t=1)
        np.testing.assert_array_equal(region, of_plane(pixels, 2, 1)[:8, :8])


@pytest.mark.parametrize("wrong", [{"z": 5}, {"z": -1}, {"t": 2}, {"z": 1.5}, {"t": "1"}])
def test_missing_planes(saved, wrong):
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


def in_order(array, axes, wanted):
    """Transpose and add axes so that they match `wanted`."""
    missing = [axis for axis in wanted if axis not in axes]
    array = array.reshape((1,) * len(missing) + array.shape)
    return array.transpose([[*missing, *axes].index(axis) for axis in wanted])


SMALL = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in "tzc"})


@settings(max_examples=40, deadline=None)
@given(st.permutations("TZC"), SMALL, st.booleans(), st.randoms())
def test_ome_tiff_of_any_order(tmp_path_factory, order, sizes, rgb, random):
    """Pages are in the file's order, or in the order that the XML states per plane."""
    path = tmp_path_factory.mktemp("ome") / "a.ome.tif"
    if rgb:
        order, sizes = [axis for axis in order if axis != "C"], sizes | {"c": 1}
    shape = [sizes[axis.lower()] for axis in order] + [20, 30] + [3] * rgb
    pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    metadata = {"axes": "".join(order) + "YX" + "S" * rgb, "PhysicalSizeZ": 0.5}
    photometric = "rgb" if rgb else "minisblack"
    tifffile.imwrite(path, pixels, ome=True, metadata=metadata, photometric=photometric)
    places = list(range(pixels.size // (600 * (3 if rgb else 1))))
    random.shuffle(places)
    scatter(path, places)
    with tifffile.TiffFile(path) as file, open_slide(path, "cpu") as slide:
        [series] = file.series
        axes = series.axes.lower().replace("s", "c") if rgb else series.axes.lower()
        expected = in_order(series.asarray(), axes, "tzyxc")
        assert slide.layout.problems == ()
        assert (slide.planes.size_t, slide.planes.size_z) == expected.shape[:2]
        assert slide.planes.z_spacing == 0.5
        for t, z in np.ndindex(expected.shape[:2]):
            np.testing.assert_array_equal(slide.plane(z, t).levels[0][...], expected[t, z])


def scatter(path, places):
    """Add the page of each plane to the XML."""
    with tifffile.TiffFile(path, mode="r+") as file:
        tag = file.pages.first.tags[270]
        pixels = re.search(r'DimensionOrder="XY(\w)(\w)(\w)"', tag.value)
        sizes = [int(re.search(f'Size{a}="(\\d+)"', tag.value)[1]) for a in pixels.groups()]
        if '<Channel ID="Channel:0:0" SamplesPerPixel="3"' in tag.value:
            sizes = [
                1 if axis == "C" else size
                for axis, size in zip(pixels.groups(), sizes, strict=True)
            ]
        entries = ""
        for number, place in enumerate(places):
            at = np.unravel_index(number, sizes, order="F")
            first = " ".join(f'First{a}="{i}"' for a, i in zip(pixels.groups(), at, strict=True))
            entries += f'<TiffData IFD="{place}" {first} PlaneCount="1"/>'
        value = re.sub(r"<TiffData.*?(/>|</TiffData>)", entries, tag.value)
        tag.overwrite(value)


@settings(max_examples=40, deadline=None)
@given(st.permutations("tczyx"), SMALL, st.sampled_from(["0.1", "0.2", "0.3", "0.4", "0.5"]))
def test_ome_zarr_of_any_order(tmp_path_factory, order, sizes, version):
    """The oldest versions cannot name axes and have a fixed order."""
    path = tmp_path_factory.mktemp("zarr") / "a.zarr"
    axes = "tczyx" if version in ("0.1", "0.2") else "".join(order)
    axes = "".join(axis for axis in axes if version < "0.3" or axis in "yx" or sizes[axis] > 1)
    sizes = sizes | {"y": 20, "x": 30}
    shape = [sizes[axis] for axis in axes]
    pixels = np.random.default_rng(0).integers(0, 60_000, shape, np.uint16)
    group = zarr.create_group(path, zarr_format=3 if version == "0.5" else 2)
    chunks = [
        min(size, 2 if axis in "tczyx"[:3] else 16) for axis, size in zip(axes, shape, strict=True)
    ]
    levels = [pixels, pixels[tuple(slice(None, None, 1 + (a in "yx")) for a in axes)]]
    for number, level in enumerate(levels):
        array = group.create_array(str(number), shape=level.shape, dtype="u2", chunks=tuple(chunks))
        array[...] = level
    image = {"version": version, "datasets": [{"path": "0"}, {"path": "1"}]}
    if version == "0.3":
        image["axes"] = list(axes)
    elif version >= "0.4":
        kinds = {"t": "time", "c": "channel"}
        image["axes"] = [{"name": axis, "type": kinds.get(axis, "space")} for axis in axes]
    said = {"multiscales": [image]}
    group.attrs.update({"ome": said} if version == "0.5" else said)
    with open_slide(path, "cpu") as slide:
        assert slide.layout.problems == ()
        assert (slide.planes.size_z, slide.planes.size_t) == (sizes["z"], sizes["t"])
        for number, level in enumerate(levels):
            expected = in_order(level, axes, "tzyxc")
            for t, z in np.ndindex(expected.shape[:2]):
                found = slide.plane(z, t).levels[number][...]
                np.testing.assert_array_equal(found, expected[t, z])


def write_focal_planes(path, *photometrics):
    """Write NDPI files with one focal plane each; gray ones (0 and 1) have a single channel."""
    levels = []
    for number, photometric in enumerate(photometrics):
        pixels = slides.picture(64, 96, 1 if photometric < 2 else 3).squeeze()
        tags = {262: (tiffbytes.SHORT, photometric)}
        if photometric < 2:
            tags |= {258: (tiffbytes.SHORT, 8), 277: (tiffbytes.SHORT, 1)}
        levels.append(ndpi.level(pixels, plane=1000 * number, tags=tags))
    ndpi.write(path, levels)


@pytest.mark.parametrize("photometrics", [(6, 9), (9, 6), (6, 1)])
def test_plane_with_other_samples_is_refused(tmp_path, photometrics):
    """Converting both planes used to raise a ValueError."""
    path = tmp_path / "a.ndpi"
    write_focal_planes(path, *photometrics)
    with open_slide(path, "cpu") as slide:
        assert slide.planes.size_z == 2
        slide.levels[0][...]
        for read in (
            lambda: slide.plane(1),
            lambda: slide.read_region((0, 0), (9, 9), z=1),
            lambda: slide.to_dask().compute(scheduler="synchronous"),
            lambda: convert(slide, tmp_path / "out.ome.tif"),
            lambda: convert(slide, tmp_path / "out.zarr"),
        ):
            with pytest.raises(CorruptSlideError, match=r"plane at z = 1, t = 0 .* different"):
                read()
        convert(slide, tmp_path / "out.tif")


def test_too_many_planes_are_not_converted(tmp_path):
    """One of the planes stores white as 0."""
    path = tmp_path / "a.ndpi"
    write_focal_planes(path, 1, 0)
    with pytest.raises(ConversionError, match="differ in size, tiles or samples"):
        convert(path, tmp_path / "out.ome.tif")
    convert(path, tmp_path / "out.ome.tif", z=1)
