"""Slides that are opened again: after a fork, and from pickles."""

import io
import os
import pickle

import numpy as np
import pytest

from napari_wsigpu import Slide, open_slide
from napari_wsigpu.compat import tiffslide
from napari_wsigpu.errors import DeviceError, SlideError, UnsupportedSlideError
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.slide.runtime import Runtime
from napari_wsigpu.storage.stream import StreamSource
from tests.writers import slides

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
NAME = "JOHN_DOE_1954"


@pytest.fixture
def path(tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(200, 300))
    return tmp_path / "slide.svs"


@pytest.fixture
def label(tmp_path):
    """A label image with a patient's name, one of whose chunks is damaged."""
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    folder = tmp_path / "slide.zarr"
    zarrs.write_image(folder, [np.zeros((3, 64, 64), np.uint8)])
    zarrs.write_label(folder, NAME, [np.ones((64, 64), np.uint16)])
    for chunk in (folder / "labels" / NAME / "0").rglob("*"):
        if chunk.is_file() and not chunk.name.startswith((".", "zarr")):
            chunk.write_bytes(b"damaged")
    with open_slide(folder, device="cpu") as slide:
        yield slide.labels[NAME]


def in_child(work):
    """Return what a function returns in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def message(slide):
    with pytest.raises(SlideError) as caught:
        slide.read_region((0, 0), (64, 64))
    return str(caught.value)


def test_messages_about_a_label_image_number_it(label):
    assert "label image 1" in message(label)
    assert NAME not in message(label)


@forks
def test_they_do_in_a_forked_process(label):
    said = in_child(lambda: message(label))
    assert "label image 1" in said
    assert NAME not in said


def test_a_pickle_of_a_label_image_does_not_name_it(label):
    packed = pickle.dumps(label)
    assert NAME.encode() not in packed
    with pickle.loads(packed) as copy:
        assert NAME not in message(copy)
        assert copy.dimensions == label.dimensions


@forks
def test_a_forked_slide_keeps_how_it_was_opened(path):
    with open_slide(path, device="cpu", threads=3, runtime=Runtime()) as slide:
        slide.on_failed_tile(lambda *_: None)
        listener = slide._log.on_failed_tile

        def state():
            slide.read_region((0, 0), (8, 8))
            return slide._opening.threads, slide._decoder.threads, slide._log.on_failed_tile

        assert in_child(state) == str((3, 3, listener))


@forks
def test_a_stream_in_memory_goes_on_in_a_forked_process(path):
    with tiffslide.TiffSlide(io.BytesIO(path.read_bytes())) as slide:
        pixels = slide.read_region((0, 0), 0, (64, 64), as_array=True)
        again = in_child(lambda: slide.read_region((0, 0), 0, (64, 64), as_array=True).sum())
        assert again == str(pixels.sum())


@forks
def test_an_open_stream_does_not(path):
    class Stream(io.FileIO):
        """Something of which nobody knows the path."""

        name = None

    with Stream(path) as stream, tiffslide.TiffSlide(stream) as slide:
        said = in_child(lambda: slide.read_region((0, 0), 0, (64, 64)))
        assert "was opened from a stream by the process that this one was forked from" in said


def test_a_stream_can_not_be_pickled(path):
    source = StreamSource(io.BytesIO(path.read_bytes()), "a stream")
    with (
        Slide(describe(path), source=source) as slide,
        pytest.raises(UnsupportedSlideError, match="from a stream, which no other process"),
    ):
        pickle.dumps(slide)


@forks
def test_a_gpu_of_the_parent_is_not_used_in_a_forked_process(path, host_gpu):
    with open_slide(path, device="cuda") as slide:
        pixels = slide.read_region((0, 0), (100, 100))

        def work():
            again = slide.read_region((0, 0), (100, 100))
            with pytest.raises(DeviceError, match="forked from one that uses the GPU"):
                driver.import_cuda("cupy", "cuda")
            return slide.device, np.array_equal(again, pixels)

        assert in_child(work) == str(("cpu", True))
