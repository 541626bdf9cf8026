"""JPEG tiles of all kinds on the CPU, by the native core and by imagecodecs."""

import io
import itertools
import threading

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from napari_wsigpu import native, open_slide
from napari_wsigpu.codecs.jpeg import header_length, segments
from napari_wsigpu.model.errors import SlideClosedError, TileError
from tests.writers import slides, tiffbytes

HEIGHT, WIDTH = 200, 290
TILE = (32, 48)
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


@pytest.fixture(autouse=True, params=["native", "Python"])
def way(request, monkeypatch):
    """What decodes."""
    if request.param == "Python":
        monkeypatch.setattr(native, "core", None)
    elif not native.available:
        pytest.skip(f"no native core: {native.reason}")


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


def test_patches_of_which_no_tile_is_kept(tmp_path):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    expected = tifffile.imread(path)
    places = [(x, y) for y in range(3, 140, 31) for x in range(2, 230, 43)]
    with open_slide(path, device="cpu") as slide:
        (read,) = slide.read_regions(places, (50, 40), batch_size=len(places))
    for (x, y), patch in zip(places, read, strict=True):
        np.testing.assert_array_equal(patch, expected[y : y + 40, x : x + 50])


def progressive(tile):
    """Encode a tile in several scans, and with restart markers."""
    buffer = io.BytesIO()
    image = Image.fromarray(tile)
    image.save(
        buffer, "jpeg", quality=85, subsampling="4:2:0", progressive=True, restart_marker_blocks=2
    )
    return buffer.getvalue()


PARTS = {**COLORS, "progressive": {"photometric": 6, "encode": progressive}}


@pytest.mark.parametrize(
    ("colors", "tables"),
    # Huffman tables of progressive JPEGs are each tile's own.
    [*itertools.product(COLORS, [False, True]), ("progressive", False)],
)
def test_parts_of_tiles_go_where_they_belong(tmp_path, colors, tables):
    path = write(tmp_path / "slide.tif", tables=tables, **PARTS[colors])
    expected = tifffile.imread(path).reshape(HEIGHT, WIDTH, -1)
    rng = np.random.default_rng(3)
    for _ in range(6):
        x, y = int(rng.integers(-9, 60)), int(rng.integers(-9, 50))
        with open_slide(path, device="cpu") as slide:
            (read,) = slide.read_regions([(x, y)], (230, 150))
        around = np.pad(expected, ((9, 9), (9, 9), (0, 0)))
        np.testing.assert_array_equal(read, around[y + 9 : y + 159, x + 9 : x + 239])


def test_parts_of_which_a_tile_is_damaged(tmp_path):
    path = write(
        tmp_path / "slide.tif",
        spoilt=lambda index, data: data[: len(data) // 2] if index == 9 else data,
        **COLORS["4:2:0"],
    )
    places = [(x, y) for y in range(3, 140, 31) for x in range(2, 230, 43)]
    with open_slide(path, device="cpu") as slide:
        with pytest.raises(TileError, match=r"row 1, column 2.*is truncated"):
            list(slide.read_regions(places, (50, 40), batch_size=len(places)))
        slide.clear_cache()
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


SMALL = slides.jpeg_ycbcr(slides.picture(16, 16))
LARGE = slides.jpeg_ycbcr(slides.picture(96, 96))
GRAY = slides.jpeg(slides.picture(*TILE, 1))
# What a tile is replaced by, and what is said of it; None if it is decoded all the same.
SPOILT = {
    "cut short": (lambda data: data[: len(data) // 2], "is truncated"),
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
def test_tiles_that_are_not_alike(tmp_path, kind):
    spoil, reason = SPOILT[kind]
    path = write(
        tmp_path / "slide.tif",
        spoilt=lambda index, data: spoil(data) if index in (0, 17) else data,
        **COLORS["4:2:0"],
    )
    with open_slide(path, device="cpu") as slide:
        if reason is None:
            read = slide.read_region((0, 0), (WIDTH, HEIGHT))
            np.testing.assert_array_equal(read, tifffile.imread(path))
        else:
            with pytest.raises(TileError, match=reason) as caught:
                slide.read_region((0, 0), (WIDTH, HEIGHT))
            assert "and 1 more" in str(caught.value)
        # The others are as they should be, whatever their neighbours are.
        tile = slide.read_region((48, 0), (48, 32))
        np.testing.assert_array_equal(tile, imagecodecs.jpeg8_decode(segments_of(path)[1]))


def segments_of(path):
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        data = path.read_bytes()
        places = zip(page.dataoffsets, page.databytecounts, strict=True)
        return [data[start : start + count] for start, count in places]


def test_closing_ends_it(tmp_path, leaves_nothing):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:0"])
    slide = open_slide(path, device="cpu")
    regions = slide.read_regions([(0, 0)] * 40, (WIDTH, HEIGHT), batch_size=4)
    next(regions)
    slide.close()
    with pytest.raises(SlideClosedError):
        list(regions)


def test_threads_beside_each_other(tmp_path):
    path = write(tmp_path / "slide.tif", **COLORS["4:2:2"])
    expected = tifffile.imread(path)
    wrong = []
    with open_slide(path, device="cpu") as slide:

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
