"""OME-Zarr: pixels are zarr's, and what metadata say is believed as far as it can be."""

import gzip
import json
import pickle
import sys

import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    TransposeCodec,
    ZstdCodec,
)

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
)
from tests.writers import slides
from tests.writers.zarrs import (
    halved,
    read_array,
    write_array,
    write_group,
    write_image,
    write_label,
)

RGB = {
    "omero": {
        "channels": [
            {"color": color, "window": {"start": 0, "end": 255, "min": 0, "max": 255}}
            for color in ("FF0000", "00FF00", "0000FF")
        ]
    }
}
V2 = {
    "raw": {"compressors": None},
    "zstd": {"compressors": numcodecs.Zstd()},
    "blosc": {"compressors": numcodecs.Blosc(shuffle=2)},
    "lz4": {"compressors": numcodecs.LZ4()},
    "gzip": {"compressors": numcodecs.GZip()},
    "zlib": {"compressors": numcodecs.Zlib()},
    "bz2": {"compressors": numcodecs.BZ2()},
    "order F": {"order": "F", "compressors": numcodecs.Zlib()},
    "filtered": {"filters": [numcodecs.Delta(dtype="<u2")]},
    "keys with dots": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "keys with slashes": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
}
V3 = {
    "raw": {"compressors": None},
    "zstd": {"compressors": ZstdCodec()},
    "blosc": {"compressors": BloscCodec()},
    "lz4": {"compressors": {"name": "numcodecs.lz4", "configuration": {}}},
    "gzip": {"compressors": GzipCodec()},
    "zlib": {"compressors": {"name": "numcodecs.zlib", "configuration": {}}},
    "with checksums": {"compressors": (ZstdCodec(), Crc32cCodec())},
    "big-endian": {"serializer": BytesCodec(endian="big"), "compressors": None},
    "transposed": {"filters": TransposeCodec(order=(2, 1, 0))},
    "sharded": {"shards": (1, 128, 256)},
    "sharded raw": {"shards": (3, 128, 128), "compressors": None},
    "keys with dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
}
STORED = [("0.4", name) for name in V2] + [("0.5", name) for name in V3]


def channels_last(pixels, axes):
    """Return the middle plane along z, the first of other axes, as (y, x, c)."""
    for letter in axes:
        if letter not in "yxc":
            axis = axes.index(letter)
            pixels = pixels.take(pixels.shape[axis] // 2 if letter == "z" else 0, axis)
            axes = axes.replace(letter, "")
    if "c" not in axes:
        pixels, axes = pixels[..., np.newaxis], axes + "c"
    return pixels.transpose([axes.index(letter) for letter in "yxc"])


def moved(height, width, channels=3, dtype="uint16"):
    return np.moveaxis(slides.picture(height, width, channels, dtype), -1, 0)


def assert_levels_are(path, levels, axes):
    with open_slide(path) as slide:
        assert slide.level_count == len(levels)
        for number, (array, level) in enumerate(zip(slide.levels, levels, strict=True)):
            oracle = channels_last(read_array(path / str(number)), axes)
            np.testing.assert_array_equal(oracle, channels_last(level, axes))
            assert array.dtype == level.dtype.newbyteorder("=")
            np.testing.assert_array_equal(array[...], oracle)


class TestPixels:
    @pytest.mark.parametrize(("version", "name"), STORED)
    def test_are_zarrs(self, tmp_path, version, name):
        levels = halved(moved(300, 410), "cyx", 2)
        options = {"chunks": (1, 64, 128), **(V2 if version == "0.4" else V3)[name]}
        if name == "filtered":
            levels = [level.astype("<u2") for level in levels]
        write_image(tmp_path / "a.zarr", levels, version=version, **options)
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    @pytest.mark.parametrize(
        "dtype", ["uint8", "int8", "uint16", "int32", "uint64", "int64", "float32", "float64"]
    )
    def test_of_any_type(self, tmp_path, version, dtype):
        levels = halved(moved(150, 120, 2, dtype), "cyx", 1)
        write_image(tmp_path / "a.zarr", levels, version=version)
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    @pytest.mark.parametrize("stated", ["0.9", 7, ["0.5"]])
    def test_of_a_version_that_is_not_known(self, tmp_path, version, stated):
        levels = [moved(150, 120, 2)]
        ome = write_image(tmp_path / "a.zarr", levels, version=version)
        (ome if version == "0.5" else ome["multiscales"][0])["version"] = stated
        write_group(tmp_path / "a.zarr", ome, version)
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")
        with open_slide(tmp_path / "a.zarr") as slide:
            [problem] = slide.layout.problems
        assert problem.startswith(f"The OME-Zarr version {str(stated)!r} is unknown")

    def test_version_of_another_program_is_ignored(self, tmp_path):
        ome = write_image(tmp_path / "a.zarr", [moved(150, 120, 2)], version="0.4")
        write_group(tmp_path / "a.zarr", ome | {"version": "2024.1"}, "0.4")
        with open_slide(tmp_path / "a.zarr") as slide:
            assert slide.layout.problems == ()

    @pytest.mark.parametrize(("color", "photometric"), [("FFFFFF", 0), (None, 0), ("00FF00", 1)])
    def test_an_inverted_channel(self, tmp_path, color, photometric):
        said = {"channels": [{"color": color, "inverted": True}]}
        write_image(tmp_path / "a.zarr", [moved(150, 120, 1)], more={"omero": said})
        with open_slide(tmp_path / "a.zarr") as slide:
            assert slide.layout.levels[0].encoding.photometric == photometric
            [channel] = slide.layout.channels
            assert channel.color == ("#00ff00" if photometric else None)

    def test_of_big_endian_samples(self, tmp_path):
        levels = halved(moved(150, 120, 2).astype(">u2"), "cyx", 1)
        write_image(tmp_path / "a.zarr", levels, version="0.4")
        assert json.loads((tmp_path / "a.zarr/0/.zarray").read_text())["dtype"] == ">u2"
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")

    @pytest.mark.parametrize(
        "axes", ["yx", "cyx", "zyx", "tyx", "czyx", "tcyx", "tzyx", "tczyx", "yxc", "zyxc", "xyc"]
    )
    def test_of_any_axes(self, tmp_path, axes):
        lengths = {"t": 2, "c": 3, "z": 4, "y": 90, "x": 130}
        shape = [lengths[letter] for letter in axes]
        whole = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        levels = halved(whole, axes, 1)
        chunks = tuple(2 if letter in "tcz" else 50 for letter in axes)
        write_image(tmp_path / "a.zarr", levels, axes, chunks=chunks)
        assert_levels_are(tmp_path / "a.zarr", levels, axes)
        with open_slide(tmp_path / "a.zarr") as slide:
            hidden = {"t": 2, "z": 4}
            assert slide.layout.other_planes == np.prod([hidden.get(a, 1) for a in axes]) - 1

    @pytest.mark.parametrize(("axes", "samples"), [("cyxs", 3), ("scyx", 2), ("cyxs", 1)])
    def test_further_axes_are_reported(self, tmp_path, axes, samples):
        """The first sample is shown if samples and channels have separate axes."""
        lengths = {"c": 5, "s": samples, "y": 90, "x": 130}
        shape = [lengths[letter] for letter in axes]
        pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        ome = write_image(tmp_path / "a.zarr", [pixels], axes, version="0.5")
        [s_axis] = [axis for axis in ome["multiscales"][0]["axes"] if axis["name"] == "s"]
        s_axis.pop("unit", None)
        s_axis["type"] = "channel" if axes == "cyxs" else "sample"
        write_group(tmp_path / "a.zarr", ome, "0.5")
        expected = read_array(tmp_path / "a.zarr" / "0").take(0, axes.index("s"))
        with open_slide(tmp_path / "a.zarr", "cpu") as slide:
            np.testing.assert_array_equal(slide.levels[0][...], np.moveaxis(expected, 0, -1))
            problem = (
                f"{samples - 1} of {samples} planes along the axis 's' can't be selected; only "
                "the first one is shown."
            )
            assert slide.layout.problems == ((problem,) if samples > 1 else ())

    @pytest.mark.parametrize(
        "chunks", [(1, 1, 310), (1, 290, 1), (3, 17, 23), (3, 2000, 2000), (2, 290, 310)]
    )
    def test_of_chunks_of_any_shape(self, tmp_path, chunks):
        levels = [moved(290, 310)]
        write_image(tmp_path / "a.zarr", levels, chunks=chunks, compressors=None)
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    @pytest.mark.parametrize("codec", [None, "zstd", "gzip"])
    @pytest.mark.parametrize("axes", ["yxc", "cyx"])
    def test_of_chunks_that_are_tiles(self, tmp_path, axes, codec, version):
        pixels = slides.picture(600, 700)
        level = pixels if axes == "yxc" else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
        chunks = tuple(256 if letter in "yx" else 3 for letter in axes)
        compressors = (V2 if version == "0.4" else V3)[codec or "raw"]
        write_image(
            tmp_path / "a.zarr", [level], axes, version=version, chunks=chunks, **compressors
        )
        assert_levels_are(tmp_path / "a.zarr", [level], axes)

    def test_of_gzip_in_several_members(self, tmp_path):
        """A program may write them, which gzip itself joins."""
        levels = [moved(200, 100)[:1]]
        write_image(tmp_path / "a.zarr", levels, chunks=(1, 200, 100), **V3["gzip"])
        whole = levels[0].tobytes()
        parts = whole[:9999], whole[9999:]
        (tmp_path / "a.zarr/0/c/0/0/0").write_bytes(b"".join(map(gzip.compress, parts)))
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")

    def test_of_chunks_that_do_not_exist(self, tmp_path):
        levels = [moved(200, 200)]
        write_image(tmp_path / "a.zarr", levels, fill_value=77)
        (tmp_path / "a.zarr/0/c/0/1/2").unlink()
        with open_slide(tmp_path / "a.zarr") as slide:
            oracle = read_array(tmp_path / "a.zarr/0")
            assert (oracle[:, 64:128, 128:192] == 77).all()
            np.testing.assert_array_equal(slide.levels[0][...], np.moveaxis(oracle, 0, -1))
            assert slide.read_region((-9, -9), (5, 5)).min() == 77

    def test_of_truth_values_are_numbers(self, tmp_path):
        levels = [moved(100, 90, 1, "uint8")[0] > 128]
        write_image(tmp_path / "a.zarr", levels, "yx")
        with open_slide(tmp_path / "a.zarr") as slide:
            assert slide.levels[0].dtype == np.uint8
            np.testing.assert_array_equal(slide.levels[0][..., 0], levels[0])

    def test_of_regions(self, tmp_path):
        levels = halved(moved(700, 900, dtype="uint8"), "cyx", 1)
        write_image(tmp_path / "a.zarr", levels, more=RGB)
        with open_slide(tmp_path / "a.zarr") as slide:
            found = slide.read_region((201, 303), (250, 150), level=1)
            expected = np.moveaxis(levels[1], 0, -1)[152:302, 101:351]
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(
                slide.levels[0][5:600:7, ::-3, 1], levels[0][1, 5:600:7, ::-3]
            )

    def test_of_a_pickled_slide(self, tmp_path):
        levels = [moved(100, 90)]
        write_image(tmp_path / "a.zarr", levels)
        with open_slide(tmp_path / "a.zarr") as slide:
            copy = pickle.loads(pickle.dumps(slide))
        with copy:
            np.testing.assert_array_equal(copy.levels[0][...], np.moveaxis(levels[0], 0, -1))


class TestPlanes:
    def test_the_middle_one_is_shown(self, tmp_path):
        write_image(tmp_path / "a.zarr", [np.arange(5 * 64 * 64).reshape(5, 64, 64)], "zyx")
        with open_slide(tmp_path / "a.zarr") as slide:
            assert slide.levels[0][0, 0, 0] == 2 * 64 * 64

    def test_plane_of_the_rendering_settings_is_shown(self, tmp_path):
        whole = np.arange(2 * 4 * 64 * 64).reshape(2, 4, 64, 64)
        more = {"omero": {"rdefs": {"defaultZ": 2, "defaultT": 1}}}
        write_image(tmp_path / "a.zarr", [whole, whole[:, ::2, ::2, ::2]], "tzyx", more=more)
        with open_slide(tmp_path / "a.zarr") as slide:
            np.testing.assert_array_equal(slide.levels[0][..., 0], whole[1, 2])
            np.testing.assert_array_equal(slide.levels[1][..., 0], whole[1, 2, ::2, ::2])

    @pytest.mark.parametrize("value", [4, -1, "2", None, 1.5, True])
    def test_missing_default_falls_back_to_the_middle(self, tmp_path, value):
        whole = np.arange(4 * 64 * 64).reshape(4, 64, 64)
        write_image(
            tmp_path / "a.zarr", [whole], "zyx", more={"omero": {"rdefs": {"defaultZ": value}}}
        )
        with open_slide(tmp_path / "a.zarr") as slide:
            np.testing.assert_array_equal(slide.levels[0][..., 0], whole[2])


class TestColors:
    def layout(self, tmp_path, pixels, axes="cyx", more=None):
        write_image(tmp_path / "a.zarr", [pixels], axes, more=more)
        return describe(tmp_path / "a.zarr")

    def test_rgb_by_their_colors(self, tmp_path):
        layout = self.layout(tmp_path, moved(64, 64, dtype="uint8"), more=RGB)
        assert layout.rgb
        assert layout.channels == ()

    @pytest.mark.parametrize("axes", ["cyx", "yxc"])
    def test_three_unnamed_8_bit_channels_are_rgb(self, tmp_path, axes):
        pixels = moved(64, 64, dtype="uint8")
        pixels = np.moveaxis(pixels, 0, -1) if axes == "yxc" else pixels
        assert self.layout(tmp_path, pixels, axes).rgb

    def test_rgb_by_their_names(self, tmp_path):
        more = {"omero": {"channels": [{"label": name} for name in ("Red", "green", "B")]}}
        assert self.layout(tmp_path, moved(64, 64, dtype="uint8"), more=more).rgb

    @pytest.mark.parametrize(
        "changed",
        [
            {"color": "00FFFF"},
            {"active": False},
            {"window": {"start": 10, "end": 100}},
        ],
    )
    def test_channels_with_other_display_settings_are_not_rgb(self, tmp_path, changed):
        channels = [dict(channel) for channel in RGB["omero"]["channels"]]
        channels[1] |= changed
        more = {"omero": {"channels": channels}}
        layout = self.layout(tmp_path, moved(64, 64, dtype="uint8"), more=more)
        assert not layout.rgb

    @pytest.mark.parametrize("dtype", ["uint16", "float32"])
    def test_other_types_are_channels(self, tmp_path, dtype):
        layout = self.layout(tmp_path, moved(64, 64, dtype=dtype))
        assert not layout.rgb
        assert [channel.name for channel in layout.channels] == [f"channel {n}" for n in range(3)]

    def test_names_colors_windows_and_what_is_active(self, tmp_path):
        stated = [
            {
                "label": "DAPI",
                "color": "0000FF",
                "window": {"start": 10, "end": 500.5, "min": 0, "max": 65535},
                "active": True,
            },
            {"label": "CD3", "color": "ff8800", "active": False},
        ]
        layout = self.layout(tmp_path, moved(64, 64, 2), more={"omero": {"channels": stated}})
        first, second = layout.channels
        assert (first.name, first.color, first.window) == ("DAPI", "#0000ff", (10, 500.5))
        assert first.visible
        assert (second.name, second.color, second.window) == ("CD3", "#ff8800", None)
        assert not second.visible

    @pytest.mark.parametrize(
        "channel",
        [
            {"label": 5, "color": "red", "window": {"start": 9, "end": 3}},
            {"color": "12345", "window": [0, 1]},
            {"label": None, "color": None, "window": {"start": "0", "end": float("nan")}},
            "DAPI",
            None,
        ],
    )
    def test_invalid_values_are_ignored(self, tmp_path, channel):
        more = {"omero": {"channels": [channel, channel]}}
        layout = self.layout(tmp_path, moved(64, 64, 2), more=more)
        for index, found in enumerate(layout.channels):
            assert (found.name, found.color, found.window) == (f"channel {index}", None, None)

    @pytest.mark.parametrize("omero", [[], {"channels": 3}, {"channels": []}, "x"])
    def test_mismatched_channels_are_ignored(self, tmp_path, omero):
        layout = self.layout(tmp_path, moved(64, 64, 2), more={"omero": omero})
        assert [channel.name for channel in layout.channels] == ["channel 0", "channel 1"]


class TestSpace:
    def layout(self, tmp_path, change, **options):
        levels = halved(moved(256, 200, 1)[0], "yx", 1)
        ome = write_image(tmp_path / "a.zarr", levels, "yx", **options)
        change(ome["multiscales"][0])
        write_group(tmp_path / "a.zarr", ome)
        return describe(tmp_path / "a.zarr")

    @pytest.mark.parametrize(
        ("unit", "factor"),
        [("micrometer", 1), ("nanometer", 1e-3), ("millimeter", 1e3), ("angstrom", 1e-4)],
    )
    def test_units(self, tmp_path, unit, factor):
        units = dict.fromkeys("yx", unit)
        layout = self.layout(tmp_path, lambda _: None, units=units, pixel=0.25 / factor)
        assert layout.mpp == pytest.approx((0.25, 0.25))
        assert layout.problems == ()

    @pytest.mark.parametrize("units", [{}, {"y": "pixel", "x": "pixel"}, {"y": "micrometer"}])
    def test_no_units(self, tmp_path, units):
        layout = self.layout(tmp_path, lambda _: None, units=units)
        assert layout.mpp is None
        found = "has an unknown unit" if "y" in units and "x" in units else "has no unit"
        assert found in layout.problems[0]

    def test_scales_of_all_levels_count_too(self, tmp_path):
        def change(image):
            image["coordinateTransformations"] = [{"type": "scale", "scale": [3, 5]}]

        layout = self.layout(tmp_path, change)
        assert layout.mpp == (2.5, 1.5)
        assert layout.downsamples == (1, 2)

    def test_downsamples_follow_the_scales(self, tmp_path):
        def change(image):
            image["datasets"][1]["coordinateTransformations"][0]["scale"] = [1.01, 1.0]

        assert self.layout(tmp_path, change).downsamples == (1, pytest.approx(2.01))

    def test_scales_that_contradict_sizes_are_ignored(self, tmp_path):
        def change(image):
            image["datasets"][1]["coordinateTransformations"][0]["scale"] = [7, 7]

        layout = self.layout(tmp_path, change)
        assert layout.downsamples == (1, 2)
        assert "contradicts its size" in layout.problems[0]

    @pytest.mark.parametrize(
        "scale",
        [[0, 0], [float("nan"), 1], [1e300, 1], [1], "2", None, [1, 2, 3], [[1], [2]], {}],
    )
    def test_invalid_scales(self, tmp_path, scale):
        def change(image):
            for dataset in image["datasets"]:
                dataset["coordinateTransformations"] = [{"type": "scale", "scale": scale}]

        layout = self.layout(tmp_path, change)
        assert layout.mpp is None
        assert layout.downsamples == (1, 2)
        assert "invalid" in layout.problems[0]

    @pytest.mark.parametrize("steps", [[], None, "x", {"type": "scale"}])
    def test_no_scales(self, tmp_path, steps):
        def change(image):
            for dataset in image["datasets"]:
                dataset["coordinateTransformations"] = steps

        assert self.layout(tmp_path, change).mpp is None

    @pytest.mark.parametrize(
        "axes",
        [None, [], ["x"], "yx", [{"name": "y"}, {"name": "y"}], [1, 2], [{}, {}], ["y"] * 1000],
    )
    def test_invalid_axes(self, tmp_path, axes):
        layout = self.layout(tmp_path, lambda image: image.update(axes=axes))
        assert (layout.levels[0].height, layout.levels[0].width) == (256, 200)
        assert "axes" in layout.problems[0]

    def test_the_oldest_versions_have_no_axes(self, tmp_path):
        levels = halved(moved(128, 100)[np.newaxis, :, np.newaxis], "tczyx", 1)
        ome = write_image(tmp_path / "a.zarr", levels, "tczyx", version="0.1")
        del ome["multiscales"][0]["axes"]
        for dataset in ome["multiscales"][0]["datasets"]:
            del dataset["coordinateTransformations"]
        write_group(tmp_path / "a.zarr", ome, "0.1")
        assert describe(tmp_path / "a.zarr").problems == ()
        assert_levels_are(tmp_path / "a.zarr", levels, "tczyx")

    def test_axes_of_version_3_are_names(self, tmp_path):
        layout = self.layout(tmp_path, lambda image: image.update(axes=["y", "x"]))
        assert layout.problems == ("The pixel size has no unit of length and is ignored.",)


class TestLevels:
    def test_are_the_larger_the_finer(self, tmp_path):
        levels = halved(moved(256, 200), "cyx", 2)
        ome = write_image(tmp_path / "a.zarr", levels)
        ome["multiscales"][0]["datasets"].reverse()
        write_group(tmp_path / "a.zarr", ome)
        assert_levels_are(tmp_path / "a.zarr", levels, "cyx")

    @pytest.mark.parametrize(
        "path",
        ["../b.zarr/0", "..", "a/../../b.zarr/0", "/etc", "C:\\x", "..\\b", "", None, 5, [], "a\0b",
         "9", "x" * 5000],
    )  # fmt: skip
    def test_missing_ones_are_left_out(self, tmp_path, path):
        levels = halved(moved(128, 100), "cyx", 1)
        write_image(tmp_path / "b.zarr", levels)
        ome = write_image(tmp_path / "a.zarr", levels)
        ome["multiscales"][0]["datasets"].append({"path": path})
        write_group(tmp_path / "a.zarr", ome)
        layout = describe(tmp_path / "a.zarr")
        assert len(layout.levels) == 2
        [problem] = layout.problems
        assert problem.startswith("A level is left out. 'a.zarr' ")
        ome["multiscales"][0]["datasets"] = [{"path": path}]
        write_group(tmp_path / "a.zarr", ome)
        with pytest.raises(CorruptSlideError, match=r"a\.zarr"):
            describe(tmp_path / "a.zarr")

    def test_of_another_picture_are_left_out(self, tmp_path):
        levels = [moved(256, 200), moved(100, 100), moved(64, 50, 2), moved(128, 100)]
        levels += [moved(32, 25).astype(np.float32), moved(128, 100)]
        write_image(tmp_path / "a.zarr", levels)
        layout = describe(tmp_path / "a.zarr")
        assert [(level.width, level.height) for level in layout.levels] == [(200, 256), (100, 128)]
        assert len([text for text in layout.problems if "is left out" in text]) == 4

    def test_very_many_are_not_read(self, tmp_path):
        ome = write_image(tmp_path / "a.zarr", [moved(64, 64)])
        ome["multiscales"][0]["datasets"] *= 20_000
        write_group(tmp_path / "a.zarr", ome)
        layout = describe(tmp_path / "a.zarr")
        assert len(layout.levels) == 1
        assert "20000 levels" in layout.problems[0]

    def test_tiles_hold_several_small_chunks(self, tmp_path):
        write_image(tmp_path / "a.zarr", [moved(400, 400)], chunks=(1, 60, 60))
        [level] = describe(tmp_path / "a.zarr").levels
        assert (level.grid.tile_height, level.grid.tile_width) == (300, 300)

    def test_tiles_are_inner_chunks_of_shards(self, tmp_path):
        options = {"chunks": (1, 256, 256), "shards": (1, 1024, 1024)}
        write_image(tmp_path / "a.zarr", [moved(1024, 1024)], **options)
        [level] = describe(tmp_path / "a.zarr").levels
        assert (level.grid.tile_height, level.grid.tile_width) == (256, 256)


class TestFolders:
    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    def test_a_metadata_file_opens_its_image(self, tmp_path, version):
        write_image(tmp_path / "a.zarr", [moved(64, 64)], version=version)
        name = "zarr.json" if version == "0.5" else ".zattrs"
        layout = describe(tmp_path / "a.zarr" / name)
        assert layout.path == str(tmp_path / "a.zarr")
        assert layout.vendor == "ome-zarr"

    def test_the_name_does_not_matter(self, tmp_path):
        write_image(tmp_path / "folder", [moved(64, 64)])
        assert describe(tmp_path / "folder").vendor == "ome-zarr"

    @pytest.mark.parametrize("zarr_format", [2, 3])
    @pytest.mark.parametrize(("shape", "rgb"), [((90, 70), False), ((90, 70, 3), True)])
    def test_a_bare_array(self, tmp_path, zarr_format, shape, rgb):
        pixels = slides.picture(90, 70, shape[2] if rgb else 1).reshape(shape)
        version = "0.5" if zarr_format == 3 else "0.4"
        write_array(tmp_path / "a.zarr", pixels, version=version)
        with open_slide(tmp_path / "a.zarr") as slide:
            assert (slide.vendor, slide.layout.rgb, slide.mpp) == ("zarr", rgb, None)
            np.testing.assert_array_equal(slide.levels[0][...].reshape(shape), pixels)

    @pytest.mark.parametrize("shape", [(9,), (5, 90, 70), (2, 3, 90, 70)])
    def test_a_bare_array_of_unknown_axes(self, tmp_path, shape):
        write_array(tmp_path / "a.zarr", np.zeros(shape, np.uint8))
        with pytest.raises(NotASlideError, match="without axes; open the folder"):
            describe(tmp_path / "a.zarr")

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    @pytest.mark.parametrize(
        ("ome", "error", "words"),
        [
            ({"plate": {"wells": []}}, UnsupportedSlideError, "a plate with many images; open"),
            ({"well": {"images": []}}, UnsupportedSlideError, "a well with many images; open"),
            ({"labels": ["a"]}, NotASlideError, "a list of label images; open"),
            ({}, NotASlideError, "without multiscale images; open"),
            ({"multiscales": []}, NotASlideError, "without multiscale images; open"),
            ({"multiscales": [5]}, NotASlideError, "without multiscale images; open"),
            ({"multiscales": [{}]}, CorruptSlideError, "lists no levels"),
            ({"multiscales": [{"datasets": 7}]}, CorruptSlideError, "lists no levels"),
        ],
    )
    def test_other_groups(self, tmp_path, version, ome, error, words):
        write_group(tmp_path / "a.zarr", ome, version)
        with pytest.raises(error, match=words):
            describe(tmp_path / "a.zarr")

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", "\xff", "[" * 100_000, '{"zarr_format": 3, "attributes": 5'],
    )
    def test_damaged_metadata(self, tmp_path, text):
        write_image(tmp_path / "a.zarr", [moved(64, 64)])
        (tmp_path / "a.zarr/zarr.json").write_text(text, "latin-1")
        with pytest.raises(CorruptSlideError, match=r"zarr\.json' "):
            describe(tmp_path / "a.zarr")

    def test_damaged_metadata_is_not_quoted(self, tmp_path):
        write_image(tmp_path / "a.zarr", [moved(64, 64)])
        document = next((tmp_path / "a.zarr").glob("*/zarr.json"))
        found = json.loads(document.read_text())
        document.write_text(json.dumps({**found, "data_type": "Jane Doe"}))
        with pytest.raises(CorruptSlideError, match="is damaged; get") as error:
            describe(tmp_path / "a.zarr")
        assert "Jane" not in str(error.value)

    @pytest.mark.parametrize("text", ['{"zarr_format": 7}', "{}"])
    def test_other_files_of_that_name(self, tmp_path, text):
        (tmp_path / "zarr.json").write_text(text)
        with pytest.raises(NotASlideError, match="not a Zarr hierarchy"):
            describe(tmp_path / "zarr.json")

    def test_metadata_that_are_too_long(self, tmp_path):
        write_image(tmp_path / "a.zarr", [moved(64, 64)])
        with (tmp_path / "a.zarr/zarr.json").open("r+b") as file:
            file.truncate(100 << 20)
        with pytest.raises(CorruptSlideError, match="too large"):
            describe(tmp_path / "a.zarr")

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("shape", [1 << 40, 1 << 40]), ("shape", [0, 64]), ("shape", [-1, 64]), ("shape", "x"),
            ("shape", None), ("shape", [64]), ("shape", [1.5, 64]), ("chunks", [0, 64]),
            ("chunks", [1 << 40, 1 << 40]), ("chunks", None), ("chunks", [64]), ("dtype", "<c8"),
            ("dtype", "no type"), ("dtype", None), ("dtype", "<M8[s]"), ("codecs", "no codec"),
            ("codecs", [{"name": "no codec"}]), ("fill_value", "no number"),
        ],
    )  # fmt: skip
    def test_damaged_arrays(self, tmp_path, version, key, value):
        write_image(tmp_path / "a.zarr", [moved(64, 64, 1)[0]], "yx", version=version)
        name = "zarr.json" if version == "0.5" else ".zarray"
        document = tmp_path / "a.zarr/0" / name
        array = json.loads(document.read_text())
        if version == "0.5" and key == "chunks":
            array["chunk_grid"]["configuration"]["chunk_shape"] = value
        else:
            names = {"dtype": "data_type"} if version == "0.5" else {"codecs": "compressor"}
            array[names.get(key, key)] = value
        document.write_text(json.dumps(array))
        with pytest.raises(SlideError) as caught:
            describe(tmp_path / "a.zarr")
        assert "a.zarr" in str(caught.value)
        assert len(str(caught.value)) < 700

    def test_missing_folder(self, tmp_path):
        with pytest.raises(SlideNotFoundError):
            describe(tmp_path / "a.zarr")

    def test_without_zarr(self, tmp_path, monkeypatch):
        write_image(tmp_path / "a.zarr", [moved(64, 64)])
        monkeypatch.setitem(sys.modules, "zarr", None)
        with pytest.raises(UnsupportedSlideError, match=r'pip install "napari-wsigpu\[zarr\]"'):
            describe(tmp_path / "a.zarr")

    def test_implausible_metadata(self, tmp_path):
        ome = write_image(tmp_path / "a.zarr", [moved(64, 64)])
        deep = json.loads('{"a":' * 900 + "1" + "}" * 900)
        text = "x\ud800y"
        ome["multiscales"][0]["datasets"].append({"path": text})
        write_group(tmp_path / "a.zarr", ome | {"deep": deep, "text": text, "ok": "\U0001f600"})
        with open_slide(tmp_path / "a.zarr") as slide:
            found = slide.metadata["ome-zarr"]["ome"]
            assert (found["text"], found["ok"]) == ("x?y", "\U0001f600")
            json.dumps(slide.metadata, ensure_ascii=False).encode()
            "".join(slide.layout.problems).encode()
            pickle.loads(pickle.dumps(slide)).close()

    def test_long_metadata_are_not_kept(self, tmp_path):
        ome = write_image(tmp_path / "a.zarr", [moved(64, 64)])
        assert describe(tmp_path / "a.zarr").metadata["ome-zarr"]["ome"]["multiscales"]
        write_group(tmp_path / "a.zarr", ome | {"text": "x" * (1 << 19)})
        assert describe(tmp_path / "a.zarr").metadata == {"ome-zarr": {}}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["x", "y", "c", "0", "scale", "channel", "micrometer", 1 << 70, -1, 0]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["path", "name", "type", "scale", "color"]), inner)
    ),
    max_leaves=6,
)


def places(value, prefix=()):
    """Yield the keys that lead to each value of nested metadata."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*prefix, key)
        if isinstance(item, dict | list):
            yield from places(item, (*prefix, key))


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any") / "a.zarr"
    more = {"omero": RGB["omero"] | {"rdefs": {"defaultZ": 0}}}
    levels = halved(moved(64, 48, dtype="uint8"), "cyx", 1)
    ome = write_image(folder, levels, more=more)
    write_label(folder, "cells", [np.ones((64, 48), np.uint8)])
    return folder, ome


class TestAnything:
    @given(st.data())
    @settings(max_examples=40)
    def test_metadata_of_an_image(self, image, data):
        folder, ome = image
        changed = json.loads(json.dumps(ome))
        *above, last = data.draw(st.sampled_from(list(places(changed))))
        inner = changed
        for key in above:
            inner = inner[key]
        inner[last] = data.draw(JSON)
        write_group(folder, changed)
        self.assert_is_read_or_refused(folder)

    @given(st.data())
    @settings(max_examples=40)
    def test_metadata_of_an_array(self, image, data):
        folder, ome = image
        write_group(folder, ome)
        document = folder / "0/zarr.json"
        before = document.read_text()
        changed = json.loads(before)
        *above, last = data.draw(st.sampled_from(list(places(changed))))
        inner = changed
        for key in above:
            inner = inner[key]
        inner[last] = data.draw(JSON)
        document.write_text(json.dumps(changed))
        try:
            self.assert_is_read_or_refused(folder)
        finally:
            document.write_text(before)

    def assert_is_read_or_refused(self, folder):
        said = ""
        try:
            with open_slide(folder, "cpu") as slide:
                json.dumps(slide.metadata)
                found = slide.read_region((0, 0), (9, 9))
                assert found.shape == (9, 9, slide.layout.levels[0].channels)
        except SlideError as error:
            said = str(error)
        assert not said or ("a.zarr" in said and len(said) < 900)


class TestCollections:
    XML = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
        '<Instrument ID="I"><Objective ID="O" NominalMagnification="20"/></Instrument>{}</OME>'
    )
    IMAGE = '<Image ID="{0}" Name="{0}"><Pixels PhysicalSizeX="0.5" PhysicalSizeY="0.5"/></Image>'

    def write(self, folder, *names, version="0.4"):
        pictures = {}
        for index, name in enumerate(names):
            pictures[name] = moved(200 - index, 150, dtype="uint8")
            levels = halved(pictures[name], "cyx", 1)
            write_image(folder / str(index), levels, version=version, more=RGB, units={})
        write_group(folder, {"bioformats2raw.layout": 3}, version)
        write_group(folder / "OME", {"series": [str(n) for n in range(len(names))]}, version)
        images = "".join(self.IMAGE.format(name) for name in names)
        (folder / "OME/METADATA.ome.xml").write_text(self.XML.format(images))
        return pictures

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    def test_first_and_associated_images(self, tmp_path, version):
        names = ("slide", "label image", "macro image", "other")
        pictures = self.write(tmp_path / "a.zarr", *names, version=version)
        with open_slide(tmp_path / "a.zarr") as slide:
            assert slide.layout.rgb
            assert slide.mpp == (0.5, 0.5)
            assert slide.objective == 20
            assert slide.level_count == 2
            np.testing.assert_array_equal(
                slide.levels[0][...], np.moveaxis(pictures["slide"], 0, -1)
            )
            assert set(slide.associated_images) == {"label", "macro"}
            for name, image in slide.associated_images.items():
                expected = np.moveaxis(pictures[f"{name} image"], 0, -1)
                np.testing.assert_array_equal(image.read(), expected)
            assert "1 more image(s)" in " ".join(slide.layout.problems)

    def test_without_a_list_of_images(self, tmp_path):
        self.write(tmp_path / "a.zarr", "slide")
        for path in (tmp_path / "a.zarr/OME").iterdir():
            path.unlink()
        (tmp_path / "a.zarr/OME").rmdir()
        assert len(describe(tmp_path / "a.zarr").levels) == 2

    @pytest.mark.parametrize("series", [["../b.zarr"], [5], ["9"]])
    def test_missing_images(self, tmp_path, series):
        self.write(tmp_path / "a.zarr", "slide")
        write_group(tmp_path / "a.zarr/OME", {"series": series}, "0.4")
        with pytest.raises(CorruptSlideError, match=r"a\.zarr"):
            describe(tmp_path / "a.zarr")


@pytest.mark.parametrize("listed", [["A/1", "C/7"], ["C/7"], ["A/1"], 5, [7]])
def test_plate_error_names_an_existing_image(tmp_path, listed):
    folder = tmp_path / "p.zarr"
    wells = [{"path": path} for path in listed] if isinstance(listed, list) else listed
    write_group(folder, {"plate": {"wells": wells}})
    write_group(folder / "C/7", {"well": {"images": [{"path": "0"}, {"path": "2"}]}})
    write_image(folder / "C/7/2", [moved(64, 80)])
    example = ", for example 'p.zarr/C/7/2'" if isinstance(listed, list) and "C/7" in listed else ""
    with pytest.raises(UnsupportedSlideError, match=f"open the folder of one of them{example}.$"):
        open_slide(folder)


def test_image_with_collection_metadata(tmp_path):
    """As large_image writes it."""
    pixels = moved(64, 80)
    write_image(tmp_path / "a.zarr", [pixels], more={"bioformats2raw.layout": 3})
    with open_slide(tmp_path / "a.zarr") as slide:
        np.testing.assert_array_equal(np.moveaxis(slide.levels[0][...], 2, 0), pixels)


class TestLabels:
    def write(self, tmp_path, **options):
        write_image(tmp_path / "a.zarr", halved(moved(256, 400), "cyx", 1))
        numbers = np.zeros((256, 400), np.int32)
        numbers[10:90, 20:300] = 7
        numbers[100:200, 40:90] = 1 << 20
        levels = halved(numbers[::2, ::2], "yx", 1)
        write_label(tmp_path / "a.zarr", "cells", levels, pixel=1.0, **options)
        return levels

    @pytest.mark.parametrize("version", ["0.4", "0.5"])
    def test_are_slides_of_their_own(self, tmp_path, version):
        write_image(tmp_path / "a.zarr", halved(moved(256, 400), "cyx", 1), version=version)
        numbers = np.arange(256 * 400, dtype=np.uint32).reshape(256, 400)
        levels = halved(numbers, "yx", 1)
        write_label(tmp_path / "a.zarr", "cells", levels, version=version)
        with open_slide(tmp_path / "a.zarr") as slide:
            [(name, labels)] = slide.labels.items()
            assert name == "cells"
            for found, expected in zip(labels.levels, levels, strict=True):
                np.testing.assert_array_equal(found[..., 0], expected)
            assert labels.mpp == slide.mpp == (0.5, 0.5)
        with pytest.raises(SlideError, match="closed"):
            labels.levels[0][0, 0, 0]

    @pytest.mark.parametrize(
        ("shape", "shown"), [((2, 10), 15), ((2, 1), 10), ((2, 5), 12), ((10,), 5), ((), 0)]
    )
    def test_show_the_plane_that_the_image_shows(self, tmp_path, shape, shown):
        said = {"omero": {"rdefs": {"defaultZ": 5, "defaultT": 1}}}
        planes = np.arange(20, dtype=np.uint16).reshape(2, 10, 1, 1)
        image = np.broadcast_to(planes, (2, 10, 64, 64))
        write_image(tmp_path / "a.zarr", [np.array(image)], "tzyx", more=said)
        numbers = np.arange(20).reshape(2, 10)
        numbers = numbers[tuple(map(slice, shape))] if len(shape) == 2 else numbers[0]
        numbers = numbers if shape else numbers[0]
        labels = np.broadcast_to(numbers[..., None, None], (*shape, 64, 64)).astype(np.int32)
        write_label(
            tmp_path / "a.zarr", "cells", [np.array(labels)], axes="tzyx"[-2 - len(shape) :]
        )
        with open_slide(tmp_path / "a.zarr") as slide:
            assert np.unique(slide.levels[0][...]).tolist() == [15]
            assert np.unique(slide.labels["cells"].levels[0][...]).tolist() == [shown]

    def test_places_colors_and_properties(self, tmp_path):
        said = {
            "colors": [
                {"label-value": 7, "rgba": [255, 0, 16, 128]},
                {"label-value": "8", "rgba": [255, 0, 16, 128]},
                {"label-value": 9, "rgba": [256, 0, 16, 128]},
                {"label-value": 10},
                "red",
            ],
            "properties": [{"label-value": 7, "class": "tumour"}, {"class": "none"}, 5],
        }
        self.write(tmp_path, more={"image-label": said})
        [label] = describe(tmp_path / "a.zarr").labels
        assert (label.step, label.offset) == ((2, 2), (0, 0))
        assert label.colors == {7: "#ff001080"}
        assert label.properties == ({"label-value": 7, "class": "tumour"},)

    @pytest.mark.parametrize(("shift", "offset"), [([50, 20], (40, 100)), ([0.25, 0.25], (0, 0))])
    def test_translations(self, tmp_path, shift, offset):
        self.write(tmp_path)
        document = tmp_path / "a.zarr/labels/cells/zarr.json"
        stated = json.loads(document.read_text())
        steps = stated["attributes"]["ome"]["multiscales"][0]["datasets"][0]
        steps["coordinateTransformations"].append({"type": "translation", "translation": shift})
        document.write_text(json.dumps(stated))
        [label] = describe(tmp_path / "a.zarr").labels
        assert label.offset == offset

    def test_computed_levels_hold_no_other_numbers(self, tmp_path):
        write_image(tmp_path / "a.zarr", [moved(2100, 2000, 1)], chunks=(1, 512, 512))
        numbers = np.random.default_rng(0).integers(0, 9, (2100, 2000)).astype(np.uint16) * 1000
        write_label(tmp_path / "a.zarr", "cells", [numbers], chunks=(512, 512))
        with open_slide(tmp_path / "a.zarr") as slide:
            labels = slide.labels["cells"]
            sizes = [level.layout.width for level in labels.pyramid]
            assert sizes == [2000, 1000, 500]
            for level, step in zip(labels.pyramid, (1, 2, 4), strict=True):
                found = labels.level_array(level.number, 0)[...]
                np.testing.assert_array_equal(found, numbers[::step, ::step])

    @pytest.mark.parametrize(
        "names", [["../.."], ["cells", "lost"], ["."], [None], ["cells"] * 1000]
    )
    def test_impossible_ones_are_left_out(self, tmp_path, names):
        self.write(tmp_path)
        write_group(tmp_path / "a.zarr/labels", {"labels": names})
        layout = describe(tmp_path / "a.zarr")
        assert len(layout.labels) == ("cells" in names)
        assert "label image" in layout.problems[0]
        assert len(layout.levels) == 2

    @pytest.mark.parametrize("dtype", ["float32", "uint8"])
    def test_of_brightness_are_left_out(self, tmp_path, dtype):
        write_image(tmp_path / "a.zarr", [moved(64, 64)])
        write_group(tmp_path / "a.zarr/labels", {"labels": ["cells"]})
        pixels = moved(64, 64, 2, dtype)
        write_image(tmp_path / "a.zarr/labels/cells", [pixels])
        layout = describe(tmp_path / "a.zarr")
        assert layout.labels == ()
        assert "a label image has one channel of integers" in layout.problems[0]

    def test_labels_of_labels_are_not_looked_for(self, tmp_path):
        self.write(tmp_path)
        (tmp_path / "a.zarr/labels/cells/labels").symlink_to(tmp_path / "a.zarr/labels")
        [label] = describe(tmp_path / "a.zarr").labels
        assert label.layout.labels == ()

    @pytest.mark.parametrize("stated", [{}, {"labels": "cells"}])
    def test_labels_that_are_not_listed_are_reported(self, tmp_path, stated):
        self.write(tmp_path)
        write_group(tmp_path / "a.zarr/labels", stated)
        layout = describe(tmp_path / "a.zarr")
        assert layout.labels == ()
        [problem] = layout.problems
        assert problem.startswith("The group of label images does not list them")

    def test_damaged_metadata_of_labels(self, tmp_path):
        self.write(tmp_path)
        (tmp_path / "a.zarr/labels/zarr.json").write_text("{")
        layout = describe(tmp_path / "a.zarr")
        assert layout.labels == ()
        assert layout.problems[0].startswith("The label images are left out.")
