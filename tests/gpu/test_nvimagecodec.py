"""Batches have the pixels of the CPU decoder, whatever fails on the device.

Here nvImageCodec decodes on the CPU, into a device that is host memory.
"""

import gc
import logging
import random
import threading
import time
import weakref
from contextlib import suppress

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.device.worker import MOST_IDLE
from napari_wsigpu.gpu.device.workspace import SMALLEST
from napari_wsigpu.model.errors import DeviceError
from tests.codecs.test_cpu import jpeg_2000_ycbcr
from tests.fakes.host_device import HostImages, HostStream, OnDevice, joined, level_of
from tests.gpu.test_codestream import with_ids, without_adobe
from tests.writers import slides, tiffbytes

pytest.importorskip("nvidia.nvimgcodec")

TILE = (48, 64)
# A multiple of neither the tile's height nor its width: 4 x 4 tiles.
SIZE = (160, 230)
BACKGROUND = 200


def jpeg_2000(tile):
    return imagecodecs.jpeg2k_encode(tile.squeeze(), level=0, codecformat="J2K", mct=False)


def stored(tile):
    """Encode RGB as Aperio does, without saying so in the JPEG."""
    return with_ids(without_adobe(slides.jpeg(tile)), (1, 2, 3))


ENCODINGS = {
    "gray JPEG": (1, {"jpeg_color": "gray"}, slides.jpeg),
    "stored JPEG": (3, {"jpeg_color": "stored"}, stored),
    "JPEG 4:2:0": (3, {}, slides.jpeg_ycbcr),
    "stored JPEG 4:2:0": (3, {"jpeg_color": "stored"}, slides.jpeg_ycbcr),
    "JPEG 4:2:2": (3, {}, lambda tile: slides.jpeg_ycbcr(tile, "422")),
    "JPEG 4:4:4": (3, {}, lambda tile: slides.jpeg_ycbcr(tile, "444")),
    "JPEG 2000": (3, {"compression": 33005}, jpeg_2000),
    "gray JPEG 2000": (1, {"compression": 34712}, jpeg_2000),
    "gray JPEG 2000 of 16 bits": (1, {"compression": 34712, "dtype": "uint16"}, jpeg_2000),
    "JPEG 2000 of 16 bits": (3, {"compression": 34712, "dtype": "uint16"}, jpeg_2000),
    "Aperio's YCbCr": (3, {"compression": 33003, "photometric": 6}, jpeg_2000_ycbcr),
}


def batch_of(kind="JPEG 4:2:0", *, cut=False, size=SIZE):
    """Encode all tiles of a level."""
    channels, encoding, encode = ENCODINGS[kind]
    level = level_of(channels, tile=TILE, size=size, **encoding)
    pixels = slides.picture(*size, channels, level.encoding.dtype)
    segments = [memoryview(encode(tile)) for tile in tiffbytes.tiles(pixels, TILE, cut=cut)]
    columns = level.grid.columns
    return [
        EncodedTile(level, *divmod(index, columns), (segment,), BACKGROUND)
        for index, segment in enumerate(segments)
    ]


def expected(tile):
    """Decode a tile on the CPU; it may be cropped to its level."""
    return decode_tile(tile, np.empty(tile.level.tile_bytes, np.uint8))


def check(scheduled, batch, but=()):
    """Compare all tiles of a batch with those of the CPU."""
    for index, tile in enumerate(batch):
        if index not in but:
            pixels = expected(tile)
            found = scheduled.pixels(index)[: pixels.shape[0], : pixels.shape[1]]
            np.testing.assert_array_equal(found, pixels, f"tile {index}")


def spoiled(batch, index, segment=b"\xff\xd8\xff\xd9"):
    return [
        *batch[:index],
        batch[index]._replace(segments=(memoryview(segment),)),
        *batch[index + 1 :],
    ]


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def on():
    found = OnDevice()
    yield found
    found.close()


def given(decoder, streams, images):
    return decoder.decode(streams, images)


def spoil(on, image):
    for plane in on.device.behind[int(image)]:
        plane[...] = 13


def doubted(on, places):
    """Make the device miss the strips below the tiles in these rows of the table."""
    merge_planes = on.device.merge_planes

    def merge(rows, tile, sampling, doubts, *others, **options):
        merge_planes(rows, tile, sampling, doubts, *others, **options)
        doubts[: len(rows)][places] = 1

    on.device.merge_planes = merge


class TestPixels:
    @pytest.mark.parametrize("kind", ENCODINGS)
    def test_all_tiles_are_decoded_by_the_device_as_by_the_cpu(self, on, kind, caplog):
        batch = batch_of(kind)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        assert scheduled.calls == [list(range(16))]
        assert warnings(caplog) == []

    @pytest.mark.parametrize("kind", ENCODINGS)
    def test_tiles_cut_to_their_level_have_rows_as_wide_as_others(self, on, kind):
        batch = batch_of(kind, cut=True)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 7  # the lower and right edges

    def test_a_missing_segment_is_background(self, on):
        batch = batch_of()
        batch[4] = batch[4]._replace(segments=(None,))
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        assert (scheduled.pixels(4) == BACKGROUND).all()
        check(scheduled, batch)

    def test_cpu_decodes_levels_without_a_recipe(self, on):
        level = level_of(3, tile=TILE, compression=1)
        pixels = slides.picture(*TILE)
        scheduled = on.schedule([EncodedTile(level, 0, 0, (memoryview(pixels.tobytes()),), 0)])
        assert scheduled.wait() == {}
        np.testing.assert_array_equal(scheduled.pixels(0), pixels)
        assert scheduled.pending.on_cpu == 1

    @pytest.mark.parametrize(
        ("share", "on_cpu", "images"), [(0, 16, 0), (0.25, 12, 4), (0.5, 8, 8), (1, 0, 8)]
    )
    def test_the_device_decodes_its_share(self, on, share, on_cpu, images):
        batch = batch_of()
        sizes = []

        def count(decoder, streams, images):
            sizes.append(len(streams))
            return given(decoder, streams, images)

        on.decode_by(count)
        scheduled = on.schedule(batch, share=share)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == on_cpu
        assert sum(sizes) == images
        assert [sorted(call) for call in scheduled.calls] == [list(range(16))]

    def test_an_empty_batch(self, on):
        calls = []
        first = on.schedule(batch_of())
        nothing = joined([], batch_of()[0].level)
        pending = on.decoder.schedule(
            nothing, first.slots, lambda indices: calls.append(list(indices)), on.stream
        )
        assert first.wait() == {}
        assert pending.wait() == {}
        assert calls == [[]]

    def test_levels_of_one_slide_are_not_confused(self, on):
        batches = [batch_of(kind) for kind in ("JPEG 4:2:0", "gray JPEG", "JPEG 2000")]
        for _ in range(2):
            flying = [on.schedule(batch) for batch in batches]
            for batch, scheduled in zip(batches, flying, strict=True):
                assert scheduled.wait() == {}
                check(scheduled, batch)


DAMAGE = {
    "no stream": b"\xff\xd8\xff\xd9",
    "noise": bytes(range(256)),
    "empty": b"",
    "noise behind the header": None,
}


class TestFailures:
    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("kind", ["JPEG 4:2:0", "JPEG 2000"])
    def test_damaged_tile_fails_alone(self, on, kind, damage):
        batch = batch_of(kind)
        segment = DAMAGE[damage]
        if segment is None:
            good = bytes(batch[5].segments[0])
            segment = good[:90] + b"\xff\xd9" if kind != "JPEG 2000" else good[:140]
        batch = spoiled(batch, 5, segment)
        scheduled = on.schedule(batch)
        failures = scheduled.wait()
        assert list(failures) == [5]
        assert failures[5]
        check(scheduled, batch, but=[5])
        assert scheduled.pending.on_cpu == 1
        if any(5 in call for call in scheduled.calls):  # to cover what the device has decoded
            assert len(np.unique(scheduled.pixels(5))) == 1

    def test_damaged_tile_decoded_by_the_cpu(self, on):
        batch = spoiled(batch_of(), 12)
        scheduled = on.schedule(batch, share=0.5)
        assert list(scheduled.wait()) == [12]
        check(scheduled, batch, but=[12])

    def test_smaller_parts_are_tried(self, on, caplog):
        sizes = []

        def small(decoder, streams, images):
            sizes.append(len(streams))
            if len(streams) > 2:
                raise RuntimeError("out of memory")
            return given(decoder, streams, images)

        on.decode_by(small)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        assert sizes == [8, 4, 2, 2, 4, 2, 2]
        assert warnings(caplog) == []

    def test_failed_batch_is_retried_in_parts(self, on, caplog):
        sizes = []

        def small(decoder, streams, images):
            sizes.append(len(streams))
            return given(decoder, streams, images) if len(streams) < 3 else [False] * len(streams)

        on.decode_by(small)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        assert sizes == [8, 4, 2, 2, 4, 2, 2]

    @pytest.mark.parametrize("size", [1, 3, 16])
    def test_a_decoder_that_always_raises(self, on, size, caplog):
        def broken(*_):
            raise RuntimeError("broken decoder")

        on.decode_by(broken)
        batch = batch_of()[:size]
        for _ in range(2):
            scheduled = on.schedule(batch)
            assert scheduled.wait() == {}
            check(scheduled, batch)
            assert scheduled.pending.on_cpu == size
        assert len(warnings(caplog)) == 1
        assert "broken decoder" in warnings(caplog)[0]
        assert "cuda:0" in warnings(caplog)[0]

    def test_a_decoder_that_raises_for_one_image(self, on, caplog):
        bad = []

        def picky(decoder, streams, images):
            bad.append(bad[0] if bad else images[3])
            if bad[0] in images:
                raise RuntimeError("not this one")
            return given(decoder, streams, images)

        on.decode_by(picky)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 2
        assert scheduled.calls == [[i for i in range(16) if i not in (6, 7)], [6, 7]]
        assert len(warnings(caplog)) == 1

    def test_cpu_decodes_failed_images(self, on, caplog):
        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            for place in (1, 4):
                spoil(on, images[place])
            return [good and place not in (1, 4) for place, good in enumerate(found)]

        on.decode_by(decode)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        again = [2, 3, 8, 9]
        assert scheduled.pending.on_cpu == 4
        assert scheduled.calls == [[i for i in range(16) if i not in again], again]

    @pytest.mark.parametrize("kind", ["JPEG 4:2:0", "Aperio's YCbCr"])
    def test_no_engine(self, on, kind, caplog):
        made = []

        def decoder(kind):
            made.append(kind)
            raise DeviceError("no engine here")

        on.device.decoder = decoder
        batch = batch_of(kind)
        for _ in range(2):
            scheduled = on.schedule(batch)
            assert scheduled.wait() == {}
            check(scheduled, batch)
            assert scheduled.pending.on_cpu == 16
        assert len(made) == 1
        assert [message.count("no engine here") for message in warnings(caplog)] == [1]

    def test_one_kind_without_engine_leaves_the_other(self, on, caplog):
        real = on.device.decoder

        def decoder(kind):
            if kind == "jpeg":
                raise DeviceError("no engine here")
            return real(kind)

        on.device.decoder = decoder
        for kind, on_cpu in [("JPEG 4:2:0", 16), ("JPEG 2000", 0)]:
            batch = batch_of(kind)
            scheduled = on.schedule(batch)
            assert scheduled.wait() == {}
            check(scheduled, batch)
            assert scheduled.pending.on_cpu == on_cpu
        assert len(warnings(caplog)) == 1

    def test_cpu_decodes_all_tiles_of_a_doubtful_stack(self, on):
        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            for place in (1, 4):
                spoil(on, images[place])
            return found

        on.decode_by(decode)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 4
        assert scheduled.calls == [list(range(16)), [2, 3, 8, 9]]

    def test_flags_follow_the_decoded_images(self, on):
        """The flags belong to the decoded tiles, not to the whole batch."""

        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            return [good and place != 1 for place, good in enumerate(found)]

        on.decode_by(decode)
        doubted(on, [3])
        batch = spoiled(spoiled(batch_of(), 2), 11)
        scheduled = on.schedule(batch)
        assert sorted(scheduled.wait()) == [2, 11]
        check(scheduled, batch, but=[2, 11])
        assert scheduled.calls[1:] == [[3, 4, 5, 6]]
        assert scheduled.pending.on_cpu == 6

    def test_flags_do_not_carry_over(self, on):
        doubted(on, slice(None))
        batch = batch_of()
        on.schedule(batch).wait()
        del on.device.merge_planes
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        assert scheduled.pending.on_cpu == 0

    @pytest.mark.parametrize(
        ("kind", "done"),
        [
            ("JPEG 4:2:0", [("merge", True)]),
            ("stored JPEG", [("merge", False)]),
            ("stored JPEG 4:2:0", [("merge", False)]),
            ("gray JPEG", [("merge", False)]),
            ("Aperio's YCbCr", [("convert", True)]),
            ("JPEG 2000", []),
        ],
    )
    def test_only_ycbcr_tiles_are_converted(self, on, kind, done):
        found = []
        merge, convert = on.device.merge_planes, on.device.ycbcr_to_rgb

        def merged(*args, to_rgb):
            found.append(("merge", to_rgb))
            merge(*args, to_rgb=to_rgb)

        def converted(*args):
            found.append(("convert", True))
            convert(*args)

        on.device.merge_planes, on.device.ycbcr_to_rgb = merged, converted
        assert on.schedule(batch_of(kind)).wait() == {}
        assert found == done


LARGE = (10 * TILE[0], 6 * TILE[1])
LARGE_TILES, STACKS = 60, 12


def large_batch(kind="JPEG 4:2:0"):
    return batch_of(kind, size=LARGE)


def stack_of(index):
    """Return the tiles in the same stack as one, in a batch of `LARGE_TILES`."""
    size = LARGE_TILES // STACKS
    return list(range(index // size * size, index // size * size + size))


def scan_start(data):
    place = data.index(b"\xff\xda")
    return place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")


def cut(scan, rng):
    return scan[: rng.randrange(len(scan))]


def zeros(scan, rng):
    begin = rng.randrange(len(scan))
    count = min(rng.randrange(1, len(scan)), len(scan) - begin)
    return scan[:begin] + bytes(count) + scan[begin + count :]


def ones(scan, rng):
    begin = rng.randrange(len(scan))
    return scan[:begin] + b"\xff\0" * rng.randrange(1, 200) + scan[begin:]


def too_much(scan, rng):
    return scan * rng.randrange(2, 4) + scan[: rng.randrange(len(scan))]


def noise(scan, rng):
    place = rng.randrange(len(scan))
    return scan[:place] + rng.randbytes(rng.randrange(1, 9)) + scan[place + 8 :]


def with_marker(scan, rng, markers):
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(scan))
        scan = scan[:place] + bytes((0xFF, rng.choice(markers))) + scan[place:]
    return scan


def restarts(scan, rng):
    return with_marker(scan, rng, range(0xD0, 0xD8))


def ends(scan, rng):
    return with_marker(scan, rng, (0xD9,))


def markers(scan, rng):
    return with_marker(scan, rng, [*range(1, 0xD0), *range(0xD8, 0xFF)])


DAMAGED_SCANS = [cut, zeros, ones, too_much, noise, restarts, ends, markers]


def damaged(tile, damage, rng):
    """Damage the scan of a tile, but not its header and end."""
    data = bytes(tile.segments[0])
    start = scan_start(data)
    harmed = data[:start] + damage(data[start:-2], rng) + b"\xff\xd9"
    return tile._replace(segments=(memoryview(harmed),))


class TestStacks:
    @pytest.mark.parametrize(
        "kind", [kind for kind in ENCODINGS if "JPEG" in kind and "2000" not in kind]
    )
    @pytest.mark.parametrize("count", [15, 16, 29, 43, LARGE_TILES])
    def test_batches_of_any_size(self, on, kind, count):
        batch = large_batch(kind)[:count]
        images = []

        def decode(decoder, streams, given_images):
            images.extend(given_images.tolist())
            return given(decoder, streams, given_images)

        on.decode_by(decode)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        most = -(-count // 14)
        assert len(images) == -(-count // most) <= 14

    @pytest.mark.parametrize("damage", DAMAGED_SCANS)
    def test_damaged_scans_do_not_change_other_tiles(self, on, damage):
        rng = random.Random(damage.__name__)
        batch = large_batch()
        truth = [expected(tile) for tile in batch]
        on.schedule(batch).wait()
        doubts = 0
        for turn in range(15):
            bad = rng.sample(range(LARGE_TILES), rng.choice([1, 1, 2, 3, 6]))
            tiles = list(batch)
            for index in bad:
                tiles[index] = damaged(tiles[index], damage, rng)
            scheduled = on.schedule(tiles)
            assert set(scheduled.wait()) <= set(bad)
            for index in sorted({*range(LARGE_TILES)} - {*bad}):
                np.testing.assert_array_equal(
                    scheduled.pixels(index), truth[index], f"turn {turn}, tile {index}, bad {bad}"
                )
            assert on.verifier.reason is None
            touched = {other for index in bad for other in stack_of(index)}
            assert scheduled.pending.on_cpu <= len(touched)
            doubts += scheduled.pending.on_cpu > 0
        assert doubts or damage is not ends

    def test_tile_with_two_ends_is_left_to_the_cpu(self, on):
        batch = large_batch()
        data = bytes(batch[32].segments[0])
        place = (scan_start(data) + len(data)) // 2
        batch = spoiled(batch, 32, data[:place] + b"\xff\xd9" + data[place:])
        scheduled = on.schedule(batch)
        assert set(scheduled.wait()) == {32}
        check(scheduled, batch, but=[32])
        assert scheduled.pending.on_cpu <= len(stack_of(32))
        assert len(np.unique(scheduled.pixels(32))) == 1

    @pytest.mark.parametrize("kind", ["JPEG 4:2:0", "JPEG 4:4:4", "gray JPEG"])
    @pytest.mark.parametrize("steps", [-1, 1, 2])
    def test_shifted_stacks(self, on, kind, steps):
        """The tiles of the fourth image appear in other tiles' slots."""

        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            for plane in on.device.behind[int(images[3])]:
                tile = len(plane) * TILE[0] // (5 * TILE[0] + strip_rows)
                plane[...] = np.roll(plane, steps * tile, axis=0)
            return found

        strip_rows = 16 if kind == "JPEG 4:2:0" else 8
        on.decode_by(decode)
        batch = large_batch(kind)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 5
        assert scheduled.calls == [list(range(LARGE_TILES)), stack_of(15)]

    def test_all_stacks_shifted(self, on):
        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            for image in images.tolist():
                luma = on.device.behind[image][0]
                luma[TILE[0] :] = luma[: -TILE[0]].copy()
            return found

        on.decode_by(decode)
        batch = large_batch()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == LARGE_TILES
        assert on.verifier.reason is None

    def test_device_that_always_shifts_stacks_is_given_up(self, on, caplog):
        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            for image in images.tolist():
                on.device.behind[image][0][...] = 7
            return found

        on.decode_by(decode)
        batch = large_batch()
        for _ in range(5):
            scheduled = on.schedule(batch)
            assert scheduled.wait() == {}
            check(scheduled, batch)
        assert "does not keep tiles apart" in on.verifier.reason
        assert len(warnings(caplog)) == 1

    def test_tiles_of_several_headers(self, on):
        """Tiles of one quality are stacked with each other."""
        level = batch_of(size=LARGE)[0].level
        pixels = slides.picture(*LARGE)
        batch = [
            EncodedTile(
                level,
                *divmod(index, 6),
                (
                    memoryview(
                        slides.jpeg(
                            tile, outcolorspace="YCBCR", subsampling="420", level=60 + index % 3
                        )
                    ),
                ),
                BACKGROUND,
            )
            for index, tile in enumerate(tiffbytes.tiles(pixels, TILE))
        ]
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        assert [index % 3 for index in scheduled.calls[0]] == [0] * 20 + [1] * 20 + [2] * 20


class TestDeliver:
    @pytest.mark.parametrize("error", [KeyError, MemoryError, OSError])
    def test_wait_raises_errors(self, on, error):
        def then(indices):
            raise error("no room")

        batch = batch_of()
        scheduled = on.schedule(batch, then)
        with pytest.raises(DeviceError, match="no room") as caught:
            scheduled.wait()
        assert isinstance(caught.value.__cause__, error)
        assert "cuda:0" in str(caught.value)
        after = on.schedule(batch)
        assert after.wait() == {}
        check(after, batch)

    def test_device_error_is_not_wrapped(self, on):
        def then(indices):
            raise DeviceError("it fell off the bus")

        with pytest.raises(DeviceError, match=r"^it fell off the bus$"):
            on.schedule(batch_of(), then).wait()

    def test_device_is_idle_when_an_error_is_raised(self, on):
        """Otherwise slots and staging memory would be released while they are used."""

        def then(indices):
            raise KeyError("no room")

        scheduled = on.schedule(batch_of(), then, share=0.5)
        with pytest.raises(DeviceError):
            scheduled.wait()
        assert on.device.synchronised >= 1

    def test_pixels_are_valid_when_deliver_is_called(self, on):
        batch = batch_of()
        seen = {}

        def then(indices):
            seen.update((index, on.latest.pixels(index)) for index in indices)

        assert on.schedule(batch, then, share=0.5).wait() == {}
        for index, tile in enumerate(batch):
            np.testing.assert_array_equal(seen[index], expected(tile))

    def test_batch_is_synchronized_once(self, on):
        batch = batch_of()
        for count in (1, 2, 3):
            on.schedule(batch).wait()
            assert on.device.synchronised == count

    def test_tiles_decoded_afterwards_are_synchronized(self, on):
        events = []
        real = on.device.upload

        def upload(address, pixels, stream):
            events.append(on.device.synchronised)
            real(address, pixels, stream)

        on.device.upload = upload
        on.decode_by(lambda _, streams, images: [False] * len(streams))
        assert on.schedule(batch_of()).wait() == {}
        assert len(events) == 16
        assert on.device.synchronised > max(events)

    @pytest.mark.parametrize(
        ("kind", "work"), [("JPEG 4:2:0", "merge_planes"), ("Aperio's YCbCr", "ycbcr_to_rgb")]
    )
    def test_all_work_uses_the_callers_stream(self, on, monkeypatch, kind, work):
        class Given(HostStream):
            ptr, times = 7, 0

            def synchronize(self):
                self.times += 1

        stream, streams, targets = Given(on.device), [], []
        names = {"upload", "download_tile", "record", work}
        batch = batch_of(kind)

        def watched(name, real):
            def called(*given, **options):
                streams.append((name, given[-1]))
                return real(*given, **options)

            return called

        for name in names:
            monkeypatch.setattr(on.device, name, watched(name, getattr(on.device, name)))
        add = HostImages.add
        monkeypatch.setattr(
            HostImages, "add", lambda *given: targets.append(given[-1]) or add(*given)
        )
        scheduled = on.schedule(
            batch, lambda indices: streams.append(("then", stream)), stream=stream, share=0.5
        )
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert {name for name, _ in streams} == {*names, "then"}
        assert all(used is stream for _, used in streams)
        assert targets == [7] * 8
        assert stream.times == 1
        assert on.device.synchronised == 0


class Held:
    """A device whose next decode waits until the test continues it."""

    def __init__(self, on):
        self.begun, self.go = threading.Event(), threading.Event()
        self.batches = 0

        def decode(decoder, streams, images):
            self.batches += 1
            self.begun.set()
            assert self.go.wait(20)
            return given(decoder, streams, images)

        on.decode_by(decode)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


class TestCancel:
    def test_cancel_before_start(self, on):
        held = Held(on)
        batch = batch_of()
        first = on.schedule(batch)
        assert held.begun.wait(20)
        second = on.schedule(batch, share=0.5)
        cancelling = in_thread(second.pending.cancel)
        time.sleep(0.05)
        held.go.set()
        cancelling.join(20)
        assert not cancelling.is_alive()
        assert first.wait() == {}
        check(first, batch)
        assert held.batches == 1
        assert second.calls == []
        third = on.schedule(batch)
        assert third.wait() == {}
        check(third, batch)

    def test_cancel_while_decoding(self, on):
        held = Held(on)
        batch = batch_of()
        first = on.schedule(batch, share=0.5)
        assert held.begun.wait(20)
        cancelling = in_thread(first.pending.cancel)
        cancelling.join(0.1)
        assert cancelling.is_alive()  # the device still writes to its slots
        held.go.set()
        cancelling.join(20)
        assert not cancelling.is_alive()
        second = on.schedule(batch)
        assert second.wait() == {}
        check(second, batch)

    def test_cancel_after_completion(self, on):
        batch = batch_of()
        scheduled = on.schedule(batch)
        scheduled.wait()
        scheduled.pending.cancel()
        check(scheduled, batch)


class TestWorker:
    def test_close_runs_submitted_jobs_first(self, leaves_nothing):
        on = OnDevice()
        batch = batch_of()
        flying = [on.schedule(batch) for _ in range(4)]
        on.close()
        for scheduled in flying:
            assert scheduled.wait() == {}
            check(scheduled, batch)

    def test_close_releases_the_decoders(self):
        on = OnDevice()
        made = []
        on.decode_by(given)
        wrap = on.device.wrap_decoder

        def record(decoder):
            wrapped = wrap(decoder)
            made.append(weakref.ref(wrapped))
            return wrapped

        on.device.wrap_decoder = record
        on.schedule(batch_of()).wait()
        assert made[0]() is not None
        on.close()
        assert made[0]() is None

    def test_it_works_again_after_close(self, on):
        batch = batch_of()
        for _ in range(3):
            scheduled = on.schedule(batch)
            assert scheduled.wait() == {}
            check(scheduled, batch)
            on.worker.close()

    def test_close_without_a_thread(self):
        OnDevice().close()

    def test_no_two_threads_decode_at_once(self, on):
        """It would crash the process."""
        busy = threading.Lock()
        clashes = []

        def decode(decoder, streams, images):
            if not busy.acquire(blocking=False):
                clashes.append(1)
                return [False] * len(streams)
            time.sleep(0.002)
            found = given(decoder, streams, images)
            busy.release()
            return found

        on.decode_by(decode)
        batch = batch_of()

        def read():
            for _ in range(6):
                flying = [on.schedule(batch) for _ in range(2)]
                for scheduled in flying:
                    scheduled.wait()

        threads = [in_thread(read) for _ in range(4)]
        for thread in threads:
            thread.join(20)
        assert clashes == []

    def test_a_device_that_cannot_be_made_current(self, on, monkeypatch):
        monkeypatch.setattr(threading, "excepthook", lambda given: None)

        def fail():
            raise RuntimeError("no stream")

        on.device.active = fail
        outcome = []

        def read():
            try:
                on.schedule(batch_of()).wait()
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(2)
        assert not thread.is_alive()
        assert isinstance(outcome[0], DeviceError)

    def test_failed_job_does_not_stop_the_thread(self, on, monkeypatch):
        monkeypatch.setattr(threading, "excepthook", lambda given: None)

        def job(worker):
            raise RuntimeError("no engine")

        on.worker.submit(job)
        batch = batch_of()
        scheduled = on.schedule(batch)
        cancelling = threading.Thread(target=scheduled.pending.cancel, daemon=True)
        cancelling.start()
        cancelling.join(1)
        assert not cancelling.is_alive()


class TestMemory:
    @pytest.fixture
    def watched(self, on):
        """Weak references to all staging memory; the garbage collector is off."""
        found = []

        def watch(real):
            def take(*given):
                memory = real(*given)
                found.append(weakref.ref(memory))
                return memory

            return take

        on.device.staging = watch(on.device.staging)
        on.device.pinned_array = watch(on.device.pinned_array)
        gc.collect()
        gc.disable()
        yield found
        gc.enable()

    @pytest.mark.parametrize("outcome", ["waited", "cancelled", "failed", "spoiled"])
    def test_finished_batch_is_freed(self, on, watched, outcome):
        def then(indices):
            if outcome == "failed":
                raise KeyError("no room")

        batch = spoiled(batch_of(), 3) if outcome == "spoiled" else batch_of()
        encoded = joined(batch)
        buffer = weakref.ref(encoded.view.obj)
        scheduled = on.schedule(encoded, then, share=0.5)
        if outcome == "cancelled":
            scheduled.pending.cancel()
        elif outcome == "failed":
            with pytest.raises(DeviceError):
                scheduled.wait()
        else:
            scheduled.wait()
        del encoded, scheduled, on.latest
        on.worker.trim()
        if outcome in ("failed", "spoiled"):
            gc.collect()  # an exception and its traceback form a cycle
        until = time.monotonic() + 0.5
        while time.monotonic() < until and any(
            reference() is not None for reference in [buffer, *watched]
        ):
            time.sleep(0.01)
        assert buffer() is None
        assert [memory for memory in watched if memory() is not None] == []

    def test_staging_is_freed_after_the_batch(self, on, watched):
        batch = batch_of()
        scheduled = on.schedule(batch, share=0.5)
        scheduled.wait()
        assert len(watched) > 2
        assert (
            len([memory for memory in watched if memory() is not None]) == 2
        )  # those of a workspace
        on.worker.trim()
        assert [memory for memory in watched if memory() is not None] == []
        check(scheduled, batch)

    def test_workspace_is_reused(self, on, watched):
        for _ in range(5):
            on.schedule(batch_of()).wait()
        del on.latest
        assert len({id(memory()) for memory in watched if memory() is not None}) == 2

    def test_batches_in_flight_share_no_workspace(self, on):
        batches = [batch_of(kind) for kind in ("JPEG 4:2:0", "gray JPEG", "JPEG 4:4:4")]
        flying = [on.schedule(batch, at_once=False) for batch in batches]
        for batch, scheduled in reversed(list(zip(batches, flying, strict=True))):
            assert scheduled.wait() == {}
            check(scheduled, batch)
            assert scheduled.pending.on_cpu == 0

    @pytest.mark.parametrize("outcome", ["waited", "cancelled", "failed"])
    def test_trim_frees_idle_memory(self, on, outcome):
        def then(indices):
            if outcome == "failed":
                raise KeyError("no room")

        before = on.device.live
        for _ in range(MOST_IDLE + 2):
            scheduled = on.schedule(batch_of(), then, at_once=False)
            if outcome == "cancelled":
                scheduled.pending.cancel()
            else:
                with suppress(DeviceError):
                    scheduled.wait()
        assert on.device.live > before
        del scheduled, on.latest
        gc.collect()
        on.worker.trim()
        assert on.device.live == before

    def test_few_idle_workspaces_are_kept(self, on):
        flying = [on.schedule(batch_of(), at_once=False) for _ in range(MOST_IDLE + 3)]
        for scheduled in flying:
            scheduled.wait()
        del flying, scheduled, on.latest
        gc.collect()
        assert on.device.live == MOST_IDLE * SMALLEST

    def test_no_memory_for_the_workspace(self, on):
        batch = batch_of()
        scheduled = on.schedule(batch)
        scheduled.wait()
        on.worker.trim()
        nothing_kept = on.device.live
        on.device.free = on.device.live
        for _ in range(2):
            with pytest.raises(MemoryError):
                on.decoder.schedule(joined(batch), scheduled.slots, lambda rows: None, on.stream)
        assert on.device.live == nothing_kept
        on.device.free = 1 << 40
        again = on.schedule(batch)
        assert again.wait() == {}
        check(again, batch)


def test_stress():
    """Many threads, cancellations and failures cause no wrong pixels and no deadlock."""
    on = OnDevice()
    rng = random.Random(0)
    lock = threading.Lock()

    def chance():
        with lock:
            return rng.random()

    def decode(decoder, streams, images):
        luck = chance()
        if luck < 0.04:
            raise RuntimeError("injected")
        found = given(decoder, streams, images)
        if luck < 0.08:
            for image in images[::3]:
                spoil(on, image)
            return [good and place % 3 > 0 for place, good in enumerate(found)]
        return found

    def unlucky(indices):
        raise KeyError("injected")

    on.decode_by(decode)
    batches = {kind: batch_of(kind) for kind in ("JPEG 4:2:0", "gray JPEG", "Aperio's YCbCr")}
    truth = {kind: [expected(tile) for tile in batch] for kind, batch in batches.items()}
    outcomes = {"right": 0, "cancelled": 0, "raised": 0}
    wrong = []

    def finish(kind, tiles, scheduled, raises, cancels):
        if cancels:
            scheduled.pending.cancel()
            outcome = "cancelled"
        elif raises:
            with pytest.raises(DeviceError):
                scheduled.wait()
            outcome = "raised"
        else:
            good = scheduled.wait() == {}
            for place, tile in enumerate(tiles):
                good &= bool((scheduled.pixels(place) == truth[kind][tile]).all())
            if not good:
                wrong.append((kind, tiles))
            outcome = "right"
        with lock:
            outcomes[outcome] += 1

    def read(seed):
        own = random.Random(seed)
        flying = []
        for _ in range(60):
            kind = own.choice(list(batches))
            tiles = own.sample(range(16), own.randint(1, 16))
            raises, cancels = own.random() < 0.03, own.random() < 0.2
            scheduled = on.schedule(
                [batches[kind][tile] for tile in tiles],
                unlucky if raises else None,
                share=own.choice([0, 0.5, 1, 1]),
            )
            flying.append((kind, tiles, scheduled, raises, cancels))
            if len(flying) > 2:
                finish(*flying.pop(own.randrange(3)))
        for rest in flying:
            finish(*rest)

    errors = []

    def guarded(seed):
        try:
            read(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,), daemon=True) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert wrong == []
    assert sum(outcomes.values()) == 240
    assert all(outcomes.values())
    on.close()
