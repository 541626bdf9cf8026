"""Pictures in JPEG, JPEG 2000 and PNG, against Pillow and imagecodecs; damaged and huge ones."""

import io
import pickle
import struct
import zlib

import imagecodecs
import numpy as np
import pytest
from PIL import Image, ImageFile

from napari_wsigpu import open_slide
from napari_wsigpu.compat import openslide as compat
from napari_wsigpu.compat.tiffslide import TiffFileError, TiffSlide
from napari_wsigpu.formats import image_file
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.tiff import hamamatsu
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from tests.writers import slides

RGB = slides.picture(150, 210)
GRAY = RGB[..., 0]
DEEP = slides.picture(150, 210, 1, "uint16")[..., 0]


# Older versions of Pillow can't write a header that is longer than their buffer.
ImageFile.MAXBLOCK = 1 << 20


def saved(pixels, kind, mode=None, **options):
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def frame(place, value):
    """Return a JPEG with other bytes in its frame header, after marker and length."""
    data = saved(RGB, "jpeg")
    start = data.index(b"\xff\xc0") + 4 + place
    return data[:start] + value + data[start + len(value) :]


def jp2(pixels, kind="JP2", **options):
    return bytes(imagecodecs.jpeg2k_encode(pixels, codecformat=kind, level=0, **options))


FILES = {
    "a.jpg": saved(RGB, "jpeg", quality=90),
    "exif.jpeg": saved(RGB, "jpeg", exif=b"Exif\0\0" + bytes(60000), comment=b"c" * 60000),
    "gray.jpg": saved(GRAY, "jpeg"),
    "progressive.jpg": saved(RGB, "jpeg", progressive=True),
    "a.png": saved(RGB, "png"),
    "gray.png": saved(GRAY, "png"),
    "deep.png": saved(DEEP, "png"),
    "palette.png": saved(RGB, "png", "P"),
    "bits.png": saved(GRAY, "png", "1"),
    "alpha.png": saved(RGB, "png", "RGBA"),
    "a.jp2": jp2(RGB),
    "lossy.jp2": bytes(imagecodecs.jpeg2k_encode(RGB, codecformat="JP2", level=40)),
    "deep.jp2": jp2(DEEP),
    "gray.j2k": jp2(GRAY, "J2K"),
    "tiles.j2k": saved(RGB, "jpeg2000", tile_size=(64, 64), no_jp2=True),
    "tiles.jp2": saved(RGB, "jpeg2000", tile_size=(64, 64)),
    "no ending": jp2(RGB, "J2K"),
}


def oracle(data):
    """Return what Pillow reads, or imagecodecs if it has more than 8 bits or is JPEG 2000."""
    if data[:4] in (b"\0\0\0\x0c", b"\xff\x4f\xff\x51"):
        pixels = imagecodecs.jpeg2k_decode(data)
    elif data[24] == 16 and data.startswith(b"\x89PNG"):
        pixels = imagecodecs.png_decode(data)
    else:
        image = Image.open(io.BytesIO(data))
        pixels = np.asarray(image.convert({"P": "RGB", "1": "L"}.get(image.mode, image.mode)))
    return pixels[..., None] if pixels.ndim == 2 else pixels


@pytest.mark.parametrize("name", FILES)
def test_pixels(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    expected = oracle(FILES[name])
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        part = np.s_[40:99, 130:210]
        np.testing.assert_array_equal(slide.levels[0][part], expected[part])
        assert slide.layout.rgb == (expected.shape[2] > 1)
        assert slide.vendor == "generic-image"
        computed = slide.layout.pyramid(largest_side=64)
        assert [level.layout.width for level in computed] == [210, 105, 53]


def test_ycbcr_in_jpeg_2000(tmp_path):
    """A box states sYCC; imagecodecs converts it, too, with other factors."""
    data = bytearray(jp2(RGB, mct=False))
    at = data.index(b"colr")
    assert data[at + 4 : at + 11] == b"\1\0\0" + struct.pack(">I", 16)
    data[at + 7 : at + 11] = struct.pack(">I", 18)
    (tmp_path / "a.jp2").write_bytes(data)
    with open_slide(tmp_path / "a.jp2", "cpu") as slide:
        difference = slide.levels[0][...].astype(int) - imagecodecs.jpeg2k_decode(bytes(data))
        assert np.abs(difference).max() <= 2
        assert np.abs(slide.levels[0][...].astype(int) - RGB).max() > 50


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_transparent_colors_are_a_problem(tmp_path, mode):
    key = {"P": bytes(range(256)), "L": 7, "RGB": (1, 2, 3)}[mode]
    Image.new(mode, (13, 9)).save(tmp_path / "a.png", transparency=key)
    with open_slide(tmp_path / "a.png") as slide:
        assert slide.layout.problems == ("The image's transparency is not shown.",)


def test_jpeg_ls_is_named(tmp_path):
    (tmp_path / "a.jpg").write_bytes(imagecodecs.jpegls_encode(np.zeros((33, 47), np.uint8)))
    with pytest.raises(SlideError, match="is a JPEG-LS image"):
        open_slide(tmp_path / "a.jpg")


def test_transparency_of_gray_is_a_problem(tmp_path):
    (tmp_path / "a.png").write_bytes(saved(GRAY, "png", "LA"))
    with open_slide(tmp_path / "a.png", "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 0], GRAY)
        assert slide.layout.problems == ("The image's transparency is not shown.",)


def png_header(width, height, bits=8, color=2):
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + data + struct.pack(">I", zlib.crc32(data))


def j2k(position, data):
    found = bytearray(jp2(RGB, "J2K"))
    found[position : position + len(data)] = data
    return bytes(found)


REFUSED = {
    "large.png": (png_header(1 << 31, 1 << 31), "claims 2147483648 x 2147483648 pixels"),
    "empty.png": (png_header(0, 5), "no pixels"),
    "colour.png": (png_header(5, 5, color=9), "header is damaged"),
    "short.png": (png_header(5, 5)[:20], "header is damaged"),
    "large.j2k": (j2k(8, b"\x7f\xff\xff\xff\x7f\xff\xff\xff"), "claims 2147483647 x"),
    "negative.j2k": (j2k(8, bytes(8) + b"\0\0\0\1\0\0\0\1"), "no pixels"),
    "no components.j2k": (j2k(40, b"\0\0"), "components of several kinds"),
    "many components.j2k": (j2k(40, b"\xff\xff"), "components of several kinds"),
    "depths.j2k": (j2k(42, b"\x0a"), "components of several kinds"),
    "deep.j2k": (j2k(42, b"\x1f\1\1\x1f\1\1\x1f\1\1"), "32 bits"),
    "short.j2k": (jp2(RGB, "J2K")[:40], "truncated"),
    "boxes.jp2": (jp2(RGB)[:30], "not a JPEG 2000 code stream"),
    "loop.jp2": (jp2(RGB)[:12] + bytes(99), "not a JPEG 2000 code stream"),
    "far.jp2": (jp2(RGB)[:12] + b"\0\0\0\1free" + b"\x7f" * 8, "not a JPEG 2000 code stream"),
    "short.jpg": (saved(RGB, "jpeg")[:100], "no JPEG frame"),
    "cmyk.jpg": (saved(RGB, "jpeg", "CMYK"), r"it is a CMYK JPEG, which is not supported\)"),
    "deep.jpg": (
        frame(0, b"\x0c"),
        "it is a JPEG of 3 x 12 bits per pixel, which is not supported",
    ),
    "two.jpg": (frame(5, b"\2"), "it is a JPEG of 2 x 8 bits per pixel, which is not supported"),
    "flat.jpg": (frame(1, b"\0\0"), "its header does not state its size"),
    "start.jpg": (b"\xff\xd8\xff", "no JPEG frame"),
}


DAMAGED = (
    "empty.png", "colour.png", "short.png", "negative.j2k", "short.j2k", "boxes.jp2", "loop.jp2",
    "far.jp2", "short.jpg", "start.jpg",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_pictures(tmp_path, name):
    data, said = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(data)
    kind, words = UnsupportedSlideError, "can't be opened"
    if name in DAMAGED:
        kind, words = CorruptSlideError, "is damaged"
    with pytest.raises(kind, match=rf"{name}' {words} \(.*{said}"):
        describe(path)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.jp2"])
def test_picture_beyond_the_limit_of_a_tile(tmp_path, monkeypatch, name):
    monkeypatch.setattr(limits, "tile_bytes", RGB.nbytes - 1)
    (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises(UnsupportedSlideError, match=r"210 x 150 pixels.*vips tiffsave"):
        describe(tmp_path / name)


ROWS, BLOCKS = {"restart_marker_rows": 1}, {"restart_marker_blocks": 9}
DIVIDED = {
    "rows": (RGB, ROWS, "4:4:4", 0),
    "blocks": (RGB, BLOCKS, "4:4:4", 0),
    "gray": (GRAY, ROWS, None, 0),
    "gray blocks": (GRAY, BLOCKS, None, 0),
    # libjpeg smooths chroma across intervals, but not across tiles.
    "4:2:0": (RGB, ROWS, "4:2:0", 40),
    "4:2:2": (RGB, {"restart_marker_blocks": 7}, "4:2:2", 40),
}


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("block", [1 << 24, 777])
def test_large_jpegs_are_divided_at_restart_markers(tmp_path, monkeypatch, name, block):
    pixels, options, subsampling, most = DIVIDED[name]
    options = {**options, "subsampling": subsampling} if subsampling else options
    data = saved(pixels, "jpeg", quality=90, **options)
    path = tmp_path / "a.jpg"
    path.write_bytes(data + b"\xff\xd0 more \xff\xd1")  # bytes after the end are ignored
    monkeypatch.setattr(limits, "tile_bytes", 210 * 16 * 3 + 3000)
    monkeypatch.setattr(hamamatsu, "TILE_PIXELS", 1000)
    monkeypatch.setattr(image_file, "READ_BYTES", block)
    with open_slide(path, "cpu") as slide:
        found = slide.levels[0][...].astype(int)
        assert np.abs(found - oracle(data)).max() <= most
        assert np.abs(found - oracle(data)).mean() <= most / 40
        assert slide.level_dimensions[:2] == ((210, 150), (105, 75))
        part = np.s_[40:99, 130:210]
        np.testing.assert_array_equal(slide.levels[0][part], found[part])
        with pickle.loads(pickle.dumps(slide)) as again:
            np.testing.assert_array_equal(again.levels[0][...], found)


def test_large_jpegs_that_cannot_be_divided(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "tile_bytes", 210 * 16 * 3 + 3000)
    path = tmp_path / "a.jpg"
    rows = saved(RGB, "jpeg", **ROWS)
    for data in (
        saved(RGB, "jpeg", restart_marker_rows=2),
        saved(RGB, "jpeg", restart_marker_blocks=5),
        saved(RGB, "jpeg", progressive=True, **ROWS),
    ):
        path.write_bytes(data)
        with pytest.raises(UnsupportedSlideError, match=r"and no restart markers divide .*vips"):
            describe(path)
    for data in (rows[: len(rows) // 2], rows.replace(b"\xff\xd9", b"\xff\x00")):
        path.write_bytes(data)
        with pytest.raises(CorruptSlideError, match=r"of its 10 restart intervals are missing"):
            describe(path)
    path.write_bytes(rows)
    with pytest.raises(UnsupportedSlideError, match="claims tiles of"):  # of several rows
        describe(path)
    monkeypatch.setattr(hamamatsu, "TILE_PIXELS", 1000)
    path.write_bytes(rows.replace(b"\xff\xd3", b"\xff\xd4", 1))
    with pytest.raises(CorruptSlideError, match="restart markers are out of order"):
        describe(path)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.jp2", "gray.j2k"])
def test_truncated_pictures(tmp_path, name):
    path, data = tmp_path / name, FILES[name]
    for size in range(1, len(data) - 200, len(data) // 9):
        path.write_bytes(data[:size])
        with pytest.raises(SlideError, match=r"\.$"), open_slide(path, "cpu") as slide:
            slide.levels[0][...]


def test_libraries_that_read_no_pictures_refuse_them(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(FILES["a.png"])
    assert compat.OpenSlide.detect_format(path) is None
    with pytest.raises(compat.OpenSlideUnsupportedFormatError):
        compat.OpenSlide(path)
    with compat.open_slide(path) as slide:
        assert isinstance(slide, compat.ImageSlide)
    with pytest.raises(TiffFileError):
        TiffSlide(path)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("size", [0, 150_000])
def test_icc_profile_is_pillows(tmp_path, kind, size):
    """A long profile takes several segments of a JPEG."""
    profile = bytes(imagecodecs.cms_profile("srgb")) + bytes(size)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(saved(RGB, kind, icc_profile=profile))
    with Image.open(path) as image, open_slide(path, "cpu") as slide:
        assert slide.icc_profile == image.info["icc_profile"] == profile
        assert slide.metadata["icc_profile"]
    path.write_bytes(saved(RGB, kind))
    with open_slide(path, "cpu") as slide:
        assert slide.icc_profile is None


def box(kind, *parts):
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), kind) + content


def with_boxes(*boxes):
    """Add boxes to the header box of a JP2 file, before those that it has."""
    data = jp2(RGB)
    start = data.index(b"jp2h") - 4
    length = int.from_bytes(data[start : start + 4], "big")
    header = data[start + 8 : start + length]
    ihdr = header[:22]  # must come first
    return data[:start] + box(b"jp2h", ihdr, *boxes, header[22:]) + data[start + length :]


def resolution_box(kind, y, x):
    """Return a resolution box; `y` and `x` are numerator, denominator and exponent, per meter."""
    return box(kind, struct.pack(">4H2b", *y[:2], *x[:2], y[2], x[2]))


CAPTURED = resolution_box(b"resc", (40, 11, 6), (20, 11, 6))  # 0.275 and 0.55 µm
DISPLAYED = resolution_box(b"resd", (20, 1, 5), (20, 1, 5))
INVALID = resolution_box(b"resc", (1, 0, 5), (1, 1, 5))
SIZED = {
    "inch.jpg": (saved(RGB, "jpeg", dpi=(50800, 25400)), (0.5, 1.0)),
    "gray.jpg": (saved(GRAY, "jpeg", dpi=(50800, 50800)), (0.5, 0.5)),
    "a.png": (saved(RGB, "png", dpi=(101600, 50800)), (0.25, 0.5)),
    "captured.jp2": (with_boxes(box(b"res ", CAPTURED)), (0.55, 0.275)),
    "both.jp2": (with_boxes(box(b"res ", DISPLAYED, CAPTURED)), (0.55, 0.275)),
}


@pytest.mark.parametrize("name", SIZED)
def test_pixel_size_is_pillows(tmp_path, name):
    data, expected = SIZED[name]
    path = tmp_path / name
    path.write_bytes(data)
    with Image.open(path) as image, open_slide(path, "cpu") as slide:
        dpi = image.info["dpi"]
        assert slide.mpp == pytest.approx([25400 / each for each in dpi], rel=1e-5)
        assert slide.mpp == pytest.approx(expected, rel=1e-5)
        assert slide.layout.problems == ()
        np.testing.assert_array_equal(slide.levels[0][...], oracle(data))


def with_density(unit, x, y):
    data = bytearray(FILES["a.jpg"])
    struct.pack_into(">BHH", data, data.index(b"JFIF\0") + 7, unit, x, y)
    return bytes(data)


def test_pixel_size_per_centimeter(tmp_path):
    (tmp_path / "a.jpg").write_bytes(with_density(2, 20000, 40000))
    with Image.open(tmp_path / "a.jpg") as image, open_slide(tmp_path / "a.jpg", "cpu") as slide:
        assert [25400 / each for each in image.info["dpi"]] == pytest.approx([0.5, 0.25])
        assert slide.mpp == (0.5, 0.25)


@pytest.mark.parametrize("boxes", [[DISPLAYED], [INVALID, DISPLAYED]])
def test_display_resolution_is_used_without_a_capture_resolution(tmp_path, boxes):
    (tmp_path / "a.jp2").write_bytes(with_boxes(box(b"res ", *boxes)))
    with open_slide(tmp_path / "a.jp2", "cpu") as slide:
        assert slide.mpp == (0.5, 0.5)


DEFAULTS = {
    "72.jpg": saved(RGB, "jpeg", dpi=(72, 72)),
    "96.png": saved(RGB, "png", dpi=(96, 96)),
    "72.jp2": with_boxes(box(b"res ", resolution_box(b"resd", (2835, 1, 0), (2835, 1, 0)))),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_resolution_is_no_pixel_size(tmp_path, name):
    (tmp_path / name).write_bytes(DEFAULTS[name])
    with open_slide(tmp_path / name, "cpu") as slide:
        assert slide.mpp is None
        assert slide.layout.problems == (
            f"The pixel size is unknown: the file states {name[:2]} dpi, the default of many "
            "programs.",
        )


def png_with(kind, content):
    data, chunk = FILES["a.png"], kind + content
    return (
        data[:33]  # the signature and IHDR
        + struct.pack(">I", len(content))
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + data[33:]
    )


UNSIZED = {
    "none.jpg": FILES["a.jpg"],
    "ratio.jpg": with_density(0, 3, 2),
    "zero.jpg": with_density(1, 0, 0),
    "ratio.png": png_with(b"pHYs", struct.pack(">IIB", 3, 2, 0)),
    "zero.png": png_with(b"pHYs", struct.pack(">IIB", 0, 0, 1)),
    "short.png": png_with(b"pHYs", b"\0\0\1"),
    "text.png": png_with(b"tEXt", b"pHYs\0" + struct.pack(">IIB", 4000000, 4000000, 1)),
    "a.jp2": FILES["a.jp2"],
    "a.j2k": FILES["gray.j2k"],
    "zero.jp2": with_boxes(box(b"res ", INVALID)),
    "short.jp2": with_boxes(box(b"res ", box(b"resc", bytes(9)))),
    "damaged.jp2": with_boxes(box(b"res ", b"\0\0\0\3resc" + CAPTURED)),
}


@pytest.mark.parametrize("name", UNSIZED)
def test_pictures_without_a_pixel_size(tmp_path, name):
    (tmp_path / name).write_bytes(UNSIZED[name])
    with open_slide(tmp_path / name, "cpu") as slide:
        assert slide.mpp is None
        assert slide.layout.problems == ()


def test_icc_profile_of_jp2(tmp_path):
    """Only the first color specification box counts, and long boxes have 64-bit lengths."""
    profile = bytes(imagecodecs.cms_profile("srgb"))
    content = b"\2\0\0" + profile
    long = struct.pack(">I4sQ", 1, b"colr", 16 + len(content)) + content
    other = box(b"colr", b"\2\0\0", bytes(200))
    plain = box(b"colr", b"\1\0\0" + struct.pack(">I", 16))
    path = tmp_path / "a.jp2"
    for boxes, expected in (
        ([box(b"colr", content)], profile),
        ([long, other], profile),
        ([plain, box(b"colr", content)], None),
        ([box(b"colr", b"\2\0\0")], None),
    ):
        path.write_bytes(with_boxes(*boxes))
        with open_slide(path, "cpu") as slide:
            assert slide.icc_profile == expected
            np.testing.assert_array_equal(slide.levels[0][...], RGB)


@pytest.mark.parametrize("orientation", [1, 3, 6, 9])
def test_orientation_is_reported(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x10F], exif[0x112] = "Maker", orientation
    path = tmp_path / "a.jpg"
    path.write_bytes(saved(RGB, "jpeg", exif=exif))
    with Image.open(path) as image, open_slide(path, "cpu") as slide:
        assert image.getexif()[0x112] == orientation
        rotated = orientation in (3, 6)
        assert [f"(orientation {orientation})" in text for text in slide.layout.problems] == (
            [True] * rotated
        )
        np.testing.assert_array_equal(slide.levels[0][...], np.asarray(image))


@pytest.mark.parametrize(
    "data", [b"", b"II*\0", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff"]
)
def test_damaged_exif_data_are_ignored(tmp_path, data):
    path = tmp_path / "a.jpg"
    path.write_bytes(saved(RGB, "jpeg", exif=b"Exif\0\0" + data))
    with open_slide(path, "cpu") as slide:
        assert slide.layout.problems == ()
