"""What is said of the decoder in use, beside what has decoded."""

import pickle

import numpy as np
import pytest
import tifffile

from napari_wsigpu import native, open_slide
from napari_wsigpu.gpu.device import devices, verify
from napari_wsigpu.model.errors import DeviceError
from tests.reading.test_reader import TILE, TILES, decoded, files, read_cold, wait_for
from tests.writers import slides

__all__ = ["files"]

GPU = "GPU 0 (host memory)"


@pytest.fixture
def slow_start(host_gpu, monkeypatch):
    monkeypatch.setattr(devices.threading.Thread, "start", lambda thread: None)


class TestAuto:
    def test_without_a_driver(self, files, host_machine, host_runtime):
        host_machine.driver = False
        with open_slide(files["jpeg"][0]) as slide:
            for _ in range(2):
                assert slide.decoder == ("CPU", "this machine has no NVIDIA driver")
                read_cold(slide)

    def test_from_the_start_to_what_is_fastest(self, files, host_gpu):
        path, _ = files["jpeg"]
        with open_slide(path) as slide:
            assert slide.decoder == ("CPU", "the GPU starts with the first tiles")
            read_cold(slide)
            wait_for(lambda: slide.runtime.devices.background.waiting_reason("jpeg") is None)
            assert slide.decoder == (GPU, "hardware JPEG engine")

    def test_while_it_starts(self, files, slow_start):
        with open_slide(files["jpeg"][0]) as slide:
            slide.runtime.devices.background.worker("jpeg")
            assert slide.decoder == ("CPU", "the GPU is starting")

    @pytest.mark.parametrize("where", ["device", "decoder"])
    def test_a_gpu_that_does_not_start(self, files, host_machine, host_gpu, monkeypatch, where):
        def broken(*_):
            raise DeviceError("'cuda:0' is broken.")

        owner, name = (host_machine, "open") if where == "device" else (host_gpu, "decoder")
        monkeypatch.setattr(owner, name, broken)
        with open_slide(files["jpeg"][0]) as slide:
            read_cold(slide)
            said = {
                "device": "'cuda:0' is broken",
                "decoder": "nvImageCodec cannot decode these tiles on this GPU",
            }
            wait_for(lambda: slide.decoder == ("CPU", said[where]))

    def test_tiles_that_no_gpu_decodes(self, files, host_gpu):
        with open_slide(files["raw"][0]) as slide:
            assert slide.decoder == ("CPU", "its tiles are uncompressed")

    def test_zarr(self, tmp_path, host_gpu):
        zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
        zarrs.write_image(tmp_path / "slide.zarr", [np.zeros((3, 64, 64), np.uint8)])
        with open_slide(tmp_path / "slide.zarr") as slide:
            assert slide.decoder == ("CPU", "Zarr is decoded on the CPU only")


class TestChosen:
    def test_the_cpu(self, files, host_gpu):
        with open_slide(files["jpeg"][0], device="cpu") as slide:
            assert slide.decoder == ("CPU", "chosen")

    @pytest.mark.parametrize(
        ("kind", "how"), [("jpeg", "hardware JPEG engine"), ("33003", "JPEG 2000")]
    )
    def test_the_gpu(self, files, host_gpu, kind, how):
        with open_slide(files[kind][0], device="cuda") as slide:
            assert slide.decoder == (GPU, "the decoder starts when the first tiles are decoded")
            read_cold(slide)
            assert slide.decoder == (GPU, how)

    def test_a_gpu_without_a_decoder(self, files, host_gpu, monkeypatch):
        def none(kind):
            raise DeviceError("There is no decoder.")

        monkeypatch.setattr(host_gpu, "decoder", none)
        with open_slide(files["jpeg"][0], device="cuda") as slide:
            read_cold(slide)
            assert slide.decoder == ("CPU", f"{GPU} has no decoder for this compression")
            assert decoded(slide) == (TILES, 0)

    def test_a_gpu_without_our_kernels(self, tmp_path, host_gpu):
        """It decodes what nvImageCodec takes; four channels are not among that."""
        pixels = np.dstack([slides.picture(64, 96), slides.picture(64, 96)[..., :1]])
        options = {"compression": "jpeg2000", "photometric": "rgb", "extrasamples": ["unassalpha"]}
        tifffile.imwrite(tmp_path / "slide.tif", pixels, tile=(32, 32), **options)
        with open_slide(tmp_path / "slide.tif", device="cuda") as slide:
            read_cold(slide)
            assert slide.decoder == ("CPU", f"{GPU} has no decoder for this compression")
            assert decoded(slide) == (6, 0)

    def test_a_gpu_whose_pixels_differ(self, files, host_gpu, monkeypatch):
        monkeypatch.setattr(verify.Verifier, "agree", lambda self, *_: self._give_up("x") or False)
        with open_slide(files["jpeg"][0], device="cuda") as slide:
            read_cold(slide)
            assert slide.decoder == ("CPU", "x")


class TestSwitching:
    def test_the_next_read_is_by_the_other(self, files, host_gpu):
        path, pixels = files["jpeg"]
        with open_slide(path, device="cpu") as slide:
            for device, count in (("cuda", (0, TILES)), ("cpu", (TILES, TILES))):
                slide.device = device
                assert slide.device == device
                np.testing.assert_array_equal(read_cold(slide), pixels)
                assert decoded(slide) == count

    @pytest.mark.parametrize("device", ["cuda:1", "tpu"])
    def test_what_is_not_there_changes_nothing(self, files, host_gpu, device):
        with open_slide(files["jpeg"][0], device="cpu") as slide:
            with pytest.raises(DeviceError, match=device):
                slide.device = device
            assert slide.device == "cpu"
            read_cold(slide)
            assert decoded(slide) == (TILES, 0)

    def test_pickling_keeps_it(self, files, host_gpu):
        with open_slide(files["jpeg"][0], device="cpu") as slide:
            slide.device = "cuda"
            with pickle.loads(pickle.dumps(slide)) as other:
                assert other.device == "cuda"
                read_cold(other)
                assert decoded(other) == (0, TILES)

    def test_a_gpu_that_failed_is_tried_again(self, files, host_gpu, monkeypatch):
        path, pixels = files["jpeg"]
        with open_slide(path) as slide:
            read_cold(slide)
            wait_for(lambda: slide.runtime.devices.background.waiting_reason("jpeg") is None)
            with monkeypatch.context() as broken:

                def fail(*_, **options):
                    raise RuntimeError("it is too hot")

                broken.setattr(host_gpu, "paste", fail)
                np.testing.assert_array_equal(read_cold(slide), pixels)
                decoder, why = slide.decoder
                assert decoder == "CPU"
                assert "it is too hot" in why
            by_gpu = decoded(slide)[1]
            slide.device = "auto"
            assert slide.decoder[0] == GPU
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide)[1] > by_gpu


def test_bytes_of_pixels_are_counted_by_either(files, host_gpu):
    path, _ = files["jpeg"]
    for device in ("cpu", "cuda"):
        with open_slide(path, device=device) as slide:
            read_cold(slide)
            assert slide.stats()["bytes_decoded"] == TILES * TILE**2 * 3


@pytest.mark.skipif(not native.available, reason="needs the core")
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_small_regions_go_to_a_device_the_fastest_way(files, host_gpu, device):
    path, pixels = files["jpeg"]
    expected = pixels[10:70, 20:120]
    with open_slide(path, device=device) as slide:
        region = slide.read_region((20, 10), (100, 60), device="cuda")
        np.testing.assert_array_equal(region, expected)
        region = slide.read_region((20, 10), (100, 60), device="cuda", out=np.zeros_like(expected))
        np.testing.assert_array_equal(region, expected)
        # A GPU needs longer for so few tiles, and is used only if it was chosen.
        assert (decoded(slide)[1] > 0) == (device == "cuda")
