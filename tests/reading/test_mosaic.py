import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.geometry import Rect, Span
from napari_wsigpu.model.layout import AxisMapping, Encoding, LevelLayout, Part, TileGrid
from napari_wsigpu.reading.cache import TileCache
from napari_wsigpu.reading.host import HostBackend
from napari_wsigpu.reading.log import TileLog
from napari_wsigpu.reading.mosaic import parts_of, touches
from napari_wsigpu.reading.parts import SlideParts
from napari_wsigpu.reading.plan import ReadOptions, Regions
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.slide import slide as opened
from napari_wsigpu.storage.memory import MemorySource
from tests.conftest import pinned_places
from tests.writers import leica, slides, tiffbytes
from tests.writers.leica import SPACING

HEIGHT, WIDTH = 60, 90
BACKGROUND = 9
RGB = Encoding(1, 2, 1, 1, "<", "uint8", 3)


def level(width, height, **more):
    """Describe a level whose tiles lie one after another in memory."""
    rows, columns = -(-height // 16), -(-width // 16)
    numbers = np.arange(rows * columns).reshape(1, rows, columns)
    grid = TileGrid(16, 16, 768 * numbers, np.full_like(numbers, 768))
    return LevelLayout(width, height, 3, RGB, grid, **more)


def pieces(*items, end):
    starts, sources = np.array(items, np.int64).T
    return AxisMapping(starts, sources, end)


PICTURES = {level(30, 20): slides.picture(20, 30), level(50, 40): 255 - slides.picture(40, 50)}
SMALL, LARGE = PICTURES
CANVAS = LevelLayout.mosaic(
    WIDTH,
    HEIGHT,
    [
        # It lies on the one after it: of each 16 pixels 12 columns and 14 rows are seen.
        Part(
            LARGE,
            rows=pieces((10, 0), (24, 16), (38, 32), end=46),
            columns=pieces((15, 0), (27, 16), (39, 32), (51, 48), end=53),
        ),
        Part.at(-7, 5, SMALL),
        Part.at(80, 50, SMALL),
    ],
)


def drawn():
    """The canvas as one is drawn by hand."""
    pixels = np.full((HEIGHT, WIDTH, 3), BACKGROUND, np.uint8)
    small, large = PICTURES.values()
    pixels[5:25, :23] = small[:, 7:]
    rows, columns = np.r_[0:14, 16:30, 32:40], np.r_[0:12, 16:28, 32:44, 48:50]
    pixels[10:46, 15:53] = large[rows][:, columns]
    pixels[50:, 80:] = small[:10, :10]
    return pixels


class Pictures:
    """Carries out plans of the canvas, whose pictures lie uncompressed in one block of memory."""

    def __init__(self):
        data, images = b"", {0: CANVAS}
        for number, (image, pixels) in enumerate(PICTURES.items(), 1):
            grid = replace(image.grid, offsets=image.grid.offsets + len(data))
            images[number] = replace(image, grid=grid)
            data += b"".join(map(bytes, tiffbytes.tiles(pixels, (16, 16))))
        laid = {image: images[number] for number, image in enumerate(PICTURES, 1)}
        parts = tuple(replace(part, image=laid[part.image]) for part in CANVAS.parts)
        images[0] = replace(CANVAS, parts=parts)
        self.images, self.decoder = images, CpuDecoder(0)
        self.log = TileLog("memory", {1: "small", 2: "large"})
        layout = SimpleNamespace(background=BACKGROUND)
        source = MemorySource(data)
        parts = SlideParts(1, layout, images, frozenset(), [], source, self.decoder, self.log)
        self.executor = HostBackend(parts, TileCache())

    def read(self, regions, **options):
        samples = () if "channel" in options else (3,)
        found = [np.full((*shape, *samples), 77, np.uint8) for shape in regions.shapes]
        plans = plan_regions(0, self.images, regions)
        self.executor.read(0, plans, found, ReadOptions(**options))
        return found


@st.composite
def spans(draw, extent):
    start = draw(st.integers(-10, extent - 1))
    step = draw(st.integers(1, 20))
    return Span(start, step, draw(st.integers(0, 9 - start // step + extent // step)))


def positions(pixels, rows, columns):
    """Take rows and columns of an array, of which some lie outside."""
    found = np.full((rows.length, columns.length, 3), BACKGROUND, pixels.dtype)
    ys, xs = (span.start + span.step * np.arange(span.length) for span in (rows, columns))
    below, beside = (ys >= 0) & (ys < HEIGHT), (xs >= 0) & (xs < WIDTH)
    found[np.ix_(below, beside)] = pixels[np.ix_(ys[below], xs[beside])]
    return found


@given(rows=spans(HEIGHT), columns=spans(WIDTH))
def test_any_positions(rows, columns):
    (found,) = Pictures().read(Regions.slice(rows, columns))
    np.testing.assert_array_equal(found, positions(drawn(), rows, columns))


def test_many_regions_at_once():
    rects = [Rect(0, 0, HEIGHT, WIDTH), Rect(8, 13, 20, 9), Rect(-5, 70, 90, 40), Rect(0, 60, 5, 5)]
    for rect, found in zip(rects, Pictures().read(Regions.of(rects)), strict=True):
        rows, columns = Span(rect.top, 1, rect.height), Span(rect.left, 1, rect.width)
        np.testing.assert_array_equal(found, positions(drawn(), rows, columns))


def test_one_channel():
    (found,) = Pictures().read(Regions.of([Rect(0, 0, HEIGHT, WIDTH)]), channel=1)
    np.testing.assert_array_equal(found, drawn()[..., 1])


def test_a_tile_that_lies_there_in_pieces_is_decoded_once():
    pictures = Pictures()
    pictures.read(Regions.of([Rect(0, 0, HEIGHT, WIDTH)] * 3))
    assert pictures.log.stats()["decoded"]["cpu"] == 12 + 4


def test_touches():
    def at(y, x, height=1, width=1):
        return touches(CANVAS, Rect(y, x, height, width))

    assert at(5, 0)
    assert not at(4, 0)
    assert not at(25, 0)
    assert at(45, 52)
    assert not at(46, 52)
    assert not at(45, 53)
    assert at(0, 0, HEIGHT, WIDTH)
    assert not at(5, 0, 0, 9)


def test_parts_get_numbers_and_names_of_their_own():
    found = parts_of([level(9, 9), CANVAS, LevelLayout.mosaic(9, 9, [Part.at(0, 0, SMALL)])])
    assert {number: part.name for number, part in found.items()} == {
        3: "level 1, part 0",
        4: "level 1, part 1",
        5: "level 2",
    }
    assert [part.image for part in found.values()] == [LARGE, SMALL, SMALL]


# Slides


SIZE = (301 * SPACING, 220 * SPACING)


def scans(**more):
    return [
        leica.scan(slides.picture(140, 100), 4 * SPACING, 10 * SPACING, (), **more),
        leica.scan(slides.picture(67, 121), 174 * SPACING, 121 * SPACING, (), **more),
    ]


@pytest.fixture(scope="module", autouse=True)
def small_screen():
    """Overviews are computed as if the slides were large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "LARGEST_OVERVIEW", 200)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return leica.write(
        tmp_path_factory.mktemp("slide") / "slide.scn",
        scans(tile=(16, 32)),
        SIZE,
        compression=7,
        photometric=6,
        encode=slides.jpeg_ycbcr,
    )


@pytest.fixture(scope="module")
def pixels(path):
    with open_slide(path, device="cpu") as slide:
        return slide.levels[0][...]


def test_computed_levels_are_averages(path, pixels):
    with open_slide(path, device="cpu") as slide:
        assert [level.layout.computed for level in slide.pyramid] == [False, True]
        assert slide.pyramid[1].layout.parts == ()
        overview = slide.level_array(1)
        np.testing.assert_array_equal(overview[...], slides.average(pixels, 2))
        np.testing.assert_array_equal(overview[3:90:4, 5], slides.average(pixels, 2)[3:90:4, 5])


def test_where_nothing_lies_no_tile_is_asked_for(path):
    with open_slide(path, device="cpu") as slide:
        assert (slide.read_region((110, 20), (120, 90)) == 255).all()
        assert slide.stats()["tiles_asked"] == 0
        slide.read_region((4, 10), (32, 16))
        assert slide.stats()["tiles_asked"] == 1
        assert slide.levels[0].chunks == (16, 32, 3)


def test_tiles_of_parts_are_kept_apart(path, pixels):
    """Both have tiles of the same row and column, beside those of an overview."""
    with open_slide(path, device="cpu") as slide:
        for _ in range(2):
            slide.level_array(1)[...]
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
        assert slide.stats()["cache_hits"]


def test_many_threads(path, pixels):
    with open_slide(path, device="cpu") as slide:
        wrong = []

        def work(seed):
            y, x = (int(v) for v in np.random.default_rng(seed).integers(0, 150, 2))
            if not np.array_equal(
                slide.levels[0][y : y + 70, x : x + 150], pixels[y : y + 70, x : x + 150]
            ):
                wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_device_decodes_parts(path, pixels, host_gpu):
    with open_slide(path, device="cuda") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
        decoded = slide.stats()["decoded"]
        assert decoded["nvimagecodec"] > decoded["cpu"]
        region = slide.read_region((80, 100), (120, 40), device="cuda")
        np.testing.assert_array_equal(host_gpu.download(region, None), pixels[100:140, 80:200])
        np.testing.assert_array_equal(slide.level_array(1)[...], slides.average(pixels, 2))


@pytest.mark.parametrize("missing", [(), (1, 5), range(12)])
def test_pictures_that_overlap_and_lack_tiles_are_the_same_on_a_device(tmp_path, host_gpu, missing):
    """The background of the one on top hides the other one."""
    one, other = (slides.picture(140, 100), 255 - slides.picture(67, 121))
    laid = [
        leica.scan(one, 4 * SPACING, 10 * SPACING, (), tile=(16, 32)),
        leica.scan(other, 60 * SPACING, 30 * SPACING, (), tile=(16, 32)),
    ]
    encoded = {"compression": 7, "photometric": 6, "encode": slides.jpeg_ycbcr}
    path = leica.write(tmp_path / "slide.scn", laid, SIZE, missing=missing, **encoded)
    where = [(0, 0), (50, 20), (90, 60), (-20, 100), (280, 200)]
    with open_slide(path, device="cpu") as slide:
        expected = slide.levels[0][...]
        (regions,) = slide.read_regions(where, (80, 70), batch_size=9, num_workers=0)
        channel = slide.level_array(0, 1)[3::2, 5:]
    np.testing.assert_array_equal(channel, expected[3::2, 5:, 1])
    with open_slide(path, device="cuda") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        options = {"batch_size": 9, "num_workers": 0, "device": "cuda"}
        (found,) = slide.read_regions(where, (80, 70), **options)
        np.testing.assert_array_equal(host_gpu.download(found, None), regions)
        np.testing.assert_array_equal(slide.level_array(0, 1)[3::2, 5:], channel)
    assert pinned_places() == 0


@pytest.fixture
def damaged(tmp_path):
    """A slide whose second part has a damaged tile."""
    calls = iter(range(1000))
    whole = leica.tiffbytes.deflate
    bad = 9 * 4 + 3  # after the tiles of the first part

    def encode(tile):
        return b"damaged" if next(calls) == bad else whole(tile)

    return leica.write(
        tmp_path / "slide.scn",
        scans(tile=(16, 32)),
        SIZE,
        encode=encode,
    )


def test_a_damaged_tile_is_named_with_its_part(damaged):
    with open_slide(damaged, device="cpu") as slide:
        pixels = slide.levels[0]
        assert pixels[:120].shape == (120, 301, 3)  # the part above it is whole
        with pytest.raises(SlideError, match="level 0, part 1, row 0, column 3"):
            pixels[...]
        tolerant = slide.level_array(0, tolerant=True)[...]
        assert (tolerant[121:137, 174 + 3 * 32 :] == 255).all()
        assert slide.level_array(1, tolerant=True)[...].shape == (110, 151, 3)
        assert slide.stats()["failed"] == 1


def test_a_part_that_cannot_be_decoded_is_refused_at_once(path, monkeypatch):
    encodings = []

    def refusal(self, encoding):
        encodings.append(encoding)
        return "no" if len(encodings) == 2 else None

    monkeypatch.setattr(CpuDecoder, "refusal", refusal)
    with pytest.raises(UnsupportedSlideError, match="no"):
        open_slide(path, device="cpu")
