"""Damaged and hostile files give pixels or one clear sentence: no crash, no memory, no wait."""

import json
import pickle
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.model import errors
from tests.conftest import SHARED_SLIDES
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import LONG, LONG8, SHORT, UNDEFINED

pytest.importorskip("resource", reason="memory can't be limited on this system")

PROBE = Path(__file__).with_name("probe.py")
MOST_MEMORY = 600 << 20
MOST_SECONDS = 5
BAD_SLIDES = sorted((SHARED_SLIDES / "bad").glob("*.tif"))


def run_probe(*paths, timeout=60):
    """Read slides in another process; a crash or other exception there fails the test."""
    done = subprocess.run(
        [sys.executable, PROBE, *paths],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{paths[len(lines)]}: {done.stderr[-3000:]}"
    for found in lines:
        name = Path(found["path"]).name
        assert found["peak"] < MOST_MEMORY, f"{name} took {found['peak'] >> 20} MiB"
        assert found["seconds"] < MOST_SECONDS
        assert found["pixels"] or found["errors"]
        for message in found["errors"]:
            assert_sentence(message, name)
    return lines


def assert_sentence(message, name):
    assert name in message
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 700


@pytest.mark.skipif(not BAD_SLIDES, reason=f"no damaged slides in {SHARED_SLIDES}/bad")
def test_shared_bad_slides():
    assert len(run_probe(*BAD_SLIDES, timeout=150)) == len(BAD_SLIDES)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.tif"


def write(path, encode=bytes, *, pixels=None, bigtiff=False, **options):
    pixels = slides.picture(64, 96) if pixels is None else pixels
    return tiffbytes.write(path, [tiffbytes.page(pixels, encode, **options)], bigtiff=bigtiff)


CLAIMS = {
    "terabytes in tiles": {256: (LONG, 2**31 - 1), 257: (LONG, 2**31 - 1)},
    "terabytes in a tile": {322: (LONG, 2**24), 323: (LONG, 2**24)},
    "a gigabyte in a tile": {322: (LONG, 2**14), 323: (LONG, 2**14)},
    "many channels": {277: (SHORT, 65535), 258: (SHORT, 8)},
    "tiles of one pixel": {256: (LONG, 2**20), 257: (LONG, 2**20), 322: (LONG, 1), 323: (LONG, 1)},
    "tiles of a gigabyte": {325: (LONG, [2**30] * 4)},
    "overlapping tiles": {324: (LONG, [8] * 4), 325: (LONG, [400] * 4)},
    "tiles in the header": {324: (LONG, [0, 1, 2, 3])},
    "offsets near 4 GiB": {324: (LONG, [2**32 - 1] * 4)},
    "a volume": {32997: (LONG, 1000), 32998: (LONG, 1000)},
    "no width": {256: (LONG, 0)},
    "no tile width": {322: (LONG, 0)},
}


CLAIMS_OF_64_BITS = [
    {324: (LONG8, [2**63] * 4)},
    {324: (LONG8, [2**64 - 1] * 4)},
    {325: (LONG8, [2**62] * 4)},
    {324: (LONG8, [2**61] * 4), 325: (LONG8, [2**61] * 4)},
    {256: (LONG8, 2**40), 257: (LONG8, 2**40)},
]


def test_hostile_claims(tmp_path):
    run_probe(
        *(write(tmp_path / f"{name}.tif", more=more) for name, more in CLAIMS.items()),
        *(
            write(tmp_path / f"{number}.tif", more=more, bigtiff=True)
            for number, more in enumerate(CLAIMS_OF_64_BITS)
        ),
    )


def test_a_sparse_slide_of_terapixels_opens(path):
    """What is huge and says so honestly is a slide, and costs what is read of it."""
    rows = columns = 400
    tile = 4096
    nothing = [0] * (rows * columns)
    more = {
        256: (LONG, tile * columns),
        257: (LONG, tile * rows),
        322: (LONG, tile),
        323: (LONG, tile),
        324: (LONG, nothing),
        325: (LONG, nothing),
    }
    (found,) = run_probe(write(path, more=more))
    assert found["errors"] == []


UNPACKED = 128 << 20
BOMBS = {
    8: lambda: zlib.compress(bytes(UNPACKED), 1),
    32773: lambda: b"\x81\0" * (UNPACKED // 128),
    34925: lambda: imagecodecs.lzma_encode(bytes(UNPACKED), level=0),
    50000: lambda: imagecodecs.zstd_encode(bytes(UNPACKED)),
}
AROUND_LERC = {1: 8, 2: 50000}


def test_bombs_are_not_unpacked(tmp_path):
    bombs = {compression: bomb() for compression, bomb in BOMBS.items()}
    forms = [(compression, compression, {}) for compression in BOMBS]
    for wrapping, compression in AROUND_LERC.items():
        forms.append((34887, compression, {50674: (LONG, (4, wrapping))}))
    paths = [
        write(
            tmp_path / f"{compression} of {inner}.tif",
            lambda _, bomb=bombs[inner]: bomb,
            compression=compression,
            more=more,
            tile=(64, 96),
        )
        for compression, inner, more in forms
    ]
    for path, found in zip(paths, run_probe(*paths), strict=True):
        assert found["grown"] < 80 << 20, path.name
        if path.name.startswith("34887"):
            assert "row 0, column 0" in found["errors"][0]


def claim_size(data, marker, place, size, form=">H"):
    """Overwrite height and width, `place` bytes after a marker."""
    start = data.index(marker) + place
    number = int(size).to_bytes(2 if form == ">H" else 4, "big")
    return data[:start] + number * 2 + data[start + 2 * len(number) :]


HUGE = np.zeros((4800, 7000, 3), np.uint8)
IMAGES_THAT_CLAIM = {
    "jpeg": (7, 6, lambda tile: claim_size(slides.jpeg_ycbcr(tile), b"\xff\xc0", 5, 65500)),
    "jpeg 2000": (
        34712,
        2,
        lambda tile: claim_size(
            imagecodecs.jpeg2k_encode(tile, codecformat="J2K"), b"\xff\x51", 6, 2**31 - 1, ">I"
        ),
    ),
    "jpeg 2000 with a huge tile": (
        34712,
        2,
        lambda tile: claim_size(
            imagecodecs.jpeg2k_encode(tile, codecformat="J2K"), b"\xff\x51", 22, 2**31 - 1, ">I"
        ),
    ),
    "webp": (50001, 2, lambda _: imagecodecs.webp_encode(HUGE, 1)),
    "jpeg xl": (50002, 2, lambda _: imagecodecs.jpegxl_encode(HUGE, effort=1)),
    "lerc": (34887, 2, lambda _: imagecodecs.lerc_encode(HUGE)),
}


def test_tiles_that_claim_to_be_huge(tmp_path):
    """The size in a tile's own header is checked before memory is taken for it."""
    paths = []
    for kind, (compression, photometric, encode) in IMAGES_THAT_CLAIM.items():
        tile = encode(slides.picture(64, 96))
        options = {"compression": compression, "photometric": photometric, "tile": (64, 96)}
        paths.append(write(tmp_path / f"{kind}.tif", lambda _, tile=tile: tile, **options))
    for kind, found in zip(IMAGES_THAT_CLAIM, run_probe(*paths), strict=True):
        assert found["grown"] < 80 << 20, kind
        if "tile" not in kind:
            assert any("row 0, column 0" in message for message in found["errors"]), kind


class TestTruncated:
    def test_only_the_tiles_beyond_the_end_are_lost(self, path):
        pixels = slides.picture(320, 96)
        write(path, pixels=pixels, tile=(32, 96))
        with open_slide(path) as slide:
            places = slide.layout.levels[0].grid.offsets.ravel().tolist()
        offsets = [*places[:5], *[10**9 + row for row in range(5)]]
        write(path, pixels=pixels, tile=(32, 96), more={324: (LONG, offsets)})
        with open_slide(path) as slide:
            np.testing.assert_array_equal(slide.levels[0][:160], pixels[:160])
            with pytest.raises(errors.TileError, match="row 7, column 0"):
                slide.levels[0][230]
            shown = slide.level_array(0, tolerant=True)[...]
            np.testing.assert_array_equal(shown[:160], pixels[:160])
            assert not shown[160:].any()
            assert slide.stats()["failed"] == 5

    @pytest.mark.parametrize("kind", ["tiles first", "tags first"])
    @given(data=st.data())
    @settings(max_examples=60)
    def test_at_any_byte(self, tmp_path, kind, data):
        path = tmp_path / "slide.svs"
        pixels = slides.picture(60, 90)
        if kind == "tiles first":
            slides.write_aperio(path, pixels, (2,))
        else:
            slides.write_pyramid(path, pixels, (2,))
        content = path.read_bytes()
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        pixels_or_error(path)

    @given(
        flips=st.lists(
            st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8
        )
    )
    @settings(max_examples=120)
    def test_any_bytes_overwritten(self, tmp_path, flips):
        path = tmp_path / "slide.tif"
        write(path, lambda tile: zlib.compress(tile.tobytes()), compression=8, subifds=())
        content = bytearray(path.read_bytes())
        for place, value in flips:
            # Half of the damage falls on the tags, which lie at the end.
            content[place % len(content) if place % 2 else -1 - place % 300] = value
        path.write_bytes(content)
        pixels_or_error(path)


def pixels_or_error(path):
    """Read every level of a small slide; nothing but a `SlideError` may be raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with open_slide(path) as slide:
                for index, level in enumerate(slide.levels):
                    if level.size > 1 << 22:
                        level = level[:50, :50]
                    try:
                        assert np.asarray(level).shape == level.shape
                    except SlideError as error:
                        assert_sentence(str(error), path.name)
                        part = slide.level_array(index, tolerant=True)[:200, :200]
                        assert part.ndim == 3
        except SlideError as error:
            assert_sentence(str(error), path.name)


FUZZED = {
    "lzw": (5, 2, lambda tile: imagecodecs.lzw_encode(tile.tobytes())),
    "deflate": (8, 2, lambda tile: zlib.compress(tile.tobytes())),
    "packbits": (32773, 2, lambda tile: imagecodecs.packbits_encode(tile.tobytes())),
    "lzma": (34925, 2, lambda tile: imagecodecs.lzma_encode(tile.tobytes())),
    "zstd": (50000, 2, lambda tile: imagecodecs.zstd_encode(tile.tobytes())),
    "jpeg": (7, 6, slides.jpeg_ycbcr),
    "jpeg 2000": (34712, 2, lambda tile: imagecodecs.jpeg2k_encode(tile, codecformat="J2K")),
    "aperio jpeg 2000": (33003, 2, lambda tile: imagecodecs.jpeg2k_encode(tile, codecformat="J2K")),
    "webp": (50001, 2, lambda tile: imagecodecs.webp_encode(tile, level=80)),
    "jpeg xl": (50002, 2, imagecodecs.jpegxl_encode),
    "lerc": (34887, 2, imagecodecs.lerc_encode),
}


def test_damaged_tiles_of_every_codec(tmp_path):
    """In another process, because a codec may end it."""
    run_probe(*(path for kind in FUZZED for path in damaged(tmp_path, kind)), timeout=150)


def damaged(folder, kind):
    """Write slides with damaged tiles."""
    compression, photometric, encode = FUZZED[kind]
    rng = np.random.default_rng(len(kind))
    encoded: dict[bytes, bytes] = {}
    more = {}
    if kind == "jpeg":
        more[347] = (UNDEFINED, slides.split_tables(encode(slides.picture(32, 48)))[0])
    paths = []
    for number in range(40):

        def damage(tile):
            key = tile.tobytes()
            if key not in encoded:
                encoded[key] = encode(tile)
            data = bytearray(encoded[key])
            start = 0 if rng.random() < 0.5 else int(rng.integers(len(data)))
            for place in rng.integers(start, min(len(data), start + 64), rng.integers(1, 9)):
                data[place] = rng.integers(256)
            return bytes(data[: rng.integers(1, len(data))] if rng.random() < 0.2 else data)

        path = folder / f"{kind} {number}.tif"
        paths.append(
            write(path, damage, compression=compression, photometric=photometric, more=more)
        )
    return paths


BUILTINS = {
    "SlideNotFoundError": FileNotFoundError,
    "SlidePermissionError": PermissionError,
    "SlideReadError": OSError,
    "NotASlideError": ValueError,
    "UnsupportedSlideError": ValueError,
    "CorruptSlideError": ValueError,
    "SlideChangedError": OSError,
    "SlideClosedError": ValueError,
    "RegionError": ValueError,
    "LevelError": IndexError,
    "NoSuchItemError": KeyError,
    "MissingPackageError": ImportError,
    "UnsupportedArrayError": NotImplementedError,
    "LayerError": ValueError,
    "DisplayTimeoutError": TimeoutError,
    "AnnotationError": ValueError,
    "PlaneError": IndexError,
    "ConversionError": ValueError,
    "ConversionCancelledError": RuntimeError,
    "TargetExistsError": FileExistsError,
    "TargetWriteError": OSError,
    "DeviceError": RuntimeError,
    "TileError": ValueError,
}


class TestErrors:
    def test_the_table_is_complete(self):
        kinds = {
            name
            for name, kind in vars(errors).items()
            if isinstance(kind, type) and issubclass(kind, Exception) and name != "SlideError"
        }
        assert kinds == set(BUILTINS)

    @pytest.mark.parametrize("name", BUILTINS)
    def test_they_are_the_builtin_that_fits(self, name):
        assert issubclass(getattr(errors, name), (SlideError, BUILTINS[name]))
        assert issubclass(getattr(errors, name), BUILTINS[name])

    @pytest.mark.parametrize("name", sorted(set(BUILTINS) - {"TileError"}))
    def test_they_survive_pickling(self, name):
        error = getattr(errors, name)("One sentence about 'slide.tif'.")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)

    def test_a_tile_error_keeps_its_tiles(self):
        failures = [("level 0, row 3, column 7", "it is empty"), ("level 1, row 0, column 0", "x")]
        error = errors.TileError("slide.tif", failures)
        copy = pickle.loads(pickle.dumps(error))
        assert copy.failures == tuple(failures)
        assert copy.path == "slide.tif"
        assert str(copy) == str(error)
        assert "row 3, column 7" in str(error)
        assert "1 more" in str(error)

    def test_a_tile_error_keeps_its_locations(self):
        error = errors.TileError("slide.tif", [("level 0, row 0, column 0", "x")], (1,))
        error = error.among([(0, 0), (np.int64(32), 64)])
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.regions, copy.locations) == ((1,), ((32, 64),))
        assert str(copy) == str(error)
