"""Slides that are opened again: after a fork, and from pickles."""

import gc
import io
import multiprocessing
import os
import pickle
import shutil
import warnings
from contextlib import suppress

import numpy as np
import pytest
import tifffile

from napari_wsigpu import Slide, open_slide
from napari_wsigpu.compat import tiffslide
from napari_wsigpu.errors import (
    DeviceError,
    SlideChangedError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide.runtime import Runtime
from napari_wsigpu.storage.stream import StreamSource
from tests.conftest import shared_slide
from tests.fakes.host_device import HostDevice
from tests.writers import dicomslides, slides, tiffbytes

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
    """Run a function in a forked process and return its result."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        with os.fdopen(write, "w") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't fork here")
def test_a_forked_process_leaves_no_handle(path):
    def read():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            slide.read_region((0, 0), (8, 8))
            gc.collect()
        return [str(each.message) for each in caught]

    with open_slide(path, device="cpu") as slide:
        slide.read_region((0, 0), (8, 8))
        assert in_child(read) == "[]"


def message(slide):
    with pytest.raises(SlideError) as caught:
        slide.read_region((0, 0), (64, 64))
    return str(caught.value)


def sentences(label):
    """Collect the messages about a label image whose files are damaged, then deleted."""
    works = [
        lambda: repr(label),
        lambda: label.path,
        lambda: label.level_array(9),
        lambda: label.level_array(0, channel=7),
        lambda: label.level_array(0, channel="a"),
        lambda: label.plane(z=9),
        lambda: label.read_region((0, 0), (4, 4), mpp=1e-3),
        lambda: label.read_region((0, 0), (4, 4), color="srgb"),
        lambda: label.read_region((0, 0), (64, 64)),
        lambda: shutil.rmtree(label.layout.files[0].path.partition(NAME)[0]),
        lambda: label.read_region((0, 0), (64, 64)),
        lambda: pickle.loads(pickle.dumps(label)),
        label.close,
        lambda: label.read_region((0, 0), (64, 64)),
    ]
    said = []
    for work in works:
        try:
            said.append(str(work()))
        except SlideError as error:
            said.append(f"{error!r} {error}")
    return "\n".join(said)


def as_given(label):
    return sentences(label)


def unpickled(label):
    packed = pickle.dumps(label)
    assert NAME.encode() not in packed
    return sentences(pickle.loads(packed))


def forked(label):
    return in_child(lambda: sentences(label))


def spawned(label):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(sentences, (label,))


@pytest.mark.parametrize("way", [as_given, unpickled, pytest.param(forked, marks=forks), spawned])
def test_label_image_name_is_never_shown(label, way):
    said = way(label)
    assert NAME not in said
    assert said.count("(label image 1)") >= 11
    assert "There is no file" in said
    assert "has changed since it was opened" in said
    assert "was closed" in said


def test_unpickled_label_image_is_the_same(tmp_path):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    numbers = np.arange(3, dtype=np.uint16)[:, None, None] * np.ones((1, 64, 64), np.uint16)
    zarrs.write_image(tmp_path / "a.zarr", [np.zeros((3, 64, 64), np.uint16)], axes="zyx")
    zarrs.write_label(tmp_path / "a.zarr", NAME, [numbers], axes="zyx")
    with open_slide(tmp_path / "a.zarr", threads=3) as slide:
        for z in range(3):
            for label in (slide.plane(z).labels[NAME], slide.labels[NAME].plane(z)):
                with pickle.loads(pickle.dumps(label)) as copy:
                    assert copy.planes == label.planes
                    assert np.unique(copy.levels[0][...]).tolist() == [z]
                    assert np.unique(label.levels[0][...]).tolist() == [z]
                    assert label.layout.levels[0].categorical
                    assert NAME not in f"{label.path}{copy.path}"
                    assert copy._opening.threads == label._opening.threads == 3
        tasks = slide.labels[NAME].levels[0].to_dask()
        assert np.unique(tasks.compute(scheduler="processes", num_workers=1)).tolist() == [1]


def state(slide):
    """Read from a slide and return its opening options."""
    with suppress(SlideError):
        slide.read_region((0, 0), (8, 8))
    opening = slide._opening
    return (
        slide.path,
        slide.device,
        slide.display_color,
        opening.threads,
        slide._decoder.threads,
        opening.keeps_whole,
        slide.planes,
    )


@pytest.fixture
def stack(tmp_path):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    zarrs.write_image(tmp_path / "stack.zarr", [np.zeros((3, 64, 64), np.uint16)], axes="zyx")
    return tmp_path / "stack.zarr"


def test_pickled_slide_keeps_its_options(stack):
    spawn = multiprocessing.get_context("spawn")
    with open_slide(stack, device="cpu", threads=3) as slide, spawn.Pool(1) as pool:
        for each in (slide, slide.plane(z=2)):
            expected = state(each)
            with pickle.loads(pickle.dumps(each)) as copy:
                assert state(copy) == expected
            assert pool.apply(state, (each,)) == expected
            with pickle.loads(pickle.dumps(each.opener("cpu")))() as copy:
                assert copy._opening.threads == 3
                assert not copy._opening.keeps_whole
                assert copy.planes == each.planes


@forks
def test_forked_slide_keeps_its_options(stack):
    own, told = Runtime(), []
    own.tiles.budget = 12345678
    with open_slide(stack, device="cpu", threads=3, runtime=own) as slide:
        plane, number = slide.plane(z=2), slide._number
        slide.on_failed_tile(told.append)
        slides_ = (slide, plane)
        expected = [state(each) for each in slides_]

        def work():
            assert [state(each) for each in slides_] == expected
            assert slide.plane(z=2) is plane
            assert slide._decoder is plane._decoder
            assert slide.runtime is plane.runtime is own
            assert own.tiles.budget == 12345678
            assert slide._log.on_failed_tile is plane._log.on_failed_tile is not None
            assert slide._number != number
            return "the same"

        assert in_child(work) == "the same"


@forks
def test_a_forked_process_has_another_default_runtime(path):
    shared = runtime.default()
    with open_slide(path) as slide:
        slide.read_region((0, 0), (100, 100))
        slide.level_array(0, tolerant=True)[...]
        held = shared.tiles.used
        assert held

        def work():
            return shared is runtime.default() is slide.runtime, shared.tiles.used

        assert in_child(work) == str((True, 0))


@forks
def test_closed_slide_stays_closed_after_fork(path):
    slide = open_slide(path)
    slide.close()
    assert "was closed" in in_child(lambda: message(slide))


@forks
@pytest.mark.parametrize("batch_size", [None, 4])
def test_iterator_continues_after_fork(path, batch_size):
    """The threads that read ahead exist only in the parent."""
    where = [(number, 2 * number) for number in range(60)]
    with open_slide(path, "cpu") as slide:
        expected = [slide.read_region(place, (30, 20)) for place in where]
        regions = slide.read_regions(where, (30, 20), 0, batch_size)
        first = len(next(regions)) if batch_size else len([next(regions)])

        def work():
            found = list(regions)
            found = np.concatenate(found) if batch_size else np.stack(found)
            return np.array_equal(found, expected[first:])

        assert in_child(work) == "True"
        assert sum(len(batch) if batch_size else 1 for batch in regions) == 60 - first


@forks
def test_stream_in_memory_works_after_fork(path):
    with tiffslide.TiffSlide(io.BytesIO(path.read_bytes())) as slide:
        pixels = slide.read_region((0, 0), 0, (64, 64), as_array=True)
        again = in_child(lambda: slide.read_region((0, 0), 0, (64, 64), as_array=True).sum())
        assert again == str(pixels.sum())


@forks
def test_open_stream_fails_after_fork(path):
    class Stream(io.FileIO):
        """A stream whose path is unknown."""

        name = None

    with Stream(path) as stream, tiffslide.TiffSlide(stream) as slide:
        said = in_child(lambda: slide.read_region((0, 0), 0, (64, 64)))
        assert "was opened from a stream by the process that this one was forked from" in said


def test_a_stream_can_not_be_pickled(path):
    source = StreamSource(io.BytesIO(path.read_bytes()), "a stream")
    with (
        Slide(describe(path), source=source) as slide,
        pytest.raises(UnsupportedSlideError, match="from a stream, which can't be opened again"),
    ):
        pickle.dumps(slide)


def with_gpu():
    """Make a runtime whose GPU is host memory."""
    return Runtime(Devices(lambda index: HostDevice(), lambda: True))


@forks
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_of_the_parent_is_not_used_in_a_forked_process(path, device, caplog):
    own = with_gpu()
    own.devices.worker(0)
    with open_slide(path, device=device, runtime=own) as slide:
        pixels = slide.read_region((0, 0), (100, 100))

        def work():
            caplog.clear()
            assert np.array_equal(slide.read_region((0, 0), (100, 100)), pixels)
            assert np.array_equal(slide.levels[0][...][:100, :100], pixels)
            assert slide.device == ("cpu" if device == "cuda" else "auto")
            assert slide.decoder[0] == "CPU"
            for new in ("cuda", "cuda:1"):
                for given in (own, None):
                    with pytest.raises(DeviceError, match="forked from one that uses the GPU"):
                        open_slide(path, device=new, runtime=given)
                with pytest.raises(DeviceError, match="forked from one that uses the GPU"):
                    slide.read_region((0, 0), (100, 100), device=new)
                with pytest.raises(DeviceError, match="forked from one that uses the GPU"):
                    slide.device = new
            with pytest.raises(DeviceError, match="forked from one that uses the GPU"):
                driver.import_cuda("cupy", "cuda")
            with open_slide(path) as other:
                other.levels[0][...]
                assert other.decoder == ("CPU", driver.FORKED)
            return [record.message for record in caplog.records]

        said = in_child(work)
        assert said.count("Slides are decoded on the CPU because this process was forked") == 1
        assert said.count("spawn") == 1


@forks
def test_a_new_slide_in_a_forked_process_says_so_once(path, caplog):
    own = with_gpu()
    own.devices.worker(0)

    def work():
        caplog.clear()
        for _ in range(2):
            with open_slide(path, runtime=own) as slide:
                slide.levels[0][...]
                assert slide.decoder == ("CPU", driver.FORKED)
        return [record.message for record in caplog.records]

    assert in_child(work).count("Slides are decoded on the CPU") == 1


@forks
def test_nothing_is_refused_where_the_parent_has_started_no_gpu(path, caplog, monkeypatch):
    monkeypatch.setattr(driver, "_started_in", None)  # in case other tests have started CUDA
    own = with_gpu()

    def work():
        caplog.clear()
        with open_slide(path, device="cuda", runtime=own) as slide:
            return slide.device, own.devices.started(0) is None, len(caplog.records)

    assert in_child(work) == str(("cuda", False, 0))


def test_a_pickle_names_no_other_files_of_the_slide(tmp_path):
    first, *others = dicomslides_of(tmp_path)
    with open_slide(first, "cpu") as slide:
        assert len(slide.layout.files) == 3
        packed = pickle.dumps([slide, slide.levels[0]])
        assert not any(other.stem.encode() in packed for other in others)
        with pickle.loads(packed)[0] as again:
            assert again.layout.files == slide.layout.files
            np.testing.assert_array_equal(again.levels[1][...], slide.levels[1][...])
        others[0].write_bytes(others[0].read_bytes() + b"\0\0")
        with pytest.raises(SlideChangedError):
            pickle.loads(packed)[0].levels[1][...]


def test_an_associated_image_can_be_pickled():
    with open_slide(shared_slide("CMU-1-Small-Region.svs"), "cpu") as slide:
        label = slide.associated_images["label"]
        again = pickle.loads(pickle.dumps(label))
        assert repr(again) == repr(label)
        np.testing.assert_array_equal(again.read(), label.read())
        again._array.slide.close()


def dicomslides_of(folder):
    """Write a slide of three files that are named after a patient."""
    dicomslides.write_slide(folder / "slide", slides.picture(200, 300))
    files = sorted((folder / "slide").iterdir(), reverse=True)
    return [path.rename(path.with_stem(f"JANE_{path.stem}")) for path in files]


def test_a_pickle_holds_no_comments_of_tables(tmp_path):
    tables, rest = slides.split_tables(slides.jpeg_ycbcr(slides.picture(64, 64)))
    comment = b"\xff\xfe\x00\x0aJANEDOE1"
    told = tables[:2] + comment + tables[2:]
    page = tiffbytes.page(
        *(slides.picture(64, 64), lambda _tile: rest),
        **{"tile": (64, 64), "compression": 7, "photometric": 6},
        more={347: (tiffbytes.UNDEFINED, told)},
    )
    path = tiffbytes.write(tmp_path / "a.tif", [page])
    with open_slide(path, "cpu") as slide:
        packed = pickle.dumps([slide, slide.levels[0]])
        assert b"JANEDOE1" not in packed
        with pickle.loads(packed)[0] as again:
            np.testing.assert_array_equal(again.levels[0][...], tifffile.imread(path))
