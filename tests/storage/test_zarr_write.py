"""Chunks that are written are what zarr-python reads."""

import sys

import numpy as np
import pytest

from benchmarks.transfers import chunk_writer
from benchmarks.transfers.chunk_writer import ChunkWriter, blocks
from benchmarks.transfers.device_chunks import (
    LARGEST_BLOCK,
    DeviceChunkWriter,
    KvikioChunkWriter,
    Lz4Encoder,
)
from napari_wsigpu.model.errors import MissingPackageError, UnsupportedSlideError
from tests.conftest import decoding_threads
from tests.fakes.host_cupy import DeviceArray, install
from tests.writers import slides

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

SHAPE = 150, 210, 3
CHUNK = 64, 48


def create(folder, dtype, lz4=False, shape=SHAPE):
    coded = {"zarr_format": 3, "compressors": None}
    if lz4:
        coded = {"zarr_format": 2, "compressors": numcodecs.LZ4()}
    return zarr.create_array(
        str(folder), shape=shape, chunks=(*CHUNK, shape[2]), dtype=dtype, fill_value=7, **coded
    )


def stored(folder):
    return zarr.open_array(str(folder), mode="r")[...]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("lz4", [False, True])
def test_chunks_from_the_host(tmp_path, dtype, lz4):
    folder, pixels = tmp_path / "a.zarr", slides.picture(*SHAPE, dtype)
    array = create(folder, dtype, lz4)
    with ChunkWriter(folder, array, numcodecs.LZ4().encode if lz4 else None) as output:
        output.write(pixels[:128], 0, 0)
        output.write(pixels[128:, :96], 128, 0)
        output.write(pixels[128:, 96:], 128, 96)
    assert not decoding_threads()
    np.testing.assert_array_equal(stored(folder), pixels)


def test_edge_chunks_are_filled_up(tmp_path):
    folder = tmp_path / "a.zarr"
    array = create(folder, "uint8", shape=(10, 10, 1))
    with ChunkWriter(folder, array) as output:
        output.write(np.ones((10, 10, 1), np.uint8), 0, 0)
    chunk = np.fromfile(folder / "c/0/0/0", np.uint8).reshape(CHUNK)
    assert (chunk[:10, :10] == 1).all()
    assert chunk.sum() == 100 + 7 * (chunk.size - 100)


def test_few_bytes_are_on_their_way(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_writer, "MOST_BYTES", 10_000)
    folder, pixels = tmp_path / "a.zarr", slides.picture(*SHAPE)
    with ChunkWriter(folder, create(folder, "uint8")) as output:
        output.write(pixels, 0, 0)
        assert output._bytes <= 10_000
    np.testing.assert_array_equal(stored(folder), pixels)


def test_what_can_not_be_written_is_raised(tmp_path):
    folder = tmp_path / "a.zarr"
    array = create(folder, "uint8")
    (folder / "c").write_text("in the way")
    with pytest.raises(OSError, match="c"), ChunkWriter(folder, array) as output:
        output.write(slides.picture(*SHAPE), 0, 0)
    assert not decoding_threads()


def test_an_error_in_between_ends_the_threads(tmp_path):
    array = create(tmp_path / "a.zarr", "uint8")

    def write():
        with ChunkWriter(tmp_path / "a.zarr", array) as output:
            output.write(slides.picture(*SHAPE), 0, 0)
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert not decoding_threads()


def test_blocks_are_chunks_row_by_row():
    pixels = slides.picture(100, 90, 2, "uint16")
    found = blocks(np, pixels, (64, 48), 5).view(np.uint16).reshape(4, 64, 48, 2)
    np.testing.assert_array_equal(found[0], pixels[:64, :48])
    np.testing.assert_array_equal(found[1, :, :42], pixels[:64, 48:])
    np.testing.assert_array_equal(found[2, :36], pixels[64:, :48])
    assert (found[1, :, 42:] == 5).all()
    assert (found[3, 36:] == 5).all()


@pytest.fixture
def host_cupy(monkeypatch):
    install(monkeypatch)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("lz4", [False, True])
@pytest.mark.parametrize("writer", [DeviceChunkWriter, KvikioChunkWriter])
def test_chunks_from_a_device(tmp_path, host_cupy, writer, dtype, lz4):
    folder, pixels = tmp_path / "a.zarr", slides.picture(*SHAPE, dtype)
    array = create(folder, dtype, lz4)
    with writer(folder, array, Lz4Encoder() if lz4 else None) as output:
        for top in range(0, SHAPE[0], 64):
            part = pixels[top : top + 64].copy().view(DeviceArray)
            output.write(part, top, 0)
            part[...] = 0
    np.testing.assert_array_equal(stored(folder), pixels)
    assert not list(folder.rglob("*.partial"))


def test_too_large_chunks_are_refused(host_cupy):
    chunks = np.broadcast_to(np.uint8(0), (1, LARGEST_BLOCK + 1))
    with pytest.raises(UnsupportedSlideError, match="at most 16 MiB"):
        Lz4Encoder()(chunks)


def test_without_nvcomp(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    with pytest.raises(MissingPackageError, match="pip install nvidia-nvcomp-cu12"):
        Lz4Encoder()
