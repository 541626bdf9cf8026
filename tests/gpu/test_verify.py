"""A GPU with wrong pixels is detected with the first tiles, and not used any more."""

import logging
import threading
import time

import numpy as np
import pytest

from napari_wsigpu.gpu.device.verify import TILES_A_BATCH, TILES_A_SLIDE, TOLERANCES, Verifier
from tests.fakes.host_device import HostDevice, OnDevice
from tests.gpu.test_nvimagecodec import (
    TILE,
    batch_of,
    check,
    doubted,
    expected,
    given,
    spoiled,
)

pytest.importorskip("nvidia.nvimgcodec")

PATH = "/slides/tissue.svs"
MOST = {
    "hardware": 0,
    "GPU": 1,
    "JPEG 2000": 1,
    "lossless JPEG 2000": 0,
    "JPEG kernels": 0,
    "lossless kernels": 0,
}


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def off_by(on, amount, places=slice(None)):
    """Change the first plane of a decoder's tiles by `amount`, but not the strips."""

    def decode(decoder, streams, images):
        found = given(decoder, streams, images)
        for image in images[places].tolist():
            plane = on.device.behind[image][0]
            pixels = plane[: len(plane) // TILE[0] * TILE[0]]
            pixels[...] = np.where(pixels < 128, pixels + amount, pixels - amount)
        return found

    on.decode_by(decode)


@pytest.fixture
def on_with():
    made = []

    def make(engine):
        made.append(OnDevice(HostDevice(engine=engine), PATH))
        return made[-1]

    yield make
    for on in made:
        on.close()


PIXELS = 256 * 256


class TestVerifier:
    def test_a_few_tiles_of_a_slide_are_sampled(self):
        verifier = Verifier(PATH)
        found = [verifier.samples("jpeg", range(10, 26), PIXELS) for _ in range(10)]
        assert all(len(chosen) <= TILES_A_BATCH for chosen in found)
        assert all(set(chosen) <= set(range(10, 26)) for chosen in found)
        assert sum(map(len, found)) == TILES_A_SLIDE
        assert found[0]
        assert not found[-1]

    @pytest.mark.parametrize(("side", "expected"), [(64, 8), (512, 2), (1024, 1), (2048, 1)])
    def test_fewer_large_tiles_are_sampled_but_at_least_one(self, side, expected):
        verifier = Verifier(PATH)
        found = [verifier.samples("jpeg2000", range(4), side * side) for _ in range(10)]
        assert sum(map(len, found)) == expected
        verifier.return_samples("jpeg2000", 1, side * side)
        assert verifier.samples("jpeg2000", [7], side * side) == [7]

    def test_each_kind_is_sampled(self):
        verifier = Verifier(PATH)
        for _ in range(10):
            verifier.samples("jpeg", range(16), PIXELS)
        assert verifier.samples("jpeg2000", range(16), PIXELS)

    def test_no_more_flags_than_tiles(self):
        verifier = Verifier(PATH)
        assert verifier.samples("jpeg", [], PIXELS) == []
        assert verifier.samples("jpeg", [7], PIXELS) == [7]

    @pytest.mark.parametrize(("engine", "most"), MOST.items())
    def test_tolerances(self, engine, most):
        assert set(TOLERANCES) == set(MOST)
        expected = np.full((4, 5, 3), 100, np.uint8)
        for sign in (1, -1):
            for difference in range(6):
                pixels = expected.copy()
                pixels[3, 4, 2] = 100 + sign * difference
                assert Verifier(PATH).agree(engine, pixels, expected) == (difference <= most)

    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    def test_differences_do_not_wrap_around(self, dtype):
        low = np.zeros((4, 5, 1), dtype)
        high = np.full((4, 5, 1), np.iinfo(dtype).max, dtype)
        assert not Verifier(PATH).agree("GPU", low, high)
        assert not Verifier(PATH).agree("GPU", high, low)

    def test_cropped_part_is_not_compared(self):
        pixels = np.zeros((4, 5, 1), np.uint8)
        pixels[:3, :2] = 9
        verifier = Verifier(PATH)
        assert verifier.agree("hardware", pixels, np.full((3, 2, 1), 9, np.uint8))
        assert verifier.reason is None

    def test_one_warning_names_slide_and_reason(self, caplog):
        verifier = Verifier(PATH)
        black = np.zeros((4, 5, 1), np.uint8)
        for difference in (7, 9):
            assert not verifier.agree("GPU", black + np.uint8(difference), black)
        assert len(warnings(caplog)) == 1
        assert PATH in warnings(caplog)[0]
        assert "GPU" in warnings(caplog)[0]
        assert "differ by 7" in warnings(caplog)[0]
        assert verifier.reason


class TestWrongPixels:
    @pytest.mark.parametrize(
        ("engine", "kind", "amount"),
        [
            ("hardware", "JPEG 4:2:0", 1),
            ("hardware", "gray JPEG", 1),
            ("hardware", "JPEG 4:2:0", 4),
            ("JPEG kernels", "JPEG 4:2:0", 1),
            ("GPU", "JPEG 2000", 2),
            ("GPU", "gray JPEG 2000 of 16 bits", 2),
            ("GPU", "Aperio's YCbCr", 4),
        ],
    )
    def test_wrong_pixels_are_never_returned(self, on_with, caplog, engine, kind, amount):
        on = on_with(engine)
        off_by(on, amount)
        batch = batch_of(kind)
        first = on.schedule(batch)
        assert first.wait() == {}
        check(first, batch)
        assert first.pending.on_cpu == 16
        assert sorted(first.calls[-1]) == list(range(16))
        assert len(warnings(caplog)) == 1
        assert PATH in warnings(caplog)[0]
        assert engine in warnings(caplog)[0]
        assert isinstance(on.decoder.preparer(batch[0].level), str)
        second = on.schedule(batch)
        assert second.wait() == {}
        check(second, batch)
        assert second.pending.on_cpu == 16
        assert len(warnings(caplog)) == 1

    @pytest.mark.parametrize(
        ("engine", "kind", "amount"),
        [
            ("hardware", "JPEG 4:2:0", 0),
            ("GPU", "JPEG 2000", 1),
            ("GPU", "JPEG 2000 of 16 bits", 1),
        ],
    )
    def test_what_is_tolerated(self, on_with, caplog, engine, kind, amount):
        on = on_with(engine)
        off_by(on, amount)
        batch = batch_of(kind)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        assert scheduled.pending.on_cpu == 0
        assert warnings(caplog) == []
        for index, tile in enumerate(batch):
            difference = scheduled.pixels(index).astype(int) - expected(tile)
            assert np.abs(difference).max() == amount

    def test_other_kinds_of_the_slide_are_decoded_by_the_cpu_too(self, on_with):
        on = on_with("hardware")
        off_by(on, 1)
        on.schedule(batch_of("JPEG 4:2:0")).wait()
        scheduled = on.schedule(batch_of("JPEG 2000"))
        scheduled.wait()
        assert scheduled.pending.on_cpu == 16

    def test_other_slides_are_unaffected(self, on_with):
        on, other = on_with("hardware"), on_with("hardware")
        off_by(on, 1)
        on.schedule(batch_of()).wait()
        scheduled = other.schedule(batch_of())
        scheduled.wait()
        assert scheduled.pending.on_cpu == 0

    def test_batch_in_flight_is_compared(self, on_with):
        on = on_with("hardware")
        off_by(on, 1)
        batch = batch_of()
        for scheduled in [on.schedule(batch) for _ in range(TILES_A_SLIDE // TILES_A_BATCH)]:
            assert scheduled.wait() == {}
            check(scheduled, batch)

    def test_a_wrong_tile_that_the_cpu_cannot_decode_is_a_failure(self, on_with):
        on = on_with("hardware")
        off_by(on, 1)
        batch = spoiled(batch_of(), 9)
        scheduled = on.schedule(batch)
        assert list(scheduled.wait()) == [9]
        check(scheduled, batch, but=[9])

    def test_wrong_pixels_are_caught_at_any_share(self, on_with):
        on = on_with("hardware")
        off_by(on, 1)
        batch = batch_of()
        scheduled = on.schedule(batch, share=0.25)
        assert scheduled.wait() == {}
        check(scheduled, batch)

    def test_single_doubtful_stacks_keep_the_engine(self, on_with, caplog):
        on = on_with("hardware")
        off_by(on, 1, places=slice(0, 1))
        doubted(on, [1])
        batch = batch_of()
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
        assert scheduled.pending.on_cpu == 2
        assert warnings(caplog) == []

    @pytest.mark.parametrize("way", ["cancelled", "in doubt", "not decoded"])
    def test_tiles_that_were_not_compared_prove_nothing(self, on_with, way):
        on = on_with("hardware")
        batch = batch_of()
        if way == "cancelled":
            go = threading.Event()
            on.worker.submit(lambda worker: go.wait(20))
            flying = [on.schedule(batch) for _ in range(TILES_A_SLIDE)]
            threads = [threading.Thread(target=item.pending.cancel) for item in flying]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
            go.set()
            for thread in threads:
                thread.join(20)
            assert not any(item.calls for item in flying)
        elif way == "in doubt":
            doubted(on, slice(None))
            for _ in range(TILES_A_SLIDE):
                on.schedule(batch).wait()
            del on.device.merge_planes
        else:
            on.decode_by(lambda _, streams, images: [False] * len(streams))
            for _ in range(TILES_A_SLIDE):
                on.schedule(batch).wait()
        on.worker.close()
        off_by(on, 1)
        scheduled = on.schedule(batch)
        assert scheduled.wait() == {}
        check(scheduled, batch)
