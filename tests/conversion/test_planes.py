"""Conversions of stacks, with all or chosen planes, read with zarr and tifffile."""

import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import cli, convert, open_slide
from napari_wsigpu.model.errors import ConversionError, PlaneError
from tests.writers import czis, slides
from tests.writers.stacks import SIZES, of_plane, save, stack

TARGETS = ["out.zarr", "out.ome.tif"]


def read_back(path):
    """Return the levels as other libraries read them, each with axes (t, z, c, y, x)."""
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="r")
        axes = "".join(a["name"] for a in group.attrs["ome"]["multiscales"][0]["axes"])
        arrays = [group[key][...] for key in sorted(key for key in group if key.isdigit())]
    else:
        with tifffile.TiffFile(path) as file:
            [series] = file.series
            axes = series.axes.lower()
            arrays = [level.asarray() for level in series.levels]
    if "s" in axes:
        axes = axes.replace("s", "c")
    full = []
    for array in arrays:
        missing = [axis for axis in "tzcyx" if axis not in axes]
        array = array.reshape((1,) * len(missing) + array.shape)
        order = [("".join(missing) + axes).index(axis) for axis in "tzcyx"]
        full.append(array.transpose(order))
    return full


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["TZCYX", "ZCTYX", "zarr"])
def test_all_planes(tmp_path, kind, target):
    pixels = stack()
    path = save(tmp_path, kind, pixels)
    done = convert(path, tmp_path / target, tile_size=48)
    assert done.notes == ()
    levels = read_back(tmp_path / target)
    for level, expected in zip(levels, (pixels, pixels[..., ::2, ::2]), strict=True):
        np.testing.assert_array_equal(level, expected)
    with open_slide(path) as source, open_slide(tmp_path / target) as slide:
        assert slide.layout.problems == ()
        assert slide.planes == source.planes
        assert slide.mpp == source.mpp
        assert slide.channels[0].name == source.channels[0].name
        assert (slide.planes.z_spacing, slide.planes.time_step) == (1.5, 0.25)
        found = slide.plane(4, 1).levels[1][...]
        np.testing.assert_array_equal(found, of_plane(pixels, 4, 1)[::2, ::2])


def test_copied_tiles(tmp_path):
    pixels = stack()
    path = save(tmp_path, "TZCYX", pixels)
    # Its 32 x 32 tiles already have this compression.
    done = convert(path, tmp_path / "out.ome.tif")
    assert (done.tiles_copied, done.tiles_encoded) == (10 * (15 + 6), 0)
    for level, expected in zip(
        read_back(tmp_path / "out.ome.tif"), (pixels, pixels[..., ::2, ::2]), strict=True
    ):
        np.testing.assert_array_equal(level, expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [{}, {"shard": 2}, {"compression": "raw"}], ids=str)
def test_regions_of_rgb_stacks(tmp_path, target, options):
    if "shard" in options and target != "out.zarr":
        pytest.skip("shards are for OME-Zarr")
    pixels = slides.picture(160, 192 * 3).reshape(160, 3, 192, 3).transpose(1, 0, 2, 3)
    source = tmp_path / "a.ome.tif"
    tifffile.imwrite(
        source, pixels, tile=(64, 64), ome=True, photometric="rgb", metadata={"axes": "ZYXS"}
    )
    region = (32, 16, 100, 120)
    convert(source, tmp_path / target, region=region, tile_size=32, **options)
    [level, *_] = read_back(tmp_path / target)
    expected = pixels[:, 16:136, 32:132].transpose(0, 3, 1, 2)[None]
    np.testing.assert_array_equal(level, expected)
    with open_slide(tmp_path / target) as slide:
        assert slide.layout.rgb
        np.testing.assert_array_equal(slide.plane(2).levels[0][...], pixels[2, 16:136, 32:132])


@pytest.mark.parametrize("target", [*TARGETS, "out.tif"])
@pytest.mark.parametrize(
    ("at", "planes", "note"),
    [
        ({"z": 4, "t": 1}, ([1], [4]), "1 of 10 planes is converted: t = 1, z = 4."),
        ({"z": 1}, ([0, 1], [1]), "2 of 10 planes are converted: z = 1."),
        ({"t": 1}, ([1], [0, 1, 2, 3, 4]), "5 of 10 planes are converted: t = 1."),
    ],
)
def test_chosen_planes(tmp_path, target, at, planes, note):
    pixels = stack()
    path = save(tmp_path, "TZCYX", pixels)
    if target == "out.tif":
        shown = {"t": 0, "z": 2} | at
        planes = [shown["t"]], [shown["z"]]
        note = f"1 of 10 planes is converted: t = {shown['t']}, z = {shown['z']}."
    done = convert(path, tmp_path / target, **at)
    assert done.notes == (note,)
    if target == "out.tif":
        with open_slide(tmp_path / target) as slide:
            found = slide.levels[0][...]
        np.testing.assert_array_equal(found, of_plane(pixels, planes[1][0], planes[0][0]))
    else:
        np.testing.assert_array_equal(read_back(tmp_path / target)[0], pixels[np.ix_(*planes)])


def test_the_command_line(tmp_path, capsys):
    pixels = stack()[:, :, :1]
    path = save(tmp_path, "zarr", pixels)
    target = tmp_path / "out.png"
    assert cli.main(["convert", str(path), str(target), "--z", "3", "--t", "1"]) == 0
    assert "1 of 10 planes is converted: t = 1, z = 3." in capsys.readouterr().err
    with open_slide(path) as slide:
        expected = slide.plane(3, 1).levels[0][..., 0]
    from PIL import Image

    np.testing.assert_array_equal(np.asarray(Image.open(target)), expected)
    assert cli.main(["convert", str(path), str(tmp_path / "b.zarr"), "--z", "5"]) == 1
    assert "its planes along z are 0 to 4" in capsys.readouterr().err


@pytest.mark.parametrize("target", [*TARGETS, "out.tif", "out.png"])
def test_missing_planes_raise(tmp_path, target):
    path = save(tmp_path, "TZCYX", stack())
    for wrong in ({"z": SIZES["z"]}, {"t": 2, "z": 0}):
        with pytest.raises(PlaneError, match="has no plane"):
            convert(path, tmp_path / target, **wrong)
    for wrong in ({"z": -1}, {"t": 1.5}):
        with pytest.raises(ConversionError, match="an integer"):
            convert(path, tmp_path / target, **wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_planes_missing_in_the_slide_become_background(tmp_path, target):
    path = tmp_path / "a.czi"
    gray = slides.picture(90, 130, 1, "uint16")
    czis.write(path, [czis.Block(gray // (z + 1), z=z, t=t) for z, t in ((0, 0), (1, 1))])
    done = convert(path, tmp_path / target)
    assert done.notes[0] == "2 of 4 planes are missing from the slide and become background."
    expected = np.zeros((2, 2, 1, 90, 130), np.uint16)
    expected[0, 0, 0], expected[1, 1, 0] = gray[..., 0], gray[..., 0] // 2
    np.testing.assert_array_equal(read_back(tmp_path / target)[0], expected)


def test_planes_with_different_levels(tmp_path):
    """A level that is incomplete in one plane of a CZI is averaged in every plane."""
    path = tmp_path / "a.czi"
    gray = slides.picture(2200, 128, 1, "uint8")
    blocks = [czis.Block(gray // (z + 1), z=z) for z in range(2)]
    blocks.append(czis.Block(gray[::2, ::2], scale=2))
    czis.write(path, blocks)
    with open_slide(path) as slide:
        assert (slide.plane(0).level_count, slide.plane(1).level_count) == (2, 1)
    convert(path, tmp_path / "out.zarr")
    levels = read_back(tmp_path / "out.zarr")
    assert [level.shape[-2:] for level in levels] == [(2200, 128), (1100, 64), (550, 32)]
    for z in range(2):
        pixels = (gray // (z + 1))[..., 0]
        np.testing.assert_array_equal(levels[0][0, z, 0], pixels)
        half = slides.average(pixels[..., None], 2)[..., 0]
        np.testing.assert_array_equal(levels[1][0, z, 0], half)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [{}, {"tile_size": 48}], ids=str)
def test_interrupted_conversion_resumes(tmp_path, target, options):
    path = save(tmp_path, "TZCYX", stack())
    whole = convert(path, tmp_path / f"whole.{target}", **options)

    def interrupt(done, total):
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / target, progress=interrupt, workers=1, **options)
    again = convert(path, tmp_path / target, **options)
    assert again.tiles_found > 0.5 * (whole.tiles_copied + whole.tiles_encoded)
    for one, other in zip(
        read_back(tmp_path / target), read_back(tmp_path / f"whole.{target}"), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert again.checksum == whole.checksum


STACKS = st.fixed_dictionaries(
    {"t": st.integers(1, 3), "z": st.integers(1, 4), "c": st.integers(1, 3)}
)


@settings(max_examples=12, deadline=None)
@given(
    STACKS,
    st.sampled_from(TARGETS),
    st.sampled_from(["uint8", "uint16", "float32"]),
    st.sampled_from(["raw", "zstd", None]),
    st.data(),
)
def test_random_stacks(tmp_path_factory, sizes, target, dtype, compression, data):
    folder = tmp_path_factory.mktemp("stack")
    shape = (sizes["t"], sizes["z"], sizes["c"], 40, 50)
    pixels = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    path = folder / "a.ome.tif"
    axes = {"metadata": {"axes": "TZCYX"}, "photometric": "minisblack"}
    tifffile.imwrite(path, pixels, ome=True, **axes)
    at = {axis: data.draw(st.none() | st.integers(0, sizes[axis] - 1)) for axis in "zt"}
    convert(path, folder / target, compression=compression, tile_size=16, **at)
    chosen = [slice(None) if at[axis] is None else [at[axis]] for axis in "tz"]
    expected = pixels[chosen[0]][:, chosen[1]]
    np.testing.assert_array_equal(read_back(folder / target)[0], expected)
    with open_slide(folder / target, "cpu") as slide, open_slide(path, "cpu") as source:
        assert (slide.planes.size_t, slide.planes.size_z) == expected.shape[:2]
        assert slide.layout.problems == ()
        if at["z"] is None:
            assert slide.planes.z == source.planes.z
        for t, z in np.ndindex(expected.shape[:2]):
            found = slide.plane(z, t).levels[0][...]
            np.testing.assert_array_equal(found, np.moveaxis(expected[t, z], 0, -1))
