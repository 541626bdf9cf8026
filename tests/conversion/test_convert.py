"""Results of `convert`, read with tifffile, zarr, OpenSlide and this package."""

import errno
import hashlib
import os
import shutil
import subprocess
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from napari_wsigpu import Slide, convert, open_slide
from napari_wsigpu.conversion.journal import Journal
from napari_wsigpu.model import errors
from tests import oracles
from tests.writers import dicomslides, slides, tiffbytes

KINDS = [
    ("out.tif", "raw"),
    ("out.tif", "deflate"),
    ("out.tif", None),
    ("out.ome.tif", "zstd"),
    ("out.zarr", "raw"),
    ("out.zarr", "lz4"),
]
FULL = Path("/dev/full")
BARE = {"thumbnail": False, "associated": ()}
LZ4_IS_NEW = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not:UserWarning")


def large_image(height, width):
    """Return a large image that is cheap to generate."""
    return np.tile(slides.picture(300, 500), (height // 300 + 1, width // 500 + 1, 1))[
        :height, :width
    ]


def aperio(path, height=300, width=500, **options):
    slides.write_aperio(path, large_image(height, width), (4,), tile=(64, 64), **options)
    return path


def planar(path, **options):
    pixels = np.moveaxis(slides.picture(150, 200), -1, 0)
    options = {"tile": (32, 32)} | options
    slides.write_pyramid(path, pixels, (), photometric="rgb", planarconfig="separate", **options)
    return path


def channels(path, dtype):
    pixels = np.moveaxis(slides.picture(150, 200, 4, dtype), -1, 0)
    names = {"axes": "CYX", "Channel": {"Name": ["a", "b", "c", "d"]}, "PhysicalSizeX": 0.5,
             "PhysicalSizeY": 0.25}  # fmt: skip
    slides.write_pyramid(path, pixels, subifds=True, metadata=names, photometric="minisblack")
    return path


def gray(path, dtype, byteorder=">"):
    pixels = slides.picture(150, 200, 1, dtype)[..., 0]
    slides.write_pyramid(path, pixels, (2,), metadata={"axes": "YX"}, byteorder=byteorder)
    return path


SOURCES = {
    "jpeg": lambda folder: aperio(folder / "s.svs"),
    "sparse": lambda folder: aperio(folder / "s.svs", missing=((0, 1, 8, 9, 39), (0,))),
    "planar": lambda folder: planar(folder / "s.tif"),
    "strips": lambda folder: planar(folder / "s.tif", tile=None, rowsperstrip=7),
    "rgba": lambda folder: (
        tifffile.imwrite(
            folder / "s.tif", slides.picture(150, 200, 4), photometric="rgb", tile=(64, 64)
        )
        or folder / "s.tif"
    ),
    **{
        dtype: lambda folder, dtype=dtype: channels(folder / "s.ome.tif", dtype)
        for dtype in ("uint16", "float32")
    },
    **{
        f"gray-{dtype}": lambda folder, dtype=dtype: gray(folder / "s.ome.tif", dtype)
        for dtype in ("uint8", "int16", "uint32", "float64")
    },
}


def pyramid_of(path):
    """Return all levels of a slide's pyramid, stored or computed."""
    with open_slide(path, "cpu") as slide:
        return [slide.level_array(level.number)[...] for level in slide.pyramid]


def zarr_levels(path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="r")
    [image] = group.attrs["ome"]["multiscales"]
    return [np.moveaxis(group[item["path"]][...], 0, -1) for item in image["datasets"]]


def tifffile_levels(path):
    levels = []
    with tifffile.TiffFile(path) as file:
        pages = [page.aspage() for page in file.pages]
        series = [[page] for page in pages if page.is_tiled]
        if file.is_ome:
            series = [level.pages for level in file.series[0].levels]
        for level in series:
            planes = [page.aspage().asarray() for page in level]
            first = level[0].aspage()
            if len(planes) > 1:
                levels.append(np.stack(planes, axis=-1))
            elif first.planarconfig == 2 and first.samplesperpixel > 1:
                levels.append(np.moveaxis(planes[0], 0, -1))
            else:
                levels.append(planes[0].reshape(*planes[0].shape[:2], -1))
    return levels


def assert_equal_levels(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@LZ4_IS_NEW
@pytest.mark.parametrize(("name", "compression"), KINDS)
@pytest.mark.parametrize("kind", SOURCES)
def test_pixels_survive(tmp_path, kind, name, compression):
    source = SOURCES[kind](tmp_path)
    target = tmp_path / name
    convert(source, target, compression=compression)
    expected = pyramid_of(source)
    if name.endswith(".zarr"):
        assert_equal_levels(zarr_levels(target), expected)
    else:
        assert_equal_levels(tifffile_levels(target), expected)
        with open_slide(target, "cpu") as slide:
            assert_equal_levels([level[...] for level in slide.levels], expected)
            assert slide.layout.problems == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, name])


@pytest.mark.parametrize("compression", ["raw", "deflate", "zstd", "jpeg", None])
def test_openslide_reads_the_same(tmp_path, compression):
    source, target = aperio(tmp_path / "s.svs", 1200, 1500, **BARE), tmp_path / "out.tif"
    convert(source, target, compression=compression)
    with open_slide(target, "cpu") as slide, openslide.OpenSlide(target) as other:
        assert other.properties["openslide.vendor"] == "generic-tiff"
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == pytest.approx(other.level_downsamples)
        assert slide.mpp == pytest.approx(
            [float(other.properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
        )
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], oracles.openslide_level(target, index))


@pytest.mark.parametrize("photometric", [8, 32803, 34892])  # CIELAB, CFA, LINEAR_RAW
@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
def test_planes_of_rare_color_spaces_are_copied(tmp_path, photometric, name):
    source, target = tmp_path / "s.tif", tmp_path / name
    options = {"compression": 8, "tile": (64, 64), "planar": True, "photometric": photometric}
    pixels = slides.picture(150, 200)
    tiffbytes.write(source, [tiffbytes.page(pixels, tiffbytes.deflate, **options)])
    assert convert(source, target).tiles_copied
    with open_slide(target, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


@pytest.mark.parametrize("missing", [(), (0,)])
@pytest.mark.parametrize("kind", ["jpeg rgb", "jpeg ycbcr"])
def test_openslide_reads_colors_of_copied_frames(tmp_path, kind, missing):
    options = {"kind": kind, "sparse": bool(missing), "missing": missing}
    dicomslides.write_slide(tmp_path / "s", slides.picture(150, 200), (), **options)
    target = tmp_path / "out.tif"
    assert convert(tmp_path / "s", target).tiles_copied == 12 - len(missing)
    with open_slide(tmp_path / "s", "cpu") as source, open_slide(target, "cpu") as slide:
        expected = source.levels[0][...]
        np.testing.assert_array_equal(slide.levels[0][...], expected)
    for place in ((64, 0), (0, 64), (64, 64)):
        part = expected[place[1] : place[1] + 64, place[0] : place[0] + 64]
        with openslide.OpenSlide(target) as other:
            rgba = np.asarray(other.read_region(place, 0, part.shape[1::-1]))
        assert np.abs(rgba[..., :3].astype(int) - part).max() <= 2


def test_openslide_is_not_confused_by_associated_images(tmp_path):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / "out.tif"
    convert(source, target, private=True)
    with open_slide(source, "cpu") as slide, openslide.OpenSlide(target) as other:
        assert other.level_dimensions == tuple(
            (level.layout.width, level.layout.height) for level in slide.pyramid
        )


def test_jpeg_tiles_are_copied(tmp_path):
    source, target = aperio(tmp_path / "s.svs", 700, 1100, **BARE), tmp_path / "out.tif"
    done = convert(source, target)
    assert (done.tiles_copied, done.tiles_encoded) == (11 * 18 + 3 * 5, 6 * 9)
    with tifffile.TiffFile(source) as one, tifffile.TiffFile(target) as other:
        pages = {page.shape: page.aspage() for page in other.pages}
        for page in one.pages:
            copy = pages[page.shape]
            assert copy.photometric == page.photometric
            assert copy.jpegtables == page.jpegtables
            for places in zip(
                page.dataoffsets, page.databytecounts, copy.dataoffsets, copy.databytecounts,
                strict=True,
            ):  # fmt: skip
                tiles = []
                for file, offset, count in ((one, *places[:2]), (other, *places[2:])):
                    file.filehandle.seek(offset)
                    tiles.append(file.filehandle.read(count))
                assert tiles[0] == tiles[1]


@pytest.mark.parametrize("compression", ["deflate", "zstd", "lzw", "lzma", "packbits", 34712])
@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
def test_other_tiles_are_copied(tmp_path, compression, name):
    source, target = tmp_path / "s.tif", tmp_path / name
    predictor = compression in ("deflate", "zstd", "lzw")
    [pixels] = slides.write_pyramid(
        source, slides.picture(100, 200), (), compression=compression, predictor=predictor,
        photometric="rgb",
    )  # fmt: skip
    done = convert(source, target)
    assert (done.tiles_copied, done.tiles_encoded) == (8, 0)
    assert_equal_levels(tifffile_levels(target), [pixels])


def test_chroma_subsampling_tag(tmp_path):
    source, target = tmp_path / "s.tif", tmp_path / "out.tif"
    tifffile.imwrite(
        source, slides.picture(128, 128), tile=(64, 64), compression="jpeg", subsampling=(2, 1),
        photometric="rgb",
    )  # fmt: skip
    assert convert(source, target).tiles_copied == 4
    with tifffile.TiffFile(target) as file:
        assert file.pages[0].subsampling == (2, 1)
    np.testing.assert_array_equal(oracles.tifffile_page(target), oracles.tifffile_page(source))


def test_explicit_quality_is_used(tmp_path):
    source = aperio(tmp_path / "s.svs", **BARE)
    sizes = []
    for quality in (30, 95):
        target = tmp_path / f"{quality}.tif"
        done = convert(source, target, compression="jpeg", quality=quality)
        assert done.tiles_copied == 0
        sizes.append(target.stat().st_size)
    assert sizes[0] < sizes[1] / 2
    found, expected = pyramid_of(target), pyramid_of(source)
    assert np.abs(found[0].astype(float) - expected[0]).mean() < 8


def test_sparse_tiles_stay_sparse(tmp_path):
    source = aperio(tmp_path / "s.svs", missing=((0, 1, 8, 9, 39), (0,)), **BARE)
    convert(source, tmp_path / "out.tif")
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        counts = np.array(file.pages[0].databytecounts)
    assert np.flatnonzero(counts == 0).tolist() == [0, 1, 8, 9, 39]


def test_averages_of_missing_tiles_are_missing(tmp_path):
    missing = [index for index in range(20 * 20) if index // 20 < 4 or index % 20 < 3]
    pixels = slides.picture(1280, 1280)
    slides.write_aperio(tmp_path / "s.svs", pixels, (), tile=(64, 64), missing=[missing], **BARE)
    convert(tmp_path / "s.svs", tmp_path / "out.tif", lossless=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        counts = np.reshape(file.pages[1].databytecounts, (10, 10))
        shown = file.pages[1].asarray()
    assert not counts[:2].any()
    assert not counts[:, 0].any()
    assert counts[2:, 1:].all()
    assert (shown[:128] == 255).all()  # from the tag GDAL_NODATA
    np.testing.assert_array_equal(shown, pyramid_of(tmp_path / "s.svs")[1])


def test_raw_tiles_are_aligned(tmp_path):
    convert(aperio(tmp_path / "s.svs"), tmp_path / "out.tif", compression="raw")
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        offsets = np.concatenate([page.dataoffsets for page in file.pages if page.is_tiled])
    assert (offsets % 4096 == 0).all()


def test_openslide_reads_raw_levels_of_a_slide_with_mixed_tile_sizes(tmp_path):
    source, target = tmp_path / "s.tif", tmp_path / "out.tif"
    fine = large_image(700, 900)
    with tifffile.TiffWriter(source) as file:
        file.write(fine, tile=(512, 512), photometric="rgb", compression="deflate")
        file.write(
            slides.average(fine, 2), tile=(64, 128), photometric="rgb", compression="deflate",
            subfiletype=1,
        )  # fmt: skip
    convert(source, target, compression="raw")
    expected = pyramid_of(source)
    assert len(expected) == 2
    with openslide.OpenSlide(target) as other:
        for index, pixels in enumerate(expected):
            found = other.read_region((0, 0), index, other.level_dimensions[index])
            np.testing.assert_array_equal(np.asarray(found)[..., :3], pixels)


@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_damaged_slide_leaves_no_files(tmp_path, name):
    source = aperio(tmp_path / "s.svs")
    with tifffile.TiffFile(source) as file:
        offset = file.pages[0].dataoffsets[7]
    with source.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(100))
    with pytest.raises(errors.TileError, match="row 0, column 7"):
        convert(source, tmp_path / name, compression="raw" if name == "out.tif" else "zstd")
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


REGIONS = [(0, 0, 500, 300), (64, 128, 128, 64), (8, 16, 203, 101), (128, 64, 372, 236)]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_a_region(tmp_path, region, name):
    source, target = aperio(tmp_path / "s.svs", **BARE), tmp_path / name
    done = convert(source, target, region=region)
    x, y, width, height = region
    expected = pyramid_of(source)[0][y : y + height, x : x + width]
    found = zarr_levels(target) if name == "out.zarr" else tifffile_levels(target)
    np.testing.assert_array_equal(found[0], expected)
    aligned = region != (8, 16, 203, 101)
    assert (done.tiles_copied > 0) == (aligned and name == "out.tif")


@pytest.mark.parametrize("x", [4, 2])
def test_coarser_levels_of_a_region(tmp_path, x):
    """They are the slide's own levels where possible, otherwise averages."""
    source, target = tmp_path / "s.svs", tmp_path / "out.tif"
    levels = slides.write_aperio(source, large_image(3000, 2400), (4,), tile=(240, 240), **BARE)
    convert(source, target, region=(x, 0, 2000, 3000), compression="raw")
    found = tifffile_levels(target)
    assert [level.shape[:2] for level in found] == [(3000, 2000), (1500, 1000), (750, 500)]
    with open_slide(source, "cpu") as slide:
        stored = slide.levels[1][:750, x // 4 : x // 4 + 500]
    assert levels[1].shape == (750, 600, 3)
    assert np.array_equal(found[2], stored) == (x % 4 == 0)
    if x % 4:
        np.testing.assert_array_equal(found[2], slides.average(found[1], 2))
    np.testing.assert_array_equal(found[1], slides.average(found[0], 2))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_becomes_the_first(tmp_path, level):
    source, target = aperio(tmp_path / "s.svs", 1800, 2100, **BARE), tmp_path / "out.tif"
    with open_slide(source, "cpu") as slide:
        numbers = [item.number for item in slide.pyramid]
        mpp = slide.mpp[0] * slide.pyramid[numbers.index(level)].layout.downsample(
            slide.layout.levels[0]
        )
    convert(source, target, level=level, lossless=True)
    expected = pyramid_of(source)[numbers.index(level) :]
    assert_equal_levels(tifffile_levels(target), expected)
    with open_slide(target, "cpu") as slide:
        assert slide.mpp[0] == pytest.approx(mpp)


def test_tile_size_and_levels(tmp_path):
    source = aperio(tmp_path / "s.svs", 1800, 2100)
    convert(source, tmp_path / "out.tif", tile_size=128, levels=2)
    with open_slide(tmp_path / "out.tif", "cpu") as slide:
        assert slide.level_count == 2
        assert {level.layout.grid.tile_width for level in slide.levels} == {128}
    assert_equal_levels(pyramid_of(tmp_path / "out.tif")[:2], pyramid_of(source)[:2])


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_background_chunks_are_not_written(tmp_path, dtype):
    source, target = tmp_path / "s.tif", tmp_path / "out.zarr"
    pixels = slides.picture(200, 200, 1, dtype)[..., 0] + 1
    pixels[64:128, :64] = 0
    pixels[64:128, 64:128] = -0.0 if dtype == "float32" else 1
    tifffile.imwrite(source, pixels, tile=(64, 64), compression="deflate")
    convert(source, target, compression="raw")
    chunks = {path.relative_to(target / "0/c/0").as_posix() for path in (target / "0").rglob("?/?")}
    assert "1/0" not in chunks
    assert "1/1" in chunks
    [found] = zarr_levels(target)
    assert found[..., 0].tobytes() == pixels.tobytes()


def test_shards(tmp_path):
    source, target = aperio(tmp_path / "s.svs", 700, 900, **BARE), tmp_path / "out.zarr"
    convert(source, target, shard=4)
    assert_equal_levels(zarr_levels(target), pyramid_of(source))
    assert len([path for path in (target / "0" / "c").rglob("*") if path.is_file()]) == 3 * 4


def test_an_open_slide_stays_open(tmp_path):
    with open_slide(aperio(tmp_path / "s.svs"), "cpu") as slide:
        convert(slide, tmp_path / "out.tif")
        assert slide.levels[0][:8, :8].shape == (8, 8, 3)


def test_progress_counts_all_tiles(tmp_path):
    seen = []
    done = convert(
        aperio(tmp_path / "s.svs"),
        tmp_path / "out.tif",
        progress=lambda count, total: seen.append((count, total)),
    )
    total = done.tiles_copied + done.tiles_encoded
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_file_checksum_matches_sha256sum(tmp_path):
    done = convert(aperio(tmp_path / "s.svs"), tmp_path / "out.tif")
    assert done.checksum == hashlib.sha256((tmp_path / "out.tif").read_bytes()).hexdigest()


def test_folder_checksum_matches_sha256sum(tmp_path):
    pytest.importorskip("zarr")
    done = convert(aperio(tmp_path / "s.svs"), tmp_path / "out.zarr")
    command = "find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    found = subprocess.run(
        command, shell=True, cwd=tmp_path / "out.zarr", capture_output=True, check=False
    )
    if found.returncode:
        pytest.skip("the shell has no sha256sum")
    assert found.stdout.split()[0].decode() == done.checksum


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
def test_result_is_reproducible(tmp_path, name):
    source = aperio(tmp_path / "s.svs", 700, 900)
    sums = {
        convert(source, tmp_path / name, overwrite=True, workers=workers).checksum
        for workers in (1, 4)
    }
    assert len(sums) == 1


def test_ome_uuid_depends_on_the_content(tmp_path):
    def uuid(source, **options):
        convert(source, tmp_path / "out.ome.tif", overwrite=True, **options)
        with tifffile.TiffFile(tmp_path / "out.ome.tif") as file:
            return ElementTree.fromstring(file.ome_metadata).get("UUID")

    first, other = aperio(tmp_path / "s.svs"), aperio(tmp_path / "t.svs", 310, 500)
    names = [uuid(first), uuid(first, compression="zstd"), uuid(first, levels=1), uuid(other)]
    assert len(set(names)) == 4
    first.rename(tmp_path / "moved.svs")
    assert uuid(tmp_path / "moved.svs") == names[0]


@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_overwriting(tmp_path, name):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / name
    first = convert(source, target, tile_size=32)
    with pytest.raises(errors.TargetExistsError, match="already exists"):
        convert(source, target)
    second = convert(source, target, overwrite=True, tile_size=64)
    assert first.checksum != second.checksum
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "s.svs"])


REFUSALS = {
    "name": ("out.gif", {}, "use one that ends in"),
    "jpeg": ("out.zarr", {"compression": "jpeg"}, "OME-Zarr does not support"),
    "lz4": ("out.tif", {"compression": "lz4"}, "use raw, jpeg, deflate or zstd"),
    "tile": ("out.tif", {"tile_size": 100}, "multiple of 16"),
    "huge tile": ("out.tif", {"tile_size": 1 << 20}, "from 16 to 4096"),
    "quality": ("out.tif", {"quality": 0}, "from 1 to 100"),
    "quality without JPEG": ("out.tif", {"quality": 80}, "JPEG only; choose"),
    "quality of Zarr": ("out.zarr", {"quality": 80, "compression": "zstd"}, "JPEG only"),
    "levels": ("out.tif", {"levels": 0}, "from 1 to"),
    "text": ("out.tif", {"tile_size": "256"}, "an integer"),
    "region": ("out.tif", {"region": (0, 0, 501, 10)}, r"beyond the slide \(500 x 300"),
    "negative": ("out.tif", {"region": (-1, 0, 5, 10)}, "beyond the slide"),
    "empty": ("out.tif", {"region": (0, 0, 0, 10)}, "is empty"),
    "region's length": ("out.tif", {"region": (0, 0, 10)}, "four integers"),
    "workers": ("out.tif", {"workers": 0}, "from 1 to 1024"),
    "shard": ("out.tif", {"shard": 2}, "OME-Zarr"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_options_raise(tmp_path, case):
    name, options, words = REFUSALS[case]
    source = aperio(tmp_path / "s.svs")
    with pytest.raises(errors.ConversionError, match=words):
        convert(source, tmp_path / name, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


def test_missing_level_raises(tmp_path):
    with pytest.raises(errors.LevelError, match=r"has no level 7; it has 2 levels, 0 to 1\.$"):
        convert(aperio(tmp_path / "s.svs"), tmp_path / "out.tif", level=7)


@pytest.mark.parametrize("name", ["out.tif", "out.zarr", "out.png"])
@pytest.mark.parametrize("kind", ["file", "folder", "folder of a journal"])
def test_foreign_files_at_the_partial_path_are_kept(tmp_path, name, kind):
    source, part = aperio(tmp_path / "s.svs"), tmp_path / f"{name}.part"
    mine = part if kind == "file" else part / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    if kind == "folder of a journal":
        (part / "journal").write_text("today")
    with pytest.raises(errors.TargetExistsError, match=r"\.part' exists but is not"):
        convert(source, tmp_path / name)
    assert mine.read_text() == "mine"
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("left", [b"", b"\x89PN", b"\x89PNG\r\n\x1a\n and more"])
def test_partial_png_is_replaced(tmp_path, left):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / "out.png"
    (tmp_path / "out.png.part").write_bytes(left)
    convert(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.png", "s.svs"]


def test_png_starts_again_after_a_full_disk(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.TargetWriteError, match=r"free some space and try again\.$"):
        convert(aperio(tmp_path / "s.svs"), tmp_path / "out.png")
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


def test_jpeg_of_16_bit(tmp_path):
    with pytest.raises(errors.ConversionError, match="use deflate, zstd or raw"):
        convert(gray(tmp_path / "s.ome.tif", "uint16"), tmp_path / "out.tif", compression="jpeg")


@pytest.mark.parametrize("link", [False, True])
def test_the_source_is_not_overwritten(tmp_path, link):
    source = aperio(tmp_path / "s.tif")
    target = tmp_path / "link.tif" if link else source
    if link:
        target.symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(errors.ConversionError, match="is the slide itself"):
        convert(source, target, overwrite=True)
    assert source.read_bytes() == before


def test_url_target_raises_without_showing_credentials(tmp_path):
    with pytest.raises(errors.ConversionError, match="is a URL; convert to a local path") as caught:
        convert(aperio(tmp_path / "s.svs"), "https://key:secret@server/out.tif?token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_numpy_numbers_as_options(tmp_path, name):
    source = aperio(tmp_path / "s.svs")
    plain = {"region": (10, 20, 200, 100), "tile_size": 64, "levels": 2, "level": 0, "workers": 1}
    numpys = {key: np.asarray(value)[()] for key, value in plain.items()}
    expected = convert(source, tmp_path / f"plain.{name}", compression="zstd", **plain)
    found = convert(source, tmp_path / name, compression="zstd", **numpys)
    assert found.checksum == expected.checksum


def test_missing_folder_raises(tmp_path):
    with pytest.raises(errors.TargetWriteError, match="does not exist; create it"):
        convert(aperio(tmp_path / "s.svs"), tmp_path / "no" / "out.tif")


@pytest.fixture
def full_disk(monkeypatch):
    """Make the disk report that it is full."""
    usage = namedtuple("usage", "free")

    def fill():
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(123_456))

    return fill


@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_no_space(tmp_path, full_disk, name):
    source = aperio(tmp_path / "s.svs")
    full_disk()
    with pytest.raises(
        errors.TargetWriteError, match=r"has only 123\.5 kB free, .* needs at least 1\d\.\d+ MB;"
    ):
        convert(source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


def test_no_space_to_resume(tmp_path, full_disk):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / "out.tif"

    def stop(done, total):
        if done > 5:
            full_disk()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, compression="raw", progress=stop)
    written = (tmp_path / "out.tif.part" / "data").read_bytes()
    with pytest.raises(errors.TargetWriteError, match="kB free"):
        convert(source, target, compression="raw")
    assert (tmp_path / "out.tif.part" / "data").read_bytes() == written


def test_disk_fills_up_during_the_conversion(tmp_path, monkeypatch):
    write, calls = os.write, []

    def full(handle, data):
        calls.append(len(data))
        if len(calls) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    source = aperio(tmp_path / "s.svs")
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(errors.TargetWriteError, match="No space is left") as failed:
            convert(source, tmp_path / "out.tif")
    part = tmp_path / "out.tif.part"
    assert failed.value.__notes__ == [
        f"The partial result is in '{part}'; run the conversion again to resume it."
    ]
    assert sorted(tmp_path.iterdir()) == [part, source]
    done = convert(source, tmp_path / "out.tif")
    assert done.tiles_found == 9  # writes after those of the pages
    assert_equal_levels(tifffile_levels(tmp_path / "out.tif"), pyramid_of(source))


@pytest.mark.skipif(not FULL.exists(), reason="the system has no full disk to write to")
def test_disk_is_too_full_for_the_journal(tmp_path, monkeypatch):
    source = aperio(tmp_path / "s.svs")
    commit = Journal.commit

    def full(self):
        self._file.close()
        self._file = FULL.open("r+b")
        commit(self)

    monkeypatch.setattr("napari_wsigpu.conversion.convert_slide.COMMIT_SECONDS", -1)
    monkeypatch.setattr(Journal, "commit", full)
    with pytest.raises(errors.TargetWriteError, match="No space is left"):
        convert(source, tmp_path / "out.tif")
    assert not (tmp_path / "out.tif").exists()
    monkeypatch.setattr(Journal, "commit", commit)
    convert(source, tmp_path / "out.tif")
    assert_equal_levels(tifffile_levels(tmp_path / "out.tif"), pyramid_of(source))


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr", "out.png"])
def test_result_has_default_permissions(tmp_path, name):
    other = tmp_path / "other"
    other.touch()
    convert(aperio(tmp_path / "s.svs"), tmp_path / name)
    found = tmp_path / name
    [file] = [found] if found.is_file() else [found / "zarr.json"]
    assert file.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize("name", ["out.tif", "out.png"])
def test_dangling_link_is_not_overwritten(tmp_path, name):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / name
    target.symlink_to(tmp_path / "gone")
    with pytest.raises(errors.TargetExistsError, match="already exists"):
        convert(source, target)
    assert target.is_symlink()
    convert(source, target, overwrite=True)
    assert not target.is_symlink()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_read_only_folder_raises(tmp_path, monkeypatch, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    source = aperio(tmp_path / "s.svs")
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(
        errors.TargetWriteError, match=r"permission to write .* choose another folder"
    ):
        convert(source, tmp_path / "out.tif")


def test_keep_false_removes_the_partial_result(tmp_path):
    source = aperio(tmp_path / "s.svs", 1500, 1500)

    def change(done, total):
        if done > 10:
            source.write_bytes(b"another")

    options = {"compression": "raw", "progress": change}
    with pytest.raises(errors.SlideError) as failed:
        convert(source, tmp_path / "out.tif", **options, keep=False)
    assert not hasattr(failed.value, "__notes__")
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


@pytest.mark.parametrize("compression", [None, "raw"])
@pytest.mark.parametrize("cut", [False, True])
def test_error_names_the_damaged_tile(tmp_path, compression, cut):
    source = tmp_path / "s.tif"
    slides.write_pyramid(source, slides.picture(200, 200), (), photometric="rgb")
    with tifffile.TiffFile(source) as file:
        offset = file.pages[0].dataoffsets[-1]
    data = source.read_bytes()
    source.write_bytes(data[: offset + 10] + (b"" if cut else bytes(len(data) - offset - 10)))
    with pytest.raises(errors.TileError, match="level 0, row 3, column 3"):
        convert(source, tmp_path / "out.tif", compression=compression)
    assert not (tmp_path / "out.tif").exists()


def test_source_ends_within_a_copied_tile(tmp_path):
    source = aperio(tmp_path / "s.svs", **BARE)
    with open_slide(source, "cpu") as slide:
        layout = slide.layout
    grid = layout.levels[0].grid
    offsets = grid.offsets.copy()
    offsets[0, 2, 3] = layout.file_size - 5
    first = replace(layout.levels[0], grid=replace(grid, offsets=offsets))
    with (
        Slide(replace(layout, levels=(first, *layout.levels[1:])), "cpu") as slide,
        pytest.raises(errors.TileError, match=r"level 0, row 2, column 3.*ends within"),
    ):
        # Otherwise it would be encoded again, as the tile overlaps the last tag of the file.
        convert(slide, tmp_path / "out.tif", private=True)
    assert not (tmp_path / "out.tif").exists()


def test_cancelling_leaves_no_files(tmp_path, leaves_nothing):
    cancelled = threading.Event()

    def progress(done, total):
        if done > 3:
            cancelled.set()

    with pytest.raises(errors.ConversionCancelledError):
        convert(
            aperio(tmp_path / "s.svs"),
            tmp_path / "out.tif",
            compression="raw",
            progress=progress,
            cancelled=cancelled,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


def test_nothing_is_left_open(tmp_path, leaves_nothing):
    convert(aperio(tmp_path / "s.svs"), tmp_path / "out.tif", compression="deflate")


OTHERS = [
    "keep.txt",
    "labels/keep.txt",
    "7/keep.txt",
    "7/0/zarr.json",
    "0/keep.txt",
    "icc_profile/keep.txt",
    "associated/keep.txt",
    "associated/mine/keep.txt",
]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("converted", [False, True])
def test_a_folder_of_other_files_is_never_overwritten(tmp_path, name, converted):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / "out.zarr"
    if converted:
        pytest.importorskip("zarr")
        convert(source, target, private=True)
    kept = target / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("mine")
    with pytest.raises(
        errors.TargetExistsError, match=rf"can't be overwritten.*such as .{name.partition('/')[0]}"
    ):
        convert(source, target, overwrite=True)
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("name", ["labels", "associated/mine"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_created_during_the_conversion_is_kept(tmp_path, name, overwrite):
    pytest.importorskip("zarr")
    source, target = aperio(tmp_path / "s.svs"), tmp_path / "out.zarr"
    if overwrite:
        convert(source, target)
    kept = target / name / "mine.txt"

    def other(done, total):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("mine")

    with pytest.raises(errors.TargetExistsError):
        convert(source, target, overwrite=overwrite, progress=other)
    assert kept.read_text() == "mine"
    kept.rename(tmp_path / "mine.txt")
    shutil.rmtree(target)
    done = convert(source, target)
    assert done.tiles_copied == done.tiles_encoded == 0
    assert_equal_levels(zarr_levels(target), pyramid_of(source))


@pytest.mark.parametrize("name", ["out.tif", "out.png"])
def test_file_created_during_the_conversion_is_kept(tmp_path, name):
    source, target = aperio(tmp_path / "s.svs"), tmp_path / name
    with pytest.raises(errors.TargetExistsError, match="already exists"):
        convert(source, target, progress=lambda done, total: target.write_text("mine"))
    assert target.read_text() == "mine"


def test_overwriting_replaces_a_link_but_not_its_folder(tmp_path):
    pytest.importorskip("zarr")
    source, target, real = aperio(tmp_path / "s.svs"), tmp_path / "out.zarr", tmp_path / "real.zarr"
    convert(source, real, tile_size=32)
    target.symlink_to(real)
    convert(source, target, overwrite=True, tile_size=64)
    assert not target.is_symlink()
    assert not (tmp_path / "out.zarr.part").exists()
    for folder in (target, real):
        assert_equal_levels(zarr_levels(folder), pyramid_of(source))


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("x" * 300 + ".tif", errors.TargetWriteError, "can't be written"),
        ("a\0.tif", errors.ConversionError, "is not a valid path"),
        (b"out.tif", None, ""),
    ],
)
def test_names_of_targets(tmp_path, monkeypatch, target, error, words):
    monkeypatch.chdir(tmp_path)
    source = aperio(tmp_path / "s.svs")
    if error is None:
        assert convert(source, target, private=np.True_).path == str(tmp_path / "out.tif")
        return
    with pytest.raises(error, match=words):
        convert(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["s.svs"]


def test_a_palette_is_applied(tmp_path):
    source = tmp_path / "s.tif"
    numbers = slides.picture(200, 180)[..., 0]
    colors = np.arange(768, dtype=np.uint16).reshape(3, 256) * 80
    tifffile.imwrite(
        source,
        numbers,
        photometric="palette",
        colormap=colors,
        tile=(64, 64),
    )
    done = convert(source, tmp_path / "out.tif")
    assert (done.tiles_copied, done.tiles_encoded) == (0, 12)
    shown = (colors[:, numbers] >> 8).transpose(1, 2, 0)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "out.tif"), shown)
    with Image.open(tmp_path / "out.tif") as image:
        np.testing.assert_array_equal(np.asarray(image), shown)


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
def test_white_is_zero_is_kept(tmp_path, name):
    source = tmp_path / "s.tif"
    pixels = slides.picture(200, 180)[..., 0]
    slides.write_pyramid(source, pixels, (2,), photometric="miniswhite")
    convert(source, tmp_path / name)
    convert(tmp_path / name, tmp_path / "back.tif")
    with open_slide(tmp_path / name, "cpu") as slide, tifffile.TiffFile(tmp_path / "back.tif") as t:
        assert slide.layout.levels[0].encoding.photometric == t.pages[0].photometric == 0
        np.testing.assert_array_equal(slide.levels[0][..., 0], pixels)
        np.testing.assert_array_equal(t.pages[0].asarray(), pixels)


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.zarr"])
@pytest.mark.parametrize("together", [True, False])
def test_extra_samples_after_rgb(tmp_path, name, together):
    source = tmp_path / "s.tif"
    pixels = slides.picture(100, 90, 5)
    tifffile.imwrite(
        source,
        pixels if together else np.moveaxis(pixels, -1, 0),
        photometric="rgb",
        planarconfig="contig" if together else "separate",
        extrasamples=(0, 0),
        tile=(32, 32),
        compression="zlib",
    )
    convert(source, tmp_path / name)
    with open_slide(tmp_path / name, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


@pytest.mark.parametrize("dtype", ["float16", "int64", "uint64"])
def test_types_that_ome_lacks_raise(tmp_path, dtype):
    source = tmp_path / "s.tif"
    tifffile.imwrite(source, np.ones((100, 90), dtype), tile=(32, 32))
    with pytest.raises(errors.ConversionError, match=f"the pixel type {dtype} .*ending in .tif"):
        convert(source, tmp_path / "out.ome.tif")
    convert(source, tmp_path / "out.tif")
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.pages[0].asarray().dtype == dtype
