import json
import os
import re
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from napari_wsigpu import convert, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.tiff import claims
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.slide.tile_check import TileCheck
from tests import oracles
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import ASCII, LONG, RATIONAL, SHORT


def deflate(tile):
    return zlib.compress(tile.tobytes())


def page(pixels, **options):
    return tiffbytes.page(pixels, deflate, **({"compression": 8} | options))


def write(tmp_path, *pages, **options):
    return tiffbytes.write(tmp_path / "slide.tif", pages, **options)


def assert_levels(slide, levels):
    assert slide.level_dimensions == tuple((level.shape[1], level.shape[0]) for level in levels)
    for array, level in zip(slide.levels, levels, strict=True):
        np.testing.assert_array_equal(array[...], level)


TEXTS = {
        269: "Name", 270: "A slide", 271: "Maker", 272: "Model 7", 305: "Software 1",
        306: "2020:01:02 03:04:05", 315: "Artist", 316: "Computer", 33432: "Owner",
    }  # fmt: skip


class TestTags:
    @pytest.mark.parametrize("unit", [None, 1, 2, 3, 9])
    def test_metadata_equals_openslide(self, tmp_path, unit):
        more = {code: (ASCII, text) for code, text in TEXTS.items()}
        values = {282: 40000.5, 283: 3, 286: 0.25, 287: 1 / 3}
        more |= {code: (RATIONAL, value) for code, value in values.items()}
        if unit is not None:
            more[296] = (SHORT, unit)
        path = write(tmp_path, page(slides.picture(100, 120), tile=(32, 48), more=more))
        properties = oracles.openslide_properties(path)
        tags = oracles.openslide_tiff_tags(path)
        assert len(tags) == len(TEXTS) + len(values) + 1
        with open_slide(path) as slide:
            found = slide.metadata["tiff"]
            assert {key: oracles.as_property(value) for key, value in found.items()} == tags
            mpp = [properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
            assert slide.mpp == (tuple(map(float, mpp)) if None not in mpp else None)
            assert slide.metadata["scanner"] == "Maker Model 7"

    @pytest.mark.parametrize(
        "value", [(SHORT, 7), (ASCII, "x"), (RATIONAL, (1, 2)), (LONG, (1, 0))]
    )
    @pytest.mark.parametrize("code", [271, 282, 286, 296])
    def test_values_of_another_kind(self, tmp_path, code, value):
        pixels = slides.picture(100, 120)
        path = write(tmp_path, page(pixels, more={code: value}))
        with open_slide(path) as slide:
            json.dumps(slide.metadata)
            np.testing.assert_array_equal(slide.levels[0][...], pixels)


class TestPyramids:
    @pytest.mark.parametrize("subifds", [False, True])
    @pytest.mark.parametrize(
        ("steps", "byteorder", "bigtiff"),
        [
            *((steps, "<", False) for steps in [(), (3,), (2, 2, 2), (4, 2), (2, 4), (5, 3)]),
            *(((4, 4), order, big) for order in "<>" for big in (False, True)),
        ],
    )
    def test_steps(self, tmp_path, steps, byteorder, bigtiff, subifds):
        path = tmp_path / "slide.tif"
        pixels = slides.picture(487, 655)
        levels = slides.write_pyramid(
            path, pixels, steps, byteorder=byteorder, bigtiff=bigtiff, subifds=subifds
        )
        with open_slide(path) as slide:
            assert_levels(slide, levels)
            assert slide.vendor == "generic-tiff"
            # OpenSlide knows no SubIFDs.
            if oracles.openslide_reads(path) and not subifds:
                dimensions, downsamples = oracles.openslide_shape(path)
                assert slide.level_dimensions == dimensions
                assert slide.level_downsamples == pytest.approx(downsamples, rel=1e-12)
                for index, level in enumerate(slide.levels):
                    np.testing.assert_array_equal(level[...], oracles.openslide_level(path, index))

    def test_openslide_is_an_oracle_here(self, tmp_path):
        slides.write_pyramid(tmp_path / "slide.tif", slides.picture(200, 300))
        assert oracles.openslide_reads(tmp_path / "slide.tif")

    def test_levels_out_of_order_are_sorted(self, tmp_path):
        pixels = slides.picture(400, 480)
        small, middle = pixels[::4, ::4], pixels[::2, ::2]
        path = write(
            tmp_path,
            page(pixels),
            page(small, subfile_type=1),
            page(middle, subfile_type=1),
        )
        with open_slide(path) as slide:
            assert_levels(slide, [pixels, middle, small])

    def test_a_second_chain_of_levels(self, tmp_path):
        """Steps that some readers do not take for one pyramid."""
        pixels = slides.picture(600, 900)
        levels = [pixels[::step, ::step] for step in (1, 7, 14, 42)]
        path = write(
            tmp_path, *(page(level, subfile_type=int(i > 0)) for i, level in enumerate(levels))
        )
        with open_slide(path) as slide:
            assert slide.level_dimensions == oracles.openslide_shape(path)[0]
            assert_levels(slide, levels)

    def test_a_mask_is_no_level(self, tmp_path):
        pixels = slides.picture(256, 384)
        mask = np.full((256, 384, 1), 255, np.uint8)
        path = write(
            tmp_path,
            page(pixels),
            page(mask, photometric=4, subfile_type=4),
            page(pixels[::2, ::2], subfile_type=1),
            page(mask[::2, ::2], photometric=4, subfile_type=5),
        )
        with open_slide(path) as slide:
            assert_levels(slide, [pixels, pixels[::2, ::2]])
            assert slide.layout.rgb

    @pytest.mark.parametrize("shape", [(100, 100), (64, 200), (40, 20)])
    def test_a_thumbnail_of_another_shape_is_no_level(self, tmp_path, shape):
        pixels = slides.picture(300, 500)
        path = write(
            tmp_path,
            page(pixels),
            page(slides.picture(*shape), tile=None, subfile_type=1),
            page(pixels[::2, ::2], subfile_type=1),
        )
        with open_slide(path) as slide:
            assert_levels(slide, [pixels, pixels[::2, ::2]])

    def test_a_reduced_image_of_another_type_is_no_level(self, tmp_path):
        pixels = slides.picture(300, 500)
        path = write(
            tmp_path,
            page(pixels),
            page(slides.picture(150, 250, 3, "uint16"), subfile_type=1),
            page(slides.picture(150, 250, 1), photometric=1, subfile_type=1),
        )
        with open_slide(path) as slide:
            assert_levels(slide, [pixels])

    def test_the_largest_of_unlike_series_is_the_slide(self, tmp_path):
        large, small = slides.picture(300, 500), slides.picture(77, 200, 1, "uint16")
        path = write(tmp_path, page(small, photometric=1), page(large), page(small, photometric=1))
        with open_slide(path) as slide:
            assert_levels(slide, [large])
            assert slide.layout.problems == (
                "1 more image(s) of the file are not shown: 200 x 77 (2 planes).",
            )

    @pytest.mark.parametrize("metadata", [{}, None])
    def test_planes_along_an_unnamed_axis_are_reported(self, tmp_path, metadata):
        path = tmp_path / "slide.tif"
        pixels = np.moveaxis(slides.picture(64, 80, 20), -1, 0)
        tifffile.imwrite(path, pixels, photometric="minisblack", metadata=metadata)
        with open_slide(path) as slide:
            assert_levels(slide, [pixels[0, ..., np.newaxis]])
            assert slide.layout.problems == (
                "19 of 20 planes can't be selected and are not shown.",
            )

    @pytest.mark.parametrize(("axes", "hidden"), [("ZYX", 5), ("TYX", 5), ("CYX", 0)])
    def test_planes_of_a_stack_are_counted(self, tmp_path, axes, hidden):
        path = tmp_path / "slide.ome.tif"
        pixels = np.moveaxis(slides.picture(100, 150, 6, "uint16"), -1, 0)
        slides.write_pyramid(path, pixels, (), metadata={"axes": axes}, photometric="minisblack")
        with open_slide(path) as slide:
            assert slide.layout.other_planes == hidden
            shown = {"ZYX": pixels[3:4], "TYX": pixels[:1], "CYX": pixels}
            expected = shown[axes]
            assert_levels(slide, [np.moveaxis(expected, 0, -1)])

    def test_middle_plane_of_a_channel_stack_is_shown(self, tmp_path):
        path = tmp_path / "slide.ome.tif"
        pixels = slides.picture(100, 150, 24, "uint16").reshape(100, 150, 2, 3, 4)
        pixels = np.ascontiguousarray(np.moveaxis(pixels, (0, 1), (-2, -1)))  # T, C, Z, Y, X
        slides.write_pyramid(path, pixels, (), metadata={"axes": "TCZYX"}, photometric="minisblack")
        with open_slide(path) as slide:
            assert slide.layout.other_planes == 7
            assert_levels(slide, [np.moveaxis(pixels[0, :, 2], 0, -1)])

    def test_levels_that_differ_are_refused(self, tmp_path):
        pixels = slides.picture(300, 500)
        child = page(slides.picture(150, 250, 1, "uint16"), photometric=1)
        path = write(tmp_path, page(pixels, subifds=[child]))
        with open_slide(path) as slide:
            assert_levels(slide, [pixels])


class TestColours:
    @pytest.mark.parametrize(
        ("channels", "photometric", "rgb"),
        [(1, 1, False), (2, 1, False), (3, 1, False), (3, 2, True), (4, 2, True), (5, 2, False)],
    )
    def test_rgb(self, tmp_path, channels, photometric, rgb):
        pixels = slides.picture(80, 90, channels)
        with open_slide(write(tmp_path, page(pixels, photometric=photometric))) as slide:
            assert slide.layout.rgb is rgb
            assert len(slide.channels) == (0 if rgb else channels)
            assert len({channel.name for channel in slide.channels}) == len(slide.channels)
            assert_levels(slide, [pixels])

    def test_separate_planes_are_channels(self, tmp_path):
        pixels = slides.picture(80, 90, 3)
        with open_slide(write(tmp_path, page(pixels, planar=True))) as slide:
            assert slide.layout.rgb
            assert slide.levels[0].shape == (80, 90, 3)

    @pytest.mark.parametrize("compression", [1, 5, 8, 32773, 34887, 34925, 50000])
    @pytest.mark.parametrize("planar", [False, True])
    def test_unconvertible_ycbcr_is_refused(self, tmp_path, compression, planar):
        pixels = slides.picture(80, 90, 3)
        path = write(tmp_path, page(pixels, compression=compression, photometric=6, planar=planar))
        with pytest.raises(UnsupportedSlideError, match=r"YCbCr colors.*convert it"):
            open_slide(path)

    @pytest.mark.parametrize(("photometric", "name"), [(5, "SEPARATED"), (8, "CIELAB")])
    def test_unconverted_colours_are_reported(self, tmp_path, photometric, name):
        pixels = slides.picture(80, 90, 4 if photometric == 5 else 3)
        with open_slide(write(tmp_path, page(pixels, photometric=photometric))) as slide:
            [problem] = slide.layout.problems
            assert name in problem
            assert_levels(slide, [pixels])

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_unapplied_orientation_is_reported(self, tmp_path, orientation):
        item = page(slides.picture(80, 90, 3), more={274: (SHORT, orientation)})
        with open_slide(write(tmp_path, item)) as slide:
            said = [text for text in slide.layout.problems if f"orientation {orientation}" in text]
            assert len(said) == len(slide.layout.problems) == (orientation != 1)


class TestMetadata:
    @pytest.mark.parametrize(
        ("unit", "value", "mpp"),
        [(3, 20000, 0.5), (2, 101600, 0.25), (1, 20000, None), (None, 101600, 0.25)],
    )
    def test_resolution(self, tmp_path, unit, value, mpp):
        more = {282: (RATIONAL, value), 283: (RATIONAL, value * 2)}
        if unit:
            more[296] = (SHORT, unit)
        path = write(tmp_path, page(slides.picture(80, 90), more=more))
        with open_slide(path) as slide:
            assert slide.mpp == (None if mpp is None else pytest.approx((mpp, mpp / 2)))

    @pytest.mark.parametrize("value", [17.3, 39370.07874, 123456.789, 40431.27])
    @pytest.mark.parametrize("unit", [2, 3])
    def test_resolution_is_openslides(self, tmp_path, unit, value):
        more = {282: (RATIONAL, value), 283: (RATIONAL, value / 3), 296: (SHORT, unit)}
        path = write(tmp_path, page(slides.picture(80, 90), more=more))
        properties = oracles.openslide_properties(path)
        expected = [float(properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
        with open_slide(path) as slide:
            assert slide.mpp == pytest.approx(expected, rel=1e-14)

    @pytest.mark.parametrize("pair", [(0, 1), (1, 0), (0, 0)])
    def test_senseless_resolution(self, tmp_path, pair):
        raw = b"".join(number.to_bytes(4, "little") for number in pair)
        path = write(
            tmp_path, page(slides.picture(80, 90), more={282: (RATIONAL, 1), 296: (SHORT, 2)})
        )
        data = path.read_bytes()
        one = (1).to_bytes(4, "little") * 2
        assert data.count(one) >= 1
        path.write_bytes(data.replace(one, raw))
        with open_slide(path) as slide:
            assert slide.mpp is None

    def test_texts(self, tmp_path):
        more = {271: (ASCII, "Maker"), 272: (ASCII, "Scanner 9"), 305: (ASCII, "Mü 標本")}
        path = write(tmp_path, page(slides.picture(80, 90), description="A slide", more=more))
        with open_slide(path) as slide:
            texts = slide.metadata["tiff"]
        assert texts["ImageDescription"] == "A slide"
        assert (texts["Make"], texts["Model"]) == ("Maker", "Scanner 9")
        assert texts["Software"] == "Mü 標本"

    @pytest.mark.parametrize(
        ("more", "date", "name"),
        [
            ({306: "2017:02:07 13:06:43"}, "2017-02-07T13:06:43", None),
            ({306: "2017-02-07 13:06"}, "2017-02-07 13:06", None),
            ({306: "2017:13:07 13:06:43"}, "2017:13:07 13:06:43", None),
            ({306: "    :  :     :  :  "}, None, None),
            ({271: "Hamamatsu", 272: "C9600-12"}, None, "Hamamatsu C9600-12"),
            ({271: "Leica", 272: "Leica SCN400"}, None, "Leica SCN400"),
            ({271: "Leica"}, None, "Leica"),
            ({272: "SCN400"}, None, "SCN400"),
            ({272: "Objective = 20\nComments = Jane Doe"}, None, None),
            ({272: "Jane Doe, " * 9}, None, None),
            ({}, None, None),
        ],
    )
    def test_scanner_and_date(self, tmp_path, more, date, name):
        tags = {code: (ASCII, text) for code, text in more.items()}
        with open_slide(write(tmp_path, page(slides.picture(80, 90), more=tags))) as slide:
            assert (slide.metadata["scan_date"], slide.metadata["scanner"]) == (date, name)

    @pytest.mark.parametrize("nodata", [None, "7", "255"])
    def test_background_is_the_nodata_value(self, tmp_path, nodata):
        more = {} if nodata is None else {42113: (ASCII, nodata)}
        pixels = slides.picture(96, 96)
        path = write(tmp_path, page(pixels, tile=(48, 48), missing=[1, 2], more=more))
        expected = pixels.copy()
        expected[:48, 48:] = expected[48:, :48] = int(nodata or 0)
        with open_slide(path) as slide:
            np.testing.assert_array_equal(slide.levels[0][...], expected)
            outside = slide.read_region((-5, 0), (5, 5))
            assert (outside == int(nodata or 0)).all()

    def test_only_some_planes_of_a_tile_are_missing(self, tmp_path):
        pixels = slides.picture(96, 96)
        path = write(tmp_path, page(pixels, tile=(96, 48), planar=True, missing=[1, 2]))
        expected = pixels.copy()
        expected[:, 48:, 0] = 0
        expected[:, :48, 1] = 0
        with open_slide(path) as slide:
            np.testing.assert_array_equal(slide.levels[0][...], expected)


class TestRefused:
    @pytest.mark.parametrize(
        ("more", "error"),
        [
            ({256: (LONG, 2**31), 257: (LONG, 2**31)}, SlideError),
            ({256: (LONG, 0)}, SlideError),
            ({257: (LONG, 0)}, SlideError),
            ({322: (LONG, 0)}, SlideError),
            ({322: (LONG, 2**20), 323: (LONG, 2**20)}, UnsupportedSlideError),
            ({258: (SHORT, (4, 4, 4))}, NotASlideError),
            ({258: (SHORT, (8, 16, 8))}, SlideError),
            ({277: (SHORT, 0)}, SlideError),
            ({277: (SHORT, 65535)}, UnsupportedSlideError),
            ({324: (LONG, [1, 2])}, CorruptSlideError),
            ({324: (LONG, []), 325: (LONG, [])}, SlideError),
            ({32997: (LONG, 5), 32998: (LONG, 5)}, SlideError),
        ],
    )
    def test_hostile_tags(self, tmp_path, more, error):
        path = write(tmp_path, page(slides.picture(80, 90), more=more))
        with pytest.raises(error, match=r"slide\.tif"):
            open_slide(path).close()

    @pytest.mark.parametrize(
        ("tag", "reason"),
        [
            ({277: (SHORT, 0)}, "is damaged (a value is missing); get"),
            ({256: (LONG, 0)}, "holds an image without pixels; get"),
        ],
    )
    def test_zeros_are_no_python_errors(self, tmp_path, tag, reason):
        description = '{"shape": [80, 90, 3]}'
        made = page(slides.picture(80, 90), more=tag, description=description)
        with pytest.raises(CorruptSlideError, match=re.escape(reason)):
            open_slide(write(tmp_path, made))

    @pytest.mark.parametrize("tile", [None, (32, 48)])
    def test_volume(self, tmp_path, tile):
        path = tmp_path / "slide.tif"
        tile = (4, 32, 48) if tile else None
        tifffile.imwrite(path, np.zeros((20, 64, 80), "u1"), tile=tile, volumetric=True)
        with pytest.raises(UnsupportedSlideError, match=r"a volume of 20 planes .* not supported"):
            open_slide(path)

    def test_uncompressed_ycbcr(self, tmp_path):
        pixels = slides.picture(80, 90)
        path = write(tmp_path, tiffbytes.page(pixels, bytes, photometric=6))
        with pytest.raises(UnsupportedSlideError, match="uncompressed YCbCr colors are not supp"):
            open_slide(path)

    def test_more_samples_than_there_are_bytes_for(self, tmp_path):
        path = write(tmp_path, page(slides.picture(80, 90), more={277: (SHORT, 6000)}))
        with open_slide(path) as slide, pytest.raises(TileError):
            slide.read_region((0, 0), (1, 1))

    @pytest.mark.parametrize("compression", ["jpeg", "zlib", "none"])
    def test_truncated_copy_reports_what_is_left(self, tmp_path, compression):
        pixels, path = slides.picture(96, 128), tmp_path / "slide.tif"
        tifffile.imwrite(path, pixels, tile=(32, 32), compression=compression, photometric="rgb")
        with tifffile.TiffFile(path) as file:
            starts, counts = file.pages.first.dataoffsets, file.pages.first.databytecounts
            whole = file.asarray()
        size, end = starts[9] + counts[9] // 2, starts[-1] + counts[-1]
        os.truncate(path, size)
        figures = f"{size} of at least {end} bytes"
        with open_slide(path) as slide:
            [problem] = slide.layout.problems
            assert problem.startswith(f"The file is truncated ({figures}): 3 of its 12 tiles")
            np.testing.assert_array_equal(slide.read_region((0, 0), (128, 64)), whole[:64])
            with pytest.raises(TileError, match="row 2, column 1") as caught:
                slide.read_region((0, 0), (128, 96))
        assert caught.value.failures[0][1] == f"the file is truncated ({figures})"
        assert "(and 2 more tiles)" in str(caught.value)

    def test_one_more_tile_is_one(self):
        error = TileError("a.tif", [("level 0, row 1, column 1", "x"), ("y", "z")])
        assert "(and 1 more tile): x." in str(error)

    @pytest.mark.parametrize("rows", [16, 4000])
    @pytest.mark.parametrize("claims", ["whole strips", "overflow"])
    def test_sizes_of_uncompressed_strips_may_be_too_large(self, tmp_path, rows, claims):
        pixels = slides.picture(101, 70)
        strips = tiffbytes.page(pixels, bytes, tile=None, rows_per_strip=rows)
        size = rows * 70 * 3 if claims == "whole strips" else (1 << 32) - 1
        strips.tags[279] = LONG, [size] * len(strips.segments)
        path = write(tmp_path, strips)
        with open_slide(path) as slide:
            assert slide.layout.problems == ()
            np.testing.assert_array_equal(slide.levels[0][...], tifffile.imread(path))
            np.testing.assert_array_equal(slide.levels[0][...], pixels)

    @pytest.mark.parametrize("compression", ["jpeg", "zlib"])
    @pytest.mark.parametrize("wrong", [[7], [11], range(12)])
    def test_sizes_of_compressed_tiles_may_be_too_large(self, tmp_path, compression, wrong):
        pixels, path = slides.picture(96, 128), tmp_path / "slide.tif"
        tifffile.imwrite(path, pixels, tile=(32, 32), compression=compression, photometric="rgb")
        expected = tifffile.imread(path)
        with tifffile.TiffFile(path, mode="r+") as file:
            counts = file.pages.first.tags[325]
            sizes = [(1 << 32) - 1 if i in wrong else size for i, size in enumerate(counts.value)]
            counts.overwrite(sizes, dtype=LONG)
        with open_slide(path) as slide:
            assert slide.layout.problems == ()
            np.testing.assert_array_equal(slide.levels[0][...], expected)
            assert slide.check_tiles() == TileCheck(12, (), ())
        for name in ("copy.tif", "copy.zarr"):
            convert(path, tmp_path / name)
            with open_slide(tmp_path / name) as copy:
                np.testing.assert_array_equal(copy.levels[0][...], expected)

    @pytest.mark.parametrize("planar", [False, True])
    def test_empty_tiles_with_a_position_are_reported(self, tmp_path, planar):
        pixels = slides.picture(96, 90)
        made = page(pixels, missing=[2, 5], planar=planar)
        path = write(tmp_path, made)
        with open_slide(path) as slide:
            assert slide.layout.problems == ()
            sparse = slide.levels[0][...]
        with tifffile.TiffFile(path) as file:
            made.tags[324] = LONG, [place or 8 for place in file.pages.first.dataoffsets]
        write(tmp_path, made)
        with open_slide(path) as slide:
            assert slide.layout.problems == (
                "2 tiles have a position in the file, but a size of 0 bytes; background is shown "
                "instead, which may hide damage.",
            )
            np.testing.assert_array_equal(slide.levels[0][...], sparse)

    def test_all_tiles_beyond_the_end(self, tmp_path):
        path = write(tmp_path, page(slides.picture(80, 90), more={324: (LONG, [10**8] * 6)}))
        with pytest.raises(CorruptSlideError, match="truncated"):
            open_slide(path)


def test_larger_associated_image_is_not_the_slide(tmp_path):
    path = tmp_path / "slide.tif"
    with tifffile.TiffWriter(path) as file:
        file.write(slides.picture(64, 96), photometric="rgb", description="A slide")
        file.write(slides.picture(200, 300), photometric="rgb", description="Macro of it")
        file.write(slides.picture(150, 150), photometric="rgb", description="x\nlabel 150x150")
    with open_slide(path) as slide:
        assert slide.dimensions == (96, 64)
    tifffile.imwrite(path, slides.picture(64, 96), photometric="rgb", description="Label")
    with open_slide(path) as slide:
        assert slide.dimensions == (96, 64)


@pytest.mark.parametrize("height", [0, 1])
def test_reduced_image_without_its_base_is_reported(tmp_path, height):
    pixels = slides.picture(64, 96)
    pages = [
        tiffbytes.page(pixels[::step, ::step], bytes, subfile_type=int(step > 1))
        for step in (1, 2, 4)
    ]
    path = tiffbytes.write(tmp_path / "a.tif", pages)
    with open_slide(path) as slide:
        assert not slide.layout.problems
    pages[0].tags[257] = (tiffbytes.LONG, height)
    tiffbytes.write(path, pages)
    with open_slide(path) as slide:
        assert slide.level_dimensions == ((48, 32), (24, 16))
        others, problem = slide.layout.problems
        assert others == f"1 more image(s) of the file are not shown: 96 x {height}."
        assert problem.startswith("The largest image is marked as a reduced version of another one")


def test_an_image_that_is_named_many_times_is_counted_as_often(tmp_path):
    """tifffile reads its tags as often: 512 times this one took half a minute."""
    path = tmp_path / "a.tif"
    options = {"tile": (16, 16), "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(np.zeros((64, 64), np.uint8), subifds=200, **options)
        many = (65000, "H", 20_000, (1,) * 20_000, True)
        file.write(np.zeros((32, 32), np.uint8), extratags=[many], subfiletype=1, **options)
        for _ in range(199):
            file.write(np.zeros((16, 16), np.uint8), subfiletype=1, **options)
    with open_slide(path) as slide:
        assert slide.dimensions == (64, 64)
    with tifffile.TiffFile(path, mode="r+") as file:
        tag = file.pages[0].tags[330]
        tag.overwrite([tag.value[0]] * 200)
    with pytest.raises(CorruptSlideError, match="claim more numbers than it can hold"):
        open_slide(path)


def named_below(path, count, **more):
    """Write an image with so many others below it, each with as many numbers as the last one."""
    options = {"tile": (16, 16), "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(np.zeros((64, 64), np.uint8), subifds=count, **options)
        for number in range(count):
            tags = [(65000, "H", 20_000, (1,) * 20_000, True)] if number == count - 1 else []
            file.write(np.zeros((16, 16), np.uint8), extratags=tags, subfiletype=1, **options)
    return path


def test_numbers_of_each_image_below_another_are_counted(tmp_path):
    """Of 512, of which 448 have the same 4 million numbers, opening took half a minute."""
    path = named_below(tmp_path / "a.tif", 200)
    with open_slide(path) as slide:
        assert slide.dimensions == (64, 64)
    with tifffile.TiffFile(path) as file:
        *others, last = file.pages[0].pages
        heavy = last.tags[65000]
        places = [page.tags["Software"].offset for page in others[-16:]]
    data = bytearray(path.read_bytes())
    for place in places:  # the numbers of the last image become theirs, too
        data[place : place + 12] = data[heavy.offset : heavy.offset + 12]
    path.write_bytes(data)
    with pytest.raises(CorruptSlideError, match="claim more numbers than it can hold"):
        open_slide(path)


def test_a_text_that_all_images_share_is_counted_for_each(tmp_path):
    """4000 images with one description of 8 MB took half a minute."""
    path = tmp_path / "a.tif"
    text = "x" * 100_000
    with tifffile.TiffWriter(path) as file:
        for number in range(40):
            pixels = np.zeros((16, 16 + number), np.uint8)
            said = text if number == 0 else "y" * 10
            file.write(pixels, description=said, metadata=None, contiguous=False)
    with open_slide(path) as slide:
        assert slide.dimensions == (55, 16)
    with tifffile.TiffFile(path) as file:
        first, *others = (page.tags[270].offset for page in file.pages)
    data = bytearray(path.read_bytes())
    for place in others:
        data[place : place + 12] = data[first : first + 12]
    path.write_bytes(data)
    with pytest.raises(CorruptSlideError, match="claim more numbers than it can hold"):
        open_slide(path)


class TestImagesThatAreEachLookedAt:
    """tifffile takes a time for them that grows with their number squared."""

    def write(self, path, first=16, pages=12, below=0):
        options = {"metadata": None, "contiguous": False}
        with tifffile.TiffWriter(path) as file:
            for number in range(pages):
                width = 16 if number else first
                file.write(np.zeros((16, width), np.uint8), subifds=below, **options)
                for _ in range(below):
                    file.write(np.zeros((8, 8), np.uint8), subfiletype=1, **options)
        return path

    @pytest.mark.parametrize("options", [{"first": 15}, {"pages": 6, "below": 1}])
    def test_too_many_are_refused(self, tmp_path, monkeypatch, options):
        path = self.write(tmp_path / "a.tif", **options)
        with open_slide(path) as slide:
            assert slide.dimensions == (16, 16)
        monkeypatch.setattr(limits, "pages", 11)
        with pytest.raises(UnsupportedSlideError, match=r"claims 12 images .* the limit is 11;"):
            open_slide(path)

    def test_many_similar_images_are_allowed(self, tmp_path, monkeypatch):
        path = self.write(tmp_path / "a.tif")
        monkeypatch.setattr(limits, "pages", 11)
        with open_slide(path) as slide:
            assert slide.layout.other_planes == 11

    def test_a_large_file_may_have_more(self, tmp_path, monkeypatch):
        path = self.write(tmp_path / "a.tif", first=15)
        monkeypatch.setattr(limits, "pages", 11)
        with path.open("ab") as file:
            file.truncate(12 * claims.IMAGE_BYTES)
        with open_slide(path) as slide:
            assert slide.dimensions == (16, 16)

    @pytest.mark.parametrize("vendor", ["generic", "aperio"])
    def test_too_many_tags(self, tmp_path, monkeypatch, vendor):
        tags = dict.fromkeys(range(65001, 65301), (tiffbytes.ASCII, "x"))
        said = slides.aperio_text(48, 32) if vendor == "aperio" else ""
        sides = [(32, 48), (16, 24)]
        pages = [
            page(slides.picture(*side), more=tags, description=said, tile=(16, 16))
            for side in sides
        ]
        path = write(tmp_path, *pages)
        with open_slide(path) as slide:
            assert slide.dimensions == (48, 32)
        monkeypatch.setattr(limits, "pages", 8)
        with pytest.raises(UnsupportedSlideError, match=r"2 images with 6\d\d tags"):
            open_slide(path)


def test_reduced_images_that_are_no_levels_are_reported(tmp_path):
    pixels, path = np.zeros((512, 640, 3), np.uint8), tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        for number, level in enumerate((pixels, pixels[::2, ::2], pixels[:200, :320])):
            options = {"tile": (64, 64), "photometric": "rgb", "subfiletype": int(number > 0)}
            file.write(level, metadata=None, **options)
    found = describe(path)
    assert found.problems == ("1 more image(s) of the file are not shown: 320 x 200.",)


def test_predictor_of_raw_samples_is_ignored(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    path = tmp_path / "a.tif"
    tags = [(317, 3, 1, 2, True)]
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", extratags=tags)
    with open_slide(path, "cpu") as slide, Image.open(path) as image:
        np.testing.assert_array_equal(slide.levels[0][...], np.asarray(image))
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
