"""JPEGs on the CPU, many at a time."""

import io
import subprocess
import sys
import threading
from functools import cache

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from napari_wsigpu import open_slide
from napari_wsigpu.codecs.jpeg import header_length, segments
from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.gpu.jpeg import host_jpegs, jpeg_rows
from napari_wsigpu.gpu.jpeg.host_jpegs import HostJpegs, host_library
from napari_wsigpu.gpu.jpeg.library import Library
from napari_wsigpu.gpu.jpeg.library_handles import LibraryParts
from napari_wsigpu.model.errors import DeviceError, SlideClosedError, TileError
from napari_wsigpu.slide.runtime import Runtime
from tests.fakes.host_device import library
from tests.writers import slides, tiffbytes

pytest.importorskip("nvidia.nvimgcodec")

HEIGHT, WIDTH = 200, 290
TILE = (32, 48)
TILES = 7 * 7
on_host = cache(host_library)
THREADS = host_jpegs.FEW_CORES + 1
COLORS = {
    "4:2:0": {"photometric": 6, "encode": slides.jpeg_ycbcr},
    "4:2:2": {"photometric": 6, "encode": lambda tile: slides.jpeg_ycbcr(tile, "422")},
    "4:4:4": {"photometric": 6, "encode": lambda tile: slides.jpeg_ycbcr(tile, "444")},
    "RGB": {"photometric": 2, "encode": slides.jpeg},
    "RGB without a word": {
        "photometric": 2,
        "encode": lambda tile: silent(slides.jpeg(tile)),
    },
    "gray": {"photometric": 1, "encode": slides.jpeg},
}


def silent(data):
    """Leave out what a JPEG says of its colours."""
    kept = [data[start:end] for marker, start, end in segments(data) if marker not in (0xE0, 0xEE)]
    return data[:2] + b"".join(kept) + data[header_length(data) :]


@pytest.fixture
def own_runtime():
    """A machine without a GPU, whose library is loaded."""
    runtime = Runtime(Devices(has_driver=lambda: False, library=on_host))
    assert runtime.devices.jpegs.wait()
    yield runtime
    runtime.close()


@pytest.fixture
def batches(monkeypatch):
    """How many tiles each call decoded well."""
    found = []
    decode = jpeg_rows.JpegRows.decode

    def counted(self, numbers, *others):
        worked = decode(self, numbers, *others)
        found.append(sum(worked))
        return worked

    monkeypatch.setattr(jpeg_rows.JpegRows, "decode", counted)
    return found


@pytest.fixture
def parts(monkeypatch):
    """The parts of tiles that were decoded to where they go."""
    found = []
    add = LibraryParts.add

    def counted(self, streams, parts):
        found.extend(parts.addresses.tolist())
        return add(self, streams, parts)

    monkeypatch.setattr(LibraryParts, "add", counted)
    return found


def write(path, *, encode, tables=False, spoilt=None, **options):
    """Write one level of JPEGs, with tables of their own or shared ones."""
    channels = 1 if options["photometric"] == 1 else 3
    pixels = slides.picture(HEIGHT, WIDTH, channels)
    count, more = [], {}
    if tables:
        shared, _ = slides.split_tables(encode(pixels[: TILE[0], : TILE[1]]))
        more = {347: (7, shared)}

    def encoded(tile):
        data = encode(tile)
        if tables:
            data = slides.split_tables(data)[1]
        if spoilt is not None:
            data = spoilt(len(count), data)
        count.append(data)
        return data

    page = tiffbytes.page(pixels, encoded, compression=7, tile=TILE, more=more, **options)
    return tiffbytes.write(path, [page])


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("colors", COLORS)
@pytest.mark.parametrize("at_once", [10, 128])
def test_pixels_are_those_of_tifffile(
    tmp_path, monkeypatch, own_runtime, batches, colors, tables, at_once
):
    monkeypatch.setattr(jpeg_rows, "AT_ONCE", at_once)
    path = write(tmp_path / "slide.tif", tables=tables, **COLORS[colors])
    expected = tifffile.imread(path).reshape(HEIGHT, WIDTH, -1)
    with open_slide(path, threads=THREADS, runtime=own_runtime) as slide:
        read = slide.read_region((0, 0), (WIDTH, HEIGHT))
        np.testing.assert_array_equal(read, expected)
        assert sum(batches) == TILES
        (patches,) = slide.read_regions([(5, 7), (100, 90)], (64, 60), batch_size=2)
        np.testing.assert_array_equal(patches[1], expected[90:150, 100:164])
        assert sum(batches) == TILES  # they were kept


def test_patches_of_which_no_tile_is_kept(tmp_path, own_runtime, batches):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    expected = tifffile.imread(path)
    places = [(x, y) for y in range(3, 140, 31) for x in range(2, 230, 43)]
    with open_slide(path, threads=THREADS, runtime=own_runtime) as slide:
        (read,) = slide.read_regions(places, (50, 40), batch_size=len(places))
    for (x, y), patch in zip(places, read, strict=True):
        np.testing.assert_array_equal(patch, expected[y : y + 40, x : x + 50])
    assert sum(batches) > host_jpegs.FEWEST


def progressive(tile):
    """Encode a tile in several scans, and with restart markers."""
    buffer = io.BytesIO()
    image = Image.fromarray(tile)
    image.save(
        buffer, "jpeg", quality=85, subsampling="4:2:0", progressive=True, restart_marker_blocks=2
    )
    return buffer.getvalue()


PARTS = {**COLORS, "progressive": {"photometric": 6, "encode": progressive}}


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("colors", PARTS)
def test_parts_of_tiles_go_where_they_belong(tmp_path, own_runtime, parts, colors, tables):
    path = write(tmp_path / "slide.tif", tables=tables, **PARTS[colors])
    expected = tifffile.imread(path).reshape(HEIGHT, WIDTH, -1)
    rng = np.random.default_rng(3)
    for _ in range(6):
        x, y = int(rng.integers(-9, 60)), int(rng.integers(-9, 50))
        with open_slide(path, threads=THREADS, runtime=own_runtime) as slide:
            (read,) = slide.read_regions([(x, y)], (230, 150))
        around = np.pad(expected, ((9, 9), (9, 9), (0, 0)))
        np.testing.assert_array_equal(read, around[y + 9 : y + 159, x + 9 : x + 239])
    assert len(parts) > 6 * 24


def test_few_threads_decode_small_parts(tmp_path, own_runtime, parts):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    expected = tifffile.imread(path)
    places = [(x, y) for y in range(22, 180, 64) for x in range(36, 270, 96)]
    with open_slide(path, threads=2, runtime=own_runtime) as slide:
        (read,) = slide.read_regions(places, (20, 20), batch_size=len(places))
    for (x, y), patch in zip(places, read, strict=True):
        np.testing.assert_array_equal(patch, expected[y : y + 20, x : x + 20])
    assert parts


def test_parts_of_which_a_tile_is_damaged(tmp_path, own_runtime, parts):
    path = write(
        tmp_path / "slide.tif",
        spoilt=lambda index, data: data[: len(data) // 2] if index == 9 else data,
        **COLORS["4:2:0"],
    )
    places = [(x, y) for y in range(3, 140, 31) for x in range(2, 230, 43)]
    with open_slide(path, threads=THREADS, runtime=own_runtime) as slide:
        with pytest.raises(TileError, match=r"row 1, column 2.*end early"):
            list(slide.read_regions(places, (50, 40), batch_size=len(places)))
        slide.clear_cache()
        assert parts
        sound = [(x, y) for x, y in places if y >= 64]
        (read,) = slide.read_regions(sound, (50, 40), batch_size=len(sound))
    expected = tifffile_but(path, 9)
    for (x, y), patch in zip(sound, read, strict=True):
        np.testing.assert_array_equal(patch, expected[y : y + 40, x : x + 50])


def tifffile_but(path, spoilt):
    """Return the pixels of all tiles but one."""
    pixels = np.zeros((7 * TILE[0], 7 * TILE[1], 3), np.uint8)
    for number, data in enumerate(segments_of(path)):
        row, column = divmod(number, 7)
        if number != spoilt:
            y, x = row * TILE[0], column * TILE[1]
            pixels[y : y + TILE[0], x : x + TILE[1]] = imagecodecs.jpeg8_decode(data)
    return pixels


@pytest.mark.parametrize("threads", [1, THREADS - 1])
def test_few_threads_decode_whole_tiles_by_themselves(tmp_path, own_runtime, batches, threads):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    with open_slide(path, threads=threads, runtime=own_runtime) as slide:
        slide.read_region((0, 0), (WIDTH, HEIGHT))
    assert batches == []


def test_the_library_says_nothing_of_what_gpus_lack():
    """On a machine without one."""
    program = "from napari_wsigpu.gpu.jpeg.host_jpegs import host_library; host_library()"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_an_extension_that_is_not_there():
    with pytest.raises(DeviceError, match=r"lacks its extension 'none'; install it anew\.$"):
        Library("none")


def test_without_the_library(tmp_path, batches):
    def missing():
        raise DeviceError("nvImageCodec is not installed.")

    runtime = Runtime(Devices(has_driver=lambda: False, library=missing))
    assert not runtime.devices.jpegs.wait()
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    with open_slide(path, threads=THREADS, runtime=runtime) as slide:
        read = slide.read_region((0, 0), (WIDTH, HEIGHT))
    np.testing.assert_array_equal(read, tifffile.imread(path))
    assert batches == []
    runtime.close()


def test_nobody_waits_for_the_library(tmp_path, batches):
    loading, ready = threading.Event(), threading.Event()

    def slow():
        loading.set()
        ready.wait(30)
        return library()

    runtime = Runtime(Devices(has_driver=lambda: False, library=slow))
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    with open_slide(path, threads=THREADS, runtime=runtime) as slide:
        slide.read_region((0, 0), (WIDTH, HEIGHT))
        assert loading.wait(10)
        assert batches == []
        ready.set()
        assert runtime.devices.jpegs.wait()
        slide.clear_cache()
        slide.read_region((0, 0), (WIDTH, HEIGHT))
        assert sum(batches) == TILES
    runtime.close()


SMALL = slides.jpeg_ycbcr(slides.picture(16, 16))
LARGE = slides.jpeg_ycbcr(slides.picture(96, 96))
GRAY = slides.jpeg(slides.picture(*TILE, 1))
# What a tile is replaced by, and what is said of it; None if it is decoded all the same.
SPOILT = {
    "cut short": (lambda data: data[: len(data) // 2], "end early"),
    "of another size": (lambda data: SMALL, "row 0, column 0"),
    "larger": (lambda data: LARGE, "row 0, column 0"),
    "of one component": (lambda data: GRAY, None),
    "without a beginning": (lambda data: b"\0\0" + data[2:], "row 0, column 0"),
    "empty picture": (lambda data: b"\xff\xd8\xff\xd9", "row 0, column 0"),
    "of other tables": (
        lambda data: slides.jpeg(
            slides.picture(*TILE), level=50, outcolorspace="YCBCR", subsampling="420"
        ),
        None,
    ),
    "padded": (lambda data: data + b"\0\0\0", None),
    "with a comment": (lambda data: data[:2] + b"\xff\xfe\0\4hi" + data[2:], None),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_tiles_that_are_not_alike(tmp_path, own_runtime, batches, kind):
    spoil, reason = SPOILT[kind]
    path = write(
        tmp_path / "slide.tif",
        spoilt=lambda index, data: spoil(data) if index in (0, 17) else data,
        **COLORS["4:2:0"],
    )
    with open_slide(path, threads=THREADS, runtime=own_runtime) as slide:
        if reason is None:
            read = slide.read_region((0, 0), (WIDTH, HEIGHT))
            np.testing.assert_array_equal(read, tifffile.imread(path))
        else:
            with pytest.raises(TileError, match=reason) as caught:
                slide.read_region((0, 0), (WIDTH, HEIGHT))
            assert "and 1 more" in str(caught.value)
        assert sum(batches) >= TILES - 2
        # The others are as they should be, whatever their neighbours are.
        tile = slide.read_region((48, 0), (48, 32))
        np.testing.assert_array_equal(tile, imagecodecs.jpeg8_decode(segments_of(path)[1]))


def segments_of(path):
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        data = path.read_bytes()
        places = zip(page.dataoffsets, page.databytecounts, strict=True)
        return [data[start : start + count] for start, count in places]


def test_closing_ends_it(tmp_path, own_runtime, leaves_nothing):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    slide = open_slide(path, threads=THREADS, runtime=own_runtime)
    regions = slide.read_regions([(0, 0)] * 40, (WIDTH, HEIGHT), batch_size=4)
    next(regions)
    slide.close()
    with pytest.raises(SlideClosedError):
        list(regions)


def test_a_decoder_is_used_again(own_runtime):
    jpegs = own_runtime.devices.jpegs
    first = jpegs.take(2)
    second = jpegs.take(2)
    assert first is not second
    jpegs.give(first)
    assert jpegs.take(2) is first
    jpegs.give(first)
    jpegs.give(second)


def test_threads_beside_each_other(tmp_path, own_runtime):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:2"])
    expected = tifffile.imread(path)
    wrong = []
    with open_slide(path, threads=THREADS, runtime=own_runtime) as slide:

        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(15):
                x, y = int(rng.integers(0, 60)), int(rng.integers(0, 40))
                slide.clear_cache()
                read = slide.read_region((x, y), (220, 150))
                if not np.array_equal(read, expected[y : y + 150, x : x + 220]):
                    wrong.append((x, y))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_it_is_loaded_once():
    opened = []
    jpegs = HostJpegs(lambda: opened.append(1) or library())
    assert jpegs.wait()
    assert jpegs.wait()
    assert opened == [1]
    jpegs.close()
