"""Small files that claim large sizes: each costs little, and raises the right error."""

import io
import os
import subprocess
import sys
import zlib

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from napari_wsigpu import SlideError, convert, open_slide
from napari_wsigpu.model.errors import TargetExistsError, UnsupportedSlideError
from napari_wsigpu.model.limits import Limits, limits
from tests.test_bad_input import run_probe
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import FLOAT, LONG, SHORT, SLONG, UNDEFINED

OME = (
    '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
    '<Pixels ID="P" DimensionOrder="XYCZT" Type="uint8" SizeX="96" SizeY="{}" SizeC="3" SizeZ="1" '
    'SizeT="1"><Channel ID="c" SamplesPerPixel="{}"/>{}</Pixels></Image></OME>'
)
SHAPE = '{"shape": [1000, 1000, 1000, 64, 96, 3], "axes": "TZCYXS"}'
PLANE = '<TiffData IFD="0" PlaneCount="1"/>'
UUID = '<TiffData IFD="0"><UUID FileName="{0}.ome.tif">urn:uuid:{0}</UUID></TiffData>'
LOSSLESS_FRAME = b"\xff\xc0", b"\xff\xc3"
ENTITIES = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aa">]><scn>&a;</scn>'


def page(**options):
    return tiffbytes.page(slides.picture(64, 96), tiffbytes.deflate, compression=8, **options)


def aperio(sides, tile):
    """Return pages of an Aperio slide whose levels lack all tiles but those of the first."""
    pages = []
    for side in sides:
        count = (-(-side // tile)) ** 2
        size = {256: (LONG, side), 257: (LONG, side), 322: (LONG, tile), 323: (LONG, tile)}
        where = {324: (LONG, [8] * count), 325: (LONG, [9 * (not pages)] * count)}
        pages.append(page(description="Aperio Image Library |MPP = 0.5", more=size | where))
    return pages


def page_of_jpegs(change):
    """Return a page of modified JPEGs, whose tables are in its JPEGTables tag."""
    pixels = slides.picture(64, 96)
    tables, _ = slides.split_tables(slides.jpeg_ycbcr(pixels, "444"))
    return tiffbytes.page(
        pixels,
        lambda tile: change(slides.jpeg_ycbcr(tile, "444")),
        compression=7,
        photometric=6,
        more={347: (UNDEFINED, tables)},
    )


def decoy():
    """Return a JPEG 2000 file of 4000 x 4000 pixels with a small code stream in its first box."""
    small = imagecodecs.jpeg2k_encode(slides.picture(64, 96), codecformat="J2K")
    large = imagecodecs.jpeg2k_encode(np.zeros((4000, 4000, 3), np.uint8), codecformat="JP2")
    box = (8 + len(small)).to_bytes(4, "big") + b"uuid" + small
    return large[:12] + box + large[12:]


def scanned(times):
    """Return a progressive JPEG of 2048 x 2048 pixels that repeats its last scan."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((2048, 2048, 3), np.uint8)).save(file, "jpeg", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * times + data[-2:]


# How each file is made, and the expected error; None if the file can be read.
FILES = {
    "OME sizes": (lambda: [page(description=OME.format(64 * 10**8, 1, PLANE))], None),
    "OME sizes of colours": (lambda: [page(description=OME.format(64 * 10**8, 3, PLANE))], None),
    "OME planes, again and again": (
        lambda: [page(description=OME.format(64, 3, '<TiffData PlaneCount="200000"/>' * 2000))],
        None,
    ),
    "a shape of 10^9 planes": (
        lambda: [tiffbytes.page(slides.picture(64, 96), bytes, tile=None, description=SHAPE)],
        None,
    ),
    "deep JSON": (lambda: [page(description='{"shape": ' + "[" * 50_000)], "nested too deeply"),
    "SubIFDs": (lambda: [page(more={330: (LONG, [8] * 40_000)})], "'subimages'"),
    "a tile of 768 MiB": (
        lambda: [page(more={322: (LONG, 1 << 14), 323: (LONG, 1 << 14)})],
        "'tile_bytes'",
    ),
    "averages of averages": (lambda: aperio(range(40_000, 30_000, -1_000), 4096), "'averaged_"),
    "tiles of no height": (lambda: [page(more={323: (SLONG, -16)})], "without pixels"),
    "tiles of a height that is no whole number": (
        lambda: [page(more={323: (FLOAT, 16.0)})],
        "not whole numbers",
    ),
    "a page of no width": (
        lambda: [page(description="Aperio Image Library"), page(more={256: (LONG, 0)})],
        "without pixels",
    ),
    "entities": (lambda: [page(description=ENTITIES)], "declares entities"),
    "thousands of other files": (
        lambda: [page(description=OME.format(64, 3, "".join(map(UUID.format, range(40_000)))))],
        None,
    ),
    "millions of elements": (
        lambda: [page(description=OME.format(64, 3, PLANE + "<a/>" * 2_000_000))],
        None,
    ),
    "a scanner's thousands of pages": (
        lambda: (
            [
                tiffbytes.page(
                    np.zeros((8, 8, 3), np.uint8), bytes, tile=(16, 16), description="Aperio"
                )
            ]
            * 4_097
        ),
        "'pages'",
    ),
    "a JPEG that says to be lossless and has no tables": (
        lambda: [page_of_jpegs(lambda data: slides.split_tables(data)[1].replace(*LOSSLESS_FRAME))],
        "Invalid progressive/lossless parameters",
    ),
    "a JPEG of hundreds of scans": (
        lambda: [
            tiffbytes.page(
                np.zeros((2048, 2048, 3), np.uint8),
                lambda _: scanned(500),
                compression=7,
                tile=(2048, 2048),
                photometric=6,
            )
        ],
        "'scanned_samples'",
    ),
    "a code stream beside the one that is decoded": (
        lambda: [
            tiffbytes.page(
                slides.picture(64, 96), lambda _: decoy(), compression=34712, tile=(64, 96)
            )
        ],
        "the shape (4000, 4000, 3)",
    ),
}


READ_DOWN = """
import sys
from napari_wsigpu import open_slide
from napari_wsigpu.limits import limits
from tests.probe import peak

limits.decoding_bytes = 16 << 20
with open_slide(sys.argv[1], "cpu", threads=8) as slide:
    before = peak()
    slide.read_region((0, 0), (8, slide.dimensions[1]), 0)
    print(peak() - before)
"""


def column(side, tile, count, samples, compression, more, photometric=2):
    """Return a page with a column of square tiles that share the same bytes."""
    sides = {256: side, 257: count * side, 322: side, 323: side}
    tags = {code: (LONG, value) for code, value in sides.items()} | more
    picture = np.zeros((16, 16, samples), np.uint8)
    options = {"compression": compression, "photometric": photometric, "more": tags}
    made = tiffbytes.page(picture, bytes, **options)
    made.segments = [tile] * count
    return made


def four_bits(side=8192):
    tile = zlib.compress(bytes(side * side // 2))
    return column(side, tile, 1, 1, 8, {258: (SHORT, 4)}, photometric=1)


def jpeg2000(side=2048, count=8):
    tile = imagecodecs.jpeg2k_encode(np.zeros((side, side, 3), np.uint8), codecformat="J2K")
    return column(side, tile, count, 3, 34712, {})


@pytest.mark.parametrize("make", [four_bits, jpeg2000])
def test_large_tiles_need_little_more_than_their_pixels(tmp_path, make):
    path = tiffbytes.write(tmp_path / "a.tif", [make()])
    done = subprocess.run(
        [sys.executable, "-c", READ_DOWN, path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert int(done.stdout) < 256 << 20


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Results for all files, which one process reads one after the other."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = {
        name: tiffbytes.write(folder / f"{number}.tif", make())
        for number, (name, (make, _)) in enumerate(FILES.items())
    }
    found = run_probe(*paths.values())
    return dict(zip(paths, found, strict=True))


@pytest.mark.parametrize("name", FILES)
def test_small_files_that_claim_much(probed, name):
    found, said = probed[name], FILES[name][1]
    assert found["grown"] < 100 << 20
    assert found["seconds"] < 2
    if said is None:
        assert found["errors"] == []
    else:
        assert any(said in message for message in found["errors"])


def test_numbers_that_overlap(tmp_path):
    more = dict.fromkeys(range(65001, 65101), (LONG, (0, 0)))
    path = tiffbytes.write(tmp_path / "a.tif", [page(more=more)])
    data = bytearray(path.read_bytes())
    for code in more:
        entry = data.index(code.to_bytes(2, "little") + b"\4\0\2\0\0\0")
        data[entry + 4 : entry + 8] = (len(data) // 8).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(SlideError, match="more numbers than it can hold"):
        open_slide(path)


def test_a_list_of_images_that_leads_back(tmp_path):
    path = tiffbytes.write(tmp_path / "a.tif", [page()] * 150)
    data = bytearray(path.read_bytes())
    with open_slide(path) as slide:
        assert slide.level_count == 1
    last = data.rindex(bytes(4), 0, len(data))
    first = int.from_bytes(data[4:8], "little")
    entries = int.from_bytes(data[first : first + 2], "little")
    second = data[first + 2 + 12 * entries :][:4]
    data[last:] = second
    path.write_bytes(data)
    with pytest.raises(SlideError, match="is a loop"):
        open_slide(path)


def test_a_limit_can_be_raised(tmp_path, monkeypatch):
    path = tiffbytes.write(tmp_path / "a.tif", [page(tile=(64, 96))])
    monkeypatch.setattr(limits, "tile_bytes", 64 * 96 * 3 - 1)
    with pytest.raises(
        UnsupportedSlideError, match=r"the limit is 18\.43 kB; if you trust the file, raise"
    ):
        open_slide(path)
    limits.tile_bytes += 1
    with open_slide(path) as slide:
        assert (slide.levels[0][...] == slides.picture(64, 96)).all()


def test_the_environment_sets_limits():
    text = "tile_bytes=1e9, first_byte_seconds = 60,levels=many,none=1,tiles=-1"
    code = "from napari_wsigpu.limits import limits; print(limits)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"WSIGPU_LIMITS": text, "PYTHONPATH": ":".join(sys.path)},
    )
    assert eval(done.stdout) == Limits(tile_bytes=10**9, first_byte_seconds=60)
    for wrong in ("levels=many", "none=1", "tiles=-1"):
        assert f"'{wrong}', which is not a valid limit" in done.stderr


@pytest.mark.parametrize(("photometric", "samples"), [(2, 1), (2, 2), (6, 2), (50, 3)])
@pytest.mark.parametrize("ending", ["tif", "ome.zarr"])
def test_colours_that_can_not_be_are_converted(tmp_path, photometric, samples, ending):
    pixels = slides.picture(64, 96)[..., :samples]
    options = {"compression": 8, "photometric": photometric, "tile": (64, 96)}
    made = tiffbytes.page(pixels, tiffbytes.deflate, **options)
    path = tiffbytes.write(tmp_path / "a.tif", [made])
    with open_slide(path) as slide:
        convert(slide, tmp_path / f"b.{ending}")
    with open_slide(tmp_path / f"b.{ending}") as slide:
        assert (np.asarray(slide.levels[0][...]).reshape(pixels.shape) == pixels).all()


def test_associated_images_of_many_strips(tmp_path, monkeypatch):
    slides.write_aperio(tmp_path / "a.svs", slides.picture(64, 96), ())
    with open_slide(tmp_path / "a.svs", "cpu") as slide:
        name, image = next(iter(slide.associated_images.items()))
        size = image.read().nbytes
        monkeypatch.setattr(limits, "tile_bytes", size - 1)
        with pytest.raises(UnsupportedSlideError, match=f"{name} image .*'tile_bytes'"):
            image.read()


def test_floats_by_the_predictor_of_integers_are_converted(tmp_path):
    """They are encoded again, because no TIFF writer produces them."""
    pixels = slides.picture(64, 96, 1).astype(np.float32)
    options = {"compression": 8, "photometric": 1, "tile": (64, 96)}
    made = tiffbytes.page(pixels, tiffbytes.deflate, more={317: (SHORT, 2)}, **options)
    with open_slide(tiffbytes.write(tmp_path / "a.tif", [made])) as slide:
        expected = slide.levels[0][...]
        convert(slide, tmp_path / "b.tif")
    with open_slide(tmp_path / "b.tif") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)


def test_names_of_pictures_are_no_paths(tmp_path):
    record = '{"wsigpu": 1, "associated": "../../a"}'
    pages = [page(tile=(64, 96), description='{"wsigpu": 1}'), page(tile=None, description=record)]
    with open_slide(tiffbytes.write(tmp_path / "a.tif", pages)) as slide:
        assert not slide.associated_images


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed on this system")
@pytest.mark.parametrize("planted", [".part", ".part/data", ".part/journal"])
def test_a_conversion_follows_no_link(tmp_path, planted):
    path = tiffbytes.write(tmp_path / "a.tif", [page()])
    victim = tmp_path / "victim"
    link = tmp_path / f"b.tif{planted}"
    if "/" in planted:
        link.parent.mkdir()
        (link.parent / "journal").write_text("{}")
        link.unlink(missing_ok=True)
        victim.write_text("precious")
    else:
        victim.mkdir()
    link.symlink_to(victim)
    with (
        open_slide(path) as slide,
        pytest.raises(TargetExistsError, match="not an unfinished conversion"),
    ):
        convert(slide, tmp_path / "b.tif")
    assert victim.is_dir() or victim.read_text() == "precious"
    link.unlink()
