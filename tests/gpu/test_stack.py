"""A batch of JPEG tiles becomes a few images, whose planes become the tiles again."""

import ctypes
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE, MAX_ROWS, Stacking, header_length, read_header
from napari_wsigpu.gpu.device.interfaces import Slots, TileFormat
from napari_wsigpu.gpu.device.kernel_tables import JPEG_TILE
from napari_wsigpu.gpu.jpeg.jpeg_engine import JPEG_HARDWARE
from napari_wsigpu.gpu.jpeg.jpeg_stacks import NOWHERE, Shape, plan_stacks
from tests.fakes.host_device import HostDevice, level_of
from tests.gpu.test_codestream import (
    Streams,
    batch_of,
    frame,
    inserted,
    markers,
    preparer_of,
    workspace,
)
from tests.writers import slides

HEIGHT, WIDTH = 48, 64
PICTURE = slides.picture(HEIGHT, WIDTH)
AT_ONCE = 14
SAMPLINGS = {"444": (1, 1), "422": (2, 1), "420": (2, 2)}


def tile(number, subsampling="420", level=90):
    """Encode a tile that differs from all others."""
    pixels = np.roll(PICTURE, 5 * number, axis=1)
    return slides.jpeg(pixels, outcolorspace="YCBCR", subsampling=subsampling, level=level)


TILES = [tile(number) for number in range(60)]


def gray(number):
    return slides.jpeg(np.roll(PICTURE[..., 0], 5 * number, axis=1)[..., None].copy())


def prepared_of(segments, level=None, answers=None, count=None):
    """Prepare a batch; return the result and its workspace."""
    level = level or level_of()
    work = workspace(Streams(answers))
    batch = batch_of(level, segments)
    return preparer_of(level).prepare(batch, count or len(segments), work), work


def indices_of(prepared):
    return list(chain.from_iterable(prepared.groups))


def stack_of(tiles):
    """Join whole JPEGs to a stack."""
    head = tiles[0][: header_length(tiles[0])]
    stacking = Stacking(head, read_header(head))
    body = b"".join(
        data[len(head) : -2] + bytes((0xFF, 0xD0 + number % 8)) for number, data in enumerate(tiles)
    )
    return stacking.header(len(tiles)) + body + stacking.strip + END_OF_IMAGE


class TestPlan:
    @pytest.mark.parametrize("sampling", SAMPLINGS.values())
    @pytest.mark.parametrize("gray", [True, False])
    @settings(max_examples=40)
    @given(
        stacks=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=6),
        units=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    )
    def test_planes_do_not_overlap(self, sampling, gray, stacks, units):
        sampling = (1, 1) if gray else sampling
        across, down = sampling
        height, width = 8 * down * units[0], 8 * across * units[1]
        colors = ("I_Y", "GRAY") if gray else ("P_YUV", "SYCC")
        plan = plan_stacks(tuple(stacks), Shape(height, width, sampling, *colors))
        small = height // down * (width // across)
        sizes = [height * width] if gray else [height * width, small, small]
        used = np.zeros(plan.size, int)
        for *starts, _ in plan.offsets.tolist():
            for start, size in zip(starts, sizes, strict=False):
                used[start : start + size] += 1
        assert (used <= 1).all()
        lasts = np.cumsum([count for count, _ in stacks], dtype=int) - 1
        for last, (_, has_strip) in zip(lasts.tolist(), stacks, strict=True):
            strip = int(plan.offsets[last, 3])
            assert (strip != NOWHERE) == has_strip
            if has_strip:
                assert strip == plan.offsets[last, 0] + height * width
                assert not used[strip : strip + 8 * down * width].any()
        assert (np.delete(plan.offsets[:, 3], lasts) == NOWHERE).all()
        assert len(plan.offsets) == sum(count for count, _ in stacks)

    @pytest.mark.parametrize(("subsampling", "code"), [("444", 0), ("422", 2), ("420", 3)])
    def test_its_images(self, subsampling, code):
        across, down = sampling = SAMPLINGS[subsampling]
        shape = Shape(HEIGHT, WIDTH, sampling, "P_YUV", "SYCC")
        plan = plan_stacks(((3, True), (1, False)), shape)
        (first, stack), (second, single) = plan.images
        rows = 3 * HEIGHT + 8 * down
        small = (rows // down, WIDTH // across, 1)
        assert stack.planes == ((rows, WIDTH, 1), small, small)
        assert stack.subsampling == single.subsampling == code
        assert single.planes[0] == (HEIGHT, WIDTH, 1)
        assert (first, second) == (0, rows * WIDTH + 2 * small[0] * small[1])

    def test_tiles_of_odd_extent(self):
        """A tile alone does not have to end with a whole MCU."""
        plan = plan_stacks(((1, False), (1, False)), Shape(47, 63, (2, 2), "P_YUV", "SYCC"))
        assert plan.images[0][1].planes == ((47, 63, 1), (24, 32, 1), (24, 32, 1))
        assert plan.offsets.tolist()[0] == [0, 47 * 63, 47 * 63 + 24 * 32, NOWHERE]

    def test_no_tiles(self):
        plan = plan_stacks((), Shape(HEIGHT, WIDTH, (2, 2), "P_YUV", "SYCC"))
        assert (plan.size, plan.images, plan.offsets.shape) == (0, [], (0, 4))


class TestTilesPerImage:
    @pytest.mark.parametrize(
        ("tiles", "side", "largest"),
        [
            (1, 256, 1),
            (2, 256, 1),
            (9, 256, 5),
            (25, 256, 9),
            (60, 256, 9),
            (300, 256, 43),
            (350, 256, 25),
            (1000, 256, 48),
            (1010, 256, 37),
            (100, 128, 34),
            (9, 512, 3),
            (4, 1024, 1),
        ],
    )
    def test_large_images_for_all_engines(self, tiles, side, largest):
        engine = JPEG_HARDWARE
        assert engine.tiles_per_image(tiles, side * side, MAX_ROWS // side) == largest

    @given(tiles=st.integers(0, 1024), side=st.integers(8, 4096), most=st.integers(1, 48))
    def test_no_round_of_many_is_nearly_empty(self, tiles, side, most):
        engine = JPEG_HARDWARE
        largest = engine.tiles_per_image(tiles, side * side, most)
        assert 1 <= largest <= most
        rounds = -(-tiles // largest // engine.at_once)
        assert rounds <= 1 or largest == -(-tiles // (rounds * engine.at_once))


class TestGroups:
    @pytest.mark.parametrize("count", [1, 13, 14, 15, 16, 28, 29, 42, 43, 55, 60])
    def test_images_do_not_exceed_the_engines(self, count):
        prepared, work = prepared_of(TILES[:count])
        sizes = [len(group) for group in prepared.groups]
        assert indices_of(prepared) == list(range(count))
        assert len(sizes) <= AT_ONCE
        assert max(sizes) == -(-count // AT_ONCE)
        assert min(sizes) >= max(sizes) - 1
        assert len(work.streams.found) == len(sizes)

    @pytest.mark.parametrize("count", [15, 29, 60])
    def test_each_is_a_whole_image(self, count):
        prepared, work = prepared_of(TILES[:count])
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert stream == stack_of([TILES[index] for index in group])

    @pytest.mark.parametrize("count", [1, 2, 13, 14])
    def test_few_tiles_are_not_copied(self, count):
        prepared, work = prepared_of(TILES[:count])
        assert prepared.groups == [[index] for index in range(count)]
        assert work.streams.found == TILES[:count]

    def test_stacks_follow_the_engine(self):
        level = level_of()
        for at_once, most in [(2, 30), (4, 15), (7, 9), (20, 3), (60, 1), (100, 1)]:
            work = workspace()
            engine = work.device.jpeg_engine._replace(at_once=at_once)
            work.device.jpeg_engine = engine
            groups = preparer_of(level).prepare(batch_of(level, TILES), 60, work).groups
            assert max(map(len, groups)) == most
            assert len(groups) == -(-60 // most)

    @pytest.mark.parametrize("count", [15, 29, 30, 60])
    def test_nothing_is_written_past_the_end(self, count):
        level = level_of()
        work = workspace()
        work.make_room(1 << 18, 1 << 20, 60)
        work.encoded[:] = 0xAB
        preparer_of(level).prepare(batch_of(level, TILES[:count]), count, work)
        length = sum(map(len, work.streams.found))
        assert bytes(work.encoded[:length]) == b"".join(work.streams.found)
        assert (work.encoded[length:] == 0xAB).all()
        exact = []
        make_room = work.make_room
        work.make_room = lambda *sizes: exact.append(sizes) or make_room(*sizes)
        work.streams.clear()
        preparer_of(level).prepare(batch_of(level, TILES[:count]), count, work)
        assert length <= exact[0][0] <= length + 700 * count
        assert exact[-1][2] == count

    def test_several_headers(self):
        """Each header has its own stacks, which are no larger than those of a uniform batch."""
        tiles = [tile(number, level=60 + number % 3) for number in range(45)]
        prepared, work = prepared_of(tiles)
        assert sorted(indices_of(prepared)) == list(range(45))
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert len({index % 3 for index in group}) == 1
            assert group == sorted(group)
            assert 1 < len(group) <= 4
            assert stream == stack_of([tiles[index] for index in group])

    def test_header_of_a_single_tile(self):
        comment = b"\xff\xfe\x00\x06okay"
        tiles = [*TILES[:20], inserted(TILES[20], 2, comment), *TILES[21:28]]
        prepared, work = prepared_of(tiles)
        streams = dict(zip(map(tuple, prepared.groups), work.streams.found, strict=True))
        assert streams[20,] == tiles[20]
        assert sorted(indices_of(prepared)) == list(range(28))

    def test_tiles_of_another_sampling_are_for_the_cpu(self):
        others = {3: "444", 17: "422", 18: "444"}
        tiles = [tile(number, others.get(number, "420")) for number in range(30)]
        prepared, _ = prepared_of(tiles)
        assert indices_of(prepared) == [i for i in range(30) if i not in others]

    def test_first_tile_decides_the_sampling(self):
        level = level_of()
        preparer = preparer_of(level)
        for batch, groups in [(["422"], [[0]]), (["420"], []), (["420", "422"], [[1]])]:
            work = workspace()
            tiles = [tile(number, kind) for number, kind in enumerate(batch)]
            assert preparer.prepare(batch_of(level, tiles), len(tiles), work).groups == groups

    def test_tiles_that_cannot_be_stacked(self):
        place = frame(TILES[0]) + 1
        tiles = [data[:place] + b"\xc2" + data[place + 1 :] for data in TILES[:30]]
        prepared, work = prepared_of(tiles)
        assert prepared.groups == [[index] for index in range(30)]
        assert work.streams.found == tiles

    def test_memory_stays_within_the_limit(self):
        prepared, work = prepared_of(TILES, count=30)
        assert indices_of(prepared) == list(range(30))
        assert max(map(len, prepared.groups)) == 3
        assert len(work.streams.found) == 10

    @pytest.mark.parametrize("padding", [1, 2, 31, 62])
    def test_trailing_zeros_are_dropped(self, padding):
        tiles = [data + bytes(padding * (number % 2)) for number, data in enumerate(TILES[:28])]
        prepared, work = prepared_of(tiles)
        assert [len(group) for group in prepared.groups] == [2] * 14
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert stream == stack_of([TILES[index] for index in group])

    def test_shared_tables_are_inserted(self):
        shared, _ = slides.split_tables(TILES[0])
        level = level_of(jpeg_tables=(shared,))
        prepared, work = prepared_of([slides.split_tables(data)[1] for data in TILES[:30]], level)
        assert [len(group) for group in prepared.groups] == [3] * 10
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            whole = stack_of([shared[:-2] + slides.split_tables(TILES[i])[1][2:] for i in group])
            assert stream == whole
            assert {0xDB, 0xC4, 0xC0, 0xDA, 0xDD} <= {marker for marker, _ in markers(stream)}

    def test_restart_markers_count_modulo_8(self):
        level = level_of(1, jpeg_color="gray", tile=(8, 64))
        pixels = slides.picture(8, 64, 1)
        tiles = [slides.jpeg(np.roll(pixels, number, axis=1)) for number in range(14 * 20)]
        prepared, work = prepared_of(tiles, level)
        assert [len(group) for group in prepared.groups] == [20] * 14
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert stream == stack_of([tiles[index] for index in group])

    def test_invalid_tiles_are_in_no_group(self):
        tiles = list(TILES[:30])
        for index, bad in {4: b"", 5: b"\xff\xd8\xff\xd9", 9: TILES[9][:-2], 29: b"x" * 99}.items():
            tiles[index] = bad
        prepared, _ = prepared_of(tiles)
        assert indices_of(prepared) == [i for i in range(30) if i not in (4, 5, 9, 29)]

    def test_memory_error_is_raised(self):
        level = level_of()
        work = workspace()
        work.device.free = 1000
        with pytest.raises(MemoryError):
            preparer_of(level).prepare(batch_of(level, TILES), 60, work)
        work.device.free = 1 << 30
        prepared = preparer_of(level).prepare(batch_of(level, TILES), 60, work)
        assert len(prepared.groups) == 12


ADDRESSES = 10_000 * np.arange(1, 61)


class Merges:
    """A device that records the tables of `merge_planes`."""

    def merge_planes(self, tiles, tile, sampling, doubts, stream, *, to_rgb):
        self.tiles, self.sampling, self.to_rgb, self.doubts = tiles, sampling, to_rgb, doubts


def finished(prepared, worked, addresses=ADDRESSES, device=None):
    """Return the table of tiles that are merged from planes."""
    device = device or Merges()
    prepared.finish(worked, Slots(TileFormat(HEIGHT, WIDTH, 3, "uint8"), addresses), device, None)
    return device.tiles


class TestFinish:
    def test_each_tile_with_its_planes(self):
        prepared, work = prepared_of(TILES[:30])
        rows = finished(prepared, [True] * 10)
        assert (rows.dtype, rows.shape) == (JPEG_TILE, (30,))
        assert rows["target"].tolist() == ADDRESSES[:30].tolist()
        luma, chroma = HEIGHT * WIDTH, HEIGHT * WIDTH // 4
        strip = 16 * WIDTH
        size = (3 * luma + strip) * 3 // 2
        for index, row in enumerate(rows):
            stack, number = divmod(index, 3)
            begin = work.planes + stack * size
            first_chroma = begin + 3 * luma + strip
            assert row["planes"].tolist() == [
                begin + number * luma,
                first_chroma + number * chroma,
                first_chroma + 3 * chroma + strip // 4 + number * chroma,
            ]
            assert row["strip"] == (begin + 3 * luma if number == 2 else 0)
            scan = ctypes.string_at(int(row["scan"]), int(row["length"]))
            assert scan == TILES[index][header_length(TILES[index]) : -2]
        head = TILES[0][: header_length(TILES[0])]
        marks = np.array(Stacking(head, read_header(head)).marks)
        found = np.column_stack([rows[name] for name in ("shades", "quantum", "codes")])
        assert (found == marks).all()

    @pytest.mark.parametrize(("subsampling", "sampling"), SAMPLINGS.items())
    @pytest.mark.parametrize("colors", ["ycbcr", "stored"])
    def test_planes_are_merged(self, subsampling, sampling, colors):
        device = Merges()
        tiles = [tile(number, subsampling) for number in range(20)]
        prepared, work = prepared_of(tiles, level_of(jpeg_color=colors))
        finished(prepared, [True] * len(prepared.groups), device=device)
        assert device.sampling == sampling
        assert device.to_rgb == (colors == "ycbcr")
        assert device.doubts is work.doubts

    def test_tiles_alone_have_no_strip(self):
        prepared, _ = prepared_of(TILES[:5])
        rows = finished(prepared, [True] * 5)
        for name in ("strip", "length", "shades", "quantum", "codes"):
            assert not rows[name].any()

    def test_gray_tiles(self):
        level = level_of(1, jpeg_color="gray")
        prepared, work = prepared_of([gray(number) for number in range(28)], level)
        rows = finished(prepared, [True] * 14)
        size = (2 * HEIGHT + 8) * WIDTH
        starts = [work.planes + i // 2 * size + i % 2 * HEIGHT * WIDTH for i in range(28)]
        assert rows["planes"][:, 0].tolist() == starts

    def test_only_decoded_tiles_are_merged(self):
        prepared, _ = prepared_of(TILES[:30])
        every = finished(prepared, [True] * 10)
        worked = [number not in (0, 4) for number in range(10)]
        rows = finished(prepared, worked)
        kept = [index for index in range(30) if index // 3 not in (0, 4)]
        np.testing.assert_array_equal(rows, every[kept])

    def test_only_accepted_streams_get_images(self):
        taken = [number not in (2, 9) for number in range(10)]
        prepared, _ = prepared_of(TILES[:30], answers=iter(taken))
        kept = [index for index in range(30) if index // 3 not in (2, 9)]
        assert indices_of(prepared) == kept
        worked = [number != 3 for number in range(8)]  # tiles 12 to 14, as stack 2 is left out
        rows = finished(prepared, worked)
        every = finished(prepared_of(TILES[:30])[0], [True] * 10)
        expected = [index for index in kept if index // 3 != 4]
        assert rows["target"].tolist() == ADDRESSES[expected].tolist()
        steps = np.diff(every["planes"][expected, 0])
        np.testing.assert_array_equal(np.diff(rows["planes"][:, 0]), steps)

    def test_in_the_order_of_groups(self):
        tiles = [tile(number, level=60 + number % 2) for number in range(28)]
        prepared, _ = prepared_of(tiles)
        order = indices_of(prepared)
        assert order != sorted(order)
        rows = finished(prepared, [True] * len(prepared.groups))
        assert rows["target"].tolist() == ADDRESSES[order].tolist()

    def test_images_follow_the_plan(self):
        found = []
        taken = [number != 1 for number in range(10)]
        prepared, work = prepared_of(TILES[:30], answers=iter(taken))
        work.images = SimpleNamespace(add=lambda *given: found.append(given))
        stream = HostDevice().new_stream()
        prepared.set_targets(ADDRESSES.tolist(), stream)
        rows = finished(prepared, [True] * 9)
        assert [address for address, _, _ in found] == rows["planes"][::3, 0].tolist()
        assert {image.planes[0] for _, image, _ in found} == {(3 * HEIGHT + 16, WIDTH, 1)}
        assert {handle for _, _, handle in found} == {stream.ptr}


class TestDoubts:
    def test_no_devices(self):
        prepared, _ = prepared_of(TILES[:30])
        assert prepared.doubtful(range(30)) == []

    @settings(max_examples=60)
    @given(flagged=st.sets(st.integers(0, 9)), failed=st.sets(st.integers(0, 9), max_size=4))
    def test_flag_marks_its_whole_stack(self, flagged, failed):
        prepared, work = prepared_of(TILES[:30])
        decoded = [index for index in range(30) if index // 3 not in failed]
        for place, index in enumerate(decoded):
            work.doubts[place] = index // 3 in flagged and index % 3 == 2
        expected = [i for i in range(30) if i // 3 in flagged - failed]
        assert prepared.doubtful(decoded) == expected

    def test_of_several_headers(self):
        tiles = [tile(number, level=60 + number % 2) for number in range(28)]
        prepared, work = prepared_of(tiles)
        order = indices_of(prepared)
        for group in prepared.groups:
            work.doubts[:] = 0
            work.doubts[order.index(group[-1])] = 1
            assert prepared.doubtful(order) == group

    def test_flags_of_an_earlier_batch_are_cleared(self):
        level = level_of()
        preparer, work = preparer_of(level), workspace()
        preparer.prepare(batch_of(level, TILES[:30]), 30, work)
        work.doubts[:] = 1
        assert preparer.prepare(batch_of(level, TILES[:30]), 30, work).doubtful(range(30)) == []
