import logging
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from napari_wsigpu.reading.span import Span, overlaps

from napari_wsigpu import open_slide
from napari_wsigpu.codecs import raw
from napari_wsigpu.errors import SlideChangedError, SlideClosedError, SlideNotFoundError, TileError
from napari_wsigpu.reading import scheduler
from napari_wsigpu.reading.cache import tile_cache
from tests import slides, tiffbytes

TILE = (32, 48)


@pytest.fixture(params=["read at once", "read by who decodes"])
def reading(request, monkeypatch):
    """Both ways in which uncompressed tiles are read."""
    if request.param == "read by who decodes":
        monkeypatch.setattr(raw, "SMALLEST_READ", 0)


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


@given(st.integers(0, 200), st.integers(1, 60), st.integers(0, 30), st.integers(1, 50))
def test_overlaps_place_every_position_once(start, step, length, tile_size):
    found = overlaps(Span(start, step, length), tile_size)
    placed = np.full(length, -1)
    tiles = [overlap.tile for overlap in found]
    assert tiles == sorted(set(tiles))
    for tile, target, source in found:
        positions = tile * tile_size + np.arange(tile_size)[source]
        assert len(positions)
        assert (placed[target] == -1).all()
        placed[target] = positions
    np.testing.assert_array_equal(placed, start + step * np.arange(length))


class TestStats:
    def test_a_scripted_sequence(self, slide_of):
        slide, _ = slide_of(missing=[0])
        tile_bytes = 32 * 48 * 3
        names = ("tiles_asked", "cache_hits", "decoded", "background", "bytes_read", "failed")

        def stats():
            found = slide.stats()
            return tuple(found[name]["cpu"] if name == "decoded" else found[name] for name in names)

        assert stats() == (0, 0, 0, 0, 0, 0)
        slide.levels[0][:64, :96]  # cold: four tiles, one of them missing
        assert stats() == (4, 0, 3, 1, 3 * tile_bytes, 0)
        slide.levels[0][:64, :96]  # warm: a missing tile is no hit
        assert stats() == (8, 3, 3, 2, 3 * tile_bytes, 0)
        slide.clear_cache()
        slide.levels[0][40, 60]
        assert stats() == (9, 3, 4, 2, 4 * tile_bytes, 0)
        slide.levels[0][40:40, 60]  # nothing
        assert stats() == (9, 3, 4, 2, 4 * tile_bytes, 0)
        slide.levels[0][...]
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
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
        assert slide.stats()["bytes_read"] == 25 * 32 * 48 * 3

    def test_without_a_budget_pixels_are_the_same(self, slide_of, monkeypatch):
        slide, pixels = slide_of()
        before = tile_cache.budget
        try:
            tile_cache.budget = 0
            for _ in range(2):
                np.testing.assert_array_equal(slide.levels[0][...], pixels)
            assert tile_cache.used == 0
            assert slide.stats()["cache_hits"] == 0
        finally:
            tile_cache.budget = before

    def test_slides_do_not_share_tiles(self, slide_of):
        (first, pixels), (second, _) = slide_of(), slide_of(missing=range(25))
        first.levels[0][...]
        assert not second.levels[0][...].any()
        second.clear_cache()
        np.testing.assert_array_equal(first.levels[0][...], pixels)
        assert first.stats()["cache_hits"] == 25

    def test_close_drops_the_slides_tiles(self, slide_of):
        before = tile_cache.used
        slide, _ = slide_of()
        slide.levels[0][...]
        assert tile_cache.used > before
        slide.close()
        assert tile_cache.used == before


class TestBatches:
    @pytest.mark.parametrize(
        ("tiles", "size"), [(1, 1 << 30), (7, 1 << 30), (256, 10_000), (256, 1)]
    )
    def test_any_size_gives_the_same_pixels(self, slide_of, monkeypatch, tiles, size):
        monkeypatch.setattr(scheduler, "BATCH_TILES", tiles)
        monkeypatch.setattr(scheduler, "BATCH_BYTES", size)
        slide, pixels = slide_of(missing=[3])
        pixels[:32, 144:192] = 0
        np.testing.assert_array_equal(slide.levels[0][...], pixels)

    def test_an_error_while_reading_a_later_batch_surfaces(self, slide_of, monkeypatch):
        monkeypatch.setattr(scheduler, "BATCH_TILES", 5)
        slide, pixels = slide_of()
        source = slide._source
        asked = []

        def failing(read):
            def asked_for(ranges):
                asked.append(ranges)
                if len(asked) == 3:
                    raise SlideClosedError("gone")
                return read(ranges)

            return asked_for

        monkeypatch.setattr(source, "read", failing(source.read))
        monkeypatch.setattr(source, "fills", failing(source.fills))
        with pytest.raises(SlideClosedError, match="gone"):
            slide.levels[0][...]
        np.testing.assert_array_equal(slide.levels[0][...], pixels)

    def test_a_file_that_changes_between_batches(self, slide_of, monkeypatch):
        monkeypatch.setattr(scheduler, "BATCH_TILES", 5)
        slide, pixels = slide_of()
        before, cut = Path(slide.path).stat(), scheduler._batches

        def changing(*given):
            for number, batch in enumerate(cut(*given)):
                if number == 3:
                    os.utime(slide.path, ns=(0, 0))
                yield batch

        monkeypatch.setattr(scheduler, "_batches", changing)
        with pytest.raises(SlideChangedError):
            slide.levels[0][...]
        monkeypatch.setattr(scheduler, "_batches", cut)
        os.utime(slide.path, ns=(before.st_mtime_ns, before.st_mtime_ns))
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


class TestFailedTiles:
    def test_a_lost_file_is_background_on_the_way_to_the_screen(self, damaged, caplog):
        slide, _ = damaged
        level = slide.level_array(0, tolerant=True)
        level[:8, :8]
        slide.release()
        Path(slide.path).rename(Path(slide.path).with_suffix(".moved"))
        with pytest.raises(SlideNotFoundError):
            slide.levels[0][:8, :8]
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert (level[:100, :100] == slide.layout.background).all()
        said = [record.getMessage() for record in caplog.records]
        assert 1 <= len(said) <= 11
        assert "There is no file" in said[0]

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
        [((), [0, 5], ()), ((), (), range(12)), ((), range(16), range(8)), ([0, 9], [0, 1], [0])],
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
