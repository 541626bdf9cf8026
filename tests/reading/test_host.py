import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.codecs import raw
from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.model.errors import (
    SlideChangedError,
    SlideClosedError,
    SlideNotFoundError,
    TileError,
)
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading import host
from napari_wsigpu.reading.cache import TileCache
from napari_wsigpu.reading.host import HostBackend
from napari_wsigpu.reading.log import TileLog
from napari_wsigpu.reading.parts import SlideParts
from napari_wsigpu.reading.plan import Cancellation, ReadOptions, Regions
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.slide import runtime
from tests.writers import slides, tiffbytes

TILE = (32, 48)
WHOLE = Regions.of([Rect(0, 0, 160, 240)])


@pytest.fixture(params=["read at once", "read by who decodes"])
def reading(request, monkeypatch):
    """Both ways in which uncompressed tiles are read."""
    if request.param == "read by who decodes":
        monkeypatch.setattr(raw, "SMALLEST_READ", 0)


class Checked(Cancellation):
    """Calls a function instead of looking at a flag."""

    def __init__(self, check):
        super().__init__()
        self.check = check


@pytest.fixture
def slide_of(tmp_path, reading):
    """Open a slide of 5 x 5 uncompressed tiles, and overwrite some by something short."""
    opened = []

    def make(missing=()):
        pixels = slides.picture(160, 240)
        page = tiffbytes.page(pixels, bytes, tile=TILE, missing=missing)
        slide = open_slide(tiffbytes.write(tmp_path / f"slide{len(opened)}.tif", [page]))
        opened.append(slide)
        return slide, pixels

    yield make
    for slide in opened:
        slide.close()


@pytest.fixture
def damaged(tmp_path, reading):
    """A slide of 5 x 5 tiles of which those at (1, 2) and (4, 4) are too short."""
    pixels = slides.picture(160, 240)
    numbers = iter(range(25))
    page = tiffbytes.page(
        pixels,
        lambda tile: tile.tobytes()[:99] if next(numbers) in (7, 24) else tile.tobytes(),
        tile=TILE,
    )
    with open_slide(tiffbytes.write(tmp_path / "damaged.tif", [page])) as slide:
        expected = pixels.copy()
        expected[32:64, 96:144] = expected[128:, 192:] = 0
        yield slide, expected


class TestStats:
    def test_a_scripted_sequence(self, slide_of):
        slide, _ = slide_of(missing=[0])
        tile_bytes = 32 * 48 * 3
        names = ("tiles_asked", "cache_hits", "decoded", "background", "bytes_read", "failed")

        def stats():
            found = slide.stats()
            return tuple(found[name]["cpu"] if name == "decoded" else found[name] for name in names)

        assert stats() == (0, 0, 0, 0, 0, 0)
        level = slide.level_array(0, tolerant=True)
        level[:64, :96]  # cold: four tiles, one of them missing
        assert stats() == (4, 0, 3, 1, 3 * tile_bytes, 0)
        level[:64, :96]  # warm: a missing tile is no hit
        assert stats() == (8, 3, 3, 2, 3 * tile_bytes, 0)
        slide.clear_cache()
        level[40, 60]
        assert stats() == (9, 3, 4, 2, 4 * tile_bytes, 0)
        level[40:40, 60]  # nothing
        assert stats() == (9, 3, 4, 2, 4 * tile_bytes, 0)
        level[...]
        assert stats() == (34, 4, 27, 3, 27 * tile_bytes, 0)

    def test_failed_tiles_are_counted_once(self, damaged):
        slide, _ = damaged
        for _ in range(3):
            slide.level_array(0, tolerant=True)[...]
        stats = slide.stats()
        assert stats["failed"] == 2
        assert set(stats["failed_tiles"]) == {
            "level 0, row 1, column 2",
            "level 0, row 4, column 4",
        }
        assert stats["decoded"] == {"cpu": 23}
        assert stats["cache_hits"] == 46


class TestCache:
    def test_nothing_is_read_twice(self, slide_of):
        slide, pixels = slide_of()
        for _ in range(2):
            np.testing.assert_array_equal(slide.level_array(0, tolerant=True)[...], pixels)
        assert slide.stats()["bytes_read"] == 25 * 32 * 48 * 3

    def test_regions_that_are_read_together_share_their_tiles(self, slide_of):
        slide, pixels = slide_of()
        where = [(x, y) for y in range(0, 100, 9) for x in range(0, 150, 11)]
        (found,) = slide.read_regions(where, (60, 50), batch_size=len(where), num_workers=0)
        for region, (x, y) in zip(found, where, strict=True):
            np.testing.assert_array_equal(region, pixels[y : y + 50, x : x + 60])
        stats = slide.stats()
        assert stats["tiles_asked"] == stats["decoded"]["cpu"] == 25
        assert stats["bytes_read"] == 25 * 32 * 48 * 3

    @pytest.mark.parametrize(
        ("keep", "kept"), [("all", 25), ("partly", 16), ("none", 0), ("recurring", 0)]
    )
    def test_which_tiles_stay(self, slide_of, keep, kept):
        slide, pixels = slide_of()
        regions = Regions.of([Rect(20, 40, 120, 160)])  # 9 of the 25 tiles as a whole
        (found,) = slide._reader.read(0, regions, ReadOptions(keep=keep))
        np.testing.assert_array_equal(found, pixels[20:140, 40:200])
        slide._reader.read(0, regions)
        assert slide.stats()["cache_hits"] == kept

    def test_a_channel_keeps_tiles_that_others_may_want(self, slide_of):
        slide, pixels = slide_of()
        for channel in range(3):
            (found,) = slide._reader.read(0, WHOLE, ReadOptions(keep="partly", channel=channel))
            np.testing.assert_array_equal(found, pixels[..., channel])
        assert slide.stats()["cache_hits"] == 50

    def test_without_a_budget_pixels_are_the_same(self, slide_of, monkeypatch):
        slide, pixels = slide_of()
        before = runtime.default().tiles.budget
        try:
            runtime.default().tiles.budget = 0
            for _ in range(2):
                np.testing.assert_array_equal(slide.levels[0][...], pixels)
            assert runtime.default().tiles.used == 0
            assert slide.stats()["cache_hits"] == 0
        finally:
            runtime.default().tiles.budget = before

    def test_slides_do_not_share_tiles(self, slide_of):
        (first, pixels), (second, _) = slide_of(), slide_of(missing=range(25))
        first.level_array(0, tolerant=True)[...]
        assert not second.levels[0][...].any()
        second.clear_cache()
        np.testing.assert_array_equal(first.levels[0][...], pixels)
        assert first.stats()["cache_hits"] == 25

    def test_close_drops_the_slides_tiles(self, slide_of):
        before = runtime.default().tiles.used
        slide, _ = slide_of()
        slide.level_array(0, tolerant=True)[...]
        assert runtime.default().tiles.used > before
        slide.close()
        assert runtime.default().tiles.used == before


@pytest.mark.usefixtures("without_core")
class TestBatches:
    @pytest.mark.parametrize(
        ("tiles", "size"), [(1, 1 << 30), (7, 1 << 30), (256, 10_000), (256, 1)]
    )
    def test_any_size_gives_the_same_pixels(self, slide_of, monkeypatch, tiles, size):
        limits = host.PYTHON_LIMITS._replace(tiles=tiles, encoded_bytes=size)
        monkeypatch.setattr(host, "PYTHON_LIMITS", limits)
        slide, pixels = slide_of(missing=[3])
        pixels[:32, 144:192] = 0
        np.testing.assert_array_equal(slide.levels[0][...], pixels)

    def test_an_error_while_reading_a_later_batch_surfaces(self, slide_of, monkeypatch):
        monkeypatch.setattr(host, "PYTHON_LIMITS", host.PYTHON_LIMITS._replace(tiles=5))
        slide, pixels = slide_of()
        source = slide._source
        asked = []

        def failing(read):
            def asked_for(*ranges):
                asked.append(ranges)
                if len(asked) == 3:
                    raise SlideClosedError("gone")
                return read(*ranges)

            return asked_for

        monkeypatch.setattr(source, "read_joined", failing(source.read_joined))
        monkeypatch.setattr(source, "fills", failing(source.fills))
        with pytest.raises(SlideClosedError, match="gone"):
            slide.levels[0][...]
        np.testing.assert_array_equal(slide.levels[0][...], pixels)

    def test_a_file_that_changes_between_batches(self, slide_of, monkeypatch):
        monkeypatch.setattr(host, "PYTHON_LIMITS", host.PYTHON_LIMITS._replace(tiles=5))
        slide, pixels = slide_of()
        checks = []

        def check():
            checks.append(1)
            if len(checks) == 4:
                os.utime(slide.path, ns=(0, 0))

        with pytest.raises(SlideChangedError):
            slide._reader.read(0, WHOLE, ReadOptions(cancellation=Checked(check)))
        with open_slide(slide.path, "cpu") as again:
            np.testing.assert_array_equal(again.levels[0][...], pixels)

    def test_who_does_not_want_it_any_more_ends_it(self, slide_of, monkeypatch):
        """Between batches; none is in flight when it has ended."""
        monkeypatch.setattr(host, "PYTHON_LIMITS", host.PYTHON_LIMITS._replace(tiles=5))
        slide, pixels = slide_of()
        checks = []

        def check():
            checks.append(1)
            if len(checks) == 3:
                raise KeyError("nobody waits")

        with pytest.raises(KeyError, match="nobody"):
            slide._reader.read(0, WHOLE, ReadOptions(cancellation=Checked(check)))
        decoded = slide.stats()["decoded"]["cpu"]
        assert decoded <= 10
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
        assert slide.stats()["bytes_read"] <= 35 * 32 * 48 * 3


class Watched(CpuDecoder):
    """A decoder that knows which batches are in flight, and how many at most were."""

    def __init__(self):
        super().__init__(0)
        self.flying, self.most = set(), 0

    def schedule(self, *given):
        pending = super().schedule(*given)
        self.flying.add(pending)
        self.most = max(self.most, len(self.flying))
        cancel = pending.cancel

        def cancelled():  # by who waits, too
            self.flying.discard(pending)
            cancel()

        pending.cancel = cancelled
        return pending


class TestManyRegions:
    """Of several sizes, carried out at once by an executor of its own."""

    RECTS = (
        Rect(0, 0, 160, 240),
        Rect(-9, 200, 60, 90),
        Rect(33, 50, 0, 7),
        Rect(500, 500, 4, 5),
        Rect(31, 47, 2, 2),
    )

    @pytest.fixture
    def executor(self, slide_of):
        slide, pixels = slide_of(missing=[7])
        pixels[32:64, 96:144] = 0
        self.images = {0: slide.layout.levels[0]}
        self.log, self.cache = TileLog(slide.path, {}), TileCache()
        decoder = CpuDecoder(2)
        yield (
            HostBackend(
                SlideParts(
                    1,
                    replace(slide.layout, background=7),
                    self.images,
                    frozenset(),
                    slide.pyramid,
                    slide._source,
                    decoder,
                    self.log,
                ),
                self.cache,
            ),
            pixels,
        )
        decoder.release()

    @staticmethod
    def part(pixels, rect, background, step=(1, 1)):
        ys = rect.top + step[0] * np.arange(rect.height)
        xs = rect.left + step[1] * np.arange(rect.width)
        found = np.full((rect.height, rect.width, 3), background, pixels.dtype)
        below, beside = (ys >= 0) & (ys < len(pixels)), (xs >= 0) & (xs < pixels.shape[1])
        found[np.ix_(below, beside)] = pixels[np.ix_(ys[below], xs[beside])]
        return found

    @pytest.mark.parametrize("step", [(1, 1), (3, 7), (40, 60)])
    @pytest.mark.parametrize("channel", [None, 1])
    def test_each_comes_to_its_place(self, executor, step, channel):
        executor, pixels = executor
        pixels = pixels.copy()
        pixels[32:64, 96:144] = 7  # the background that this executor was told
        regions = replace(Regions.of(self.RECTS), step=step)
        plans = plan_regions(0, self.images, regions)
        for _ in ("cold", "warm"):
            samples = () if channel is not None else (3,)
            found = [np.full((*shape, *samples), 99, np.uint8) for shape in regions.shapes]
            executor.read(0, plans, found, ReadOptions(channel=channel))
            for rect, region in zip(self.RECTS, found, strict=True):
                expected = self.part(pixels, rect, 7, step)
                expected = expected if channel is None else expected[..., channel]
                np.testing.assert_array_equal(region, expected)
        stats = self.log.stats()
        assert stats["decoded"]["cpu"] == stats["cache_hits"] == len(plans[0].tiles)

    def test_whole_tiles(self, executor):
        executor, pixels = executor
        tiles = [(0, 0), (4, 4), (1, 2), (3, 1)]
        regions = Regions.of(self.images[0].tile_rect(*tile) for tile in tiles)
        (plan,) = plan_regions(0, self.images, regions)
        found = executor.read_tiles(plan, ReadOptions(tolerant=True))
        assert sorted(found) == [(0, 0), (3, 1), (4, 4)]  # the other one shows the background
        for (row, column), tile in found.items():
            place = slice(32 * row, 32 * row + 32), slice(48 * column, 48 * column + 48)
            np.testing.assert_array_equal(tile, pixels[place])
        assert self.cache.used == 3 * 32 * 48 * 3

    @pytest.mark.usefixtures("without_core")
    @pytest.mark.parametrize("ends", [None, 2, 4])
    def test_no_more_than_two_batches_are_in_flight(self, slide_of, monkeypatch, ends):
        """And none any more when it has ended, however it did."""
        monkeypatch.setattr(host, "PYTHON_LIMITS", host.PYTHON_LIMITS._replace(tiles=3))
        slide, _ = slide_of()
        images, decoder, checks = {0: slide.layout.levels[0]}, Watched(), []

        def check():
            checks.append(1)
            if len(checks) == ends:
                raise KeyError("nobody waits")

        log = TileLog(slide.path, {})
        layout = replace(slide.layout, background=0)
        parts = SlideParts(
            1, layout, images, frozenset(), slide.pyramid, slide._source, decoder, log
        )
        executor = HostBackend(parts, TileCache())
        found = [np.empty((160, 240, 3), np.uint8)]
        with nullcontext() if ends is None else pytest.raises(KeyError):
            executor.read(
                0, plan_regions(0, images, WHOLE), found, ReadOptions(cancellation=Checked(check))
            )
        assert decoder.most == min(2, ends - 1 if ends else 2)
        assert decoder.flying == set()

    def test_nothing_of_no_regions(self, executor):
        executor, _ = executor
        regions = Regions.of([])
        executor.read(0, plan_regions(0, self.images, regions), [], ReadOptions())
        assert self.log.stats()["tiles_asked"] == 0


class TestFailedTiles:
    def test_a_lost_file_is_no_background_even_on_the_way_to_the_screen(self, damaged):
        slide, _ = damaged
        slide.release()
        Path(slide.path).rename(Path(slide.path).with_suffix(".moved"))
        for level in (slide.levels[0], slide.level_array(0, tolerant=True)):
            with pytest.raises(SlideNotFoundError):
                level[:8, :8]
        assert slide.stats()["failed"] == 0

    def test_an_exact_read_names_the_tile(self, damaged):
        slide, _ = damaged
        with pytest.raises(TileError, match=r"level 0, row 1, column 2.*damaged\.tif") as info:
            slide.levels[0][32:64, 96:144]
        assert [name for name, _ in info.value.failures] == ["level 0, row 1, column 2"]

    def test_an_exact_read_names_all_tiles(self, damaged):
        slide, _ = damaged
        with pytest.raises(TileError, match="1 more") as info:
            slide.read_region((0, 0), slide.dimensions)
        assert [name for name, _ in info.value.failures] == [
            "level 0, row 1, column 2",
            "level 0, row 4, column 4",
        ]

    def test_the_rest_can_be_read(self, damaged):
        slide, expected = damaged
        np.testing.assert_array_equal(slide.levels[0][:32], expected[:32])
        np.testing.assert_array_equal(slide.levels[0][:, :96], expected[:, :96])

    def test_a_tolerant_level_shows_background_and_says_so_once(self, damaged, caplog):
        slide, expected = damaged
        level = slide.level_array(0, tolerant=True)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                np.testing.assert_array_equal(level[...], expected)
                np.testing.assert_array_equal(level[32:64, 96:144], expected[32:64, 96:144])
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        assert "level 0, row 1, column 2" in messages[0]
        assert "damaged.tif" in messages[0]
        assert "level 0, row 4, column 4" in messages[1]

    def test_a_tile_that_failed_exactly_is_still_reported_when_it_is_shown(self, damaged, caplog):
        slide, _ = damaged
        with pytest.raises(TileError):
            slide.levels[0][...]
        with caplog.at_level(logging.WARNING):
            slide.level_array(0, tolerant=True)[...]
        assert len(caplog.records) == 2

    def test_an_exact_read_fails_after_a_tolerant_one(self, damaged):
        slide, _ = damaged
        slide.level_array(0, tolerant=True)[...]
        with pytest.raises(TileError):
            slide.levels[0][40, 100]

    def test_a_listener_is_told_once(self, damaged):
        slide, _ = damaged
        told = []
        slide.on_failed_tile(lambda name, reason: told.append((name, reason)))
        for _ in range(2):
            slide.level_array(0, tolerant=True)[...]
        assert [name for name, _ in told] == [
            "level 0, row 1, column 2",
            "level 0, row 4, column 4",
        ]
        assert all(reason for _, reason in told)

    def test_a_channel_of_a_tolerant_level(self, damaged):
        slide, expected = damaged
        level = slide.level_array(0, 1, tolerant=True)
        np.testing.assert_array_equal(level[...], expected[..., 1])


def put_back(pixels, missing, tile, value):
    """Fill the tiles of these numbers with one value."""
    columns = -(-pixels.shape[1] // tile[1])
    filled = pixels.copy()
    for number in missing:
        y, x = number // columns * tile[0], number % columns * tile[1]
        filled[y : y + tile[0], x : x + tile[1]] = value
    return filled


def aperio_with_gaps(path, missing):
    """Write a lossless Aperio slide of 3 levels with missing tiles, and return its levels."""
    return slides.write_aperio(
        path,
        slides.picture(331, 473),
        (2, 2),
        missing=missing,
        tile=(48, 64),
        compression=1,
        encode=bytes,
    )


class TestMissingTiles:
    def test_level_0_of_aperio_is_white(self, tmp_path):
        missing = [0, 9, 20]
        (pixels, *_) = aperio_with_gaps(tmp_path / "slide.svs", (missing, (), ()))
        with open_slide(tmp_path / "slide.svs") as slide:
            expected = put_back(pixels, missing, (48, 64), 255)
            np.testing.assert_array_equal(slide.levels[0][...], expected)

    @pytest.mark.parametrize(
        "missing",
        [((), [0, 5], [0]), ((), (), range(12)), ((), range(16), range(8)), ([0, 9], [0, 1], [0])],
    )
    def test_lower_levels_of_aperio_are_averages_of_the_finer(self, tmp_path, missing):
        stored = aperio_with_gaps(tmp_path / "slide.svs", missing)
        with open_slide(tmp_path / "slide.svs") as slide:
            finer = put_back(stored[0], missing[0], (48, 64), 255)
            for index in (1, 2):
                expected = stored[index].copy()
                means = slides.average(finer, 2)
                columns = -(-expected.shape[1] // 64)
                for number in missing[index]:
                    y, x = number // columns * 48, number % columns * 64
                    place = slice(y, y + 48), slice(x, x + 64)
                    expected[place] = means[: expected.shape[0], : expected.shape[1]][place]
                np.testing.assert_array_equal(slide.levels[index][...], expected)
                np.testing.assert_array_equal(slide.levels[index][::-3, 5::7], expected[::-3, 5::7])
                finer = expected

    def test_a_computed_tile_is_kept(self, tmp_path):
        aperio_with_gaps(tmp_path / "slide.svs", ((), [0], ()))
        with open_slide(tmp_path / "slide.svs") as slide:
            slide.levels[1][:48, :64]
            slide.levels[1][:48, :64]
            assert slide.stats()["computed"] == 1

    def test_a_failed_finer_tile_is_named(self, tmp_path):
        path = tmp_path / "slide.svs"
        numbers = iter(range(1000))

        def encode(tile):
            return tile.tobytes()[:5] if next(numbers) == 0 else tile.tobytes()

        slides.write_aperio(
            path,
            slides.picture(331, 473),
            (2,),
            missing=((), [0]),
            compression=1,
            encode=encode,
        )
        with open_slide(path) as slide:
            with pytest.raises(TileError, match="level 0, row 0, column 0"):
                slide.levels[1][...]
            shown = slide.level_array(1, tolerant=True)
            assert (shown[:24, :32] == 255).all()
            with pytest.raises(TileError):
                slide.levels[1][...]
