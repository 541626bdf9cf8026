"""Text in encoded tiles is redacted, and what a decoder needs is kept."""

from io import BytesIO

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from napari_wsigpu import convert, open_slide
from napari_wsigpu.conversion.redaction import redact
from tests import oracles
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import LONG, deflate, page

TEXT = b"PATIENT JOHN DOE 1960-01-01"
WORDS = (b"JOHN", b"DOE", b"1960")
TILE = slides.picture(64, 64)


def segment(marker, content):
    return b"\xff" + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content


def box(kind, content):
    return (8 + len(content)).to_bytes(4, "big") + kind + content


def with_comment(data):
    return data[:2] + segment(0xFE, TEXT) + data[2:]


def with_all(data):
    """Add text to every part of a JPEG that can contain some."""
    jfif = segment(0xE0, b"JFIF\0\1\2\0\0\1\0\1\1\1" + TEXT[:3])
    others = b"".join(segment(marker, TEXT) for marker in (0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xEF))
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0\1" + TEXT)
    table = data.index(b"\xff\xdb")
    return (
        data[:2] + jfif + adobe + others + data[table:-2]
        + segment(0xFE, TEXT) + data[-2:] + TEXT + data
    )  # fmt: skip


def progressive(tile):
    file = BytesIO()
    Image.fromarray(tile).save(file, "JPEG", progressive=True, subsampling="4:2:0")
    data = file.getvalue()
    last = data.rindex(b"\xff\xc4")
    assert data.index(b"\xff\xc2") < data.index(b"\xff\xda") < last
    return data[:last] + segment(0xFE, TEXT) + data[last:]


def jpeg2000(tile):
    """Add comments to the main header and the tile-part header."""
    data = bytes(imagecodecs.jpeg2k_encode(tile, codecformat="J2K", level=0))
    comment = b"\xff\x64" + (len(TEXT) + 4).to_bytes(2, "big") + b"\0\1" + TEXT
    part, start = data.index(b"\xff\x90"), data.index(b"\xff\x93")
    length = int.from_bytes(data[part + 6 : part + 10], "big") + len(comment)
    header = data[part : part + 6] + length.to_bytes(4, "big") + data[part + 10 : start]
    return data[:part] + comment + header + comment + data[start:] + TEXT


def jp2(tile):
    data = bytes(imagecodecs.jpeg2k_encode(tile, codecformat="JP2", level=0))
    place = data.index(b"jp2h") - 4
    more = box(b"xml ", TEXT) + box(b"uuid", TEXT) + b"\0\0\0\1uinf" + (43).to_bytes(8, "big")
    return data[:place] + more + TEXT + data[place:]


def jpeg_xl(tile):
    data = bytes(imagecodecs.jpegxl_encode(tile, lossless=True, usecontainer=True))
    assert data[4:8] == b"JXL "
    return data + box(b"Exif", bytes(4) + TEXT) + b"\0\0\0\0xml " + TEXT


def webp(tile):
    data = bytes(imagecodecs.webp_encode(tile, lossless=True))
    extended = b"VP8X" + (10).to_bytes(4, "little") + b"\x0c\0\0\0" + 2 * (63).to_bytes(3, "little")
    parts = data[12:] + b"".join(
        name + len(TEXT).to_bytes(4, "little") + TEXT + b"\0" for name in (b"EXIF", b"XMP ")
    )
    return b"RIFF" + (4 + len(extended + parts)).to_bytes(4, "little") + b"WEBP" + extended + parts


KINDS = {
    "comment": (7, 6, lambda tile: with_comment(slides.jpeg_ycbcr(tile))),
    "all": (7, 6, lambda tile: with_all(slides.jpeg_ycbcr(tile))),
    "RGB": (7, 2, lambda tile: with_comment(slides.jpeg(tile))),
    "progressive": (7, 6, progressive),
    "JPEG 2000": (34712, 2, jpeg2000),
    "JP2": (34712, 2, jp2),
    "JPEG XL": (50002, 2, jpeg_xl),
    "WebP": (50001, 2, webp),
}


def write_slide(path, kind):
    compression, photometric, encode = KINDS[kind]
    tiles = [encode(np.roll(TILE, step)) for step in range(0, 60, 10)]
    options = {"subsampling": (2, 2)} if photometric == 6 else {}
    tifffile.imwrite(
        path, iter(tiles), shape=(128, 192, 3), dtype="u1", tile=(64, 64), metadata=None,
        compression=compression, photometric=photometric, **options,
    )  # fmt: skip
    return path


def words_in(path):
    content = path.read_bytes()
    return [word for word in WORDS if word in content]


def encoded_tiles(file):
    page = file.pages.first
    return [
        data for data, _ in file.filehandle.read_segments(page.dataoffsets, page.databytecounts)
    ]


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_in_tiles_is_redacted(tmp_path, kind, name):
    source, target = write_slide(tmp_path / "s.tif", kind), tmp_path / name
    assert words_in(source) == list(WORDS)
    assert convert(source, target).tiles_copied == 6
    assert words_in(target) == []
    np.testing.assert_array_equal(oracles.tifffile_page(target), oracles.tifffile_page(source))
    with open_slide(source, "cpu") as one, open_slide(target, "cpu") as other:
        np.testing.assert_array_equal(one.levels[0][...], other.levels[0][...])


@pytest.mark.parametrize("kind", KINDS)
def test_private_keeps_text_in_tiles(tmp_path, kind):
    source, target = write_slide(tmp_path / "s.tif", kind), tmp_path / "out.tif"
    convert(source, target, private=True)
    with tifffile.TiffFile(source) as one, tifffile.TiffFile(target) as other:
        tiles = [encoded_tiles(file) for file in (one, other)]
    assert tiles[0] == tiles[1]


def test_text_in_jpeg_tables_and_associated_images_is_redacted(tmp_path):
    source, target = tmp_path / "s.svs", tmp_path / "out.tif"
    tables, rest = slides.split_tables(slides.jpeg_ycbcr(TILE))
    with tifffile.TiffWriter(source) as file:
        for shape in ((64, 64, 3), (32, 64, 3)):
            file.write(
                iter([rest]), shape=shape, dtype="u1", photometric=6, compression=7, metadata=None,
                jpegtables=with_comment(tables), subsampling=(2, 2),
                **({"tile": (64, 64)} if shape[0] == 64 else {"rowsperstrip": 64}),
                description=slides.aperio_text(64, shape[0]),
            )  # fmt: skip
    with open_slide(source, "cpu") as slide:
        expected = slide.levels[0][...]
        assert list(slide.associated_images) == ["thumbnail"]
    assert words_in(source) == list(WORDS)
    assert convert(source, target).tiles_copied == 1
    assert words_in(target) == []
    with tifffile.TiffFile(target) as file:
        assert file.pages.first.jpegtables == tables
    with open_slide(target, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)


@pytest.mark.parametrize(
    ("compression", "data"),
    [
        (7, slides.jpeg(TILE)),
        (7, slides.jpeg_ycbcr(TILE)),  # with a JFIF header
        (7, slides.split_tables(slides.jpeg(TILE))[0]),
        (50001, imagecodecs.webp_encode(TILE)),
        (50002, imagecodecs.jpegxl_encode(TILE)),
        (8, TEXT),
    ],
)
def test_tile_without_text_is_returned_itself(compression, data):
    view = memoryview(bytes(data))
    assert redact(view, compression) is view


def test_bytes_between_jpeg_segments_are_redacted():
    data = slides.jpeg_ycbcr(TILE)
    table = data.index(b"\xff\xdb")
    odd = data[:table] + TEXT + b"\xff\xff" + segment(0xFE, TEXT) + b"\xff\xff" + data[table:]
    found = bytes(redact(memoryview(odd), 7))
    assert not [word for word in WORDS if word in found]
    np.testing.assert_array_equal(imagecodecs.jpeg8_decode(found), imagecodecs.jpeg8_decode(data))


DAMAGED = [(KINDS[kind][0], KINDS[kind][2](TILE)) for kind in KINDS]


@given(
    st.sampled_from(DAMAGED),
    st.lists(st.tuples(st.integers(0, 600), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(0, 900),
)
def test_damaged_tiles_raise_nothing(tile, changes, length):
    compression, data = tile
    damaged = bytearray(data)
    for place, new in changes:
        damaged[place : place + len(new)] = new
    for view in (memoryview(damaged), memoryview(damaged)[:length]):
        assert len(redact(view, compression)) == len(view)


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("byteorder", "<>")
@pytest.mark.parametrize("where", ["description", "subimage", "label"])
def test_tile_that_overlaps_private_bytes_is_encoded_again(tmp_path, where, byteorder, bigtiff):
    """A damaged byte count, which deflate decoders ignore."""
    pixels = slides.picture(64, 64)
    options = {"compression": 8, "tile": (64, 64)}
    subimages, others = [], []
    if where == "subimage":
        subimages = [page(pixels[:16, :16], deflate, description=TEXT, subfile_type=1)]
    if where == "label":
        label = np.frombuffer(TEXT.ljust(3 * 256), np.uint8).reshape(16, 16, 3)
        others = [page(label, bytes, tile=None, description="label 16x16", subfile_type=1)]
    description = b"Aperio Image Library |Patient = " + TEXT * (where == "description")
    first = page(pixels, deflate, description=description, subifds=subimages, **options)
    path = tiffbytes.write(
        tmp_path / "a.svs", [first, *others], byteorder=byteorder, bigtiff=bigtiff
    )
    data, [tile] = path.read_bytes(), first.segments
    end = data.index(TEXT) + len(TEXT)
    wrong = end - data.index(tile)
    first.tags[325] = (LONG, wrong)
    tiffbytes.write(path, [first, *others], byteorder=byteorder, bigtiff=bigtiff)
    assert path.read_bytes().index(TEXT) + len(TEXT) == end
    for private, copied in ((False, 0), (True, 1)):
        target = tmp_path / f"{private}.tif"
        done = convert(path, target, private=private)
        assert (TEXT in target.read_bytes()) == private
        assert done.tiles_copied == copied
        with open_slide(target) as slide:
            assert (slide.levels[0][...] == pixels).all()


def test_bytes_after_raw_samples_are_dropped(tmp_path):
    pixels = slides.picture(64, 64)
    made = page(pixels, lambda tile: tile.tobytes() + TEXT, tile=(64, 64))
    path = tiffbytes.write(tmp_path / "a.tif", [made])
    for private in (False, True):
        target = tmp_path / f"{private}.tif"
        assert convert(path, target, private=private).tiles_copied == 1
        assert TEXT not in target.read_bytes()
        with open_slide(target) as slide:
            assert (slide.levels[0][...] == pixels).all()


def skippable(content):
    return b"\x50\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content


DATA = TILE.tobytes()
ZSTD = {
    "plain": bytes(imagecodecs.zstd_encode(DATA)),
    "with its size": bytes(imagecodecs.zstd_encode(DATA, level=19)),
    "of nothing but zeros": bytes(imagecodecs.zstd_encode(bytes(300_000))),
    "that cannot be compressed": bytes(
        imagecodecs.zstd_encode(np.random.default_rng(0).bytes(300_000))
    ),
}


@pytest.mark.parametrize("data", ZSTD.values(), ids=ZSTD)
@pytest.mark.parametrize("compression", [50000, 34926])
def test_text_around_zstd_frames(data, compression):
    assert redact(memoryview(data), compression).tobytes() == data
    around = skippable(TEXT) + data + skippable(TEXT) + TEXT
    found = redact(memoryview(around), compression).tobytes()
    assert not any(word in found for word in WORDS)
    assert len(found) == len(around)
    assert data in found
    assert imagecodecs.zstd_decode(found[: 8 + len(TEXT) + len(data)]) == imagecodecs.zstd_decode(
        data
    )


@pytest.mark.parametrize("data", [b"", b"\x28\xb5\x2f\xfd", TEXT, bytes(40), ZSTD["plain"][:90]])
def test_truncated_zstd_frames_are_unchanged(data):
    assert redact(memoryview(data), 50000).tobytes() == data


@pytest.mark.parametrize("compression", [8, 32946])
def test_text_after_deflate_is_redacted(compression):
    data = deflate(TILE)
    assert redact(memoryview(data), compression).tobytes() == data
    found = redact(memoryview(data + TEXT), compression).tobytes()
    assert found == data + bytes(len(TEXT))
    for damaged in (data[:50], TEXT, b""):
        assert redact(memoryview(damaged), compression).tobytes() == damaged


UNUSED = {
    "a quantisation table": segment(0xDB, b"\x03" + (TEXT * 3)[:64]),
    "one of 16 bits": segment(0xDB, b"\x12" + (TEXT * 5)[:128]),
    "a Huffman table": segment(0xC4, b"\x13" + bytes([0] * 7 + [len(TEXT)] + [0] * 8) + TEXT),
    "one that is replaced": segment(0xDB, b"\x00" + (TEXT * 3)[:64]),
    "two of them": segment(0xDB, b"\x02" + (TEXT * 3)[:64] + b"\x03" + (TEXT * 3)[:64]),
}


@pytest.mark.parametrize("unused", UNUSED.values(), ids=UNUSED)
@pytest.mark.parametrize(
    "data",
    [slides.jpeg_ycbcr(TILE), slides.jpeg(TILE), progressive(TILE)],
    ids=["4:2:0", "RGB", "progressive"],
)
def test_text_in_tables_that_no_scan_uses(data, unused):
    data = bytes(data)
    told = data[:2] + unused + data[2:]
    found = redact(memoryview(told), 7).tobytes()
    assert not any(word in found for word in WORDS)
    assert len(found) == len(told)
    np.testing.assert_array_equal(imagecodecs.jpeg8_decode(found), imagecodecs.jpeg8_decode(data))


def test_all_shared_jpeg_tables_are_kept():
    tables, _ = slides.split_tables(slides.jpeg_ycbcr(TILE))
    assert redact(memoryview(tables), 7).tobytes() == tables
