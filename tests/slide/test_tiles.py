"""Grids of regions over a level, and regions at arbitrary resolutions."""

from __future__ import annotations

import gc
import math
import os
import shutil
from types import FrameType

import numpy as np
import pytest
import tifffile

from napari_wsigpu import native, open_slide
from napari_wsigpu.errors import (
    LevelError,
    NotASlideError,
    RegionError,
    SlideChangedError,
    TileError,
)
from napari_wsigpu.reading import scaling
from napari_wsigpu.reading.reader import RegionReader
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide.runtime import Runtime
from tests.writers import slides

HEIGHT, WIDTH, TILE = 700, 900, 64
MPP = 0.25


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("tiles") / "slide.svs"
    fields = ("AppMag = 40", f"MPP = {MPP}")
    slides.write_aperio(found, slides.picture(HEIGHT, WIDTH), fields=fields, tile=(TILE, TILE))
    return found


@pytest.fixture
def slide(path):
    with open_slide(path, device="cpu") as found:
        yield found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("size", "overlap", "batch_size"),
    [
        (64, 0, 16),
        (128, 0, 5),
        (50, 0, 7),
        (50, 20, 7),
        ((30, 90), 3, 64),
        (1000, 0, 2),
        (17, 0, 99),
    ],
)
def test_a_grid_shows_the_level_and_decodes_each_tile_once(
    path, slide, host_gpu, device, size, overlap, batch_size
):
    width, height = (size, size) if isinstance(size, int) else size
    beyond = slide.read_region((0, 0), (WIDTH + width, HEIGHT + height))
    seen = set()
    with open_slide(path, device=device) as read:
        options = {"overlap": overlap, "batch_size": batch_size, "device": device}
        for batch, locations in read.tiles(size, **options):
            assert len(batch) == len(locations) <= batch_size
            for pixels, (x, y) in zip(batch, locations, strict=True):
                assert np.array_equal(pixels, beyond[y : y + height, x : x + width])
            seen.update(locations)
        grid = read.layout.levels[0].grid
        assert sum(read.stats()["decoded"].values()) == grid.rows * grid.columns
    columns, rows = {x for x, _ in seen}, {y for _, y in seen}
    assert seen == {(x, y) for x in columns for y in rows}
    assert columns == set(range(0, max(columns) + 1, width - overlap))
    assert max(columns) < WIDTH <= max(columns) + width
    assert max(rows) < HEIGHT <= max(rows) + height


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_that_bands_share_outlive_those_of_other_rows(path, host_machine, device):
    with runtime.using(Runtime(host_machine.devices())) as own:
        rows, columns = -(-HEIGHT // TILE), -(-WIDTH // TILE)
        room = TILE * TILE * 3 * columns * (rows - 4)
        own.tiles.budget = own.devices.tiles(host_machine.device).budget = room
        with open_slide(path, device=device) as slide:
            for _ in slide.tiles(30, overlap=10, batch_size=4, device=device):
                assert own.tiles.used <= room
            assert sum(slide.stats()["decoded"].values()) == rows * columns
    own.close()


def test_locations_of_a_coarser_level(slide):
    for batch, locations in slide.tiles(40, level=1, batch_size=8):
        for pixels, location in zip(batch, locations, strict=True):
            assert np.array_equal(pixels, slide.read_region(location, (40, 40), 1))


def test_grid_at_a_resolution_matches_regions(slide):
    for batch, locations in slide.tiles(40, mpp=0.61, batch_size=8):
        for pixels, location in zip(batch, locations, strict=True):
            assert np.array_equal(pixels, slide.read_region(location, (40, 40), mpp=0.61))


def test_a_closed_grid_leaves_nothing(path, leaves_nothing):
    with open_slide(path, device="cpu") as slide:
        tiles = slide.tiles(32, batch_size=4)
        next(tiles)
        tiles.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"size": 0}, RegionError),
        ({"size": "a"}, RegionError),
        ({"size": 64, "overlap": 64}, RegionError),
        ({"size": 64, "overlap": -1}, RegionError),
        ({"size": 64, "level": 9}, LevelError),
        ({"size": 64, "batch_size": 0}, RegionError),
        ({"size": 64, "mpp": 0.5, "level": 1}, RegionError),
    ],
)
def test_invalid_grids_are_refused(slide, wrong, error):
    with pytest.raises(error):
        next(iter(slide.tiles(**wrong)))


def averaged(pixels, size, scale):
    """Return the mean of the area under each pixel, computed in the obvious, slow way."""
    found = np.zeros((*size, pixels.shape[2]))
    for y, x in np.ndindex(size):
        top, left = y * scale, x * scale
        bottom, right = min(top + scale, len(pixels)), min(left + scale, pixels.shape[1])
        total, weights = np.zeros(pixels.shape[2]), 0.0
        for row in range(int(top), math.ceil(bottom)):
            for column in range(int(left), math.ceil(right)):
                down = min(bottom, row + 1) - max(top, row)
                across = min(right, column + 1) - max(left, column)
                total += down * across * pixels[row, column]
                weights += down * across
        found[y, x] = total / weights
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mpp", [0.25, 0.3, 0.61])
def test_a_resolution_is_an_area_average_of_the_finer_level(path, host_gpu, device, mpp):
    location, size = (101, 53), (23, 17)
    scale = mpp / MPP
    with open_slide(path, device=device) as slide:
        height, width = (math.ceil(length * scale - 1e-6) for length in size[::-1])
        source = int(scale >= 2)
        down = scale / 2**source
        height, width = (math.ceil(length * down - 1e-6) for length in size[::-1])
        finer = slide.read_region(location, (width, height), source)
        found = slide.read_region(location, size, mpp=mpp, device=device)
        assert found.shape == (17, 23, 3)
        assert np.abs(found - averaged(finer, size[::-1], down)).max() <= 0.51
        [batch] = slide.read_regions([location], size, mpp=mpp, batch_size=1, device=device)
        assert np.array_equal(batch[0], found)


def test_resolution_of_a_level_reads_that_level(slide):
    found = slide.read_region((40, 80), (30, 20), mpp=2 * MPP)
    assert np.array_equal(found, slide.read_region((40, 80), (30, 20), 1))


@pytest.mark.parametrize("size", [(0, 0), (5, 0), (0, 5)])
def test_regions_without_pixels(slide, size):
    for mpp in (None, 3 * MPP):
        assert slide.read_region((0, 0), size, mpp=mpp).shape == (*size[::-1], 3)


def test_small_types_of_numbers_do_not_overflow(slide):
    small = np.int8(100)
    locations = slide.tile_locations(128, overlap=small)
    np.testing.assert_array_equal(locations, slide.tile_locations(128, overlap=100))
    ahead = {"num_workers": small, "prefetch_factor": small}
    assert len(list(slide.read_regions([(0, 0)] * 3, (5, 5), **ahead))) == 3


def test_what_is_read_ahead_is_a_number(slide):
    with pytest.raises(RegionError, match="prefetch_factor is None"):
        next(slide.tiles(64, prefetch_factor=None))


@pytest.mark.parametrize("mpp", [0.1, 0, -1, math.nan, math.inf, "0.5"])
def test_invalid_resolutions_are_refused(slide, mpp):
    with pytest.raises(RegionError, match="mpp"):
        slide.read_region((0, 0), (8, 8), mpp=mpp)


def test_resolution_needs_a_known_pixel_size(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 100), fields=("AppMag = 40",))
    with open_slide(path) as slide, pytest.raises(RegionError, match="use level"):
        slide.read_region((0, 0), (8, 8), mpp=0.5)


def test_a_failed_batch_names_the_region(path, tmp_path):
    damaged = tmp_path / "damaged.svs"
    data = bytearray(path.read_bytes())
    with open_slide(path) as slide:
        grid = slide.layout.levels[0].grid
        start, count = int(grid.offsets[0, 3, 4]), int(grid.byte_counts[0, 3, 4])
    data[start : start + count] = bytes(count)
    damaged.write_bytes(data)
    places = [(0, 0), (4 * TILE + 5, 3 * TILE + 5), (600, 600)]
    with open_slide(damaged, device="cpu") as slide, pytest.raises(TileError) as caught:
        list(slide.read_regions(places, (20, 20), batch_size=3))
    assert caught.value.locations == (places[1],)
    assert f"in the region at {places[1]}" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "pread"), reason="files are read another way here")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("content", [b"", None], ids=["emptied", "overwritten"])
@pytest.mark.parametrize("tolerant", [False, True])
def test_file_changed_during_a_read_is_reported(
    path, tmp_path, host_gpu, monkeypatch, device, content, tolerant
):
    """The file is blamed, not a tile whose bytes were replaced."""
    copy = tmp_path / "slide.svs"
    shutil.copy(path, copy)

    def spoilt_before(read):
        def spoil_and_read(*arguments):
            copy.write_bytes(bytes(path.stat().st_size) if content is None else content)
            return read(*arguments)

        return spoil_and_read

    def spoilt_named(read):
        spoilt = spoilt_before(lambda: None)

        def spoil_and_read(*arguments, **options):
            spoilt()
            return read(*arguments, **options)

        return spoil_and_read

    with open_slide(copy, device=device) as slide:
        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, spoilt_before(getattr(os, name)))
        if native.core is not None:
            for name in ("read_tiles", "read_ranges"):
                monkeypatch.setattr(native.core, name, spoilt_named(getattr(native.core, name)))
        with pytest.raises(SlideChangedError, match=r"slide\.svs' (has changed|was truncated)"):
            slide.level_array(0, tolerant=tolerant)[:600, :600]
        assert slide.stats()["failed"] == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("room", [60_000, 2_000])
@pytest.mark.parametrize("mpp", [0.61, 1.1, 3])
def test_region_is_the_same_when_read_in_parts(path, host_gpu, monkeypatch, device, room, mpp):
    """Regions are read in bands of rows, and in parts of rows if one row is too large."""
    locations, size = [(30, 50), (-60, -90)], (100, 80)
    options = {"size": size, "mpp": mpp, "batch_size": 2}
    with open_slide(path, device=device) as slide:
        (whole,) = slide.read_regions(locations, **options)
        monkeypatch.setattr(scaling, "FINER_BYTES", room)
        (pieces,) = slide.read_regions(locations, **options)
        (shown,) = slide.read_regions(locations, **options, device=device)
    assert np.array_equal(pieces, whole)
    assert np.array_equal(shown, whole)


def test_batches_reuse_memory(slide, monkeypatch):
    places = [(x, 40) for x in range(0, 400, 37)]
    options = {"size": (30, 20), "mpp": slide.mpp[0] * 1.5, "batch_size": len(places)}
    (together,) = slide.read_regions(places, **options)
    read, most = RegionReader.read, 3 * 48 * 33 * 3
    counts = []

    def note(self, number, regions, options):
        counts.append(len(regions))
        return read(self, number, regions, options)

    monkeypatch.setattr(RegionReader, "read", note)
    monkeypatch.setattr(scaling, "KEPT_FINER_BYTES", most)
    (in_turn,) = slide.read_regions(places, **options)
    assert counts == [3, 3, 3, 2]
    assert np.array_equal(in_turn, together)


def test_parts_fit_into_memory_and_the_level(slide, monkeypatch):
    read, most = RegionReader.read, 40_000
    seen = []

    def note(self, number, regions, options):
        seen.append((regions.corners[0], regions.shapes[0]))
        return read(self, number, regions, options)

    monkeypatch.setattr(RegionReader, "read", note)
    monkeypatch.setattr(scaling, "FINER_BYTES", most)
    found = slide.read_region((-1000, -500), (5000, 4000), mpp=10)
    assert (found[100:, 100:] == 255).all()
    assert (found[20:30, 30:40] < 255).any()
    height, width = slide.levels[-1].shape[:2]
    for (top, left), (high, wide) in seen[1:]:
        assert high * wide * 3 <= most
        assert top < height
        assert left < width
        assert top + high > 0
        assert left + wide > 0


def test_area_beyond_the_slide_costs_nothing(slide):
    assert (slide.read_region((WIDTH, 0), (20_000, 50), mpp=400) == 255).all()
    assert slide.read_region((0, 0), (5000, 5000), mpp=40).shape == (5000, 5000, 3)


def test_too_many_finer_pixels_are_refused(slide, monkeypatch):
    monkeypatch.setattr(scaling, "FINER_BYTES", 1000)
    monkeypatch.setattr(scaling, "LARGEST_FINER", 2000)
    with pytest.raises(RegionError, match="smaller mpp"):
        slide.read_region((0, 0), (5000, 5000), mpp=40)


@pytest.mark.parametrize(
    ("spacing", "mpp", "words"),
    [
        ((25400, 0.003), 25400, r"span 8\.47e\+06 pixels of level 0 .* 25400 x 0\.003 µm"),
        ((2e-4, 2e-4), 10, r"span 5e\+04 pixels"),
        ((2e-4, 2e-4), 2.4, r"average 411 MiB"),
    ],
)
def test_pixel_far_larger_than_the_slide_is_refused(tmp_path, spacing, mpp, words):
    """A region of a slide with a damaged resolution used to take minutes or gigabytes."""
    path = tmp_path / "a.tif"
    pixels = slides.picture(70, 101)
    across, down = (10_000 / each for each in spacing)
    options = {"photometric": "rgb", "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, pixels, resolution=(across, down), **options)
    with open_slide(path, "cpu") as slide:
        assert slide.mpp == pytest.approx(spacing)
        for read in slide.read_region, slide.read_mask:
            with pytest.raises(RegionError, match=words):
                read((3, 5), (40, 40), mpp=mpp)
        assert np.array_equal(slide.read_region((0, 0), (101, 70), level=0), pixels)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda slide: slide.tiles(8, batch_size=None), "batch_size is None"),
        (lambda slide: slide.tiles(8, batch_size=0), "batch_size is 0"),
        (lambda slide: slide.read_regions([], (8, 8), batch_size={}), "batch_size is {}"),
        (lambda slide: slide.read_regions(None, (8, 8)), "locations is None"),
        (lambda slide: slide.read_regions([], (-1, 8)), "-1 x 8"),
        (lambda slide: slide.read_regions([], (8, 8), shuffle=True, seed=[1]), "seed is"),
        (lambda slide: slide.read_region((0, 0), (10**30, 1)), "fit into memory"),
        (lambda slide: slide.read_region((0, 0), (8, 8), mpp=1e300), "smaller mpp"),
    ],
)
def test_invalid_arguments_raise_at_once(slide, call, words):
    with pytest.raises(RegionError, match=words):
        call(slide)


def test_integers_of_numpy(slide):
    batch, _ = next(slide.tiles(np.int64(64), batch_size=np.int64(2)))
    assert batch.shape == (2, 64, 64, 3)
    places = [(0, 0), (9, 9), (70, 20)]
    options = {"shuffle": True, "batch_size": 10**30}
    (one,) = slide.read_regions(places, (8, 8), seed=np.int64(3), **options)
    (other,) = slide.read_regions(places, (8, 8), seed=3, **options)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("path", [None, 5, [1]])
def test_invalid_paths(path):
    with pytest.raises(NotASlideError, match="is not a path"):
        open_slide(path)


def test_a_path_of_bytes(path):
    with open_slide(os.fsencode(path)) as slide:
        assert slide.dimensions == (WIDTH, HEIGHT)


@pytest.mark.parametrize("compression", ["lzw", "zlib", "jpeg", "jpeg2000", "zstd", "webp"])
def test_damaged_tile_releases_its_memory(tmp_path, compression):
    """A reference cycle in the traceback would keep the batch's pixels until garbage collection."""
    path = tmp_path / "a.tif"
    options = {"photometric": "rgb", "tile": (64, 64), "compression": compression}
    tifffile.imwrite(path, slides.picture(100, 120), **options)
    with tifffile.TiffFile(path) as file:
        offsets, counts = file.pages[0].dataoffsets, file.pages[0].databytecounts
    with path.open("r+b") as file:
        for offset, count in zip(offsets, counts, strict=True):
            file.seek(offset)
            file.write(bytes(count))
    with open_slide(path, "cpu") as slide:
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(TileError):
                slide.levels[0][...]
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kept = [each.f_code.co_name for each in gc.garbage if isinstance(each, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert kept == []
