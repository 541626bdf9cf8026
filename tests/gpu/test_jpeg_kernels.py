"""JPEG tiles that our own kernels decode, compiled for the host, and on a GPU if there is one."""

import io
import shutil
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from napari_wsigpu import open_slide
from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.jpeg import header_length
from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.gpu.device.workspace import Workspace
from napari_wsigpu.gpu.jpeg import jpeg_stacks
from napari_wsigpu.gpu.jpeg.codestream import recipe_for
from napari_wsigpu.gpu.jpeg.jpeg_engine import JPEG_ENGINE
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide.runtime import Runtime
from tests.conftest import shared_slide
from tests.fakes import host_cuda
from tests.fakes.host_device import HostDevice, joined, level_of
from tests.writers import slides

TISSUE = np.tile(slides.picture(300, 500), (2, 2, 1))
ROWS, COLUMNS = 3, 4
# Threads of the host that decode a tile together.
TOGETHER = 6


@pytest.fixture(autouse=True)
def together(monkeypatch):
    monkeypatch.setattr(host_cuda, "TOGETHER", TOGETHER)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """A runtime whose only device runs its kernels on the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JPEG_ENGINE, "kernels")
        device = host_cuda.host_cuda_device(patch, tmp_path_factory.mktemp("jpeg"), compiler)
        made = Runtime(Devices(lambda index: device, lambda: False))
        assert made.devices.worker(0).start("jpeg")
    yield made
    made.close()


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def own_runtime(request):
    if request.param == "host":
        yield request.getfixturevalue("on_host")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JPEG_ENGINE, "kernels")
        made = Runtime()
        try:
            made.devices.worker(0)
        except DeviceError as error:
            pytest.skip(str(error))
        yield made
        made.close()


def crops(tile, pixels=TISSUE):
    """Return tiles from different places of a picture."""
    rng = np.random.default_rng(7)
    for _ in range(ROWS * COLUMNS):
        y, x = rng.integers(np.subtract(pixels.shape[:2], tile))
        yield pixels[y : y + tile[0], x : x + tile[1]]


def write(path, tiles, tile, *, rows=ROWS, photometric="ycbcr", samples=3, subsampling=(1, 1)):
    """Write encoded tiles as the only level of a TIFF."""
    shape = (tile[0] * rows, tile[1] * COLUMNS, samples)[: 2 if samples == 1 else 3]
    extra = {} if samples == 1 else {"subsampling": subsampling}
    tifffile.imwrite(
        path,
        iter(tiles),
        shape=shape,
        dtype=np.uint8,
        tile=tile,
        photometric=photometric,
        compression="jpeg",
        **extra,
    )


def read(path, device):
    """Return the level's pixels, and how many tiles were decoded by what."""
    with open_slide(path, device=device) as slide:
        return np.asarray(slide.levels[0]), slide.stats()["decoded"]


def read_tolerantly(path, device):
    """Return the level's pixels, which are white in damaged tiles."""
    with open_slide(path, device=device) as slide:
        return np.asarray(slide.level_array(0, tolerant=True))


def check(own_runtime, path, on_cpu=0):
    with runtime.using(own_runtime):
        found, decoded = read(path, "cuda")
    expected, _ = read(path, "cpu")
    np.testing.assert_array_equal(found, expected)
    assert decoded == {"cpu": on_cpu, "nvimagecodec": ROWS * COLUMNS - on_cpu}


SAMPLINGS = {"444": (1, 1), "422": (2, 1), "420": (2, 2)}


@pytest.mark.parametrize("tile", [(64, 64), (128, 256), (48, 80), (16, 16)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_subsampling(own_runtime, tmp_path, sampling, tile):
    encoded = [
        imagecodecs.jpeg8_encode(each, level=80, subsampling=sampling) for each in crops(tile)
    ]
    write(tmp_path / "a.tif", encoded, tile, subsampling=SAMPLINGS[sampling])
    check(own_runtime, tmp_path / "a.tif")


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("level", [1, 20, 95, 100])
def test_quality(own_runtime, tmp_path, level, optimize):
    """High quality has long codes and large values, low quality has large steps."""
    encoded = [
        imagecodecs.jpeg8_encode(each, level=level, subsampling="420", optimize=optimize)
        for each in crops((64, 96))
    ]
    write(tmp_path / "a.tif", encoded, (64, 96), subsampling=(2, 2))
    check(own_runtime, tmp_path / "a.tif")


def test_gray(own_runtime, tmp_path):
    gray = [
        imagecodecs.jpeg8_encode(np.ascontiguousarray(each[..., 1]), level=90)
        for each in crops((64, 64))
    ]
    write(tmp_path / "gray.tif", gray, (64, 64), photometric="minisblack", samples=1)
    check(own_runtime, tmp_path / "gray.tif")


CONTENTS = {
    "noise": np.random.default_rng(1).integers(0, 256, (300, 300, 3), np.uint8),
    "two values": 255 * np.random.default_rng(2).integers(0, 2, (300, 300, 3)).astype(np.uint8),
    "white": np.full((300, 300, 3), 255, np.uint8),
    "stripes": np.tile(np.array([0, 255], np.uint8), (300, 3, 150)).transpose(0, 2, 1),
}


@pytest.mark.parametrize("level", [30, 100])
@pytest.mark.parametrize("name", CONTENTS)
def test_contents(own_runtime, tmp_path, name, level):
    encoded = [
        imagecodecs.jpeg8_encode(np.ascontiguousarray(each), level=level, subsampling="420")
        for each in crops((128, 128), CONTENTS[name])
    ]
    write(tmp_path / "a.tif", encoded, (128, 128), subsampling=(2, 2))
    check(own_runtime, tmp_path / "a.tif")


def test_tables_that_differ(own_runtime, tmp_path):
    """Each header is decoded with its own tables."""
    encoded = [
        imagecodecs.jpeg8_encode(each, level=60 + number, subsampling="420")
        for number, each in enumerate(crops((64, 64)))
    ]
    write(tmp_path / "a.tif", encoded, (64, 64), subsampling=(2, 2))
    check(own_runtime, tmp_path / "a.tif")


def test_other_jpegs_are_decoded_by_the_cpu(own_runtime, tmp_path):
    encoded = []
    for number, each in enumerate(crops((64, 64))):
        file = io.BytesIO()
        picture = Image.fromarray(np.ascontiguousarray(each))
        picture.save(file, "JPEG", subsampling="4:4:4", progressive=number % 2 == 0)
        encoded.append(file.getvalue())
    write(tmp_path / "a.tif", encoded, (64, 64))
    check(own_runtime, tmp_path / "a.tif", on_cpu=6)


@pytest.mark.parametrize(
    ("name", "level"), [("CMU-1-Small-Region.svs", 0), ("ndpi-test3-DAPI-387.ndpi", 1)]
)
def test_real_slides(own_runtime, name, level):
    """RGB with one code for all components, and restart intervals of a large JPEG."""
    path = shared_slide(name)
    with runtime.using(own_runtime), open_slide(path, device="cuda") as slide:
        with open_slide(path, device="cpu") as expected:
            found = slide.levels[level][:900, :900]
            np.testing.assert_array_equal(found, expected.levels[level][:900, :900])
        decoded = slide.stats()["decoded"]
        assert decoded["nvimagecodec"] > decoded["cpu"]


ENCODED = {
    name: [
        imagecodecs.jpeg8_encode(each, level=85, subsampling=name, optimize=False)
        for each in crops((64, 64))
    ]
    for name in ("444", "420")
}


def mutated(encoded, rng):
    """Return a JPEG with some bits or bytes of its scan changed, removed or inserted."""
    tile, start = bytearray(encoded), header_length(encoded)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(start, len(tile) - 2))
        match int(rng.integers(4)):
            case 0:
                tile[place] ^= 1 << int(rng.integers(8))
            case 1:
                tile[place] = int(rng.choice([0, 255, rng.integers(256)]))
            case 2:
                del tile[place : min(place + int(rng.integers(1, 9)), len(tile) - 2)]
            case 3:
                tile[place:place] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(tile)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_seen_as_by_the_cpu(on_host, tmp_path_factory, data):
    """Every tile is damaged in another way; all decode to the CPU's pixels, or fail as there."""
    name = data.draw(st.sampled_from(sorted(ENCODED)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    path = tmp_path_factory.mktemp("damaged") / "a.tif"
    tiles = [mutated(encoded, rng) for encoded in ENCODED[name]]
    write(path, tiles, (64, 64), subsampling=SAMPLINGS[name])
    with runtime.using(on_host):
        found = read_tolerantly(path, "cuda")
    np.testing.assert_array_equal(found, read_tolerantly(path, "cpu"))


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("restarts", [False, True])
def test_an_engine_decodes_small_batches_and_restarts(on_host, monkeypatch, count, restarts):
    monkeypatch.setattr(jpeg_stacks, "LARGE_BATCH", 4 * 64 * 64)
    file = io.BytesIO()
    Image.fromarray(TISSUE[:64, :64]).save(
        file, "JPEG", subsampling="4:4:4", restart_marker_blocks=8 if restarts else 0
    )
    encoded = file.getvalue()
    level, kernels = level_of(tile=(64, 64)), on_host.devices.worker(0).jpeg
    worker = SimpleNamespace(jpeg=kernels, has_jpeg_engine=True)
    streams = jpeg_stacks.JpegStreams(level, recipe_for(level), worker)
    work = Workspace(HostDevice())
    tiles = [EncodedTile(level, 0, index, (encoded,), 255) for index in range(count)]
    prepared = streams.prepare(joined(tiles), count, work)
    assert isinstance(prepared, jpeg_stacks.TilesByKernels) == (count == 4 and not restarts)
