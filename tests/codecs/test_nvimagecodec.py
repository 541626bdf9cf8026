"""Batches in flight: their pixels are the CPU decoder's, whatever fails on the device.

Here nvImageCodec decodes on the CPU, into a device that is host memory.
"""

import gc
import logging
import random
import threading
import time
import weakref

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu.codecs.cpu import decode_tile
from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.errors import DeviceError
from tests import slides, tiffbytes
from tests.codecs.test_codestream import with_ids, without_adobe
from tests.codecs.test_cpu import jpeg_2000_ycbcr
from tests.host_device import HostDevice, HostStream, OnDevice, joined, level_of

pytest.importorskip("nvidia.nvimgcodec")

TILE = (48, 64)
# Neither a multiple of the tile's height nor of its width: 4 x 4 tiles.
SIZE = (160, 230)
BACKGROUND = 200


def jpeg_2000(tile):
    return imagecodecs.jpeg2k_encode(tile.squeeze(), level=0, codecformat="J2K", mct=False)


def stored(tile):
    """Encode RGB as Aperio does: nothing in the JPEG says so."""
    return with_ids(without_adobe(slides.jpeg(tile)), (1, 2, 3))


ENCODINGS = {
    "gray JPEG": (1, {"jpeg_color": "gray"}, slides.jpeg),
    "stored JPEG": (3, {"jpeg_color": "stored"}, stored),
    "JPEG 4:2:0": (3, {}, slides.jpeg_ycbcr),
    "JPEG 4:4:4": (3, {}, lambda tile: slides.jpeg_ycbcr(tile, "444")),
    "JPEG 2000": (3, {"compression": 33005}, jpeg_2000),
    "gray JPEG 2000": (1, {"compression": 34712}, jpeg_2000),
    "gray JPEG 2000 of 16 bits": (1, {"compression": 34712, "dtype": "uint16"}, jpeg_2000),
    "JPEG 2000 of 16 bits": (3, {"compression": 34712, "dtype": "uint16"}, jpeg_2000),
    "Aperio's YCbCr": (3, {"compression": 33003}, jpeg_2000_ycbcr),
}


def batch_of(kind="JPEG 4:2:0", *, cut=False):
    """Encode all tiles of a level."""
    channels, encoding, encode = ENCODINGS[kind]
    level = level_of(channels, tile=TILE, size=SIZE, **encoding)
    pixels = slides.picture(*SIZE, channels, level.encoding.dtype)
    segments = [memoryview(encode(tile)) for tile in tiffbytes.tiles(pixels, TILE, cut=cut)]
    columns = level.grid.columns
    return [
        EncodedTile(level, *divmod(index, columns), (segment,), BACKGROUND)
        for index, segment in enumerate(segments)
    ]


def expected(tile):
    """Decode a tile on the CPU and fill it up with background."""
    grid, level = tile.level.grid, tile.level
    full = np.full((grid.tile_height, grid.tile_width, level.channels), BACKGROUND, level.dtype)
    part = decode_tile(tile, np.empty(level.tile_bytes, np.uint8))
    full[: part.shape[0], : part.shape[1]] = part
    return full


def check(scheduled, batch, but=()):
    """Compare all tiles of a batch with the CPU's."""
    for index, tile in enumerate(batch):
        if index not in but:
            np.testing.assert_array_equal(scheduled.pixels(index), expected(tile), f"tile {index}")


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
    on.device.behind[int(image)][...] = 13


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
    def test_tiles_cut_to_their_level_are_filled_up(self, on, kind):
        batch = batch_of(kind, cut=True)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 7  # the lower and the right edge

    def test_a_missing_segment_is_background(self, on):
        batch = batch_of()
        batch[4] = batch[4]._replace(segments=(None,))
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        assert (scheduled.pixels(4) == BACKGROUND).all()
        check(scheduled, batch)

    def test_what_has_no_recipe_is_decoded_by_the_cpu(self, on):
        level = level_of(3, tile=TILE, compression=1)
        pixels = slides.picture(*TILE)
        scheduled = on.schedule([EncodedTile(level, 0, 0, (memoryview(pixels.tobytes()),), 0)])
        assert scheduled.wait() == {}
        np.testing.assert_array_equal(scheduled.pixels(0), pixels)
        assert scheduled.pending.on_cpu == 1

    @pytest.mark.parametrize(("share", "on_cpu"), [(0, 16), (0.25, 12), (0.5, 8), (1, 0)])
    def test_the_device_decodes_its_share(self, on, share, on_cpu):
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
        assert sum(sizes) == 16 - on_cpu
        assert [sorted(call) for call in scheduled.calls] == [list(range(16))]

    def test_an_empty_batch(self, on):
        calls = []
        first = on.schedule(batch_of())
        nothing = joined([], batch_of()[0].level)
        pending = on.decoder.schedule(
            nothing, first.slots, lambda rows: calls.append(rows.tolist())
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
    def test_a_damaged_tile_costs_only_itself(self, on, kind, damage):
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
        assert not any(5 in call for call in scheduled.calls)

    def test_a_damaged_tile_of_the_cpus_share(self, on):
        batch = spoiled(batch_of(), 12)
        scheduled = on.schedule(batch, share=0.5)
        assert list(scheduled.wait()) == [12]
        check(scheduled, batch, but=[12])

    def test_smaller_parts_are_tried(self, on, caplog):
        sizes = []

        def small(decoder, streams, images):
            sizes.append(len(streams))
            if len(streams) > 4:
                raise RuntimeError("out of memory")
            return given(decoder, streams, images)

        on.decode_by(small)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        assert sizes == [16, 8, 4, 4, 8, 4, 4]
        assert warnings(caplog) == []

    def test_a_batch_in_which_nothing_worked_is_tried_in_parts(self, on, caplog):
        sizes = []

        def small(decoder, streams, images):
            sizes.append(len(streams))
            return given(decoder, streams, images) if len(streams) < 5 else [False] * len(streams)

        on.decode_by(small)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 0
        assert sizes == [16, 8, 4, 4, 8, 4, 4]

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

    def test_a_decoder_that_raises_for_one_tile(self, on, caplog):
        def picky(decoder, streams, images):
            if any(on.latest.index_of(image) == 6 for image in images):
                raise RuntimeError("not this one")
            return given(decoder, streams, images)

        on.decode_by(picky)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 1
        assert scheduled.calls == [[i for i in range(16) if i != 6], [6]]
        assert len(warnings(caplog)) == 1

    def test_tiles_that_did_not_work_are_decoded_by_the_cpu(self, on, caplog):
        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            for place in (2, 9):
                spoil(on, images[place])
            return [good and place not in (2, 9) for place, good in enumerate(found)]

        on.decode_by(decode)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 2
        assert scheduled.calls == [[i for i in range(16) if i not in (2, 9)], [2, 9]]

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

    def test_unclear_tiles_are_decoded_by_the_cpu(self):
        device = HostDevice(engine="hardware")
        asked = []

        def unclear(tiles, tile, stream):
            asked.extend(tiles[:, 0].tolist())
            return np.isin(np.arange(len(tiles)), (3, 8)).astype(np.int32)

        device.round_as_libjpeg = unclear
        on = OnDevice(device)
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        on.close()
        assert asked == scheduled.slots.addresses.tolist()
        assert scheduled.pending.on_cpu == 2
        assert scheduled.calls == [list(range(16)), [3, 8]]

    def test_unclear_tiles_are_counted_among_those_that_worked(self):
        """The flags are those of the decoded tiles, not of the whole batch."""
        device = HostDevice(engine="hardware")
        device.round_as_libjpeg = lambda tiles, *_: (np.arange(len(tiles)) == 3).astype(np.int32)
        on = OnDevice(device)

        def decode(decoder, streams, images):
            found = given(decoder, streams, images)
            return [good and place != 1 for place, good in enumerate(found)]

        on.decode_by(decode)
        batch = spoiled(batch_of(), 2)
        scheduled = on.schedule(batch)
        assert list(scheduled.wait()) == [2]
        check(scheduled, batch, but=[2])
        on.close()
        assert scheduled.calls[1:] == [[1, 5]]

    @pytest.mark.parametrize(
        ("engine", "kind", "times"),
        [
            ("hardware", "JPEG 4:2:0", 1),
            ("hybrid", "JPEG 4:2:0", 0),
            ("hardware", "stored JPEG", 0),
            ("hardware", "gray JPEG", 0),
            ("GPU", "Aperio's YCbCr", 0),
        ],
    )
    def test_only_a_jpeg_engines_rgb_is_rounded_again(self, engine, kind, times):
        device = HostDevice(engine=engine)
        calls = []
        real = device.round_as_libjpeg
        device.round_as_libjpeg = lambda *given: calls.append(1) or real(*given)
        on = OnDevice(device)
        assert on.schedule(batch_of(kind)).wait() == {}
        on.close()
        assert len(calls) == times


class TestThen:
    @pytest.mark.parametrize("error", [KeyError, MemoryError, OSError])
    def test_its_errors_come_out_of_wait(self, on, error):
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

    def test_a_device_error_comes_out_as_it_is(self, on):
        def then(indices):
            raise DeviceError("it fell off the bus")

        with pytest.raises(DeviceError, match=r"^it fell off the bus$"):
            on.schedule(batch_of(), then).wait()

    def test_the_device_is_done_when_an_error_comes_out(self, on):
        """Or the places and what is uploaded to them would be used while they are given back."""

        def then(indices):
            raise KeyError("no room")

        scheduled = on.schedule(batch_of(), then, share=0.5)
        with pytest.raises(DeviceError):
            scheduled.wait()
        assert on.device.synchronised >= 1

    def test_pixels_are_in_place_when_it_is_called(self, on):
        batch = batch_of()
        seen = {}

        def then(indices):
            seen.update((index, on.latest.pixels(index)) for index in indices)

        assert on.schedule(batch, then, share=0.5).wait() == {}
        for index, tile in enumerate(batch):
            np.testing.assert_array_equal(seen[index], expected(tile))

    def test_a_batch_is_synchronised_once(self, on):
        batch = batch_of()
        for count in (1, 2, 3):
            on.schedule(batch).wait()
            assert on.device.synchronised == count

    def test_what_was_decoded_another_way_is_synchronised_too(self, on):
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

    def test_a_callers_stream_is_used_for_everything(self, on):
        class Given(HostStream):
            times = 0

            def synchronize(self):
                self.times += 1

        stream, streams = Given(on.device), []
        names = ("images", "upload", "ycbcr_to_rgb", "download_tile")
        batch = batch_of("Aperio's YCbCr")
        decoded = []

        def decode(decoder, streams, images):
            decoded.extend(images.tolist())
            return given(decoder, streams, images)

        on.decode_by(decode)

        def watch(name, real):
            def called(*given):
                streams.append((name, given[-1]))
                return real(*given)

            setattr(on.device, name, called)

        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(on.device, name, getattr(on.device, name))
                watch(name, getattr(on.device, name))
            scheduled = on.schedule(
                batch, lambda indices: streams.append(("then", None)), stream=stream, share=0.5
            )
            assert scheduled.wait() == {}
        check(scheduled, batch)
        assert streams.pop(0) == ("images", on.worker.stream)  # those that all batches share
        assert {name for name, _ in streams} == {*names, "then"}
        assert all(used is stream for name, used in streams if name != "then")
        assert not set(decoded) & set(scheduled.slots.images.tolist())
        assert stream.times == 1
        assert on.device.synchronised == 0


class Held:
    """A device whose next decode waits until it is let go."""

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
    def test_before_it_begins(self, on):
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

    def test_while_it_is_decoded(self, on):
        held = Held(on)
        batch = batch_of()
        first = on.schedule(batch, share=0.5)
        assert held.begun.wait(20)
        cancelling = in_thread(first.pending.cancel)
        cancelling.join(0.1)
        assert cancelling.is_alive()  # the device still writes to its places
        held.go.set()
        cancelling.join(20)
        assert not cancelling.is_alive()
        second = on.schedule(batch)
        assert second.wait() == {}
        check(second, batch)

    def test_when_it_is_done(self, on):
        batch = batch_of()
        scheduled = on.schedule(batch)
        scheduled.wait()
        scheduled.pending.cancel()
        check(scheduled, batch)


class TestWorker:
    def test_close_joins_its_thread_after_what_was_submitted(self, leaves_nothing):
        on = OnDevice()
        batch = batch_of()
        flying = [on.schedule(batch) for _ in range(4)]
        on.close()
        for scheduled in flying:
            assert scheduled.wait() == {}
            check(scheduled, batch)

    def test_close_lets_go_of_the_decoders(self):
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
        """It would end the process."""
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

    def test_a_job_that_fails_does_not_end_it(self, on, monkeypatch):
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
        """Weak references to each piece of staging memory; garbage is not collected."""
        found = []
        real = on.device.staging

        def staging(count, size):
            memory = real(count, size)
            found.append(weakref.ref(memory))
            return memory

        on.device.staging = staging
        gc.collect()
        gc.disable()
        yield found
        gc.enable()

    @pytest.mark.parametrize("way", ["waited", "cancelled", "failed", "spoiled"])
    def test_nothing_is_kept_of_a_batch(self, on, watched, way):
        def then(indices):
            if way == "failed":
                raise KeyError("no room")

        batch = spoiled(batch_of(), 3) if way == "spoiled" else batch_of()
        encoded = joined(batch)
        buffer = weakref.ref(encoded.buffer)
        scheduled = on.schedule(encoded, then, share=0.5)
        if way == "cancelled":
            scheduled.pending.cancel()
        elif way == "failed":
            with pytest.raises(DeviceError):
                scheduled.wait()
        else:
            scheduled.wait()
        del encoded, scheduled, on.latest
        if way in ("failed", "spoiled"):
            gc.collect()  # an exception and its traceback are a cycle
        until = time.monotonic() + 0.5
        while time.monotonic() < until and any(
            reference() is not None for reference in [buffer, *watched]
        ):
            time.sleep(0.01)
        assert buffer() is None
        assert [memory for memory in watched if memory() is not None] == []

    def test_staging_is_given_back_when_the_batch_is_done(self, on, watched):
        batch = batch_of()
        scheduled = on.schedule(batch, share=0.5)
        scheduled.wait()
        assert watched
        assert [memory for memory in watched if memory() is not None] == []
        check(scheduled, batch)


def test_stress():
    """Many threads, cancellations and failures: no wrong pixel, and no hang."""
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
            tiles = own.sample(range(16), own.randint(1, 8))
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
